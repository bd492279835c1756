"""Finds the inputs and outputs of layers in a graph, and adds them to its outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from dlm_export.graph import LAYER_KEY
from dlm_export.graph.body import DOMAIN
from dlm_export.graph.routed import MIXTURE
from dlm_export.graph.trace import Graph

ROUTES = ".routes"
"""Suffix of a mixture's second tap: its input is the chosen experts, its output their weights."""
SHOWN = "tap:"
"""Prefix of the outputs that ``show`` adds."""


@dataclass(frozen=True)
class Tap:
    """Names of a layer's input value and of its output value, with bias."""

    input: str
    output: str


def weight_of(node: ir.Node) -> ir.Value | None:
    """A MatMul's weight: an initialiser, or a tied head's transposed one, else ``None``."""
    weight = node.inputs[1] if node.op_type == "MatMul" else None
    if weight is None or weight.is_initializer():
        return weight
    transpose = weight.producer()
    if transpose is None or transpose.op_type != "Transpose":
        return None
    table = transpose.inputs[0]
    return weight if table is not None and table.is_initializer() else None


def find_taps(traced: Graph) -> dict[str, Tap]:
    """Find the taps of all layers, by path; rewriting a graph keeps these names."""
    found: dict[str, Tap] = {}
    for node in traced.model.graph:
        layer = node.metadata_props.get(LAYER_KEY, "")
        # A mixture of experts has a second tap, for its routes.
        if node.domain == DOMAIN and node.op_type == MIXTURE:
            tokens, chosen, weights = (
                str(value.name) for value in node.inputs[:3] if value is not None
            )
            found |= {
                layer: Tap(tokens, str(node.outputs[0].name)),
                f"{layer}{ROUTES}": Tap(chosen, weights),
            }
            continue
        if weight_of(node) is None:
            continue
        x, y = node.inputs[0], node.outputs[0]
        for user, _ in y.uses():
            if user.op_type == "Add" and user.metadata_props.get(LAYER_KEY) == layer:
                y = user.outputs[0]
        assert x is not None
        found[layer] = Tap(str(x.name), str(y.name))
    return found


def show(model: ir.Model, taps: Mapping[str, Tap]) -> None:
    """Add fp32 outputs, named ``SHOWN`` + name, for the tapped values in a graph or part.

    Values that became internal to a fused operator are not available.
    """
    graph = model.graph
    wanted = {name for tap in taps.values() for name in (tap.input, tap.output)}
    there = [
        value
        for value in (*graph.inputs, *(out for node in graph for out in node.outputs))
        if value.name in wanted
    ]
    for value in there:
        cast = ir.node(
            "Cast", [value], {"to": ir.DataType.FLOAT}, metadata_props={LAYER_KEY: "tap"}
        )
        shown = cast.outputs[0]
        shown.name, shown.type = f"{SHOWN}{value.name}", ir.TensorType(ir.DataType.FLOAT)
        graph.append(cast)
        graph.outputs.append(shown)
