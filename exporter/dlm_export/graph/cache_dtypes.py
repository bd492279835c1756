"""The types in which a CPU graph's attention caches keys and values, and conversions in ONNX.

``network.cache_dtypes`` makes the same conversions in torch.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from dlm_calibration.precision_rounding import SMALLEST_ROW
from dlm_export.graph.body import Body
from dlm_runtime.cache_dtypes import CACHE_ROWS, ONNX_TYPES

STORED = {"float32": "", "float16": "Fp16", "int8": "Int8"}
"""Maps the type of the cache to the prefix of the attention function's name."""
POWERS = (np.arange(256, dtype=np.uint32) << 23).view(np.float32)
"""A table of powers of two in fp32.

The index is the value of the exponent bits, so entry ``i`` is ``2 ** (i - 127)``, except that the
first entry is 0 and the last entry is infinity.
"""

Code = Callable[["Body", ir.Value], ir.Value]
"""The type of a function that converts rows ``[B, Hkv, rows, D]`` to the form in the cache, or
back.
"""


def row_of(cache_dtype: str, head_size: int) -> tuple[ir.DataType, int]:
    """Return the element type and the number of elements of one cached row (a key or a value)."""
    element_bytes, scale_bytes = CACHE_ROWS[cache_dtype]
    return ir.DataType(ONNX_TYPES[cache_dtype]), head_size + scale_bytes // element_bytes


def _as_it_is(body: Body, rows: ir.Value) -> ir.Value:
    return rows


def _as(dtype: ir.DataType) -> Code:
    return lambda body, rows: body.cast(rows, dtype)


def _store_int8(body: Body, rows: ir.Value) -> ir.Value:
    op, ints = body.op, body.ints
    half, powers = body.number(128), body.constant(POWERS)
    is_bad = op("IsNaN", op("ReduceSum", op("Mul", rows, body.number(0)), ints(-1)))
    finite = op("Where", is_bad, body.number(0), rows)
    amax = op("Max", op("ReduceMax", op("Abs", finite), ints(-1)), body.constant(SMALLEST_ROW))
    wanted = op("Div", amax, body.number(127))
    # Find the smallest power of two p with 255 * p >= wanted, by counting the powers that are too
    # small. The last eight powers are not compared, because 255 * p would overflow to infinity.
    is_short = op("Greater", wanted, body.constant(np.float32(255) * POWERS[:-8]))
    field = op("ReduceSum", body.cast(is_short, ir.DataType.INT64), ints(-1))
    mantissa = op("Ceil", op("Mul", wanted, op("Gather", powers, op("Sub", ints(254), field))))
    codes = op("Round", op("Div", finite, op("Mul", mantissa, op("Gather", powers, field))))
    m = op("Where", is_bad, body.number(0), op("Sub", mantissa, half))
    e = op("Where", is_bad, ints(127), op("Sub", field, ints(128)))
    parts = (body.cast(part, ir.DataType.INT8) for part in (codes, m, e))
    return op("Concat", *parts, axis=-1)


def _read_int8(body: Body, rows: ir.Value) -> ir.Value:
    op, ints = body.op, body.ints
    codes = op("Slice", rows, ints(0), ints(-2), ints(-1))
    m = body.cast(op("Slice", rows, ints(-2), ints(-1), ints(-1)), ir.DataType.FLOAT)
    last = op("Slice", rows, ints(-1), ints(np.iinfo(np.int64).max), ints(-1))
    e = body.cast(last, ir.DataType.INT64)
    power = op("Gather", body.constant(POWERS), op("Add", e, ints(128)))
    scale = op("Mul", op("Add", m, body.number(128)), power)
    return op("Mul", body.cast(codes, ir.DataType.FLOAT), scale)


CACHES: dict[str, tuple[Code, Code]] = {
    "float32": (_as_it_is, _as_it_is),
    "float16": (_as(ir.DataType.FLOAT16), _as(ir.DataType.FLOAT)),
    "int8": (_store_int8, _read_int8),
}
"""Maps the type of the cache to two functions: the first converts rows to the form in the cache,
and the second converts them back.
"""
