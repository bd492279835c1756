"""Tests of errors that are reported before an engine is built.

The tests check the exit code and the advice, and that no files are left.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import DEMO_CHECKPOINT as DEMO
from engine_bundles import contents, copy_of, dlm_export, gpu_bundle, read_manifest, refused

from dlm_export import targets
from dlm_export.bundle.manifest import network_of
from dlm_export.network.spec import ExpertsSpec
from dlm_export.planning.shapes import scaled_shape
from dlm_export.sources import open_source
from dlm_export.tensorrt import builders, bundled, estimate
from dlm_export.tensorrt.estimate import EngineError, Limits

LARGE = replace(scaled_shape("8B").network, max_canvas_length=1 << 20)
GIB = 1 << 30


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out" / "bundle"


def _nothing_left(out: Path) -> None:
    assert not out.parent.exists() or os.listdir(out.parent) == []


BUILD_REFUSALS = [
    (
        ("--target", "h100", "--precision", "nvfp4"),
        ["target h100 does not run nvfp4", "SM 10.0", "fp8"],
    ),
    (
        ("--target", "rtx5090,rtx4090", "--precision", "nvfp4"),
        ["target rtx4090 does not run nvfp4", "all run", "fp8"],
    ),
    (("--target", "cpu,thor", "--precision", "fp16"), ["build two"]),
    (
        ("--target", "thor", "--builder", "tensorrt_rtx"),
        ["tensorrt_rtx does not build for thor (SM 11.0)", "use tensorrt"],
    ),
    (("--target", "h100", "--canvas", "513"), ["--canvas 513", "512 tokens"]),
    (
        ("--target", "h100", "--precision", "fp16", "--activations", "bf16"),
        ["--activations needs a quantised precision"],
    ),
    (("--target", "h100", "--no-engine", "--workspace", "64"), ["--workspace", "--no-engine"]),
    (("--target", "cpu", "--version-compatible"), ["--version-compatible", "for GPUs"]),
    (("--target", "cpu", "--canvas", "64"), ["--canvas", "for GPUs"]),
]


@pytest.mark.parametrize(
    ("arguments", "says"), BUILD_REFUSALS, ids=[" ".join(each) for each, _ in BUILD_REFUSALS]
)
def test_a_build_that_cannot_be_is_refused_and_leaves_nothing(
    out: Path, arguments: tuple[str, ...], says: list[str]
) -> None:
    refused(dlm_export("build", DEMO, *arguments, "-o", out), 2, says)
    _nothing_left(out)


# ---- Existing bundles ----


REFUSALS: list[tuple[str, tuple[str, ...], int, list[str]]] = [
    ("cpu", ("rtx5090",), 2, ["was built for cpu and has no device graph", "--target rtx5090"]),
    ("cpu", ("h100",), 2, ["was built for cpu and has no device graph", "--target h100"]),
    ("cpu", ("cpu",), 2, ["target cpu needs no engine"]),
    ("cpu", ("rtx6090",), 2, ["unknown target 'rtx6090'"]),
    (
        "rtx5090",
        ("h100",),
        1,
        ["is built on the device", "/bundle --target h100`", "TensorRT 10.14 or later"],
    ),
    (
        "rtx5090",
        ("agx-orin", "--builder", "tensorrt_rtx"),
        2,
        ["does not build for agx-orin (SM 8.7)"],
    ),
    (
        "rtx5090",
        ("agx-orin",),
        2,
        ["graph has opset 23", "TensorRT 10.3 cannot parse", "bundle with --target agx-orin"],
    ),
    ("rtx5090", ("rtx5090,rtx5090",), 2, ["rtx5090 is given more than once"]),
    (
        "rtx5090",
        ("rtx5090", "--version-compatible"),
        2,
        ["TensorRT-RTX does not build version-compatible engines", "--builder tensorrt"],
    ),
]


@pytest.mark.parametrize(
    ("built_for", "arguments", "code", "says"),
    REFUSALS,
    ids=[" ".join(each) for _, each, *_ in REFUSALS],
)
def test_an_engine_that_cannot_be_is_refused_and_leaves_the_bundle_as_it_was(
    llada_bundle: Path,
    monkeypatch: pytest.MonkeyPatch,
    built_for: str,
    arguments: tuple[str, ...],
    code: int,
    says: list[str],
) -> None:
    monkeypatch.setattr(builders, "device_sm", lambda: None)
    if "rtx5090" in arguments:
        pytest.importorskip("tensorrt_rtx_bindings")
    bundle = llada_bundle
    if built_for != "cpu":
        bundle = gpu_bundle("fp16", built_for)
    before = contents(bundle)
    refused(dlm_export("engine", bundle, "--target", *arguments), code, says)
    assert contents(bundle) == before


def test_layers_that_groups_do_not_divide_take_the_next_format_and_are_named(
    llada_checkpoint: Path, tmp_path: Path
) -> None:
    out = tmp_path / "bundle"
    options = ("--target", "thor", "--precision", "int4-g128", "--solver", "nearest")
    done = dlm_export("build", llada_checkpoint, *options, "--no-verify", "-o", out)
    assert done.exit_code == 0, done.output
    told = " ".join(done.stderr.split())
    assert (
        "int4-g128 has groups of 128; 64 inputs is not a multiple: 12 layers (blocks.N.attention.q, "
        in told
    )
    assert "in int4-g64" in told
    assert "96 inputs is not a multiple: 2 layers (blocks.N.mlp.down) in int8-weight" in told
    held = read_manifest(out)["precision"]["layers"]
    assert (held["blocks.0.attention.q"], held["blocks.1.mlp.down"]) == ("int4-g64", "int8-weight")


# ---- Memory ----


@pytest.mark.parametrize("name", ["orin-nano", "rtx5090"])
@pytest.mark.parametrize("weights_bytes", [4 * GIB, 16 * GIB])
def test_the_canvas_that_is_said_to_fit_is_the_longest_that_does(
    name: str, weights_bytes: int
) -> None:
    target = targets.find(name)
    limits = Limits(LARGE.max_canvas_length, 32)
    with pytest.raises(EngineError) as caught:
        estimate.check_memory(LARGE, target, weights_bytes, limits, on_host=False)
    assert caught.value.exit_code == 2
    said = str(caught.value)
    assert f"{target.name} has {target.memory_bytes / 1e9:.2f} GB" in said
    if weights_bytes >= target.memory_bytes:
        assert "No canvas fits" in said
        return
    longest = int(said.rpartition("--canvas ")[2].split()[0])
    estimate.check_memory(LARGE, target, weights_bytes, Limits(longest, 32), on_host=False)
    with pytest.raises(EngineError):
        estimate.check_memory(LARGE, target, weights_bytes, Limits(longest + 1, 32), on_host=False)


def test_the_estimate_counts_weights_cache_and_logits() -> None:
    # The estimate is the sum of three parts: the cached and new keys and values of 4096 tokens (two
    # bytes per number), the logits of 32 scored rows in fp32, and the memory to sort these logits.
    found = estimate.estimate(LARGE, 16 * GIB, Limits(4096, 32))
    assert found.cache == 2 * 4096 * (32 * 2 * 32 * 128 * 2)
    assert found.passes > 4096 * 12288 * 2 + 32 * 126464 * 4
    assert found.device > found.weights + found.cache + found.passes
    assert found.host > found.weights == 16 * GIB
    hosts = [
        estimate.estimate(LARGE, 16 * GIB, Limits(4096, 32), formats).host
        for formats in (["fp8"], ["nvfp4", "fp8"], ["int4-g64"])
    ]
    assert hosts == sorted(set(hosts))
    assert hosts[0] == found.host


def test_the_estimate_counts_masks_and_the_features_of_all_experts() -> None:
    limits = Limits(4096, 32)
    layer = LARGE.layers[0]
    mixture = replace(LARGE, layers=(replace(layer, mlp=ExpertsSpec(128, 8, 768)),))
    masked = replace(layer.attention, visibility="block", block_length=32)
    plain, experts, masks = (
        estimate.estimate(network, GIB, limits).passes
        for network in (
            replace(LARGE, layers=(layer,)),
            mixture,
            replace(LARGE, layers=(replace(layer, attention=masked),)),
        )
    )
    # gate, up and their product, in 2 bytes
    assert experts - plain == 4096 * 3 * 2 * (128 * 768 - layer.mlp.size)
    assert masks - plain == 3 * 4096**2
    chosen = estimate.estimate(mixture, GIB, limits, all_experts=False).passes
    assert experts - chosen == 4096 * 3 * 2 * (128 - 8) * 768
    assert estimate.estimate(mixture, GIB, limits).workspace == experts > GIB
    codes = estimate.estimate(mixture, GIB, limits, ["nvfp4"]).passes
    assert codes - experts == 4096 * 128 * 768
    assert estimate.estimate(mixture, GIB, limits, ["int4-g64"]).passes == experts


def _with_memory(monkeypatch: pytest.MonkeyPatch, name: str, memory_bytes: int) -> None:
    monkeypatch.setitem(
        targets.TARGETS, name, replace(targets.TARGETS[name], memory_bytes=memory_bytes)
    )


def test_a_canvas_that_the_target_cannot_hold_is_refused_before_any_work(
    out: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bundle = copy_of(gpu_bundle("nvfp4", "thor"), tmp_path / "nvfp4")
    demo, network = open_source(DEMO).network, network_of(read_manifest(bundle))
    needed = estimate.estimate(demo, demo.parameter_count(), Limits(300, 32)).device
    _with_memory(monkeypatch, "h100", needed)
    weights_bytes = (bundle / "denoiser.onnx.data").stat().st_size
    formats = read_manifest(bundle)["precision"]["layers"].values()
    needed = estimate.estimate(network, weights_bytes, Limits(100, 32), formats).device
    _with_memory(monkeypatch, "thor", needed)
    result = dlm_export("build", DEMO, "--target", "h100", "--precision", "fp8", "-o", out)
    says = "a canvas of 512 tokens in blocks of 32 needs"
    refused(result, 2, ["h100 has", says, "--canvas "])
    _nothing_left(out)
    before = contents(bundle)
    monkeypatch.setattr(
        bundled, "find_builder", lambda *_: builders.Builder("tensorrt", _Untouched(), (110,))
    )
    result = dlm_export("engine", bundle, "--target", "thor")
    says = "a canvas of 256 tokens in blocks of 32 needs"
    refused(result, 2, ["thor has", says, "--canvas 100 fits"])
    assert contents(bundle) == before


class _Untouched:
    """A module that fails the test if code reads any of its attributes."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was asked for")


def test_a_host_that_is_too_small_to_build_on_is_refused(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorrt_rtx_bindings")
    monkeypatch.setattr(estimate, "available_memory_bytes", lambda: GIB // 2)
    says = ["building for rtx5090 needs about", "0.54 GB are available", "--no-engine"]
    refused(dlm_export("build", DEMO, "--target", "rtx5090", "-o", out), 1, says)
    _nothing_left(out)
