"""Adds an engine to an existing bundle, or removes an engine from a bundle.

The bundle is locked during a change, and files are replaced by renaming. At every moment, each
engine that the manifest lists exists and matches its record. The bundle can therefore be opened
even if the process is killed.
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
from dlm_export.targets import Target, check, recipe_for, sm_text
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
    """Build an engine and add it to an existing bundle.

    The function writes the engine and the manifest to temporary files. It then removes an old
    engine of the same target from the manifest. Finally, it renames the new engine file, and then
    the new manifest file.

    Args:
        folder: The bundle.
        manifest: The bundle's manifest, which the runtime has checked.
        target: The device.
        options: Options of the build.
        force: Replace an engine of the same target.
        progress: Receives the stages of the build.

    Raises:
        EngineError, AuditError, TargetError, OutputError: The engine cannot be built or written.
    """
    entries = manifest["loop"].get("engines", {})
    if target.name in entries and not force:
        raise TakenError(
            f"{folder}: has an engine for {target.name}. Pass --force to build it again."
        )
    check_device_graph(folder, manifest, target)
    precision = manifest["precision"]
    if "layers" in precision:
        check([target], precision["layers"].values(), "the bundle")
    else:
        recipe_for([target], precision["name"])
    builder = find_builder(target, options)
    if builder is None:
        if target.needs_plain_graph and manifest["opset"] > PLAIN_OPSET:
            raise EngineError(
                f"{folder}: its graph has opset {manifest['opset']}, which TensorRT 10.3 cannot parse (JetPack 6.1 and 6.2). "
                f"Build a bundle with --target {target.name}; JetPack 7.2 supports this one, on the device: "
                f"`{deferred_command(folder, target, options)}`."
            )
        raise BuilderError(
            f"an engine for {target.name} (SM {sm_text(target.sm or 0)}) is built on the device: copy the bundle there and run "
            f"`{deferred_command(folder, target, options)}`. TensorRT {target.tensorrt} is needed there."
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
    """Remove an engine from a bundle. Returns the size of the engine's file in bytes.

    Raises EngineError, OutputError.
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
    """Lock a bundle like ``changing``, and create the folder for the engine file ``path``."""
    folder = path.parent.parent
    with changing(folder, manifest, path.relative_to(folder).as_posix()):
        if path.parent.is_symlink():
            raise OutputError(
                f"{path.parent}: is a symbolic link, which may lead out of the bundle: not written"
            )
        path.parent.mkdir(exist_ok=True)
        # A process that was killed left this file. No other process uses this file, because this
        # process holds the lock.
        for left in path.parent.glob("*.engine.new"):
            left.unlink()
        try:
            yield
        finally:
            if not any(path.parent.iterdir()):
                path.parent.rmdir()
