"""Reads and writes the files with a bundle's measured accuracy: accuracy.json and report.html."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dlm_export.bundle.manifest import read_manifest
from dlm_export.judging.accuracy.verdict import Judgement
from dlm_export.judging.report.page import (
    ACCURACY_FILE,
    REPORT_FILE,
    require_matplotlib,
    write_report,
)
from dlm_export.outputs import TakenError, claimed_file
from dlm_runtime.errors import BundleError
from dlm_runtime.files import read_object
from dlm_runtime.manifest import MANIFEST_FILE

# The maximum size of accuracy.json in bytes.
_MOST_BYTES = 12 << 20


def recorded(bundle: Path) -> dict[str, Any]:
    """Read a bundle's accuracy.json. Returns {} if the file does not exist. Raises BundleError."""
    path = bundle / ACCURACY_FILE
    return read_object(path, _MOST_BYTES, BundleError) if path.exists() else {}


@contextmanager
def claimed_files(folder: Path, *, force: bool) -> Iterator[tuple[Path, Path]]:
    """Prepare to write accuracy.json and report.html in ``folder``, and yield two temporary paths.

    Pass the yielded paths to ``write_files``. If the ``with`` block succeeds, the files are moved
    into ``folder``.

    Raises TakenError if ``folder`` is a bundle, because the files of a bundle must not change.
    Raises ReportError if matplotlib is missing. Also raises the errors of ``outputs.claimed``.
    """
    if (folder / MANIFEST_FILE).exists():
        raise TakenError(
            f"{folder} is a bundle, whose files must not change. Choose another folder for the report."
        )
    require_matplotlib()
    with (
        claimed_file(folder / ACCURACY_FILE, force=force) as accuracy,
        claimed_file(folder / REPORT_FILE, force=force) as report,
    ):
        yield accuracy, report


def write_files(paths: tuple[Path, Path], bundle: Path, judgement: Judgement) -> None:
    """Write accuracy.json and report.html for a new judgement of ``bundle``.

    The new accuracy.json contains the new judgement instead of the bundle's old judgement. The
    function copies all other entries from the bundle's accuracy.json.
    """
    manifest = read_manifest(bundle, check_hashes=False)
    accuracy = recorded(bundle) | {"judgement": judgement.as_dict()}
    paths[0].write_text(json.dumps(accuracy, indent=1, allow_nan=False) + "\n")
    sizes = {name: entry["bytes"] for name, entry in manifest["files"].items()}
    write_report(paths[1], manifest, accuracy, sizes, judgement.speed)
