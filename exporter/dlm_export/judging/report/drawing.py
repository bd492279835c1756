"""matplotlib to inline SVG that takes its colours, font and size from the page.

matplotlib draws in placeholder colours, which become the style sheet's variables, so a figure
follows light and dark mode; text stays text. Every figure is ``WIDTH`` units wide and carries its
numbers in words, for screen readers.
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

# units of every figure: about as many pixels on a telephone, so that text of 9 units stays legible
WIDTH = 360
# What matplotlib draws in -> what the page shows.
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
    "text.parse_math": False,  # a dollar sign in a layer's name is a dollar sign
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
    """One drawing: inline SVG, its title, how to read it, and its legend as (style sheet class,
    words).
    """

    title: str
    reading: str
    legend: list[tuple[str, str]]
    svg: str


def draw(
    title: str, description: str, height: float, paint: Callable[[Canvas], None], **words: Any
) -> Figure:
    """``paint`` on a canvas ``WIDTH`` x ``height``, as SVG without identifiers, colours or fonts of
    its own.
    """
    import matplotlib.style
    from matplotlib.figure import Figure as Canvas

    buffer = io.StringIO()
    # Marker and clip paths are named by a hash with this salt: two figures on one page must not
    # share a name.
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
    # figure_1, axes_1, line2d_1: the same in every figure, and nothing refers to them.
    body = re.sub(r' id="[\w.]+_\d{1,4}"', "", body)
    # Written by matplotlib before 3.10.
    body = re.sub(r"font: (?:[\w ]+ )?([\d.]+px)[^;\"]*", r"font-size: \1", body)
    body = re.sub(r"font-family: [^;\"]*(; )?| transform=\"rotate\(-?0 [^\"]*\"", "", body)
    body = re.sub(r"(?<=: )#0\d0\d0\d", lambda match: _COLOURS.get(match[0], match[0]), body)
    body = re.sub(r"\s*\n\s*", "\n", body)
    head = f'<svg class="chart" role="img" aria-label="{escape(printable(description))}" viewBox="0 0 {WIDTH} {height:g}">'
    return Figure(title=title, svg=Markup(f"{head}<title>{escape(title)}</title>{body}"), **words)


def with_nan(values: Iterable[float | None]) -> np.ndarray:
    """fp64 with NaN, which matplotlib leaves out, for whatever is missing or not finite."""
    return np.array([finite(value, math.nan) for value in values], dtype=float)


def label_of(layer: str) -> str:
    """A layer's name in at most 27 characters that every font has."""
    layer = "".join(letter if " " <= letter <= "~" else "?" for letter in layer)
    return layer if len(layer) <= 27 else f"{layer[:12]}…{layer[-14:]}"
