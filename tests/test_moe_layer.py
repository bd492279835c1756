"""Graphs with TensorRT's MoE layer, for devices that have it.

No device with this layer was available. The tests check the graph against the documentation of
TRT_MoE (docs/TRT_custom_ops.md of onnx-tensorrt), and TensorRT-RTX's parser reads it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from checkpoints import (
    diffusion_gemma_config,
    llada2_config,
    llada_moe_config,
    write_checkpoint,
    write_headers,
)
from engine_bundles import dlm_export, gpu_bundle, read_manifest, refused
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from reference_ops import GatherElements

from dlm_export import families
from dlm_export.checkpoints.folder import Checkpoint
from dlm_export.families.base import Overrides
from dlm_export.planning.roofline import Costs
from dlm_export.planning.shapes import computes_all_experts
from dlm_export.sources import open_source
from dlm_export.targets import find
from dlm_export.tensorrt import audit

FLOAT16, INT32 = onnx.TensorProto.FLOAT16, onnx.TensorProto.INT32


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A denoiser of LLaDA2's family. Its router has groups, a bias and a scaling factor."""
    return write_checkpoint(tmp_path_factory.mktemp("moe") / "llada2", llada2_config(), seed=7)


class TRT_MoE(OpRun):
    """What the documentation says that the operator computes, in fp32."""

    op_domain = "trt"

    def _run(self, x: np.ndarray, *inputs: np.ndarray, activation_type: int) -> tuple[Any, ...]:
        assert activation_type == 1  # SiLU
        chosen, *numbers = inputs
        scores, gates, ups, downs = (each.astype(np.float32) for each in numbers)
        y = np.zeros(x.shape, np.float32)
        for at in np.ndindex(*chosen.shape):
            row, expert = x[at[:2]].astype(np.float32), chosen[at]
            gate = row @ gates[expert]
            hidden = gate / (1 + np.exp(-gate)) * (row @ ups[expert])
            y[at[:2]] += scores[at] * (hidden @ downs[expert])
        return (y.astype(x.dtype),)


def test_the_layers_inputs_are_as_documented(checkpoint: Path) -> None:
    path = gpu_bundle("fp16", "thor", "b200", source=checkpoint) / "device.onnx"
    graph = onnx.load(path, load_external_data=False).graph
    (node,) = (node for node in graph.node if node.op_type == "TRT_MoE")
    assert (node.name, node.domain) == ("blocks.1.mlp.experts/TRT_MoE", "trt")
    assert [(each.name, each.i) for each in node.attribute] == [("activation_type", 1)]
    casts = {each.output[0]: each.attribute[0].i for each in graph.node if each.op_type == "Cast"}
    assert [casts[name] for name in node.input[1:3]] == [INT32, FLOAT16]
    stored = {value.name: (value.data_type, tuple(value.dims)) for value in graph.initializer}
    shapes = [(16, 64, 64)] * 3  # experts, inputs, outputs
    assert [stored[name] for name in node.input[3:]] == [(FLOAT16, shape) for shape in shapes]


def test_the_graph_computes_what_the_denoiser_computes(checkpoint: Path) -> None:
    model = onnx.load(gpu_bundle("fp16", "thor", "b200", source=checkpoint) / "device.onnx")
    ids = np.random.default_rng(3).integers(0, 150, (1, 9))
    feed = {"input_ids": ids, "position_ids": np.arange(9)[None], "score_rows": np.arange(9)[None]}
    for value in model.graph.input[3:]:
        sizes = [size.dim_value for size in value.type.tensor_type.shape.dim]
        feed[value.name] = np.zeros((1, sizes[1], 0, sizes[3]), np.float16)
    run = ReferenceEvaluator(model, new_ops=[TRT_MoE, GatherElements]).run
    (logits,) = run(["logits"], feed)
    source = open_source(checkpoint)
    with torch.no_grad():
        wanted = families.load(source.parameters, source.network)(torch.from_numpy(ids)).numpy()
    # The graph rounds weights and activations to fp16.
    assert np.abs(logits - wanted).max() < 5e-3 * np.ptp(wanted)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_the_parser_reads_the_layer_and_the_audit_finds_its_weights(
    checkpoint: Path, precision: str
) -> None:
    trt = pytest.importorskip("tensorrt_rtx_bindings")
    bundle = gpu_bundle(precision, "thor", "b200", source=checkpoint)
    logger = trt.Logger(trt.ILogger.ERROR)
    network = trt.Builder(logger).create_network(0)
    parser = trt.OnnxParser(network, logger)
    assert parser.parse_from_file(str(bundle / "device.onnx")), parser.get_error(0).desc()
    (layer,) = (
        layer
        for layer in (network.get_layer(i) for i in range(network.num_layers))
        if layer.type == trt.LayerType.MOE
    )
    assert layer.get_input(1).dtype == trt.DataType.INT32
    assert tuple(layer.get_output(0).shape) == (-1, -1, 64)
    table = audit.network_table(network)
    assert table.keys() >= open_source(checkpoint).network.quantisable().keys()
    assert table["blocks.1.mlp.experts.down"] == {"fp16": "float16", "bf16": "bfloat16"}[precision]


@pytest.mark.parametrize(
    ("names", "config", "formats", "is_plain"),
    [
        (["thor", "rtx5090"], llada_moe_config(), {}, False),
        (["thor"], llada_moe_config(), {}, True),
        (["thor"], llada_moe_config(), {"blocks.0.mlp.experts.gate": "fp8"}, False),
        (["thor"], diffusion_gemma_config(), {}, False),
    ],
    ids=["a device without the layer", "elementary operators", "quantised", "gelu"],
)
def test_all_other_graphs_compute_all_experts(
    names: list[str],
    config: dict[str, Any],
    formats: dict[str, str],
    is_plain: bool,
    tmp_path: Path,
) -> None:
    network = open_source(write_checkpoint(tmp_path, config)).network
    targets = [find(name) for name in names]
    assert computes_all_experts(network, targets, formats, is_plain=is_plain)
    chosen = open_source(write_checkpoint(tmp_path / "silu", llada_moe_config())).network
    others = {"blocks.0.attention.q": "fp8"}
    assert not computes_all_experts(chosen, [find("thor"), find("b300")], others)


def test_a_graph_with_the_layer_is_refused_for_other_devices(checkpoint: Path) -> None:
    bundle = gpu_bundle("fp16", "thor", "b200", source=checkpoint)
    says = ["contains TensorRT's MoE layer, which rtx5090 does not run", "--target rtx5090"]
    refused(dlm_export("engine", bundle, "--target", "rtx5090"), 2, says)
    assert list(read_manifest(bundle)["targets"]) == ["thor", "b200"]


def test_plan_counts_all_experts_or_the_chosen_ones(tmp_path: Path) -> None:
    write_headers(tmp_path, llada_moe_config(num_experts=64, num_experts_per_tok=2))
    arguments = ("plan", tmp_path, "--targets", "thor,h100", "--precisions", "fp16,fp8", "--json")
    told = json.loads(dlm_export(*arguments).stdout)
    found = {(row["target"], row["precision"]): row["all_experts"] for row in told["predictions"]}
    assert found == {
        ("thor", "fp16"): False,
        ("thor", "fp8"): True,
        ("h100", "fp16"): True,
        ("h100", "fp8"): True,
    }
    said = dlm_export(*arguments[:-1]).stdout
    assert said.count("Computes all experts of a layer for every token: fp8\n") == 1
    assert "Computes all experts of a layer for every token: fp16, fp8" in said
    costs = Costs(families.read_network(Checkpoint(tmp_path), Overrides()), {}, 2)
    chosen, every = (costs.work(1, 0, 0, all_experts=is_all) for is_all in (False, True))
    stacks = 2 * 3 * 64 * 64 * 64  # of two layers, in elements
    assert every.macs["layers.full"] - chosen.macs["layers.full"] == stacks * 62 // 64
    assert every.weight_bytes - chosen.weight_bytes == 2 * stacks * 62 // 64
    # 4096 tokens choose every expert anyway.
    chosen, every = (costs.work(4096, 0, 0, all_experts=is_all) for is_all in (False, True))
    assert chosen.weight_bytes == every.weight_bytes
