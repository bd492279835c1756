"""Cuts a written graph into parts at the borders of its layers.

Each part is a separate ONNX model that uses the same weight file. The first part is ``embed``.
After ``embed``, there is one part ``blocks.I`` for each layer ``I``. The last part, ``end``,
contains the final norm and the head, and computes the best tokens.

The names of a part's inputs and outputs are the same as in the whole graph. Running all parts in
order therefore gives the same result as running the whole graph. If a node depends on constants
only, the node is copied into every part that uses its output.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import onnx_ir as ir

from dlm_export.graph import LAYER_KEY
from dlm_runtime.errors import DlmError

EMBED, BLOCKS, END = "embed", "blocks.", "end"
_BEHIND_BLOCKS = ("final_norm", "transform", "head")


class PartError(DlmError):
    """Raised if a required input of a part is missing."""


@dataclass(frozen=True, eq=False)
class Part:
    """One part of a graph. Its weights are in the data file of the whole graph."""

    name: str
    model: ir.Model

    @property
    def inputs(self) -> list[str]:
        """Names of the part's inputs.

        Each input is an input of the graph or an output of an earlier part.
        """
        return [str(value.name) for value in self.model.graph.inputs]

    @property
    def outputs(self) -> list[str]:
        """Names of the part's outputs: outputs of the graph, and values that later parts use."""
        return [str(value.name) for value in self.model.graph.outputs]

    @property
    def block(self) -> int | None:
        """Index of the part's layer, or ``None`` for the first and the last part."""
        return int(self.name.removeprefix(BLOCKS)) if self.name.startswith(BLOCKS) else None

    def check_given(self, names: set[str]) -> None:
        """Check that ``names`` includes all inputs of this part.

        Raises PartError, which lists the missing inputs.
        """
        lacking = [name for name in self.inputs if name not in names]
        if lacking:
            raise PartError(
                f"{self.name} reads {', '.join(lacking)}, which neither the pass nor an earlier part provides"
            )


def cut(model: ir.Model) -> list[Part]:
    """Cut a graph into its parts, and return them in order.

    The metadata of most nodes names the node's module, and thereby the part. A node without this
    metadata goes to the last part that computes one of the node's inputs.
    """
    graph = model.graph
    layers = [block_of(node) for node in graph]
    end = max((layer for layer in layers if layer is not None), default=-1) + 2
    # A graph input that has an initialiser is optional. Treat it as a constant.
    made_in = {value: 0 for value in graph.inputs if not value.is_initializer()}
    # Maps each part to the values that the part uses and other parts compute.
    crossing: dict[int, dict[ir.Value, None]] = defaultdict(dict)
    # Maps each part to the values that the part computes and later parts use.
    given: dict[int, dict[ir.Value, None]] = defaultdict(dict)
    for node, layer in zip(graph, layers, strict=True):
        read = [value for value in node.inputs if value is not None and value in made_in]
        if not read:
            continue  # the node depends on constants only
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
    """Return the index of a node's layer, or ``None`` if the node is outside the layers."""
    path = node.metadata_props.get(LAYER_KEY, "")
    return int(path.split(".")[1]) if path.startswith(BLOCKS) else None


def _extract(model: ir.Model, inputs: list[ir.Value], outputs: list[ir.Value]) -> ir.Model:
    constant = [value for value in model.graph.inputs if value.is_initializer()]
    graph = ir.convenience.extract(model.graph, [*inputs, *constant], outputs)
    for value in [value for value in graph.inputs if value.is_initializer()]:
        graph.inputs.remove(value)  # the initialiser still supplies the value
    return ir.Model(
        graph,
        ir_version=model.ir_version,
        producer_name=model.producer_name,
        producer_version=model.producer_version,
        functions=list(model.functions.values()),
    )
