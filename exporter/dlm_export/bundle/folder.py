"""Writes and replaces bundle folders safely, and records the sizes and hashes of their files."""

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
"""Matches the names of files that belong to a bundle although its manifest does not list them: the
manifest, and the files that remain if ``dlm-export engine`` is killed.
"""


def finish(
    folder: Path, manifest: dict[str, Any], hashed: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Write manifest.json, with the size and SHA-256 of every other file in ``folder``.

    Returns a mapping from each file name to the file's size and hash. To avoid reading the same
    files again, pass the result of an earlier call as ``hashed``.
    """
    files = dict(hashed or {})
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and path.name != MANIFEST_FILE and name not in files:
            files[name] = {"bytes": path.stat().st_size, "sha256": sha256(path)}
    write_manifest(folder, manifest, files)
    return files


def write_manifest(folder: Path, manifest: dict[str, Any], files: dict[str, Any]) -> None:
    """Write manifest.json atomically.

    ``files`` maps each file name to the file's size and SHA-256.
    """
    text = (
        json.dumps(manifest | {"files": files}, indent=1, ensure_ascii=False, allow_nan=False)
        + "\n"
    )
    with outputs.replaced(folder / MANIFEST_FILE) as new:
        new.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def changing(folder: Path, manifest: Mapping[str, Any], name: str) -> Iterator[None]:
    """Lock a bundle while the ``with`` block changes the bundle's file ``name``.

    Raises OutputError if the bundle cannot be written, if another process has locked the bundle, or
    if the bundle's manifest is no longer equal to ``manifest``.
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
    """Compute the SHA-256 of a file, in lower-case hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


@contextlib.contextmanager
def staged(output: Path, *, force: bool, needed_bytes: int) -> Iterator[Path]:
    """Yield a new folder, which becomes ``output`` if the ``with`` block succeeds.

    If the block fails, the folder is deleted. With ``force``, an existing bundle or empty folder at
    ``output`` is replaced. Files and other folders are never replaced. Raises the same errors as
    ``outputs.claimed``.
    """
    with outputs.claimed(
        output, force=force, kept_because=_kept_because, needed_bytes=needed_bytes
    ) as folder:
        folder.mkdir()
        yield folder


def _kept_because(path: Path) -> str | None:
    """Return why a path must never be replaced, or ``None`` for empty folders and bundles."""
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
    """Read the names of a bundle's files from its manifest.

    Returns ``None`` if ``folder`` is not a bundle. Manifests of all schema versions are accepted.
    """
    # Folders of web applications contain a manifest.json too. Check that the manifest has the keys
    # of a bundle, because the caller may delete the folder.
    path = folder / MANIFEST_FILE
    try:
        manifest = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(manifest, dict) or not {"schema_version", "files"} <= manifest.keys():
        return None
    # In schema 1, the key "loop" was called "denoiser".
    if not {"loop", "denoiser"} & manifest.keys() or not isinstance(manifest["files"], dict):
        return None
    return {*manifest["files"]}
