"""Draw docs/images/canvas.svg: a canvas of the demo denoiser after each pass, from a real run.

make demo && python docs/tools/canvas.py
"""

from __future__ import annotations

import argparse
from html import escape
from pathlib import Path

import dlm_runtime as dlm

ROOT = Path(__file__).parents[2]
PROMPT = (
    "hey remind me on friday at quarter to nine in the evening to ask brunoltha about the kayak"
)
# Sizes in pixels.
WIDTH, MARGIN, LABEL = 820, 18, 64
CHARACTER, PADDING, GAP = 7.3, 8, 3
LINE, BETWEEN = 28, 14

STYLE = """
text { font-family: ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace; font-size: 12px; fill: #1a1c2c; }
.label { font-family: system-ui, sans-serif; fill: #4a4f68; }
.page { fill: #ffffff; stroke: #d5d8e6; }
.mask { fill: #eceef5; stroke: #cfd3e2; stroke-dasharray: 2 2; }
.old { fill: #dfe3f7; }
.new { fill: #3f51b5; }
.new-text { fill: #ffffff; }
"""


def passes(bundle: dlm.Bundle) -> tuple[list[str], list[int]]:
    """Return the answer's tokens as text, and for each token the pass that committed it."""
    committed: dict[int, int] = {}
    for event in bundle.stream(prompt=PROMPT):
        for position, is_undecided in enumerate(event.undecided):
            if not is_undecided:
                committed.setdefault(position, event.nfe)
    result = event.result
    assert result is not None
    assert bundle.tokenizer is not None
    answer = range(result.prompt_tokens, result.prompt_tokens + result.completion_tokens)
    texts = [bundle.tokenizer.decode([result.tokens[position]]) for position in answer]
    return texts, [committed[position] for position in answer]


def draw(texts: list[str], committed: list[int]) -> str:
    """Draw one row of cells per pass. A token has the same place in every row."""
    places: list[tuple[float, int, float]] = []  # x, line, width
    x, line = float(MARGIN + LABEL), 0
    for text in texts:
        width = max(len(text), 1) * CHARACTER + PADDING
        if x + width > WIDTH - MARGIN:
            x, line = float(MARGIN + LABEL), line + 1
        places.append((x, line, width))
        x += width + GAP
    height_of_row = (line + 1) * LINE + BETWEEN
    shapes = [
        f'<text class="label" x="{MARGIN}" y="{MARGIN + 14}">“{escape(PROMPT)}”</text>',
    ]
    top = MARGIN + 34
    for number in range(1, max(committed) + 1):
        y = top + (number - 1) * height_of_row
        shapes.append(f'<text class="label" x="{MARGIN}" y="{y + 16}">pass {number}</text>')
        for text, when, (left, line, width) in zip(texts, committed, places, strict=True):
            state = "mask" if when > number else "new" if when == number else "old"
            cell = f'x="{left:.1f}" y="{y + line * LINE}" width="{width:.1f}" height="24" rx="4"'
            shapes.append(f'<rect class="{state}" {cell}/>')
            if state != "mask":
                kind = ' class="new-text"' if state == "new" else ""
                at = f'x="{left + PADDING / 2:.1f}" y="{y + line * LINE + 16}"'
                shapes.append(f'<text{kind} {at} xml:space="preserve">{escape(text)}</text>')
    height = top + max(committed) * height_of_row
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'width="{WIDTH}" height="{height}">'
    )
    page = f'<rect class="page" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>'
    title = "<title>A canvas of the demo denoiser after each pass</title>"
    return "\n".join([head, title, f"<style>{STYLE}</style>", page, *shapes, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bundle", type=Path, default=ROOT / "build" / "demo")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images" / "canvas.svg")
    arguments = parser.parse_args()
    with dlm.open(arguments.bundle) as bundle:
        arguments.out.write_text(draw(*passes(bundle)))


if __name__ == "__main__":
    main()
