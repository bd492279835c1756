"""Tests of draws and guidance on a GPU, without a GPU.

The mock of CUDA runs the runtime's kernel on the host. The callback engine, with which the tests
compare canvases, draws and guides with the code for the CPU.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from test_native import HAS_MOCKS, run, sanitized, succeed  # noqa: F401
from test_native_tensorrt import (
    NOISE,
    VOCABULARY,
    WIDTH,
    Drive,
    drive,  # noqa: F401
    in_python,
    write_bundle,
)
from test_providers import CUDA, bundle_of, graph
from test_row_choice import mock_bundle

from dlm_runtime import providers

# ruff: noqa: F811
pytestmark = pytest.mark.skipif(
    not HAS_MOCKS, reason="CUDA's headers are not installed: pip install nvidia-cuda-runtime"
)

SAMPLE = {"temperature": 8}
CASES: list[dict[str, Any]] = [
    SAMPLE | {"cache": "dual"},
    SAMPLE | {"cache": "prefix", "score": "entropy", "commit": "entropy_bound"},
    SAMPLE | {"cache": "dual", "top_k": 5, "top_p": 9, "score_of": "draw"},
    SAMPLE | {"cache": "none", "score": "margin", "score_of": "draw", "temperature": 30},
    SAMPLE
    | {"cache": "none", "score": "entropy", "score_of": "draw", "top_p": 4, "remask": "edit"},
]
GUIDED: list[dict[str, Any]] = [
    {"cache": "dual", "cfg_scale": 5},
    {"cache": "none", "cfg_scale": 20, "score": "entropy"},
    {"cache": "none", "cfg_scale": 5, "score": "margin", "batch": 3, "max_batch": 3},
    SAMPLE | {"cache": "prefix", "cfg_scale": 5, "top_p": 9},
]
GEMMA = SAMPLE | NOISE | {"score_of": "draw"}


def _has_copied_logits(counts: Iterable[dict[str, int]]) -> bool:
    """Whether one of the mocks has copied logits to the host."""
    return any(each.get("logits_on_host") or each.get("pageable_copies") for each in counts)


def _conditioned(folder: Path) -> Path:
    return bundle_of(folder, graph(f"conditioning {WIDTH}", mask=VOCABULARY), conditioning=WIDTH)


@pytest.mark.parametrize(
    "options", [*CASES, *GUIDED, GEMMA, GEMMA | {"batch": 3, "max_batch": 3}], ids=str
)
def test_onnxruntime_draws_and_guides_on_the_device(
    tmp_path: Path, drive: Drive, options: dict[str, Any]
) -> None:
    made = _conditioned if "remask" in options and options["remask"] == "noise" else bundle_of
    told = drive(made(tmp_path / "bundle"), rounds=2, **CUDA, **options)
    assert told.all_same(), told.rounds
    assert told.counts[1]["cuLaunchKernel"] > 0
    assert not _has_copied_logits(told.counts)
    assert told.counts[1]["nvrtcCompileProgram"] == 1, "the kernel is compiled once"


@pytest.mark.parametrize("options", [*CASES, GEMMA, GEMMA | {"threads": 3}], ids=str)
def test_tensorrt_draws_on_the_device(
    tmp_path: Path, drive: Drive, options: dict[str, Any]
) -> None:
    conditioning = WIDTH if options.get("remask") == "noise" else 0
    bundle = write_bundle(tmp_path / "bundle", conditioning=conditioning)
    told = drive(bundle, rounds=3, **options)
    assert told.all_same(), told.rounds
    assert told.counts[2]["cuLaunchKernel"] > 0
    assert not _has_copied_logits(told.counts)
    if "threads" not in options:
        assert told.made("cuStreamSynchronize") == told.counts[2]["nfe"], "a pass waits once"


def test_passes_that_draw_are_not_captured(tmp_path: Path, drive: Drive) -> None:
    bundle = mock_bundle(tmp_path / "bundle")
    told = drive(bundle, cache="dual", cuda_graphs=1, **CUDA, **SAMPLE)
    assert told.all_same()
    assert not _has_copied_logits(told.counts)
    assert told.made("captured") == 0


PROGRAM = """
import json, random, sys
import dlm_runtime
draw = random.Random(5)
wanted = [
    {{"tokens": [draw.randrange(2, 40) for _ in range(draw.randrange(1, 30))], "max_new_tokens": 12}}
    | {{"seed": i, "block_length": 4, "cache": draw.choice(["none", "dual"])}}
    | draw.choice([{{}}, {{"temperature": 0.8}}, {{"cfg_scale": 0.5}}, {{"top_log_probs": {top}}}])
    for i in range(60)
]
with dlm_runtime.open(sys.argv[1], provider="cuda") as bundle:
    print(bundle.engine)
    with bundle.scheduler(max_running=8) as scheduler:
        jobs = [scheduler.submit(**each) for each in wanted]
        found = [job.result() for job in jobs]
        assert scheduler.stats.shares > 3 * scheduler.stats.passes
    print(json.dumps([[list(each.tokens), list(each.log_probs)] for each in found]))
"""


@pytest.mark.parametrize(
    ("unused", "top"),
    [([], 0), ([[40, 41], [43, 47]], 0), ([], 3)],
    ids=["all", "unused", "logits"],
)
def test_requests_that_share_passes_draw_the_same_on_the_device(
    tmp_path: Path, sanitized: Path, unused: list[list[int]], top: int
) -> None:
    """With top_log_probs = 3, some requests need logits on the host, so all draw there."""
    bundle = mock_bundle(tmp_path / "bundle", "candidates 40", unused_tokens=unused)
    results = []
    for compiler in ("libmock_cuda.so", "missing.so"):
        variables = {
            "DLM_ONNXRUNTIME": str(sanitized / "libmock_onnxruntime.so"),
            "DLM_NVRTC": str(sanitized / compiler),
        }
        _, found = in_python(PROGRAM.format(top=top), bundle, sanitized, **variables)
        results.append(json.loads(found))
    for device, host in zip(*results, strict=True):
        assert device[0] == host[0]
        assert device[1] == pytest.approx(host[1], rel=1e-6, nan_ok=True)


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({"DLM_NVRTC": "/no/such/library.so"}, "pip's onnxruntime-gpu[cuda] installs it"),
        ({"DLM_NVRTC": "libm.so.6"}, "libm.so.6 has no nvrtcCreateProgram"),
        (
            {"MOCK_CUDA_FAIL": "nvrtcCompileProgram:1"},
            "nvrtcCompileProgram failed for SM 120 (6): the kernel is bad",
        ),
        ({"MOCK_CUDA_FAIL": "cuModuleLoadData:1"}, "cuModuleLoadData failed"),
        ({"MOCK_CUDA_FAIL": "cuModuleGetFunction:1"}, "cuModuleGetFunction failed"),
    ],
    ids=str,
)
@pytest.mark.parametrize("options", [SAMPLE, {"cfg_scale": 5}], ids=str)
def test_without_the_kernel_logits_are_copied_and_the_log_says_so_once(
    tmp_path: Path,
    drive: Drive,
    variables: dict[str, str],
    sentence: str,
    options: dict[str, Any],
) -> None:
    told = drive(
        bundle_of(tmp_path / "bundle"), variables, cache="dual", rounds=2, **CUDA, **options
    )
    assert told.all_same()
    assert told.made("logits_on_host") == told.counts[1]["nfe"]
    (line,) = told.log
    assert line.startswith("draws and guidance run on the host, which copies all logits: ")
    assert sentence in line


def test_more_alternatives_than_candidates_need_logits_on_the_host(
    tmp_path: Path, drive: Drive
) -> None:
    bundle = bundle_of(tmp_path / "bundle")
    told = drive(bundle, cache="dual", top_log_probs=3, **CUDA, **SAMPLE)
    assert told.all_same()
    assert told.made("logits_on_host") == told.counts[0]["nfe"]
    assert "cuLaunchKernel" not in told.counts[0]


@pytest.mark.parametrize("call", ["cuLaunchKernel:2", "cuMemAlloc:2", "cuMemAlloc:3", "Run:2"])
def test_a_failure_while_drawing_ends_the_request_and_the_session_goes_on(
    tmp_path: Path, drive: Drive, call: str
) -> None:
    told = drive(
        bundle_of(tmp_path / "bundle"),
        {"MOCK_CUDA_FAIL": call},
        cache="dual",
        rounds=2,
        **CUDA,
        **SAMPLE,
    )
    assert told.rounds[0][0] == "ENGINE_FAILED"
    assert told.rounds[1] == ("OK", "same")


def test_logits_that_do_not_fit_into_the_device_are_named(tmp_path: Path, drive: Drive) -> None:
    memory = {"MOCK_CUDA_BYTES": "5000"}
    told = drive(
        bundle_of(tmp_path / "bundle"), memory, cache="none", new=40, block=40, **CUDA, **SAMPLE
    )
    assert told.rounds == [
        (
            "OUT_OF_MEMORY",
            "the logits of a pass need 1 MiB of the device, but 1 of its 1 MiB are free: choose a "
            "smaller block_length or max_batch",
        )
    ]


def test_nvrtc_compiles_the_kernel_for_all_gpus(sanitized: Path) -> None:
    """One GPU of each generation that CUDA 13 supports, from Turing to Blackwell."""
    try:
        files = metadata.files("nvidia-cuda-nvrtc") or []
    except metadata.PackageNotFoundError:
        pytest.skip("NVRTC is not installed: pip install nvidia-cuda-nvrtc")
    (library,) = (str(file.locate()) for file in files if file.name.startswith("libnvrtc.so."))
    capabilities = ["75", "87", "90", "120"]
    # NVRTC leaks memory. Under AddressSanitizer, it does not find its second library by itself.
    said = succeed(
        sanitized / "native_tests",
        *("draw_test", "compile", *capabilities),
        DLM_NVRTC=library,
        LD_LIBRARY_PATH=str(Path(library).parent),
        ASAN_OPTIONS="detect_leaks=0",
    )
    assert [line.split()[0] for line in said.splitlines()] == capabilities


def test_python_finds_nvrtc_in_its_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "nvidia" / "cu13" / "lib" / "libnvrtc.so.13"
    library.parent.mkdir(parents=True)
    library.touch()
    (library.parent / "libnvrtc-builtins.so.13.5").touch()
    loaded: list[str] = []
    monkeypatch.setattr(providers, "package_folders", lambda name: [tmp_path / name])
    monkeypatch.setattr(providers.ctypes, "CDLL", loaded.append)
    providers.load_compiler()
    assert loaded == [str(library)]
