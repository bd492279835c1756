"""Draws figures with matplotlib, as inline SVG with the colours, font and text size of the page.

matplotlib draws with placeholder colours. They are then replaced by variables of the style sheet,
so that figures follow light and dark mode. Text stays text in the SVG; it is not converted to
outlines. Every figure is ``WIDTH`` units wide. An aria-label has the numbers of the figure, for
screen readers.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup, escape

from dlm_export.judging.report.numbers import finite, printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

# Width of every figure. It is about the width of a phone in pixels, so text of 9 units can be read
# there.
WIDTH = 360
# placeholder colours in matplotlib -> colours of the page
INK, MUTED, RULE, REFERENCE, CANDIDATE = "#010101", "#020202", "#030303", "#040404", "#050505"
_COLOURS = {
    INK: "currentColor",
    MUTED: "var(--muted)",
    RULE: "var(--rule)",
    REFERENCE: "var(--reference)",
    CANDIDATE: "var(--candidate)",
}
STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # a dollar sign in the name of a layer has no special meaning
    "font.size": 10.5,
    "text.color": INK,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": RULE,
    "grid.linewidth": 0.7,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
}


@dataclass(frozen=True)
class Figure:
    """A figure: its title, how to read it, its legend as pairs of a CSS class and words, and its
    SVG.
    """

    title: str
    reading: str
    legend: list[tuple[str, str]]
    svg: str


def draw(
    title: str, description: str, height: float, paint: Callable[[Canvas], None], **words: Any
) -> Figure:
    """Let ``paint`` draw on a canvas of ``WIDTH`` x ``height``, and convert the result to SVG.

    The SVG has no ids, colours or fonts of its own.
    """
    import matplotlib.style
    from matplotlib.figure import Figure as Canvas

    buffer = io.StringIO()
    # matplotlib names markers and clip paths by salted hashes. With a salt per title, two figures
    # on a page have no name in common.
    with matplotlib.style.context(["default", STYLE | {"svg.hashsalt": title}]):
        canvas = Canvas(figsize=(WIDTH / 72, height / 72), layout="constrained")
        paint(canvas)
        canvas.savefig(
            buffer,
            format="svg",
            transparent=True,
            metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")),
        )
    svg = buffer.getvalue()
    body = svg[svg.index(">", svg.index("<svg")) + 1 :]
    body = re.sub(
        r"<metadata>.*?</metadata>|<defs>\s*<style.*?</defs>|<!--.*?-->|<title>.*?</title>",
        "",
        body,
        flags=re.DOTALL,
    )
    # ids such as figure_1, axes_1 and line2d_1 are the same in every figure, and nothing refers to
    # them
    body = re.sub(r' id="[\w.]+_\d{1,4}"', "", body)
    # matplotlib before 3.10 writes this
    body = re.sub(r"font: (?:[\w ]+ )?([\d.]+px)[^;\"]*", r"font-size: \1", body)
    body = re.sub(r"font-family: [^;\"]*(; )?| transform=\"rotate\(-?0 [^\"]*\"", "", body)
    body = re.sub(r"(?<=: )#0\d0\d0\d", lambda match: _COLOURS.get(match[0], match[0]), body)
    body = re.sub(r"\s*\n\s*", "\n", body)
    head = f'<svg class="chart" role="img" aria-label="{escape(printable(description))}" viewBox="0 0 {WIDTH} {height:g}">'
    return Figure(title=title, svg=Markup(f"{head}<title>{escape(title)}</title>{body}"), **words)


def with_nan(values: Iterable[float | None]) -> np.ndarray:
    """Convert to an fp64 array. Missing and non-finite values become NaN, which matplotlib
    skips.
    """
    return np.array([finite(value, math.nan) for value in values], dtype=float)


def label_of(layer: str) -> str:
    """Shorten the name of a layer to 27 characters, in ASCII."""
    layer = "".join(letter if " " <= letter <= "~" else "?" for letter in layer)
    return layer if len(layer) <= 27 else f"{layer[:12]}…{layer[-14:]}"
