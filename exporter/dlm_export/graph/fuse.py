"""Operators of a traced graph that the native runtime has one kernel for, put together into calls of ``functions``.

Only graphs that ONNX Runtime runs on a CPU are fused; TensorRT does this by itself. What does not look as expected is left
as it is: a graph means the same before and after.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common as passes

from dlm_export.graph import LAYER_KEY, functions
from dlm_export.graph.trace import Graph

_MOST_WEIGHTS = 3  # of one Int8Linear


def fuse(traced: Graph) -> None:
    """Rewrite a traced graph in place: INT8 layers over one input, attention over the cache, the candidates of a row."""
    model = traced.model
    _merge_linear_layers(model)
    if traced.dtype.itemsize == 4:  # the kernels compute in fp32
        for node in list(model.graph):
            if node.op_type == "Attention":
                _fuse_attention(traced, node)
    _fuse_candidates(model)
    passes.RemoveUnusedNodesPass()(model)


def _call(
    model: ir.Model, before: ir.Node, name: str, inputs: Sequence[ir.Value], old: Sequence[ir.Value], **attributes: Any
) -> None:
    """Insert a call whose outputs take the place of ``old``."""
    functions.declare(model, name)
    node = ir.node(
        name,
        list(inputs),
        attributes,
        domain=functions.DOMAIN,
        num_outputs=len(old),
        metadata_props={LAYER_KEY: before.metadata_props[LAYER_KEY]},
    )
    model.graph.insert_before(before, node)
    for value, result in zip(old, node.outputs, strict=True):
        kept, result.shape, result.type = value.name, value.shape, value.type
        value.replace_all_uses_with(result, replace_graph_outputs=True)
        result.name, value.name = kept, None


def _producer(value: ir.Value | None, op_type: str) -> ir.Node | None:
    node = None if value is None else value.producer()
    return node if node is not None and node.op_type == op_type else None


def _only_user(value: ir.Value, op_type: str) -> ir.Node | None:
    users = [node for node, _ in value.uses()]
    return users[0] if len(users) == 1 and users[0].op_type == op_type and not value.is_graph_output() else None


def _merge_linear_layers(model: ir.Model) -> None:
    by_input: dict[int, list[ir.Node]] = defaultdict(list)
    for node in model.graph:
        if node.op_type == "Int8Linear" and node.domain == functions.DOMAIN:
            by_input[id(node.inputs[0])].append(node)
    for nodes in by_input.values():
        product = _gated_product(nodes)
        if product is not None:
            _merge(model, nodes, "Int8GatedLinear", [product])
        elif 1 < len(nodes) <= _MOST_WEIGHTS:
            _merge(model, nodes, f"Int8Linear{len(nodes)}", [node.outputs[0] for node in nodes])


def _merge(model: ir.Model, nodes: Sequence[ir.Node], name: str, old: Sequence[ir.Value]) -> None:
    inputs = [nodes[0].inputs[0], *(value for node in nodes for value in node.inputs[1:])]
    columns = [count for node in nodes for count in node.attributes["columns"].as_ints()]
    _call(model, nodes[0], name, [value for value in inputs if value is not None], old, columns=columns)


def _gated_product(nodes: Sequence[ir.Node]) -> ir.Value | None:
    """``gate * sigmoid(gate) * up`` of two layers, gate first, if that is all that becomes of them."""
    if len(nodes) != 2:
        return None
    gate, up = (node.outputs[0] for node in nodes)
    users = {node.op_type: node for node, _ in gate.uses()}
    if len(gate.uses()) != 2 or users.keys() != {"Sigmoid", "Mul"}:
        return None
    silu = _only_user(users["Sigmoid"].outputs[0], "Mul")
    product = _only_user(up, "Mul")
    if silu is None or silu is not users["Mul"] or product is None or silu.outputs[0] not in product.inputs:
        return None
    return product.outputs[0] if _only_user(silu.outputs[0], "Mul") is product else None


def _fuse_attention(traced: Graph, attention: ir.Node) -> None:
    """From the products q, k, v to the merged heads: views, rotations, the cache's rows in front, and back."""
    if len([value for value in attention.inputs if value is not None]) != 3:
        return  # a mask, which the kernel does not know
    turned = _producer(attention.inputs[0], "RotaryEmbedding")
    keys, values = (_producer(value, "Concat") for value in attention.inputs[1:3])
    if turned is None or keys is None or values is None:
        return
    past_key, present_key = keys.inputs
    past_value, present_value = values.inputs
    rotated = _producer(present_key, "RotaryEmbedding")
    merged = _only_user(attention.outputs[0], "Transpose")
    y = None if merged is None else _only_user(merged.outputs[0], "Reshape")
    if rotated is None or y is None or turned.inputs[1:] != rotated.inputs[1:]:
        return
    if _turned_size(turned) or _turned_size(rotated):
        return  # a part of each head, where the kernel turns the whole
    query, key, value = (_heads_of(part) for part in (turned.inputs[0], rotated.inputs[0], present_value))
    if query is None or key is None or value is None:
        return
    merged_heads = [_merged(traced.model, attention, part) for part in (query, key, value)]
    inputs = [*merged_heads, past_key, past_value, rotated.inputs[3], rotated.inputs[1], rotated.inputs[2]]
    given = [each for each in inputs if each is not None]
    if len(given) != len(inputs) or present_key is None or present_value is None:
        return
    old = [y.outputs[0], present_key, present_value]
    _call(traced.model, attention, "CachedAttention", given, old, heads=query.count, kv_heads=key.count)


def _turned_size(node: ir.Node) -> int:
    """Features of a head that a RotaryEmbedding turns; 0: all."""
    attribute = node.attributes.get("rotary_embedding_dim")
    return 0 if attribute is None else attribute.as_int()


@dataclass(frozen=True)
class _Heads:
    """``count`` heads ``[B, T, count, D]``: ``split`` as they were cut, ``ready`` as attention takes them, a norm between."""

    count: int
    split: ir.Node
    ready: ir.Value


def _heads_of(value: ir.Value | None) -> _Heads | None:
    """The heads behind ``[B, heads, T, D]``."""
    transposed = _producer(value, "Transpose")
    ready = None if transposed is None else transposed.inputs[0]
    normed = _producer(ready, "RMSNormalization")
    split = _producer(ready if normed is None else normed.inputs[0], "Reshape")
    wanted = None if split is None else split.inputs[1]
    shape = None if wanted is None else ir.convenience.get_const_tensor(wanted)
    if ready is None or split is None or shape is None:
        return None
    return _Heads(int(shape.numpy()[2]), split, ready)


def _merged(model: ir.Model, before: ir.Node, heads: _Heads) -> ir.Value | None:
    """``[B, T, count * D]``: what was cut into heads or, behind a norm of each, the heads put side by side again."""
    if heads.ready is heads.split.outputs[0]:
        return heads.split.inputs[0]
    metadata = {LAYER_KEY: before.metadata_props[LAYER_KEY]}
    shape = ir.node("Constant", [], {"value": ir.tensor(np.array([0, 0, -1], np.int64))}, metadata_props=metadata)
    whole = ir.node("Reshape", [heads.ready, shape.outputs[0]], metadata_props=metadata)
    model.graph.insert_before(before, [shape, whole])
    return whole.outputs[0]


def _fuse_candidates(model: ir.Model) -> None:
    outputs = {str(value.name): value for value in model.graph.outputs}
    best = _producer(outputs["top_prob"], "TopK")
    softmax = None if best is None else _producer(best.inputs[0], "Softmax")
    masked = None if softmax is None else _producer(softmax.inputs[0], "Add")
    if masked is None or masked.inputs[0] is not outputs["logits"]:
        return
    given = [value for value in masked.inputs if value is not None]
    _call(model, masked, "Candidates", given, [outputs[name] for name in ("top_token", "top_prob", "entropy")])
