"""Processes matrices in blocks that fit a core's cache, on all cores, and by groups of rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np

from dlm_calibration.errors import QuantisationError
from dlm_calibration.pieces import Lazy, ahead, slices

_BLOCK = 1 << 18  # elements per block: 1 MiB of fp32, which fits a core's cache
_SMALL_GROUP = 32


def group_amax(w: np.ndarray | Lazy, group_size: int) -> np.ndarray:
    """The largest absolute value of each group of ``group_size`` rows, fp32 ``[ceil(K /
    group_size), N]``.

    The last group may be short. Raises QuantisationError if a value of ``w`` ``[K, N]`` is not
    finite.
    """
    rows, columns = w.shape
    out = np.empty((-(-rows // group_size), columns), dtype=np.float32)

    def find(at: slice) -> None:
        out[:, at] = ranges_of(w, columns_of(w, at), group_size)

    for_columns(w, find)
    return out


def check_finite(w: np.ndarray | Lazy) -> None:
    """Raises QuantisationError for NaN or infinite values, with their number and the first
    position.
    """
    count, first = 0, (0, 0)
    for start, stop in row_blocks(w.shape[0], w.shape[1], 1):
        block = np.asarray(w[start:stop, :], dtype=np.float32)
        # Needs no temporary array, because max and min propagate NaN.
        if np.isfinite(block.max()) and np.isfinite(block.min()):
            continue
        bad = np.argwhere(~np.isfinite(block))
        if not count:
            first = (start + int(bad[0][0]), int(bad[0][1]))
        count += len(bad)
    if count:
        raise QuantisationError(
            f"{count} of {math.prod(w.shape)} values are NaN or infinite, the first at row {first[0]}, column {first[1]}: "
            "they cannot be quantised. Check the checkpoint."
        )


def row_blocks(rows: int, columns: int, multiple: int) -> Iterator[tuple[int, int]]:
    """Yield ``(start, stop)`` of blocks of rows of about ``_BLOCK`` elements; all but the last have
    a multiple of ``multiple`` rows.
    """
    step = max(1, _BLOCK // (max(columns, 1) * multiple)) * multiple
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


def for_columns(w: np.ndarray | Lazy, function: Callable[[slice], None]) -> None:
    """Call ``function`` on all cores with slices of ``w``'s columns of about ``_BLOCK`` elements."""
    rows, columns = w.shape
    for _ in ahead(function, slices(columns, max(1, _BLOCK // rows))):
        pass


def columns_of(w: np.ndarray | Lazy, at: slice) -> np.ndarray:
    return np.asarray(w[:, at], dtype=np.float32)


def ranges_of(w: np.ndarray | Lazy, block: np.ndarray, group_size: int) -> np.ndarray:
    """``group_amax`` of columns of ``w``."""
    magnitude = np.abs(block)
    out = np.empty((-(-len(block) // group_size), block.shape[1]), dtype=np.float32)
    for groups, values in by_group(magnitude, group_size):
        if group_size > _SMALL_GROUP:
            values.max(axis=1, out=out[groups])
            continue
        # numpy reduces a short axis slowly; one row of every group at a time takes a quarter of the
        # time.
        largest = values[:, 0].copy(order="K")
        for i in range(1, values.shape[1]):
            np.maximum(largest, values[:, i], out=largest)
        out[groups] = largest
    if not np.isfinite(out).all():
        check_finite(w)
    return out


def by_group(matrix: np.ndarray, group_size: int) -> Iterator[tuple[slice, np.ndarray]]:
    """Yield slices of groups and views ``[groups, rows, N]`` of ``[K, N]``: full groups, then a
    short one.
    """
    whole = len(matrix) // group_size
    if whole:
        yield slice(0, whole), grouped(matrix[: whole * group_size], group_size)
    if len(matrix) % group_size:
        yield slice(whole, whole + 1), matrix[None, whole * group_size :]


def put(out: np.ndarray, block: np.ndarray) -> None:
    """Copy a block of bytes in either memory order."""
    if block.strides[0] < block.strides[1] and not out.strides[0] < out.strides[1]:
        # Columns whose distance is a power of two share cache lines, which makes a transposition
        # ten times slower.
        apart = np.empty((block.shape[1], block.shape[0] + 64), block.dtype)[:, : block.shape[0]].T
        apart[...] = block
        block = apart
    out[...] = block


def grouped(matrix: np.ndarray, group_size: int) -> np.ndarray:
    """``[K, N]`` viewed as ``[K / group_size, group_size, N]``."""
    return matrix.reshape(-1, group_size, matrix.shape[1])
