"""Plots the time or cost per token against canvas length, batch size or parameter count."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from dlm_export import outputs
from dlm_export.charts.drawing import INK, MUTED, RULE, STYLE, WIDTH, with_nan
from dlm_export.charts.numbers import printable
from dlm_export.planning.plan import Plan, PlanError

PLOT_SUFFIXES = (".png", ".svg")


def save_growth(path: Path, growth: Sequence[Mapping[str, Any]], quantity: str, title: str) -> None:
    """Plot ``growth`` to a PNG or SVG file. The plot contains one panel per element of ``growth``.

    Each element of ``growth`` is a ``Growth`` as a dictionary. ``quantity`` is the field of
    ``Point`` to plot. A panel contains one line per target. Missing values are skipped, and a
    target without any value gets no line.
    """
    import matplotlib.style
    from matplotlib import colormaps
    from matplotlib.figure import Figure as Canvas

    # Replace the placeholder colours with shades of grey, because a plot has no style sheet.
    greys = {INK: "#222222", MUTED: "#666666", RULE: "#dddddd"}
    style = {
        key: greys.get(value, value) if isinstance(value, str) else value
        for key, value in STYLE.items()
    }
    with matplotlib.style.context(["default", style | {"svg.hashsalt": title}]):
        canvas = Canvas(figsize=(3 * WIDTH / 72, WIDTH / 72), layout="constrained")
        canvas.suptitle(printable(title), x=0.01, ha="left")
        drawn = [
            target
            for target in growth[0]["lines"]
            if any(any(each["lines"][target]) for each in growth)
        ]
        for axes, each in zip(
            np.atleast_1d(canvas.subplots(1, len(growth), sharey=True)), growth, strict=True
        ):
            places = range(len(each["values"]))
            for number, target in enumerate(drawn):
                values = with_nan(
                    None if point is None else point[quantity] for point in each["lines"][target]
                )
                marker = "osD^v<>ph*"[number // 10 % 10]
                line = ("-", "--", ":", "-.")[number // 10 % 4]
                axes.plot(
                    places,
                    values,
                    marker + line,
                    color=colormaps["tab10"](number % 10),
                    label=target,
                )
            axes.set_title(f"{each['axis']}, {each['denoiser']}")
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axes.set_xticks(places, [str(value) for value in each["values"]], rotation=45)
        canvas.legend(*axes.get_legend_handles_labels(), loc="outside right center", frameon=False)
        canvas.savefig(path, dpi=150)


def claimed_plot(path: Path, *, force: bool) -> AbstractContextManager[Path]:
    """Prepare to write a plot to ``path``, like ``outputs.claimed``.

    Raises PlanError if ``path`` does not end with a suffix in ``PLOT_SUFFIXES``.
    """
    if path.suffix not in PLOT_SUFFIXES:
        raise PlanError(f"--plot {path}: the name must end in {' or '.join(PLOT_SUFFIXES)}")
    return outputs.claimed_file(path, force=force)


def save_plot(path: Path, plan: Plan) -> None:
    """Plot a plan's growth to a path that ``claimed_plot`` returned.

    If the price of every target is known, the plot shows the cost per million tokens. Otherwise,
    the plot shows milliseconds per token. Raises PlanError if there is no value to plot. Raises
    OSError if the file cannot be written.
    """
    growth = [asdict(each) for each in plan.growth if each.values]
    if not any(any(points) for each in growth for points in each["lines"].values()):
        raise PlanError(
            f"--plot {path.name}: no target here has known times, so there is nothing to draw: omit it"
        )
    is_priced = all(target in plan.request.prices for target in growth[0]["lines"])
    quantity, what = (
        ("cost_per_million_tokens", "Cost of a million tokens")
        if is_priced
        else ("ms_per_token", "Milliseconds a token")
    )
    is_calibrated = plan.calibration is not None and plan.calibration["is_used"]
    title = (
        f"{what}, by the targets' limits{' (cpu: as measured)' if is_calibrated else ''}, in the fastest precision that fits; "
        f"block {plan.predictions[0].block_length}, tokens a pass {plan.request.tokens_per_pass[0]:g}"
    )
    save_growth(path, growth, quantity, title)
