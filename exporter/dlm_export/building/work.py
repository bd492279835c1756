"""What a build keeps while it works: calibration states and solved weights, in a folder that a
later build may take up.

Such a folder says what its states were made of, by hashes: the checkpoint's files, the data, and
how they were drawn. Builds of one checkpoint in several precisions share it; what each has solved
lies apart.
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
from dlm_export.workplace import Workplace, threads_for
from dlm_runtime.errors import DlmError, ExitCode
from dlm_runtime.files import read_object

KEY_FILE = "work.json"
_MOST_BYTES = 12 << 20


class ResumeError(DlmError):
    """A folder of finished stages that do not belong to this build."""

    exit_code = ExitCode.WRONG_INPUT


@contextmanager
def opened(job: Job, staged: Path, stages: Stages) -> Iterator[Workplace]:
    """The place to work in: the folder that ``--resume`` names, which stays, or one beside the
    unfinished bundle, which goes.

    Raises ResumeError for a folder of another build, CalibrationError for one with damaged files,
    MemoryLimitError.
    """
    kept = job.request.options.resume
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
    """Read what an earlier build has solved. Raises CalibrationError for a damaged file."""
    solved = Solved(folder)
    layers = list(solved)
    if layers:
        with stages.stage("check finished layers", len(layers)) as advance:
            for layer in layers:
                solved[layer]
                advance()


def _claim(folder: Path, key: dict[str, Any]) -> None:
    """Make the folder this build's. Raises ResumeError if it is another's or no build's."""
    path = folder / KEY_FILE
    if not path.exists():
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ResumeError(
                f"--resume {folder}: holds something, but no {KEY_FILE}: name a new folder, or an empty one"
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
            what = f"its {changed[0]} has the SHA-256 {value.get(changed[0])}, and had {theirs.get(changed[0])}"
            raise ResumeError(
                f"--resume {folder}: the checkpoint has changed since: {what}. Remove the folder, or name another one."
            )
        raise ResumeError(
            f"--resume {folder}: belongs to another build: its {name.replace('_', ' ')} is not this one's. Name another folder."
        )


def _key(job: Job) -> dict[str, Any]:
    """What calibration states depend on."""
    options, source = job.request.options, job.source
    calibration = asdict(options.quantise.calibration)
    data = calibration.pop("data") or source.path / CALIBRATION_FILE
    files = sorted(
        file
        for pattern in ("*.json", "*.safetensors", "*.onnx", "*.data")
        for file in source.path.glob(pattern)
    )
    return {
        "producer": metadata.version("dlm-export"),
        "checkpoint": {file.name: sha256(file) for file in files},
        "data": sha256(data) if data.is_file() else None,
        "calibration": calibration | {"preset": job.preset},
        "network": _digest(source.network.as_dict()),
    }


def _solving(job: Job) -> str:
    """A digest of what solved layers depend on beside the states."""
    assert job.request.recipe is not None
    assert job.formats is not None
    options = job.request.options.quantise
    form = (
        [options.min_tokens_per_expert, job.request.on_gpu] if job.source.network.mixtures() else []
    )
    return _digest(
        [job.request.recipe.as_dict(), dict(job.formats), job.base, options.calibrator, *form]
    )


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
