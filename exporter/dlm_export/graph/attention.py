"""ONNX functions for attention over cached and new keys and values.

The docstring of ``operators`` describes these functions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from dlm_export.graph.body import Body
from dlm_export.graph.cache_dtypes import Code

BLOCK, DRAFT, WINDOW, NORMED = "Block", "Draft", "Window", "Normed"
"""Parts of the names of attention functions.

``Block`` means block-causal attention. ``Draft`` means causal attention with draft passes.
``Window`` means attention in a window. ``Normed`` means that an RMSNorm is applied to queries and
keys. Functions whose names contain both ``Draft`` and ``Normed`` also have the attribute ``scale``.
"""
ATTENTION = (
    *(f"{block}{normed}CachedAttention" for normed in ("", NORMED) for block in ("", BLOCK)),
    f"{DRAFT}CachedAttention",
    f"{WINDOW}CachedAttention",
    f"{DRAFT}{NORMED}CachedAttention",
    f"{DRAFT}{WINDOW}{NORMED}CachedAttention",
)
"""Attention functions whose cache contains fp32 rows."""


def cached_attention(name: str, store: Code, read: Code) -> ir.Function:
    """Define the attention function ``name``.

    ``name`` determines which keys a query sees, and whether the function applies norms to queries
    and keys. ``store`` converts keys and values to the form in which the cache stores them, and
    ``read`` converts them back.
    """
    is_normed = NORMED in name
    norms = " q_norm k_norm" if is_normed else ""
    body = Body(name, f"q k v past_key past_value position_ids cos sin segments{norms}")
    op, ints = body.op, body.ints
    q, k, v, past_key, past_value, positions, cos, sin, segments, *weights = body.inputs
    q_norm, k_norm = weights or (None, None)

    def by_head(value: ir.Value, heads: str, norm: ir.Value | None = None) -> ir.Value:
        count = op("Unsqueeze", body.attribute(heads, ir.AttributeType.INT), ints(0))
        shape = op("Concat", ints(0, 0), count, ints(-1), axis=0)
        split = op("Reshape", value, shape)
        ready = split if norm is None else rms_norm(body, split, norm)
        return op("Transpose", ready, perm=[0, 2, 1, 3])

    longest = body.size(cos, 0)
    is_rounded = BLOCK in name or DRAFT in name
    rows = op("Mod", positions, longest) if is_rounded else positions

    def turn(heads: ir.Value) -> ir.Value:
        size = ir.Attr(
            "rotary_embedding_dim", ir.AttributeType.INT, None, ref_attr_name="rotary_size"
        )
        return op("RotaryEmbedding", heads, cos, sin, rows, rotary_embedding_dim=size)

    turned, key = turn(by_head(q, "heads", q_norm)), turn(by_head(k, "kv_heads", k_norm))
    value = by_head(v, "kv_heads")
    own = _own(body, segments, positions, past_key)
    # Some cached rows belong to no request. Set these rows to 0, because they may contain NaN, and
    # NaN plus an attention mask is still NaN.
    is_read = op("ReduceMax", body.cast(own.past, ir.DataType.UINT8), ints(0), keepdims=0)
    is_read = op("Unsqueeze", body.cast(is_read, ir.DataType.BOOL), ints(1))
    nothing = body.number(0)
    stored_key, stored_value = store(body, key), store(body, value)
    if is_rounded:
        # Round the new keys and values as the cache does. The result of a pass then does not depend
        # on which keys and values are cached.
        key, value = read(body, stored_key), read(body, stored_value)
    keys = op("Concat", op("Where", is_read, read(body, past_key), nothing), key, axis=2)
    values = op("Concat", op("Where", is_read, read(body, past_value), nothing), value, axis=2)
    attributes = dict.fromkeys(("heads", "kv_heads", "rotary_size"), ir.AttributeType.INT)
    if is_normed:
        attributes["epsilon"] = ir.AttributeType.FLOAT
    seen = op("Unsqueeze", op("Concat", own.past, own.new, axis=1), ints(0, 1))
    if is_rounded:
        if BLOCK in name:
            attributes["visible_block"] = ir.AttributeType.INT
            blocks = op("Div", positions, body.attribute("visible_block", ir.AttributeType.INT))
        else:  # all tokens of a draft pass get the same number
            blocks = op("Min", positions, longest)
        size = op("Concat", body.size(positions, 0), body.size(past_key, 2), axis=0)
        # Give all cached rows the number of the first block, so that every query sees these rows.
        of_keys = op("Concat", op("Expand", ints(0), size), blocks, axis=1)
        keys_first = op("Unsqueeze", of_keys, ints(1, 2))
        is_before = op("LessOrEqual", keys_first, op("Unsqueeze", blocks, ints(1, 3)))
        seen = op("And", seen, is_before)
    if WINDOW in name and DRAFT in name:
        attributes["window"] = ir.AttributeType.INT
        # In a draft pass, measure the distances of all queries from the first position of the pass.
        is_draft = op("GreaterOrEqual", positions, longest)
        first = op("Where", is_draft, op("Gather", rows, own.begin, axis=1), rows)
        keys_at = op("Concat", own.places(body, rows), rows, axis=1)
        before = op("Sub", op("Unsqueeze", first, ints(1, 3)), op("Unsqueeze", keys_at, ints(1, 2)))
        window = body.attribute("window", ir.AttributeType.INT)
        seen = op("And", seen, op("LessOrEqual", before, window))
    elif WINDOW in name:
        attributes["window"] = ir.AttributeType.INT
        distances = op(
            "Abs",
            op("Sub", op("Unsqueeze", positions, ints(1)), op("Unsqueeze", positions, ints(2))),
        )
        window = body.attribute("window", ir.AttributeType.INT)
        is_near = op("Unsqueeze", op("LessOrEqual", distances, window), ints(1))
        past = op("Unsqueeze", op("Unsqueeze", own.past, ints(0)), ints(1))
        batch = op("Concat", body.size(positions, 0), ints(1, 1, 1), axis=0)
        near = op("And", op("Unsqueeze", own.new, ints(0, 1)), is_near)
        seen = op("Concat", op("Expand", past, batch), near, axis=3)
    scale = {}
    if DRAFT in name and is_normed:
        attributes["scale"] = ir.AttributeType.FLOAT
        scale["scale"] = ir.Attr("scale", ir.AttributeType.FLOAT, None, ref_attr_name="scale")
    y = op("Transpose", op("Attention", turned, keys, values, seen, **scale), perm=[0, 2, 1, 3])
    merged = op("Reshape", y, ints(0, 0, -1))
    outputs = {"y": merged, "present_key": stored_key, "present_value": stored_value}
    return body.function(outputs, attributes)


def rms_norm(body: Body, x: ir.Value, weight: ir.Value) -> ir.Value:
    """Add the operators of an RMSNorm over the last axis.

    The function under construction must have the attribute ``epsilon``.
    """
    epsilon = ir.Attr("epsilon", ir.AttributeType.FLOAT, None, ref_attr_name="epsilon")
    return body.op("RMSNormalization", x, weight, axis=-1, epsilon=epsilon)


@dataclass(frozen=True)
class _Own:
    """For each token, the rows that belong to the same request.

    ``past`` ``[T, S]`` and ``new`` ``[T, T]`` are bool arrays for the S cached rows, and for the
    rows of the T tokens. ``begin`` ``[T]`` is the index of the first token of the same request.
    ``row`` ``[S]`` contains the indices of the cached rows. The other fields describe N segments.
    ``start`` is the first cached row of each segment, ``count`` is the number of cached rows, and
    ``first`` is the first token, all ``[N, 1]``. ``is_in_segment`` ``[N, S]`` says which cached
    rows are in each segment.
    """

    past: ir.Value
    new: ir.Value
    begin: ir.Value
    start: ir.Value
    count: ir.Value
    first: ir.Value
    row: ir.Value
    is_in_segment: ir.Value

    def places(self, body: Body, positions: ir.Value) -> ir.Value:
        """Return the position of each cached row, ``[B, S]``.

        ``positions`` ``[B, T]`` are the positions of the tokens. The cached rows of a request belong
        to the last positions before its first token, in order. The segments of a request are
        consecutive.
        """
        op, ints, fp32 = body.op, body.ints, ir.DataType.FLOAT
        number = op(
            "Range",
            body.constant(np.int64(0)),
            op("Squeeze", body.size(self.first, 0)),
            body.constant(np.int64(1)),
        )
        is_later = op("Greater", op("Unsqueeze", number, ints(1)), number)
        is_own = op("Equal", self.first, op("Transpose", self.first))

        def count_in(segments: ir.Value) -> ir.Value:
            """Count the rows in the segments that ``[N, N]`` selects for each segment: ``[N, 1]``."""
            sums = op("MatMul", body.cast(segments, fp32), body.cast(self.count, fp32))
            return body.cast(sums, ir.DataType.INT64)

        # The position of each row minus the position of the request's first token. Shape [N, S].
        earlier, all_rows = count_in(op("And", is_later, is_own)), count_in(is_own)
        distances = op("Sub", op("Add", op("Sub", self.row, self.start), earlier), all_rows)
        begin = op("Gather", positions, op("Squeeze", self.first, ints(1)), axis=1)
        places = op("Add", op("Unsqueeze", begin, ints(2)), distances)
        of_segments = op("Where", self.is_in_segment, places, body.constant(np.int64(0)))
        return op("ReduceMax", of_segments, ints(1), keepdims=0)


def _own(body: Body, segments: ir.Value, positions: ir.Value, past_key: ir.Value) -> _Own:
    """For each token, find the rows that belong to the same request."""
    op, ints = body.op, body.ints
    tokens, cached = body.size(positions, 1), body.size(past_key, 2)
    # A segment is a request's range of tokens and of cached rows. Prepend a segment that covers all
    # tokens. If the caller passes no segments, this segment is the only segment, and also covers
    # all cached rows.
    zero, one = body.constant(np.int64(0)), body.constant(np.int64(1))
    is_alone = body.cast(op("Equal", body.size(segments, 0), ints(0)), ir.DataType.INT64)
    rows = op("Mul", cached, is_alone)
    everything = op("Unsqueeze", op("Concat", ints(0), rows, ints(0), tokens, axis=0), ints(0))
    all_segments = op("Concat", everything, segments, axis=0)
    start, count, first, _ = body.several(4, "Split", all_segments, axis=1, num_outputs=4)
    token, row = (op("Range", zero, op("Squeeze", size), one) for size in (tokens, cached))
    # For each token, the index of the first token of its request. Shape [T].
    is_begun = op("LessOrEqual", first, token)
    begin = op("ReduceMax", op("Where", is_begun, first, zero), ints(0), keepdims=0)
    of_token = op("Equal", op("Unsqueeze", begin, ints(1)), op("Transpose", first))  # [T, N]
    in_segment = op("And", op("LessOrEqual", start, row), op("Less", row, op("Add", start, count)))
    numbers = (body.cast(each, ir.DataType.FLOAT) for each in (of_token, in_segment))
    of_past = body.cast(op("MatMul", *numbers), ir.DataType.BOOL)
    of_new = op("Equal", op("Unsqueeze", begin, ints(1)), begin)
    return _Own(of_past, of_new, begin, start, count, first, row, in_segment)
