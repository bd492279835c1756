"""Data of the third demo: sudoku grids of 4 by 4 cells to complete.

A grid has each of the digits 1 to 4 once in each row, each column and each quarter (2 by 2 cells).
There are 288 grids. A puzzle shows some cells of a grid, which are called *clues*. The other cells
are empty. If there are few clues, several grids are right. If the CRC-32 of a puzzle's prompt is a
multiple of eight, the puzzle is held out of training.

    python sudoku.py --count 300 --seed 1 --out heldout-sudoku.jsonl
"""

from __future__ import annotations

import functools
import itertools
import random
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
from data import write_lines

ORDER = 4
CELLS = ORDER * ORDER
DIGITS = frozenset("1234")
CLUES, MORE_CLUES = (3,), (4, 5, 6)
"""Numbers of clues of held-out puzzles. With three clues, 3 to 18 grids are right. ``MORE_CLUES``
is for puzzles with one solution.
"""
_LINES = [
    *(range(ORDER * i, ORDER * (i + 1)) for i in range(ORDER)),
    *(range(i, CELLS, ORDER) for i in range(ORDER)),
    *([i, i + 1, i + ORDER, i + ORDER + 1] for i in (0, 2, 8, 10)),
]
"""The cells of each row, column and quarter."""


def is_grid(cells: Sequence[str]) -> bool:
    """Return True if the 16 cells have each digit once in every row, column and quarter."""
    return all({cells[i] for i in line} == DIGITS for line in _LINES)


@functools.cache
def grids() -> list[str]:
    """Return all grids. A grid is a text of 16 digits."""
    rows = ["".join(row) for row in itertools.permutations(sorted(DIGITS))]
    halves = [a + b for a in rows for b in rows if not {*a[:2]} & {*b[:2]}]
    halves = [half for half in halves if all(half[i] != half[i + 4] for i in range(4))]
    return [a + b for a in halves for b in halves if is_grid(a + b)]


def prompt_of(grid: str, clues: Sequence[int]) -> str:
    """Return the rows of a puzzle, with a dot for each cell that is not in ``clues``, such as
    ``1.../..2./..../....``.
    """
    return "/".join(_rows("".join(grid[i] if i in clues else "." for i in range(CELLS))))


def completion_of(grid: str) -> str:
    """Return the text of a grid, with one row per line."""
    return "\n".join(_rows(grid))


def _rows(cells: str) -> list[str]:
    return [cells[i : i + ORDER] for i in range(0, CELLS, ORDER)]


def is_held_out(prompt: str) -> bool:
    """Return True if this puzzle is never trained on."""
    return zlib.crc32(prompt.encode()) % 8 == 0


def is_right(prompt: str, text: str | None) -> bool:
    """Return True if ``text`` is a grid with one row per line that contains the clues of
    ``prompt``.
    """
    cells = (text or "").replace("\n", "")
    return (
        len(cells) == CELLS
        and text == completion_of(cells)
        and is_grid(cells)
        and _has_clues(cells, prompt)
    )


def _has_clues(cells: str, prompt: str) -> bool:
    clues = prompt.replace("/", "")
    return all(clue in (".", cell) for clue, cell in zip(clues, cells, strict=True))


def puzzles(seed: int, clues: Sequence[int], *, held_out: bool) -> Iterator[tuple[str, str]]:
    """Yield an endless sequence of prompts and completions.

    The number of clues of each puzzle is chosen from ``clues`` at random.
    """
    rng = random.Random(seed)
    while True:
        grid = rng.choice(grids())
        prompt = prompt_of(grid, rng.sample(range(CELLS), rng.choice(clues)))
        if is_held_out(prompt) == held_out:
            yield prompt, completion_of(grid)


def solutions(prompt: str) -> int:
    """Return the number of grids that contain the clues of ``prompt``."""
    return sum(_has_clues(grid, prompt) for grid in grids())


def held_out_puzzles(seed: int, count: int, *, one_solution: bool = False) -> list[tuple[str, str]]:
    """Return different held-out prompts with three clues, each with one of its right answers.

    With ``one_solution``, the prompts have four to six clues and only one right answer.
    """
    found: dict[str, str] = {}
    for prompt, completion in puzzles(seed, MORE_CLUES if one_solution else CLUES, held_out=True):
        if prompt not in found and (not one_solution or solutions(prompt) == 1):
            found[prompt] = completion
            if len(found) == count:
                break
    return list(found.items())


@click.command()
@click.option(
    "--count", type=click.IntRange(1), default=300, show_default=True, help="Puzzles to write."
)
@click.option("--seed", type=int, default=1, show_default=True, help="Seed of the generator.")
@click.option(
    "--one-solution",
    is_flag=True,
    help="Write only puzzles with one solution, to fit effort levels.",
)
@click.option(
    "--out", type=click.Path(path_type=Path), required=True, help="The .jsonl file to write."
)
def main(count: int, seed: int, one_solution: bool, out: Path) -> None:
    """Write held-out puzzles, each with one of its right answers, one JSON object per line.

    Example: python sudoku.py --count 300 --out heldout-sudoku.jsonl
    """
    write_lines(out, held_out_puzzles(seed, count, one_solution=one_solution))


if __name__ == "__main__":
    main()
