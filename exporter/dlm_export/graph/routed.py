"""Defines ONNX functions for mixtures of experts, which loop over the chosen experts.

INT8 and INT4 experts call the gated layer and the linear layer of ``operators``, which quantise
each row of their input. CPUs cannot multiply in FP8 or NVFP4. For FP8 and NVFP4 experts, the
functions therefore dequantise the weights, and multiply in fp32. They also round the inputs of the
experts to the format, with one range for all experts of a stack. The features after the gate are
first multiplied by the expert's routing weight, and then rounded to the format.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np
import onnx_ir as ir

from dlm_export.graph.body import Body, LoopBody
from dlm_export.network.spec import STACKS

MIXTURE = "Experts"
"""Name of the function for mixtures of experts in a traced graph.

``graph.experts`` replaces calls of this function with calls of another function in ``FUNCTIONS``.
"""
GELU = "Gelu"
"""Prefix of the names of functions whose gates use the activation gelu-tanh instead of silu."""
MIXTURES = (MIXTURE, f"{GELU}{MIXTURE}")
"""Names of the functions for mixtures of experts in a traced graph."""
RANGES = ("x_scale", "hidden_scale")
E4M3_VALUES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)


@dataclass(frozen=True)
class Held:
    """Describes the inputs of a mixture function.

    A stack of experts' weights takes several inputs, for example codes and scales. ``parts``
    contains the suffixes of these inputs' names. ``calls`` lists the functions of domain
    ``dlm_export`` that the mixture function calls. If ``has_ranges`` is true, the inputs named in
    ``RANGES`` follow the stacks.
    """

    parts: tuple[str, ...] = ("",)
    calls: tuple[str, ...] = ()
    has_ranges: bool = False


_CODES, _IN_GROUPS = ("", "_scales"), ("", "_scales", "_global_scale")
_SILU_FUNCTIONS: dict[str, Held] = {
    MIXTURE: Held(),
    "Fp32Experts": Held(),
    "Int8Experts": Held(_CODES, ("Int8GatedLinear", "Int8Linear")),
    "Int4Experts": Held(_CODES, ("Int4GatedLinear", "Int4Linear")),
    "FP8Experts": Held(_CODES, has_ranges=True),
    "NVFP4Experts": Held(_IN_GROUPS, ("NVFP4Linear", "NVFP4QuantizeDequantize"), has_ranges=True),
    "NVFP4WeightExperts": Held(_IN_GROUPS, ("NVFP4Linear",)),
}
FUNCTIONS: dict[str, Held] = _SILU_FUNCTIONS | {
    f"{GELU}{name}": replace(
        held, calls=tuple(call for call in held.calls if not call.endswith("GatedLinear"))
    )
    for name, held in _SILU_FUNCTIONS.items()
}


def experts(name: str) -> ir.Function:
    """Define a mixture function, which computes the weighted sum of the experts' results in fp32.

    ``Experts`` takes weights ``[E, K, N]``. ``FP8Experts`` takes FP8 codes of this shape. All other
    functions take panels. The last panel may contain padding. A function that takes panels
    therefore has two attributes: ``columns`` is the number of columns of gate and up without
    padding, and ``out_columns`` is the same number for down.
    """
    held = FUNCTIONS[name]
    ports = [
        "x",
        "chosen",
        "weights",
        *(f"{stack}{part}" for stack in STACKS for part in held.parts),
    ]
    body = Body(name, " ".join(ports + list(RANGES) * held.has_ranges))
    op, ints = body.op, body.ints
    x, chosen, weights, *stored = body.inputs
    rows = op("Reshape", x, op("Concat", ints(-1), op("Shape", x, start=-1), axis=0))
    active = op("Concat", ints(-1), op("Shape", chosen, start=-1), axis=0)
    slots, shares = op("Reshape", chosen, active), op("Reshape", weights, active)
    zero, last = body.number(0), ints(-1)
    attributes = _attributes(name)
    counts = []
    if name.endswith("Fp32Experts"):
        counts = [
            op("Slice", body.attribute(each, ir.AttributeType.INTS), ints(0), ints(1))
            for each in attributes
        ]
    nothing, reached = op("Expand", zero, op("Shape", rows)), op("Unique", slots, sorted=1)
    loop = LoopBody()
    expert = loop.op("Gather", reached, loop.turn)
    is_mine = loop.op("Equal", slots, expert)
    share = loop.op("ReduceSum", loop.op("Where", is_mine, shares, zero), last, keepdims=0)
    has_chosen = loop.op("ReduceMax", loop.cast(is_mine, ir.DataType.INT64), last, keepdims=0)
    mine = loop.op("Transpose", loop.op("NonZero", has_chosen), perm=[1, 0])
    inputs = loop.op("Gather", rows, loop.op("Squeeze", mine, last))
    own_share = loop.op("Gather", share, mine)
    if name.removeprefix(GELU).startswith(("FP8", "NVFP4")):
        weighed = _rounded_expert(name, loop, inputs, own_share, stored, expert)
    else:
        result = _one(
            name, loop, inputs, [loop.op("Gather", value, expert) for value in stored], counts
        )
        weighed = loop.op("Mul", loop.cast(result, ir.DataType.FLOAT), own_share)
    added = loop.op("ScatterND", loop.carried, mine, weighed, reduction="add")
    y = loop.run(body, op("Squeeze", op("Shape", reached)), nothing, added)
    return body.function({"y": op("CastLike", op("Reshape", y, op("Shape", x)), x)}, attributes)


def _attributes(name: str) -> dict[str, ir.AttributeType]:
    if name.removeprefix(GELU) in (MIXTURE, "FP8Experts"):
        return {}
    group_size = {"group_size": ir.AttributeType.INT} if name.endswith("Int4Experts") else {}
    return {"columns": ir.AttributeType.INTS, "out_columns": ir.AttributeType.INTS} | group_size


def _one(
    name: str, loop: LoopBody, x: ir.Value, stored: list[ir.Value], counts: list[ir.Value]
) -> ir.Value:
    """Compute one expert's output for ``x`` ``[n, K]`` from its weights and scales ``stored``."""
    if calls := FUNCTIONS[name].calls:
        *gated, linear = calls
        own = {"group_size": "group_size" * ("4" in name)}
        if gated:
            hidden: ir.Value = loop.call(gated[0], x, *stored[:4], columns="columns", **own)
        else:
            gate, up = (
                loop.call(linear, x, *stored[i : i + 2], columns="columns", **own) for i in (0, 2)
            )
            hidden = _gated(name, loop, gate, up)
        return loop.call(linear, hidden, *stored[4:], columns="out_columns", **own)
    gate, up, down = (
        stored
        if not counts
        else (_matrix(loop, panels, counts[i > 1]) for i, panels in enumerate(stored))
    )
    return loop.op(
        "MatMul", _gated(name, loop, loop.op("MatMul", x, gate), loop.op("MatMul", x, up)), down
    )


def _gated(name: str, loop: LoopBody, gate: ir.Value, up: ir.Value) -> ir.Value:
    if name.startswith(GELU):
        return loop.op("Mul", loop.op("Gelu", gate, approximate="tanh"), up)
    return loop.op("Mul", loop.op("Mul", gate, loop.op("Sigmoid", gate)), up)


def _matrix(loop: LoopBody, panels: ir.Value, columns: ir.Value) -> ir.Value:
    """Convert panels ``[N / 32, K, 32]`` to a matrix ``[K, N]``."""
    whole = loop.op("Reshape", loop.op("Transpose", panels, perm=[1, 0, 2]), loop.ints(0, -1))
    return loop.op("Slice", whole, loop.ints(0), columns, loop.ints(1))


def _rounded_expert(
    name: str,
    loop: LoopBody,
    x: ir.Value,
    share: ir.Value,
    stored: list[ir.Value],
    expert: ir.Value,
) -> ir.Value:
    """Compute the output of an FP8 or NVFP4 expert for the rows ``x`` ``[n, K]``.

    ``share`` ``[n, 1]`` is the routing weight of each row.
    """
    held = FUNCTIONS[name]
    size = len(held.parts)
    is_fp8 = name.removeprefix(GELU).startswith("FP8")
    multiply, rounded = (_by_fp8, _to_fp8) if is_fp8 else (_by_nvfp4, _to_nvfp4)
    seen, *scales = x, *stored[3 * size :]
    gate, up, down = (stored[i * size : (i + 1) * size] for i in range(3))
    if held.has_ranges:
        seen = rounded(loop, seen, scales[0])
    hidden = _gated(
        name,
        loop,
        multiply(loop, seen, gate, expert, "columns"),
        multiply(loop, seen, up, expert, "columns"),
    )
    hidden = loop.op("Mul", hidden, share)
    if held.has_ranges:
        hidden = rounded(loop, hidden, scales[1])
    return multiply(loop, hidden, down, expert, "out_columns")


def _e4m3(loop: LoopBody, stored: ir.Value) -> ir.Value:
    """Decode E4M3 bytes with a table, because ONNX Runtime cannot gather from FP8 tensors."""
    codes = loop.cast(stored, ir.DataType.INT32)
    return loop.op("Gather", loop.constant(E4M3_VALUES), codes)


def _by_fp8(
    loop: LoopBody, x: ir.Value, stack: list[ir.Value], expert: ir.Value, _: str
) -> ir.Value:
    codes, scales = (loop.op("Gather", value, expert) for value in stack)
    return loop.op("MatMul", x, loop.op("Mul", _e4m3(loop, codes), scales))


def _to_fp8(loop: LoopBody, x: ir.Value, scale: ir.Value) -> ir.Value:
    zero = loop.constant(np.zeros((), ml_dtypes.float8_e4m3fn))
    return loop.op("DequantizeLinear", loop.op("QuantizeLinear", x, scale, zero), scale, zero)


def _by_nvfp4(
    loop: LoopBody, x: ir.Value, stack: list[ir.Value], expert: ir.Value, columns: str
) -> ir.Value:
    codes, scales = (loop.op("Gather", value, expert) for value in stack[:2])
    group_scales = loop.cast(_e4m3(loop, scales), ir.DataType.FLOAT8E4M3FN)
    return loop.call("NVFP4Linear", x, codes, group_scales, stack[2], columns=columns)


def _to_nvfp4(loop: LoopBody, x: ir.Value, scale: ir.Value) -> ir.Value:
    return loop.call("NVFP4QuantizeDequantize", x, scale)
