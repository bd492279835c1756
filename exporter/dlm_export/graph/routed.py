"""Mixtures of experts as functions of standard operators: a loop over the experts that are chosen, each for its tokens.

Of INT8 and INT4 weights an expert is a call of the gated layer and one
of the layer behind it (``functions``), so that inputs are quantised by rows, twice.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from dlm_export.graph.body import Body, LoopBody

EXPERTS: dict[str, tuple[str, ...]] = {
    "Experts": (),
    "Fp32Experts": (),
    "Int8Experts": ("Int8GatedLinear", "Int8Linear"),
    "Int4Experts": ("Int4GatedLinear", "Int4Linear"),
}
"""Function -> the functions that it calls."""
_STACKS = ("gate", "up", "down")


def experts(name: str) -> ir.Function:
    """Results are weighed and added up in fp32. ``Experts`` has weights ``[E, K, N]``; the others have panels, and attributes:
    ``columns`` of gate and up, and ``out_columns`` of down.
    """
    parts = ("", "_scales") if EXPERTS[name] else ("",)
    body = Body(name, " ".join(("x", "chosen", "weights", *(f"{stack}{part}" for stack in _STACKS for part in parts))))
    op, ints = body.op, body.ints
    x, chosen, weights, *stored = body.inputs
    rows = op("Reshape", x, op("Concat", ints(-1), op("Shape", x, start=-1), axis=0))
    active = op("Concat", ints(-1), op("Shape", chosen, start=-1), axis=0)
    slots, shares = op("Reshape", chosen, active), op("Reshape", weights, active)
    zero, last = body.constant(np.float32(0)), ints(-1)
    attributes = _attributes(name)
    counts = []
    if name == "Fp32Experts":
        counts = [op("Slice", body.attribute(each, ir.AttributeType.INTS), ints(0), ints(1)) for each in attributes]
    nothing, reached = op("Expand", zero, op("Shape", rows)), op("Unique", slots, sorted=1)
    loop = LoopBody()
    expert = loop.op("Gather", reached, loop.turn)
    is_mine = loop.op("Equal", slots, expert)
    share = loop.op("ReduceSum", loop.op("Where", is_mine, shares, zero), last, keepdims=0)
    has_chosen = loop.op("ReduceMax", loop.op("Cast", is_mine, to=ir.DataType.INT64), last, keepdims=0)
    mine = loop.op("Transpose", loop.op("NonZero", has_chosen), perm=[1, 0])
    inputs = loop.op("Gather", rows, loop.op("Squeeze", mine, last))
    result = _one(name, loop, inputs, [loop.op("Gather", value, expert) for value in stored], counts)
    weighed = loop.op("Mul", loop.op("Cast", result, to=ir.DataType.FLOAT), loop.op("Gather", share, mine))
    added = loop.op("ScatterND", loop.carried, mine, weighed, reduction="add")
    y = loop.run(body, op("Squeeze", op("Shape", reached)), nothing, added)
    return body.function({"y": op("CastLike", op("Reshape", y, op("Shape", x)), x)}, attributes)


def _attributes(name: str) -> dict[str, ir.AttributeType]:
    if name == "Experts":
        return {}
    group_size = {"group_size": ir.AttributeType.INT} if name == "Int4Experts" else {}
    return {"columns": ir.AttributeType.INTS, "out_columns": ir.AttributeType.INTS} | group_size


def _one(name: str, loop: LoopBody, x: ir.Value, stored: list[ir.Value], counts: list[ir.Value]) -> ir.Value:
    """What an expert makes of its rows ``x`` ``[n, K]``; ``stored`` are its own weights, and scales."""
    if EXPERTS[name]:
        gated, behind = EXPERTS[name]
        hidden: ir.Value = loop.call(gated, x, *stored[:4], columns="columns", group_size="group_size" * ("4" in name))
        y: ir.Value = loop.call(behind, hidden, *stored[4:], columns="out_columns", group_size="group_size" * ("4" in name))
        return y
    gate, up, down = stored if not counts else (_matrix(loop, panels, counts[i > 1]) for i, panels in enumerate(stored))
    product = loop.op("MatMul", x, gate)
    silu = loop.op("Mul", product, loop.op("Sigmoid", product))
    found: ir.Value = loop.op("MatMul", loop.op("Mul", silu, loop.op("MatMul", x, up)), down)
    return found


def _matrix(loop: LoopBody, panels: ir.Value, columns: ir.Value) -> ir.Value:
    """Panels ``[N / 32, K, 32]`` as ``[K, N]``."""
    whole = loop.op("Reshape", loop.op("Transpose", panels, perm=[1, 0, 2]), loop.ints(0, -1))
    found: ir.Value = loop.op("Slice", whole, loop.ints(0), columns, loop.ints(1))
    return found
