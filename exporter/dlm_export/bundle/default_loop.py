"""Reads and writes the manifest's entry for the default loop.

The default loop is the decoding loop that runs if a request names no preset. In a new bundle, the
default loop is the loop that was published for the model family. ``dlm-export effort`` can
fit a different loop to the bundle. If the fitted loop is not one of the published presets, the loop
is stored as a preset named ``fitted``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FEWEST_SAMPLES = 32
"""Fitting a default loop needs at least this many samples.

With fewer samples, a fitted loop may seem as good as the published loop, although its quality is a
tenth lower.
"""
FITTED = "fitted"
"""Name of the preset that contains a fitted loop."""
PUBLISHED = "the loop published for this family"
NOT_FITTED = f"{PUBLISHED}; `dlm-export effort` fits one to the bundle"


def published(preset: str, reason: str = NOT_FITTED) -> dict[str, Any]:
    """Create the manifest's entry ``default_loop`` for a bundle that runs a published preset."""
    return {"published": preset, "preset": preset, "changes": {}, "reason": reason}


def published_of(manifest: Mapping[str, Any]) -> str:
    """Return the name of the published preset that runs if no loop was fitted to the bundle."""
    record = manifest.get("default_loop")
    name: str = manifest["loop"]["default_preset"] if record is None else record["published"]
    return name


def default_loop(manifest: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return a bundle's default loop: a published preset, and changes of the preset's fields.

    Returns the name of the preset, and a dict with the new values of the changed fields.
    """
    record = manifest.get("default_loop")
    if record is None:
        return manifest["loop"]["default_preset"], {}
    return record["preset"], dict(record["changes"])


def published_presets(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return all presets of a bundle except ``fitted``. Only this bundle can use ``fitted``."""
    return {name: each for name, each in manifest["loop"]["presets"].items() if name != FITTED}
