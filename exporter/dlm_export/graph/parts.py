"""Cuts a written graph along its layers; each part is a model over the same weight file.

The first part is ``embed``, then come ``blocks.I``, then ``end``: the final norm, the head and the
candidates. Parts read and return values under their names in the whole graph, so running the parts
in order equals running the graph. Values that depend on constants only are copied into each part
that needs them.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import onnx_ir as ir

from dlm_export.graph import LAYER_KEY
from dlm_runtime.errors import DlmError

EMBED, BLOCKS, END = "embed", "blocks.", "end"
_BEHIND_BLOCKS = ("final_norm", "head")


class PartError(DlmError):
    """A part lacks an input."""


@dataclass(frozen=True, eq=False)
class Part:
    """One part; its weights are in the whole graph's data file."""

    name: str
    model: ir.Model

    @property
    def inputs(self) -> list[str]:
        """Names of the part's inputs: inputs of the graph and outputs of earlier parts."""
        return [str(value.name) for value in self.model.graph.inputs]

    @property
    def outputs(self) -> list[str]:
        """Names of the part's outputs: outputs of the graph and values that later parts read."""
        return [str(value.name) for value in self.model.graph.outputs]

    @property
    def block(self) -> int | None:
        """Its layer's number; ``None`` for the first and the last part."""
        return int(self.name.removeprefix(BLOCKS)) if self.name.startswith(BLOCKS) else None

    def check_given(self, names: set[str]) -> None:
        """Raises PartError that lists the inputs missing from ``names``."""
        lacking = [name for name in self.inputs if name not in names]
        if lacking:
            raise PartError(
                f"{self.name} reads {', '.join(lacking)}, which neither the pass nor an earlier part provides"
            )


def cut(model: ir.Model) -> list[Part]:
    """Cut a graph into parts, in order; a node without a layer's path goes with its last input."""
    graph = model.graph
    layers = [block_of(node) for node in graph]
    end = max((layer for layer in layers if layer is not None), default=-1) + 2
    # An optional input has an initialiser and counts as a constant.
    made_in = {value: 0 for value in graph.inputs if not value.is_initializer()}
    crossing: dict[int, dict[ir.Value, None]] = defaultdict(dict)  # part -> values from other parts
    given: dict[int, dict[ir.Value, None]] = defaultdict(dict)  # part -> values for later parts
    for node, layer in zip(graph, layers, strict=True):
        read = [value for value in node.inputs if value is not None and value in made_in]
        if not read:
            continue  # constant
        path = node.metadata_props.get(LAYER_KEY, "")
        own = layer + 1 if layer is not None else end if path.startswith(_BEHIND_BLOCKS) else 0
        number = max(own, *(made_in[value] for value in read))
        made_in |= dict.fromkeys(node.outputs, number)
        for value in read:
            if value.is_graph_input():
                crossing[number][value] = None
            elif made_in[value] < number:
                crossing[number][value] = given[made_in[value]][value] = None
    for value in graph.outputs:
        given[made_in[value]][value] = None
    names = [EMBED, *(f"{BLOCKS}{i}" for i in range(end - 1)), END]
    return [
        Part(name, _extract(model, list(crossing[i]), list(given[i])))
        for i, name in enumerate(names)
    ]


def block_of(node: ir.Node) -> int | None:
    """The number of a node's layer, or ``None`` if it is outside the layers."""
    path = node.metadata_props.get(LAYER_KEY, "")
    return int(path.split(".")[1]) if path.startswith(BLOCKS) else None


def _extract(model: ir.Model, inputs: list[ir.Value], outputs: list[ir.Value]) -> ir.Model:
    constant = [value for value in model.graph.inputs if value.is_initializer()]
    graph = ir.convenience.extract(model.graph, [*inputs, *constant], outputs)
    for value in [value for value in graph.inputs if value.is_initializer()]:
        graph.inputs.remove(value)  # it keeps its initial value
    return ir.Model(
        graph,
        ir_version=model.ir_version,
        producer_name=model.producer_name,
        producer_version=model.producer_version,
        functions=list(model.functions.values()),
    )
