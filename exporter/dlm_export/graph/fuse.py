"""Replaces groups of operators in a traced graph with calls of functions that have native kernels.

``graph.operators`` defines the functions. Graphs for TensorRT are not changed, because TensorRT
fuses operators itself. If the operators of a module do not match the pattern of a kernel, ``fuse``
keeps these operators, and ``Fused`` reports the reason. A changed graph computes the same results
as before.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common as passes

from dlm_export.graph import LAYER_KEY, SEGMENTS, WINDOW_SEGMENTS, operators
from dlm_export.graph.attention import ATTENTION, BLOCK, DRAFT, NORMED, WINDOW
from dlm_export.graph.body import DOMAIN
from dlm_export.graph.cache_dtypes import STORED, row_of
from dlm_export.graph.edits import constant, take_place
from dlm_export.graph.trace import Graph
from dlm_export.network.spec import UPDATES
from dlm_runtime.errors import DlmError, ExitCode

CANDIDATES = "pass"  # the module path of the nodes after the head, as set by ``trace``
GATE = ".gate"  # suffix of the module path of an MLP's gate projection
_MOST_WEIGHTS = 3  # A single kernel can compute up to this many layers that have the same input.


@dataclass(frozen=True)
class Fused:
    """Reports which modules ``fuse`` replaced with kernels, and which modules it did not replace.

    ``calls`` maps each native kernel to the number of nodes that call it. A module is in ``plain``
    if a kernel for this kind of module exists, but ``fuse`` could not use the kernel. ``plain``
    maps the path of the module to the reason, and never contains norms. ``has_segments`` is true if
    the attention of every layer reads the input ``segments``.
    """

    calls: Mapping[str, int]
    plain: Mapping[str, str]
    has_segments: bool

    def as_dict(self) -> dict[str, Any]:
        """Return the value that the manifest stores as ``kernels``."""
        return {"calls": dict(self.calls), "plain": dict(self.plain)}


_Pattern: TypeAlias = "tuple[Any, ...] | str | float"


class CacheError(DlmError):
    """Raised if a graph's attention cannot store keys and values in the requested type."""

    exit_code = ExitCode.WRONG_INPUT


class _Unlike(Exception):
    """Raised if operators do not match the pattern of a kernel. The message gives the reason."""


def fuse(traced: Graph, cache_dtype: str | None = None) -> Fused:
    """Replace operators of a traced graph with calls of kernels. The graph itself is changed.

    These patterns are replaced:

    - INT8 or INT4 layers with the same input;
    - low-rank updates of layers with the same input;
    - attention over cached keys and values;
    - a residual sum that is the input of a norm;
    - the computation of the two best tokens and the entropy.

    ``cache_dtype`` is the type of stored keys and values, as in the manifest. If ``cache_dtype`` is
    ``None``, keys and values are stored in the type of the graph. Raises CacheError if the
    attention does not support ``cache_dtype``.
    """
    model = traced.model
    plain = _merge_linear_layers(model)
    for node in list(model.graph):
        if node.op_type == "Attention":
            try:
                _fuse_attention(traced, node)
            except _Unlike as err:
                plain[node.metadata_props[LAYER_KEY]] = str(err)
    if traced.dtype.itemsize == 4:  # the kernels compute in fp32
        _merge_updates(model, plain)
        for node in list(model.graph):
            if node.op_type == "Add" and node.domain == "":
                _fuse_add_norm(model, node)
    try:
        _fuse_candidates(model)
    except _Unlike as err:
        plain[CANDIDATES] = str(err)
    passes.RemoveUnusedNodesPass()(model)
    if cache_dtype is not None and row_of(cache_dtype, 0)[0] != traced.element_type:
        _store_as(traced, plain, cache_dtype)
    calls = Counter(node.op_type for node in model.graph if node.domain == DOMAIN)
    has_segments = SEGMENTS in model.graph.initializers and all(
        node.op_type != "Attention" for node in model.graph
    )
    return Fused(
        {name: calls[name] for name in operators.KERNELS if calls[name]}, plain, has_segments
    )


def _store_as(traced: Graph, plain: Mapping[str, str], cache_dtype: str) -> None:
    """Change the type in which a fused graph caches keys and values.

    Raises CacheError if ``plain`` (see ``Fused``) contains the attention of a layer.
    """
    model = traced.model
    for node in list(model.graph):
        if node.op_type == "Attention":
            path = node.metadata_props[LAYER_KEY]
            raise CacheError(
                f"--cache-dtype: the attention of {path} was not fused ({plain[path]}), so its cache cannot be stored "
                f"in another type. Omit --cache-dtype."
            )
        if node.op_type in ATTENTION and node.domain == DOMAIN:
            node.op_type = f"{STORED[cache_dtype]}{node.op_type}"
            operators.declare(model, node.op_type)
            for value in (*node.inputs[3:5], *node.outputs[1:]):
                assert value is not None
                assert value.shape is not None
                head_size = value.shape[3]
                assert isinstance(head_size, int)
                dtype, width = row_of(cache_dtype, head_size)
                value.type, value.shape = ir.TensorType(dtype), ir.Shape([*value.shape[:3], width])
    for name in ATTENTION:
        model.functions.pop((DOMAIN, name, ""), None)


def _call(
    model: ir.Model,
    before: ir.Node,
    name: str,
    inputs: Sequence[ir.Value],
    old: Sequence[ir.Value],
    **attributes: Any,
) -> None:
    """Insert a call of a function, and replace the values in ``old`` with the call's outputs."""
    operators.declare(model, name)
    node = ir.node(
        name,
        list(inputs),
        attributes,
        domain=DOMAIN,
        num_outputs=len(old),
        metadata_props={LAYER_KEY: before.metadata_props[LAYER_KEY]},
    )
    model.graph.insert_before(before, node)
    for value, result in zip(old, node.outputs, strict=True):
        take_place(result, value)


def _producer(value: ir.Value | None, op_type: str) -> ir.Node | None:
    node = None if value is None else value.producer()
    return node if node is not None and node.op_type == op_type else None


def _only_user(value: ir.Value, op_type: str) -> ir.Node | None:
    users = [node for node, _ in value.uses()]
    is_only = len(users) == 1 and users[0].op_type == op_type and not value.is_graph_output()
    return users[0] if is_only else None


def _merge_linear_layers(model: ir.Model) -> dict[str, str]:
    """Merge layers with the same format and input. Returns the other layers, with reasons."""
    alike: dict[tuple[int, str, int], list[ir.Node]] = defaultdict(list)
    for node in model.graph:
        if node.op_type in operators.LINEAR and node.domain == DOMAIN:
            alike[id(node.inputs[0]), node.op_type, _group_size(node)].append(node)
    plain = {}
    for (_, name, _), nodes in alike.items():
        kind = name.removesuffix("Linear")
        paths = [node.metadata_props[LAYER_KEY] for node in nodes]
        product = _gated_product(nodes)
        is_gated = len(nodes) == 2 and paths[0].endswith(GATE)
        if is_gated and product is None:
            mlp = paths[0].removesuffix(GATE)
            plain[mlp] = "gate and up are not used for silu(gate) * up only"
        if product is not None:
            _merge(model, nodes, f"{kind}GatedLinear", [product])
        elif len(nodes) > _MOST_WEIGHTS:
            many = f"one of {len(nodes)} {kind.upper()} layers over one input; a kernel supports {_MOST_WEIGHTS}"
            plain |= dict.fromkeys(paths, many)
        elif len(nodes) > 1:
            _merge(model, nodes, f"{name}{len(nodes)}", [node.outputs[0] for node in nodes])
        elif _is_shared(nodes[0].inputs[0]):
            plain[paths[0]] = f"the only {kind.upper()} layer over its input"
    return plain


def _merge_updates(model: ir.Model, plain: dict[str, str]) -> None:
    """Replace low-rank updates of layers that have the same input with a single node.

    Removes the MLPs whose product of gate and up becomes part of such a node from ``plain``.
    """
    alike: dict[int, list[ir.Node]] = defaultdict(list)
    for node in model.graph:
        if node.op_type == operators.DRAFT_UPDATE and node.domain == DOMAIN:
            alike[id(node.inputs[0])].append(node)
    for nodes in alike.values():
        product = _gated_product(nodes)
        count = len(nodes)
        name = f"LowRankUpdate{count if count > 1 else ''}"
        old = [node.outputs[0] for node in nodes]
        if product is not None:
            name, old = "GatedLowRankUpdate", [product]
            plain.pop(nodes[0].metadata_props[LAYER_KEY].removesuffix(f".{UPDATES}{GATE}"), None)
        x, _, is_updated, *_ = _all(nodes[0].inputs, 5)
        given = [x, *(_all(node.inputs, 5)[1] for node in nodes), is_updated]
        for node in nodes:
            given += _all(node.inputs, 5)[3:]
        # The call must come after the layers of all updates.
        _call(model, nodes[-1], name, given, old)
    if alike:
        model.graph.sort()  # nodes that use the first results may come before a call
    model.functions.pop((DOMAIN, operators.DRAFT_UPDATE, ""), None)


def _group_size(node: ir.Node) -> int:
    """Return the number of inputs that share a scale, or 0 if each column has a single scale."""
    return node.attributes.get_int("group_size", 0)


def _is_shared(value: ir.Value | None) -> bool:
    """Return True if several nodes use a value, except sums (Add) and low-rank updates."""
    users = () if value is None else value.uses()
    not_counted = ("Add", operators.DRAFT_UPDATE)
    return len({id(node) for node, _ in users if node.op_type not in not_counted}) > 1


def _merge(model: ir.Model, nodes: Sequence[ir.Node], name: str, old: Sequence[ir.Value]) -> None:
    inputs = [nodes[0].inputs[0], *(value for node in nodes for value in node.inputs[1:])]
    columns = [count for node in nodes for count in node.attributes["columns"].as_ints()]
    attributes: dict[str, Any] = {"columns": columns}
    if size := _group_size(nodes[0]):
        attributes["group_size"] = size
    given = [value for value in inputs if value is not None]
    _call(model, nodes[0], name, given, old, **attributes)


def _gated_product(nodes: Sequence[ir.Node]) -> ir.Value | None:
    """Return the value ``silu(gate) * up``, if no other node uses the gate or up layer."""
    if len(nodes) != 2:
        return None
    gate, up = (node.outputs[0] for node in nodes)
    users = {node.op_type: node for node, _ in gate.uses()}
    if len(gate.uses()) != 2 or users.keys() != {"Sigmoid", "Mul"}:
        return None
    silu = _only_user(users["Sigmoid"].outputs[0], "Mul")
    product = _only_user(up, "Mul")
    if silu is None or silu is not users["Mul"] or product is None:
        return None
    if silu.outputs[0] not in product.inputs:
        return None
    return product.outputs[0] if _only_user(silu.outputs[0], "Mul") is product else None


def _fuse_attention(traced: Graph, attention: ir.Node) -> None:
    """Replace the operators of an attention with a call of the attention kernel.

    The call replaces all nodes after the q, k and v projections, up to the node that merges the
    heads. These nodes include reshapes, rotation, and the concatenation of cached and new rows.
    Raises _Unlike if an operator does not match.
    """
    if traced.dtype.itemsize != 4:
        raise _Unlike("the kernel computes in fp32")
    sizes = ("q_num_heads", "kv_num_heads")
    _refuse_settings(attention, ("is_causal", "softcap", *sizes, "softmax_precision"))
    scale = attention.attributes.get_float("scale", 0.0)
    if len(attention.inputs) > 4:
        raise _Unlike("Attention has more inputs than a mask")
    hidden = attention.inputs[3] if len(attention.inputs) == 4 else None
    keys, values = (
        _expect(value, "Concat", "no cached rows before the pass's own")
        for value in attention.inputs[1:3]
    )
    past_key, present_key = _both(keys)
    past_value, present_value = _both(values)
    query, key, rotation = _rotation_of(traced, attention.inputs[0], present_key)
    merged = _only_user(attention.outputs[0], "Transpose")
    y = None if merged is None else _only_user(merged.outputs[0], "Reshape")
    if y is None:
        raise _Unlike("heads are not merged, or something else reads them")
    parts = [_heads_of(part) for part in (query, key, present_value)]
    cos, sin, positions = rotation.tables
    kind = ""
    seen: dict[str, int] = {}
    if hidden is not None:
        kind, positions, seen = _seen(hidden, positions, traced.network.max_canvas_length)
    norms = _norms_of(*parts)
    own_scale = {}
    if kind.startswith(DRAFT) and norms:
        size = int(past_key.shape[3])  # type: ignore[index, arg-type]
        own_scale = {"scale": scale or size**-0.5}
    elif scale:
        raise _Unlike(f"Attention with scale = {scale:g}")
    has_window = traced.network.cache_window is not None and "window" in seen
    segments = _segments(traced.model, WINDOW_SEGMENTS if has_window else SEGMENTS)
    given = [past_key, past_value, positions, cos, sin, segments]
    given = [*(part.whole for part in parts), *given, *(norm.weight for norm in norms)]
    name = kind + (NORMED if norms else "")
    if f"{name}CachedAttention" not in ATTENTION:
        raise _Unlike("no kernel has such a mask with such norms of queries and keys")
    old = [y.outputs[0], present_key, present_value]
    settings = {"heads": parts[0].count, "kv_heads": parts[1].count}
    settings |= {"rotary_size": rotation.size} | seen
    epsilon = {"epsilon": norms[0].epsilon} if norms else {}
    _call(
        *(traced.model, attention, f"{name}CachedAttention", given, old),
        **settings | epsilon | own_scale,
    )


@dataclass(frozen=True)
class _Rotation:
    """The tables of cosines and sines of a rotation, and its position ids.

    ``size`` is the number of rotated features. The value is 0 if all features are rotated.
    """

    tables: tuple[ir.Value, ir.Value, ir.Value]
    size: int


def _rotation_of(
    traced: Graph, queries: ir.Value | None, keys: ir.Value
) -> tuple[ir.Value | None, ir.Value | None, _Rotation]:
    """Return the queries and the keys before rotation, and the rotation.

    Raises _Unlike if queries and keys are rotated differently.
    """
    turned, rotated = (_producer(value, "RotaryEmbedding") for value in (queries, keys))
    if turned is None and rotated is None:
        return queries, keys, _no_rotation(traced)
    if turned is None or rotated is None:
        raise _Unlike("only queries or only keys are rotated by position")
    sizes = {node.attributes.get_int("rotary_embedding_dim", 0) for node in (turned, rotated)}
    for node in (turned, rotated):
        # the kernel pairs feature i of a head with feature i + size / 2, and rotates each pair
        _refuse_settings(node, ("interleaved",))
    cos, sin, positions = _all(turned.inputs[1:], 3)
    if [cos, sin, positions] != _all(rotated.inputs[1:], 3) or len(sizes) > 1:
        raise _Unlike("queries and keys are rotated by different positions or tables")
    rotation = _Rotation((cos, sin, positions), sizes.pop())
    return turned.inputs[0], rotated.inputs[0], rotation


def _no_rotation(traced: Graph) -> _Rotation:
    """Return a rotation by the angle 0, for graphs without rotation. The kernel always rotates."""
    graph, rows = traced.model.graph, traced.network.max_canvas_length
    (positions,) = (value for value in graph.inputs if value.name == "position_ids")
    cos = constant(graph, "no_rotation.cos", np.ones((rows, 1), np.float32))
    sin = constant(graph, "no_rotation.sin", np.zeros((rows, 1), np.float32))
    return _Rotation((cos, sin, positions), 2)


def _segments(model: ir.Model, name: str) -> ir.Value:
    """Return the optional input with the segments of a shared sequence. Add it if missing."""
    if name not in model.graph.initializers:
        value = constant(model.graph, name, np.zeros((0, 4), np.int64))
        value.shape = ir.Shape([f"{name}_count", 4])
        model.graph.inputs.append(value)
    return model.graph.initializers[name]


def _hiding(starts: _Pattern) -> _Pattern:
    """Return the pattern of an attention mask that hides the keys of later blocks.

    ``starts`` is the pattern that computes, for each token, the first position of its block.
    """
    keys = ("Unsqueeze", ("Concat", ("Expand", 0, "rows"), starts), 1)
    hidden = ("Greater", keys, ("Unsqueeze", starts, 2))
    return ("Unsqueeze", ("Mul", ("Cast", hidden), float(np.finfo(np.float32).min)), 1)


_DISTANCES = ("Abs", ("Sub", ("Unsqueeze", "positions", 1), ("Unsqueeze", "positions", 2)))
_FAR = ("Greater", ("Concat", ("Expand", 0, "rows"), _DISTANCES), "length")
_BLOCKS = _hiding(("Sub", "positions", ("Mod", "positions", "length")))
_WINDOW = ("Unsqueeze", ("Mul", ("Cast", _FAR), float(np.finfo(np.float32).min)), 1)
_DRAFTS = _hiding(("Where", ("Less", "positions", "length"), "positions", "longest"))
_IS_DRAFT = ("GreaterOrEqual", "positions", "length")
_BEGIN = ("ReduceMin", "places", 1)
_KEYS = ("Unsqueeze", ("Concat", ("Add", ("Sub", _BEGIN, "count"), "range"), "places"), 1)
_FIRST = ("Where", _IS_DRAFT, _BEGIN, "places")
_LAST = ("Where", _IS_DRAFT, ("Cast", "length"), "places")
_DRAFT_WINDOW = (
    "Unsqueeze",
    (
        "Mul",
        (
            "Cast",
            (
                "Or",
                ("Greater", ("Sub", ("Unsqueeze", _FIRST, 2), _KEYS), "window"),
                ("Greater", _KEYS, ("Unsqueeze", _LAST, 2)),
            ),
        ),
        float(np.finfo(np.float32).min),
    ),
    1,
)
"""The node patterns of attention masks: block-causal attention, attention in a window, causal
attention with draft passes, and the same in a window.

Tracing the function ``hiding`` of ``network.denoiser`` gives these nodes. A tuple is an operator
with its inputs. A number is a constant with this value. A name matches any value.
"""


def _seen(
    hidden: ir.Value, positions: ir.Value, longest: int
) -> tuple[str, ir.Value, dict[str, int]]:
    """Find the attention function that hides the same keys as the attention mask ``hidden``.

    Returns a part of the function's name, the graph's position ids, and the function's attributes.
    ``positions`` are the positions that the rotation uses. In a network with draft passes, or with
    ``blocks_after_prompt``, these are the position ids modulo ``longest``. In other networks, these
    are the position ids. Causal draft passes have the attention mask of causal attention, with
    ``positions``. The function knows the attention masks of block-causal attention, of windows and of draft passes.
    Raises _Unlike for all other masks.
    """
    for kind, pattern, attribute in (
        (BLOCK, _BLOCKS, "visible_block"),
        (WINDOW, _WINDOW, "window"),
    ):
        found = {"positions": positions}
        length = _number(found["length"]) if _looks_like(hidden, pattern, found) else None
        if length is not None:
            return kind, positions, {attribute: int(length)}
    found = {}
    if _looks_like(positions, ("Mod", "positions", longest), found):
        ids = found["positions"]
        found = {"positions": ids}
        if _looks_like(hidden, _BLOCKS, found) and _number(found["length"]) == longest:
            return BLOCK, ids, {"visible_block": longest}
        found = {}
        limits = ("length", "longest")
        if _looks_like(hidden, _DRAFTS, found) and all(
            _number(found[limit]) == longest for limit in limits
        ):
            return DRAFT, ids, {}
        found = {"positions": ids, "places": positions}
        if _looks_like(hidden, _DRAFT_WINDOW, found) and _number(found["length"]) == longest:
            window = _number(found["window"])
            if window is not None and _producer(found["range"], "Range") is not None:
                return f"{DRAFT}{WINDOW}", ids, {"window": int(window)}
    raise _Unlike("the mask is not block-causal, not a window and not that of draft passes")


def _looks_like(value: ir.Value | None, wanted: _Pattern, found: dict[str, ir.Value]) -> bool:
    """Return True if the operators that compute ``value`` match a pattern.

    A name that occurs twice in the pattern must match the same value both times. ``found`` maps
    each name to its value, and new names are added to ``found``.
    """
    if value is None:
        return False
    if isinstance(wanted, str):
        return found.setdefault(wanted, value) is value
    if not isinstance(wanted, tuple):
        return _number(value) == wanted
    node = _producer(value, wanted[0])
    return node is not None and all(
        map(_looks_like, node.inputs, wanted[1:], [found] * len(node.inputs))
    )


def _number(value: ir.Value) -> float | None:
    """Return the value of a scalar constant, or ``None`` if ``value`` is something else."""
    tensor = ir.convenience.get_const_tensor(value)
    return float(tensor.numpy().item()) if tensor is not None and tensor.size == 1 else None


def _expect(value: ir.Value | None, op_type: str, otherwise: str) -> ir.Node:
    """Return the node of type ``op_type`` that computes ``value``, or raise _Unlike."""
    node = _producer(value, op_type)
    if node is None:
        raise _Unlike(otherwise)
    return node


def _refuse_settings(node: ir.Node, names: Sequence[str]) -> None:
    """Raise _Unlike if an attribute in ``names`` is not 0. The kernel assumes 0."""
    for name in names:
        attribute = node.attributes.get(name)
        if attribute is not None and attribute.value:
            raise _Unlike(f"{node.op_type} with {name} = {attribute.value:g}")


def _all(values: Sequence[ir.Value | None], count: int) -> list[ir.Value]:
    """Return ``count`` values. Raises _Unlike if there are more or fewer, or one is missing."""
    found = [value for value in values if value is not None]
    if len(found) != count or len(values) != count:
        raise _Unlike(f"an operator has {len(found)} inputs, expected {count}")
    return found


def _both(node: ir.Node) -> tuple[ir.Value, ir.Value]:
    """Return the two inputs of a node. Raises _Unlike if the node does not have exactly two inputs."""
    first, second = _all(node.inputs, 2)
    return first, second


@dataclass(frozen=True)
class _Norm:
    """An RMSNorm over the last axis of ``x``."""

    x: ir.Value
    weight: ir.Value
    epsilon: float


def _norm_of(node: ir.Node) -> _Norm | None:
    """Return the operands of an RMSNorm, or ``None`` if the kernels do not support this node."""
    if node.op_type != "RMSNormalization" or node.domain != "":
        return None
    x, weight = _all(node.inputs, 2)
    is_last = node.attributes.get_int("axis", -1) == -1
    is_fp32 = node.attributes.get_int("stash_type", 1) == 1
    epsilon = node.attributes.get_float("epsilon", 1e-5)
    return _Norm(x, weight, epsilon) if is_last and is_fp32 else None


@dataclass(frozen=True)
class _Heads:
    """A value that the graph splits into heads, and the norm of these heads.

    The value ``whole`` is ``[B, T, count * D]``, for ``count`` heads.
    """

    count: int
    whole: ir.Value
    norm: _Norm | None


def _heads_of(value: ir.Value | None) -> _Heads:
    """Find the value that the graph splits into the heads ``[B, heads, T, D]``. Raises _Unlike."""
    otherwise = "heads are not cut from one product"
    ready = _expect(value, "Transpose", otherwise).inputs[0]
    normed = _producer(ready, "RMSNormalization")
    norm = None if normed is None else _norm_of(normed)
    split = _expect(ready if norm is None else norm.x, "Reshape", otherwise)
    whole, sizes = _both(split)
    shape = ir.convenience.get_const_tensor(sizes)
    if shape is None:
        raise _Unlike(otherwise)
    return _Heads(int(shape.numpy()[2]), whole, norm)


def _norms_of(queries: _Heads, keys: _Heads, values: _Heads) -> list[_Norm]:
    """Return the norms of queries and keys, or an empty list if the graph has no such norms.

    Raises _Unlike if only queries or only keys have a norm, or if the norms differ in epsilon.
    """
    if queries.norm is None and keys.norm is None and values.norm is None:
        return []
    if queries.norm is None or keys.norm is None or values.norm is not None:
        raise _Unlike("norms apply to something other than queries and keys together")
    if queries.norm.epsilon != keys.norm.epsilon:
        raise _Unlike("the norms of queries and keys differ in epsilon")
    return [queries.norm, keys.norm]


def _is_constant(value: ir.Value) -> bool:
    return value.is_initializer() or _producer(value, "Constant") is not None


def _fuse_add_norm(model: ir.Model, add: ir.Node) -> None:
    """Replace a sum of two tensors and its RMSNorm, if there is one, with one call."""
    if any(value is None or _is_constant(value) for value in add.inputs):
        return  # ``add`` adds a bias, but the kernel needs two tensors of the same shape
    total = add.outputs[0]
    for node, _ in total.uses():
        norm = _norm_of(node)
        if norm is not None and norm.x is total:
            x, y = _both(add)
            old = [total, node.outputs[0]]
            _call(model, add, "AddNorm", [x, y, norm.weight], old, epsilon=norm.epsilon)
            return


def _fuse_candidates(model: ir.Model) -> None:
    """Replace the operators of the two best tokens and the entropy by a call. Raises _Unlike."""
    outputs = {str(value.name): value for value in model.graph.outputs}
    if _producer(outputs["top_prob"], "Candidates") is not None:
        return
    ids = _expect(outputs["top_token"], "Cast", "candidates are not chosen by TopK")
    best = _expect(ids.inputs[0], "TopK", "candidates are not chosen by TopK")
    masked = _expect(best.inputs[0], "Add", "logits lack the mask token's bias")
    logits, bias = _both(masked)
    if logits is not outputs["logits"]:
        raise _Unlike("candidates do not come from the returned logits")
    old = [outputs[name] for name in ("top_token", "top_prob", "top_log_odds", "entropy")]
    _call(model, masked, "Candidates", [logits, bias], old)
