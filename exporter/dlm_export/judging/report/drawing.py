"""Converts matplotlib figures to inline SVG with the page's colours, font and text size.

matplotlib draws with placeholder colours that become variables of the style sheet, so figures
follow light and dark mode; text stays text. Every figure is ``WIDTH`` units wide and has its
numbers in an aria-label for screen readers.
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

# width of every figure: about the pixels of a phone, so text of 9 units stays legible
WIDTH = 360
# Placeholder colours of matplotlib -> colours of the page.
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
    "text.parse_math": False,  # a dollar sign in a layer's name is literal
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
    """One drawing: inline SVG, its title, how to read it, and its legend as (CSS class, words)."""

    title: str
    reading: str
    legend: list[tuple[str, str]]
    svg: str


def draw(
    title: str, description: str, height: float, paint: Callable[[Canvas], None], **words: Any
) -> Figure:
    """Draw with ``paint`` on a canvas of ``WIDTH`` x ``height``, as SVG without its own ids,
    colours or fonts.
    """
    import matplotlib.style
    from matplotlib.figure import Figure as Canvas

    buffer = io.StringIO()
    # This salts the hashes that name marker and clip paths, so two figures on a page share no name.
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
    # figure_1, axes_1, line2d_1: the same in every figure, and never referenced.
    body = re.sub(r' id="[\w.]+_\d{1,4}"', "", body)
    # Output of matplotlib before 3.10.
    body = re.sub(r"font: (?:[\w ]+ )?([\d.]+px)[^;\"]*", r"font-size: \1", body)
    body = re.sub(r"font-family: [^;\"]*(; )?| transform=\"rotate\(-?0 [^\"]*\"", "", body)
    body = re.sub(r"(?<=: )#0\d0\d0\d", lambda match: _COLOURS.get(match[0], match[0]), body)
    body = re.sub(r"\s*\n\s*", "\n", body)
    head = f'<svg class="chart" role="img" aria-label="{escape(printable(description))}" viewBox="0 0 {WIDTH} {height:g}">'
    return Figure(title=title, svg=Markup(f"{head}<title>{escape(title)}</title>{body}"), **words)


def with_nan(values: Iterable[float | None]) -> np.ndarray:
    """fp64 array with NaN, which matplotlib skips, for missing or non-finite values."""
    return np.array([finite(value, math.nan) for value in values], dtype=float)


def label_of(layer: str) -> str:
    """A layer's name shortened to 27 characters, in ASCII."""
    layer = "".join(letter if " " <= letter <= "~" else "?" for letter in layer)
    return layer if len(layer) <= 27 else f"{layer[:12]}…{layer[-14:]}"
