"""Writes report.html, a page that shows how much accuracy a quantised bundle loses.

The module fills the template ``report.html.jinja`` with values from the manifest and accuracy.json,
and with the figures of ``figures.py``. The page loads no other files and runs no scripts. The
page's colours depend on the browser's light or dark mode. The same results always give a page with
the same bytes.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from dlm_calibration.metrics import direction, wilson_interval
from dlm_calibration.precisions import HIGH
from dlm_export import outputs
from dlm_export.charts import numbers
from dlm_export.charts.numbers import FORMS, as_interval, finite, printable
from dlm_export.judging.report import cost, figures
from dlm_runtime.errors import DlmError

ACCURACY_FILE, REPORT_FILE = "accuracy.json", "report.html"
TEMPLATE = "report.html.jinja"
FIGURE_LAYERS = 14  # maximum number of layers in a figure
# The maximum number of layers in a table. The limit is needed because a network with experts may
# contain thousands of layers.
TABLE_LAYERS = 400
MAP_ROWS = 40  # maximum number of rows in the map of formats
SAMPLE_CHARACTERS = 1500  # number of characters after which generated texts are cut off


class ReportError(DlmError):
    """Raised if a report cannot be drawn or written."""


def require_matplotlib() -> None:
    """Raise ReportError if matplotlib is missing. Call this function before long work starts."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as err:
        raise ReportError(
            "report.html needs matplotlib: pip install 'dlm-export[report]', or omit the report."
        ) from err


def write_report(
    path: Path,
    manifest: Mapping[str, Any],
    accuracy: Mapping[str, Any],
    files: Mapping[str, int],
    speed: Mapping[str, Any] | None = None,
) -> None:
    """Write the report of one bundle.

    Args:
        path: The file to write or replace.
        manifest: The bundle's manifest.
        accuracy: The contents of accuracy.json. Each of the entries ``judgement``, ``calibration``
            and ``parity`` may be missing or ``None``.
        files: Maps each file of the bundle to its size in bytes.
        speed: ``Judgement.speed``, or ``None`` if the speed was not measured.

    Raises:
        ReportError: matplotlib is missing, ``accuracy`` lacks a value, or the file cannot be
            written.
    """
    write_page(path, TEMPLATE, lambda: _context(manifest, accuracy, files) | {"speed": speed})


def write_page(path: Path, template: str, make_context: Callable[[], Mapping[str, Any]]) -> None:
    """Fill ``template`` with the result of ``make_context``, and write the page to ``path``.

    Raises ReportError if a value is missing, or if the file cannot be written.
    """
    from jinja2 import UndefinedError

    require_matplotlib()
    try:
        html = _render(template, make_context())
    except (
        AttributeError,
        KeyError,
        TypeError,
        ValueError,
        UndefinedError,
    ) as err:  # the user may have edited accuracy.json
        raise ReportError(
            f"{path}: the results lack a value that the report shows ({err}). Evaluate again with this version of dlm-export."
        ) from err
    try:
        with outputs.replaced(path) as new:
            new.write_text(html, encoding="utf-8")
    except OSError as err:
        raise ReportError(f"{path}: cannot write the report ({err.strerror})") from err


def _context(
    manifest: Mapping[str, Any], accuracy: Mapping[str, Any], files: Mapping[str, int]
) -> dict[str, Any]:
    """Return the template's values. A section without results has the value ``None``."""
    judgement, calibration = accuracy.get("judgement"), accuracy.get("calibration")
    precision = manifest["precision"]
    layers = precision.get("layers") or {}
    kept = [layer for layer, name in layers.items() if name == HIGH] + (
        precision.get("high_precision") or []
    )
    threshold = (judgement or {}).get("threshold") or precision.get("threshold")
    buckets = judgement["buckets"] if judgement else []
    frontier = judgement["frontier"] if judgement else None
    bins = [] if frontier is None else frontier["buckets"]
    flip_rates = [row["flips"] / row["committed"] for row in bins if row["committed"]]
    worse, better = ([row for row in buckets if direction(row) == way] for way in (1, -1))
    sensitive = sorted((judgement or {}).get("layers") or [], key=figures.sensitivity, reverse=True)
    drifting = sorted(
        (calibration or {}).get("layers") or [],
        key=lambda row: finite(row["drift"], 0.0),
        reverse=True,
    )
    return {
        "manifest": manifest,
        "precision": precision,
        "judgement": judgement,
        "speculation": (judgement or {}).get("speculation"),
        "cost": None if judgement is None else cost.sentence(judgement),
        "worse": len(worse),
        "better": len(better),
        "calibration": calibration,
        "parity": accuracy.get("parity"),
        "threshold": threshold,
        "files": sorted(files.items(), key=lambda item: (-item[1], item[0])),
        "total_bytes": sum(files.values()),
        "recipe": flatten(precision.get("recipe") or {}),
        "layer_map": layer_map({layer: name for layer, name in layers.items() if name != HIGH}),
        "high_precision": grouped(kept),
        "worst_bucket": max(
            worse, key=lambda row: finite(row["ce_increase"], math.inf), default=None
        ),
        "worst_flip_rate": max(flip_rates, default=0.0),
        "sensitive": sensitive,
        "drifting": drifting,
        "experts": [_reached(row) for row in (calibration or {}).get("experts") or []],
        "map_rows": MAP_ROWS,
        "table_layers": TABLE_LAYERS,
        "figure_layers": FIGURE_LAYERS,
        "loss_figure": figures.draw_loss(judgement) if judgement and judgement["buckets"] else None,
        "drift_figure": figures.draw_drift(drifting[:FIGURE_LAYERS]) if drifting else None,
        "sensitivity_figure": figures.draw_sensitivity(sensitive[:FIGURE_LAYERS])
        if sensitive
        else None,
        "nfe_figure": figures.draw_nfe(judgement)
        if judgement and judgement["free_running"]
        else None,
        "effort": manifest.get("effort"),
        "effort_figure": figures.draw_effort(manifest["effort"])
        if manifest.get("effort")
        else None,
        "threshold_figure": figures.draw_threshold(threshold)
        if threshold and threshold["curve"]
        else None,
    }


EXPERTS_NAMED = 12  # maximum number of experts per mixture that the page lists by index


def _reached(row: Mapping[str, Any]) -> dict[str, Any]:
    """Describe how many calibration tokens the experts of a mixture received."""
    counts = sorted(row["tokens"])
    few = [expert for expert in row["few"] if expert not in row["never"]]
    median = counts[len(counts) // 2]
    return {"layer": row["layer"], "count": len(counts), "least": counts[0], "median": median} | {
        name: ", ".join(map(str, experts[:EXPERTS_NAMED]))
        + f" and {len(experts) - EXPERTS_NAMED} more" * (len(experts) > EXPERTS_NAMED)
        for name, experts in (("never", row["never"]), ("few", few))
    }


def _render(template: str, context: Mapping[str, Any]) -> str:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("dlm_export.judging.report", ""),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        {name.removeprefix("as_"): form for name, form in FORMS.items()},
        interval=as_interval,
        compared=compared,
        clipped=clipped,
        counted=cost.counted,
        score_interval=lambda share, count: wilson_interval(share, count),
    )
    return environment.get_template(template).render(context).lstrip()


def _shown(value: object) -> object:
    """Return a value's text. ``None`` becomes a dash, and unsafe characters are replaced."""
    if value is None:
        return numbers.MISSING
    # Do not change a Markup object, because it contains HTML. Markup is a subclass of str.
    return printable(value) if type(value) is str else value


def flatten(recipe: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Convert nested data to a flat list, in the original order.

    Each entry of the list consists of a key such as "solver.name", and a value as JSON text.
    """
    rows: list[tuple[str, str]] = []
    for key, value in recipe.items():
        if isinstance(value, Mapping) and value:
            rows += flatten(value, f"{prefix}{key}.")
        else:
            rows.append((f"{prefix}{key}", json.dumps(value, ensure_ascii=False, default=str)))
    return rows


def _block_and_role(layer: str) -> tuple[int | None, str]:
    """Split ``blocks.3.mlp.up`` into 3 and ``blocks.*.mlp.up``. Other layers have no index."""
    match = re.fullmatch(r"(.*?\.)?(0|[1-9]\d{0,5})(\..+)?", layer, re.ASCII | re.DOTALL)
    return (int(match[2]), f"{match[1] or ''}*{match[3] or ''}") if match else (None, layer)


def grouped(layers: Iterable[str]) -> list[tuple[str, int]]:
    """Replace the block index in each path by ``*``, and count how often each new path occurs."""
    return list(Counter(_block_and_role(layer)[1] for layer in layers).items())


def layer_map(layers: Mapping[str, str]) -> dict[str, Any]:
    """Arrange the formats of all layers as a map: rows are roles, columns are blocks.

    A block is a transformer block. A role is, for instance, ``blocks.*.mlp.up``. The result
    contains three keys:

    - ``formats``: each format with its number of layers.
    - ``blocks``: the number of blocks.
    - ``rows``: a list with one dict per role. ``role`` is the name of the role. ``cells`` contains a
      pair for each block: the index of the block, and the index of the layer's format in
      ``formats``. The second index is ``None`` if the layer is not quantised. A role outside the
      blocks has a single cell, whose first index is ``None``. ``summary`` contains the number of
      layers in each format.
    """
    formats = Counter(layers.values()).most_common()
    index = {name: i for i, (name, _) in enumerate(formats)}
    roles: dict[str, dict[int | None, str]] = {}
    for layer, name in layers.items():
        block, role = _block_and_role(layer)
        roles.setdefault(role, {})[block] = name
    blocks = sorted({block for cells in roles.values() for block in cells if block is not None})
    rows = []
    for role, cells in roles.items():
        columns = [None] if None in cells else blocks
        shown = [(block, index.get(cells.get(block, ""))) for block in columns]
        rows.append(
            {"role": role, "cells": shown, "summary": Counter(cells.values()).most_common()}
        )
    return {"formats": formats, "blocks": len(blocks), "rows": rows}


def clipped(text: str | None) -> str | None:
    """Cut off a text after ``SAMPLE_CHARACTERS`` characters."""
    return (
        text
        if text is None or len(text) <= SAMPLE_CHARACTERS
        else f"{text[:SAMPLE_CHARACTERS]} […]"
    )


def compared(ours: str | None, theirs: str | None) -> list[tuple[bool, str]] | None:
    """Mark the parts of the text ``ours`` that differ from the text ``theirs``.

    Returns a list of pairs of a flag and a part of ``ours``, in the order of the text. The flag is
    True if ``theirs`` does not contain the part at the corresponding place. If ``ours`` is
    ``None``, the function returns ``None``.
    """
    if ours is None:
        return None
    pieces, others = (
        re.findall(r"\s+|\w+|[^\w\s]", clipped(text) or "") for text in (ours, theirs or ours)
    )
    # Do not pass autojunk=False, because difflib would then take minutes for texts with many
    # repetitions.
    matcher = difflib.SequenceMatcher(None, pieces, others)
    return [
        (tag != "equal", "".join(pieces[i:j])) for tag, i, j, _, _ in matcher.get_opcodes() if i < j
    ]
