"""The manifest's record of the default loop: the loop of a request that names none.

A new bundle runs the adaptive loop published for its family. ``dlm-export effort`` may fit another
one; if it is not a published preset, the presets get it as ``fitted``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FEWEST_SAMPLES = 32
"""With fewer samples, equal quality may hide a loss of a tenth."""
FITTED = "fitted"
"""Name of the preset that holds the default loop, if no published preset is that loop."""
PUBLISHED = "the adaptive loop published for this family"
NOT_FITTED = f"{PUBLISHED}; `dlm-export effort` fits one to the bundle"


def published(preset: str, reason: str = NOT_FITTED) -> dict[str, Any]:
    """The manifest's ``default_loop`` for a published preset."""
    return {"published": preset, "preset": preset, "changes": {}, "reason": reason}


def published_of(manifest: Mapping[str, Any]) -> str:
    """The published preset that is the default if nothing is fitted."""
    record = manifest.get("default_loop")
    name: str = manifest["loop"]["default_preset"] if record is None else record["published"]
    return name


def default_loop(manifest: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The default loop as a published preset and the fields that differ from it."""
    record = manifest.get("default_loop")
    if record is None:
        return manifest["loop"]["default_preset"], {}
    return record["preset"], dict(record["changes"])


def published_presets(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The presets without ``fitted``, which holds for one bundle alone."""
    return {name: each for name, each in manifest["loop"]["presets"].items() if name != FITTED}
