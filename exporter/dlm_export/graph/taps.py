"""Finds the inputs and outputs of layers in a graph.

A ``Tap`` contains the names of a layer's input and output. ``show`` adds these values to the
outputs of the graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from dlm_export.graph import LAYER_KEY
from dlm_export.graph.body import DOMAIN
from dlm_export.graph.routed import MIXTURES
from dlm_export.graph.trace import Graph

ROUTES = ".routes"
"""The suffix of the path of a mixture's second tap.

The input of this tap contains the indices of the chosen experts of each token. Its output contains
the routing weights of these experts.
"""
SHOWN = "tap:"
"""Prefix of the names of outputs that ``show`` adds."""


@dataclass(frozen=True)
class Tap:
    """Names of a layer's input and output values. The output includes the layer's bias."""

    input: str
    output: str


def weight_of(node: ir.Node) -> ir.Value | None:
    """Return the weight of a MatMul, or ``None`` if the node does not multiply by a weight.

    The weight is an initialiser or, for a tied head, a transposed initialiser.
    """
    weight = node.inputs[1] if node.op_type == "MatMul" else None
    if weight is None or weight.is_initializer():
        return weight
    transpose = weight.producer()
    if transpose is None or transpose.op_type != "Transpose":
        return None
    table = transpose.inputs[0]
    return weight if table is not None and table.is_initializer() else None


def find_taps(traced: Graph) -> dict[str, Tap]:
    """Map the module path of every layer to its tap (the names of its input and output).

    A tap stays valid when the graph is changed later, because changes keep the names of the inputs
    and outputs of layers.
    """
    found: dict[str, Tap] = {}
    for node in traced.model.graph:
        layer = node.metadata_props.get(LAYER_KEY, "")
        # A mixture of experts has a second tap, for the chosen experts and their routing weights.
        if node.domain == DOMAIN and node.op_type in MIXTURES:
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
    """Add an fp32 output to a graph or part for every value of ``taps`` that it contains.

    The name of each added output is ``SHOWN`` plus the value's name. Values that are inside a fused
    operator get no output.
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
