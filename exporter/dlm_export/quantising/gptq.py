"""GPTQ (arXiv:2210.17323): weights rounded row by row, the rows behind a row making up for its
error.

What grows with the cube of a layer's inputs is done in torch, on a GPU where there is one; codes
are found in numpy, by the functions that say what a format is.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dlm_calibration.blocks import group_amax
from dlm_calibration.errors import QuantisationError
from dlm_calibration.formats import (
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
"""Weight of a committed position in a Gram matrix; a masked one counts 1, because only its
prediction is read.
"""
_BATCH = 128  # rows whose errors reach the rows behind them in one product
_STEP = 16  # rows of a group, or of a batch, whose errors reach one another one at a time
_STRIP = 1024  # columns of a Gram matrix that are summed at a time
_SMALLEST_SQUARE = 1e-20  # mean square of a vector, so that one of zeros adds nothing
EXACT = 4096
"""Inputs up to which the factor is found in float64; beyond, in fp32, as GPTQ's authors have it."""


class Gram:
    """The weighted sum of ``x^T x`` over a layer's input vectors: fp32 ``[K, K]``, the upper
    triangle of it.

    Vectors count by their direction, whatever their length: a few tokens of trained denoisers have
    vectors a thousand times as long as the others', and would have all rounding serve them (figures
    in BENCHMARKS.md).
    """

    def __init__(self, channels: int, device: torch.device) -> None:
        self.matrix = torch.zeros(channels, channels, device=device)

    def add(self, x: Tensor, weight: Tensor) -> None:
        """Take in ``x`` fp32 ``[P, K]``, each vector, brought to a mean square of 1, counting
        ``weight`` ``[P]``.
        """
        weighted = x * (weight / x.square().mean(1).clamp_min(_SMALLEST_SQUARE))[:, None]
        for start in range(0, x.shape[1], _STRIP):
            columns = slice(start, start + _STRIP)
            self.matrix[columns, start:].addmm_(weighted[:, columns].T, x[:, start:])


def inverse_factor(gram: Tensor, damping: float = 0.01) -> Tensor:
    """fp32 upper triangular ``U`` ``[K, K]`` with ``U^T U`` the inverse of a damped Gram matrix.

    ``gram`` fp32 ``[K, K]``: its upper triangle is read. ``damping`` is the share of its mean
    diagonal that is added to the diagonal. An input channel that was always zero corrects nothing.
    Raises QuantisationError for values that are not finite, and a matrix that is not positive
    semi-definite. Memory: two matrices like it, in float64 up to ``EXACT`` inputs.
    """
    if not damping > 0:
        raise QuantisationError(f"a GPTQ damping of {damping} is not positive: 0.01 is usual.")
    size = len(gram)
    diagonal = gram.diagonal().double()
    # NaN and infinity anywhere reach the sum.
    if not gram.sum(dtype=torch.float64).isfinite() or bool((diagonal < 0).any()):
        raise QuantisationError(
            "the gram matrix has values that are not finite, or a negative diagonal: calibrate again."
        )
    is_dead = diagonal == 0
    # A dead channel's row and column are zero too, or the matrix is no Gram matrix.
    added = damping * diagonal[~is_dead].mean() if not bool(is_dead.all()) else torch.zeros(())
    # With R R^T the damped matrix and R upper triangular, U is the inverse of R. R is the Cholesky
    # factor of the matrix with rows and columns reversed, reversed again: one factorisation, where
    # inverting first would need two and lose digits. Of the reversed matrix it is the lower
    # triangle that was summed.
    lower = gram.to(torch.float64 if size <= EXACT else torch.float32).flip(0, 1)
    lower.diagonal().copy_((torch.where(is_dead, 1.0, diagonal) + added).flip(0))
    info = torch.empty((), dtype=torch.int32, device=gram.device)
    lower, info = torch.linalg.cholesky_ex(lower)
    if int(info):
        raise QuantisationError(
            f"the gram matrix is not positive definite with damping {damping}: use more inputs, or raise it."
        )
    _invert_lower(lower)
    factor: Tensor = lower.float().flip(0, 1)
    return factor


def _invert_lower(lower: Tensor) -> None:
    """Invert a lower triangular matrix in place: halves by recursion, the corner by two products."""
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
    """Quantise ``w`` ``[K, N]`` so that ``x @ w`` changes least for the inputs behind ``factor``
    (``inverse_factor``).

    int4 (groups of ``group_size`` rows, 128 unless given) and nvfp4 (of 16): a group is scaled when
    it begins, from the weights as corrected so far; int8 and fp8: one scale a column. ``amax``
    replaces the ranges found of a column, or of nvfp4's tensor. ``is_signed``: int4's scales may be
    negative. Layers that share an input share a
    factor. Raises QuantisationError for unknown formats, shapes that do not match, and weights that
    are not finite. Time: K^2 N multiply-adds.
    """
    ranges, group_size = weight_ranges(w, format, group_size)
    if amax is not None:
        ranges = np.broadcast_to(np.asarray(amax, np.float32), ranges.shape)
    rows, columns = w.shape
    if factor.shape != (rows, rows):
        raise QuantisationError(
            f"a gram matrix of shape {list(factor.shape)} does not belong to a weight of {rows} input channels."
        )
    is_grouped, size = group_size is not None, group_size or rows
    # One row of scales a group: those of groups are set when they begin.
    scales, global_scale = scales_of(ranges, format, scale_dtype), None
    if format == "nvfp4":
        global_scale = np.float32(scales_of(ranges.max(), format, scale_dtype))
        scales = nvfp4_group_scales(ranges, global_scale)
    codes = np.empty((rows, columns), CODE_TYPES[format])
    left = torch.tensor(np.asarray(w, np.float32), device=factor.device)  # corrected as we go
    # A group's scale has to see every correction before it, so a batch ends where a group does.
    batch = size * max(1, _BATCH // size) if is_grouped else _BATCH
    for start in range(0, rows, batch):
        stop = min(start + batch, rows)
        # On a CPU this shares memory with ``left``, whose rows are not read again.
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
                        # The weight of each row's remaining error.
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
