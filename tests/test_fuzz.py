"""Tests of the native library: fuzz targets, allocations that fail, and races between threads.

The fuzz targets (``runtime/native/fuzz``) run on their seeds and on all inputs that once made a
target fail. If clang is installed, libFuzzer generates more inputs (docs/guides/developing.md).
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest
from test_native import REPOSITORY, SOURCE, TOOLS, build, check_tally, succeed, tool
from test_native import sanitized as sanitized  # a fixture

FUZZ = SOURCE / "fuzz"
TARGETS = sorted(path.stem.removeprefix("fuzz_") for path in FUZZ.glob("fuzz_*.cc"))


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the seed inputs of each fuzz target, and a dictionary for libFuzzer."""
    folder = tmp_path_factory.mktemp("seeds")
    succeed(sys.executable, FUZZ / "seeds.py", folder)
    return folder


@pytest.mark.parametrize("target", TARGETS)
def test_inputs_that_made_a_target_fail_do_not_any_more(
    sanitized: Path, seeds: Path, target: str
) -> None:
    folders = [folder for folder in (seeds / target, FUZZ / "found" / target) if folder.exists()]
    out = succeed(sanitized / f"fuzz_{target}", *folders, ASAN_OPTIONS="detect_leaks=1")
    assert out == f"{sum(len(list(folder.iterdir())) for folder in folders)} inputs\n"


@pytest.mark.slow
def test_new_inputs_find_nothing() -> None:
    """libFuzzer runs for a few seconds per target. ``make fuzz`` runs libFuzzer for longer."""
    if not any(
        shutil.which(name, path=TOOLS)
        for name in ("clang++", *(f"clang++-{n}" for n in range(14, 31)))
    ):
        pytest.skip("clang is not installed (Debian: clang)")
    out = succeed(sys.executable, FUZZ / "run.py", "--seconds", "5")
    assert len(re.findall(r"^\w+: [1-9][\d,]* executions", out, re.MULTILINE)) == len(TARGETS)


# ---- Memory that runs out ----


def allocations(folder: Path, *arguments: object) -> None:
    out = succeed(folder / "memory_test", *map(str, arguments), ASAN_OPTIONS="detect_leaks=1")
    assert re.search(r"^[1-9]\d* allocations failed, 0 claims did$", out, re.MULTILINE), out


def test_calls_survive_the_failure_of_any_allocation(sanitized: Path, demo_bundle: Path) -> None:
    allocations(sanitized, 101, demo_bundle)


@pytest.mark.slow
def test_calls_survive_the_failure_of_every_third_allocation(
    sanitized: Path, demo_bundle: Path
) -> None:
    allocations(sanitized, 3, demo_bundle)


# ---- Threads ----


@pytest.mark.slow
def test_threads_race_for_nothing() -> None:
    """This test runs under ThreadSanitizer."""
    options = ["-DCMAKE_BUILD_TYPE=RelWithDebInfo", "-DDLM_SANITIZE=thread", "-DDLM_BUILD_TESTS=ON"]
    folder = build(REPOSITORY / "build" / "native-tsan", *options)
    # newer kernels may place mappings at addresses that ThreadSanitizer needs
    setarch = tool("setarch")
    for arguments in (
        ("threads_test", "2000"),
        ("runner_test", "all"),
        ("native_test",),
        ("constraint_test",),
    ):
        out = succeed(
            setarch,
            "-R",
            folder / "native_tests",
            *arguments,
            TSAN_OPTIONS="halt_on_error=1:second_deadlock_stack=1",
        )
        check_tally(out)
