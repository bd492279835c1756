"""ONNX functions in domain ``dlm_export``, each defined with standard ONNX operators.

A graph contains the definition of every function that it calls, so any engine can run the graph.
For the functions in ``KERNELS``, the native runtime gives ONNX Runtime a kernel of the same name.
ONNX Runtime then runs the kernel instead of the definition. A kernel must compute the same result
as the definition.

==========================  ===========================================================================================
``Int8Linear``              ``(x [.., K], panels, scales) -> x @ w [.., N]``. Quantises each row of x to -127..127
``Int8Linear2``, ``3``      like ``Int8Linear``, with two or three weights. x is quantised once
``Int8GatedLinear``         ``silu(x @ w1) * (x @ w2)``
``Int4Linear``, ``2``,      like the four functions above, with INT4 weights and one scale per group of inputs
``3``, ``Int4GatedLinear``
``Int8Embedding``           ``(ids [B, T], panels, scales) -> [B, T, K]``. Looks up embeddings in the weight of a tied
``Int4Embedding``           head; the embedding of token ``id`` is column ``id`` of that weight
``Fp32TiedHead``,           ``(x [.., K], table [V, K]) -> x @ transposed table [.., V]``. Multiplies by the embedding
``Bf16TiedHead``,           table, which is stored once, in the checkpoint's type
``Fp16TiedHead``
``Fp8TiedHead``             like the three functions above, with a table of E4M3 bytes and one scale per row
``Experts``                 ``(x [B, T, K], chosen [B, T, k], weights [B, T, k], gate, up, down) -> [B, T, K]``.
                            Computes the weighted sum of the gated MLPs chosen for each token (``routed``)
``Fp32Experts``,            like ``Experts``, with the weights in panels of this format
``Int8Experts``,
``Int4Experts``
``FP8Experts``,             like ``Experts``, with FP8 or NVFP4 weights. Weights are dequantised. The inputs, and the
``NVFP4Experts``            weighted features before the down projection, are rounded to the format
``Gelu...Experts``          like the functions above, with the activation GELU (tanh) instead of SiLU
``NVFP4WeightExperts``      like ``NVFP4Experts``, but inputs and features are not rounded
``CachedAttention``         ``(q, k, v, past_key, past_value, position_ids, cos, sin, segments) -> (y, present_key,
                            present_value)``. q, k and v are ``[B, T, heads * D]``, before rotation
``Fp16CachedAttention``     like ``CachedAttention``, with cached keys and values in fp16
``Int8CachedAttention``     like ``CachedAttention``. Each cached row consists of INT8 codes, followed by a scale
``BlockCachedAttention``,   like the three functions above, with block-causal attention. A query sees all cached
``Fp16``, ``Int8Block...``  rows, and new keys with ``pos_key // visible_block <= pos_query // visible_block``
``DraftCachedAttention``,   like the first three functions, with causal attention: a query sees all cached rows, and new
``Fp16``, ``Int8Draft...``  keys with ``pos_key <= pos_query``. In a draft pass, a query sees all keys, and the number of
                            rows of ``cos`` is added to all position ids. Rotation subtracts this number again
``WindowCachedAttention``,  like the first three functions, with attention in a window. A query sees new keys with
``Fp16``, ``Int8Window...`` ``|pos_key - pos_query| <= window``. There must be no cached rows
``DraftNormed...``,         like ``DraftCachedAttention``, with the inputs ``q_norm`` and ``k_norm``, and with the
``DraftWindowNormed...``    attribute ``scale``, by which products of queries and keys are multiplied. With a window, a
                            query sees only keys that are at most ``window`` positions before it. In a draft pass, the
                            distance is counted from the first position of the pass. Cached row i of a request must
                            belong to position i
``NormedCachedAttention``,  like the first six functions, with two more inputs: ``q_norm`` and ``k_norm`` ``[D]``, the
``BlockNormed...``,         weights of an RMSNorm that is applied to every query and key before rotation
``Fp16``, ``Int8...``
``AddNorm``                 ``(x, y, weight [K]) -> (x + y, RMSNorm of x + y)``
``LowRankUpdate`` ...       The same for up to three updates of layers with the same input, in fp32. With ``Gated``, the
                            layers are gate and up, and the result is ``silu(gate) * up``
``DraftUpdate``             ``(x [B, T, K], y [B, T, N], is_updated [B, T, 1], a [K, rank], b [rank, N]) -> y``. Adds
                            ``x @ a @ b`` to the rows for which ``is_updated`` is true
``Candidates``              ``(logits, mask_token_bias) -> (top_token, top_prob, top_log_odds, entropy)``
``NVFP4Linear``             ``(x [.., K], panels, scales, global_scale) -> x @ w [.., N]``. Does not quantise x
``NVFP4QuantizeDequantize`` ``(x [.., K], scale) -> x`` rounded to NVFP4
==========================  ===========================================================================================

A weight ``[K, N]`` has K inputs and N outputs (columns). Weights are stored in panels of 32
columns, because CPU kernels compute 32 columns at a time. The last panel is padded with zeros. The
attribute ``columns`` is the number of columns without padding.

- INT8: uint8 ``[N / 32, K / 4, 32, 4]``. Each byte is a code plus 128.
- INT4: uint8 ``[N / 32, K / 8, 32, 4]``. A byte contains two codes, and 8 is added to each code.
  The low four bits are the code of input k, and the high four bits are the code of input k + 4.
  Scales are fp16 ``[N / 32, groups, 32]``. A group consists of ``group_size`` inputs; the last
  group may be smaller.
- NVFP4: uint8 ``[N / 32, K, 16]``. A byte contains two codes. The low four bits are the code of
  column n, and the high four bits are the code of column n + 16. Group scales are ``[N / 32, K /
  16, 32]``.
- fp32, for experts only: ``[N / 32, K, 32]``.

For experts, panels and scales have an additional first axis, with one entry per expert.

Attention rotates the first ``rotary_size`` features of each head, or all features if
``rotary_size`` is 0. Block-causal attention has separate function names, so that a runtime without
block-causal kernels runs the definitions.

``segments`` ``[N, 4]`` describes requests whose tokens are concatenated into one sequence (B = 1).
A segment consists of four numbers: the index of a request's first cached row, the number of its
cached rows, the index of the request's first token, and the number of its tokens. If a request has
cached rows in several places, several consecutive segments name the same tokens. A request sees
only its own tokens and cached rows. If N = 0, each of the B sequences is one request, and the
request sees all cached rows of the sequence.

A cached row is the key or the value of one position in one head. If the cache stores rows in fp16
or INT8, later passes compute with rounded values. With block-causal and causal attention, a pass
also computes with rounded copies of its own new rows. The result of the pass therefore does not
depend on which rows are cached. With other kinds of attention, new rows are not rounded.

An INT8 row consists of ``D`` codes from -127 to 127, followed by two numbers m and e, all int8. The
values of the row are ``code * scale`` with ``scale = (128 + m) * 2 ** (e + 1)`` and m >= 0. The
scale is the smallest number of this form that is at least ``amax / 127``, where ``amax`` is the
largest magnitude in the row. A row that contains NaN or infinity is stored as codes 0 with e = 127.
With e = 127, the scale is infinite, so every element of the row becomes NaN when the row is
dequantised.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from dlm_calibration.pieces import Index, Lazy
from dlm_calibration.precision_rounding import E2M1_VALUES, NVFP4_GROUP_SIZE, SMALLEST_ROW
from dlm_export.graph.attention import (
    ATTENTION,
    cached_attention,
    rms_norm,
)
from dlm_export.graph.body import DOMAIN, Body
from dlm_export.graph.cache_dtypes import CACHES, STORED
from dlm_export.graph.routed import E4M3_VALUES, FUNCTIONS, experts

LINEAR = ("Int8Linear", "Int4Linear")
"""Linear functions that quantise each row of their input.

Calls with the same input can be merged into one call.
"""
DRAFT_UPDATE = "DraftUpdate"
"""Name of the function for low-rank updates that only draft passes use."""
LOW_RANK = {
    "LowRankUpdate": 1,
    "LowRankUpdate2": 2,
    "LowRankUpdate3": 3,
    "GatedLowRankUpdate": 2,
}
"""Maps the functions with native kernels for such updates in fp32 to their number of updates.

Calls of ``DraftUpdate`` with the same input can be merged into one call.
"""
TIED_HEADS = {
    ir.DataType.FLOAT: "Fp32TiedHead",
    ir.DataType.BFLOAT16: "Bf16TiedHead",
    ir.DataType.FLOAT16: "Fp16TiedHead",
}
"""Maps the type of an unquantised table to the name of the function that multiplies by the table.
"""
FP8_TIED_HEAD = "Fp8TiedHead"
KERNELS = (
    *(f"{stored}{name}" for name in ATTENTION for stored in STORED.values()),
    "AddNorm",
    *LOW_RANK,
    *("Int8Linear", "Int8Linear2", "Int8Linear3", "Int8GatedLinear"),
    *("Int4Linear", "Int4Linear2", "Int4Linear3", "Int4GatedLinear"),
    *(f"{gelu}{kind}Experts" for gelu in ("", "Gelu") for kind in ("Fp32", "Int8", "Int4")),
    *("Int8Embedding", "Int4Embedding"),
    *TIED_HEADS.values(),
    FP8_TIED_HEAD,
    "NVFP4Linear",
    "Candidates",
)
"""Names of the functions that have a kernel in the native runtime."""
# Number of columns per panel, and number of products that one CPU instruction adds up.
PANEL, DOT = 32, 4
PAIRS = 2 * DOT  # number of inputs whose INT4 codes are packed into the same four bytes
BITS = {"int4": 4, "int8": 8}  # bits per code in MatMulNBits
_F8 = ir.DataType.FLOAT8E4M3FN


def panels(codes: np.ndarray) -> np.ndarray:
    """Pack INT8 codes ``[K, N]`` into panels: uint8 ``[ceil(N / 32), K / 4, 32, 4]``.

    128 is added to each code. K must be a multiple of 4.
    """
    inputs, columns = codes.shape
    # If the length of a row were a power of two, many rows would compete for the same cache lines
    # during the transposition. The 64 extra columns prevent such conflicts.
    rows = np.full((padded(columns), inputs + 64), 128, np.uint8)[:, :inputs]
    np.bitwise_xor(codes.view(np.uint8).T, np.uint8(128), out=rows[:columns])
    dots = rows.view(np.uint32).reshape(-1, PANEL, inputs // DOT).transpose(0, 2, 1)
    return np.ascontiguousarray(dots).view(np.uint8).reshape(-1, inputs // DOT, PANEL, DOT)


def int4_panels(codes: np.ndarray) -> np.ndarray:
    """Pack INT4 codes ``[K, N]`` into panels. In the argument, each code takes a whole byte.

    The result is uint8 ``[ceil(N / 32), K / 8, 32, 4]``, with two codes per byte.

    K must be a multiple of 8.
    """
    inputs, columns = codes.shape
    rows = np.full((padded(columns), inputs + 64), 8, np.uint8)[:, :inputs]
    # The code is in the low four bits. Clear the high four bits, which may have any value.
    np.bitwise_and(codes.view(np.uint8).T ^ np.uint8(8), np.uint8(15), out=rows[:columns])
    pairs = rows.view(np.uint32).reshape(-1, PANEL, inputs // PAIRS, 2)
    dots = (pairs[..., 0] | pairs[..., 1] << np.uint32(4)).transpose(0, 2, 1)
    return np.ascontiguousarray(dots).view(np.uint8).reshape(-1, inputs // PAIRS, PANEL, DOT)


def lazy_blocks(codes: np.ndarray, bits: int, size: int) -> Lazy:
    """Pack codes ``[K, N]`` for MatMulNBits. In the argument, each code takes a whole byte.

    The result is uint8 ``[N, ceil(K / size), size * bits / 8]``.

    128 is added to INT8 codes, and 8 is added to INT4 codes. A byte contains two INT4 codes. The
    first code is in the low four bits. The last block is padded with the code that means 0. The
    returned array packs a block when the block is accessed.
    """
    inputs, columns = codes.shape
    count, middle = -(-inputs // size), np.uint8(1 << (bits - 1))

    def read(at: tuple[slice, ...]) -> np.ndarray:
        few = codes[:, at[0]].view(np.uint8).T
        rows = np.full((len(few), count * size), middle, np.uint8)
        # The bits above a code may have any value, so they are cleared. Flipping the highest bit of
        # a code adds 128 or 8 to the code.
        np.bitwise_and(few ^ middle, np.uint8((1 << bits) - 1), out=rows[:, :inputs])
        packed = rows if bits == 8 else rows[:, ::2] | rows[:, 1::2] << np.uint8(4)
        return packed.reshape(len(few), count, size * bits // 8)

    return Lazy((columns, count, size * bits // 8), read)


def panel_scales(scales: np.ndarray) -> np.ndarray:
    """Arrange group scales ``[N, groups]`` in panels ``[ceil(N / 32), groups, 32]``.

    The columns that pad the last panel get scale 0.
    """
    columns, groups = scales.shape
    whole = np.zeros((padded(columns), groups), scales.dtype)
    whole[:columns] = scales
    return np.ascontiguousarray(whole.reshape(-1, PANEL, groups).transpose(0, 2, 1))


def nvfp4_panels(codes: np.ndarray) -> np.ndarray:
    """Pack E2M1 codes ``[N, K]`` (one per byte) into panels: uint8 ``[ceil(N / 32), K, 16]``."""
    columns, inputs = codes.shape
    whole = np.zeros((padded(columns), inputs), np.uint8)
    whole[:columns] = codes
    halves = whole.reshape(-1, 2, PANEL // 2, inputs)
    return np.ascontiguousarray((halves[:, 0] | halves[:, 1] << 4).transpose(0, 2, 1))


def lazy_panels(format: str, codes: np.ndarray) -> Lazy:
    """Return a lazy array of INT8, INT4 or NVFP4 panels. Indexing the array packs the panels."""
    is_nvfp4 = format == "nvfp4"
    inputs, columns = codes.shape[::-1] if is_nvfp4 else codes.shape
    make, lines = {
        "int8": (panels, (inputs // DOT, PANEL, DOT)),
        "int4": (int4_panels, (inputs // PAIRS, PANEL, DOT)),
        "nvfp4": (nvfp4_panels, (inputs, PANEL // 2)),
    }[format]

    def read(at: Index) -> np.ndarray:
        few = slice(at[0].start * PANEL, at[0].stop * PANEL)
        return make(codes[few] if is_nvfp4 else codes[:, few])

    return Lazy((padded(columns) // PANEL, *lines), read)


def padded(columns: int) -> int:
    """Round a number of columns up to whole panels."""
    return -(-columns // PANEL) * PANEL


def declare(model: ir.Model, name: str) -> None:
    """Add the definition of the function ``name`` to a model.

    The definitions of all functions that ``name`` calls are added too.
    """
    identifier = (DOMAIN, name, "")
    if identifier not in model.functions:
        model.functions[identifier] = _DEFINITIONS[name]()
        model.graph.opset_imports[DOMAIN] = 1
        for called in FUNCTIONS[name].calls if name in FUNCTIONS else ():
            declare(model, called)


def _linear(
    name: str, weights: int, *, is_int4: bool = False, is_gated: bool = False
) -> ir.Function:
    """Define a function that quantises each row of its input, and computes linear layers.

    The code of an input is ``round(x * (127 / amax))``, rounded half to even, where amax is the
    largest magnitude of the row. In INT8, the sum of products is multiplied by ``amax / 127``, and
    then by the scale of the column. In INT4, codes are multiplied by dequantised weights, and the
    sum of these products is multiplied by ``amax / 127``.
    """
    body = Body(name, "x " + " ".join(f"panels_{i} scales_{i}" for i in range(weights)))
    op, ints = body.op, body.ints
    x = body.inputs[0]
    one = body.number(127)
    largest = op("ReduceMax", op("Abs", x), ints(-1), keepdims=1)
    amax = op("Max", largest, body.constant(SMALLEST_ROW))
    codes = op("Round", op("Mul", x, op("Div", one, amax)))
    row_scale = op("Div", amax, one)
    attributes = {"columns": ir.AttributeType.INTS}
    if is_int4:
        attributes["group_size"] = ir.AttributeType.INT
    columns = body.attribute("columns", ir.AttributeType.INTS)
    multiply = _by_int4 if is_int4 else _by_int8
    products = []
    for i in range(weights):
        count = op("Slice", columns, ints(i), ints(i + 1))
        held = body.inputs[1 + 2 * i : 3 + 2 * i]
        products.append(multiply(body, codes, row_scale, held, count))
    if is_gated:
        gate, up = products
        products = [op("Mul", op("Mul", gate, op("Sigmoid", gate)), up)]
    return body.function({f"y_{i}": y for i, y in enumerate(products)}, attributes)


def _by_int8(
    body: Body, codes: ir.Value, row_scale: ir.Value, held: Sequence[ir.Value], count: ir.Value
) -> ir.Value:
    (stored, scales), op, ints = held, body.op, body.ints
    # Both operands of the integer product are unsigned. If one operand were signed, ONNX Runtime's
    # product would saturate on CPUs without VNNI.
    middle = body.constant(np.uint8(128))
    unsigned = body.cast(op("Add", codes, body.number(128)), ir.DataType.UINT8)
    # [N / 32, K / 4, 32, 4] -> [N / 32, 32, K] -> [K, N]
    rows = op("Reshape", op("Transpose", stored, perm=[0, 2, 1, 3]), ints(0, 0, -1))
    matrix = op("Reshape", op("Transpose", rows, perm=[2, 0, 1]), ints(0, -1))
    weight = op("Slice", matrix, ints(0), count, ints(1))
    product = body.cast(op("MatMulInteger", unsigned, weight, middle, middle), ir.DataType.FLOAT)
    # Multiply the product by the row's scale first, and then by the column's scale. If the two
    # scales were multiplied with each other first, ONNX Runtime 1.31 would apply the same scale to
    # all rows.
    return op("Mul", op("Mul", product, row_scale), op("Slice", scales, ints(0), count))


def _by_int4(
    body: Body, codes: ir.Value, row_scale: ir.Value, held: Sequence[ir.Value], count: ir.Value
) -> ir.Value:
    (stored, scales), op, ints = held, body.op, body.ints
    low, high = body.nibbles(stored)
    both = op("Concat", op("Unsqueeze", low, ints(2)), op("Unsqueeze", high, ints(2)), axis=2)
    # [N / 32, K / 8, 2, 32, 4] -> [K / 8, 2, 4, N / 32, 32] -> [K, N]
    whole = op("Transpose", body.cast(both, ir.DataType.FLOAT), perm=[1, 2, 4, 0, 3])
    inputs = op("Mul", body.size(whole, 0), ints(PAIRS))
    matrix = op("Reshape", op("Sub", whole, body.number(8)), op("Concat", inputs, ints(-1), axis=0))
    by_group = op("Transpose", body.cast(scales, ir.DataType.FLOAT), perm=[1, 0, 2])
    steps = op("Reshape", by_group, ints(0, -1))
    group = _group_of_input(body, inputs)
    weight = op("Slice", op("Mul", matrix, op("Gather", steps, group)), ints(0), count, ints(1))
    return op("Mul", op("MatMul", codes, weight), row_scale)


def _group_of_input(body: Body, inputs: ir.Value) -> ir.Value:
    """Add nodes that compute the group of each of ``inputs`` inputs, int64 ``[K]``."""
    zero, one = body.constant(np.int64(0)), body.constant(np.int64(1))
    numbers = body.op("Range", zero, body.op("Squeeze", inputs), one)
    return body.op("Div", numbers, body.attribute("group_size", ir.AttributeType.INT))


def _embedding(name: str, *, is_int4: bool) -> ir.Function:
    """Define the look-up of embeddings in panels: a column's codes, multiplied by its scales."""
    body = Body(name, "ids panels scales")
    op, ints = body.op, body.ints
    ids, stored, scales = body.inputs
    panel = op("Div", ids, ints(PANEL))
    column = op("Sub", ids, op("Mul", panel, ints(PANEL)))
    # shape [B, T, K / 4, 32, 4], or for INT4 [B, T, K / 8, 32, 4]
    together = op("Gather", stored, panel)
    shape = op("Concat", op("Shape", together, start=0, end=3), ints(1, DOT), axis=0)
    places = op("Expand", op("Unsqueeze", column, ints(2, 3, 4)), shape)
    codes = op("GatherElements", together, places, axis=3)
    if not is_int4:
        wide = body.cast(op("Reshape", codes, ints(0, 0, -1)), ir.DataType.FLOAT)
        row = op("Sub", wide, body.number(128))
        scale = op("Unsqueeze", op("Gather", scales, ids), ints(2))
        return body.function({"y": op("Mul", row, scale)})
    low, high = body.nibbles(codes)
    both = op("Reshape", op("Concat", low, high, axis=3), ints(0, 0, -1))
    row = op("Sub", body.cast(both, ir.DataType.FLOAT), body.number(8))
    of_panel = op("Gather", scales, panel)  # shape [B, T, groups, 32]
    groups = op("Concat", op("Shape", of_panel, start=0, end=3), ints(1), axis=0)
    places = op("Expand", op("Unsqueeze", column, ints(2, 3)), groups)
    steps = op("Squeeze", op("GatherElements", of_panel, places, axis=3), ints(3))
    group = _group_of_input(body, body.size(row, 2))
    by_input = op("Gather", body.cast(steps, ir.DataType.FLOAT), group, axis=2)
    return body.function({"y": op("Mul", row, by_input)}, {"group_size": ir.AttributeType.INT})


def _add_norm() -> ir.Function:
    """Define the function that adds a residual, and computes the RMSNorm of the sum."""
    body = Body("AddNorm", "x y weight")
    x, y, weight = body.inputs
    total = body.op("Add", x, y)
    outputs = {"sum": total, "normed": rms_norm(body, total, weight)}
    return body.function(outputs, {"epsilon": ir.AttributeType.FLOAT})


def _low_rank_updates(name: str, count: int) -> ir.Function:
    """Define a function that adds low-rank updates to some rows of the outputs of ``count`` layers.

    The function multiplies only these rows, so a pass without such rows does no products. If the
    name starts with "Gated", the layers are gate and up, and the result is ``silu(gate) * up``.
    """
    places = range(count)
    given = [*(f"y_{i}" for i in places), "is_updated", *(f"a_{i} b_{i}" for i in places)]
    body = Body(name, " ".join(["x", *given]))
    op, ints = body.op, body.ints
    x, is_updated = body.inputs[0], body.inputs[1 + count]
    rows = op("Transpose", op("NonZero", op("Squeeze", is_updated, ints(2))), perm=[1, 0])
    chosen, results = op("GatherND", x, rows), []
    for i in places:
        y, (a, b) = body.inputs[1 + i], body.inputs[2 + count + 2 * i :][:2]
        product = op("MatMul", op("MatMul", chosen, a), b)
        updated = op("Add", op("GatherND", y, rows), product)
        results.append(op("ScatterND", y, rows, updated))
    if name.startswith("Gated"):
        gate, up = results
        results = [op("Mul", op("Mul", gate, op("Sigmoid", gate)), up)]
    return body.function({f"result_{i}": result for i, result in enumerate(results)})


def _candidates() -> ir.Function:
    """Define the function that summarises logits (see ``trace.Pass``)."""
    body = Body("Candidates", "logits mask_token_bias")
    op, ints = body.op, body.ints
    logits, bias = body.inputs
    one = body.number(1)
    masked = op("Add", logits, bias)
    top_logit, top_token = body.several(2, "TopK", masked, ints(2), axis=-1)
    best = op("Slice", top_logit, ints(0), ints(1), ints(2))
    second = op("Slice", top_logit, ints(1), ints(2), ints(2))
    shares = op("Softmax", op("Min", masked, second), axis=-1)
    share = op("ReduceMax", shares, ints(-1), keepdims=1)  # the best and the second token have it
    rest = op("Sub", op("Reciprocal", share), one)
    apart = op("Sub", second, best)
    scale = op("Exp", apart)
    others = op("Mul", scale, rest)
    total = op("Add", others, one)
    after_second = op("Add", op("Mul", scale, op("Sub", rest, one)), one)
    odds = op("Neg", op("Add", op("Log", rest), apart)), op("Sub", apart, op("Log", after_second))
    square = op("Mul", op("Mul", others, others), body.number(0.5))
    is_small = op("Less", others, body.number(2**-9))
    log_total = op("Where", is_small, op("Sub", others, square), op("Log", total))
    behind = op("ReduceSum", op("Mul", shares, op("Sub", logits, best)), ints(-1), keepdims=1)
    weighed = op("Mul", behind, op("Mul", scale, op("Add", rest, one)))
    entropy = op("Sub", op("Div", weighed, total), log_total)
    outputs = {
        "top_token": body.cast(top_token, ir.DataType.INT32),
        "top_prob": op("Div", op("Exp", op("Sub", top_logit, best)), total),
        "top_log_odds": op("Concat", *odds, axis=-1),
        "entropy": op("Squeeze", entropy, ints(2)),
    }
    return body.function(outputs)


def _nvfp4_linear() -> ir.Function:
    """Define the product with an NVFP4 weight, which has scales of groups and of the tensor."""
    body = Body("NVFP4Linear", "x panels scales global_scale")
    op, ints = body.op, body.ints
    x, stored, scales, global_scale = body.inputs
    codes = body.cast(op("Concat", *body.nibbles(stored), axis=-1), ir.DataType.INT32)
    by_code = op("Gather", body.constant(E2M1_VALUES), codes)
    values = op("Reshape", by_code, ints(0, -1, NVFP4_GROUP_SIZE, PANEL))
    steps = op("Mul", body.cast(scales, ir.DataType.FLOAT), global_scale)
    weights = op("Mul", values, op("Unsqueeze", steps, ints(2)))
    # [N / 32, K / 16, 16, 32] -> [K / 16, 16, N / 32, 32] -> [K, N]
    whole = op("Transpose", weights, perm=[1, 2, 0, 3])
    rows = op("Mul", body.size(whole, 0), ints(NVFP4_GROUP_SIZE))
    matrix = op("Reshape", whole, op("Concat", rows, ints(-1), axis=0))
    weight = op("Slice", matrix, ints(0), body.attribute("columns", ir.AttributeType.INTS), ints(1))
    return body.function({"y": op("MatMul", x, weight)}, {"columns": ir.AttributeType.INTS})


def _nvfp4() -> ir.Function:
    """Define the function that rounds its input to NVFP4.

    NVFP4 has E2M1 values, an E4M3 scale for each group of 16 values along K, and one fp32 scale for
    the whole tensor. The magnitudes of E2M1 are 0, .5, 1, 1.5, 2, 3, 4 and 6. Magnitudes below 2
    are rounded to a multiple of .5. Magnitudes between 2 and 4 are rounded to a multiple of 1.
    Larger magnitudes are rounded to a multiple of 2. Of two multiples that are equally near, the
    operator Round chooses the even multiple. E2M1 rounding chooses the same value, because the code
    of the even multiple is even.
    """
    body = Body("NVFP4QuantizeDequantize", "x scale")
    op, number = body.op, body.number
    x, scale = body.inputs
    groups = op("Reshape", x, body.ints(-1, 16))
    amax = op("ReduceMax", op("Abs", groups), body.ints(-1), keepdims=1)
    wanted = op("Div", amax, op("Mul", scale, number(6)))
    is_zero = op("Equal", wanted, number(0))
    wanted = op("Where", is_zero, number(1), wanted)
    clipped = op("Clip", wanted, number(2.0**-9), number(448))
    group_scale = op("Mul", body.cast(body.cast(clipped, _F8), ir.DataType.FLOAT), scale)
    scaled = op("Clip", op("Div", groups, group_scale), number(-6), number(6))
    size = op("Abs", scaled)
    above = op("Where", op("Less", size, number(4)), number(1), number(2))
    step = op("Where", op("Less", size, number(2)), number(0.5), above)
    rounded = op("Mul", op("Round", op("Div", scaled, step)), step)
    return body.function({"y": op("Reshape", op("Mul", rounded, group_scale), op("Shape", x))})


def _tied_head(name: str) -> ir.Function:
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


_DEFINITIONS: dict[str, Callable[[], ir.Function]] = {
    "Int8Linear": lambda: _linear("Int8Linear", 1),
    "Int8Linear2": lambda: _linear("Int8Linear2", 2),
    "Int8Linear3": lambda: _linear("Int8Linear3", 3),
    "Int8GatedLinear": lambda: _linear("Int8GatedLinear", 2, is_gated=True),
    "Int4Linear": lambda: _linear("Int4Linear", 1, is_int4=True),
    "Int4Linear2": lambda: _linear("Int4Linear2", 2, is_int4=True),
    "Int4Linear3": lambda: _linear("Int4Linear3", 3, is_int4=True),
    "Int4GatedLinear": lambda: _linear("Int4GatedLinear", 2, is_int4=True, is_gated=True),
    "Int8Embedding": lambda: _embedding("Int8Embedding", is_int4=False),
    "Int4Embedding": lambda: _embedding("Int4Embedding", is_int4=True),
    **{name: functools.partial(_tied_head, name) for name in (*TIED_HEADS.values(), FP8_TIED_HEAD)},
    **{name: functools.partial(experts, name) for name in FUNCTIONS},
    **{
        f"{STORED[dtype]}{name}": functools.partial(
            cached_attention, f"{STORED[dtype]}{name}", *codes
        )
        for name in ATTENTION
        for dtype, codes in CACHES.items()
    },
    "AddNorm": _add_norm,
    DRAFT_UPDATE: lambda: _low_rank_updates(DRAFT_UPDATE, 1),
    **{name: functools.partial(_low_rank_updates, name, count) for name, count in LOW_RANK.items()},
    "Candidates": _candidates,
    "NVFP4Linear": _nvfp4_linear,
    "NVFP4QuantizeDequantize": _nvfp4,
}
