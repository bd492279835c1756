"""Tests that device.onnx computes the same results as denoiser.onnx.

TensorRT builds engines from device.onnx, but builds measure the accuracy of denoiser.onnx. Both
graphs must therefore compute the same results. The denoisers are tiny and random. ONNX Runtime runs
both graphs if it has all of their operators. Graphs with TensorRT's own operator or with bf16 run
in ONNX's reference implementation. The tests implement NVFP4 from its definition, without this
project's code.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from engine_bundles import gpu_bundle, tiny
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from reference_ops import GatherElements
from safetensors.torch import load_file
from slow_cases import slow_except

from dlm_calibration.precision_rounding import pack_nibbles, quantise_weight

BF16 = ml_dtypes.bfloat16
# The largest relative rounding error of each type: half the distance between 1 and the next larger
# number.
ROUNDING = {"fp16": 2.0**-11, "bf16": 2.0**-8}


def nvfp4(x: np.ndarray, scale: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the E2M1 codes and E4M3 group scales of ``x`` [.., K].

    A group has 16 values. The scale of a group is amax / (6 * scale), or 1 if all values are zero.
    """
    wide, whole = x.astype(np.float32), np.float32(scale)
    groups = wide.reshape(*x.shape[:-1], -1, 16)
    wanted = np.abs(groups).max(-1) / (np.float32(6) * whole)
    wanted[wanted == 0] = 1
    group_scales = np.clip(wanted, 2.0**-9, 448).astype(ml_dtypes.float8_e4m3fn)
    scaled = groups / (group_scales.astype(np.float32) * whole)[..., None]
    return scaled.clip(-6, 6).astype(ml_dtypes.float4_e2m1fn).reshape(x.shape), group_scales


def nvfp4_values(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Return ``x`` rounded to NVFP4, as fp32."""
    codes, group_scales = nvfp4(x, scale)
    each = np.repeat(group_scales.astype(np.float32) * np.float32(scale), 16, axis=-1)
    values: np.ndarray = codes.astype(np.float32) * each
    return values


class TRT_FP4DynamicQuantize(OpRun):
    """The operator of TensorRT, as a class for onnx.reference."""

    op_domain = "trt"

    def _run(
        self, x: np.ndarray, scale: np.ndarray, axis: int, block_size: int, scale_type: int
    ) -> tuple[np.ndarray, ...]:
        assert (axis, block_size, scale_type) == (-1, 16, onnx.TensorProto.FLOAT8E4M3FN)
        return nvfp4(x, scale)


def _bundle(precision: str, activations: str, target: str = "rtx5090") -> Path:
    # By default, activations are in bf16, as the checkpoint is.
    is_default = precision in ("fp16", "bf16") or activations == "bf16"
    return gpu_bundle(precision, target, activations=None if is_default else activations)


def _feed(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    """The inputs of a pass with 7 tokens, 5 cached tokens and 3 scored rows."""
    rng = np.random.default_rng(5)
    T, S = 7, 5
    feed = {
        "input_ids": rng.integers(0, 150, (1, T)),
        "position_ids": np.arange(S, S + T)[None],
        "score_rows": np.array([[0, 3, 6]]),
    }
    for value in model.graph.input[3:]:
        kind = value.type.tensor_type
        heads, size = kind.shape.dim[1].dim_value, kind.shape.dim[3].dim_value
        dtype = BF16 if kind.elem_type == onnx.TensorProto.BFLOAT16 else np.float16
        feed[value.name] = rng.standard_normal((1, heads, S, size)).astype(dtype)
    return feed


def _session(path: Path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, 1
    # The graph runs without optimisation. Fused kernels would round at other places, depending on
    # the form of the graph.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def _reference(
    model: onnx.ModelProto, names: list[str], feed: dict[str, np.ndarray]
) -> list[np.ndarray]:
    """Compute any tensors of a graph with ONNX's reference implementation."""
    wanted = onnx.ModelProto()
    wanted.CopyFrom(model)
    del wanted.graph.output[:]
    wanted.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    found: list[np.ndarray] = ReferenceEvaluator(
        wanted, new_ops=[TRT_FP4DynamicQuantize, GatherElements]
    ).run(names, feed)
    return found


# The operators for agx-orin exist in opset 21, but not in 23.
IN_FP16 = [(name, "rtx4090") for name in ("fp16", "int8", "int8-static", "int4", "fp8")]
IN_FP16 += [(name, "agx-orin") for name in ("fp16", "int8", "int4")]


@pytest.mark.parametrize(
    ("precision", "target"),
    slow_except([("int8-static", "rtx4090"), ("fp8", "rtx4090"), ("int4", "agx-orin")], IN_FP16),
)
def test_a_device_graph_in_fp16_computes_exactly_what_was_judged(
    precision: str, target: str
) -> None:
    bundle = _bundle(precision, "fp16", target)
    feed = _feed(onnx.load(bundle / "device.onnx", load_external_data=False))
    # In both graphs, the same kernels get the same values, so the results must be equal. For INT8,
    # denoiser.onnx has the zero point 128 and device.onnx has 0, but the codes of both graphs
    # represent the same values.
    judged, device = (
        _session(bundle / name).run(None, feed) for name in ("denoiser.onnx", "device.onnx")
    )
    for ours, theirs in zip(device, judged, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    ("precision", "activations", "tolerance"),
    [
        # The two graphs round partial sums of matrix products at different places. The logits may
        # differ by a few rounding errors of their range.
        ("bf16", "bf16", 4 * 2.0**-8),
        ("int4", "bf16", 4 * 2.0**-8),
        # If an input is close to a rounding boundary, the two graphs may give it neighbouring
        # codes, which differ by 1/16 or 1/4. With 64 inputs per layer, a few such inputs change a
        # logit. The formats above do not quantise activations, so their results are exact up to
        # rounding.
        ("fp8", "bf16", 0.08),
        ("nvfp4", "bf16", 0.16),
    ],
)
def test_a_device_graph_computes_what_was_judged(
    precision: str, activations: str, tolerance: float
) -> None:
    bundle = _bundle(precision, activations)
    model, judged = onnx.load(bundle / "device.onnx"), onnx.load(bundle / "denoiser.onnx")
    names = [
        value.name for value in judged.graph.output if value.name.startswith(("logits", "present"))
    ]
    feed = _feed(model)
    for name, ours, theirs in zip(
        names, _reference(model, names, feed), _reference(judged, names, feed), strict=True
    ):
        expected = theirs.astype(np.float32)
        worst = float(np.abs(ours.astype(np.float32) - expected).max() / np.ptp(expected))
        assert worst <= tolerance, f"{name}: {worst:.3f} of its range"


def _operands(model: onnx.ModelProto) -> dict[str, tuple[str, str]]:
    """Return the names of the two operands of each layer's multiplication.

    The metadata of a node names its layer.
    """
    found = {}
    for node in model.graph.node:
        if node.op_type == "MatMul":
            layer = next(
                entry.value for entry in node.metadata_props if entry.key == "dlm_export.layer"
            )
            found[layer] = node.input[0], node.input[1]
    assert len(found) == 2 * 7 + 1
    return found


@pytest.mark.parametrize("activations", ["fp16", "bf16"])
def test_both_graphs_round_activations_to_nvfp4_as_it_is_defined(
    activations: str,
) -> None:
    bundle = _bundle("nvfp4", activations)
    for name, op_type in (
        ("device.onnx", "TRT_FP4DynamicQuantize"),
        ("denoiser.onnx", "NVFP4QuantizeDequantize"),
    ):
        model = onnx.load(bundle / name)
        makers = {output: node for node in model.graph.node for output in node.output}
        pairs, layers = [], []
        for layer, (operand, _) in _operands(model).items():
            node = makers[operand]
            while node.op_type in ("Cast", "DequantizeLinear"):
                node = makers[node.input[0]]
            if node.op_type == op_type:
                pairs += [node.input[0], node.input[1], operand]
                layers.append(layer)
        assert len(layers) == 14
        arrays = _reference(model, pairs, _feed(onnx.load(bundle / "device.onnx")))
        for layer, x, scale, rounded in zip(
            layers, arrays[0::3], arrays[1::3], arrays[2::3], strict=True
        ):
            expected = nvfp4_values(x, scale)
            error = np.abs(rounded.astype(np.float32) - expected)
            assert np.all(error <= 2 * ROUNDING[activations] * np.abs(expected)), (name, layer)


@pytest.mark.parametrize(
    ("precision", "activations"), [("int8-static", "fp16"), ("fp8", "bf16"), ("nvfp4", "bf16")]
)
def test_both_graphs_have_the_same_ranges_of_activations(precision: str, activations: str) -> None:
    bundle = _bundle(precision, activations)
    device, judged = (
        {
            value.name: float(onnx.numpy_helper.to_array(value))
            for value in onnx.load(bundle / name, load_external_data=False).graph.initializer
            if value.name.endswith(".input_scale")
        }
        for name in ("device.onnx", "denoiser.onnx")
    )
    assert device == judged
    assert len(device) == 2 * 4  # per layer, one input each of: q, k and v; out; gate and up; down


# ---- Bytes ----


def _external(model: onnx.ModelProto) -> dict[str, dict[str, str]]:
    """Return the location, offset and length of each initialiser outside the graph's file."""
    return {
        value.name: {entry.key: entry.value for entry in value.external_data}
        for value in model.graph.initializer
        if value.external_data
    }


@pytest.mark.parametrize(
    ("precision", "target"), [("fp16", "rtx5090"), ("nvfp4", "rtx5090"), ("int4", "agx-orin")]
)
def test_both_graphs_point_at_the_same_bytes(precision: str, target: str) -> None:
    bundle = _bundle(precision, "fp16", target)
    device, judged = (
        onnx.load(bundle / name, load_external_data=False)
        for name in ("device.onnx", "denoiser.onnx")
    )
    assert _external(device) == _external(judged)
    assert {entry["location"] for entry in _external(device).values()} == {"denoiser.onnx.data"}
    held = sum(len(value.raw_data) for value in device.graph.initializer)
    assert held < 4096, "weights are in the graph's own file"


@pytest.mark.parametrize("activations", ["fp16", "bf16"])
def test_nvfp4_weights_lie_in_the_data_file_as_packed(activations: str) -> None:
    bundle = _bundle("nvfp4", activations)
    data = (bundle / "denoiser.onnx.data").read_bytes()
    places = _external(onnx.load(bundle / "device.onnx", load_external_data=False))

    def held(name: str) -> bytes:
        offset, length = int(places[name]["offset"]), int(places[name]["length"])
        return data[offset : offset + length]

    stored: dict[str, Any] = load_file(tiny() / "model.safetensors")
    dtype = {"fp16": np.float16, "bf16": BF16}[activations]
    for layer, name in (("attention.q", "self_attn.q_proj"), ("mlp.down", "mlp.down_proj")):
        matrix = stored[f"model.layers.1.{name}.weight"].float().numpy().T
        weight = quantise_weight(matrix, "nvfp4", scale_dtype=dtype)
        path = f"blocks.1.{layer}.weight"
        assert held(f"{path}.codes") == pack_nibbles(weight.codes).tobytes()
        assert held(f"{path}.scales") == weight.scales.tobytes()
        whole = np.asarray(weight.global_scale).astype(dtype)
        assert held(f"{path}.global_scale") == whole.tobytes()
