"""Collects statistics of the inputs of layers during calibration: ranges, outliers, and how the
ranges change with the mask ratio.

There are separate statistics for masked and committed positions, and for each bucket of mask
ratios. A bucket is a range of mask ratios. Ranges that were found only on clean text would be wrong
for partly masked canvases (arXiv:2508.14896).

Magnitudes are counted in a histogram of 2048 bins of equal relative width, 32 per octave, from
2**-32 to 2**32. The histogram has four advantages:

- No range must be known in advance.
- The order of passes does not change the result.
- A single huge activation, which is common in language models, does not change the other bins.
- The memory per layer is constant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import ml_dtypes
import numpy as np

from dlm_calibration.errors import CalibrationError

Method = Literal["max", "percentile", "mse", "entropy"]
Levels = Literal["int8", "fp8"]

SMALLEST_AMAX = 2.0**-64
"""Range of an input that was always zero. This range results in a normal (not subnormal) fp32 scale
in every format.
"""
PERCENTILE = 99.99
"""Percentage of magnitudes that the method ``percentile`` does not clip."""

_BINS = 2048
_BITS = 5  # the first 5 mantissa bits select one of 32 bins of an octave
_FIRST_OCTAVE = -32
_OFFSET = (127 + _FIRST_OCTAVE) << _BITS  # number of the first bin; 127 is fp32's exponent bias
_EDGES = np.ldexp(1 + np.arange(32) / 32, np.arange(_FIRST_OCTAVE, -_FIRST_OCTAVE)[:, None]).ravel()
_EDGES = np.append(_EDGES, np.ldexp(1.0, -_FIRST_OCTAVE))
_EDGES[0] = 0.0  # the first bin includes zeros and tiny values

# The first ten buckets are ranges of mask ratios. The last bucket is for clean states. Index -1
# also selects the last bucket.
_BUCKETS = 11
_CHUNK = 1 << 18  # number of elements that are processed at a time
# Clipping ranges to try, as shares of the largest magnitude, down to 1/1024.
_MSE_CLIPS = 2.0 ** (-np.arange(161) / 16)
# The rounding error is computed at this number of magnitudes per bin. One magnitude is not enough,
# because a bin may span several INT8 levels.
_MSE_POINTS = 8
_ENTROPY_BINS, _ENTROPY_FIRST, _ENTROPY_STRIDE = (
    2048,
    128,
    16,
)  # The values come from TensorRT's INT8 calibration (Migacz, GTC 2017).


class Observer:
    """Collects statistics of one layer's input, which has ``channels`` features.

    ``rows`` contains up to ``keep_rows`` of the input vectors, chosen at random with equal
    probability. ``seed`` is the seed of the random numbers.
    """

    def __init__(self, layer: str, channels: int, *, keep_rows: int = 0, seed: int = 0) -> None:
        self.layer = layer
        self.channels = channels
        self.count = 0  # number of observed input vectors
        self._random, self._most_rows = np.random.Philox(key=seed), keep_rows
        # The stored vectors, and the random key of each vector.
        self.rows = np.empty((0, channels), dtype=np.float32)
        self._keys = np.empty(0, dtype=np.uint64)
        self.channel_amax = np.zeros(channels, dtype=np.float32)
        """The largest magnitude of each channel, fp32 ``[K]``."""
        # Index 0 of the second axis is for committed positions, and 1 for masked positions.
        self._vectors = np.zeros((_BUCKETS, 2), dtype=np.int64)
        self._amax = np.zeros((_BUCKETS, 2), dtype=np.float64)
        self._powers = np.zeros((_BUCKETS, 2, 4), dtype=np.float64)  # sums of x, x**2, x**3, x**4
        self._counts = np.zeros((_BUCKETS, 2, _BINS), dtype=np.int64)

    def add(self, x: np.ndarray, is_masked: np.ndarray, bucket: int) -> None:
        """Add the input that a layer received in one pass to the statistics.

        Args:
            x: Input vectors, fp32 ``[P, K]``, without padding.
            is_masked: True for each position that is masked, bool ``[P]``.
            bucket: The bucket of the pass's mask ratio, 0..9. -1 is the bucket of clean states.

        Raises:
            CalibrationError: ``x`` contains NaN or infinity. In this case, the statistics do not
                change.
        """
        x = np.ascontiguousarray(x, dtype=np.float32)
        assert x.shape == (len(x), self.channels), (
            f"{self.layer}: input {x.shape}, {self.channels} channels"
        )
        assert is_masked.shape == x.shape[:1]
        assert is_masked.dtype == np.bool_
        assert -1 <= bucket < _BUCKETS - 1
        bad = x.size - np.count_nonzero(np.isfinite(x))
        if bad:
            raise CalibrationError(
                f"{self.layer}: {bad} of {x.size} inputs are NaN or infinite: the denoiser overflows on this data, "
                "or its weights are damaged"
            )
        for group, chosen in enumerate((x[~is_masked], x[is_masked])):
            rows = max(1, _CHUNK // self.channels)
            for start in range(0, len(chosen), rows):
                self._take(chosen[start : start + rows], bucket, group)
        if self._most_rows:
            self._keep(x, self._random.random_raw(4 * len(x))[::4])
        self.count += len(x)

    def amax(self, method: Method, *, levels: Levels) -> float:
        """Return the clipping range for magnitudes: greater than 0, and at most the largest
        observed magnitude.

        Args:
            method: How the range is chosen. ``max`` takes the largest magnitude. ``percentile``
                takes the percentile ``PERCENTILE`` of all magnitudes. ``mse`` minimises the squared
                rounding error. ``entropy`` minimises the divergence between the magnitudes and the
                rounded magnitudes (Migacz, GTC 2017).
            levels: The format to which values are rounded.

        Returns:
            The range, or ``SMALLEST_AMAX`` for an input that was always zero.

        Raises:
            CalibrationError: No input was observed.
        """
        if not self.count:
            raise CalibrationError(
                f"{self.layer}: no range, because no calibration state ran this layer"
            )
        largest = float(self._amax.max())
        if largest <= SMALLEST_AMAX:
            return SMALLEST_AMAX
        counts = self._counts.sum((0, 1))
        found: dict[Method, Callable[[], float]] = {
            "max": lambda: largest,
            "percentile": lambda: _percentile(counts, PERCENTILE, largest),
            "mse": lambda: _least_squares(counts, largest, _ROUNDINGS[levels]),
            "entropy": lambda: _least_divergence(counts, largest, _ROUNDINGS[levels]),
        }
        return min(largest, max(SMALLEST_AMAX, found[method]()))

    def statistics(
        self, *, bucket: int | None = None, is_masked: bool | None = None
    ) -> dict[str, float | None]:
        """Return statistics of the inputs in one bucket, or in all buckets, as a dict:

        - ``count``: the number of input vectors.
        - ``amax``: the largest magnitude.
        - ``p999``, ``p9999``: the 99.9th and the 99.99th percentile of magnitudes.
        - ``kurtosis``: the kurtosis of the inputs, or ``None`` if all inputs are equal.

        ``bucket`` selects one bucket. -1 selects clean states, and ``None`` selects all states.
        ``is_masked`` selects masked or committed positions. ``None`` selects both kinds. If there
        were no inputs, all values except ``count`` are ``None``.
        """
        buckets = slice(None) if bucket is None else [bucket]
        groups = slice(None) if is_masked is None else [int(is_masked)]
        count = int(self._vectors[buckets][:, groups].sum())
        if not count:
            return {"count": 0, "amax": None, "p999": None, "p9999": None, "kurtosis": None}
        amax = float(self._amax[buckets][:, groups].max())
        counts = self._counts[buckets][:, groups].sum((0, 1))
        return {
            "count": count,
            "amax": amax,
            "p999": _percentile(counts, 99.9, amax),
            "p9999": _percentile(counts, 99.99, amax),
            "kurtosis": _kurtosis(
                self._powers[buckets][:, groups].sum((0, 1)), count * self.channels
            ),
        }

    def summary(self) -> dict[str, Any]:
        """Return how the layer's range changes with the mask ratio, as plain Python objects.

        ``by_bucket``, ``masked_by_bucket`` and ``committed_by_bucket`` contain the largest
        magnitude in each of the ten buckets of mask ratios, or ``None`` for a bucket without
        inputs. ``drift`` is the largest value in ``by_bucket`` divided by the smallest value.
        ``drift`` is ``None`` if fewer than two buckets have inputs.
        """
        masked, committed = (
            [
                self.statistics(bucket=bucket, is_masked=is_masked)["amax"]
                for bucket in range(_BUCKETS - 1)
            ]
            for is_masked in (True, False)
        )
        by_bucket = [self.statistics(bucket=bucket)["amax"] for bucket in range(_BUCKETS - 1)]
        seen = [max(amax, SMALLEST_AMAX) for amax in by_bucket if amax is not None]
        return {
            "layer": self.layer,
            **self.statistics(),
            "drift": max(seen) / min(seen) if len(seen) > 1 else None,
            "masked_amax": self.statistics(is_masked=True)["amax"],
            "committed_amax": self.statistics(is_masked=False)["amax"],
            "clean_amax": self.statistics(bucket=-1)["amax"],
            "by_bucket": by_bucket,
            "masked_by_bucket": masked,
            "committed_by_bucket": committed,
        }

    def _take(self, x: np.ndarray, bucket: int, group: int) -> None:
        """Add ``x``, fp32 ``[P, K]`` with P > 0, to the statistics of a bucket.

        ``group`` is 0 for committed and 1 for masked positions.
        """
        magnitudes = np.abs(x)
        channels = magnitudes.max(0)
        amax = float(channels.max())
        # A magnitude's exponent and first mantissa bits select its bin. In a positive fp32 number,
        # the exponent and the first mantissa bits are the upper bits.
        bins = magnitudes.view(np.int32) >> (23 - _BITS)
        bins -= _OFFSET
        np.clip(bins, 0, _BINS - 1, out=bins)
        if amax > SMALLEST_AMAX:  # inputs that are almost 0 are left out of the sums of powers
            # The values are divided by the largest value, so that powers cannot overflow. Each
            # chunk is summed in fp32.
            values = (x / np.float32(amax)).ravel()
            squares = values * values
            powers = (
                values.sum(dtype=np.float64),
                squares.sum(dtype=np.float64),
                squares @ values,
                squares @ squares,
            )
            self._powers[bucket, group] += np.array(powers, np.float64) * amax ** np.arange(
                1.0, 5.0
            )
        np.maximum(self.channel_amax, channels, out=self.channel_amax)
        self._vectors[bucket, group] += len(x)
        self._amax[bucket, group] = max(self._amax[bucket, group], amax)
        self._counts[bucket, group] += np.bincount(bins.ravel(), minlength=_BINS)

    def _keep(self, x: np.ndarray, keys: np.ndarray) -> None:
        """Update the random sample of vectors with the vectors ``x``.

        The sample consists of the vectors with the smallest random keys, in the order of the input.
        """
        if len(self.rows) == self._most_rows:
            near = keys < self._keys.max(initial=0)
            x, keys = x[near], keys[near]
        keys = np.concatenate([self._keys, keys])
        chosen = np.sort(np.argsort(keys, kind="stable")[: self._most_rows])
        self.rows = np.concatenate([self.rows, x])[chosen]
        self._keys = keys[chosen]


class Observers(dict[str, Observer]):
    """The observers of a denoiser's layers. The keys are the names of the layers."""

    def check(self, layers: Iterable[str]) -> None:
        """Check that every layer was observed.

        Raises CalibrationError if a layer was not observed. The message names these layers.
        """
        missing = [layer for layer in layers if layer not in self or not self[layer].count]
        if missing:
            raise CalibrationError(
                f"no calibration state ran {', '.join(missing)}: give states that do, or keep these layers in high precision"
            )


# --- Ranges from counted magnitudes ---


def _to_int8(x: np.ndarray, clip: float) -> np.ndarray:
    """Round magnitudes ``x``, float64, to the values of INT8: 127 equal steps up to ``clip``."""
    return np.asarray(np.minimum(np.rint(x * (127 / clip)), 127) * (clip / 127))


def _to_fp8(x: np.ndarray, clip: float) -> np.ndarray:
    """Round magnitudes ``x``, float64, to E4M3 values, where 448 is scaled to ``clip``."""
    codes = np.minimum(x * (448 / clip), 448).astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
    return codes.astype(np.float64) * (clip / 448)


_ROUNDINGS: dict[Levels, Callable[[np.ndarray, float], np.ndarray]] = {
    "int8": _to_int8,
    "fp8": _to_fp8,
}


def _cumulative(counts: np.ndarray, largest: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the bin edges in ascending order, and the number of magnitudes below each edge.

    The last bin that is not empty ends at ``largest``.
    """
    last = int(np.flatnonzero(counts)[-1])
    edges = _EDGES[: last + 2].copy()
    edges[-1] = max(largest, edges[-2])
    return edges, np.append(0, np.cumsum(counts[: last + 1]))


def _percentile(counts: np.ndarray, percent: float, largest: float) -> float:
    """Return a percentile of the magnitudes, interpolated within its bin."""
    edges, cumulative = _cumulative(counts, largest)
    rank = cumulative[-1] * percent / 100
    first = int(np.searchsorted(cumulative, rank))
    share = (rank - cumulative[first - 1]) / (cumulative[first] - cumulative[first - 1])
    return float(edges[first - 1] + share * (edges[first] - edges[first - 1]))


def _kurtosis(powers: np.ndarray, count: int) -> float | None:
    """Return the kurtosis from sums of powers, or ``None`` if all values are equal."""
    mean, second, third, fourth = (float(power) / count for power in powers)
    variance = second - mean**2
    # If the variance is this small, it is only a rounding error, and all values are equal.
    if variance <= 1e-12 * second:
        return None
    return (fourth - 4 * mean * third + 6 * mean**2 * second - 3 * mean**4) / variance**2


def _least_squares(
    counts: np.ndarray, largest: float, rounded: Callable[[np.ndarray, float], np.ndarray]
) -> float:
    """Return the clipping range with the smallest squared rounding error.

    For each bin of the histogram, the error is computed at several equally spaced magnitudes.
    """
    edges, _ = _cumulative(counts, largest)
    used = np.flatnonzero(counts)
    starts, widths = edges[used], edges[used + 1] - edges[used]
    points = (
        starts[:, None] + widths[:, None] * (np.arange(_MSE_POINTS) + 0.5) / _MSE_POINTS
    ).ravel()
    weights = np.repeat(counts[used], _MSE_POINTS).astype(np.float64)
    clips = largest * _MSE_CLIPS
    errors = [float(weights @ (points - rounded(points, clip)) ** 2) for clip in clips]
    # The widest range comes first, and argmin returns the first minimum.
    return float(clips[int(np.argmin(errors))])


def _least_divergence(
    counts: np.ndarray, largest: float, rounded: Callable[[np.ndarray, float], np.ndarray]
) -> float:
    """Return the clipping range with the least Kullback-Leibler divergence of the magnitudes."""
    edges, cumulative = _cumulative(counts, largest)
    grid = np.linspace(0, largest, _ENTROPY_BINS + 1)
    even = np.diff(
        np.interp(grid, edges[1:], cumulative[1:])
    )  # Zeros are left out, because they are always exact and would dominate the divergence.
    centres = (grid[:-1] + grid[1:]) / 2
    best, least = largest, np.inf
    for bins in range(_ENTROPY_BINS, _ENTROPY_FIRST - 1, -_ENTROPY_STRIDE):
        kept = even[:bins]
        clipped = kept.copy()
        clipped[-1] += even[bins:].sum()
        _, level = np.unique(rounded(centres[:bins], float(grid[bins])), return_inverse=True)
        occupied = kept > 0
        share = np.bincount(level, weights=kept) / np.maximum(
            np.bincount(level, weights=occupied), 1
        )
        image = share[level] * occupied
        divergence = _divergence(clipped, image)
        if divergence < least:
            best, least = float(grid[bins]), divergence
    return best


def _divergence(p: np.ndarray, q: np.ndarray) -> float:
    """Normalise two histograms, and return the Kullback-Leibler divergence of ``p`` from ``q``.

    The divergence is infinite if a bin is empty in ``q`` and not in ``p``.
    """
    if not p.any() or not q.any():
        return float(np.inf)
    used = p > 0
    p, q = p[used] / p.sum(), q[used] / q.sum()
    return float(np.inf) if not q.all() else float((p * np.log(p / q)).sum())
