"""Draws figures with matplotlib, as SVG that can be embedded in an HTML page.

A figure uses the colours and the font of the page. matplotlib draws with placeholder colours. This
module replaces each placeholder with a variable of the style sheet, so that the figure's colours
follow light and dark mode. Text in a figure is stored as text, not as outlines. Every figure is
``WIDTH`` units wide. For screen readers, an aria-label contains the numbers that the figure shows.
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

from dlm_export.charts.numbers import finite, printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

# The width of every figure. The screen of a phone is about 360 pixels wide, so a text height of 9
# units is legible on a phone.
WIDTH = 360
# Maps the placeholder colours of matplotlib to the colours of the page that replace them.
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
    "text.parse_math": False,  # a dollar sign in a layer's name must not start a formula
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
    """A figure of a page.

    ``reading`` explains how to read the figure. ``legend`` is a list of pairs of a CSS class and a
    label.
    """

    title: str
    reading: str
    legend: list[tuple[str, str]]
    svg: str


def draw(
    title: str, description: str, height: float, paint: Callable[[Canvas], None], **words: Any
) -> Figure:
    """Call ``paint`` to draw a figure, and convert the figure to SVG.

    The figure is ``WIDTH`` units wide and ``height`` units high. All IDs, fonts and colours are
    removed from the SVG or replaced, because the SVG becomes part of a page.
    """
    import matplotlib.style
    from matplotlib.figure import Figure as Canvas

    buffer = io.StringIO()
    # matplotlib gives markers and clip paths IDs that are salted hashes. Each title gets its own
    # salt, so that two figures on a page never use the same ID.
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
    # Remove IDs such as figure_1 and axes_1, which would occur several times on the page. No
    # element refers to them.
    body = re.sub(r' id="[\w.]+_\d{1,4}"', "", body)
    # Keep only the size of the font. Versions of matplotlib before 3.10 write the property
    # ``font``, which also names the font.
    body = re.sub(r"font: (?:[\w ]+ )?([\d.]+px)[^;\"]*", r"font-size: \1", body)
    body = re.sub(r"font-family: [^;\"]*(; )?| transform=\"rotate\(-?0 [^\"]*\"", "", body)
    body = re.sub(r"(?<=: )#0\d0\d0\d", lambda match: _COLOURS.get(match[0], match[0]), body)
    body = re.sub(r"\s*\n\s*", "\n", body)
    head = f'<svg class="chart" role="img" aria-label="{escape(printable(description))}" viewBox="0 0 {WIDTH} {height:g}">'
    return Figure(title=title, svg=Markup(f"{head}<title>{escape(title)}</title>{body}"), **words)


def with_nan(values: Iterable[float | None]) -> np.ndarray:
    """Convert values to an fp64 array.

    Missing and infinite values become NaN, which matplotlib skips.
    """
    return np.array([finite(value, math.nan) for value in values], dtype=float)


def label_of(layer: str) -> str:
    """Shorten the name of a layer to at most 27 characters, and replace non-ASCII characters."""
    layer = "".join(letter if " " <= letter <= "~" else "?" for letter in layer)
    return layer if len(layer) <= 27 else f"{layer[:12]}…{layer[-14:]}"
