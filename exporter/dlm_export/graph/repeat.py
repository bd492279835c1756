"""Expands a graph that was traced with one layer of each kind to a graph with all layers.

Two layers are of the same kind if their descriptions are equal. For each layer, ``repeat`` copies
the nodes of the traced layer of the same kind. The copied nodes use the parameters and the cache of
the new layer. The input of each layer is the residual stream that the previous layer returns. All
layers share positions, rotary tables, attention masks and constants.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import onnx_ir as ir

from dlm_export.graph import LAYER_KEY
from dlm_export.graph.parts import EMBED, block_of
from dlm_export.network.spec import NetworkSpec

_NUMBERED = re.compile(r"(blocks\.|(?:past|present)_(?:key|value)\.)(\d+)")
"""Matches the start of the module path of a layer, or of the name of a cache input or output, up to
and including the layer's index.
"""


def kinds(network: NetworkSpec) -> list[int]:
    """Number the kinds of layers from 0, and return the number of each layer's kind."""
    described = list(dict.fromkeys(network.layers))
    return [described.index(layer) for layer in network.layers]


def repeat(traced: ir.Graph, layers: Sequence[int]) -> ir.Graph:
    """Build the graph whose layer ``i`` is a copy of layer ``layers[i]`` of ``traced``.

    ``traced`` contains one layer of each kind. The function raises AssertionError if ``traced``
    violates one of three conditions: each node has a module path (``LAYER_KEY``), each node's
    result is used, and layers exchange only the residual stream and shared values.
    """
    front, blocks, behind = _cut(traced)
    embedding = [
        node for node in front if node.metadata_props[LAYER_KEY].partition(".")[0] == EMBED
    ]
    streams = [_handed(embedding, blocks[0])]
    streams += [
        _handed(block, reader) for block, reader in zip(blocks, [*blocks[1:], behind], strict=True)
    ]
    copies = _Copies(layers)
    inputs = copies.of_values(traced.inputs)
    initializers = copies.of_values(traced.initializers.values())
    nodes = copies.of_nodes(front)
    stream = copies.shared.pop(streams[0])
    for i, kind in enumerate(layers):
        copies.own[i][streams[kind]] = stream
        nodes += copies.of_nodes(blocks[kind], i)
        stream = copies.own[i][streams[kind + 1]]
    copies.shared[streams[-1]] = stream
    nodes += copies.of_nodes(behind)
    outputs = [copies.find(value, layer) for value, layer in _placed(traced.outputs, layers)]
    return ir.Graph(
        inputs,
        outputs,
        nodes=nodes,
        initializers=initializers,
        opset_imports=traced.opset_imports,
        name=traced.name,
    )


class _Copies:
    """Maps the values of the traced graph to their copies.

    ``own`` contains one mapping for the values of each layer. ``shared`` maps all values outside
    the layers.
    """

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers = layers
        self.shared: dict[ir.Value, ir.Value] = {}
        self.own: list[dict[ir.Value, ir.Value]] = [{} for _ in layers]

    def of_values(self, values: Iterable[ir.Value]) -> list[ir.Value]:
        """Copy inputs or initialisers.

        Each value of a traced layer is copied once for every layer of the same kind.
        """
        return [self._copy(value, layer) for value, layer in _placed(values, self.layers)]

    def of_nodes(self, nodes: Sequence[ir.Node], layer: int | None = None) -> list[ir.Node]:
        return [self._of_node(node, layer) for node in nodes]

    def find(self, value: ir.Value, layer: int | None) -> ir.Value:
        """Return the copy of ``value`` that the copied nodes of ``layer`` use.

        ``layer`` is ``None`` for nodes before or after the layers.
        """
        scopes = [self.shared] if layer is None else [self.own[layer], self.shared]
        if layer is None and value.is_graph_input():
            # Some nodes outside the layers read the number of cached rows from the shape of a
            # layer's cache, which is an input of that layer.
            scopes += self.own
        found = next((scope[value] for scope in scopes if value in scope), None)
        where = "a node outside the layers" if layer is None else f"layer {layer}"
        assert found is not None, (
            f"{where} reads {value.name}, which is not its own, the stream, or shared"
        )
        return found

    def _copy(self, value: ir.Value, layer: int | None, is_shared: bool = False) -> ir.Value:
        made = ir.Value(
            name=_named(value.name, layer),
            type=value.type,
            shape=value.shape,
            const_value=value.const_value,
        )
        if layer is not None:
            self.own[layer][value] = made
        if layer is None or is_shared:
            self.shared.setdefault(value, made)
        return made

    def _of_node(self, node: ir.Node, layer: int | None) -> ir.Node:
        is_constant = node.op_type == "Constant"  # a constant may be used by several layers
        return ir.Node(
            node.domain,
            node.op_type,
            [None if value is None else self.find(value, layer) for value in node.inputs],
            node.attributes.values(),
            outputs=[self._copy(value, layer, is_constant) for value in node.outputs],
            name=_named(node.name, layer),
            metadata_props={LAYER_KEY: _named(node.metadata_props[LAYER_KEY], layer)},
        )


def _cut(graph: ir.Graph) -> tuple[list[ir.Node], list[list[ir.Node]], list[ir.Node]]:
    """Return the nodes before the traced layers, the nodes of each layer, and all later nodes."""
    nodes = list(graph)
    blocks = [block_of(node) for node in nodes]
    numbers = [number for number in blocks if number is not None]
    start = blocks.index(numbers[0])
    end = start + len(numbers)
    assert blocks[start:end] == sorted(numbers), (
        "nodes of another part are between those of a block"
    )
    inside = [
        [node for node, number in zip(nodes, blocks, strict=True) if number == i]
        for i in range(max(numbers) + 1)
    ]
    return nodes[:start], inside, nodes[end:]


def _handed(makers: Iterable[ir.Node], readers: Iterable[ir.Node]) -> ir.Value:
    """Return the residual stream: the only output of ``makers`` that is an input of ``readers``."""
    made = {value for node in makers if node.op_type != "Constant" for value in node.outputs}
    handed = list(
        dict.fromkeys(value for node in readers for value in node.inputs if value in made)
    )
    assert len(handed) == 1, (
        f"expected only the residual stream, found {[value.name for value in handed]}"
    )
    return handed[0]


def _placed(values: Iterable[ir.Value], layers: Sequence[int]) -> list[tuple[ir.Value, int | None]]:
    """List the full graph's inputs, outputs or initialisers in order, each with its layer's index.

    A value of a traced layer is listed once for every layer of the same kind.
    """
    front: list[tuple[ir.Value, int | None]] = []
    behind: list[tuple[ir.Value, int | None]] = []
    of_blocks: dict[int, list[ir.Value]] = {}
    for value in values:
        numbered = _NUMBERED.match(str(value.name))
        if numbered is None:
            (behind if of_blocks else front).append((value, None))
        else:
            of_blocks.setdefault(int(numbered[2]), []).append(value)
    return [
        *front,
        *((value, i) for i, kind in enumerate(layers) for value in of_blocks[kind]),
        *behind,
    ]


def _named(name: str | None, layer: int | None) -> str:
    """Convert a name or module path in the traced graph to its form in the full graph.

    ``layer`` is the index of the layer in the full graph, or ``None`` outside the layers.
    """
    assert name is not None
    if layer is None:
        return name
    numbered = _NUMBERED.match(name)
    return (
        f"blocks.{layer}.{name}"
        if numbered is None
        else f"{numbered[1]}{layer}{name[numbered.end() :]}"
    )
