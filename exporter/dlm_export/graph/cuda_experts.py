"""Computes mixtures of experts with ONNX Runtime's operators MoE and QMoE, for its CUDA provider.

Both operators compute only the experts that the router chose for a token. MoE multiplies by weights
in the type of the activations, and QMoE by INT8 or INT4 weights. An operator has two weights:

=====================  ==================================  ========================================
``fc1``                ``[E, 2 * N, K]``                   gate and up of each expert, with one row of
                                                           gate and one row of up in turn
``fc2``                ``[E, K, N]``                       down of each expert
``fc1_scales``         ``[E, 2 * N]``                      INT8: a scale for each row
``fc2_scales``         ``[E, K]``
``fc1_scales``         ``[E, 2 * N, K / group_size]``      INT4: a scale for each group of inputs
``fc2_scales``         ``[E, K, N / group_size]``
=====================  ==================================  ========================================

INT4 codes are stored in pairs, as in MatMulNBits. The operators choose experts themselves, so they
get numbers by which they choose the experts that the router has chosen.

Sources: docs/contrib_ops/cuda/moe_qmoe.md of ONNX Runtime, and the messages in
libonnxruntime_providers_cuda.so of onnxruntime-gpu 1.31.1. The CPU provider computes the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from dlm_calibration.precision_rounding import QuantisedWeight
from dlm_calibration.precisions import FORMATS, HIGH, LayerFormat
from dlm_export.graph import MICROSOFT_DOMAIN, operators
from dlm_export.graph.body import DOMAIN
from dlm_export.graph.edits import constant, initialiser, replace
from dlm_export.graph.experts import Mixture, Operators, StackPart, mixtures
from dlm_export.graph.parts import block_of
from dlm_export.graph.trace import Graph
from dlm_export.network.spec import ExpertsSpec

# Routing weights below this fraction of the largest one count as this fraction.
_LEAST_SHARE = 1e-30


def replace_mixtures(graph: Graph, formats: Mapping[str, str]) -> dict[str, StackPart]:
    """Replace every mixture of the graph with MoE or QMoE.

    The network must be one for which ``NetworkSpec.suits_moe`` is true. ``formats`` contains the
    format of each quantised layer. Returns a dict that maps the name of each new initialiser to its
    description.
    """
    parts: dict[str, StackPart] = {}
    main, network = graph.model.graph, graph.network
    for node, stacks in mixtures(graph.model, network):
        gate = stacks[0]
        path = gate.path.removesuffix(".gate")
        chosen = FORMATS[formats.get(gate.path, HIGH)]
        inputs: dict[str, ir.Value] = {}
        for part, (shape, dtype) in _weights(stacks, chosen, graph.element_type).items():
            inputs[part] = initialiser(main, f"{path}.{part}", shape, dtype)
            parts[f"{path}.{part}"] = StackPart(gate.path, part, shape)
        for stack in stacks:
            del main.initializers[stack.weight]
        block = block_of(node)
        assert block is not None
        spec = network.layers[block].mlp
        assert isinstance(spec, ExpertsSpec)
        attributes = {"k": spec.active, "activation_type": "swiglu", "swiglu_fusion": 1}
        ops = Operators(main, node)
        make = _moe if chosen.weights is None else _qmoe
        replace(main, node, make(ops, inputs, graph.element_type, chosen, attributes))
    graph.model.opset_imports.pop(DOMAIN, None)
    graph.model.opset_imports[MICROSOFT_DOMAIN] = 1
    return parts


def _weights(
    stacks: Mixture, chosen: LayerFormat, dtype: ir.DataType
) -> dict[str, tuple[tuple[int, ...], ir.DataType]]:
    """Return the shapes and types of a mixture's initialisers."""
    gate, _, down = stacks
    found: dict[str, tuple[tuple[int, ...], ir.DataType]] = {}
    for name, rows, inputs in (
        ("fc1", 2 * gate.outputs, gate.inputs),
        ("fc2", down.outputs, down.inputs),
    ):
        if chosen.weights is None:
            found[name] = ((gate.count, rows, inputs), dtype)
            continue
        width = inputs * operators.BITS[chosen.weights] // 8
        groups = () if chosen.group_size is None else (inputs // chosen.group_size,)
        found[name] = ((gate.count, rows, width), ir.DataType.UINT8)
        found[f"{name}_scales"] = ((gate.count, rows, *groups), dtype)
    return found


def _moe(
    ops: Operators,
    weights: Mapping[str, ir.Value],
    dtype: ir.DataType,
    chosen: LayerFormat,
    attributes: Mapping[str, Any],
) -> ir.Value:
    """Insert MoE, and return its result multiplied by the sum of a token's routing weights.

    MoE chooses the experts with the largest router outputs. It mixes them by the softmax of these
    outputs over the chosen experts. With the logarithms of the routing weights, the result is the
    routing weights divided by their sum.
    """
    assert chosen.weights is None
    fp32 = ir.DataType.FLOAT
    x, given = ops.before.inputs[0], ops.before.inputs[2]
    least = constant(ops.graph, "least_share", np.array(_LEAST_SHARE, np.float32))
    largest = ops.add("ReduceMax", given, ops.ints(-1), gives=fp32)
    largest = ops.add("Add", largest, least, gives=fp32)
    relative = ops.add("Div", ops.shares(_count(weights)), largest, gives=fp32)
    logarithms = ops.add("Log", ops.add("Add", relative, least, gives=fp32), gives=fp32)
    y = ops.add(
        "MoE",
        *(x, _by_token(ops, logarithms, weights, dtype), weights["fc1"], None, weights["fc2"]),
        gives=dtype,
        domain=MICROSOFT_DOMAIN,
        normalize_routing_weights=1,
        **attributes,
    )
    total = ops.add("ReduceSum", given, ops.ints(-1), gives=fp32)
    return ops.add("Mul", y, ops.add("Cast", total, to=dtype, gives=dtype), gives=dtype)


def _qmoe(
    ops: Operators,
    weights: Mapping[str, ir.Value],
    dtype: ir.DataType,
    chosen: LayerFormat,
    attributes: Mapping[str, Any],
) -> ir.Value:
    """Insert QMoE, and return its result.

    QMoE gets the routing weights twice. It chooses the experts with the largest numbers in the first
    copy, and mixes them by the numbers in the second copy.
    """
    shares = _by_token(ops, ops.shares(_count(weights)), weights, dtype)
    attributes = {**attributes, "expert_weight_bits": operators.BITS[str(chosen.weights)]}
    if chosen.group_size is not None:
        attributes["block_size"] = chosen.group_size
    first, second = ((weights[name], weights[f"{name}_scales"]) for name in ("fc1", "fc2"))
    return ops.add(
        "QMoE",
        *(ops.before.inputs[0], shares, *first, None, *second, *[None] * 7, shares),
        gives=dtype,
        domain=MICROSOFT_DOMAIN,
        weights_prepacked=0,
        **attributes,
    )


def _count(weights: Mapping[str, ir.Value]) -> int:
    shape = weights["fc1"].shape
    assert shape is not None
    return int(shape[0])  # type: ignore[arg-type]


def _by_token(
    ops: Operators, value: ir.Value, weights: Mapping[str, ir.Value], dtype: ir.DataType
) -> ir.Value:
    """Convert a number for each expert, fp32 ``[B, T, E]``, to the type and shape for MoE."""
    flat = ops.add("Reshape", value, ops.ints(-1, _count(weights)), gives=ir.DataType.FLOAT)
    return ops.add("Cast", flat, to=dtype, gives=dtype)


# ---- Contents of initialisers ----


def layers_of(part: StackPart) -> tuple[str, ...]:
    """Return the paths of the stacks that an initialiser contains."""
    if part.part.startswith("fc2"):
        return (part.layer.removesuffix(".gate") + ".down",)
    return part.layer, part.layer.removesuffix(".gate") + ".up"


def rows_of(matrices: Sequence[np.ndarray]) -> np.ndarray:
    """Return one expert's weights ``[rows, inputs]``, for matrices ``[inputs, outputs]``."""
    return _in_turn([matrix.T for matrix in matrices])


def codes_of(quantised: Sequence[QuantisedWeight]) -> np.ndarray:
    """Return one expert's packed codes ``[rows, bytes]``."""
    packed = []
    for weight in quantised:
        size = weight.group_size or operators.DOT
        blocks = operators.lazy_blocks(weight.codes, operators.BITS[weight.format], size)
        packed.append(blocks[(slice(None),)].reshape(blocks.shape[0], -1))
    return _in_turn(packed)


def scales_of(quantised: Sequence[QuantisedWeight]) -> np.ndarray:
    """Return one expert's scales ``[rows]`` or ``[rows, groups]``."""
    return _in_turn([weight.scales.T for weight in quantised])


def _in_turn(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Join arrays of equal shapes, one row of each in turn."""
    joined: np.ndarray = np.stack(rows, 1).reshape(-1, *rows[0].shape[1:])
    return joined
