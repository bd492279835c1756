"""Writes an HTML page that compares the size, accuracy and speed of bundles of one checkpoint.

Each bundle's accuracy.json contains its measured loss of accuracy. The page compares losses only if
they were measured on the same data, with the same denoiser as reference. The caller measures the
speed of all bundles in one run (``bench.side_by_side``). This module does not need torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlm_export.bundle.manifest import network_of, read_manifest
from dlm_export.charts import drawing
from dlm_export.judging.report import cost, figures
from dlm_export.judging.report.figures import TradePoint
from dlm_export.judging.report.page import ACCURACY_FILE, write_page
from dlm_runtime.errors import DlmError, ExitCode

TEMPLATE = "comparison.html.jinja"
SAME_LOSS = (
    # Each bundle's accuracy.json records the loss of the reference. If the recorded losses of two
    # bundles differ by more than this share, the bundles were compared with different references.
    # Smaller differences occur between machines.
    1e-3
)


class ComparisonError(DlmError):
    """Raised if bundles cannot be compared with each other."""

    exit_code = ExitCode.WRONG_INPUT


@dataclass(frozen=True)
class Entry:
    """A bundle that the page compares.

    ``judgement`` is the entry ``judgement`` of the bundle's accuracy.json, or ``None`` if the
    accuracy was not measured.
    """

    folder: Path
    manifest: Mapping[str, Any]
    judgement: Mapping[str, Any] | None

    @property
    def precision(self) -> str:
        return str(self.manifest["precision"]["name"])

    @property
    def bytes(self) -> int:
        """The total size of the bundle's files in bytes."""
        return sum(entry["bytes"] for entry in self.manifest["files"].values())

    @property
    def is_reference(self) -> bool:
        """True if the bundle is in fp32, and is therefore the reference for the other bundles."""
        return self.precision == "fp32"

    def as_dict(self) -> dict[str, Any]:
        """Return the bundle's table row as plain Python objects."""
        j = self.judgement
        overall, free, frontier = (
            j[name] if j else None for name in ("overall", "free_running", "frontier")
        )
        row = {
            "bundle": str(self.folder),
            "precision": self.precision,
            "is_simulated": self.manifest["loop"]["graph"]["simulated"],
            "bytes": self.bytes,
            "samples": j["data"]["samples"] if j else None,
        }
        for name, part, key in (
            ("ce_increase", overall, "ce_increase"),
            ("top1", overall, "top1"),
            ("flip_rate", frontier, "flip_rate"),
            ("exact_match", free, "exact_match"),
            ("nfe_ratio", free, "nfe_ratio"),
            ("right_answers", free["right_answers"] if free else None, "candidate"),
        ):
            row[name] = part[key] if part else None
            row[f"{name}_interval"] = part[f"{key}_interval"] if part else None
        return row


def right_answers(entries: Sequence[Entry]) -> dict[str, list[int]]:
    """Return which answers of each bundle are right: 1 for each right answer, 0 for the others.

    The first entry is the reference, which every build compared its bundle with. Returns {} if the
    data has no answers, or if no text was generated. Two bundles of one precision get their folders
    as names.
    """
    judged = [entry for entry in entries if entry.judgement is not None]
    names = [entry.precision for entry in judged]
    found: dict[str, list[int]] = {}
    for entry in judged:
        assert entry.judgement is not None
        free = entry.judgement["free_running"]
        if free is None or free["right_answers"] is None:
            return {}
        found.setdefault(entry.judgement["reference"], free["right_answers"]["reference_right"])
        is_alone = names.count(entry.precision) == 1
        name = entry.precision if is_alone else f"{entry.precision} ({entry.folder.name})"
        found[name] = free["right_answers"]["candidate_right"]
    return found


def read_entries(folders: Sequence[Path]) -> list[Entry]:
    """Read the manifest and accuracy.json of each bundle in ``folders``.

    Raises BundleError. Raises ComparisonError if two bundles cannot be compared.
    """
    if len(folders) < 2:
        raise ComparisonError(
            "a comparison needs two or more bundles of one checkpoint; a single bundle has report.html"
        )
    entries = [_read(folder) for folder in folders]
    first = entries[0]
    for entry in entries[1:]:
        for what, ours, theirs in (
            (
                "SHA-256 of the checkpoint's config.json",
                _config_sha256(entry),
                _config_sha256(first),
            ),
            ("description of the network", network_of(entry.manifest), network_of(first.manifest)),
        ):
            if ours != theirs:
                raise ComparisonError(
                    f"{entry.folder}: built from another checkpoint than {first.folder}: the {what} differs. "
                    "Compare bundles of one checkpoint."
                )
    judged = [entry for entry in entries if entry.judgement is not None]
    for entry in judged[1:]:
        _check_judged_alike(entry, judged[0])
    return entries


def _read(folder: Path) -> Entry:
    manifest = read_manifest(folder)
    if ACCURACY_FILE not in manifest["files"]:
        return Entry(folder, manifest, None)
    try:
        entry = Entry(
            folder,
            manifest,
            json.loads((folder / ACCURACY_FILE).read_text("utf-8")).get("judgement"),
        )
        if entry.judgement is not None:
            _check_figures(entry)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as err:
        raise ComparisonError(
            f"{folder / ACCURACY_FILE}: not what a build writes ({type(err).__name__}: {err}). Build the bundle again."
        ) from err
    return entry


def _check_figures(entry: Entry) -> None:
    """Raise any error if a value that the page needs is missing or wrong."""
    j, row = entry.judgement, entry.as_dict()
    assert j is not None
    figures_of = {
        name: value
        for name, value in row.items()
        if name not in ("bundle", "precision", "is_simulated", "bytes")
    }
    for name, value in (figures_of | {"reference_ce": j["overall"]["reference_ce"]}).items():
        pair = value if name.endswith("_interval") and value is not None else [value] * 2
        low, high = (0 if number is None else number for number in pair)
        math.fsum((low, high))  # raises an error if ``low`` or ``high`` is not a number
    if not all(isinstance(j[name], dict) for name in ("data", "policy")):
        raise TypeError("data or policy is not an object")
    for right in right_answers([entry]).values():
        if len(right) != j["free_running"]["right_answers"]["prompts"] or set(right) - {0, 1}:
            raise ValueError("right_answers are not 0 or 1 for each prompt")


def _config_sha256(entry: Entry) -> str | None:
    found: str | None = entry.manifest.get("source", {}).get("config_sha256")
    return found


def _check_judged_alike(entry: Entry, other: Entry) -> None:
    ours, theirs = entry.judgement, other.judgement
    assert ours is not None
    assert theirs is not None
    for name in ("data", "policy"):
        differing = [
            f"{key} {ours[name][key]} here, {theirs[name].get(key)} there"
            for key in ours[name]
            if ours[name][key] != theirs[name].get(key)
        ]
        if differing:
            raise ComparisonError(
                f"{entry.folder}: not judged like {other.folder} ({name}: {'; '.join(differing)}). Bundles that were "
                "judged on other samples cannot be compared. Build both with the same --calib, --judged, --calib-preset and "
                "--seed."
            )
    if ours["effort"] != theirs["effort"]:
        raise ComparisonError(
            f"{entry.folder}: judged with --judge {ours['effort']}, and {other.folder} with --judge {theirs['effort']}. Build "
            "both with the same effort."
        )
    losses = [judgement["overall"]["reference_ce"] for judgement in (ours, theirs)]
    if not math.isclose(*losses, rel_tol=SAME_LOSS):
        raise ComparisonError(
            f"{entry.folder}: judged by another denoiser than {other.folder}: the reference's cross-entropy is {losses[0]:.6g} "
            f"there and {losses[1]:.6g} here, on the same data. Compare bundles of one checkpoint."
        )


def rows_of(
    entries: Sequence[Entry], speeds: Sequence[Mapping[str, Any]] | None
) -> list[dict[str, Any]]:
    """Return the rows of the table, one per bundle.

    In each row, ``speed`` is the measured speed from ``speeds``, or ``None``.
    """
    return [
        entry.as_dict() | {"speed": speeds[i] if speeds else None}
        for i, entry in enumerate(entries)
    ]


def write_comparison(
    path: Path,
    entries: Sequence[Entry],
    speeds: Sequence[Mapping[str, Any]] | None = None,
    machine: Mapping[str, Any] | None = None,
) -> None:
    """Write the page that compares ``entries``. Raises ReportError.

    ``speeds`` is the result of ``bench.side_by_side`` for the bundles in ``entries`` on
    ``machine``.
    """

    def make_context() -> dict[str, Any]:
        rows = rows_of(entries, speeds)
        judged = next((entry.judgement for entry in entries if entry.judgement is not None), None)
        mebibytes = [entry.bytes / 2**20 for entry in entries]
        right = right_answers(entries)
        pairs = cost.differences(right)
        return {
            "cost": _cost(entries, right, pairs),
            "pairs": pairs,
            "right": right,
            "manifest": entries[0].manifest,
            "config_sha256": _config_sha256(entries[0]),
            "rows": rows,
            "judgement": judged,
            "machine": machine,
            "is_simulated": any(row["is_simulated"] for row in rows),
            "is_unjudged": any(
                row["ce_increase"] is None and row["precision"] != "fp32" for row in rows
            ),
            "least_bytes": min(row["bytes"] for row in rows),
            "least_ms": min(speed["ms_per_pass"] for speed in speeds) if speeds else None,
            "size_figure": _trade("Loss against size", "MiB, all files", entries, mebibytes),
            "time_figure": _trade(
                "Loss against time",
                "ms a pass",
                entries,
                [speed["ms_per_pass"] for speed in speeds],
            )
            if speeds
            else None,
        }

    write_page(path, TEMPLATE, make_context)


def _cost(
    entries: Sequence[Entry], right: Mapping[str, Sequence[int]], pairs: Sequence[Mapping[str, Any]]
) -> str:
    """Return the sentences with which the page opens."""
    judged = [entry.judgement for entry in entries if entry.judgement is not None]
    if not judged:
        return "Not known: none of these bundles was judged."
    if right:
        told = cost.of_bundles(right, pairs, len(next(iter(right.values()))))
        return told + "".join(cost.loss(judgement) for judgement in judged)
    return " ".join(cost.sentence(judgement) for judgement in judged)


def _trade(
    title: str, quantity: str, entries: Sequence[Entry], at: Sequence[float]
) -> drawing.Figure | None:
    """Plot the increase of loss against ``at``. Returns ``None`` if fewer than two are known."""
    points: list[TradePoint] = []
    for entry, where in zip(entries, at, strict=True):
        row = entry.as_dict()
        if entry.is_reference:
            points.insert(0, TradePoint(entry.precision, where, 0.0, None, is_reference=True))
        elif row["ce_increase"] is not None and math.isfinite(row["ce_increase"]):
            points.append(
                TradePoint(entry.precision, where, row["ce_increase"], row["ce_increase_interval"])
            )
    return figures.draw_trade(title, quantity, points) if len(points) > 1 else None
