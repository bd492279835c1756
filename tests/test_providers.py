"""Tests of ONNX Runtime's GPU providers without a GPU.

The tests use sanitizers, and mock libraries of ONNX Runtime and of CUDA's driver. The program
cannot read the "device" memory of the mocks.

A mock denoiser computes its results from every byte that a pass reads. The tests compare its canvas
with the canvas of the same denoiser in ``from_callback``. The canvases are equal only if every byte
was copied to the right place on the device.
"""

from __future__ import annotations

import ctypes
import json
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from test_native import HAS_MOCKS, SOURCE, run, sanitized, tool  # noqa: F401
from test_native_tensorrt import (
    LAYERS,
    MASK,
    MIXED,
    NOISE,
    PORTS,
    TOP_K,
    VOCABULARY,
    WIDTH,
    Drive,
    drive,  # noqa: F401
    in_python,
    shown,
    write_bundle,
)

import dlm_runtime
from dlm_export.cli import main
from dlm_runtime import providers
from dlm_runtime.abi import native as _native

# ruff: noqa: F811
TYPES = {"float32": 1, "float16": 10, "bfloat16": 16}  # ONNXTensorElementDataType
GPU_PROVIDERS = {"cuda": "CUDA", "tensorrt": "TensorRT", "nv_tensorrt_rtx": "TensorRT-RTX"}
REGISTERED = (
    "TensorrtExecutionProvider",
    "CUDAExecutionProvider",
    "NvTensorRTRTXExecutionProvider",
)
CUDA = {"engine": "auto", "provider": "cuda"}

needs_mocks = pytest.mark.skipif(
    not HAS_MOCKS, reason="CUDA's headers are not installed: pip install nvidia-cuda-runtime"
)


def graph(
    *more: str,
    cache: str = "float16",
    layers: tuple[tuple[int, int], ...] = LAYERS,
    mask: int = MASK,
) -> str:
    """Return the content of a graph file for the mock ONNX Runtime library.

    The graph has three nodes, which all providers can run.
    """
    lines = ["mock-graph", f"denoiser {VOCABULARY} {mask} {TOP_K} {TYPES[cache]}"]
    lines += [f"layer {kv_heads} {head_size}" for kv_heads, head_size in layers]
    lines += [f"node mlp_{i} MatMul {' '.join(REGISTERED)}" for i in range(3)]
    return "\n".join([*lines, *more]) + "\n"


def bundle_of(folder: Path, device: str | None = None, **options: Any) -> Path:
    """Write a bundle for GPUs without engine files.

    ``device`` is the content of the graph for GPUs. The bundle's second graph is a placeholder.
    """
    same = {name: options[name] for name in ("cache", "layers") if name in options}
    return write_bundle(
        folder, {}, graphs=("judged", graph(**same) if device is None else device), **options
    )


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return bundle_of(tmp_path / "bundle")


# ---- The same passes, the same canvases ----


@needs_mocks
@pytest.mark.parametrize(
    ("made", "options"),
    [
        ({}, {"cache": "none", "commit": "threshold", "new": 30, "block": 32}),
        ({}, {"cache": "none", "batch": 3, "max_batch": 3}),
        ({}, {"cache": "prefix", "given": 0, "new": 40, "block": 16}),
        ({}, {"cache": "prefix", "refresh": 9, "given": 3, "new": 29, "block": 7}),
        (
            {},
            {"cache": "dual", "score": "entropy", "commit": "entropy_bound", "given": 1, "new": 3},
        ),
        ({}, {"cache": "dual", "given": 1, "new": 1}),
        (
            {},
            {"cache": "dual", "batch": 4, "max_batch": 2, "refresh": 8, "infill": 1, "given": 17},
        ),
        ({"cache": "float32"}, {"cache": "dual"}),
        ({"cache": "bfloat16"}, {"cache": "dual"}),
        ({"layers": MIXED}, {"cache": "dual", "refresh": 9, "infill": 1, "layers": shown(MIXED)}),
        ({"conditioning": WIDTH}, NOISE),
        ({"conditioning": WIDTH}, NOISE | {"batch": 3, "max_batch": 3}),
    ],
    ids=str,
)
def test_canvases_are_those_of_the_callback_engine(
    tmp_path: Path, drive: Drive, made: dict[str, Any], options: dict[str, Any]
) -> None:
    """Self-conditioning goes through host memory."""
    device = graph(f"conditioning {WIDTH}", mask=VOCABULARY) if "conditioning" in made else None
    told = drive(bundle_of(tmp_path / "bundle", device, **made), rounds=3, **CUDA, **options)
    assert told.opened == ("OK", "onnxruntime 1.31.1 (CUDA, Mock GPU, SM 12.0)")
    assert told.all_same(), told.rounds
    assert ("next_conditioning_on_host" in told.counts[0]) == ("conditioning" in made)


@needs_mocks
@pytest.mark.parametrize("provider", GPU_PROVIDERS)
def test_every_provider_runs_on_the_device_that_is_asked_for(
    bundle: Path, drive: Drive, provider: str
) -> None:
    variables = {"MOCK_CUDA_DEVICES": "3"}
    asked = {"engine": "onnxruntime", "provider": provider, "device": 2}
    told = drive(bundle, variables, cache="dual", **asked)
    name = f"onnxruntime 1.31.1 ({GPU_PROVIDERS[provider]}, Mock GPU, SM 12.0)"
    assert told.opened == ("OK", name)
    assert told.all_same()


@needs_mocks
def test_a_device_without_an_address_must_be_the_only_one(bundle: Path, drive: Drive) -> None:
    rtx = {"engine": "auto", "provider": "nv_tensorrt_rtx"}
    named = {"DLM_TENSORRT_RTX_PROVIDER": "libdl.so.2"}  # the loader finds this library
    assert drive(bundle, {"MOCK_ORT_NO_BUS": "1"} | named, cache="dual", **rtx).all_same()
    several = {"MOCK_ORT_NO_BUS": "1", "MOCK_CUDA_DEVICES": "2"}
    assert drive(bundle, several, device=1, **rtx).opened == (
        "UNSUPPORTED",
        "ONNX Runtime's TensorRT-RTX provider does not list the device 1 (Mock GPU, SM 12.0). It runs on RTX GPUs of "
        "SM 8.6, 8.9 and from 12.0 on, which must be visible in /sys/class/drm.",
    )


@needs_mocks
def test_compiled_kernels_are_kept_in_folders_that_only_the_user_can_write(
    tmp_path: Path, drive: Drive
) -> None:
    made = bundle_of(tmp_path / "bundle")
    other = bundle_of(tmp_path / "other", graph(f"node more MatMul {REGISTERED[2]}"))

    def kept(home: str, bundle: Path = made, **variables: str) -> list[Path]:
        (tmp_path / home).mkdir(exist_ok=True)
        places = {"XDG_CACHE_HOME": "relative", "HOME": str(tmp_path / home)}
        told = drive(bundle, places | variables, engine="auto", provider="nv_tensorrt_rtx")
        assert told.opened[0] == "OK"
        return sorted((tmp_path / home).rglob("kernels"))

    (first,) = kept("home")
    assert re.fullmatch(
        r"\.cache/dlm-export/[0-9a-f]{64}/kernels", str(first.relative_to(tmp_path / "home"))
    )
    assert [folder.stat().st_mode & 0o777 for folder in list(first.parents)[:3]] == [0o700] * 3
    assert kept("home") == [first]
    assert len(kept("home", other)) == 2
    assert len(kept("home", MOCK_RTX_VERSION="0.6.0")) == 3
    for writable in (".cache", ".cache/dlm-export", first.parent.relative_to(tmp_path / "home")):
        first.unlink()
        (tmp_path / "home" / writable).chmod(0o770)
        assert first not in kept("home")
        (tmp_path / "home" / writable).chmod(0o700)
        assert first in kept("home")
    assert kept("nowhere", HOME="relative") == []


@needs_mocks
@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({"DLM_TENSORRT_RTX_PROVIDER": "/no/such/library.so"}, "/no/such/library.so"),
        ({"MOCK_ORT_LIBRARIES": "libcudart.so.13: no such file"}, "libcudart.so.13: no such file"),
    ],
)
def test_a_provider_in_a_separate_library_says_what_to_install(
    bundle: Path, drive: Drive, variables: dict[str, str], sentence: str
) -> None:
    status, message = drive(bundle, variables, engine="auto", provider="nv_tensorrt_rtx").opened
    assert status == "ENGINE_MISSING"
    assert sentence in message
    assert "pip install onnxruntime-ep-nv-tensorrt-rtx-cu13" in message
    assert "second line" not in message


@needs_mocks
def test_a_bundle_without_a_graph_for_gpus_runs_the_one_it_has(
    tmp_path: Path, drive: Drive
) -> None:
    made = write_bundle(tmp_path / "bundle", {}, graphs=(graph(), "device"))
    manifest = json.loads((made / "manifest.json").read_text())
    del manifest["loop"]["graph"]["device_file"], manifest["loop"]["engines"]
    (made / "manifest.json").write_text(json.dumps(manifest))
    assert drive(made, cache="dual", **CUDA).all_same()


# ---- The work of a pass ----


@needs_mocks
def test_of_a_pass_nothing_but_candidates_comes_back(bundle: Path, drive: Drive) -> None:
    told = drive(bundle, cache="dual", rounds=2, **CUDA)
    passes = told.counts[1]["nfe"]
    for port in PORTS[: PORTS.index("entropy")]:
        assert told.made(f"{port}_on_host") == passes > 0
    assert not any(
        name.startswith(("past", "present", "logits", "entropy")) for name in told.counts[1]
    )
    assert drive(bundle, logits=9, given=12, **CUDA).made("logits_on_host") == 1


@needs_mocks
def test_kept_rows_are_moved_on_the_device_and_waited_for_once_a_block(
    bundle: Path, drive: Drive
) -> None:
    told = drive(bundle, cache="dual", given=5, new=24, block=8, rounds=2, **CUDA)
    assert told.made("cuMemcpy2DAsync") == (2 + 2 + 1) * 2 * len(LAYERS)
    assert told.made("cuStreamSynchronize") == 3
    row_bytes = (
        2 * 2 * sum(kv_heads * head_size for kv_heads, head_size in LAYERS)
    )  # bytes of the keys and values in float16
    assert told.counts[0]["cache_bytes"] == row_bytes * (29 + 21)
    assert told.made("cuMemAlloc") == 0, "a second request of that length needs no more memory"
    assert drive(bundle, cache="none", **CUDA).counts[0].get("cuMemAlloc", 0) == 0


# ---- Nodes that the provider does not run ----

LEFT = [
    *(f"node unpack_{i} BitShift TensorrtExecutionProvider" for i in range(5)),
    "node shape_of Shape",
    "node ours dlm_export:Int4Linear",
]
LISTED = "7 of 10 nodes: 5 BitShift (unpack_0, unpack_1, unpack_2, ...), 1 Shape (shape_of), 1 dlm_export.Int4Linear (ours)"


@needs_mocks
def test_nodes_left_to_the_cpu_are_refused_by_name_unless_fallback_is_allowed(
    tmp_path: Path, drive: Drive
) -> None:
    made = bundle_of(tmp_path / "bundle", graph(*LEFT))
    assert drive(made, **CUDA).opened == (
        "UNSUPPORTED",
        f"{made}/denoiser.device.onnx: ONNX Runtime's CUDA provider does not run {LISTED}. Build the bundle with "
        "--target cuda, or let the CPU run them (allow_fallback)",
    )
    told = drive(made, allow_fallback=1, cache="dual", **CUDA)
    name = f"onnxruntime 1.31.1 (CUDA, Mock GPU, SM 12.0; not run there: {LISTED})"
    assert told.opened == ("OK", name)
    assert told.all_same()


@needs_mocks
def test_nodes_that_only_compute_sizes_may_run_on_the_cpu(tmp_path: Path, drive: Drive) -> None:
    sizes = ("node sizes/Shape Shape", "node sizes/Concat.2 Concat")
    told = drive(bundle_of(tmp_path / "sizes", graph(*sizes)), cache="dual", **CUDA)
    assert told.opened == ("OK", "onnxruntime 1.31.1 (CUDA, Mock GPU, SM 12.0)")
    assert told.all_same()
    told = drive(bundle_of(tmp_path / "bundle", graph(*sizes, "node pass/Concat Concat")), **CUDA)
    assert told.opened[0] == "UNSUPPORTED"
    assert "does not run 1 of 6 nodes: 1 Concat (pass/Concat)." in told.opened[1]


@needs_mocks
def test_what_tensorrt_leaves_behind_goes_to_cuda_first_and_is_named_too(
    tmp_path: Path, drive: Drive
) -> None:
    made = bundle_of(tmp_path / "bundle", graph("node norm RMSNormalization CUDAExecutionProvider"))
    listed = "1 of 4 nodes: 1 RMSNormalization (norm)"
    told = drive(made, engine="auto", provider="tensorrt")
    assert told.opened[0] == "UNSUPPORTED"
    assert f"TensorRT provider does not run {listed}" in told.opened[1]
    told = drive(made, engine="auto", provider="tensorrt", allow_fallback=1, cache="dual")
    assert told.opened[0] == "OK"
    assert f"not run there: {listed}" in told.opened[1]
    assert told.all_same()


# ---- Missing libraries ----


@needs_mocks
@pytest.mark.parametrize(
    ("variables", "sentences"),
    [
        (
            {"MOCK_ORT_PROVIDERS": "AzureExecutionProvider,CPUExecutionProvider"},
            [
                "this ONNX Runtime 1.31.1 has no CUDAExecutionProvider, only AzureExecutionProvider, CPUExecutionProvider",
                "`pip install onnxruntime-gpu`",
            ],
        ),
        (
            {"MOCK_ORT_VERSION": "1.23.2"},
            ['is ONNX Runtime 1.23.2, and 1.24 or newer is needed for provider "cuda"', "-gpu"],
        ),
        (
            {"MOCK_ORT_LIBRARIES": "libcublasLt.so.13: cannot open shared object file"},
            [
                "ONNX Runtime's CUDA provider: 1 : FAIL : Failed to load library libonnxruntime_providers_cuda.so with error: "
                "libcublasLt.so.13: cannot open shared object file. ",
                "pip install 'onnxruntime-gpu[cuda,cudnn]'",
            ],
        ),
        (
            {"DLM_CUDA_LIBRARY": "/no/such/libcuda.so.1"},
            ["cannot load the CUDA driver", "NVIDIA's driver", 'provider "cpu"'],
        ),
        ({"MOCK_CUDA_DEVICES": "0"}, ["finds no device"]),
    ],
    ids=["provider", "version", "libraries", "driver", "device"],
)
def test_what_a_provider_lacks_is_said_with_what_to_install(
    bundle: Path, drive: Drive, variables: dict[str, str], sentences: list[str]
) -> None:
    status, message = drive(bundle, variables, **CUDA).opened
    assert status == "ENGINE_MISSING"
    for sentence in sentences:
        assert sentence in message
    assert "second line" not in message


@needs_mocks
@pytest.mark.parametrize(
    ("options", "status", "sentence"),
    [
        (
            {"engine": "auto", "provider": "gpu"},
            "UNSUPPORTED",
            "is not one of: cpu, cuda, tensorrt, n",
        ),
        ({**CUDA, "engine": "tensorrt"}, "INVALID_ARGUMENT", 'is for engine "onnxruntime"'),
        (
            {**CUDA, "device": 1},
            "INVALID_ARGUMENT",
            "device 1 is not one of the 1 that the CUDA driver finds (0..0)",
        ),
        ({"engine": "auto"}, "UNSUPPORTED", 'or run it on the CPU with engine "onnxruntime"'),
    ],
)
def test_what_cannot_be_chosen_is_refused(
    bundle: Path, drive: Drive, options: dict[str, Any], status: str, sentence: str
) -> None:
    opened = drive(bundle, **options).opened
    assert opened[0] == status
    assert sentence in opened[1]


# ---- Failures while it runs ----


@needs_mocks
@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        ("Run:1", "a pass of the denoiser failed: the kernel is bad second line"),
        ("Run:7", "a pass of the denoiser failed: the kernel is bad"),
        ("cuMemcpy2DAsync:1", "CUDA: cuMemcpy2DAsync failed: CUDA_ERROR_LAUNCH_FAILED (719)"),
        (
            "cuStreamSynchronize:2",
            "CUDA: cuStreamSynchronize failed: CUDA_ERROR_LAUNCH_FAILED (719)",
        ),
        ("cuMemGetInfo:1", "CUDA: cuMemGetInfo failed"),
        ("cuMemAlloc:1", "CUDA: cuMemAlloc of "),
        ("cuCtxPushCurrent:4", "CUDA: cuCtxPushCurrent failed"),
    ],
)
def test_a_failing_call_ends_the_request_and_the_session_goes_on(
    bundle: Path, drive: Drive, call: str, sentence: str
) -> None:
    told = drive(bundle, {"MOCK_CUDA_FAIL": call}, cache="dual", rounds=3, **CUDA)
    failed = [answer for answer in told.rounds if answer[0] != "OK"]
    assert len(failed) == 1, told.rounds
    assert failed[0][0] == "ENGINE_FAILED"
    assert sentence in failed[0][1]
    assert told.rounds[-1] == ("OK", "same")


@needs_mocks
def test_probabilities_that_are_not_finite_end_the_request(tmp_path: Path, drive: Drive) -> None:
    ((status, message),) = drive(bundle_of(tmp_path / "bundle", graph("nan")), **CUDA).rounds
    assert (status, "not finite" in message) == ("ENGINE_FAILED", True)


@needs_mocks
def test_a_cache_that_does_not_fit_says_which_canvas_would(bundle: Path, drive: Drive) -> None:
    # The network has two layers with 3 heads of size 4. Past and present keys and values in float16
    # take 192 bytes per token. The size of each array is rounded up.
    room = {"MOCK_CUDA_BYTES": str(4096)}
    told = drive(bundle, room, cache="dual", given=5, new=24, rounds=2, **CUDA)
    for status, message in told.rounds:
        assert status == "OUT_OF_MEMORY"
        assert message.startswith(
            "the keys and values of 1 canvas of 29 tokens need 1 MiB of the device"
        )
        assert "one of 10 tokens would fit" in message
    assert drive(bundle, room, cache="dual", given=2, new=8, **CUDA).all_same()
    told = drive(bundle, room, cache="dual", given=2, new=8, batch=4, max_batch=4, **CUDA)
    assert "of 4 canvases of 10 tokens" in told.rounds[0][1]
    assert "as many of 2 tokens would fit, or fewer at once (max_batch)" in told.rounds[0][1]


@needs_mocks
def test_a_full_device_is_told_from_other_failures(bundle: Path, drive: Drive) -> None:
    told = drive(bundle, {"MOCK_ORT_FULL": "Run:3"}, cache="dual", rounds=2, **CUDA)
    status, message = told.rounds[0]
    assert status == "OUT_OF_MEMORY"
    assert "a pass of 1 x 8 tokens over 21 cached ones that scores " in message
    assert "needs more memory than the device has left, 1023 of 1024 MiB" in message
    assert "Failed to allocate memory for requested buffer of size 99" in message
    assert told.rounds[1] == ("OK", "same")
    opened = drive(bundle, {"MOCK_ORT_FULL": "CreateSession:1"}, **CUDA).opened
    assert opened[0] == "OUT_OF_MEMORY"
    assert "the graph with its weights needs more memory than the device has left" in opened[1]


# ---- From Python ----


def test_both_wheels_at_once_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    versions = {"onnxruntime": "1.31.1", "onnxruntime-gpu": "1.31.0"}

    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.delenv("DLM_ONNXRUNTIME", raising=False)
    with pytest.raises(dlm_runtime.EngineError) as caught:
        dlm_runtime.open(tmp_path, provider="cuda")
    assert "onnxruntime 1.31.1 and onnxruntime-gpu 1.31.0 are both installed" in str(caught.value)
    assert (
        "`pip uninstall -y onnxruntime onnxruntime-gpu`, then `pip install onnxruntime-gpu==1.31.0`"
        in str(caught.value)
    )
    del versions["onnxruntime"]
    # The provider is known, but the folder is not a bundle.
    with pytest.raises(dlm_runtime.BundleError):
        dlm_runtime.open(tmp_path, provider="cuda")


def test_the_library_that_is_installed_here_says_what_it_lacks(llada_bundle: Path) -> None:
    with pytest.raises(
        dlm_runtime.EngineError, match=r"has no CUDAExecutionProvider, only .*CPUExecutionProvider"
    ):
        dlm_runtime.open(llada_bundle, provider="cuda")
    with pytest.raises(dlm_runtime.RequestError, match="is not one of: cpu, cuda"):
        dlm_runtime.open(llada_bundle, provider="rocm")


def test_libraries_in_nvidias_wheels_are_loaded_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    loaded: list[str] = []
    for name in ("libcublas.so.13", "libcudart.so.13", "libcublas.so.12", "libcublasLt.so.13"):
        path = site / "nvidia" / "cu13" / "lib" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    about = site / "onnxruntime" / "capi" / "build_and_package_info.py"
    about.parent.mkdir(parents=True)
    (about.parent.parent / "__init__.py").touch()
    about.write_text("package_name = 'onnxruntime-gpu'\ncuda_version = '13.0'\n")
    monkeypatch.setattr(sys, "path", [str(site)])
    for name in ("nvidia", "onnxruntime"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(providers.ctypes, "CDLL", lambda path: loaded.append(Path(path).name))
    providers.load_libraries()
    assert loaded == ["libcudart.so.13", "libcublasLt.so.13", "libcublas.so.13"]
    # ``cuda_libraries`` returns a path for each library in an installed wheel. For other libraries,
    # it returns only the name, so that the system's loader searches for the library.
    folder = site / "nvidia" / "cu13" / "lib"
    others = ["libnvrtc.so.13", "libcurand.so.10", "libcudnn.so.9"]
    assert providers.cuda_libraries() == [*(str(folder / name) for name in loaded), *others]


def test_the_provider_in_nvidias_wheel_is_found_and_cudas_library_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert providers.plugin_library() is None
    package = tmp_path / "onnxruntime_ep_nv_tensorrt_rtx"
    package.mkdir()
    (package / "__init__.py").write_text(f"get_library_path = lambda: {str(package / 'it.so')!r}\n")
    (package / "libcudart.so.13.4.36").touch()
    loaded: list[str] = []
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(providers.ctypes, "CDLL", loaded.append)
    assert providers.plugin_library() == str(package / "it.so")
    del sys.modules[package.name]
    assert loaded == [str(package / "libcudart.so.13.4.36")]


# ---- The library itself ----


def _slot(name: str) -> int:
    text = (SOURCE / "src" / "engines" / "onnxruntime" / "ort_api.h").read_text()
    found = re.search(rf"using {name} = Entry<(\d+),", text)
    assert found is not None, name
    return int(found[1])


class _Base(ctypes.Structure):
    _fields_ = (
        ("get_api", ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_uint32)),
        ("get_version", ctypes.CFUNCTYPE(ctypes.c_char_p)),
    )


class Installed:
    """The functions of the installed library, which are called by our slots."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("ORT_DISABLE_TELEMETRY", "1")
        path = _native.onnxruntime_library()
        assert path is not None
        library = ctypes.CDLL(path)
        library.OrtGetApiBase.restype = ctypes.POINTER(_Base)
        found = library.OrtGetApiBase().contents.get_api(24)
        self.table = ctypes.cast(found, ctypes.POINTER(ctypes.c_void_p))

    def call(self, name: str, *given: Any, result: type | None = ctypes.c_void_p) -> Any:
        """Call a function of the library. A bytes object is a string, and anything else a pointer."""
        kinds = [ctypes.c_char_p if isinstance(each, bytes) else ctypes.c_void_p for each in given]
        return ctypes.CFUNCTYPE(result, *kinds)(self.table[_slot(name)])(*given)

    def made(self, name: str, *given: Any, kind: type = ctypes.c_void_p) -> Any:
        """Call a function that stores its result at the address in its last argument."""
        out = kind()
        assert not self.call(name, *given, ctypes.byref(out)), name
        return out

    def listed(self, name: str, of: Any) -> list[Any]:
        parts, count = ctypes.POINTER(ctypes.c_void_p)(), ctypes.c_size_t()
        assert not self.call(name, of, ctypes.byref(parts), ctypes.byref(count)), name
        return parts[: count.value]

    def named(self, name: str, of: Any) -> str:
        return (self.made(name, of, kind=ctypes.c_char_p).value or b"").decode()


def test_placement_is_read_back_from_the_installed_library_by_our_slots(
    llada_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ort = Installed(monkeypatch)
    env = ort.made("CreateEnv", 4, b"test")
    options = ort.made("CreateSessionOptions")
    ort.call("AddSessionConfigEntry", options, b"session.record_ep_graph_assignment_info", b"1")
    session = ort.made("CreateSession", env, str(llada_bundle / "denoiser.onnx").encode(), options)
    parts = ort.listed("GetPlacement", session)
    assert len(parts) > 10
    found = set()
    for part in parts:
        assert ort.named("PlacementGetProvider", part) == "CPUExecutionProvider"
        for node in ort.listed("PlacementGetNodes", part):
            assert ort.named("PlacedNodeGetDomain", node) in ("", "com.microsoft")
            assert ort.named("PlacedNodeGetName", node)
            found.add(ort.named("PlacedNodeGetOperator", node))
    assert {"MatMul", "Gather"} <= found
    for name, held in (("Session", session), ("SessionOptions", options), ("Env", env)):
        ort.call(f"Release{name}", held, result=None)


def test_a_providers_library_is_registered_by_our_slots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ort = Installed(monkeypatch)
    env = ort.made("CreateEnv", 4, b"test")
    devices = ort.listed("GetProviderDevices", env)
    names = [
        ort.call("ProviderDeviceGetProvider", device, result=ctypes.c_char_p) for device in devices
    ]
    assert names == [b"CPUExecutionProvider"]
    about = ort.call("ProviderDeviceGetMetadata", devices[0], result=ctypes.c_void_p)
    version = ort.call("GetKeyValue", about, b"version", result=ctypes.c_char_p).decode()
    assert version == providers.installed_version("onnxruntime")
    hardware = ort.call("ProviderDeviceGetHardware", devices[0], result=ctypes.c_void_p)
    metadata = ort.call("HardwareGetMetadata", hardware, result=ctypes.c_void_p)
    assert ort.call("GetKeyValue", metadata, b"pci_bus_id", result=ctypes.c_char_p) is None
    options = ort.made("CreateSessionOptions")
    chosen = (ctypes.c_void_p * 1)(devices[0])
    assert not ort.call("AppendProviderDevices", options, env, chosen, 1, None, None, 0)
    library = str(tmp_path / "none.so").encode()
    failure = ort.call("RegisterProviderLibrary", env, b"provider", library)
    message = ort.call("GetErrorMessage", failure, result=ctypes.c_char_p)
    assert f"{tmp_path}/none.so: cannot open shared object file" in message.decode()
    for name, held in (("Status", failure), ("SessionOptions", options), ("Env", env)):
        ort.call(f"Release{name}", held, result=None)


def test_a_run_takes_options_by_our_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    ort = Installed(monkeypatch)
    options = ort.made("CreateRunOptions")
    assert not ort.call("AddRunConfigEntry", options, b"gpu_graph_id", b"3")
    failure = ort.call("AddRunConfigEntry", options, b"", b"3")
    assert b"key is empty" in ort.call("GetErrorMessage", failure, result=ctypes.c_char_p)
    ort.call("ReleaseStatus", failure, result=None)
    ort.call("ReleaseRunOptions", options, result=None)


def test_a_machine_without_a_driver_is_told_so_first(llada_bundle: Path) -> None:
    with pytest.raises(
        dlm_runtime.EngineError, match=r"cannot find the CUDA driver.*Install NVIDIA's driver"
    ):
        dlm_runtime.open(llada_bundle, provider="nv_tensorrt_rtx")


# ---- From the command line ----


@pytest.mark.parametrize("command", [["run", "BUNDLE", "--tokens", "1,2"], ["bench", "BUNDLE"]])
def test_commands_that_take_an_engine_take_a_provider(
    llada_bundle: Path, command: list[str]
) -> None:
    words = [str(llada_bundle) if word == "BUNDLE" else word for word in command]
    wrong = CliRunner().invoke(main, [*words, "--provider", "gpu"])
    assert wrong.exit_code == 2
    assert "is not one of cpu, cuda, tensorrt, nv_tensorrt_rtx" in wrong.output
    missing = CliRunner().invoke(main, [*words, "--provider", "cuda:0"])
    assert missing.exit_code == 1
    assert "has no CUDAExecutionProvider" in missing.output


PROGRAM = """
import sys
import dlm_runtime
with dlm_runtime.open(sys.argv[1], provider="cuda", allow_fallback=True) as bundle:
    print(bundle.engine)
    request = dict(tokens=[1, 2, 3], max_new_tokens=8, block_length=4, cache="dual")
    whole = bundle.generate(**request).tokens
    left = bundle.stream(**request)
    next(left)  # one pass, whose keys and values stay on the device
    left.close()
    assert bundle.generate(**request).tokens == whole
    print(whole)
"""


@needs_mocks
def test_python_generates_on_a_provider(tmp_path: Path, sanitized: Path) -> None:
    bundle = bundle_of(tmp_path / "bundle", graph("node shape_of Shape"))
    library = str(sanitized / "libmock_onnxruntime.so")
    engine, tokens = in_python(PROGRAM, bundle, sanitized, DLM_ONNXRUNTIME=library)
    left = "not run there: 1 of 4 nodes: 1 Shape (shape_of)"
    assert engine == f"onnxruntime 1.31.1 (CUDA, Mock GPU, SM 12.0; {left})"
    assert len(json.loads(tokens)) == 11
