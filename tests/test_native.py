"""Tests of the native library with C programs.

C programs are linked with a library that is built with sanitizers, and with an installed library.

The tests reach every error path. The builds are kept in build/native-asan and build/native-release
(for slow tests), so only the first run compiles everything. Other test files use the library in the
Python package.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest
from click.testing import CliRunner

import dlm_runtime
from dlm_export.cli import main
from dlm_runtime import embedding
from dlm_runtime.abi import native as _native

REPOSITORY = Path(__file__).parent.parent
SOURCE = REPOSITORY / "runtime" / "native"
HEADER = SOURCE / "include" / "dlm_runtime.h"
EXAMPLE = REPOSITORY / "examples" / "embed"
BINDINGS = REPOSITORY / "runtime" / "bindings"
STRICT = ["-std=c99", "-Wall", "-Wextra", "-Werror", "-pedantic"]
SANITIZE = [
    "-g",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
    "-fno-omit-frame-pointer",
]
PRESENT = Path(_native.library()._name)  # the library of the installed package
LOADERS = {"ld-linux-x86-64", "ld-linux-aarch64"}
# A fake ONNX Runtime. Its version is the value of $ORT_DISABLE_TELEMETRY.
FAKE = (
    "#include <stdlib.h>\n"
    "static const char *version = 0;\n"
    '__attribute__((constructor)) static void look(void) { version = getenv("ORT_DISABLE_TELEMETRY"); }\n'
    'static const char *get_version(void) { return version ? version : "unset"; }\n'
    "static const struct { const void *(*api)(unsigned); const char *(*version)(void); } base = {0, get_version};\n"
    "const void *OrtGetApiBase(void) { return &base; }\n"
)
# The tests of the program native_tests that need no files, and longer runs of these tests.
NATIVE_TESTS = ("native_test", "draw_test", "runner_test", "constraint_test", "threads_test")
LONG_NATIVE_TESTS = (("draw_test", "5000"), ("runner_test", "all"), ("constraint_test", "10000"))
PROMPT, NEW_TOKENS = "turn on the kitchen lights", 40
# Search path for programs: first the Python environment (pip install cmake ninja), then $PATH.
TOOLS = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])


def run(*command: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program with additional environment variables. Does not check the exit code."""
    engine = _native.onnxruntime_library()
    known = {} if engine is None else {"DLM_ONNXRUNTIME": engine}
    environment = os.environ | known | {"PATH": TOOLS} | variables
    return subprocess.run(
        [str(part) for part in command],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )


def succeed(*command: str | Path, **variables: str) -> str:
    """Run a program that must exit with 0, and return its standard output.

    If the program fails, the test fails, and its message contains everything that the program
    printed.
    """
    done = run(*command, **variables)
    assert done.returncode == 0, (
        f"{' '.join(map(str, command))}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    )
    return done.stdout


def fake_onnxruntime(path: Path) -> Path:
    source = path.with_suffix(".c")
    source.write_text(FAKE)
    succeed(tool("gcc"), "-shared", "-fPIC", source, "-o", path)
    return path


def tool(name: str) -> str:
    """Return the path of a program that the tests need. Fails if it is not installed."""
    found = shutil.which(name, path=TOOLS)
    assert found is not None, (
        f"{name} is not installed. These tests need cmake, ninja (pip install cmake ninja), gcc and nm."
    )
    return found


def _header_folder(distribution: str, name: str) -> Path | None:
    """Return the folder of a C header in an installed Python package, or None if the package is not
    installed.
    """
    try:
        files = metadata.files(distribution) or []
    except metadata.PackageNotFoundError:
        return None
    return next((Path(str(file.locate())).parent for file in files if file.name == name), None)


def _header_option(option: str, distribution: str, name: str) -> list[str]:
    """Return the CMake argument that sets ``option`` to the folder of a C header.

    If the Python package with the header is not installed, the argument unsets ``option``.
    """
    folder = _header_folder(distribution, name)
    return [f"-U{option}" if folder is None else f"-D{option}={folder}"]


CUDA_HEADERS = _header_option("DLM_CUDA_INCLUDE_DIR", "nvidia-cuda-runtime", "cuda.h")
TENSORRT_HEADERS = _header_option("DLM_TENSORRT_INCLUDE_DIR", "kernel-lens", "NvInferRuntime.h")
HAS_MOCKS = CUDA_HEADERS[0].startswith("-D")
HAS_TENSORRT = TENSORRT_HEADERS[0].startswith("-D")


def build(folder: Path, *options: str) -> Path:
    # ONNXRUNTIME_C_API_DIR is unset, because CMake remembers the folder that an earlier run found,
    # even if this folder no longer exists.
    generator = [
        "-G",
        "Ninja",
        f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}",
        "-UONNXRUNTIME_C_API_DIR",
        "-DCMAKE_INSTALL_LIBDIR=lib",
    ]
    if (cache := shutil.which("ccache", path=TOOLS)) is not None:
        options = (*options, f"-DCMAKE_CXX_COMPILER_LAUNCHER={cache}")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open(
        "w"
        # The processes of pytest-xdist build in the same folder, but not at the same time.
    ) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        succeed(tool("cmake"), "-S", SOURCE, "-B", folder, *generator, *options)
        succeed(tool("cmake"), "--build", folder)
    return folder


def compile_c(output: Path, source: Path, library: Path, *flags: str) -> Path:
    """Compile a C program with strict warnings and link it with a library.

    The program stores the path of the library and loads it from there.
    """
    link = ["-L", str(library), "-ldlm_runtime", f"-Wl,-rpath,{library}"]
    succeed(
        tool("gcc"),
        *STRICT,
        *flags,
        "-I",
        HEADER.parent,
        source,
        "-o",
        output,
        *link,
        "-lm",
        "-pthread",
    )
    return output


def header() -> str:
    """Return the text of dlm_runtime.h without its comments."""
    return re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.DOTALL)


def header_functions() -> dict[str, tuple[str, int]]:
    """Return every function of the header, with its result type and its number of arguments."""
    found = re.findall(r"^DLM_API ([^;]*?)(dlm_\w+)\(([^;]*)\);", header(), flags=re.MULTILINE)
    return {
        name: (result.strip(), 0 if args == "void" else args.count(",") + 1)
        for result, name, args in found
    }


def header_fields(struct: str) -> list[str]:
    """Return the field names of a C struct in the header, in order."""
    body = re.search(rf"typedef struct {struct} {{(.*?)}} {struct};", header(), flags=re.DOTALL)
    assert body is not None, f"{struct} is not in {HEADER}"
    declarators = ",".join(body[1].split(";")[:-1]).split(",")
    return [re.findall(r"\w+", declarator)[-1] for declarator in declarators]


def kernels_without_processor() -> list[str]:
    """Return the CMake targets of the x86 kernels that this processor cannot run."""
    path = Path("/proc/cpuinfo")
    words = set(path.read_text().split()) if path.is_file() else set()
    needed = {
        "kernels_avx512": {"avx512_vnni"},
        "kernels_amx": {"avx512_vnni"},
        "kernels_avx_vnni": {"avx_vnni"},
        "kernels_avx_vnni_stand_in": {"avx512_vnni"},
    }
    return [name for name, flags in needed.items() if not flags <= words]


@pytest.fixture(scope="session")
def sanitized() -> Path:
    """A build folder with the library, including the TensorRT engine, and its C++ tests.

    AddressSanitizer and UndefinedBehaviorSanitizer check the code, except for null and misaligned
    pointers. These two checks take 30% of the time of compilation, AddressSanitizer finds most uses
    of null pointers, and ``make fuzz`` makes all checks. Tests that use this fixture run in ``make
    test-native``.
    """
    # Sanitizers make the compilation of kernels seven times slower.
    unchecked = f"-DDLM_UNCHECKED_KERNELS={';'.join(kernels_without_processor())}"
    return build(
        REPOSITORY / "build" / "native-asan",
        "-DCMAKE_BUILD_TYPE=Debug",
        "-DDLM_SANITIZE=address",
        "-DDLM_BUILD_TESTS=ON",
        "-DDLM_UNCHECKED_BEHAVIOR=null,alignment",
        unchecked,
        *TENSORRT_HEADERS,
        *CUDA_HEADERS,
    )


@pytest.fixture(scope="session")
def release() -> Path:
    """A build folder with an optimised library, with debug information for valgrind.

    Only slow tests use this library.
    """
    return build(
        REPOSITORY / "build" / "native-release",
        "-DCMAKE_BUILD_TYPE=RelWithDebInfo",
        "-DDLM_STATIC_LIBSTDCXX=ON",
    )


@dataclass(frozen=True)
class Request:
    """The arguments of an example program, and the answer that the Python API generates."""

    arguments: list[str]
    answer: str


@pytest.fixture(scope="session")
def request_of_example(demo_bundle: Path) -> Request:
    with dlm_runtime.open(demo_bundle) as bundle:
        text = bundle.generate(prompt=PROMPT, max_new_tokens=NEW_TOKENS).text
    assert text
    return Request([str(demo_bundle), str(NEW_TOKENS), PROMPT], text)


# ---- Under sanitizers ----


def check_tally(out: str) -> None:
    """Check the last line that a native test prints."""
    assert re.search(r"^[1-9]\d* passed, 0 failed$", out, re.MULTILINE), out[-4000:]


@pytest.mark.parametrize("arguments", [(name,) for name in NATIVE_TESTS], ids=" ".join)
def test_native_tests_pass_under_sanitizers(sanitized: Path, arguments: tuple[str, ...]) -> None:
    check_tally(succeed(sanitized / "native_tests", *arguments))


@pytest.mark.slow
@pytest.mark.parametrize("arguments", LONG_NATIVE_TESTS, ids=" ".join)
def test_long_native_tests_pass_under_sanitizers(
    sanitized: Path, arguments: tuple[str, ...]
) -> None:
    check_tally(succeed(sanitized / "native_tests", *arguments))


def test_every_error_path_of_the_abi_is_clean(
    sanitized: Path, llada_bundle: Path, tmp_path: Path
) -> None:
    driver = compile_c(
        tmp_path / "native_driver", Path(__file__).parent / "native_driver.c", sanitized, *SANITIZE
    )
    check_tally(succeed(driver, llada_bundle, ASAN_OPTIONS="detect_leaks=1"))


@pytest.fixture(scope="session")
def sanitized_example(sanitized: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_c(
        tmp_path_factory.mktemp("embed") / "generate", EXAMPLE / "generate.c", sanitized, *SANITIZE
    )


def test_c_example_generates_what_python_does_and_leaks_nothing(
    sanitized_example: Path, request_of_example: Request
) -> None:
    done = run(sanitized_example, *request_of_example.arguments, ASAN_OPTIONS="detect_leaks=1")
    assert done.returncode == 0, done.stderr
    assert done.stdout == request_of_example.answer + "\n"
    assert re.fullmatch(r"[1-9]\d* passes, \d+\.\d+ s\n", done.stderr)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "usage: generate BUNDLE NEW_TOKENS PROMPT"),
        (["{bundle}", "-1", "x"], 2, "usage: "),
        (["/no/such/bundle", "4", "x"], 1, "NOT_FOUND: /no/such/bundle: "),
        (
            ["{bundle}", "4", "x"],
            1,
            "UNSUPPORTED: this bundle has no compiled text: it has no tokenizer, ",
        ),
        (["{demo}", "4", b"\xff"], 1, "INVALID_ARGUMENT: the text is not UTF-8: byte 0 "),
    ],
    ids=[
        "nothing",
        "negative",
        "no bundle",
        "no tokenizer",
        "no UTF-8",
    ],
)
def test_c_example_names_every_error_and_frees_everything(
    sanitized_example: Path,
    llada_bundle: Path,
    demo_bundle: Path,
    arguments: list[str | bytes],
    code: int,
    message: str,
) -> None:
    named: dict[str | bytes, str] = {"{bundle}": str(llada_bundle), "{demo}": str(demo_bundle)}
    given = [os.fsdecode(named.get(argument, argument)) for argument in arguments]
    done = run(sanitized_example, *given, ASAN_OPTIONS="detect_leaks=1")
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


# ---- ONNX Runtime's telemetry ----


@pytest.mark.parametrize(("chosen", "seen"), [(None, "1"), ("0", "0")])
def test_onnxruntime_starts_with_telemetry_off_unless_the_program_says_otherwise(
    sanitized_example: Path,
    request_of_example: Request,
    tmp_path: Path,
    chosen: str | None,
    seen: str,
) -> None:
    """The test loads a fake ONNX Runtime.

    This fake library returns the value of $ORT_DISABLE_TELEMETRY as its version.
    """
    fake = fake_onnxruntime(tmp_path / "libonnxruntime.so")
    environment = [
        "env",
        "-u",
        "ORT_DISABLE_TELEMETRY",
        *([f"ORT_DISABLE_TELEMETRY={chosen}"] if chosen else []),
    ]
    done = run(
        *environment, sanitized_example, *request_of_example.arguments, DLM_ONNXRUNTIME=str(fake)
    )
    assert f"{fake} is ONNX Runtime {seen}, and 1.23 or newer is needed" in done.stderr


def test_onnxruntime_leaves_nothing_in_the_home_folder(
    sanitized_example: Path, request_of_example: Request, tmp_path: Path
) -> None:
    # ONNX Runtime disables telemetry if the variable CI is set, as on a build server. Unset CI, so
    # that only this project can disable telemetry.
    clean = [
        "env",
        *(
            part
            for name in ("ORT_DISABLE_TELEMETRY", "CI", "XDG_CACHE_HOME")
            for part in ("-u", name)
        ),
    ]
    succeed(*clean, sanitized_example, *request_of_example.arguments, HOME=str(tmp_path))
    assert list(tmp_path.iterdir()) == []


# ---- The ABI ----


def test_library_exports_the_functions_of_its_header_and_the_entry_for_operators_alone() -> None:
    listing = succeed(tool("nm"), "-D", "--defined-only", "--format=posix", PRESENT)
    for_onnxruntime = "RegisterCustomOps"  # ONNX Runtime searches for a function with this name
    assert sorted(line.split()[0] for line in listing.splitlines()) == sorted(
        [*header_functions(), for_onnxruntime]
    )


def test_every_function_of_the_header_is_declared_to_ctypes() -> None:
    functions = header_functions()
    assert len(functions) > 20
    declared = _native.HEADER.functions
    assert sorted(declared) == sorted(functions)
    results = {
        "dlm_status": ctypes.c_int32,
        "int32_t": ctypes.c_int32,
        "uint32_t": ctypes.c_uint32,
        "const char*": ctypes.c_char_p,
        "void": None,
    }
    for name, (result, count) in functions.items():
        if result in results:
            assert declared[name][0] is results[result], name
        else:  # other types, such as const dlm_denoiser*
            pointed = result.removeprefix("const ").removesuffix("*")
            assert declared[name][0] is ctypes.POINTER(_native.HEADER.structs[pointed]), name
        assert len(declared[name][1]) == count, name


def test_ctypes_structs_are_laid_out_as_c_lays_them_out(tmp_path: Path) -> None:
    structs = re.findall(r"typedef struct (\w+) {", header())
    assert sorted(structs) == sorted(_native.HEADER.structs)
    lines, expected = [], []
    for name, struct in _native.HEADER.structs.items():
        fields = header_fields(name)
        assert [field[0] for field in struct._fields_] == fields, name
        lines.append(f'  printf("{name} %zu\\n", sizeof({name}));')
        expected.append(f"{name} {ctypes.sizeof(struct)}")
        for field in fields:
            place = getattr(struct, field)
            lines.append(
                f'  printf("{name}.{field} %zu %zu\\n", offsetof({name}, {field}), sizeof((({name} *)0)->{field}));'
            )
            expected.append(f"{name}.{field} {place.offset} {place.size}")
    lines.append('  printf("DLM_ABI_VERSION %d\\n", DLM_ABI_VERSION);')
    expected.append(f"DLM_ABI_VERSION {_native.ABI_VERSION}")
    source = tmp_path / "layout.c"
    source.write_text(
        "\n".join(
            [
                "#include <stdio.h>",
                '#include "dlm_runtime.h"',
                "int main(void) {",
                *lines,
                "  return 0;",
                "}",
            ]
        )
    )
    succeed(tool("gcc"), *STRICT, "-I", HEADER.parent, source, "-o", tmp_path / "layout")
    assert succeed(tmp_path / "layout").splitlines() == expected


@pytest.mark.slow
def test_function_slots_agree_with_the_official_onnxruntime_header(release: Path) -> None:
    cache = (release / "CMakeCache.txt").read_text()
    found = re.search(r"^ONNXRUNTIME_C_API_DIR:PATH=(.*)$", cache, flags=re.MULTILINE)
    assert found is not None
    if found[1].endswith("-NOTFOUND"):
        pytest.skip(
            "onnxruntime_c_api.h is neither in $ONNXRUNTIME_INCLUDE_DIR nor on the system (Debian: libonnxruntime-dev)"
        )
    # The source of this object file only contains static assertions. If the object file exists, the
    # assertions hold.
    assert list(release.glob("CMakeFiles/ort_slots_check.dir/**/*.o"))


# ---- Installed ----


def _needed(library: Path) -> set[str]:
    """Return the shared libraries that a library or program needs."""
    return set(re.findall(r"\(NEEDED\).*\[(.+)\]", succeed(tool("readelf"), "-d", library)))


def test_package_brings_what_a_compiler_needs() -> None:
    prefix = embedding.prefix()
    files = {
        str(path.relative_to(prefix))
        for folder in ("include", "lib")
        for path in (prefix / folder).rglob("*")
    }
    expected = {"libdlm_runtime.a", "pkgconfig/dlm_runtime.pc", "pkgconfig/dlm_runtime-static.pc"}
    assert files >= {
        f"lib/{name}"
        for name in (*expected, "cmake/dlm_runtime/dlm_runtimeConfig.cmake", PRESENT.name)
    }
    assert (prefix / "include" / "dlm_runtime.h").read_bytes() == HEADER.read_bytes()
    soname = re.search(r"\(SONAME\).*\[(.+)\]", succeed(tool("readelf"), "-d", PRESENT))
    assert soname is not None
    assert soname[1] == f"libdlm_runtime.so.{_native.ABI_VERSION}"
    assert {name.split(".so")[0] for name in _needed(PRESENT)} <= {
        "libstdc++",
        "libm",
        "libgcc_s",
        "libc",
        "libdl",
        *LOADERS,
    }
    assert PRESENT.stat().st_size < 2_600_000


def test_onnxruntime_is_found_beside_the_library(demo_bundle: Path, tmp_path: Path) -> None:
    library = shutil.copy(PRESENT, tmp_path)
    fake_onnxruntime(tmp_path / "libonnxruntime.so.1")
    flags = ["-I", str(HEADER.parent), str(library), f"-Wl,-rpath,{tmp_path}"]
    succeed(tool("gcc"), *STRICT, EXAMPLE / "generate.c", *flags, "-o", tmp_path / "generate")
    done = run("env", "-u", "DLM_ONNXRUNTIME", tmp_path / "generate", demo_bundle, "4", PROMPT)
    assert "libonnxruntime.so.1 is ONNX Runtime 1, and 1.23 or newer is needed" in done.stderr


def test_a_program_linked_with_static_says_that_it_cannot_load_an_engine(
    demo_bundle: Path, tmp_path: Path
) -> None:
    flags = shlex.split(f"{embedding.cflags()} {embedding.libs(static=True)}")
    program = tmp_path / "generate"
    # The linker warns that dlopen needs shared libraries.
    succeed(tool("gcc"), "-static", EXAMPLE / "generate.c", *flags, "-o", program)
    done = run(program, demo_bundle, "4", PROMPT)
    assert done.returncode == 1
    assert "this program is linked with -static, so it cannot load ONNX Runtime" in done.stderr


def test_static_library_shows_a_program_the_abi_and_nothing_else() -> None:
    listing = succeed(
        tool("nm"),
        "-g",
        "--defined-only",
        "--format=posix",
        embedding.prefix() / "lib" / "libdlm_runtime.a",
    )
    names = [words[0] for line in listing.splitlines() if len(words := line.split()) > 1]
    assert sorted(names) == sorted([*header_functions(), "RegisterCustomOps"])


def test_static_library_keeps_its_names_from_a_programs_own(
    demo_bundle: Path, tmp_path: Path
) -> None:
    """The program links the static library, and defines a function and a class whose names also
    occur in the library.

    The program also uses templates of the C++ standard library that the library uses.
    """
    source = tmp_path / "names.cc"
    source.write_text(
        "#include <dlm_runtime.h>\n#include <cstdio>\n#include <map>\n#include <string>\n#include <vector>\n"
        'namespace dlm { void fail(int, const char*, ...) { std::puts("mine"); } struct Engine { virtual ~Engine(); };\n'
        'Engine::~Engine() { std::puts("my engine"); } }\n'
        "int main(int, char** arguments) {\n"
        "  std::map<std::string, std::vector<int>> many; many[arguments[1]].push_back(1);\n"
        '  { dlm::Engine engine; }\n  dlm::fail(1, "");\n  char why[512];\n  dlm_bundle* bundle;\n'
        '  std::puts(dlm_status_name(dlm_bundle_open("/nowhere", nullptr, why, sizeof why, &bundle)));\n'
        "  std::puts(dlm_status_name(dlm_bundle_open(arguments[1], nullptr, why, sizeof why, &bundle)));\n"
        "  dlm_bundle_destroy(bundle);\n}\n"
    )
    flags = shlex.split(f"{embedding.cflags()} {embedding.libs(static=True)}")
    succeed(tool("g++"), "-std=c++17", source, *flags, "-o", tmp_path / "names")
    assert succeed(tmp_path / "names", demo_bundle).split("\n") == [
        "my engine",
        "mine",
        "NOT_FOUND",
        "OK",
        "",
    ]


@pytest.mark.parametrize("how", ["shared", "static"])
def test_embed_command_says_how_the_example_is_built(
    request_of_example: Request, tmp_path: Path, how: str
) -> None:
    asked = ["embed", "--cflags", "--libs", *(["--static"] if how == "static" else [])]
    flags = shlex.split(CliRunner().invoke(main, asked, catch_exceptions=False).stdout)
    succeed(tool("gcc"), *STRICT, EXAMPLE / "generate.c", *flags, "-o", tmp_path / "generate")
    assert (
        succeed(tmp_path / "generate", *request_of_example.arguments)
        == request_of_example.answer + "\n"
    )
    assert (PRESENT.name in _needed(tmp_path / "generate")) == (how == "shared")


def test_embed_command_prints_each_path_and_all_of_them() -> None:
    def told(*options: str) -> str:
        return CliRunner().invoke(main, ["embed", *options], catch_exceptions=False).output

    everything = json.loads(told("--json"))
    assert told("--prefix").strip() == everything["prefix"] == str(embedding.prefix())
    assert Path(told("--engine").strip()).is_file()
    assert (Path(told("--cmake-dir").strip()) / "dlm_runtimeConfig.cmake").is_file()
    assert (Path(told("--pkg-config-dir").strip()) / "dlm_runtime.pc").is_file()
    assert "--static says how to link: give --libs with it" in told("--static")
    assert "pkg config dir" in told()


@pytest.mark.parametrize("name", ["dlm_runtime", "dlm_runtime-static"])
def test_pkg_config_file_builds_the_example(
    request_of_example: Request, tmp_path: Path, name: str
) -> None:
    pkg_config = shutil.which("pkg-config", path=TOOLS)
    if pkg_config is None:
        pytest.skip("pkg-config is not installed")
    folder = embedding.prefix() / "lib"
    flags = succeed(
        pkg_config, "--cflags", "--libs", name, PKG_CONFIG_PATH=str(folder / "pkgconfig")
    ).split()
    succeed(tool("gcc"), *STRICT, EXAMPLE / "generate.c", *flags, "-o", tmp_path / "generate")
    assert (
        succeed(tmp_path / "generate", *request_of_example.arguments)
        == request_of_example.answer + "\n"
    )


def test_a_parallel_build_with_makefiles_waits_for_the_objects(tmp_path: Path) -> None:
    """The test only checks the order of the build steps.

    A fake compiler copies an empty object file instead of compiling.
    """
    empty, launcher = tmp_path / "empty.o", tmp_path / "launcher"
    succeed(tool("gcc"), "-c", "-x", "c", "-fPIC", "/dev/null", "-o", empty)
    launcher.write_text(
        f'#!/bin/sh\nsleep 0.02\nwhile [ "$1" != -o ]; do shift; done\ncp {shlex.quote(str(empty))} "$2"\n'
    )
    launcher.chmod(0o755)
    options = [
        "-G",
        "Unix Makefiles",
        f"-DCMAKE_MAKE_PROGRAM={tool('make')}",
        "-DCMAKE_CXX_COMPILER=g++",
    ]
    succeed(
        tool("cmake"),
        "-S",
        SOURCE,
        "-B",
        tmp_path / "b",
        *options,
        f"-DCMAKE_CXX_COMPILER_LAUNCHER={launcher}",
    )
    succeed(tool("cmake"), "--build", tmp_path / "b", "-j2")
    assert (tmp_path / "b" / "libdlm_runtime.a").is_file()


def test_cmake_package_builds_the_example(request_of_example: Request, tmp_path: Path) -> None:
    generator = [
        "-G",
        "Ninja",
        f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}",
        f"-DCMAKE_PREFIX_PATH={embedding.prefix()}",
    ]
    succeed(tool("cmake"), "-S", EXAMPLE, "-B", tmp_path, *generator)
    succeed(tool("cmake"), "--build", tmp_path)
    assert (
        succeed(tmp_path / "generate", *request_of_example.arguments)
        == request_of_example.answer + "\n"
    )


@pytest.mark.slow
def test_a_project_with_targets_of_its_own_can_contain_the_library(tmp_path: Path) -> None:
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.20)\nproject(app C CXX)\n"
        "add_library(core INTERFACE)\nadd_library(kernels INTERFACE)\n"
        f'add_subdirectory("{SOURCE}" native)\n'
        "add_executable(app app.c)\n"
        "target_link_libraries(app PRIVATE dlm::dlm_runtime dlm::dlm_runtime_static)\n"
    )
    (tmp_path / "app.c").write_text("int main(void) { return 0; }\n")
    succeed(tool("cmake"), "-S", tmp_path, "-B", tmp_path / "build")


@pytest.mark.slow
def test_what_cmake_installs_without_python_is_whole(
    release: Path, request_of_example: Request, tmp_path: Path
) -> None:
    prefix = tmp_path / "prefix"  # the build was configured for a different prefix
    succeed(tool("cmake"), "--install", release, "--prefix", prefix)
    library = prefix / "lib" / "libdlm_runtime.so"
    version = re.search(
        r"project\(dlm_runtime VERSION ([0-9.]+)", (SOURCE / "CMakeLists.txt").read_text()
    )
    assert version is not None
    assert library.resolve().name == f"libdlm_runtime.so.{version[1]}"
    assert (prefix / "lib" / PRESENT.name).is_symlink()
    # libstdc++ is linked statically, as the option requires
    assert "libstdc++.so.6" not in _needed(library)
    flags = [
        "-I",
        str(prefix / "include"),
        "-L",
        str(prefix / "lib"),
        "-ldlm_runtime",
        f"-Wl,-rpath,{prefix / 'lib'}",
    ]
    succeed(tool("gcc"), *STRICT, EXAMPLE / "generate.c", *flags, "-o", tmp_path / "generate")
    assert (
        succeed(tmp_path / "generate", *request_of_example.arguments)
        == request_of_example.answer + "\n"
    )


@pytest.mark.slow
def test_valgrind_finds_no_error_and_no_leak(
    release: Path, request_of_example: Request, tmp_path: Path
) -> None:
    valgrind = shutil.which("valgrind", path=TOOLS)
    if valgrind is None:
        pytest.skip("valgrind is not installed")
    example = compile_c(tmp_path / "generate", EXAMPLE / "generate.c", release, "-g")
    suppressions = Path(__file__).parent / "native_valgrind.supp"
    leaks = ["--leak-check=full", "--errors-for-leak-kinds=definite,indirect"]
    command = [
        valgrind,
        "--error-exitcode=99",
        f"--suppressions={suppressions}",
        *leaks,
        str(example),
    ]
    assert succeed(*command, *request_of_example.arguments) == request_of_example.answer + "\n"
