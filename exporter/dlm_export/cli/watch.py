"""Draws a canvas in the terminal after each pass.

The drawing shows committed tokens, guesses and masks.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.style import Style
from rich.text import Text

from dlm_runtime import Bundle, Event, Generation

MASKED, GUESSED, COMMITTED, NEW = "bright_black", "italic yellow", "default", "bold green"
LEGEND = (
    ("committed", COMMITTED),
    ("just now", NEW),
    ("guessed", GUESSED),
    ("░ masked", MASKED),
    ("∎ end", COMMITTED),
)
# An invisible style that marks the active part of the drawing. If wrapping moves a part of the text
# to the next line, the mark moves with it.
ACTIVE = Style(meta={"active": True})


def watch(bundle: Bundle, request: dict[str, Any], delay_s: float) -> Generation:
    """Run a request, and draw its canvas on stderr after each pass.

    After each drawing, wait for ``delay_s`` seconds.
    """
    console = Console(stderr=True)
    result = denoise(bundle, request, console, delay_s)
    if not console.is_terminal:
        console.print()  # end the last line of the drawing
    return result


def denoise(
    bundle: Bundle,
    request: dict[str, Any],
    console: Console,
    delay_s: float = 0.0,
    shown_from: int | None = None,
) -> Generation:
    """Run a request, and draw its canvas after each pass.

    If ``shown_from`` is set, the drawing starts at the canvas position ``shown_from``, and is
    erased when the generation is finished.
    """
    result = None
    before: list[int] | None = None
    with Live(console=console, auto_refresh=False, transient=shown_from is not None) as live:
        for event in bundle.stream(**request):
            live.update(view(bundle, event, before, shown_from or 0), refresh=True)
            before, result = event.canvas, event.result
            if not event.done:
                time.sleep(delay_s)
    assert result is not None
    return result


@dataclass(frozen=True)
class View:
    """A drawing of a canvas.

    If ``is_whole`` is true, the whole drawing is shown. Otherwise, if the drawing does not fit on
    the screen, only the part around the ``ACTIVE`` text is shown.
    """

    canvas: Text
    status: Text
    is_whole: bool

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = list(self.canvas.wrap(console, options.max_width))
        status = list(self.status.wrap(console, options.max_width))
        height = options.size.height
        if not self.is_whole and len(lines) + len(status) > height:
            status = status[: max(1, height // 3)]
            room = max(1, height - len(status) - 1)
            active = [i for i, line in enumerate(lines) if _is_active(line)] or [0]
            margin = max(0, room - (active[-1] + 1 - active[0])) // 2
            start = max(0, min(active[0] - margin, len(lines) - room))
            hidden = Text(
                f"{start} lines above, {len(lines) - room - start} below",
                MASKED,
                no_wrap=True,
                overflow="crop",
            )
            lines, status = lines[start : start + room], [hidden, *status]
        yield from lines
        yield from status


def _is_active(line: Text) -> bool:
    # If rich wraps a line before the active text, the line may end with a space in the active
    # style. Ignore such a space.
    return any(
        span.style == ACTIVE and line.plain[span.start : span.end].strip() for span in line.spans
    )


def view(bundle: Bundle, event: Event, before: list[int] | None, shown_from: int = 0) -> View:
    """Draw the canvas of ``event``, starting at position ``shown_from``.

    ``before`` is the canvas of the previous event. Committed tokens that differ from ``before`` are
    drawn as new tokens. The ``ACTIVE`` style marks the current block from the block's first
    undecided position on.
    """
    canvas, starts = Text(), []
    for position, token in enumerate(event.canvas):
        starts.append(len(canvas))
        if position < shown_from:
            continue
        if event.undecided[position]:
            guess = event.guess[position]
            canvas.append(
                "░ " if guess < 0 else _text(bundle, guess), MASKED if guess < 0 else GUESSED
            )
        elif before is not None and before[position] != token:
            canvas.append(_text(bundle, token), NEW)
        else:
            canvas.append(_text(bundle, token), COMMITTED)
    first, end = event.block
    first = next((i for i in range(first, end) if event.undecided[i]), first)
    canvas.stylize(ACTIVE, starts[first], [*starts, len(canvas)][end])
    left = sum(event.undecided)
    status = Text(
        f"pass {event.nfe}, {event.committed} committed, {left} masked   ", "bright_black"
    )
    for name, style in LEGEND:
        status.append(f"{name}  ", style)
    return View(canvas, status, is_whole=event.done)


def _text(bundle: Bundle, token: int) -> str:
    if token in bundle.eos_token_ids:
        return "∎"
    if bundle.tokenizer is None:
        return f"{token} "
    # Do not print control characters of tokens, because a terminal would execute them.
    return "".join(
        c if c.isprintable() else "⏎" if c == "\n" else "�"
        for c in bundle.tokenizer.token_text(token)
    )
