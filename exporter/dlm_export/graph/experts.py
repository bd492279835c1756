"""Mixtures of experts in a traced graph: each is one node, whose weights are laid out for the CPU's kernels here.

A traced node has stacks ``[E, K, N]`` as they are. A kernel takes panels (``functions``), in one format for all three stacks
of a mixture: fp32, INT8, or INT4 in groups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from dlm_calibration.pieces import Index, Lazy
from dlm_calibration.recipes import FORMATS, HIGH
from dlm_export.graph import LAYER_KEY, functions
from dlm_export.graph.body import DOMAIN
from dlm_export.network.spec import LinearSpec, NetworkSpec

EXPERTS = "Experts"
_CALLS = {None: "Fp32Experts", "int8": "Int8Experts", "int4": "Int4Experts"}


@dataclass(frozen=True)
class StackPart:
    """What an initialiser holds of the experts of a layer: ``panels``, or ``panel_scales``."""

    layer: str
    part: str
    shape: tuple[int, ...]


def lay_out(model: ir.Model, network: NetworkSpec, formats: Mapping[str, str]) -> dict[str, StackPart]:
    """Give every mixture of an fp32 graph panels in the format of its layers, in place; what its new initialisers hold.

    ``formats``: layer -> format, the same for the three stacks of a mixture; those left out are in fp32.
    """
    parts: dict[str, StackPart] = {}
    by_path = {gate.path.removesuffix(".gate"): (gate, up, down) for gate, up, down in network.mixtures()}
    for node in list(model.graph):
        if node.op_type != EXPERTS or node.domain != DOMAIN:
            continue
        stacks = by_path[node.metadata_props[LAYER_KEY]]
        (held,) = {formats.get(stack.path, HIGH) for stack in stacks}
        chosen = FORMATS[held]
        name = _CALLS[chosen.weights]
        functions.declare(model, name)
        inputs = list(node.inputs[:3])
        for stack in stacks:
            for part, (shape, dtype) in _initialisers(stack, held).items():
                value = ir.Value(name=f"{stack.weight}.{part}", shape=ir.Shape(shape), type=ir.TensorType(dtype))
                model.graph.initializers[str(value.name)] = value
                parts[str(value.name)] = StackPart(stack.path, part, shape)
                inputs.append(value)
        gate, _, down = stacks
        attributes: dict[str, list[int] | int] = {"columns": [gate.outputs] * 2, "out_columns": [down.outputs]}
        if chosen.group_size is not None:
            attributes["group_size"] = chosen.group_size
        call = ir.node(name, inputs, attributes, domain=DOMAIN, metadata_props=dict(node.metadata_props))
        model.graph.insert_before(node, call)
        old, new = node.outputs[0], call.outputs[0]
        kept, new.shape, new.type = old.name, old.shape, old.type
        old.replace_all_uses_with(new)
        new.name, old.name = kept, None
        model.graph.remove(node, safe=True)
        for stack in stacks:
            del model.graph.initializers[stack.weight]
    if parts:
        del model.functions[DOMAIN, EXPERTS, ""]
    return parts


def _initialisers(stack: LinearSpec, held: str) -> dict[str, tuple[tuple[int, ...], ir.DataType]]:
    """Part -> shape and type."""
    chosen, count = FORMATS[held], functions.padded(stack.outputs) // functions.PANEL
    in_front, lines = (stack.count, count), (functions.PANEL, functions.DOT)
    if chosen.weights is None:
        return {"panels": ((*in_front, stack.inputs, functions.PANEL), ir.DataType.FLOAT)}
    if chosen.group_size is None:
        codes, scales = (*in_front, stack.inputs // functions.DOT, *lines), (stack.count, count * functions.PANEL)
        return {"panels": (codes, ir.DataType.UINT8), "panel_scales": (scales, ir.DataType.FLOAT)}
    groups = -(-stack.inputs // chosen.group_size)
    return {
        "panels": ((*in_front, stack.inputs // functions.PAIRS, *lines), ir.DataType.UINT8),
        "panel_scales": ((*in_front, groups, functions.PANEL), ir.DataType.FLOAT16),
    }


def stacked(shape: tuple[int, ...], of_expert: Callable[[int], np.ndarray]) -> Lazy:
    """An array with one entry an expert, each made when it is asked for."""

    def read(at: Index) -> np.ndarray:
        return np.stack([of_expert(expert) for expert in range(shape[0])[at[0]]])

    return Lazy(shape, read)


def fp32_panels(matrix: np.ndarray) -> np.ndarray:
    """A matrix ``[K, N]`` as fp32 ``[ceil(N / 32), K, 32]``."""
    inputs, columns = matrix.shape
    whole = np.zeros((inputs, functions.padded(columns)), np.float32)
    whole[:, :columns] = matrix
    return np.ascontiguousarray(whole.reshape(inputs, -1, functions.PANEL).transpose(1, 0, 2))
