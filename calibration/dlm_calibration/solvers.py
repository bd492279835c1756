"""Better weights for the same format: smoothing, AWQ scaling and Hadamard rotation, on numpy arrays
alone.

All take the weight as ``w`` ``[K, N]``, used as ``x @ w``, and scale or rotate the K input
channels: SmoothQuant (arXiv:2211.10438), AWQ (arXiv:2306.00978), rotation as in QuaRot
(arXiv:2404.00456). Scales are meant as ``(x / scales) @ (scales[:, None] * w)``, the division
folded into whatever produces x.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from dlm_calibration.errors import QuantisationError

_SCALE_LIMIT = (
    1e4  # smoothing and AWQ scales stay within 1 / this .. this: they are folded into fp16 weights
)
_LARGEST_ROTATION = 1024


def smooth_scales(
    activation_channel_amax: np.ndarray, weight_channel_amax: np.ndarray, alpha: float = 0.5
) -> np.ndarray:
    """SmoothQuant's scale for each input channel, fp32 ``[K]``: ``activation_amax ** alpha /
    weight_amax ** (1 - alpha)``.

    Both ranges ``[K]``; the weight's is the largest over all matrices that read the same x. A
    channel whose range is zero on either side gets 1. Scales are clipped to 1e-4..1e4. Raises
    QuantisationError for ranges that are negative or not finite, shapes that differ, and alpha
    outside 0..1.
    """
    if not 0 <= alpha <= 1:
        raise QuantisationError(f"smoothing strength (alpha) {alpha} is outside 0..1.")
    ranges = [
        np.asarray(amax, dtype=np.float64)
        for amax in (activation_channel_amax, weight_channel_amax)
    ]
    if ranges[0].ndim != 1 or ranges[0].shape != ranges[1].shape:
        raise QuantisationError(
            f"channel ranges of shapes {list(ranges[0].shape)} and {list(ranges[1].shape)} do not belong to one layer."
        )
    for whose, values in zip(("activation", "weight"), ranges, strict=True):
        bad = np.flatnonzero(~(np.isfinite(values) & (values >= 0)))
        if bad.size:
            raise QuantisationError(
                f"the {whose} range of channel {bad[0]} is {values[bad[0]]}: it has to be finite, at least 0."
            )
    is_live = (ranges[0] > 0) & (ranges[1] > 0)
    scales = np.ones(ranges[0].shape)
    scales[is_live] = ranges[0][is_live] ** alpha / ranges[1][is_live] ** (1 - alpha)
    return np.clip(scales, 1 / _SCALE_LIMIT, _SCALE_LIMIT).astype(np.float32)


def awq_scales(
    inputs: Sequence[np.ndarray],
    weights: Sequence[np.ndarray],
    quantise: Callable[[np.ndarray], np.ndarray],
    grid: int = 20,
) -> tuple[np.ndarray, float, float]:
    """AWQ's search: ``(scales fp32 [K], loss before, loss after)``, the scales being the best
    ``mean|x| ** ratio``.

    ``weights`` (each ``[K, N]``) are matrices that share an input, as q, k and v do, ``inputs``
    ``[P, K]`` what each of them meets of it; ``quantise`` gives a matrix back quantised and
    dequantised. The loss is the mean squared error of the outputs, added over the matrices; ratios
    0 (no scaling), 1 / grid .. 1 are tried, and of equal losses the smaller ratio is taken.
    Channels that no input uses get 1. Raises QuantisationError for shapes that do not match, no
    rows, rows that are not finite.
    """
    inputs = [np.asarray(rows, dtype=np.float32) for rows in inputs]
    pairs = list(zip(inputs, weights, strict=True))
    fits = [
        rows.ndim == 2 and rows.size and w.ndim == 2 and w.shape[0] == rows.shape[1]
        for rows, w in pairs
    ]
    if not fits or not all(fits) or len({rows.shape[1] for rows in inputs}) > 1:
        shapes, met = (
            ", ".join(str(list(each.shape)) for each in all_of) or "none"
            for all_of in (weights, inputs)
        )
        raise QuantisationError(
            f"inputs of shapes {met} do not fit weights of shapes {shapes}: AWQ needs [P, K], [K, N]."
        )
    if grid < 1:
        raise QuantisationError(f"an AWQ grid of {grid} has nothing to search: use at least 1.")
    different = list({id(rows): rows for rows in inputs}.values())
    magnitude = np.abs(np.concatenate(different)).mean(axis=0, dtype=np.float64)
    if not np.isfinite(magnitude).all():
        raise QuantisationError(
            f"the calibration inputs of channel {np.flatnonzero(~np.isfinite(magnitude))[0]} are not finite."
        )

    def loss(scales: np.ndarray) -> float:
        total = 0.0
        for rows, w in pairs:
            w = np.asarray(w, dtype=np.float32)
            error = rows @ (quantise(w * scales[:, None]) / scales[:, None] - w)
            total += float(np.mean(np.square(error, dtype=np.float64)))
        return total

    best = np.ones(inputs[0].shape[1], dtype=np.float32)
    before = best_loss = loss(best)
    is_live = magnitude > 0
    for ratio in np.arange(1, grid + 1) / grid if is_live.any() else ():
        scales = np.ones(inputs[0].shape[1])
        scales[is_live] = magnitude[is_live] ** ratio
        # Centred on 1, as AWQ does it: rounding does not care for the common factor, but fp16
        # weights do.
        scales[is_live] /= np.sqrt(scales[is_live].max()) * np.sqrt(scales[is_live].min())
        candidate = np.clip(scales, 1 / _SCALE_LIMIT, _SCALE_LIMIT).astype(np.float32)
        candidate_loss = loss(candidate)
        if candidate_loss < best_loss:
            best, best_loss = candidate, candidate_loss
    return best, before, best_loss


def hadamard(size: int) -> np.ndarray:
    """The orthonormal Hadamard matrix (Sylvester's, symmetric) for ``size`` channels, fp32 ``[n,
    n]``.

    n is the largest power of two that divides size, at most 1024; 1 if size is odd. Raises
    ValueError if size < 1.
    """
    if size < 1:
        raise ValueError(f"size {size} is not positive")
    n = min(size & -size, _LARGEST_ROTATION)
    matrix = np.ones((1, 1), dtype=np.float32)
    while len(matrix) < n:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    matrix /= np.float32(np.sqrt(n))
    return matrix


def rotate(x: np.ndarray) -> np.ndarray:
    """``x`` ``[..., K]``, each run of n channels by ``hadamard(K)``, fp32: ``rotate(x) @
    rotate_rows(w)`` equals ``x @ w``.
    """
    matrix = hadamard(x.shape[-1])
    blocks = np.asarray(x, dtype=np.float32).reshape(*x.shape[:-1], -1, len(matrix))
    rotated: np.ndarray = (blocks @ matrix).reshape(x.shape)
    return rotated


def rotate_rows(w: np.ndarray) -> np.ndarray:
    """``w`` ``[K, N]`` with ``hadamard(K)`` applied to each run of n rows, fp32: the counterpart of
    ``rotate``.
    """
    matrix = hadamard(w.shape[0])
    blocks = np.asarray(w, dtype=np.float32).reshape(-1, len(matrix), w.shape[1])
    rotated: np.ndarray = (matrix @ blocks).reshape(w.shape)  # symmetric: its own transpose
    return rotated
