"""Draws the figures of the HTML pages. Each figure has its own function."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dlm_export.charts.drawing import (
    CANDIDATE,
    MUTED,
    REFERENCE,
    RULE,
    Figure,
    draw,
    label_of,
    with_nan,
)
from dlm_export.charts.numbers import (
    TIMES,
    as_change,
    as_number,
    as_percent,
    finite,
    formatted,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas


# In the figure of effort levels, the axis for the number of passes is logarithmic if one variant of
# the preset needs more than ``LONG_AXIS`` times as many passes as the level ``high``.
LONG_AXIS = 4


def _layer_axis(axes: Axes, layers: Sequence[str]) -> None:
    """Prepare a vertical axis with one row per layer. The first layer is at the top."""
    axes.set_yticks(range(len(layers)), [label_of(layer) for layer in layers], fontsize=9.5)
    axes.set_ylim(len(layers) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


def sensitivity(row: Mapping[str, Any]) -> float:
    return finite(row["frontier_kl"] if row["frontier_kl"] is not None else row["kl"], 0.0)


def draw_loss(judgement: Mapping[str, Any]) -> Figure:
    """Plot the cross-entropy of the reference and of the candidate against the mask ratio.

    A second plot shows the increase from the reference to the candidate, with 95% intervals.
    """
    rows, floor = judgement["buckets"], judgement["noise_floor"]
    ratios = [row["mask_ratio"] for row in rows]
    ours, theirs = (
        with_nan(row[f"{who}_ce"] for row in rows) for who in ("candidate", "reference")
    )
    increase = 100 * with_nan(row["ce_increase"] for row in rows)
    bounds = 100 * np.array([with_nan(row["ce_increase_interval"] or (None, None)) for row in rows])

    def paint(canvas: Canvas) -> None:
        top, bottom = canvas.subplots(2, sharex=True, height_ratios=(3, 2))
        top.set_title("Masked cross-entropy, nats a position")
        top.plot(ratios, ours, "o-", color=CANDIDATE)
        # The two curves are often equal. Draw the reference as larger rings on top of the
        # candidate, so that both curves are visible.
        top.plot(
            ratios,
            theirs,
            "o--",
            color=REFERENCE,
            markerfacecolor="none",
            markersize=8,
            linewidth=1,
        )
        top.set_ylim(0, 1.12 * max(finite(loss, 0.0) for loss in (*ours, *theirs)) or 1.0)
        bottom.set_title("Increase, %")
        bottom.axhline(0, color=MUTED, linewidth=0.8)
        if (
            floor is not None
            and floor["ce_increase"] is not None
            and math.isfinite(floor["ce_increase"])
        ):
            bottom.axhline(100 * floor["ce_increase"], color=REFERENCE, linewidth=1, linestyle=":")
        bottom.vlines(ratios, bounds[:, 0], bounds[:, 1], color=CANDIDATE, linewidth=1.4)
        bottom.plot(ratios, increase, "o", color=CANDIDATE)
        bottom.set_xlabel("mask ratio: share of the positions still masked")
        bottom.set_xlim(0, 1)

    reading = "Above, the loss at each mask ratio; below, its increase over the reference with 95% bootstrap intervals."
    legend = [("reference", judgement["reference"]), ("candidate", judgement["candidate"])]
    if floor is not None:
        legend.append(("floor", "increase within the noise floor"))
    values = ", ".join(f"{row['mask_ratio']:g}: {as_change(row['ce_increase'])}" for row in rows)
    description = f"Increase of the masked cross-entropy by mask ratio. {values}."
    return draw("Loss by mask ratio", description, 268, paint, reading=reading, legend=legend)


def draw_drift(layers: Sequence[Mapping[str, Any]]) -> Figure:
    """Plot how much the range of each layer's inputs depends on the mask ratio.

    There is one row per layer. Each row contains ten cells. Each cell is for a tenth of the mask
    ratios from 0 to 1, and contains the layer's largest input at these mask ratios, divided by the
    smallest of the row's ten largest inputs. A larger result gets a darker colour.
    """
    ranges = np.array([with_nan(row["by_bucket"]) for row in layers])
    ranges[ranges <= 0] = math.nan
    smallest = np.array([np.min(row[np.isfinite(row)], initial=math.inf) for row in ranges])
    times = ranges / smallest[:, None]
    strongest = max(2.0, float(np.max(times[np.isfinite(times)], initial=1.0)))

    def paint(canvas: Canvas) -> None:
        axes = canvas.subplots()
        for (row, bucket), value in np.ndenumerate(times):
            seen = math.isfinite(value)
            alpha = 0.07 + 0.9 * math.log(value) / math.log(strongest) if seen else 1.0
            cell: dict[str, Any] = (
                {"facecolor": CANDIDATE, "alpha": alpha}
                if seen
                else {"fill": False, "edgecolor": RULE, "linewidth": 0.7}
            )
            axes.bar(bucket + 0.5, 0.86, 0.94, row - 0.43, **cell)
        for row, layer in enumerate(layers):
            axes.text(
                10.2,
                row,
                formatted(layer["drift"], lambda drift: f"{drift:.3g} {TIMES}"),
                va="center",
                fontsize=9.5,
            )
        axes.grid(False)
        axes.set_xlim(0, 11.6)
        axes.set_xticks((0, 5, 10), ("0", "mask ratio", "1"))
        axes.spines["bottom"].set_visible(False)
        axes.tick_params(axis="x", length=0)
        _layer_axis(axes, [layer["layer"] for layer in layers])

    reading = (
        "Largest absolute input in each tenth of the mask ratio, divided by the layer's smallest; the number is the drift. "
        "Calibration on clean text, without masks, covers only the left."
    )
    values = ", ".join(f"{row['layer']} {as_number(row['drift'], 3)} times" for row in layers[:5])
    description = f"Range drift of the layers' inputs over the mask ratio, largest first: {values}."
    return draw(
        "Range drift by layer",
        description,
        40 + 18 * len(layers),
        paint,
        reading=reading,
        legend=[],
    )


def draw_sensitivity(layers: Sequence[Mapping[str, Any]]) -> Figure:
    """Plot the loss of each layer if only that layer is quantised.

    The loss is the KL divergence. The figure shows two losses per layer: one for the positions that
    the next pass would commit, and one for all masked positions.
    """
    frontier = with_nan(row["frontier_kl"] for row in layers)
    everywhere = with_nan(row["kl"] for row in layers)
    known = np.concatenate([frontier, everywhere])
    is_log = bool(np.all(known[np.isfinite(known)] > 0))

    def paint(canvas: Canvas) -> None:
        from matplotlib.ticker import LogLocator

        axes = canvas.subplots()
        rows = np.arange(len(layers))
        axes.hlines(rows, frontier, everywhere, color=RULE, linewidth=2)
        axes.plot(everywhere, rows, "o", color=REFERENCE, markerfacecolor="none")
        axes.plot(frontier, rows, "o", color=CANDIDATE)
        if is_log:
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 3), numticks=6))
            axes.xaxis.set_major_formatter(lambda kl, _: f"{kl:g}")
            axes.minorticks_off()
        axes.set_xlabel("KL, nats" + (" (logarithmic)" if is_log else ""))
        _layer_axis(axes, [f"{row['layer']}" for row in layers])

    legend = [("candidate", "at the frontier"), ("reference hollow", "all masked positions")]
    reading = (
        "Divergence from the reference when only this layer is quantised; "
        "layers with the largest frontier loss come first."
    )
    values = ", ".join(f"{row['layer']} {as_number(sensitivity(row), 3)}" for row in layers[:5])
    description = f"KL of each layer quantised alone, largest first: {values}."
    return draw(
        "Sensitivity by layer",
        description,
        48 + 18 * len(layers),
        paint,
        reading=reading,
        legend=legend,
    )


def draw_nfe(judgement: Mapping[str, Any]) -> Figure:
    """Plot histograms of the passes per prompt of the reference and of the candidate."""
    free = judgement["free_running"]
    theirs, ours = np.array(free["reference_nfe"]), np.array(free["candidate_nfe"])
    # Some counts of passes are estimates, which may not be integers.
    first = math.floor(min(theirs.min(), ours.min()))
    last = math.ceil(max(theirs.max(), ours.max()))
    edges = np.arange(first, last + 2, max(1, -(-(last + 1 - first) // 24))) - 0.5
    edges = np.append(edges, edges[-1] + 1) if edges[-1] <= last else edges

    def paint(canvas: Canvas) -> None:
        from matplotlib.ticker import MaxNLocator

        axes = canvas.subplots()
        axes.set_title("Prompts")
        axes.hist(ours, bins=edges.tolist(), color=CANDIDATE, alpha=0.35)
        axes.hist(theirs, bins=edges.tolist(), histtype="step", color=REFERENCE, linewidth=1.6)
        for values, colour, line in ((theirs, REFERENCE, "--"), (ours, CANDIDATE, "-")):
            axes.axvline(float(values.mean()), color=colour, linestyle=line, linewidth=1.2)
        axes.set_xlim(max(0 if first else -0.5, min(first - 1, last - 4)), max(last + 1, first + 4))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))

    means = [
        f"{judgement[side]}, mean {as_number(float(nfe.mean()), 3)}"
        for side, nfe in (("reference", theirs), ("candidate", ours))
    ]
    legend = [("reference", means[0]), ("candidate", means[1])]
    reading = (
        "Number of passes for each prompt with the same policy; the vertical lines are the means."
    )
    description = f"Histogram of passes a prompt: {means[0]}; {means[1]}."
    return draw("Passes a prompt", description, 190, paint, reading=reading, legend=legend)


def _quality_axes(
    canvas: Canvas, kind: str, curve: Sequence[Mapping[str, Any]], line: str, **style: Any
) -> Axes:
    """Plot quality against the number of passes, with one marker for each entry of ``curve``."""
    axes = canvas.subplots()
    name = "right answers" if kind == "task" else "agreement with one token a pass"
    axes.set_title(f"Quality: {name}")
    passes, quality = [p["nfe"] for p in curve], [p["quality"] for p in curve]
    axes.plot(passes, quality, line, color=CANDIDATE, **style)
    axes.set_xlabel("passes (NFE) a prompt")
    return axes


def draw_threshold(refit: Mapping[str, Any]) -> Figure:
    """Plot the candidate's quality against its number of passes, with one marker per threshold.

    Labels mark the original threshold, the chosen threshold and the reference.
    """
    curve = sorted(refit["curve"], key=lambda point: point["threshold"])

    def paint(canvas: Canvas) -> None:
        axes = _quality_axes(canvas, refit["quality"], curve, ".-", linewidth=1, alpha=0.7)
        axes.axhline(refit["reference"]["quality"], color=REFERENCE, linestyle=":", linewidth=1)
        for name, marker, colour, fill in (
            ("reference", "s", REFERENCE, "none"),
            ("original", "o", CANDIDATE, "none"),
            ("refitted", "D", CANDIDATE, CANDIDATE),
        ):
            axes.plot(
                refit[name]["nfe"],
                refit[name]["quality"],
                marker,
                color=colour,
                markerfacecolor=fill,
                markersize=7.5,
            )
        named = refit["refitted"]
        reach = max(abs(point["nfe"] - named["nfe"]) for point in curve)
        # Also label both ends of the curve, except if the label would overlap the label of the
        # chosen threshold.
        for point in (
            named,
            *(
                end
                for end in (curve[0], curve[-1])
                if abs(end["nfe"] - named["nfe"]) > 0.15 * reach
            ),
        ):
            at = (point["nfe"], point["quality"])
            axes.annotate(
                f"{point['threshold']:g}", at, (5, -12), textcoords="offset points", fontsize=9.5
            )
        axes.margins(x=0.08, y=0.12)

    legend = [
        ("reference square", "reference"),
        ("candidate hollow", "candidate, original"),
        ("candidate diamond", "re-fitted"),
    ]
    reading = "The candidate at each threshold (numbers); the dotted line is the reference's quality, further left is faster."
    description = "; ".join(
        f"{name}: threshold {p['threshold']:g}, quality {as_percent(p['quality'])}, {as_number(p['nfe'], 3)} passes"
        for name, p in ((name, refit[name]) for name in ("reference", "original", "refitted"))
    )
    return draw("Quality against passes", description, 210, paint, reading=reading, legend=legend)


def draw_effort(effort: Mapping[str, Any]) -> Figure:
    """Plot the quality of all variants against their passes, and mark the effort levels."""
    curve, levels = effort["curve"], effort["levels"]

    def paint(canvas: Canvas) -> None:
        axes = _quality_axes(canvas, effort["quality"], curve, "o", markerfacecolor="none")
        # If two levels share a marker, one label shows both names.
        names: dict[tuple[float, float], str] = {}
        for name, point in levels.items():
            at = (point["nfe"], point["quality"])
            names[at] = f"{names[at]}, {name}" if at in names else name
        for at, name in names.items():
            axes.plot(*at, "D", color=CANDIDATE, markersize=6.5)
            axes.annotate(name, at, (5, -13), textcoords="offset points", fontsize=9.5)
        if max(point["nfe"] for point in curve) > LONG_AXIS * levels["high"]["nfe"]:
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axes.xaxis.set_minor_formatter("")
        axes.margins(x=0.12, y=0.14)

    legend = [("candidate diamond", "levels"), ("candidate hollow", "other loops")]
    description = "; ".join(
        f"{name}: quality {as_percent(p['quality'])}, {as_number(p['nfe'], 3)} passes"
        for name, p in levels.items()
    )
    return draw(
        "Effort levels",
        description,
        210,
        paint,
        reading="Up and to the left is better.",
        legend=legend,
    )


@dataclass(frozen=True)
class TradePoint:
    """A bundle in the figure of ``draw_trade``.

    ``at`` is the bundle's size or time. ``increase`` is the relative increase of the loss from the
    source to the bundle. ``interval`` is the 95% interval of ``increase``, or ``None`` if the
    interval is unknown.
    """

    name: str
    at: float
    increase: float
    interval: Sequence[float | None] | None
    is_reference: bool = False


def draw_trade(title: str, quantity: str, points: Sequence[TradePoint]) -> Figure:
    """Plot the increase of each bundle's loss against the bundle's size or time.

    ``quantity`` is the label of the horizontal axis.
    """

    def paint(canvas: Canvas) -> None:
        axes = canvas.subplots()
        axes.set_title("Increase of the masked cross-entropy, %")
        axes.axhline(0, color=MUTED, linewidth=0.8)
        for point in points:
            colour, fill = (REFERENCE, "none") if point.is_reference else (CANDIDATE, CANDIDATE)
            low, high = with_nan(point.interval or (None, None))
            axes.vlines(point.at, 100 * low, 100 * high, color=colour, linewidth=1.4)
            axes.plot(
                point.at,
                100 * point.increase,
                "o",
                color=colour,
                markerfacecolor=fill,
                markersize=6,
            )
            axes.annotate(
                label_of(point.name),
                (point.at, 100 * point.increase),
                (6, 4),
                textcoords="offset points",
                fontsize=9.5,
            )
        axes.set_xlim(0, 1.25 * max(point.at for point in points))
        axes.margins(y=0.15)
        axes.set_xlabel(quantity)

    reading = "Down and to the left is better; the lines are 95% intervals; each line is for one bundle against the reference."
    legend = [("candidate", "judged")] + (
        [("reference hollow", "full precision")] if points[0].is_reference else []
    )
    values = ", ".join(
        f"{point.name}: {as_number(point.at, 3)}, {as_change(point.increase)}" for point in points
    )
    return draw(
        title, f"{title}, {quantity}: {values}.", 210, paint, reading=reading, legend=legend
    )
