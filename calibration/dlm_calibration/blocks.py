"""Processes matrices on all cores.

The functions divide a matrix into blocks that fit the cache of a core, or into groups of rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np

from dlm_calibration.errors import QuantisationError
from dlm_calibration.pieces import Lazy, ahead, slices

_BLOCK = 1 << 18  # elements per block: 1 MiB of fp32, which fits a core's cache
_SMALL_GROUP = 32


def group_amax(w: np.ndarray | Lazy, group_size: int) -> np.ndarray:
    """Return the largest absolute value of each group of ``group_size`` rows, in every column.

    The matrix ``w`` is ``[K, N]``, and the result is fp32 ``[ceil(K / group_size), N]``. The last
    group may be shorter. Raises QuantisationError if an element of ``w`` is not finite.
    """
    rows, columns = w.shape
    out = np.empty((-(-rows // group_size), columns), dtype=np.float32)

    def find(at: slice) -> None:
        out[:, at] = ranges_of(w, columns_of(w, at), group_size)

    for_columns(w, find)
    return out


def check_finite(w: np.ndarray | Lazy) -> None:
    """Check that all elements are finite. Otherwise, raises QuantisationError.

    The error message contains the number of NaN or infinite elements, and the position of the first
    one.
    """
    count, first = 0, (0, 0)
    for start, stop in row_blocks(w.shape[0], w.shape[1], 1):
        block = np.asarray(w[start:stop, :], dtype=np.float32)
        # The maximum or the minimum is not finite if any element is not finite. This test needs no
        # temporary array.
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
    """Yield ``(start, stop)`` for each block of rows. A block has about ``_BLOCK`` elements.

    The number of rows in a block is a multiple of ``multiple``, except in the last block.
    """
    step = max(1, _BLOCK // (max(columns, 1) * multiple)) * multiple
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


def for_columns(w: np.ndarray | Lazy, function: Callable[[slice], None]) -> None:
    """Call ``function`` for slices of columns, on all cores.

    Together, the slices cover all columns of ``w``.

    The columns of a slice have about ``_BLOCK`` elements.
    """
    rows, columns = w.shape
    for _ in ahead(function, slices(columns, max(1, _BLOCK // rows))):
        pass


def columns_of(w: np.ndarray | Lazy, at: slice) -> np.ndarray:
    return np.asarray(w[:, at], dtype=np.float32)


def ranges_of(w: np.ndarray | Lazy, block: np.ndarray, group_size: int) -> np.ndarray:
    """Return the largest absolute value of each group of rows of ``block``. The block contains some
    columns of ``w``.
    """
    magnitude = np.abs(block)
    out = np.empty((-(-len(block) // group_size), block.shape[1]), dtype=np.float32)
    for groups, values in by_group(magnitude, group_size):
        if group_size > _SMALL_GROUP:
            values.max(axis=1, out=out[groups])
            continue
        # numpy is slow at reducing a short axis. The loop below processes one row of every group at
        # a time, which is four times as fast.
        largest = values[:, 0].copy(order="K")
        for i in range(1, values.shape[1]):
            np.maximum(largest, values[:, i], out=largest)
        out[groups] = largest
    if not np.isfinite(out).all():
        check_finite(w)
    return out


def by_group(matrix: np.ndarray, group_size: int) -> Iterator[tuple[slice, np.ndarray]]:
    """Yield the groups of rows of ``matrix`` ``[K, N]`` in at most two steps.

    Each step yields a slice with the indices of some groups, and a view ``[groups, rows, N]`` of
    these groups. The first step yields all full groups. If the last group is shorter, the second
    step yields this group.
    """
    whole = len(matrix) // group_size
    if whole:
        yield slice(0, whole), grouped(matrix[: whole * group_size], group_size)
    if len(matrix) % group_size:
        yield slice(whole, whole + 1), matrix[None, whole * group_size :]


def put(out: np.ndarray, block: np.ndarray) -> None:
    """Copy a block of bytes into ``out``. Both arrays may be in any memory order."""
    if block.strides[0] < block.strides[1] and not out.strides[0] < out.strides[1]:
        # If the distance between columns in memory is a power of two, the columns compete for the
        # same cache lines, and a transposition takes ten times as long. A copy with a different
        # distance avoids this problem.
        apart = np.empty((block.shape[1], block.shape[0] + 64), block.dtype)[:, : block.shape[0]].T
        apart[...] = block
        block = apart
    out[...] = block


def grouped(matrix: np.ndarray, group_size: int) -> np.ndarray:
    """View ``[K, N]`` as ``[K / group_size, group_size, N]``."""
    return matrix.reshape(-1, group_size, matrix.shape[1])
