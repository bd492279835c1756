"""Changes weights so that quantising them loses less accuracy.

The methods are smoothing, AWQ and rotation.

A weight is a matrix ``w`` ``[K, N]``, used as ``x @ w``. Smoothing (SmoothQuant, arXiv:2211.10438)
and AWQ (arXiv:2306.00978) multiply each of the K input channels by a scale: ``(x / scales) @
(scales[:, None] * w)``. The division costs nothing at run time, because it is merged into the
weights of the operator that produces ``x``. Rotation multiplies the input channels by a Hadamard
matrix, as in QuaRot (arXiv:2404.00456).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from dlm_calibration.errors import QuantisationError

# Scales are clipped to 1 / limit .. limit. They are merged into weights that may be fp16, which has
# a small range.
_SCALE_LIMIT = 1e4
_LARGEST_ROTATION = 1024


def smooth_scales(
    activation_channel_amax: np.ndarray, weight_channel_amax: np.ndarray, alpha: float = 0.5
) -> np.ndarray:
    """Return SmoothQuant's scale of each input channel.

    The scale is ``activation_amax ** alpha / weight_amax ** (1 - alpha)``. The scale is 1 for a
    channel where all activations or all weights are zero.

    Args:
        activation_channel_amax: Largest input magnitude per channel, ``[K]``.
        weight_channel_amax: Largest weight magnitude per channel, ``[K]``, over all matrices that
            multiply this input.
        alpha: The share of the outliers that moves from the activations to the weights, 0..1. The
            default is 0.5.

    Returns:
        fp32 ``[K]``, clipped to 1e-4..1e4.

    Raises:
        QuantisationError: A range is negative or not finite, the shapes differ, or alpha is out of
            range.
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
                f"the {whose} range of channel {bad[0]} is {values[bad[0]]}: it must be finite and at least 0."
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
    """Find AWQ's scale of each input channel.

    A scale is the channel's mean input magnitude to the power of a ratio. All channels use the same
    ratio. The function tries the ratios 0 (no scaling), 1 / grid, 2 / grid, up to 1, and uses the
    ratio with the smallest loss. Among equal losses, the smallest ratio is used. If all inputs of a
    channel are zero, its scale is 1.

    Args:
        inputs: Calibration inputs ``[P, K]`` of each matrix.
        weights: Matrices ``[K, N]`` that share an input, such as q, k and v.
        quantise: A function that quantises a matrix, dequantises the result and returns it.
        grid: Number of steps between ratio 0 and ratio 1, at least 1. The default is 20.

    Returns:
        The scales, fp32 ``[K]``, the loss without scales, and the loss with the returned scales.
        The loss
            is the mean squared error of the outputs, summed over the matrices.

    Raises:
        QuantisationError: Shapes do not match, or the inputs are empty or not finite.
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
        raise QuantisationError(f"an AWQ grid of {grid} is too small: use at least 1.")
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
        # As in AWQ, the scales are divided by a common factor, so that they are centred on 1. The
        # division does not change the rounding, and keeps fp16 weights in range.
        scales[is_live] /= np.sqrt(scales[is_live].max()) * np.sqrt(scales[is_live].min())
        candidate = np.clip(scales, 1 / _SCALE_LIMIT, _SCALE_LIMIT).astype(np.float32)
        candidate_loss = loss(candidate)
        if candidate_loss < best_loss:
            best, best_loss = candidate, candidate_loss
    return best, before, best_loss


def hadamard(size: int) -> np.ndarray:
    """Return the orthonormal Hadamard matrix of Sylvester's construction, fp32 ``[n, n]``.

    The matrix is symmetric.

    n is the largest power of two that divides ``size``, but at most 1024. For an odd size, n is 1.
    Raises ValueError if size < 1.
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
    """Multiply the channels of ``x`` ``[..., K]`` by ``hadamard(K)`` ``[n, n]``, in groups of n
    neighbouring channels and in fp32.

    Rotating both the input and the weight does not change the output of a layer: ``rotate(x) @
    rotate_rows(w)`` equals ``x @ w``.
    """
    matrix = hadamard(x.shape[-1])
    blocks = np.asarray(x, dtype=np.float32).reshape(*x.shape[:-1], -1, len(matrix))
    rotated: np.ndarray = (blocks @ matrix).reshape(x.shape)
    return rotated


def rotate_rows(w: np.ndarray) -> np.ndarray:
    """Multiply the rows of ``w`` ``[K, N]`` by ``hadamard(K)`` ``[n, n]``, in groups of n
    neighbouring rows and in fp32.

    See ``rotate``.
    """
    matrix = hadamard(w.shape[0])
    blocks = np.asarray(w, dtype=np.float32).reshape(-1, len(matrix), w.shape[1])
    rotated: np.ndarray = (matrix @ blocks).reshape(w.shape)  # the matrix is its own transpose
    return rotated
