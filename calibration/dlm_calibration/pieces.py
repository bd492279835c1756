"""What is too large to be held or too slow for one core, a piece at a time."""

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
"""A part of an array: a slice of each of its first axes; an empty one is all of it."""
Item = TypeVar("Item")
Result = TypeVar("Result")

PIECE = 1 << 20  # elements
_FEWEST_ROWS = 32  # of a matrix
MOST_CORES = 8  # of one piece of work: a disk keeps up with no more, and each takes memory


@dataclass(frozen=True)
class Lazy:
    """An array that is read where it is indexed; ``read`` gives a part of it, in whatever order of
    memory.
    """

    shape: tuple[int, ...]
    read: Callable[[Index], np.ndarray]

    def __getitem__(self, at: Index) -> np.ndarray:
        return self.read(at)


def slices(length: int, step: int) -> list[slice]:
    """``length`` cut every ``step``; the last piece may be short."""
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]


def row_slices(shape: tuple[int, ...]) -> list[slice]:
    """The first axis of such an array, cut into pieces of an even number of elements, about
    ``PIECE``, and of rows.

    Pieces of a matrix that is stored the other way round have enough rows to use whole lines of the
    cache; of a stack of large matrices each is a piece.
    """
    size = math.prod(shape[1:])
    fewest = _FEWEST_ROWS if len(shape) < 3 else 1 + size % 2
    step = max(fewest, PIECE // max(1, size) // 2 * 2)
    return slices(shape[0], step)


def ahead(function: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result]:
    """The function of each item, in order: all cores work a few items ahead of whoever takes the
    results.

    What ``function`` raises is raised here, at its turn. It should spend its time where Python's
    lock is not held.
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
