"""Splits large arrays into pieces, and processes pieces in parallel."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

Index = tuple[slice, ...]
"""An index that selects a part of an array: one slice for each of the first axes. An empty tuple
selects the whole array.
"""
Item = TypeVar("Item")
Result = TypeVar("Result")

PIECE = 1 << 20  # elements in a piece
_FEWEST_ROWS = 32  # smallest number of rows in a piece of a matrix
MOST_CORES = 8  # most threads at a time; more would only wait for the disk and use memory


@dataclass(frozen=True)
class Lazy:
    """An array that is not in memory. Indexing the array calls ``read`` to read the indexed part.

    ``read`` may return the part in any memory order.
    """

    shape: tuple[int, ...]
    read: Callable[[Index], np.ndarray]

    def __getitem__(self, at: Index) -> np.ndarray:
        return self.read(at)


def slices(length: int, step: int) -> list[slice]:
    """Split ``length`` into slices of ``step``. The last slice may be shorter."""
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]


def row_slices(shape: tuple[int, ...]) -> list[slice]:
    """Split the first axis of an array into slices of about ``PIECE`` elements.

    A slice has an even number of rows. A slice of a matrix has enough rows to use whole cache
    lines, even if the matrix is stored transposed. If the array is a stack of large matrices, each
    slice contains one matrix.
    """
    size = math.prod(shape[1:])
    fewest = _FEWEST_ROWS if len(shape) < 3 else 1 + size % 2
    step = max(fewest, PIECE // max(1, size) // 2 * 2)
    return slices(shape[0], step)


def ahead(function: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result]:
    """Yield the function's result for each item, in order.

    Several threads compute the next results in advance. If ``function`` raises an exception for an
    item, this generator raises the same exception instead of yielding the item's result. The
    function should release Python's global lock most of the time. Otherwise, only one core is used.
    """
    cores = min(len(os.sched_getaffinity(0)), MOST_CORES)
    if cores == 1 or len(items) < 2:
        yield from map(function, items)
        return
    running: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(cores) as pool:
        try:
            for item in items:
                running.append(pool.submit(function, item))
                if len(running) > 2 * cores:
                    yield running.popleft().result()
            while running:
                yield running.popleft().result()
        finally:
            for future in running:
                future.cancel()
