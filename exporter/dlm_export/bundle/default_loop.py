"""The default loop of a bundle, which runs if a request names no preset, and its record in the
manifest.

A new bundle runs the adaptive loop that was published for its family. ``dlm-export effort`` may fit
another loop to the bundle. If the fitted loop is not one of the published presets, it is stored as
the preset ``fitted``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FEWEST_SAMPLES = 32
"""Smallest number of samples to fit a default loop on.

With fewer samples, a loop may look as good as the published one although it is a tenth worse.
"""
FITTED = "fitted"
"""Name of the preset that holds the default loop, if that loop is not a published preset."""
PUBLISHED = "the adaptive loop published for this family"
NOT_FITTED = f"{PUBLISHED}; `dlm-export effort` fits one to the bundle"


def published(preset: str, reason: str = NOT_FITTED) -> dict[str, Any]:
    """The manifest's record ``default_loop`` of a bundle whose default is a published preset."""
    return {"published": preset, "preset": preset, "changes": {}, "reason": reason}


def published_of(manifest: Mapping[str, Any]) -> str:
    """The published preset that is the default if no loop was fitted."""
    record = manifest.get("default_loop")
    name: str = manifest["loop"]["default_preset"] if record is None else record["published"]
    return name


def default_loop(manifest: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The default loop: the name of a published preset, and the fields where the loop differs from
    it.
    """
    record = manifest.get("default_loop")
    if record is None:
        return manifest["loop"]["default_preset"], {}
    return record["preset"], dict(record["changes"])


def published_presets(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The presets of a bundle without ``fitted``, which is valid for that bundle alone."""
    return {name: each for name, each in manifest["loop"]["presets"].items() if name != FITTED}
