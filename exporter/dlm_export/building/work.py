"""Manages the working folder of a build, which keeps intermediate results for later builds.

The folder contains calibration states (canvases on which the build observes the inputs of layers).
It also contains solved weights (weights that a solver has rounded). The file ``work.json`` records
the origin of the states: the hashes of the checkpoint's files and of the data, and the sampling
options. Builds of the same checkpoint in different precisions use the same states. Each precision
needs its own solved weights.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from dlm_export.building.memory import activation_bytes
from dlm_export.building.request import Job
from dlm_export.bundle.folder import sha256
from dlm_export.outputs import replaced
from dlm_export.progress import Stages
from dlm_export.quantising.samples import CALIBRATION_FILE
from dlm_export.quantising.solved import Solved
from dlm_export.sources import Source
from dlm_export.workplace import Workplace, threads_for
from dlm_runtime.errors import DlmError, ExitCode
from dlm_runtime.files import read_object

KEY_FILE = "work.json"
_MOST_BYTES = 12 << 20


class ResumeError(DlmError):
    """Raised if the folder of ``--resume`` belongs to a different build, or has unknown files."""

    exit_code = ExitCode.WRONG_INPUT


@contextmanager
def opened(job: Job, staged: Path, stages: Stages) -> Iterator[Workplace]:
    """Open the working folder while the ``with`` block runs, and yield the build's resources.

    The folder of ``--resume`` remains after the build. Without that option, the folder is
    temporary.

    Raises ResumeError if the folder belongs to a different build. Raises CalibrationError if the
    files in the folder are damaged. Raises MemoryLimitError if the build needs more memory than the
    limit.
    """
    options = job.request.options
    kept = options.resume
    if kept is None:
        folder = staged.with_name(f"{staged.name}.work")
    else:
        with stages.stage("hash checkpoint", 1) as advance:
            _claim(kept, _key(job))
            advance()
        folder = kept
    folder.mkdir(parents=True, exist_ok=True)
    states = None if kept is None else folder / "states.npz"
    solved = folder / "solved" if kept is None else folder / "solved" / _solving(job)
    if kept is not None and solved.exists():
        _check_solved(solved, stages)
    with threads_for(job.source.network.largest_matrix()):
        yield Workplace(job.request.device, activation_bytes(job), folder, solved, states)
    if kept is None:
        shutil.rmtree(folder)


def _check_solved(folder: Path, stages: Stages) -> None:
    """Check that weights that an earlier build rounded can be read. Raises CalibrationError."""
    solved = Solved(folder)
    layers = list(solved)
    if layers:
        with stages.stage("check finished layers", len(layers)) as advance:
            for layer in layers:
                solved[layer]
                advance()


def _claim(folder: Path, key: dict[str, Any]) -> None:
    """Mark the folder as the working folder of the build that ``key`` describes.

    Raises ResumeError if the folder belongs to a different build, or contains unknown files.
    """
    path = folder / KEY_FILE
    if not path.exists():
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ResumeError(
                f"--resume {folder}: is not empty, but has no {KEY_FILE}: name a new or an empty folder"
            )
        folder.mkdir(parents=True, exist_ok=True)
        with replaced(path) as new:
            new.write_text(json.dumps(key, indent=1) + "\n", encoding="utf-8")
        return
    found = read_object(path, _MOST_BYTES, ResumeError)
    for name, value in key.items():
        theirs = found.get(name)
        if theirs == value:
            continue
        if name == "checkpoint" and isinstance(theirs, dict):
            changed = sorted(
                file for file in value.keys() | theirs.keys() if value.get(file) != theirs.get(file)
            )
            what = f"{changed[0]} now has SHA-256 {value.get(changed[0])}, but had {theirs.get(changed[0])}"
            raise ResumeError(
                f"--resume {folder}: the checkpoint has changed since: {what}. Remove the folder, or name another one."
            )
        raise ResumeError(
            f"--resume {folder}: belongs to another build: its {name.replace('_', ' ')} is different. Name another folder."
        )


def _key(job: Job) -> dict[str, Any]:
    """Collect everything on which calibration states depend: options, and hashes of files."""
    options, source = job.request.options, job.source
    calibration = asdict(options.quantise.calibration)
    data = calibration.pop("data") or source.path / CALIBRATION_FILE
    patterns = ("*.json", "*.safetensors", "*.onnx", "*.data", "*/adapter_*")
    files = sorted(
        file
        for folder in (source.path, *source.adapters)
        for pattern in patterns
        for file in folder.glob(pattern)
    )
    return {
        "producer": metadata.version("dlm-export"),
        "checkpoint": {_name(file, source): sha256(file) for file in files},
        "data": sha256(data) if data.is_file() else None,
        "calibration": calibration | {"preset": job.preset},
        "network": _digest(source.network.as_dict()),
    }


def _name(file: Path, source: Source) -> str:
    return (file.relative_to(source.path) if file.is_relative_to(source.path) else file).as_posix()


def _solving(job: Job) -> str:
    """Return a hash of the settings that affect how a solver rounds weights.

    Settings that also affect the calibration states are not included.
    """
    options, network = job.request.options.quantise, job.source.network
    form = (
        [options.min_tokens_per_expert, network.joins_experts(job.request.form)]
        if network.mixtures()
        else []
    )
    recipe = None if job.request.recipe is None else job.request.recipe.as_dict()
    formats = None if job.formats is None else dict(job.formats)
    return _digest([recipe, formats, job.base, options.calibrator, *form])


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
