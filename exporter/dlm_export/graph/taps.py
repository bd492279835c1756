"""Where the inputs and outputs of layers stand in a graph, and how a run shows them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from dlm_export.graph import LAYER_KEY
from dlm_export.graph.body import DOMAIN
from dlm_export.graph.routed import MIXTURE
from dlm_export.graph.trace import Graph

ROUTES = ".routes"
"""How the name of a second tap of a mixture of experts ends: the chosen experts as its input, their
weights as its output.
"""
SHOWN = "tap:"
"""What the name of a shown value begins with."""


@dataclass(frozen=True)
class Tap:
    """Names of the values that go into a layer and come out of it, its bias added."""

    input: str
    output: str


def weight_of(node: ir.Node) -> ir.Value | None:
    """A MatMul's weight: an initialiser, or a tied head's transposed one; otherwise None."""
    weight = node.inputs[1] if node.op_type == "MatMul" else None
    if weight is None or weight.is_initializer():
        return weight
    transpose = weight.producer()
    if transpose is None or transpose.op_type != "Transpose":
        return None
    table = transpose.inputs[0]
    return weight if table is not None and table.is_initializer() else None


def find_taps(traced: Graph) -> dict[str, Tap]:
    """The taps of all layers of a traced graph by path; rewriting keeps these names."""
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
    """Give a graph, or a part of one, fp32 outputs for the tapped values that it has: their own
    names with ``SHOWN`` before.

    An output that a fused operator keeps to itself is not there any more.
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
