"""Writes, changes and replaces a bundle's folder, and records the sizes and hashes of its files."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dlm_export import outputs
from dlm_runtime.manifest import MANIFEST_FILE

_OWN_FILES = re.compile(r"manifest\.json(\.new)?|engines/[^/]+\.engine(\.new)?")
"""Files that a bundle may contain although its manifest does not list them.

These are the manifest itself, and files that a killed ``dlm-export engine`` left.
"""


def finish(
    folder: Path, manifest: dict[str, Any], hashed: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Write manifest.json with the size and SHA-256 of every other file in ``folder``.

    Returns these sizes and hashes by file name. ``hashed`` is the result of an earlier call; the
    files in it are not read again.
    """
    files = dict(hashed or {})
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and path.name != MANIFEST_FILE and name not in files:
            files[name] = {"bytes": path.stat().st_size, "sha256": sha256(path)}
    write_manifest(folder, manifest, files)
    return files


def write_manifest(folder: Path, manifest: dict[str, Any], files: dict[str, Any]) -> None:
    """Write manifest.json atomically. ``files`` has the size and SHA-256 of each file by name."""
    text = (
        json.dumps(manifest | {"files": files}, indent=1, ensure_ascii=False, allow_nan=False)
        + "\n"
    )
    with outputs.replaced(folder / MANIFEST_FILE) as new:
        new.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def changing(folder: Path, manifest: Mapping[str, Any], name: str) -> Iterator[None]:
    """Lock a bundle while the block changes its file ``name``. Checks that its manifest is still
    ``manifest``.

    Raises OutputError if the bundle cannot be written, is locked, or was changed.
    """
    with outputs.locked(folder):
        try:
            if json.loads((folder / MANIFEST_FILE).read_text(encoding="utf-8")) != manifest:
                raise outputs.OutputError(
                    f"{folder}: another process has just changed it. Try again."
                )
            yield
        except OSError as err:
            raise outputs.OutputError(f"{folder / name}: cannot write ({err.strerror})") from err


def sha256(path: Path) -> str:
    """A file's SHA-256 in lower-case hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


@contextlib.contextmanager
def staged(output: Path, *, force: bool, needed_bytes: int) -> Iterator[Path]:
    """Yield a folder that becomes ``output`` if the block succeeds, and is removed otherwise.

    See ``outputs.claimed``. ``force`` allows replacing a bundle or an empty folder, and nothing
    else.
    """
    with outputs.claimed(
        output, force=force, kept_because=_kept_because, needed_bytes=needed_bytes
    ) as folder:
        folder.mkdir()
        yield folder


def _kept_because(path: Path) -> str | None:
    """Why a path must not be replaced. ``None`` if it is an empty folder, or a bundle without other
    files.
    """
    if not path.is_dir() or path.is_symlink():
        return "is not a bundle"
    found = {
        each.relative_to(path).as_posix()
        for each in path.rglob("*")
        if each.is_symlink() or not each.is_dir()
    }
    if not found:
        return None if not any(path.iterdir()) else "is not a bundle"
    files = _files_of_bundle(path)
    if files is None:
        return "is not a bundle"
    others = sorted(name for name in found - files if not _OWN_FILES.fullmatch(name))
    return f"contains {others[0]!r}, which does not belong to the bundle" if others else None


def _files_of_bundle(folder: Path) -> set[str] | None:
    """The files that the manifest in a folder lists, or ``None`` if the folder is not a bundle.

    Manifests of all schema versions are accepted.
    """
    # Other programs, such as web applications, have files named manifest.json too. Such a file
    # alone must not make a folder look like a bundle, because it could then be deleted.
    path = folder / MANIFEST_FILE
    try:
        manifest = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(manifest, dict) or not {"schema_version", "files"} <= manifest.keys():
        return None
    # Bundles of schema 1 have "denoiser" instead of "loop".
    if not {"loop", "denoiser"} & manifest.keys() or not isinstance(manifest["files"], dict):
        return None
    return {*manifest["files"]}
