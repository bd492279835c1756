"""Tests of the audit, which checks the graph from which TensorRT builds an engine.

If a layer is not quantised as planned, the audit names the layer, and no engine is written.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from engine_bundles import (
    contents,
    copy_of,
    dlm_export,
    edit_device_graph,
    gpu_bundle,
    read_manifest,
    refused,
)
from onnx import TensorProto, helper

from dlm_export.tensorrt import audit
from dlm_export.tensorrt.audit import AuditError

BF16 = TensorProto.BFLOAT16
# ``OWN`` and ``SHARED`` are two layers. No other layer uses the quantised input of ``OWN``.
# Neighbouring layers use the same quantised input as ``SHARED``.
OWN, SHARED = "blocks.1.mlp.down", "blocks.0.attention.k"


def _matmul(model: onnx.ModelProto, layer: str) -> onnx.NodeProto:
    return next(node for node in model.graph.node if node.name == f"{layer}/MatMul")


def _producer(model: onnx.ModelProto, name: str) -> onnx.NodeProto:
    return next(node for node in model.graph.node if name in node.output)


def _initializer(model: onnx.ModelProto, name: str, dtype: int, array: np.ndarray) -> str:
    model.graph.initializer.append(
        helper.make_tensor(name, dtype, array.shape, array.tobytes(), raw=True)
    )
    return name


def _dequantiser(model: onnx.ModelProto, layer: str) -> onnx.NodeProto:
    """The node that dequantises the codes of a layer.

    In NVFP4, a Transpose node follows the returned node. In other formats, the matrix
    multiplication follows the returned node.
    """
    node = _producer(model, _matmul(model, layer).input[1])
    return node if node.op_type == "DequantizeLinear" else _producer(model, node.input[0])


def _shape(model: onnx.ModelProto, name: str) -> tuple[int, ...]:
    return tuple(next(value for value in model.graph.initializer if value.name == name).dims)


def drop_weight_pair(model: onnx.ModelProto, layer: str) -> None:
    """Replace a layer's quantised weight by an unquantised weight in bf16."""
    node = _matmul(model, layer)
    shape = _shape(model, _dequantiser(model, layer).input[0])
    is_transposed = _producer(model, node.input[1]).op_type == "Transpose"
    values = np.full(shape[::-1] if is_transposed else shape, 0.01, ml_dtypes.bfloat16)
    node.input[1] = _initializer(model, f"{layer}.weight", BF16, values)


def drop_activation_pair(model: onnx.ModelProto, layer: str) -> None:
    """Use the input of a layer directly, without quantising and dequantising it."""
    node = _matmul(model, layer)
    quantise = _producer(model, _producer(model, node.input[0]).input[0])
    assert quantise.op_type in ("QuantizeLinear", "TRT_FP4DynamicQuantize")
    node.input[0] = quantise.input[0]


def fp8_activations(model: onnx.ModelProto, layer: str) -> None:
    """Quantise the input of a layer to FP8 instead of the layer's format."""
    drop_activation_pair(model, layer)
    node = _matmul(model, layer)
    scale = _initializer(model, f"{layer}.other_scale", BF16, np.full((), 0.02, ml_dtypes.bfloat16))
    zero = _initializer(
        model,
        f"{layer}.other_zero",
        TensorProto.FLOAT8E4M3FN,
        np.zeros((), ml_dtypes.float8_e4m3fn),
    )
    codes, wide = f"{layer}.other_codes", f"{layer}.other_input"
    made = [
        helper.make_node(
            "QuantizeLinear", [node.input[0], scale, zero], [codes], f"{layer}/QuantizeLinear.9"
        ),
        helper.make_node("DequantizeLinear", [codes, scale], [wide], f"{layer}/DequantizeLinear.9"),
    ]
    at = list(model.graph.node).index(node)
    node.input[0] = wide
    for new in reversed(made):
        model.graph.node.insert(at, new)


def halve_groups(model: onnx.ModelProto, layer: str) -> None:
    """Quantise a layer to INT4 in groups of 32 instead of 64."""
    dequantise = _dequantiser(model, layer)
    inputs, outputs = _shape(model, dequantise.input[0])
    scales = np.full((inputs // 32, outputs), 0.01, ml_dtypes.bfloat16)
    dequantise.input[1] = _initializer(model, f"{layer}.other_scales", BF16, scales)
    next(attribute for attribute in dequantise.attribute if attribute.name == "block_size").i = 32


def remove_layer(model: onnx.ModelProto, layer: str) -> None:
    """Remove a layer: its input takes the place of its output.

    The layer's matrix must be square.
    """
    node = _matmul(model, layer)
    del node.input[1]
    node.op_type, node.name = "Identity", f"{layer}/Identity"


def widen(model: onnx.ModelProto, layer: str) -> None:
    """Let one matrix multiplication compute in fp32, although the rest of the graph computes in
    fp16.
    """
    node = _matmul(model, layer)
    at = list(model.graph.node).index(node)
    values = np.full(_shape(model, node.input[1]), 0.01, np.float32)
    node.input[1] = _initializer(model, f"{layer}.wide", TensorProto.FLOAT, values)
    before = helper.make_node(
        "Cast", [node.input[0]], [f"{layer}.x"], f"{layer}/Cast.9", to=TensorProto.FLOAT
    )
    after = helper.make_node(
        "Cast", [f"{layer}.y"], [node.output[0]], f"{layer}/Cast.10", to=TensorProto.FLOAT16
    )
    node.input[0], node.output[0] = f"{layer}.x", f"{layer}.y"
    model.graph.node.insert(at + 1, after)
    model.graph.node.insert(at, before)


Edit = Callable[[onnx.ModelProto, str], None]
LOST: list[tuple[str, Edit, str, str]] = [
    ("fp8", drop_weight_pair, OWN, "activations fp8"),
    ("fp8", drop_activation_pair, SHARED, "activations in full"),
    ("nvfp4", drop_weight_pair, OWN, "weights in full"),
    ("nvfp4", drop_activation_pair, SHARED, "nvfp4-weight"),
    ("nvfp4", fp8_activations, OWN, "activations fp8"),
    ("int4", halve_groups, SHARED, "int4-g32"),
    ("int8", drop_weight_pair, SHARED, "bfloat16"),
    ("fp16", widen, SHARED, "float32"),
]


def edited(precision: str, edit: Edit, layer: str, folder: Path) -> Path:
    """Return a copy of a bundle without engines whose device graph was edited."""
    pytest.importorskip("tensorrt_rtx_bindings")
    bundle = copy_of(gpu_bundle(precision, "rtx5090"), folder / precision)
    edit_device_graph(bundle, lambda model: edit(model, layer))
    return bundle


@pytest.mark.parametrize(("precision", "edit", "layer", "held"), LOST)
def test_a_layer_that_lost_its_quantisation_is_named_and_no_engine_written(
    precision: str, edit: Edit, layer: str, held: str, tmp_path: Path
) -> None:
    bundle = edited(precision, edit, layer, tmp_path)
    before = contents(bundle)
    asked = read_manifest(bundle)["precision"].get("layers", {}).get(layer, "float16")
    result = dlm_export("engine", bundle, "--target", "rtx5090")
    lost = "1 of 15 layers do not have the requested format"
    says = ["was not written", lost, f"{layer} is ", held, f"{asked} was asked for"]
    refused(result, 3, says)
    assert result.stderr.count("was asked for") == 1, "other layers are named too"
    assert contents(bundle) == before


def test_an_allowed_fallback_is_in_the_manifest_and_told(tmp_path: Path) -> None:
    bundle = edited("int4", halve_groups, SHARED, tmp_path)
    result = dlm_export("engine", bundle, "--target", "rtx5090", "--allow-fallback")
    assert result.exit_code == 0, result.output
    found = read_manifest(bundle)["audits"]["rtx5090"]
    assert found["fallbacks"] == {SHARED: {"asked": "int4-g64", "held": "int4-g32"}}
    assert found["layers"][SHARED] == "int4-g32"
    assert f"Warning: {SHARED} is " in result.stderr


def test_a_missing_layer_is_never_allowed(tmp_path: Path) -> None:
    layer = "blocks.1.attention.out"
    bundle = edited("nvfp4", remove_layer, layer, tmp_path)
    before = contents(bundle)
    for allow in ((), ("--allow-fallback",)):
        result = dlm_export("engine", bundle, "--target", "rtx5090", *allow)
        refused(result, 3, [f"has no layer {layer}"])
    assert contents(bundle) == before


def test_the_rotation_in_front_of_a_layer_is_not_taken_for_the_layer() -> None:
    pytest.importorskip("tensorrt_rtx_bindings")
    bundle = gpu_bundle("int8", "rtx5090", engines=True, rotate_down=True)
    graph = onnx.load(bundle / "device.onnx", load_external_data=False).graph
    assert any(node.name == "blocks.0.mlp.down/MatMul.2" for node in graph.node)
    found = read_manifest(bundle)["audits"]["rtx5090"]
    assert found["layers"]["blocks.0.mlp.down"] == "int8-weight"
    assert found["fallbacks"] == {}


# ---- The inspector's report ----


def _report(*layers: dict[str, Any]) -> str:
    return json.dumps({"Layers": list(layers), "Bindings": []})


def _layer(paths: list[str], *types: str) -> dict[str, Any]:
    return {
        "Name": "__myl_Fused_myl0_7",
        "LayerType": "gemm",
        "Inputs": [
            {"Name": f"x{i}", "Dimensions": [1, 32, 192], "Format/Datatype": each}
            for i, each in enumerate(types)
        ],
        "Outputs": [{"Name": "y", "Dimensions": [1, 32, 192], "Format/Datatype": "Half"}],
        "Metadata": "\x1e".join(f"[ONNX Layer: {path}/MatMul]" for path in paths),
    }


@pytest.mark.parametrize(
    ("expected", "types", "found"),
    [
        ("fp8", ("FP8", "FP8"), "fp8"),
        ("fp8", ("Row major linear FP8 format", "Float"), "fp8"),
        ("fp8", ("Half", "Half"), "Half"),
        ("nvfp4", ("FP4E2M1", "FP8"), "nvfp4"),
        ("nvfp4", ("FP8", "FP8"), "FP8"),
        ("nvfp4", ("BFloat16", "Half"), "BFloat16 and Half"),
        ("int8-weight", ("Half", "Int8"), "int8-weight"),
        ("int4-g64", ("Half", "Int8"), "Half and Int8"),
        ("fp8", (), "nowhere"),
    ],
)
def test_the_inspectors_types_bear_out_a_format_or_are_named(
    expected: str, types: tuple[str, ...], found: str
) -> None:
    report = _report(
        _layer(["blocks.0.q", "blocks.0.k"], *types),
        _layer(["blocks.0.v"], "FP4", "FP8", "Int8", "Int4"),
    )
    assert audit.inspector_table(report, {"blocks.0.k": expected})["blocks.0.k"] == found


def test_the_inspectors_moe_layer_is_the_layer_of_three_stacks() -> None:
    moe = _layer([], "Half", "Half") | {"Metadata": "[ONNX Layer: blocks.0.mlp.experts/TRT_MoE]"}
    asked = {f"blocks.0.mlp.experts.{role}": "fp8" for role in ("gate", "up", "down")}
    assert audit.inspector_table(_report(moe), asked) == dict.fromkeys(asked, "Half")


@pytest.mark.parametrize(
    "report", ["", "{", "[]", "null", '{"Layers": ["gemm", "kgen"]}', "{}", '{"Layers": {}}']
)
def test_a_report_without_layers_fails_the_audit(report: str) -> None:
    with pytest.raises(AuditError):
        audit.inspector_table(report, {"blocks.0.q": "fp8"})
