"""Tests of the native library on 64-bit Arm. The library is cross-compiled and runs in an emulator.

The tests run the library's C++ tests in the emulator. They also run the demo in the emulator and on
this processor, and compare the results. The tests need g++-aarch64-linux-gnu and qemu-user. The
demo also needs ONNX Runtime's library for aarch64. `make aarch64` downloads it, or
$DLM_AARCH64_ONNXRUNTIME names another copy.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from test_native import (
    EXAMPLE,
    HEADER,
    NEW_TOKENS,
    PROMPT,
    REPOSITORY,
    SOURCE,
    STRICT,
    compile_c,
    run,
    succeed,
    tool,
)

from dlm_export.build import BuildOptions, build
from dlm_runtime.abi import native as _native

BUILD = REPOSITORY / "build" / "native-aarch64"
SYSROOT = Path("/usr/aarch64-linux-gnu")
CROSS, CROSS_C = "aarch64-linux-gnu-g++", "aarch64-linux-gnu-gcc"
HERE = Path(_native.library()._name).parent  # the folder of the native library for this processor
DEMO = REPOSITORY / "examples"
# The number of held-out commands to answer, and the preset. The number is small, because an
# emulated pass in fp32 takes seconds.
PROMPTS, PRESET = (
    {"fp32": 20, "int8": 50},
    "fast-dllm",
)
# On the two processors, kernels add numbers in different orders. In INT8, such a difference can
# round an activation to the next code, which changes the inputs of all later layers. Logits had
# magnitudes up to 22. They differed by at most 2.7e-5 in fp32, and by at most 0.43 in INT8 (median
# 0.011).
TOLERANCE, MEDIAN = {"fp32": 1e-4, "int8": 1.0}, {"fp32": 1e-5, "int8": 0.05}
# The smallest accepted share of commands for which both processors give the same answer with the
# same number of passes.
AGREEING = {"fp32": 1.0, "int8": 0.95}
# The content of /proc/cpuinfo on a Neoverse N1. ONNX Runtime reads /proc/cpuinfo when it is loaded.
# In qemu, ONNX Runtime would read the file of this x86-64 machine, and crash.
CPUINFO = """processor\t: {}
BogoMIPS\t: 50.00
Features\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp ssbs
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x3
CPU part\t: 0xd0c
CPU revision\t: 1

"""


@pytest.fixture(scope="session")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command that runs an aarch64 program in the emulator.

    The emulated processor has dot-product instructions, and as few other extensions as possible.
    """
    found = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
    if found is None or shutil.which(CROSS) is None:
        pytest.skip("g++-aarch64-linux-gnu or qemu-user is not installed")
    root = tmp_path_factory.mktemp("aarch64")
    (root / "lib").symlink_to(SYSROOT / "lib")
    (root / "proc").mkdir()
    (root / "proc" / "cpuinfo").write_text(
        "".join(CPUINFO.format(i) for i in range(os.cpu_count() or 1))
    )
    return [found, "-cpu", "neoverse-n1", "-L", str(root)]


def compiled(*targets: str) -> Path:
    """Build ``targets`` with the cross compiler, and return the build folder."""
    toolchain = f"-DCMAKE_TOOLCHAIN_FILE={SOURCE / 'cmake' / 'aarch64-linux-gnu.cmake'}"
    options = [
        "-G",
        "Ninja",
        f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}",
        "-DDLM_BUILD_TESTS=ON",
        toolchain,
    ]
    succeed(tool("cmake"), "-S", SOURCE, "-B", BUILD, *options)
    succeed(tool("cmake"), "--build", BUILD, "--target", *targets)
    return BUILD


@pytest.mark.slow
def test_kernels_for_aarch64_agree_with_plain_loops(emulator: list[str]) -> None:
    out = succeed(*emulator, compiled("kernels_test") / "kernels_test")
    assert out.startswith("neon-dotprod\n")
    assert re.search(r"^[1-9]\d* passed, 0 failed$", out, flags=re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["native_test", "runner_test", "constraint_test", "text_test"])
def test_native_tests_pass_on_aarch64(emulator: list[str], name: str) -> None:
    assert re.search(
        r"^[1-9]\d* passed, 0 failed$",
        succeed(*emulator, compiled("native_tests") / "native_tests", name),
        flags=re.MULTILINE,
    )


@pytest.mark.slow
def test_a_request_on_aarch64_survives_the_failure_of_each_of_its_allocations(
    emulator: list[str],
) -> None:
    out = succeed(*emulator, compiled("memory_test") / "memory_test")
    assert re.search(r"^[1-9]\d* allocations failed, 0 claims did$", out, re.MULTILINE)


# ---- The demo ----


@pytest.fixture(scope="session")
def onnxruntime() -> Path:
    """The path of ONNX Runtime's library for aarch64."""
    chosen = os.environ.get("DLM_AARCH64_ONNXRUNTIME")
    fetched = (REPOSITORY / "build" / "aarch64" / "onnxruntime").glob(
        "onnxruntime/capi/libonnxruntime.so*"
    )
    found = Path(chosen) if chosen else next(iter(sorted(fetched)), None)
    if found is None:
        pytest.skip("ONNX Runtime's library for aarch64 is not there: `make aarch64` fetches it")
    return found


@pytest.fixture(scope="session")
def bundles(demo_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    int8 = tmp_path_factory.mktemp("int8") / "demo"
    build(DEMO / "demo-denoiser", int8, BuildOptions(precision="int8", check_parity=False))
    return {"fp32": demo_bundle, "int8": int8}


def for_aarch64(output: Path, source: Path) -> Path:
    """Compile a C program and link it with the library of the cross build."""
    folder = compiled("dlm_runtime")
    link = ["-L", str(folder), "-ldlm_runtime", f"-Wl,-rpath,{folder}"]
    succeed(CROSS_C, *STRICT, "-I", HEADER.parent, source, "-o", output, *link)
    return output


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_the_c_example_answers_on_aarch64(
    emulator: list[str],
    bundles: dict[str, Path],
    precision: str,
    onnxruntime: Path,
    tmp_path: Path,
) -> None:
    arguments = [bundles[precision], str(NEW_TOKENS), PROMPT]
    here = run(compile_c(tmp_path / "here", EXAMPLE / "generate.c", HERE), *arguments)
    there = run(
        *emulator,
        for_aarch64(tmp_path / "there", EXAMPLE / "generate.c"),
        *arguments,
        DLM_ONNXRUNTIME=str(onnxruntime),
    )
    assert there.returncode == 0, there.stderr
    assert (there.stdout, there.stderr.split()[0]) == (here.stdout, here.stderr.split()[0])


@dataclass(frozen=True)
class Answers:
    """The results of one run of the demo.

    For each prompt, ``lines`` contains the number of passes and the text. ``logits`` ``[prompts,
    masks, V]`` contains the logits of the first pass for each prompt.
    """

    lines: list[str]
    logits: np.ndarray
    engine: str


def answers(
    command: list[str], bundle: Path, prompts: list[str], folder: Path, **variables: str
) -> Answers:
    given, logits = folder / "prompts", folder / "logits"
    given.write_text("".join(f"{prompt}\n" for prompt in prompts))
    shell = f'"$@" < {given}'
    done = run(
        "sh",
        "-c",
        shell,
        "sh",
        *command,
        str(bundle),
        PRESET,
        str(NEW_TOKENS),
        str(logits),
        **variables,
    )
    assert done.returncode == 0, done.stderr
    values = np.fromfile(logits, np.float32).reshape(len(prompts), NEW_TOKENS, -1)
    return Answers(done.stdout.splitlines(), values, done.stderr.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_the_demo_answers_on_aarch64_as_on_this_processor(
    emulator: list[str],
    bundles: dict[str, Path],
    precision: str,
    onnxruntime: Path,
    tmp_path: Path,
) -> None:
    lines = (DEMO / "demo" / "heldout.jsonl").read_text().splitlines()[: PROMPTS[precision]]
    prompts = [json.loads(line)["prompt"] for line in lines]
    source = Path(__file__).with_name("prompts_driver.c")
    here = answers(
        [str(compile_c(tmp_path / "here", source, HERE))], bundles[precision], prompts, tmp_path
    )
    command = [*emulator, str(for_aarch64(tmp_path / "there", source))]
    there = answers(
        command, bundles[precision], prompts, tmp_path, DLM_ONNXRUNTIME=str(onnxruntime)
    )
    assert "neon-dotprod" in there.engine
    worst = np.abs(there.logits - here.logits).max()
    same = np.mean([one == other for one, other in zip(here.lines, there.lines, strict=True)])
    agreeing = (there.logits.argmax(-1) == here.logits.argmax(-1)).mean()
    told = f"{same:.1%} of {len(prompts)} answers and passes equal, best tokens {agreeing:.2%}, logits within {worst:.2g}"
    print(f"{precision}: {told}")
    assert worst < TOLERANCE[precision]
    assert np.median(np.abs(there.logits - here.logits)) < MEDIAN[precision]
    assert same >= AGREEING[precision]
