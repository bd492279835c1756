"""Replaces mixtures of experts in a traced graph, and stores the experts' weights for the engine.

In a traced graph, each mixture of experts is one node. The inputs of the node include three stacks
of matrices: gate, up and down. A stack ``[E, K, N]`` contains one matrix for each of ``E`` experts.
Each matrix has ``K`` inputs and ``N`` outputs.

- For a CPU, ``lay_out`` replaces the node with a function that computes only the chosen experts.
  All three stacks must have the same number format. The runtime has kernels for FP32, INT8 and
  INT4. FP8 and NVFP4 are simulated with fp32 operators.
- For ONNX Runtime's CUDA provider, ``cuda_experts`` replaces the node with an operator that computes
  only the chosen experts, if the provider has one.
- For TensorRT on devices with a MoE layer, ``call_moe_layer`` replaces the node with this layer.
- For other GPUs, ``spread`` replaces the node with one wide gated MLP that computes all experts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from dlm_calibration.pieces import Index, Lazy
from dlm_calibration.precision_rounding import activation_scale
from dlm_calibration.precisions import FORMATS, HIGH
from dlm_export.graph import LAYER_KEY, MOE_LAYER, TRT_DOMAIN, operators
from dlm_export.graph.body import DOMAIN
from dlm_export.graph.edits import constant, initialiser, replace
from dlm_export.graph.routed import FUNCTIONS, GELU, MIXTURES, RANGES
from dlm_export.network.spec import LinearSpec, NetworkSpec

Mixture = tuple[LinearSpec, LinearSpec, LinearSpec]
_SILU = 1  # the attribute ``activation_type`` of TRT_MoE


@dataclass(frozen=True)
class StackPart:
    """Says which part of a layer's expert weights an initialiser contains.

    ``part`` is ``panels``, ``panel_scales``, ``codes``, ``scales``, ``global_scale``, ``wide``, or one
    of the parts of ``cuda_experts``. ``wide`` is the single matrix into which ``join`` puts the
    matrices of all experts.
    """

    layer: str
    part: str
    shape: tuple[int, ...]


def function_of(name: str) -> str | None:
    """Return the name of the ONNX function that computes experts in the layer format ``name``.

    Returns ``None`` if there is no such function. For the activation gelu-tanh, the caller must
    prefix the returned name with ``GELU``.
    """
    chosen = FORMATS[name]
    if chosen.weights == "nvfp4" and chosen.activations is None:
        return "NVFP4WeightExperts"
    if chosen.weights in ("int8", "int4"):
        return f"{chosen.weights.capitalize()}Experts" if chosen.is_dynamic else None
    function = "Fp32Experts" if chosen.weights is None else f"{chosen.weights.upper()}Experts"
    return function if function in FUNCTIONS else None


def mixtures(model: ir.Model, network: NetworkSpec) -> Iterator[tuple[ir.Node, Mixture]]:
    """For each mixture of experts in a traced graph, yield its node and its three stacks.

    The caller must replace each node. After the last node, this function removes the definition of
    the traced mixture from the model.
    """
    by_path = {mixture[0].path.removesuffix(".gate"): mixture for mixture in network.mixtures()}
    for node in list(model.graph):
        if node.op_type in MIXTURES and node.domain == DOMAIN:
            yield node, by_path[node.metadata_props[LAYER_KEY]]
    for name in MIXTURES:
        model.functions.pop((DOMAIN, name, ""), None)


def lay_out(
    model: ir.Model, network: NetworkSpec, formats: Mapping[str, str], amax: Mapping[str, float]
) -> dict[str, StackPart]:
    """Replace every mixture of an fp32 graph with a function for the format of its matrices.

    ``formats`` contains the format of each layer. The gate, up and down matrices of a mixture must
    have the same format. A layer that ``formats`` does not contain stays in fp32. ``amax`` maps a
    layer to the largest magnitude of its input. Larger inputs are clipped. Only formats with a
    fixed input range need this value. Returns a dict that maps the name of each new initialiser to
    its description.
    """
    parts: dict[str, StackPart] = {}
    for node, stacks in mixtures(model, network):
        gate, _, down = stacks
        (held,) = {formats.get(stack.path, HIGH) for stack in stacks}
        chosen, name = FORMATS[held], function_of(held)
        assert name is not None, held
        is_gelu = node.op_type.startswith(GELU)
        name = f"{GELU}{name}" if is_gelu else name
        operators.declare(model, name)
        inputs = list(node.inputs[:3])
        for stack in stacks:
            for part, (shape, dtype) in _initialisers(stack, held).items():
                value = initialiser(model.graph, f"{stack.weight}.{part}", shape, dtype)
                parts[str(value.name)] = StackPart(stack.path, part, shape)
                inputs.append(value)
        if FUNCTIONS[name].has_ranges:
            for layer, scale in zip((gate, down), RANGES, strict=True):
                number = activation_scale(str(chosen.activations), amax[layer.path])
                path = gate.path.removesuffix(".gate")
                inputs.append(constant(model.graph, f"{path}.{scale}", number))
        attributes: dict[str, list[int] | int] = {}
        if chosen.weights != "fp8":
            attributes = {
                "columns": [gate.outputs] * (1 if chosen.weights == "nvfp4" or is_gelu else 2),
                "out_columns": [down.outputs],
            }
        if chosen.weights == "int4" and chosen.group_size is not None:
            attributes["group_size"] = chosen.group_size
        call = ir.node(
            name, inputs, attributes, domain=DOMAIN, metadata_props=dict(node.metadata_props)
        )
        model.graph.insert_before(node, call)
        replace(model.graph, node, call.outputs[0])
        for stack in stacks:
            del model.graph.initializers[stack.weight]
    return parts


def spread(model: ir.Model, network: NetworkSpec) -> dict[str, StackPart]:
    """Replace every mixture of the graph with operators that compute all experts for every token.

    The matrices of all E experts become one matrix. For gate and up, this matrix is ``[K, E * N]``,
    with the experts side by side. For down, the matrix is ``[E * N, K]``, so the product with
    this matrix also adds up the results of the experts. Before the down projection, the graph
    multiplies the features of each expert by the token's routing weight for this expert. The
    routing weight is 0 for experts that the router did not choose for the token. Returns a dict
    that maps the name of each new initialiser to its description.
    """
    parts: dict[str, StackPart] = {}
    for node, stacks in mixtures(model, network):
        dtype = model.graph.initializers[stacks[0].weight].dtype
        assert dtype is not None
        for stack in stacks:
            model.graph.initializers.pop(stack.weight)
            shape = stack.wide_shape
            initialiser(model.graph, stack.weight, shape, dtype)
            parts[stack.weight] = StackPart(stack.path, "wide", shape)
        replace(model.graph, node, _all_experts(model, node, stacks, dtype))
    model.graph.opset_imports.pop(DOMAIN, None)  # no node calls the traced mixture any more
    return parts


class Operators:
    """Inserts operators into a graph before a node, with the module path of this node."""

    def __init__(self, graph: ir.Graph, before: ir.Node) -> None:
        self.graph, self.before = graph, before

    def add(
        self,
        op_type: str,
        *inputs: ir.Value | None,
        gives: ir.DataType,
        layer: str | None = None,
        domain: str = "",
        **attributes: Any,
    ) -> ir.Value:
        """Insert an operator, and return its output, which has the type ``gives``."""
        metadata = {LAYER_KEY: layer or self.before.metadata_props[LAYER_KEY]}
        made = ir.node(op_type, list(inputs), attributes, domain=domain, metadata_props=metadata)
        self.graph.insert_before(self.before, made)
        made.outputs[0].type = ir.TensorType(gives)
        return made.outputs[0]

    def ints(self, *values: int) -> ir.Value:
        name = f"ints.{'.'.join(map(str, values))}"
        return constant(self.graph, name, np.array(values, np.int64))

    def shares(self, count: int) -> ir.Value:
        """Return the routing weight of every token for each of ``count`` experts, fp32 ``[B, T, E]``.

        The weight is 0 for experts that the router did not choose for the token.
        """
        _, chosen, weights = self.before.inputs[:3]
        fp32 = ir.DataType.FLOAT
        every = np.arange(count, dtype=np.int64)
        numbers = constant(self.graph, f"experts.{count}", every)
        slots = self.add("Unsqueeze", chosen, self.ints(-1), gives=ir.DataType.INT64)
        is_mine = self.add("Equal", slots, numbers, gives=ir.DataType.BOOL)
        by_slot = self.add("Unsqueeze", weights, self.ints(-1), gives=fp32)
        taken = self.add("Cast", is_mine, to=fp32, gives=fp32)
        by_choice = self.add("Mul", taken, by_slot, gives=fp32)
        return self.add("ReduceSum", by_choice, self.ints(-2), gives=fp32, keepdims=0)


def _all_experts(model: ir.Model, before: ir.Node, stacks: Mixture, dtype: ir.DataType) -> ir.Value:
    """Insert operators that compute all experts of a mixture, and return the sum ``[B, T, K]``."""
    gate, up, down = stacks
    ops = Operators(model.graph, before)
    ints, op = ops.ints, functools.partial(ops.add, gives=dtype)

    def product(value: ir.Value | None, stack: LinearSpec) -> ir.Value:
        return op("MatMul", value, model.graph.initializers[stack.weight], layer=stack.path)

    x, shares = before.inputs[0], ops.shares(gate.count)
    if dtype != ir.DataType.FLOAT:
        shares = op("Cast", shares, to=dtype)
    first = product(x, gate)
    is_gelu = before.op_type.startswith(GELU)
    gated = (
        op("Gelu", first, approximate="tanh") if is_gelu else op("Mul", first, op("Sigmoid", first))
    )
    hidden = op("Mul", gated, product(x, up))
    by_expert = op("Reshape", hidden, ints(0, 0, gate.count, gate.outputs))
    weighed = op("Mul", by_expert, op("Unsqueeze", shares, ints(-1)))
    return product(op("Reshape", weighed, ints(0, 0, gate.count * gate.outputs)), down)


def call_moe_layer(model: ir.Model, network: NetworkSpec) -> None:
    """Replace every mixture of the graph with ``TRT_MoE``, which computes the chosen experts.

    TensorRT's parser turns this operator into IMoELayer. The operator is documented in
    docs/TRT_custom_ops.md of onnx-tensorrt. It multiplies by the routing weights after the down
    projection. Its indices are int32, and its stacks have the shapes of the traced mixture.
    """
    for node, _ in mixtures(model, network):
        x, chosen, weights, *stacks = node.inputs
        assert x is not None
        assert x.dtype is not None
        op = functools.partial(Operators(model.graph, node).add, gives=x.dtype)
        indices = op("Cast", chosen, to=ir.DataType.INT32, gives=ir.DataType.INT32)
        inputs = (x, indices, op("Cast", weights, to=x.dtype), *stacks)
        moe = op(MOE_LAYER, *inputs, domain=TRT_DOMAIN, activation_type=_SILU)
        replace(model.graph, node, moe)
        model.graph.opset_imports[TRT_DOMAIN] = 1
    model.graph.opset_imports.pop(DOMAIN, None)  # no node calls the traced mixture any more


def _initialisers(stack: LinearSpec, held: str) -> dict[str, tuple[tuple[int, ...], ir.DataType]]:
    """Return the shapes and types of a stack's arrays, in the order of the function's inputs."""
    chosen, count = FORMATS[held], operators.padded(stack.outputs) // operators.PANEL
    in_front, lines = (stack.count, count), (operators.PANEL, operators.DOT)
    by_column = (stack.count, count * operators.PANEL)
    if chosen.weights is None:
        return {"panels": ((*in_front, stack.inputs, operators.PANEL), ir.DataType.FLOAT)}
    if chosen.weights == "fp8":
        return {
            "codes": (stack.shape, ir.DataType.UINT8),
            "scales": ((stack.count, stack.outputs), ir.DataType.FLOAT),
        }
    if chosen.group_size is None:
        codes = (*in_front, stack.inputs // operators.DOT, *lines)
        return {
            "panels": (codes, ir.DataType.UINT8),
            "panel_scales": (by_column, ir.DataType.FLOAT),
        }
    groups = (*in_front, -(-stack.inputs // chosen.group_size), operators.PANEL)
    if chosen.weights == "nvfp4":
        return {
            "panels": ((*in_front, stack.inputs, operators.PANEL // 2), ir.DataType.UINT8),
            "panel_scales": (groups, ir.DataType.UINT8),
            "global_scale": ((), ir.DataType.FLOAT),
        }
    codes = (*in_front, stack.inputs // operators.PAIRS, *lines)
    return {"panels": (codes, ir.DataType.UINT8), "panel_scales": (groups, ir.DataType.FLOAT16)}


# ---- Contents of initialisers ----


def join(stack: LinearSpec, read: Callable[[Index], np.ndarray]) -> Lazy:
    """Join all experts' matrices of a stack into one wide matrix, for ``spread``.

    ``read`` is a function that takes an index into the stack ``[E, K, N]``, and returns the indexed
    part of the stack.
    """

    def rows(at: Index) -> np.ndarray:
        first, last, _ = at[0].indices(stack.wide_shape[0])
        if stack.role == "down":
            begin, end = first // stack.inputs, -(-last // stack.inputs)
            below = read((slice(begin, end),)).reshape(-1, stack.outputs)
            return below[first - begin * stack.inputs : last - begin * stack.inputs]
        beside: np.ndarray = read((slice(0, stack.count), slice(first, last))).transpose(1, 0, 2)
        return beside.reshape(last - first, -1)

    return Lazy(stack.wide_shape, rows)


def stacked(shape: tuple[int, ...], of_expert: Callable[[int], np.ndarray]) -> Lazy:
    """Create a lazy array with one entry per expert, which ``of_expert`` computes on access."""

    def read(at: Index) -> np.ndarray:
        return np.stack([of_expert(expert) for expert in range(shape[0])[at[0]]])

    return Lazy(shape, read)


def fp32_panels(matrix: np.ndarray) -> np.ndarray:
    """Convert a matrix ``[K, N]`` to fp32 panels ``[ceil(N / 32), K, 32]``."""
    inputs, columns = matrix.shape
    whole = np.zeros((inputs, operators.padded(columns)), np.float32)
    whole[:, :columns] = matrix
    return np.ascontiguousarray(whole.reshape(inputs, -1, operators.PANEL).transpose(1, 0, 2))


def from_panels(panels: np.ndarray, columns: int) -> np.ndarray:
    """Convert stacked fp32 panels ``[E, ceil(N / 32), K, 32]`` back to matrices ``[E, K, N]``."""
    count, _, inputs, _ = panels.shape
    found: np.ndarray = panels.transpose(0, 2, 1, 3).reshape(count, inputs, -1)[..., :columns]
    return found


def shape_of_panels(panels: tuple[int, ...], columns: int) -> tuple[int, ...] | None:
    """Return the shape ``[E, K, N]`` of experts' matrices whose panels have the shape ``panels``.

    Returns ``None`` if ``panels`` is not a valid shape for the panels of several experts.
    """
    wanted = (operators.padded(columns) // operators.PANEL, operators.PANEL)
    is_held = len(panels) == 4 and (panels[1], panels[3]) == wanted
    return (panels[0], panels[2], columns) if is_held else None
