"""Chooses a bundle's default decoding loop from the measurements of the bundle's effort levels.

A loop is acceptable if its quality is at least the quality of the loop that commits one token per
pass. Both qualities are measured on the same samples. The acceptable loop that needs the fewest
passes becomes the default loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from dlm_export.bundle.default_loop import (
    FEWEST_SAMPLES,
    FITTED,
    PUBLISHED,
    published,
    published_of,
    published_presets,
)
from dlm_export.judging.tuning.effort_levels import LevelPoint, Levels, fastest
from dlm_runtime import Policy

VERIFIED = "it generates the text of greedy decoding, which no effort level changes"


def with_levels(manifest: Mapping[str, Any], levels: Levels) -> dict[str, Any]:
    """Return a copy of the manifest with effort levels and with a new default loop.

    The default loop is one of the variants in ``levels.curve``. Earlier levels are replaced.
    """
    own = Policy(**manifest["loop"]["presets"][levels.preset])
    loops = {
        name: own.with_fields(point.changes).as_dict() for name, point in levels.levels.items()
    }
    loop = manifest["loop"] | {"effort": {"preset": levels.preset, "levels": loops}}
    return _with_fitted({**manifest, "loop": loop, "effort": asdict(levels)}, levels)


def _with_fitted(manifest: Mapping[str, Any], levels: Levels) -> dict[str, Any]:
    """Return a copy of the manifest whose default loop is the result of ``fastest``.

    If ``fastest`` returns ``None``, the default loop is the published loop. A published loop that
    verifies drafts also stays the default loop, with the block length that was fitted to it, because
    its text does not depend on a threshold.
    """
    name, presets = published_of(manifest), published_presets(manifest)
    point = fastest(levels)
    if Policy(**presets[name]).commit == "verify":
        record = manifest.get("default_loop") or {}
        if not record.get("changes"):
            record = published(name, f"{PUBLISHED}; {VERIFIED}")
    elif point is None:
        record = published(name, f"{PUBLISHED}; {_why_not(levels)}")
    else:
        record = {
            "published": name,
            "preset": levels.preset,
            "changes": point.changes,
            "reason": _evidence(levels, point),
        }
    return with_record(manifest, record)


def with_record(manifest: Mapping[str, Any], record: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of the manifest with the default loop of ``record``, its entry in the manifest."""
    presets = published_presets(manifest)
    if record["changes"]:
        fields = Policy(**presets[record["preset"]]).with_fields(record["changes"])
        presets[FITTED] = fields.as_dict()
    default = FITTED if record["changes"] else record["preset"]
    loop = manifest["loop"] | {"presets": presets, "default_preset": default}
    return {**manifest, "loop": loop, "default_loop": record}


def _evidence(levels: Levels, point: LevelPoint) -> str:
    kind = "right answers" if levels.quality == "task" else "agreement with one token a pass"
    careful, held = levels.careful, levels.held_out
    time = f" and {point.ms:.2f} ms" if levels.by == "time" else ""
    found = (
        f"on {levels.samples} samples, {point.quality:.1%} {kind} in {point.nfe:.2f} passes{time}; "
        f"one token a pass gets {careful.quality:.1%} in {careful.nfe:.2f}"
    )
    if held is None:
        return found
    low, high = held.interval
    return (
        f"{found}. On {held.samples} held-out samples, {held.quality:.1%} ({low:.1%} to {high:.1%}) in "
        f"{held.nfe:.2f} passes; one token a pass gets {held.careful:.1%}"
    )


def _why_not(levels: Levels) -> str:
    if levels.samples < FEWEST_SAMPLES:
        return f"{levels.samples} samples are too few to fit another"
    if levels.careful.quality == 0:
        return f"on {levels.samples} samples, one token a pass gets nothing right"
    return f"on {levels.samples} samples, no faster loop is as good as one token a pass"
