"""The number formats of quantised denoisers, in numpy.

This module computes exactly the same numbers as the engines that run the denoisers.

INT8 and INT4 are symmetric integers. FP8 is E4M3 without infinities (arXiv:2209.05433). NVFP4 is
E2M1 (OCP Microscaling Formats 1.0) in groups of 16 values. As in NVIDIA's modelopt, each group of
NVFP4 has an E4M3 scale, and each tensor has an fp32 scale. A value halfway between two codes is
rounded to the even code, as in ONNX QuantizeLinear.

Matrices are quantised in blocks on all cores. Quantising a matrix of any size needs only a few MiB
of temporary memory per core.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

from dlm_calibration.blocks import (
    by_group,
    check_finite,
    columns_of,
    for_columns,
    group_amax,
    grouped,
    put,
    ranges_of,
    row_blocks,
)
from dlm_calibration.errors import QuantisationError
from dlm_calibration.pieces import Lazy
from dlm_runtime.precision import NUMBER_FORMATS

ScaleType = np.dtype[Any]
FP32: ScaleType = np.dtype(np.float32)
FP16: ScaleType = np.dtype(np.float16)
E2M1_VALUES = np.array(
    [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32
)  # the value of each code; bit 3 is the sign
INT4_GROUP_SIZE = 128  # the default group size, which is usual for GPTQ and AWQ
NVFP4_GROUP_SIZE = 16  # the format defines this size

_LEVELS = {name: np.float32(known.levels) for name, known in NUMBER_FORMATS.items()}
CODE_TYPES = {name: np.dtype(known.code_type) for name, known in NUMBER_FORMATS.items()}
_CODE_LIMITS = {
    name: (np.float32(known.code_limits[0]), np.float32(known.code_limits[1]))
    for name, known in NUMBER_FORMATS.items()
    if known.code_limits is not None
}
_SMALLEST_E4M3 = np.float32(2**-9)
# Smaller scales are replaced by 1, because fp32 subnormals lose bits and some devices flush them to
# zero. In NVFP4, the limit for the scale of a tensor is 2**9 times larger, because this scale is
# multiplied by group scales as small as 2**-9. The product must be a normal number too.
_SMALLEST_SCALE = np.finfo(np.float32).tiny
_INT4_LEVELS = (7, 7.5, 8, 8.5, 9, 9.5)
"""Divisors that are tried for each INT4 group. The scale of the group is its largest magnitude
divided by one of these numbers.

With a large divisor, the largest values of the group saturate. Saturating them may lose less
accuracy than a larger scale for the whole group.
"""
# The smallest scale in fp16: a subnormal number with four significant bits. If a smaller scale were
# rounded to fp16, its relative error could change codes by more than 1.
SMALLEST_FP16_SCALE = np.float32(2.0**-20)
# Smallest range of a row of activations. This limit prevents a division by 0 if all elements of a
# row are 0.
SMALLEST_ROW = np.float32(1e-30)
_SMALLEST_GLOBAL_SCALE = _SMALLEST_SCALE / _SMALLEST_E4M3


@dataclass(frozen=True, eq=False)
class QuantisedWeight:
    """A quantised matrix ``w`` ``[K, N]``, used as ``x @ w``, in one of ``NUMBER_FORMATS``.

    | format | ``codes`` | ``scales`` |
    | int8 | int8 [K, N] | fp32 [N] |
    | int4 | ml_dtypes.int4 [K, N] | fp32 [ceil(K / group_size), N], may be negative; last group may be short |
    | fp8 | ml_dtypes.float8_e4m3fn [K, N] | fp32 [N] |
    | nvfp4 | uint8 0..15 [N, K], E2M1 | ml_dtypes.float8_e4m3fn [N, K / 16] |

    ``global_scale`` is the fp32 scale of the whole tensor in nvfp4, and ``None`` in other formats.
    ``group_size`` is a number of input channels (K). ``group_size`` is ``None`` for int8 and fp8.
    """

    format: str
    codes: np.ndarray
    scales: np.ndarray
    global_scale: np.float32 | None = None
    group_size: int | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """``(K, N)``, in every format."""
        first, second = self.codes.shape
        return (second, first) if self.format == "nvfp4" else (first, second)

    def dequantise(self) -> np.ndarray:
        """Return the matrix as fp32 ``[K, N]``.

        The codes and scales are multiplied in the same order as in ONNX DequantizeLinear.
        """
        rows, columns = self.shape
        out = np.empty((rows, columns), dtype=np.float32)
        for start, stop in row_blocks(rows, columns, self.group_size or 1):
            if self.format == "nvfp4":
                assert self.global_scale is not None
                groups = slice(start // NVFP4_GROUP_SIZE, stop // NVFP4_GROUP_SIZE)
                scales = self.scales[:, groups].T.astype(np.float32) * self.global_scale
                values = E2M1_VALUES[self.codes[:, start:stop].T]
                np.multiply(
                    grouped(values, NVFP4_GROUP_SIZE),
                    scales[:, None],
                    out=grouped(out[start:stop], NVFP4_GROUP_SIZE),
                )
            elif self.format == "int4":
                assert self.group_size is not None
                scales = self.scales[np.arange(start, stop) // self.group_size]
                np.multiply(self.codes[start:stop].astype(np.float32), scales, out=out[start:stop])
            else:
                np.multiply(
                    self.codes[start:stop].astype(np.float32), self.scales, out=out[start:stop]
                )
        return out

    def columns(self, chosen: slice | np.ndarray) -> QuantisedWeight:
        """Return this weight with only some of its N columns.

        A slice or an array of indices selects the columns.
        """
        if self.format == "nvfp4":
            return replace(self, codes=self.codes[chosen], scales=self.scales[chosen])
        return replace(self, codes=self.codes[:, chosen], scales=self.scales[..., chosen])


def quantise_weight(
    w: np.ndarray | Lazy,
    format: str,
    *,
    group_size: int | None = None,
    amax: np.ndarray | float | None = None,
    scale_dtype: ScaleType = FP32,
    is_signed: bool = False,
) -> QuantisedWeight:
    """Quantise ``w`` ``[K, N]`` of any float type.

    The values of ``w`` are converted to fp32, divided by scales, and rounded to codes, half to
    even.

    | format | codes | scale |
    | int8 | -127..127 | amax / 127 per column |
    | int4 | -8..7 | from ``int4_scales``, per group |
    | fp8 | E4M3 | amax / 448 per column |
    | nvfp4 | E2M1 | global: amax / (6 * 448); per group of 16: E4M3(amax of the group / (6 * global scale)) |

    ``amax`` is the largest absolute value of the column, group or tensor. If ``amax`` is zero, the
    scale is 1 and the codes are 0.

    Args:
        w: The matrix.
        format: One of ``NUMBER_FORMATS``.
        group_size: Rows in a group of int4. The default is 128.
        amax: Range to use instead of the largest absolute value. The range is a scalar, or an array
            that broadcasts to the shape of the scales. For nvfp4, the range must be a scalar.
            Larger magnitudes saturate.
        scale_dtype: The type of scales in the graph. Scales are rounded to this type before the
            codes are chosen, and are returned as fp32.
        is_signed: Allow negative scales in int4. All other formats ignore this argument.

    Raises:
        QuantisationError: The format is unknown, or does not support the group size or K. This
            error is also raised if a value or range is not finite.
    """
    group_size = _checked_group_size(format, group_size)
    _check_matrix(w, format)
    rows, columns = w.shape
    if format == "nvfp4":
        return _quantise_nvfp4(w, amax, scale_dtype)
    size = group_size or rows
    shape = (-(-rows // size), columns) if group_size else (columns,)
    given = None if amax is None else _given_amax(amax, shape)
    if given is not None:
        check_finite(w)
    scales = np.empty(shape, dtype=np.float32)
    codes = np.empty((rows, columns), dtype=CODE_TYPES[format])

    def quantise(at: slice) -> None:
        block = columns_of(w, at)
        ranges = ranges_of(w, block, size) if given is None else given.reshape(-1, columns)[:, at]
        found = scales_of(ranges, format, scale_dtype)
        done = np.empty_like(block, dtype=codes.dtype)
        for (groups, values), (_, into) in zip(
            by_group(block, size), by_group(done, size), strict=True
        ):
            if format == "int4" and given is None:
                found[groups] = int4_scales(
                    values, ranges[groups], scale_dtype, is_signed=is_signed
                )
            into[...] = encode(values, found[groups, None], format)
        scales.reshape(-1, columns)[:, at] = found
        put(codes[:, at], done)

    for_columns(w, quantise)
    return QuantisedWeight(format, codes, scales, group_size=group_size)


def encode(values: np.ndarray, scales: np.ndarray | np.float32, format: str) -> np.ndarray:
    """Return the codes of finite fp32 ``values`` in int8, int4 or fp8.

    The fp32 ``scales`` are broadcast to the shape of the values.

    The function divides by the scale, as ONNX QuantizeLinear does. Multiplying by the reciprocal
    would round differently. Codes saturate: int8 at -127 and 127, int4 at -8 and 7, fp8 at -448 and
    448.
    """
    low, high = _CODE_LIMITS[format]
    with np.errstate(over="ignore"):  # a quotient may overflow; it saturates anyway
        quotient = np.divide(values, scales)
    if format != "fp8":
        np.rint(quotient, out=quotient)
    np.clip(quotient, low, high, out=quotient)
    if format == "int4":  # int8 of numpy also has one byte per code, and is faster than ml_dtypes
        quotient = quotient.astype(np.int8).view(CODE_TYPES[format])
    codes: np.ndarray = quotient.astype(CODE_TYPES[format], copy=False)
    return codes


def scales_of(amax: np.ndarray, format: str, scale_dtype: ScaleType = FP32) -> np.ndarray:
    """Return fp32 scales that map ``amax`` to the largest code of the format.

    In nvfp4, this is the global scale.

    If amax is tiny, the scale is 1. Scales are rounded to ``scale_dtype``. Scales in fp16 are at
    least ``SMALLEST_FP16_SCALE``.
    """
    smallest = _SMALLEST_GLOBAL_SCALE if format == "nvfp4" else _SMALLEST_SCALE
    scales = np.asarray(amax, dtype=np.float32) / _LEVELS[format]
    guarded: np.ndarray = np.where(
        scales < smallest, np.float32(1), round_scales(scales, scale_dtype)
    )
    return guarded


def int4_scales(
    values: np.ndarray,
    amax: np.ndarray,
    scale_dtype: ScaleType = FP32,
    weights: np.ndarray | None = None,
    *,
    is_signed: bool = False,
) -> np.ndarray:
    """Find the best fp32 scale for each group of int4 values.

    For each group, the function tries six scales, from amax / 7 to amax / 9.5. The function returns
    the scale with the smallest weighted squared error. If several scales have the same smallest
    error, the function returns the largest of them. Each squared error is multiplied by the square
    of the value, as in llama.cpp's IQ4_NL, because clipping large weights costs more accuracy than
    the plain error suggests (figures in BENCHMARKS.md).

    Args:
        values: Finite fp32 groups ``[G, size, N]``.
        amax: The largest absolute value of each group, ``[G, N]``.
        scale_dtype: The type to which scales are rounded.
        weights: More factors by which the squared errors are multiplied. The array must broadcast
            to the shape of ``values``.
        is_signed: Make the scale negative if the largest value is positive. The largest value then
            has a negative code. A negative code is more accurate, because there are eight negative
            codes and only seven positive codes.
    """
    widest = scales_of(amax, "int4", scale_dtype)
    sign = np.float32(1)
    if is_signed:
        sign = np.where(values.max(1) > -values.min(1), np.float32(-1), np.float32(1))
    best: np.ndarray = widest * sign
    least = np.full_like(widest, np.inf)
    counted = np.square(values / widest[:, None])
    if weights is not None:
        counted *= weights
    for level in _INT4_LEVELS:
        scales = scales_of(amax * np.float32(7 / level), "int4", scale_dtype) * sign
        exact = values / scales[:, None]
        error = np.rint(exact)
        np.clip(error, *_CODE_LIMITS["int4"], out=error)
        error -= exact
        # Compute the errors in units of the scale, so that their squares do not overflow fp32, even
        # for large weights.
        error *= error
        error *= counted
        # If the values of a group are smaller than the smallest scale, no candidate has a smaller
        # error than the scale 1, so the function returns 1.
        with np.errstate(over="ignore", invalid="ignore"):
            total = error.sum(1) * (scales / widest) ** 2
        best = np.where(total < least, scales, best)
        np.minimum(least, total, out=least)
    return best


def round_scales(scales: np.ndarray, scale_dtype: ScaleType) -> np.ndarray:
    """Round positive fp32 scales to ``scale_dtype`` and return them as fp32."""
    if scale_dtype == FP32:
        return scales
    if scale_dtype == FP16:
        scales = np.clip(scales, SMALLEST_FP16_SCALE, np.finfo(np.float16).max)
    rounded: np.ndarray = scales.astype(scale_dtype).astype(np.float32)
    return rounded


def with_scales(weight: QuantisedWeight, scale_dtype: ScaleType) -> QuantisedWeight:
    """Return the weight with its scales rounded to ``scale_dtype``. The codes do not change."""
    if weight.global_scale is not None:
        rounded = round_scales(np.asarray(weight.global_scale), scale_dtype)
        return replace(weight, global_scale=np.float32(float(rounded)))
    return replace(weight, scales=round_scales(weight.scales, scale_dtype))


def weight_ranges(
    w: np.ndarray | Lazy, format: str, group_size: int | None = None
) -> tuple[np.ndarray, int | None]:
    """Return the largest absolute value of each group of a weight, fp32 ``[G, N]``, and the group
    size of the format.

    The group size is ``None`` if each column is one group. Raises QuantisationError in the same
    cases as ``quantise_weight``.
    """
    group_size = _checked_group_size(format, group_size)
    _check_matrix(w, format)
    return group_amax(w, group_size or w.shape[0]), group_size


def quantise_activation(
    x: np.ndarray, format: str, amax: float | None, scale_dtype: ScaleType = FP32
) -> np.ndarray:
    """Quantise ``x`` (fp32, any shape) and dequantise it again.

    A quantised layer computes with these dequantised values instead of ``x``.

    - int8: the scale is ``amax / 127`` for the whole tensor, and codes are -128..127. If amax is
      ``None``, each vector along the last axis has its own range, and codes are -127..127.
    - fp8: the scale is ``amax / 448`` for the whole tensor.
    - nvfp4: the global scale is ``amax / (6 * 448)``, and groups of 16 along the last axis have
      dynamic scales.

    Magnitudes above amax saturate. Raises QuantisationError for other formats, for a missing or
    invalid amax, and for values that are not finite. In nvfp4, the length of the last axis must be
    a multiple of 16.
    """
    if format not in ("int8", "fp8", "nvfp4"):
        raise QuantisationError(
            f"activations cannot be quantised to {format!r}: choose int8, fp8 or nvfp4."
        )
    x = np.asarray(x, dtype=np.float32)
    if format == "nvfp4" and (x.ndim == 0 or x.shape[-1] % NVFP4_GROUP_SIZE):
        raise QuantisationError(
            f"nvfp4 groups {NVFP4_GROUP_SIZE} values of the last axis, which does not divide {list(x.shape)}."
        )
    if not x.size:
        return np.empty(x.shape, dtype=np.float32)
    flat = x.reshape(-1, x.shape[-1] if x.ndim else 1)
    check_finite(flat)
    if format == "int8" and amax is None:
        # Each row has its own symmetric range, as in ``dlm_export.graph.operators``.
        rows = np.maximum(np.abs(x).max(axis=-1, keepdims=True), SMALLEST_ROW)
        fake: np.ndarray = np.rint(x * (np.float32(127) / rows)) * (rows / np.float32(127))
        return fake
    scale = activation_scale(format, amax, scale_dtype)
    out = np.empty_like(flat)
    for start, stop in row_blocks(flat.shape[0], flat.shape[1], 1):
        block = flat[start:stop]
        if format == "nvfp4":
            groups = block.reshape(-1, NVFP4_GROUP_SIZE)
            group_scales = nvfp4_group_scales(
                np.maximum(groups.max(axis=1), -groups.min(axis=1)), scale
            )
            steps = group_scales.astype(np.float32) * scale
            with np.errstate(over="ignore"):
                codes = e2m1_codes(groups / steps[:, None])
            out[start:stop] = (E2M1_VALUES[codes] * steps[:, None]).reshape(block.shape)
        elif format == "fp8":
            out[start:stop] = encode(block, scale, "fp8").astype(np.float32) * scale
        else:
            with np.errstate(over="ignore"):
                out[start:stop] = np.clip(np.rint(block / scale), -128, 127) * scale
    return out.reshape(x.shape)


def activation_scale(format: str, amax: float | None, scale_dtype: ScaleType = FP32) -> np.float32:
    """Return the static scale for an activation range, rounded to ``scale_dtype``.

    The graph and ``quantise_activation`` both use the returned scale. Raises QuantisationError if
    amax is missing, not finite or not positive.
    """
    if amax is None or not np.isfinite(amax) or amax <= 0:
        raise QuantisationError(
            f"{format} activations need a positive range, not {amax}: calibrate the layer first."
        )
    scale = float(np.float32(amax) / _LEVELS[format])
    # If the inputs of a layer were almost zero during calibration, the range is tiny, and the scale
    # would underflow.
    usable = np.float32(
        max(scale, float(_SMALLEST_GLOBAL_SCALE if format == "nvfp4" else _SMALLEST_SCALE))
    )
    rounded: np.float32 = np.float32(float(round_scales(np.asarray(usable), scale_dtype)))
    return rounded


def nvfp4_group_scales(amax: np.ndarray, global_scale: np.float32) -> np.ndarray:
    """Return the E4M3 scales of groups. ``amax`` contains the largest absolute value of each group.

    The scale of a group of zeros is 1. All other scales are clipped to 2**-9..448.
    """
    with np.errstate(over="ignore"):
        scales = amax / np.float32(np.float32(6) * global_scale)
    scales[scales == 0] = 1
    group_scales: np.ndarray = np.clip(scales, _SMALLEST_E4M3, _LEVELS["fp8"]).astype(
        ml_dtypes.float8_e4m3fn
    )
    return group_scales


def e2m1_codes(values: np.ndarray) -> np.ndarray:
    """Return the E2M1 code, uint8 0..15, of each fp32 value.

    Values are rounded half to even and saturate at 6. -0 and 0 have the same code.
    """
    # The distance between the values of neighbouring codes is 1/2 up to 2, 1 from 2 to 4, and 2
    # from 4 to 6. Each value is rounded to a multiple of each of the three distances, which gives
    # three codes. The smallest of the three codes is right. This is also true for a value halfway
    # between two codes, which gets the even code.
    magnitude = np.abs(values)
    np.minimum(magnitude, np.float32(6), out=magnitude)
    codes = np.rint(magnitude + magnitude)
    coarser = np.rint(magnitude)
    coarser += np.float32(2)
    np.minimum(codes, coarser, out=codes)
    magnitude *= np.float32(0.5)
    np.rint(magnitude, out=magnitude)
    magnitude += np.float32(4)
    np.minimum(codes, magnitude, out=codes)
    unsigned: np.ndarray = codes.astype(np.uint8)
    # As in modelopt, a negative value that is rounded to zero gets a sign bit. The value -0.0 does
    # not get a sign bit.
    unsigned |= (values < 0).view(np.uint8) << np.uint8(3)
    return unsigned


def pack_nibbles(codes: np.ndarray) -> np.ndarray:
    """Pack pairs of codes (uint8 0..15) along the last axis, two in a byte.

    The first code of a pair is in the low four bits, as in ONNX. The length of the last axis must
    be even.
    """
    if codes.ndim == 0 or codes.shape[-1] % 2:
        raise QuantisationError(
            f"codes of shape {list(codes.shape)} cannot be packed: the last axis must be even."
        )
    assert codes.dtype == np.uint8
    packed: np.ndarray = codes[..., 0::2] | (codes[..., 1::2] << np.uint8(4))
    return packed


def unpack_nibbles(packed: np.ndarray) -> np.ndarray:
    """Undo ``pack_nibbles``: return uint8 codes 0..15, whose last axis is twice as long."""
    assert packed.dtype == np.uint8
    codes = np.empty((*packed.shape[:-1], packed.shape[-1] * 2), dtype=np.uint8)
    codes[..., 0::2] = packed & np.uint8(15)
    codes[..., 1::2] = packed >> np.uint8(4)
    return codes


def _quantise_nvfp4(
    w: np.ndarray | Lazy, amax: np.ndarray | float | None, scale_dtype: ScaleType
) -> QuantisedWeight:
    rows, columns = w.shape
    ranges = group_amax(w, NVFP4_GROUP_SIZE)
    tensor_amax = ranges.max() if amax is None else _given_amax(amax, ())
    global_scale = np.float32(scales_of(tensor_amax, "nvfp4", scale_dtype))
    scales = nvfp4_group_scales(ranges, global_scale)
    codes = np.empty((columns, rows), dtype=CODE_TYPES["nvfp4"])

    def quantise(at: slice) -> None:
        block = columns_of(w, at)
        steps = scales[:, at].astype(np.float32) * global_scale
        with np.errstate(over="ignore"):
            quotient = grouped(block, NVFP4_GROUP_SIZE) / steps[:, None]
        put(codes[at], e2m1_codes(quotient.reshape(block.shape)).T)

    for_columns(w, quantise)
    return QuantisedWeight(
        "nvfp4",
        codes,
        np.ascontiguousarray(scales.T),
        global_scale=global_scale,
        group_size=NVFP4_GROUP_SIZE,
    )


def _checked_group_size(format: str, group_size: int | None) -> int | None:
    if format not in NUMBER_FORMATS:
        raise QuantisationError(
            f"unknown format {format!r}: choose one of {', '.join(NUMBER_FORMATS)}."
        )
    if format in ("int8", "fp8"):
        if group_size is not None:
            raise QuantisationError(
                f"{format} has one scale per column and no groups, but a group size of {group_size} was given."
            )
        return None
    if format == "nvfp4":
        if group_size not in (None, NVFP4_GROUP_SIZE):
            raise QuantisationError(f"nvfp4 has groups of {NVFP4_GROUP_SIZE}, not of {group_size}.")
        return NVFP4_GROUP_SIZE
    size = INT4_GROUP_SIZE if group_size is None else group_size
    if size < 1:
        raise QuantisationError(
            f"a group size of {size} is not positive: common sizes for int4 are 32 and 128."
        )
    return size


def _check_matrix(w: np.ndarray | Lazy, format: str) -> None:
    if len(w.shape) != 2 or 0 in w.shape:
        raise QuantisationError(
            f"a weight of shape {list(w.shape)} cannot be quantised: it must be a matrix with at least one value."
        )
    if format == "nvfp4" and w.shape[0] % NVFP4_GROUP_SIZE:
        raise QuantisationError(
            f"a weight of {w.shape[0]} input channels cannot be nvfp4: the number must be a multiple of {NVFP4_GROUP_SIZE}. "
            "Keep the layer in another format."
        )


def _given_amax(amax: np.ndarray | float, shape: tuple[int, ...]) -> np.ndarray:
    ranges = np.asarray(amax, dtype=np.float32)
    if not (np.isfinite(ranges).all() and (ranges >= 0).all()):
        raise QuantisationError(
            "a given range (amax) is negative, NaN or infinite: give finite values of at least 0."
        )
    try:
        return np.broadcast_to(ranges, shape)
    except ValueError as err:
        raise QuantisationError(
            f"a range (amax) of shape {list(ranges.shape)} does not fit scales of shape {list(shape)}."
        ) from err
