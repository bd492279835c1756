"""Tests of the option ``--watch``, which draws the canvas after each pass.

The drawing must always show the block that is being filled, even if the screen is small.
"""

from __future__ import annotations

import io
import re
from types import SimpleNamespace
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console
from rich.live import Live

from dlm_export.cli.watch import view
from dlm_runtime import Event

END = 5000
KINDS = {
    "plain": "w{}.",
    "spaced": " w{}",
    "wide": "漢字{}語",
    "newlines": "w{}\n",
    "control": "w{}\x1b[2J",
    "empty": "",
}


class Words:
    """A fake tokenizer. All token texts are of one kind, for example with wide letters."""

    def __init__(self, kind: str) -> None:
        self.form = KINDS[kind]

    def token_text(self, token: int) -> str:
        return self.form.format(token)


def event(
    length: int, block: tuple[int, int], first: int | None = None, done: bool = False
) -> Event:
    """Return an event in which the positions before ``first`` are decided.

    If ``first`` is None, the positions before the block are decided. With ``done``, all positions
    are decided.

    The token at position i has the id i.
    """
    decided = length if done else block[0] if first is None else first
    undecided = [i >= decided for i in range(length)]
    guess = [-1 if i % 2 or not undecided[i] else i for i in range(length)]
    return Event(
        list(range(length)), undecided, guess, [0.0] * length, block, 7, 1, None, None, done, None
    )


def drawn(shown: Event, width: int, height: int, kind: str = "plain") -> list[str]:
    """Return the lines that ``--watch`` draws. ``width`` and ``height`` are in characters."""
    bundle: Any = SimpleNamespace(tokenizer=Words(kind), eos_token_ids=(END,))
    out = io.StringIO()
    console = Console(
        file=out,
        force_terminal=True,
        color_system=None,
        width=width,
        height=height,
        legacy_windows=False,
    )
    console.print(view(bundle, shown, None), end="")
    return out.getvalue().splitlines()


@pytest.mark.parametrize("kind", ["plain", "spaced", "wide", "newlines", "control"])
@pytest.mark.parametrize(("width", "height"), [(80, 24), (20, 6), (12, 5)])
@pytest.mark.parametrize(
    "block", [(0, 4), (500, 504), (996, 1000)], ids=["first", "middle", "last"]
)
def test_the_active_block_is_on_the_screen(
    kind: str, width: int, height: int, block: tuple[int, int]
) -> None:
    lines = drawn(event(1000, block), width, height, kind)
    assert len(lines) <= height
    assert all(cell_len(line) <= width for line in lines)
    hidden = next(i for i, line in enumerate(lines) if re.match(r"\d+ l", line))
    first = next(i for i in range(*block) if i % 2 == 0)  # this position shows its guess
    word = Words(kind).token_text(first).strip().split("\n")[0].split("\x1b")[0]
    assert word in "".join(line.strip() for line in lines[:hidden])
    assert "pass 7"[: width - 1] in lines[hidden + 1]
    assert not any("\x1b" in line for line in lines[:hidden])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [(9, 3), (3, 2), (1, 1)])
def test_no_screen_is_too_small_for_a_line_of_the_block(kind: str, size: tuple[int, int]) -> None:
    assert len(drawn(event(300, (150, 154)), *size, kind)) == 3


def test_lines_that_are_not_shown_are_counted() -> None:
    lines = drawn(event(200, (100, 104)), 20, 8)
    everything = drawn(event(200, (100, 104)), 20, 10_000)
    hidden = next(line for line in lines if "above" in line)
    above, below = (int(word) for word in hidden.split() if word.isdigit())
    shown = lines.index(hidden)
    assert above > 0
    assert below > 0
    assert everything[above : above + shown] == lines[:shown]
    canvas = next(i for i, line in enumerate(everything) if line.startswith("pass 7"))
    assert above + shown + below == canvas


def test_a_block_longer_than_the_screen_is_shown_from_what_is_left_of_it() -> None:
    """A block may need more lines than the screen has."""
    lines = drawn(event(900, (10, 900), first=400), 30, 8)
    assert "w400" in lines[0] + lines[1]
    assert "w10." not in "".join(lines)


def test_a_canvas_that_fits_and_a_finished_one_are_drawn_whole() -> None:
    assert "above" not in "".join(drawn(event(20, (10, 20)), 80, 24))
    lines = drawn(event(500, (496, 500), done=True), 40, 10)
    assert "w0." in lines[0]
    assert "w499" in "".join(lines)
    assert "above" not in "".join(lines)


def test_tokens_without_a_text_hide_nothing() -> None:
    assert len(drawn(event(500, (250, 254)), 20, 5, "empty")) <= 5


def test_the_size_is_that_of_the_moment() -> None:
    bundle: Any = SimpleNamespace(tokenizer=Words("plain"), eos_token_ids=())
    out = io.StringIO()
    console = Console(
        file=out, force_terminal=True, color_system=None, width=60, height=20, legacy_windows=False
    )
    with Live(console=console, auto_refresh=False) as live:
        for width, height in ((60, 20), (30, 6), (80, 30)):
            console.size = (width, height)  # type: ignore[assignment]
            at = out.tell()
            live.update(view(bundle, event(900, (450, 454)), None), refresh=True)
            frame = out.getvalue()[at:]
            assert "w450" in frame
            assert frame.count("\n") == height - 1
