"""ONNX functions for tied heads: they multiply activations by the embedding table.

The table ``[V, K]`` has one row per token. The lookup of embeddings and the head use the same
initialiser. A table in FP8 consists of E4M3 bytes, and of scales ``[V, 1]``.
"""

from __future__ import annotations

import onnx_ir as ir

from dlm_export.graph.body import Body
from dlm_export.graph.routed import E4M3_VALUES

TIED_HEADS = {
    ir.DataType.FLOAT: "Fp32TiedHead",
    ir.DataType.BFLOAT16: "Bf16TiedHead",
    ir.DataType.FLOAT16: "Fp16TiedHead",
}
"""Maps the type of an unquantised table to the name of the function that multiplies by the table.
"""
FP8_TIED_HEAD = "Fp8TiedHead"


def tied_head(name: str) -> ir.Function:
    """Define the function ``name``, which computes ``x @ transposed table`` in fp32.

    In FP8, each logit is also multiplied by the scale of the token's table row.
    """
    is_fp8 = name == FP8_TIED_HEAD
    body = Body(name, "x table scales" if is_fp8 else "x table")
    op = body.op
    x, table, *scales = body.inputs
    if is_fp8:
        codes = body.cast(table, ir.DataType.INT32)
        values = op("Gather", body.constant(E4M3_VALUES), codes)
    else:
        values = body.cast(table, ir.DataType.FLOAT)
    y = op("MatMul", x, op("Transpose", values, perm=[1, 0]))
    if is_fp8:
        y = op("Mul", y, op("Reshape", scales[0], body.ints(-1)))
    return body.function({"y": y})
