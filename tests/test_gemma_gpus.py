"""DiffusionGemma on GPUs: the device graph, and engines that TensorRT-RTX builds without a GPU.

No test runs an engine, because that needs the GPU for which the engine was built.
tests/test_native_tensorrt.py tests the runtime with mock libraries.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from checkpoints import diffusion_gemma_config, write_checkpoint
from engine_bundles import SMALL, check_audits, dlm_export, gpu_bundle, read_manifest
from test_gemma_quantised import write_calm

import dlm_runtime
from dlm_export.build import BuildOptions, build
from dlm_export.judging.accuracy.effort import Effort
from dlm_export.sources import open_source
from dlm_export.tensorrt.estimate import EngineOptions

VOCAB, LONGEST, HIDDEN, WINDOW = 160, 2048, 64, 7
CACHED = 20


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gemma") / "checkpoint"
    return write_checkpoint(path, diffusion_gemma_config(num_experts=24), seed=3)


def feed(source: Path, *, is_draft: bool, is_short: bool = False) -> dict[str, np.ndarray]:
    """The inputs of a pass over a block of 8 tokens.

    If ``is_short`` is true, layers with a window get the cached rows in the window only.
    """
    rng = np.random.default_rng(5)
    positions = np.arange(CACHED, CACHED + 8)[None] + LONGEST * is_draft
    network = open_source(source).network
    found: dict[str, np.ndarray] = {
        "input_ids": rng.integers(0, VOCAB, (1, 8)),
        "position_ids": positions,
        "score_rows": np.arange(8)[None],
        "conditioning": is_draft * rng.standard_normal((1, 8, HIDDEN)).astype(np.float32),
        "temperature": np.full((1, 8), 0.7, np.float32),
    }
    for i, (heads, size) in enumerate(network.cache_shapes()):
        for kind in ("key", "value"):
            rows = rng.standard_normal((1, heads, CACHED, size)).astype(np.float16)
            is_near = is_short and network.cache_windows()[i] is not None
            found[f"past_{kind}.{i}"] = rows[:, :, -WINDOW:] if is_near else rows
    return found


def outputs(graph: Path, given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Run a graph without optimisation, so that two forms of a graph round at the same places."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(names, given), strict=True))


@pytest.mark.parametrize("is_draft", [True, False])
def test_the_device_graph_computes_what_was_judged(checkpoint: Path, is_draft: bool) -> None:
    bundle = gpu_bundle("fp16", "rtx5090", source=checkpoint)
    given = feed(checkpoint, is_draft=is_draft)
    device, judged = (outputs(bundle / name, given) for name in ("device.onnx", "denoiser.onnx"))
    assert device.keys() == judged.keys() >= {"logits", "next_conditioning", "present_key.2"}
    for name, array in device.items():
        np.testing.assert_array_equal(array, judged[name], err_msg=name)
    assert device["next_conditioning"].shape == (1, 8, HIDDEN)


def test_self_conditioning_is_an_input_of_the_device_graph(checkpoint: Path) -> None:
    graph = gpu_bundle("fp16", "rtx5090", source=checkpoint) / "device.onnx"
    given = feed(checkpoint, is_draft=True)
    found = outputs(graph, given)
    without = outputs(graph, given | {"conditioning": np.zeros_like(given["conditioning"])})
    assert np.abs(found["logits"] - without["logits"]).max() > 0.01 * np.ptp(found["logits"])
    colder = outputs(graph, given | {"temperature": np.full((1, 8), 0.1, np.float32)})
    np.testing.assert_array_equal(found["logits"], colder["logits"])
    assert not np.allclose(found["next_conditioning"], colder["next_conditioning"], atol=1e-3)


@pytest.mark.parametrize("is_draft", [True, False])
def test_layers_with_a_window_may_read_the_rows_of_all_positions(
    checkpoint: Path, is_draft: bool
) -> None:
    """On GPUs, the runtime keeps the rows of all positions. The graph masks those outside the
    window.
    """
    graph = gpu_bundle("fp16", "rtx5090", source=checkpoint) / "device.onnx"
    near, whole = (
        outputs(graph, feed(checkpoint, is_draft=is_draft, is_short=is_short))
        for is_short in (True, False)
    )
    for name in ("logits", "next_conditioning"):
        # fp16 sums of different lengths may round differently.
        assert np.abs(near[name] - whole[name]).max() <= 2e-3 * np.ptp(whole[name]), name


# ---- Engines ----


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp16", "int8", "int4", "fp8", "nvfp4"])
def test_a_build_is_compared_with_torch_and_its_engine_is_audited(
    precision: str, tmp_path: Path
) -> None:
    """The router has a norm, and computes in fp32 from inputs that the graph rounds to fp16."""
    pytest.importorskip("tensorrt_rtx_bindings")
    quantise = replace(SMALL, effort=Effort("default", judged=1))
    options = BuildOptions(("rtx5090",), precision, engine=EngineOptions(), quantise=quantise)
    report = build(write_calm(tmp_path), tmp_path / "bundle", options)
    assert report.parity is not None
    assert report.parity.misses == []
    if precision != "fp16":  # bundles in full precision are compared as a whole
        router = next(row for row in report.parity.layers if row.layer == "blocks.1.mlp.router")
        assert router.output_relative is not None
        assert router.output_relative <= 2e-5 < router.input_relative
    check_audits(report.output, ["rtx5090"])
    manifest = read_manifest(report.output)
    held = manifest["audits"]["rtx5090"]["layers"]
    assert {f"blocks.1.mlp.experts.{role}" for role in ("gate", "up", "down")} <= held.keys()
    kind = {"fp16": "float16", "int8": "int8-weight", "int4": "int4-g64"}.get(precision, precision)
    assert held["blocks.1.mlp.experts.down"] == kind
    assert manifest["loop"]["engines"]["rtx5090"]["profiles"]["block"]["tokens"] == [1, 32, 32]
    with dlm_runtime.open(report.output, engine="none") as opened:
        assert set(opened.manifest["loop"]["engines"]) == {"rtx5090"}


def test_heads_that_are_too_wide_for_one_kernel_are_built_with_several(tmp_path: Path) -> None:
    """The full layers of the released DiffusionGemma have heads of 512 features."""
    pytest.importorskip("tensorrt_rtx_bindings")
    wide = {"2": {"head_dim": 512, "num_key_value_heads": 1}}
    config = diffusion_gemma_config(per_layer_config=wide, max_position_embeddings=256)
    source = write_checkpoint(tmp_path / "checkpoint", config)
    bundle = gpu_bundle("fp16", "rtx5090", source=source, engines=True)
    assert set(read_manifest(bundle)["loop"]["engines"]) == {"rtx5090"}
    for name, marked in (("device.onnx", [False, False, True]), ("denoiser.onnx", [False] * 3)):
        graph = onnx.load(bundle / name, load_external_data=False).graph
        nodes = [node for node in graph.node if node.op_type == "Attention"]
        marks = ["TRT_decomposable" in {each.name for each in node.attribute} for node in nodes]
        assert marks == marked, name


def test_plan_predicts_gpus_without_windows(checkpoint: Path) -> None:
    """On a CPU, a prompt of 600 tokens takes two passes, because layers have a window."""

    def plan(*targets: str) -> dict[str, Any]:
        size = ("--prompt-tokens", 600, "--new-tokens", 16, "--tokens-per-pass", 8)
        told = dlm_export("plan", checkpoint, "--targets", ",".join(targets), *size, "--json")
        assert told.exit_code == 0, told.output
        found: dict[str, Any] = json.loads(told.stdout)
        return found

    both, gpu = plan("cpu", "rtx5090"), plan("rtx5090")
    assert [found["passes"][0]["nfe"] for found in (both, gpu)] == [5, 4]
    assert [found["passes"][0]["passes"][0]["tokens"] for found in (both, gpu)] == [512, 600]
    rows = [row for row in both["predictions"] if row["target"] == "rtx5090"]
    assert rows == gpu["predictions"]
    assert {row["speeds"][0]["nfe"] for row in rows} == {4}
    names = {name for row in rows for name in (row["precision"], *row["same_as"])}
    assert {"fp16", "int8", "int4", "fp8", "nvfp4"} <= names
    said = dlm_export("inspect", checkpoint).output
    assert "On GPUs, these layers store all tokens" in said
