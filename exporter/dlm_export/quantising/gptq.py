"""Implements GPTQ (arXiv:2210.17323), which rounds the rows of a weight matrix one by one.

After rounding a row, GPTQ changes later rows to compensate for the rounding errors. The cost of the
matrix operations grows with the cube of the number of inputs, so they run in torch, on a GPU if
there is one. The codes are computed in numpy, by the functions that define the number formats.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dlm_calibration.blocks import group_amax
from dlm_calibration.errors import QuantisationError
from dlm_calibration.precision_rounding import (
    CODE_TYPES,
    E2M1_VALUES,
    FP32,
    QuantisedWeight,
    ScaleType,
    e2m1_codes,
    encode,
    int4_scales,
    nvfp4_group_scales,
    scales_of,
    weight_ranges,
)

COMMITTED_WEIGHT = 0.5
"""The factor by which committed positions are multiplied in a Gram matrix.

For masked positions, the factor is 1. The factor is smaller for committed positions, because
decoding uses only the predictions at masked positions.
"""
# Number of rows in a batch. A single matrix product applies the errors of a batch to all later
# rows.
_BATCH = 128
_STEP = 16  # Number of rows in a small batch. Inside a small batch, errors are applied row by row.
_STRIP = 1024  # number of columns of a Gram matrix that are computed at a time
# The lower bound of a vector's mean square. The bound avoids a division by zero if a vector
# contains only zeros. Such a vector adds nothing to the Gram matrix.
_SMALLEST_SQUARE = 1e-20
EXACT = 4096
"""The largest number of inputs for which the Cholesky factor is computed in float64.

For more inputs, the factor is computed in fp32, as in the paper.
"""


class Gram:
    """The Gram matrix, fp32 ``[K, K]``: a weighted sum of ``x^T x`` over a layer's inputs ``x``.

    Only the upper triangle is computed. The inputs are normalised first: in trained denoisers, the
    input vectors of a few tokens are a thousand times as long as all other input vectors. Without
    normalisation, the rounding would depend only on these few tokens (figures in BENCHMARKS.md).
    """

    def __init__(self, channels: int, device: torch.device) -> None:
        self.matrix = torch.zeros(channels, channels, device=device)

    def add(self, x: Tensor, weight: Tensor) -> None:
        """Add P input vectors ``x``, fp32 ``[P, K]``, each with a factor ``weight`` ``[P]``.

        Each vector is first scaled to a mean square of 1. The factor then multiplies the vector's
        product ``x^T x``.
        """
        weighted = x * (weight / x.square().mean(1).clamp_min(_SMALLEST_SQUARE))[:, None]
        for start in range(0, x.shape[1], _STRIP):
            columns = slice(start, start + _STRIP)
            self.matrix[columns, start:].addmm_(weighted[:, columns].T, x[:, start:])


def inverse_factor(gram: Tensor, damping: float = 0.01) -> Tensor:
    """Return the matrix ``U``, fp32 ``[K, K]``, that ``gptq`` needs.

    ``U`` is upper triangular, and ``U^T U`` is the inverse of the damped Gram matrix. "Damped"
    means that a constant was added to the diagonal.

    If an input was zero for all tokens, rounding the weights of this input changes no other
    weights. The function needs memory for two matrices ``[K, K]``, which are in float64 if K is at
    most ``EXACT``.

    Args:
        gram: fp32 ``[K, K]``. Only the upper triangle is used.
        damping: The diagonal is increased by this share of its mean; default 0.01.

    Raises:
        QuantisationError: Values are not finite, or the matrix is not positive semi-definite.
    """
    if not damping > 0:
        raise QuantisationError(f"a GPTQ damping of {damping} is not positive: 0.01 is usual.")
    size = len(gram)
    diagonal = gram.diagonal().double()
    # A NaN or an infinity in any element makes the sum NaN or infinite.
    if not gram.sum(dtype=torch.float64).isfinite() or bool((diagonal < 0).any()):
        raise QuantisationError(
            "the Gram matrix has values that are not finite, or a negative diagonal: calibrate again."
        )
    is_dead = diagonal == 0
    # In a valid Gram matrix, the row and the column of an input that was always zero are zero.
    added = damping * diagonal[~is_dead].mean() if not bool(is_dead.all()) else torch.zeros(())
    # Let R be the upper triangular matrix for which R R^T is the damped matrix. Then U is the
    # inverse of R. To find R, reverse the order of rows and columns, compute the Cholesky factor,
    # and reverse the order again. This method needs one factorisation. Inverting the matrix first
    # would need two factorisations, and would lose digits. The upper triangle of ``gram`` becomes
    # the lower triangle of the reversed matrix.
    lower = gram.to(torch.float64 if size <= EXACT else torch.float32).flip(0, 1)
    lower.diagonal().copy_((torch.where(is_dead, 1.0, diagonal) + added).flip(0))
    info = torch.empty((), dtype=torch.int32, device=gram.device)
    lower, info = torch.linalg.cholesky_ex(lower)
    if int(info):
        raise QuantisationError(
            f"the Gram matrix is not positive definite with damping {damping}: use more inputs, or raise the damping."
        )
    _invert_lower(lower)
    factor: Tensor = lower.float().flip(0, 1)
    return factor


def _invert_lower(lower: Tensor) -> None:
    """Invert a lower triangular matrix in place, with recursion over the diagonal blocks."""
    size = len(lower)
    if size <= 256:
        identity = torch.eye(size, dtype=lower.dtype, device=lower.device)
        lower.copy_(torch.linalg.solve_triangular(lower, identity, upper=False))
        return
    half = size // 2
    first, second, corner = lower[:half, :half], lower[half:, half:], lower[half:, :half]
    _invert_lower(first)
    _invert_lower(second)
    corner.copy_(-(second @ (corner @ first)))


def gptq(
    w: np.ndarray,
    factor: Tensor,
    *,
    format: str = "int4",
    group_size: int | None = None,
    amax: np.ndarray | float | None = None,
    scale_dtype: ScaleType = FP32,
    is_signed: bool = False,
) -> QuantisedWeight:
    """Quantise ``w`` ``[K, N]`` so that ``x @ w`` changes little for the calibration inputs ``x``.

    In int4 and in nvfp4 (groups of 16), a group's scale is computed just before the group's first
    row is rounded, from the corrected weights. In int8 and fp8, each column has one scale.
    The function needs K^2 N multiply-adds.

    Args:
        w: The weight matrix.
        factor: The result of ``inverse_factor`` for the layer's Gram matrix. Layers with the same
            input share one factor.
        format: Number format; default int4.
        group_size: Rows in a group of int4; default 128.
        amax: Largest magnitude to use instead of the column's own largest magnitude. For nvfp4,
            ``amax`` replaces the largest magnitude of the whole tensor.
        scale_dtype: Type of scales in the graph.
        is_signed: Allow negative scales in int4.

    Raises:
        QuantisationError: The format is unknown, shapes do not match, or weights are not finite.
    """
    ranges, group_size = weight_ranges(w, format, group_size)
    if amax is not None:
        ranges = np.broadcast_to(np.asarray(amax, np.float32), ranges.shape)
    rows, columns = w.shape
    if factor.shape != (rows, rows):
        raise QuantisationError(
            f"a Gram matrix of shape {list(factor.shape)} does not belong to a weight of {rows} input channels."
        )
    is_grouped, size = group_size is not None, group_size or rows
    # There is one row of scales per group of rows. The scales are computed before the group's first
    # row is rounded.
    scales, global_scale = scales_of(ranges, format, scale_dtype), None
    if format == "nvfp4":
        global_scale = np.float32(scales_of(ranges.max(), format, scale_dtype))
        scales = nvfp4_group_scales(ranges, global_scale)
    codes = np.empty((rows, columns), CODE_TYPES[format])
    # The weights, which are corrected in place.
    left = torch.tensor(np.asarray(w, np.float32), device=factor.device)
    # A group must lie within one batch of rows, because the group's scale depends on all earlier
    # corrections.
    batch = size * max(1, _BATCH // size) if is_grouped else _BATCH
    for start in range(0, rows, batch):
        stop = min(start + batch, rows)
        # On a CPU, ``now`` and ``left`` share memory. Changing ``now`` is safe, because the batch's
        # rows in ``left`` are not used again.
        now = left[start:stop].cpu().numpy()
        local = factor[start:stop, start:stop].cpu().numpy()
        errors = np.empty_like(now)
        first = 0
        while first < stop - start:
            last = min(first + _STEP, stop - start, size - (start + first) % size + first)
            for i in range(first, last):
                group = (start + i) // size
                if is_grouped and (start + i) % size == 0:
                    largest = group_amax(now[i : i + size], size)[0]
                    if global_scale is None:
                        # ``counts`` contains a factor for the squared error of each row.
                        counts = local.diagonal()[i : i + size, None] ** -2.0
                        scales[group] = int4_scales(
                            now[None, i : i + size],
                            largest[None],
                            scale_dtype,
                            counts,
                            is_signed=is_signed,
                        )[0]
                    else:
                        scales[group] = nvfp4_group_scales(largest, global_scale)
                if global_scale is None:
                    codes[start + i] = encode(now[i], scales[group], format)
                    values = codes[start + i].astype(np.float32) * scales[group]
                else:
                    steps = scales[group].astype(np.float32) * global_scale
                    codes[start + i] = e2m1_codes(now[i] / steps)
                    values = E2M1_VALUES[codes[start + i]] * steps
                errors[i] = (now[i] - values) / local[i, i]
                now[i + 1 : last] -= local[i, i + 1 : last, None] * errors[i]
            now[last:] -= local[first:last, last:].T @ errors[first:last]
            first = last
        left[stop:].addmm_(
            factor[start:stop, stop:].T, torch.from_numpy(errors).to(factor.device), alpha=-1
        )
    if format == "nvfp4":
        codes, scales = np.ascontiguousarray(codes.T), np.ascontiguousarray(scales.T)
    elif not is_grouped:
        scales = scales[0]
    return QuantisedWeight(format, codes, scales, global_scale, group_size)
