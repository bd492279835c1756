"""The canvas as it denoises, live in a terminal: committed tokens, guesses, and what is still masked."""

from __future__ import annotations

import time
from typing import Any

from dlm_runtime import Bundle, Event, Generation

MASKED, GUESSED, COMMITTED, NEW = "bright_black", "italic yellow", "default", "bold green"
LEGEND = (("committed", COMMITTED), ("just now", NEW), ("guessed", GUESSED), ("░ masked", MASKED), ("∎ end", COMMITTED))


def watch(bundle: Bundle, request: dict[str, Any], delay_s: float) -> Generation:
    """Run the request and draw every step on stderr; wait ``delay_s`` after each, since a small denoiser is fast."""
    from rich.console import Console
    from rich.live import Live

    result = None
    before: list[int] | None = None
    console = Console(stderr=True)
    with Live(console=console, auto_refresh=False) as live:
        for event in bundle.stream(**request):
            live.update(_render(bundle, event, before), refresh=True)
            before, result = event.canvas, event.result
            if not event.done:
                time.sleep(delay_s)
    if not console.is_terminal:
        console.print()  # Live leaves the cursor behind its only frame
    assert result is not None
    return result


def _render(bundle: Bundle, event: Event, before: list[int] | None) -> Any:
    from rich.console import Group
    from rich.text import Text

    canvas = Text()
    for position, token in enumerate(event.canvas):
        if event.undecided[position]:
            guess = event.guess[position]
            canvas.append("░ " if guess < 0 else _text(bundle, guess), MASKED if guess < 0 else GUESSED)
        elif before is not None and before[position] != token:
            canvas.append(_text(bundle, token), NEW)
        else:
            canvas.append(_text(bundle, token), COMMITTED)
    left = sum(event.undecided)
    status = Text(f"pass {event.nfe}, {event.committed} committed, {left} masked   ", "bright_black")
    for name, style in LEGEND:
        status.append(f"{name}  ", style)
    return Group(canvas, status)


def _text(bundle: Bundle, token: int) -> str:
    if token in bundle.eos_token_ids:
        return "∎"
    if bundle.tokenizer is None:
        return f"{token} "
    # A control character from a vocabulary must not steer the terminal.
    return "".join(c if c.isprintable() else "⏎" if c == "\n" else "�" for c in bundle.tokenizer.token_text(token))
