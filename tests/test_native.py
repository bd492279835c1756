"""The native library as C programs meet it: built with sanitizers, installed, linked, and walked down every error path.

Builds live in build/native-asan and build/native-release, so that only the first run compiles everything.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest

import dlm_runtime
from dlm_runtime import _native

REPOSITORY = Path(__file__).parent.parent
SOURCE = REPOSITORY / "runtime" / "native"
HEADER = SOURCE / "include" / "dlm_runtime.h"
EXAMPLE = REPOSITORY / "examples" / "embed"
STRICT = ["-std=c99", "-Wall", "-Wextra", "-Werror", "-pedantic"]
SANITIZE = ["-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]
PROMPT, NEW_TOKENS = "turn on the kitchen lights", 40
# Programs installed into the environment (pip install cmake ninja) come before the system's.
TOOLS = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
STRUCTS: dict[str, type[ctypes.Structure]] = {
    "dlm_denoiser": _native.Denoiser,
    "dlm_pass": _native.Pass,
    "dlm_policy": _native.Policy,
    "dlm_policy_field": _native.PolicyField,
    "dlm_kernel_set": _native.KernelSet,
    "dlm_open_options": _native.OpenOptions,
    "dlm_request": _native.Request,
    "dlm_step": _native.Step,
    "dlm_generate_options": _native.GenerateOptions,
    "dlm_stats": _native.Stats,
    "dlm_pass_counts": _native.PassCounts,
    "dlm_result": _native.Result,
    "dlm_scheduler_options": _native.SchedulerOptions,
    "dlm_scheduler_stats": _native.SchedulerStats,
    "dlm_message": _native.Message,
}


def run(*command: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program with environment variables changed; whether it succeeded is for the caller to see."""
    engine = _native.onnxruntime_library()
    known = {} if engine is None else {"DLM_ONNXRUNTIME": engine}
    environment = os.environ | known | {"PATH": TOOLS} | variables
    return subprocess.run([str(part) for part in command], env=environment, capture_output=True, text=True, timeout=600)


def succeed(*command: str | Path, **variables: str) -> str:
    """Standard output of a program that exits with 0; anything else fails the test with all that it printed."""
    done = run(*command, **variables)
    assert done.returncode == 0, f"{' '.join(map(str, command))}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def tool(name: str) -> str:
    """A program that these tests cannot do without."""
    found = shutil.which(name, path=TOOLS)
    assert found is not None, f"{name} is not installed. These tests need cmake, ninja (pip install cmake ninja), gcc and nm."
    return found


def _header_folder(distribution: str, name: str) -> Path | None:
    """Where an installed distribution keeps a C header; None if it is not installed."""
    try:
        files = metadata.files(distribution) or []
    except metadata.PackageNotFoundError:
        return None
    return next((Path(str(file.locate())).parent for file in files if file.name == name), None)


def _header_option(option: str, distribution: str, name: str) -> list[str]:
    """The CMake option that leads to a header; to nothing where its distribution is not installed."""
    folder = _header_folder(distribution, name)
    return [f"-U{option}" if folder is None else f"-D{option}={folder}"]


CUDA_HEADERS = _header_option("DLM_CUDA_INCLUDE_DIR", "nvidia-cuda-runtime", "cuda.h")
TENSORRT_HEADERS = _header_option("DLM_TENSORRT_INCLUDE_DIR", "kernel-lens", "NvInferRuntime.h")
HAS_MOCKS = CUDA_HEADERS[0].startswith("-D")
HAS_TENSORRT = TENSORRT_HEADERS[0].startswith("-D")


def build(folder: Path, *options: str) -> Path:
    # What earlier runs found out about headers is forgotten, as it may be gone.
    generator = [
        "-G",
        "Ninja",
        f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}",
        "-UONNXRUNTIME_C_API_DIR",
        "-DCMAKE_INSTALL_LIBDIR=lib",
    ]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:  # workers share the folder, and two builds at once break each other's files
        fcntl.flock(lock, fcntl.LOCK_EX)
        succeed(tool("cmake"), "-S", SOURCE, "-B", folder, *generator, *options)
        succeed(tool("cmake"), "--build", folder)
    return folder


def compile_c(output: Path, source: Path, library: Path, *flags: str) -> Path:
    """Compile a C program strictly and link it with the library in a build folder, to be found there at run time."""
    link = ["-L", str(library), "-ldlm_runtime", f"-Wl,-rpath,{library}"]
    succeed(tool("gcc"), *STRICT, *flags, "-I", HEADER.parent, source, "-o", output, *link, "-lm", "-pthread")
    return output


def header() -> str:
    """dlm_runtime.h without its comments."""
    return re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.DOTALL)


def header_functions() -> dict[str, tuple[str, int]]:
    """Every function of the header: what it returns, and how many arguments it takes."""
    found = re.findall(r"^DLM_API ([^;]*?)(dlm_\w+)\(([^;]*)\);", header(), flags=re.MULTILINE)
    return {name: (result.strip(), 0 if args == "void" else args.count(",") + 1) for result, name, args in found}


def header_fields(struct: str) -> list[str]:
    """The fields of a struct of the header, in order."""
    body = re.search(rf"typedef struct {struct} {{(.*?)}} {struct};", header(), flags=re.DOTALL)
    assert body is not None, f"{struct} is not in {HEADER}"
    declarators = ",".join(body[1].split(";")[:-1]).split(",")
    return [re.findall(r"\w+", declarator)[-1] for declarator in declarators]


@pytest.fixture(scope="session")
def sanitized() -> Path:
    """A build folder: the library and its tests under AddressSanitizer and UndefinedBehaviorSanitizer, TensorRT included."""
    options = ["-DCMAKE_BUILD_TYPE=Debug", "-DDLM_SANITIZE=ON", "-DDLM_BUILD_TESTS=ON"]
    return build(REPOSITORY / "build" / "native-asan", *options, *TENSORRT_HEADERS, *CUDA_HEADERS)


@pytest.fixture(scope="session")
def release() -> Path:
    """A build folder: the library as users get it, with debug information for valgrind."""
    return build(REPOSITORY / "build" / "native-release", "-DCMAKE_BUILD_TYPE=RelWithDebInfo")


@pytest.fixture(scope="session")
def prefix(release: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `cmake --install` put everything; not where the build was configured for."""
    folder = tmp_path_factory.mktemp("native") / "prefix"
    succeed(tool("cmake"), "--install", release, "--prefix", folder)
    return folder


@dataclass(frozen=True)
class Request:
    """What the example is asked, and what Python's answer to the same is."""

    arguments: list[str]
    answer: str


@pytest.fixture(scope="session")
def request_of_example(demo_bundle: Path) -> Request:
    with dlm_runtime.open(demo_bundle) as bundle:
        text = bundle.generate(prompt=PROMPT, max_new_tokens=NEW_TOKENS).text
    assert text
    return Request([str(demo_bundle), str(NEW_TOKENS), PROMPT], text)


# ---- Under sanitizers ----


def test_native_tests_pass_under_sanitizers(sanitized: Path) -> None:
    assert re.search(r"^[1-9]\d* passed, 0 failed$", succeed(sanitized / "native_test"), flags=re.MULTILINE)


def test_requests_that_share_passes_come_to_what_each_comes_to_alone_under_sanitizers(sanitized: Path) -> None:
    assert re.search(r"^[1-9]\d* passed, 0 failed$", succeed(sanitized / "scheduler_test"), flags=re.MULTILINE)


def test_constraints_are_read_and_kept_to_under_sanitizers(sanitized: Path) -> None:
    assert re.search(r"^[1-9]\d* passed, 0 failed$", succeed(sanitized / "constraint_test"), flags=re.MULTILINE)


def test_a_request_survives_the_failure_of_each_of_its_allocations(sanitized: Path) -> None:
    """Replaced ``operator new`` is what the library calls as well."""
    variables = {"ASAN_OPTIONS": "detect_leaks=1:alloc_dealloc_mismatch=0"}
    assert re.search(
        r"^[1-9]\d* allocations failed, 0 claims did$", succeed(sanitized / "memory_test", **variables), re.MULTILINE
    )


def test_every_error_path_of_the_abi_is_clean(sanitized: Path, llada_bundle: Path, tmp_path: Path) -> None:
    driver = compile_c(tmp_path / "native_driver", Path(__file__).parent / "native_driver.c", sanitized, *SANITIZE)
    out = succeed(driver, llada_bundle, ASAN_OPTIONS="detect_leaks=1")
    assert re.search(r"^[1-9]\d* passed, 0 failed$", out, flags=re.MULTILINE)


@pytest.fixture(scope="session")
def sanitized_example(sanitized: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_c(tmp_path_factory.mktemp("embed") / "generate", EXAMPLE / "generate.c", sanitized, *SANITIZE)


def test_c_example_generates_what_python_does_and_leaks_nothing(sanitized_example: Path, request_of_example: Request) -> None:
    done = run(sanitized_example, *request_of_example.arguments, ASAN_OPTIONS="detect_leaks=1")
    assert done.returncode == 0, done.stderr
    assert done.stdout == request_of_example.answer + "\n"
    assert re.fullmatch(r"[1-9]\d* passes, \d+\.\d+ s\n", done.stderr)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "usage: generate BUNDLE NEW_TOKENS PROMPT"),
        (["{bundle}", "many", "x"], 2, "usage: "),
        (["{bundle}", "-1", "x"], 2, "usage: "),
        (["{bundle}", "4"], 2, "usage: "),
        (["/no/such/bundle", "4", "x"], 1, "NOT_FOUND: /no/such/bundle: "),
        (["{bundle}", "4", "x"], 1, "UNSUPPORTED: this bundle holds no compiled text: it has no tokenizer, "),
        (["{demo}", "4", b"\xff"], 1, "INVALID_ARGUMENT: the text is no UTF-8: byte 0 "),
        (["{demo}", "100000", "x"], 1, "INVALID_ARGUMENT: a canvas of 100003 tokens (3 given and 100000 new) "),
    ],
    ids=["nothing", "no number", "negative", "no prompt", "no bundle", "no tokenizer", "no UTF-8", "too long"],
)
def test_c_example_names_every_error_and_frees_everything(
    sanitized_example: Path, llada_bundle: Path, demo_bundle: Path, arguments: list[str | bytes], code: int, message: str
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
    sanitized_example: Path, request_of_example: Request, tmp_path: Path, chosen: str | None, seen: str
) -> None:
    """The library that is loaded here is none, and calls itself by what it finds in the environment."""
    source = tmp_path / "fake.c"
    source.write_text(
        "#include <stdlib.h>\n"
        "static const char *version = 0;\n"
        '__attribute__((constructor)) static void look(void) { version = getenv("ORT_DISABLE_TELEMETRY"); }\n'
        'static const char *get_version(void) { return version ? version : "unset"; }\n'
        "static const struct { const void *(*api)(unsigned); const char *(*version)(void); } base = {0, get_version};\n"
        "const void *OrtGetApiBase(void) { return &base; }\n"
    )
    fake = tmp_path / "libonnxruntime.so"
    succeed(tool("gcc"), "-shared", "-fPIC", source, "-o", fake)
    environment = ["env", "-u", "ORT_DISABLE_TELEMETRY", *([f"ORT_DISABLE_TELEMETRY={chosen}"] if chosen else [])]
    done = run(*environment, sanitized_example, *request_of_example.arguments, DLM_ONNXRUNTIME=str(fake))
    assert f"{fake} is ONNX Runtime {seen}, and 1.20 or newer is needed" in done.stderr


def test_onnxruntime_leaves_nothing_in_the_home_folder(
    sanitized_example: Path, request_of_example: Request, tmp_path: Path
) -> None:
    # Where it finds itself on a build server it keeps to itself in any case.
    clean = ["env", *(part for name in ("ORT_DISABLE_TELEMETRY", "CI", "XDG_CACHE_HOME") for part in ("-u", name))]
    succeed(*clean, sanitized_example, *request_of_example.arguments, HOME=str(tmp_path))
    assert list(tmp_path.iterdir()) == []


# ---- The ABI ----


def test_library_exports_the_functions_of_its_header_and_the_entry_for_operators_alone(release: Path) -> None:
    listing = succeed(tool("nm"), "-D", "--defined-only", "--format=posix", release / "libdlm_runtime.so")
    for_onnxruntime = "RegisterCustomOps"  # the name that it looks for
    assert sorted(line.split()[0] for line in listing.splitlines()) == sorted([*header_functions(), for_onnxruntime])


def test_ctypes_table_covers_every_function_of_the_header() -> None:
    functions = header_functions()
    assert len(functions) > 20
    assert sorted(_native._SIGNATURES) == sorted(functions)
    results = {
        "dlm_status": ctypes.c_int32,
        "int32_t": ctypes.c_int32,
        "uint32_t": ctypes.c_uint32,
        "const char *": ctypes.c_char_p,
        "const dlm_policy_field *": ctypes.POINTER(_native.PolicyField),
        "const dlm_kernel_set *": ctypes.POINTER(_native.KernelSet),
        "const uint8_t *": ctypes.POINTER(ctypes.c_uint8),
        "const int32_t *": ctypes.POINTER(ctypes.c_int32),
        "void": None,
    }
    for name, (result, count) in functions.items():
        assert _native._SIGNATURES[name][0] is results[result], name
        assert len(_native._SIGNATURES[name][1]) == count, name


def test_ctypes_structs_are_laid_out_as_c_lays_them_out(tmp_path: Path) -> None:
    structs = re.findall(r"typedef struct (\w+) {", header())
    assert sorted(structs) == sorted(STRUCTS)
    lines, expected = [], []
    for name, struct in STRUCTS.items():
        fields = header_fields(name)
        assert [field[0] for field in struct._fields_] == fields, name
        lines.append(f'  printf("{name} %zu\\n", sizeof({name}));')
        expected.append(f"{name} {ctypes.sizeof(struct)}")
        for field in fields:
            place = getattr(struct, field)
            lines.append(f'  printf("{name}.{field} %zu %zu\\n", offsetof({name}, {field}), sizeof((({name} *)0)->{field}));')
            expected.append(f"{name}.{field} {place.offset} {place.size}")
    lines.append('  printf("DLM_ABI_VERSION %d\\n", DLM_ABI_VERSION);')
    expected.append(f"DLM_ABI_VERSION {_native.ABI_VERSION}")
    source = tmp_path / "layout.c"
    source.write_text(
        "\n".join(["#include <stdio.h>", '#include "dlm_runtime.h"', "int main(void) {", *lines, "  return 0;", "}"])
    )
    succeed(tool("gcc"), *STRICT, "-I", HEADER.parent, source, "-o", tmp_path / "layout")
    assert succeed(tmp_path / "layout").splitlines() == expected


def test_function_slots_agree_with_the_official_onnxruntime_header(release: Path) -> None:
    cache = (release / "CMakeCache.txt").read_text()
    found = re.search(r"^ONNXRUNTIME_C_API_DIR:PATH=(.*)$", cache, flags=re.MULTILINE)
    assert found is not None
    if found[1].endswith("-NOTFOUND"):
        pytest.skip("onnxruntime_c_api.h is neither in $ONNXRUNTIME_INCLUDE_DIR nor on the system (Debian: libonnxruntime-dev)")
    # Static assertions: where the object is, they hold. The library depends on it.
    assert list(release.glob("CMakeFiles/ort_slots_check.dir/**/*.o"))


# ---- Installed ----


def test_installed_tree_is_complete(prefix: Path) -> None:
    library = prefix / "lib" / "libdlm_runtime.so"
    files = {str(path.relative_to(prefix)) for path in prefix.rglob("*") if not path.is_dir()}
    version = re.search(r"project\(dlm_runtime VERSION ([0-9.]+)", (SOURCE / "CMakeLists.txt").read_text())
    assert version is not None
    assert files >= {"include/dlm_runtime.h", "lib/pkgconfig/dlm_runtime.pc", "lib/cmake/dlm_runtime/dlm_runtimeConfig.cmake"}
    assert library.resolve().name == f"libdlm_runtime.so.{version[1]}"
    soname = re.search(r"\(SONAME\).*\[(.+)\]", succeed(tool("readelf"), "-d", library))
    assert soname is not None
    assert soname[1] == "libdlm_runtime.so.0"
    assert (prefix / "lib" / soname[1]).exists()
    assert (prefix / "include" / "dlm_runtime.h").read_bytes() == HEADER.read_bytes()


def test_pkg_config_file_builds_the_example(prefix: Path, request_of_example: Request, tmp_path: Path) -> None:
    pkg_config = shutil.which("pkg-config", path=TOOLS)
    if pkg_config is None:
        pytest.skip("pkg-config is not installed")
    flags = succeed(pkg_config, "--cflags", "--libs", "dlm_runtime", PKG_CONFIG_PATH=str(prefix / "lib" / "pkgconfig")).split()
    succeed(tool("gcc"), *STRICT, EXAMPLE / "generate.c", *flags, "-o", tmp_path / "generate")
    out = succeed(tmp_path / "generate", *request_of_example.arguments, LD_LIBRARY_PATH=str(prefix / "lib"))
    assert out == request_of_example.answer + "\n"


def test_cmake_package_builds_the_example(prefix: Path, request_of_example: Request, tmp_path: Path) -> None:
    generator = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}", f"-DCMAKE_PREFIX_PATH={prefix}"]
    succeed(tool("cmake"), "-S", EXAMPLE, "-B", tmp_path, *generator)
    succeed(tool("cmake"), "--build", tmp_path)
    assert succeed(tmp_path / "generate", *request_of_example.arguments) == request_of_example.answer + "\n"


@pytest.mark.slow
def test_valgrind_finds_no_error_and_no_leak(release: Path, request_of_example: Request, tmp_path: Path) -> None:
    valgrind = shutil.which("valgrind", path=TOOLS)
    if valgrind is None:
        pytest.skip("valgrind is not installed")
    example = compile_c(tmp_path / "generate", EXAMPLE / "generate.c", release, "-g")
    suppressions = Path(__file__).parent / "native_valgrind.supp"
    leaks = ["--leak-check=full", "--errors-for-leak-kinds=definite,indirect"]
    command = [valgrind, "--error-exitcode=99", f"--suppressions={suppressions}", *leaks, str(example)]
    assert succeed(*command, *request_of_example.arguments) == request_of_example.answer + "\n"
