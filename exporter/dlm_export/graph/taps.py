"""Where the inputs and outputs of layers stand in a graph, and a graph that shows them while it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from dlm_export.graph import GRAPH_FILE, LAYER_KEY
from dlm_export.graph.trace import Graph


@dataclass(frozen=True)
class Tap:
    """Names of the values that go into a layer and come out of it, its bias added."""

    input: str
    output: str


def find_taps(traced: Graph) -> dict[str, Tap]:
    """The taps of all layers of a traced graph by path. Rewriting keeps the names, where it keeps the values."""
    found = {}
    for node in traced.model.graph:
        layer = node.metadata_props.get(LAYER_KEY, "")
        weight = node.inputs[1] if node.op_type == "MatMul" else None
        if weight is None or not weight.is_initializer():
            continue
        x, y = node.inputs[0], node.outputs[0]
        for user, _ in y.uses():
            if user.op_type == "Add" and user.metadata_props.get(LAYER_KEY) == layer:
                y = user.outputs[0]
        assert x is not None
        found[layer] = Tap(str(x.name), str(y.name))
    return found


def show(folder: Path, taps: Mapping[str, Tap]) -> tuple[bytes, set[str]]:
    """The graph of a bundle with fp32 outputs of the tapped values' own names with ``tap:`` before, and which names it has.

    An output that a fused operator keeps to itself is not there any more. Weights stay in the bundle's data file.
    """
    model = ir.load(folder / GRAPH_FILE)
    wanted = {name for tap in taps.values() for name in (tap.input, tap.output)}
    there = {str(value.name): value for node in model.graph for value in node.outputs if value.name in wanted}
    for name, value in there.items():
        cast = ir.node("Cast", [value], {"to": ir.DataType.FLOAT}, metadata_props={LAYER_KEY: "tap"})
        shown = cast.outputs[0]
        shown.name, shown.type = f"tap:{name}", ir.TensorType(ir.DataType.FLOAT)
        model.graph.append(cast)
        model.graph.outputs.append(shown)
    return ir.to_proto(model).SerializeToString(), set(there)
