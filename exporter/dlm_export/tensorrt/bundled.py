"""Engines of a bundle that stands: one more, or one less, under its lock and by renames.

A kill at any moment leaves a bundle that opens: no manifest ever lists an engine that is not there
or is another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dlm_export.bundle.folder import changing, sha256, write_manifest
from dlm_export.graph import PLAIN_OPSET
from dlm_export.outputs import OutputError, TakenError, replaced
from dlm_export.progress import Progress
from dlm_export.targets import Target, recipe_for, sm_text
from dlm_export.tensorrt.builders import deferred_command, find_builder
from dlm_export.tensorrt.engine import (
    Built,
    build_engine,
    check_device_graph,
    engine_file,
    with_engine,
    without_engine,
)
from dlm_export.tensorrt.estimate import BuilderError, EngineError, EngineOptions


def add_engine(
    folder: Path,
    manifest: dict[str, Any],
    target: Target,
    options: EngineOptions,
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> Built:
    """Build an engine into an existing bundle. ``manifest`` is the bundle's, checked by the
    runtime.

    The engine and then the manifest are renamed into place; until then the bundle is as it was. An
    engine that is replaced goes from the manifest first. Raises EngineError, AuditError,
    TargetError, OutputError.
    """
    entries = manifest["loop"].get("engines", {})
    if target.name in entries and not force:
        raise TakenError(
            f"{folder}: has an engine for {target.name}. Pass --force to build it again."
        )
    check_device_graph(folder, manifest, target)
    _check_precision(target, manifest["precision"])
    builder = find_builder(target, options)
    if builder is None:
        if target.needs_plain_graph and manifest["opset"] > PLAIN_OPSET:
            raise EngineError(
                f"{folder}: holds a graph of opset {manifest['opset']}, which JetPack 6's TensorRT 10.3 cannot parse. "
                f"Build a bundle with --target {target.name}; JetPack 7.2 takes this one, on the device: "
                f"`{deferred_command(folder, target)}`."
            )
        raise BuilderError(
            f"an engine for {target.name} (SM {sm_text(target.sm or 0)}) is built on the device: copy the bundle there and run "
            f"`{deferred_command(folder, target)}`. There, TensorRT {target.tensorrt} is needed."
        )
    name = engine_file(target)
    with _changing(folder / name, manifest):
        others = {file: entry for file, entry in manifest["files"].items() if file != name}
        with replaced(folder / name) as staged:
            built = build_engine(
                folder, manifest, manifest["files"], target, builder, options, staged, progress
            )
            made = {"bytes": staged.stat().st_size, "sha256": sha256(staged)}
            if target.name in entries:
                write_manifest(folder, without_engine(manifest, target.name), others)
        targets = list(dict.fromkeys([*manifest["targets"], target.name]))
        write_manifest(
            folder, with_engine(manifest, built) | {"targets": targets}, others | {name: made}
        )
    return built


def remove_engine(folder: Path, manifest: dict[str, Any], target: Target) -> int:
    """Take an engine out of a bundle; returns the bytes that its file had. Raises EngineError,
    OutputError.
    """
    entries = manifest["loop"].get("engines", {})
    if target.name not in entries:
        raise EngineError(
            f"{folder}: has no engine for {target.name}, only for {', '.join(entries) or 'none'}"
        )
    path = folder / entries[target.name]["file"]
    with _changing(path, manifest):
        size = path.stat().st_size if path.is_file() else 0
        files = {
            name: entry for name, entry in manifest["files"].items() if name != engine_file(target)
        }
        write_manifest(folder, without_engine(manifest, target.name), files)
        path.unlink(missing_ok=True)
    return size


@contextmanager
def _changing(path: Path, manifest: Mapping[str, Any]) -> Iterator[None]:
    """``changing`` for a bundle's engine ``path``, whose folder is there meanwhile."""
    folder = path.parent.parent
    with changing(folder, manifest, path.relative_to(folder).as_posix()):
        if path.parent.is_symlink():
            raise OutputError(
                f"{path.parent}: a symbolic link, which may lead out of the bundle: nothing is written there"
            )
        path.parent.mkdir(exist_ok=True)
        for left in path.parent.glob("*.engine.new"):  # by a kill: who makes one holds the lock
            left.unlink()
        try:
            yield
        finally:
            if not any(path.parent.iterdir()):
                path.parent.rmdir()


def _check_precision(target: Target, precision: Mapping[str, Any]) -> None:
    """TargetError if a bundle's precision is nothing that ``target`` runs."""
    if "layers" in precision:
        target.check_layers(precision["layers"])
    else:
        recipe_for([target], precision["name"])
