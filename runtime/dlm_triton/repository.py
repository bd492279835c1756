"""Writes a bundle as a model of a repository for Triton Inference Server.

A model is a folder of the repository, and each version of the model is a folder in the model's
folder::

    REPOSITORY/NAME/config.pbtxt
    REPOSITORY/NAME/1/bundle/             the bundle, or a symbolic link to it
    REPOSITORY/NAME/1/libtriton_dlm.so
    REPOSITORY/NAME/1/libonnxruntime.so   on a CPU

Triton first looks for a backend's library in the folder of the version. Each version therefore runs
with the library in its own folder.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dlm_runtime
from dlm_export.opening import Opening
from dlm_export.outputs import TakenError, check_outside, claimed, claimed_file
from dlm_runtime.abi import native
from dlm_runtime.errors import EngineError, RequestError

CONFIG = "config.pbtxt"
BACKEND = "dlm"
LIBRARY = "libtriton_dlm.so"
ENGINE_LIBRARY = "libonnxruntime.so"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_BACKEND = re.compile(r'^backend: "([^"]*)"', re.MULTILINE)
_INPUTS = {"TEXT": ("STRING", 1), "MESSAGES": ("STRING", 1), "INPUT_IDS": ("INT32", -1)}
_OUTPUTS = {
    "TEXT": ("STRING", 1),
    "OUTPUT_IDS": ("INT32", -1),
    "NFE": ("INT32", 1),
    "FINISH": ("STRING", 1),
    "PROMPT_TOKENS": ("INT32", 1),
    "COMPLETION_TOKENS": ("INT32", 1),
}


@dataclass(frozen=True)
class Model:
    """How Triton runs a bundle.

    Args:
        name: The name of the model.
        version: The number of the version.
        streams: If True, a request may have several responses.
        links: If True, the repository contains a symbolic link to the bundle, not a copy.
        opening: How the backend opens the bundle.
        max_running, max_waiting: The limits of the scheduler.
    """

    name: str
    version: int = 1
    streams: bool = True
    links: bool = False
    opening: Opening = field(default_factory=Opening)
    max_running: int = 16
    max_waiting: int = 1024

    def config(self) -> str:
        """Return the text of the model's config.pbtxt."""
        settings = {
            "engine": self.opening.engine,
            "provider": self.opening.provider,
            "allow_fallback": int(self.opening.allow_fallback),
            "threads": self.opening.threads,
            "max_running": self.max_running,
            "max_waiting": self.max_waiting,
        }
        lines = [
            "# `dlm-export triton` wrote this file.",
            f'name: "{self.name}"',
            f'backend: "{BACKEND}"',
            "max_batch_size: 0",
            f"model_transaction_policy {{ decoupled: {str(self.streams).lower()} }}",
            *_tensors("input", _INPUTS, " optional: true"),
            *_tensors("output", _OUTPUTS, ""),
            "instance_group [ { kind: KIND_CPU count: 1 } ]",
            "version_policy { latest { num_versions: 1 } }",
            *(
                f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}'
                for key, value in settings.items()
            ),
        ]
        return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Written:
    """The result of ``write``: what it has written.

    Args:
        version: The folder of the version.
        config: The model's config.pbtxt.
        is_config_kept: True if config.pbtxt existed and was not changed.
        size: Number of bytes of the files in the version's folder. Linked files are not counted.
    """

    version: Path
    config: Path
    is_config_kept: bool
    size: int


def write(bundle: Path, repository: Path, model: Model, *, force: bool) -> Written:
    """Write a bundle as a version of a model. The repository may contain other models and versions.

    An existing config.pbtxt is kept, unless ``force`` is True. ``force`` also replaces an existing
    version.

    Raises RequestError, BundleError, EngineError, and the errors of ``outputs.claimed``.
    """
    if not _NAME.fullmatch(model.name):
        raise RequestError(
            f"{model.name!r} cannot name a model: give --name, with letters, digits and . _ - only"
        )
    with dlm_runtime.open(bundle, engine="none") as opened:
        files = _files(model, opened.manifest)
    folder = repository / model.name
    version, config = folder / str(model.version), folder / CONFIG
    check_outside(version, bundle)
    if model.links and version.resolve() in bundle.resolve().parents:
        raise TakenError(
            f"{bundle}: is inside {version}, which would be replaced. Remove --link, or choose another bundle"
        )
    is_kept = config.is_file() and not force
    if is_kept:
        _check_backend(config)
    elif os.path.lexists(config) and (config.is_symlink() or not config.is_file()):
        raise TakenError(
            f"{config}: is not a plain file, so it is not replaced. Remove it, or choose another --name"
        )
    needed = sum(source.stat().st_size for source in files.values())
    if not model.links:
        needed += _size(bundle)
    with claimed(version, force=force, kept_because=_kept_because, needed_bytes=needed) as new:
        new.mkdir()
        if model.links:
            (new / "bundle").symlink_to(bundle.resolve(), target_is_directory=True)
        else:
            shutil.copytree(bundle, new / "bundle")
        for name, source in files.items():
            shutil.copyfile(source, new / name)
    if not is_kept:
        with claimed_file(config, force=force) as new:
            new.write_text(model.config(), encoding="utf-8")
    return Written(version, config, is_kept, _size(version))


def _files(model: Model, manifest: Mapping[str, Any]) -> dict[str, Path]:
    """Return the files that the version needs beside the bundle. Raises EngineError."""
    folders = native.package_folders()
    found = [path for folder in folders if (path := folder / "lib" / LIBRARY).is_file()]
    if not found:
        raise EngineError(
            f"lib/{LIBRARY} is not in {', '.join(map(str, folders))}: reinstall dlm-export"
        )
    files = {LIBRARY: found[0]}
    is_for_gpus = model.opening.engine == "auto" and "device_file" in manifest["loop"]["graph"]
    is_on_gpu = is_for_gpus or model.opening.engine == "tensorrt" or model.opening.provider != "cpu"
    if not is_on_gpu and (engine := native.onnxruntime_library()) is not None:
        files[ENGINE_LIBRARY] = Path(engine)
    return files


def _tensors(kind: str, tensors: dict[str, tuple[str, int]], more: str) -> list[str]:
    return [
        f'{kind} {{ name: "{name}" data_type: TYPE_{of} dims: [ {length} ]{more} }}'
        for name, (of, length) in tensors.items()
    ]


def _check_backend(config: Path) -> None:
    """Raise TakenError if an existing config.pbtxt is for a different backend."""
    found = _BACKEND.search(config.read_text(encoding="utf-8", errors="replace"))
    if found is None or found[1] != BACKEND:
        said = "no backend" if found is None else f'the backend "{found[1]}"'
        raise TakenError(
            f'{config}: exists and has {said}, not "{BACKEND}". Pass --force to replace it, '
            "or choose another --name"
        )


def _kept_because(path: Path) -> str | None:
    """Return the reason why a path must never be replaced, or None."""
    if not path.is_dir() or path.is_symlink():
        return "is not a version of a model"
    known = {"bundle", LIBRARY, ENGINE_LIBRARY}
    others = sorted(each.name for each in path.iterdir() if each.name not in known)
    return f"contains {others[0]!r}, which dlm-export did not write" if others else None


def _size(folder: Path) -> int:
    return sum(
        path.stat().st_size
        for path in folder.rglob("*")
        if path.is_file() and not path.is_symlink()
    )
