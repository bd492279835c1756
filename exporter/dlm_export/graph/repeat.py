"""A graph traced with one layer of each kind, made into the graph of all layers.

Layers meet in the residual stream and in what all of them read: positions, rotary tables,
visibility, constants. So the nodes of a traced layer, over another layer's parameters and cache and
behind the layer before that one, are that other layer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import onnx_ir as ir

from dlm_export.graph import LAYER_KEY
from dlm_export.graph.parts import EMBED, block_of
from dlm_export.network.spec import NetworkSpec

_NUMBERED = re.compile(r"(blocks\.|(?:past|present)_(?:key|value)\.)(\d+)")
"""How the path or name of what belongs to a layer begins, and the layer's number."""


def kinds(network: NetworkSpec) -> list[int]:
    """The kind of each layer, counted from the first; layers described alike are of one kind."""
    described = list(dict.fromkeys(network.layers))
    return [described.index(layer) for layer in network.layers]


def repeat(traced: ir.Graph, layers: Sequence[int]) -> ir.Graph:
    """The graph whose layer ``i`` is block ``layers[i]`` of ``traced``, which has a block of each
    kind.

    Every node needs its module path (``LAYER_KEY``), and none may be unused. Blocks that meet in
    anything else than the stream and shared values are an error of ours: AssertionError.
    """
    front, blocks, behind = _cut(traced)
    streams = [
        _handed([node for node in front if node.metadata_props[LAYER_KEY] == EMBED], blocks[0])
    ]
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
    """Copies of a traced graph's values: those of each layer, and those that are no layer's own."""

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers = layers
        self.shared: dict[ir.Value, ir.Value] = {}
        self.own: list[dict[ir.Value, ir.Value]] = [{} for _ in layers]

    def of_values(self, values: Iterable[ir.Value]) -> list[ir.Value]:
        """Copies of inputs or initialisers, a block's once for every layer of its kind."""
        return [self._copy(value, layer) for value, layer in _placed(values, self.layers)]

    def of_nodes(self, nodes: Sequence[ir.Node], layer: int | None = None) -> list[ir.Node]:
        """Copies of nodes, as those of a layer."""
        return [self._of_node(node, layer) for node in nodes]

    def find(self, value: ir.Value, layer: int | None) -> ir.Value:
        """The copy that a layer reads; None: what is in front of the layers or behind them."""
        scopes = [self.shared] if layer is None else [self.own[layer], self.shared]
        if layer is None and value.is_graph_input():
            scopes += self.own  # how many rows are cached is read of some layer's cache
        found = next((scope[value] for scope in scopes if value in scope), None)
        where = "what is no layer" if layer is None else f"layer {layer}"
        assert found is not None, (
            f"{where} reads {value.name}, which is neither its own, nor the stream, nor shared"
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
        is_constant = node.op_type == "Constant"  # of which the trace has one for several layers
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
    """The nodes in front of the first block, those of each block, and those behind the last one."""
    nodes = list(graph)
    blocks = [block_of(node) for node in nodes]
    numbers = [number for number in blocks if number is not None]
    start = blocks.index(numbers[0])
    end = start + len(numbers)
    assert blocks[start:end] == sorted(numbers), (
        "nodes of another part stand between those of a block"
    )
    inside = [
        [node for node, number in zip(nodes, blocks, strict=True) if number == i]
        for i in range(max(numbers) + 1)
    ]
    return nodes[:start], inside, nodes[end:]


def _handed(makers: Iterable[ir.Node], readers: Iterable[ir.Node]) -> ir.Value:
    """The only value that a part hands on to the next one, the residual stream."""
    made = {value for node in makers if node.op_type != "Constant" for value in node.outputs}
    handed = list(
        dict.fromkeys(value for node in readers for value in node.inputs if value in made)
    )
    assert len(handed) == 1, (
        f"{[value.name for value in handed]} where the residual stream alone is handed on"
    )
    return handed[0]


def _placed(values: Iterable[ir.Value], layers: Sequence[int]) -> list[tuple[ir.Value, int | None]]:
    """Inputs, outputs or initialisers in order, a block's once for every layer of its kind."""
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
    """A path or name as it is in a layer; it stays as it is outside of the layers."""
    assert name is not None
    if layer is None:
        return name
    numbered = _NUMBERED.match(name)
    return (
        f"blocks.{layer}.{name}"
        if numbered is None
        else f"{numbered[1]}{layer}{name[numbered.end() :]}"
    )
