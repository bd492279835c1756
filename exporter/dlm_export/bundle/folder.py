"""The folder of a bundle: its files with sizes and hashes, how it is written, changed and replaced."""

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
"""Besides what its manifest lists, what a bundle may hold: that file, and what a killed `dlm-export
engine` leaves.
"""


def finish(
    folder: Path, manifest: dict[str, Any], hashed: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Write manifest.json with the size and SHA-256 of every other file in ``folder``; returns
    these by name.

    ``hashed`` is what an earlier call returned: those files are not read again.
    """
    files = dict(hashed or {})
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and path.name != MANIFEST_FILE and name not in files:
            files[name] = {"bytes": path.stat().st_size, "sha256": sha256(path)}
    write_manifest(folder, manifest, files)
    return files


def write_manifest(folder: Path, manifest: dict[str, Any], files: dict[str, Any]) -> None:
    """Write manifest.json with ``files`` (size and SHA-256 by name); one that is there is replaced
    in one move.
    """
    text = (
        json.dumps(manifest | {"files": files}, indent=1, ensure_ascii=False, allow_nan=False)
        + "\n"
    )
    with outputs.replaced(folder / MANIFEST_FILE) as new:
        new.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def changing(folder: Path, manifest: Mapping[str, Any], name: str) -> Iterator[None]:
    """Hold the lock of a bundle while its file ``name`` changes, from what ``manifest`` says.

    Raises OutputError: no way to write, someone has it, or someone changed it before.
    """
    with outputs.locked(folder):
        try:
            if json.loads((folder / MANIFEST_FILE).read_text(encoding="utf-8")) != manifest:
                raise outputs.OutputError(
                    f"{folder}: was changed by another process this moment. Try again."
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
    """A folder that becomes ``output`` when the block ends well, and goes away when it does not:
    see ``outputs.claimed``.

    ``force`` lets it replace a bundle, or an empty folder, and nothing else.
    """
    with outputs.claimed(
        output, force=force, kept_because=_kept_because, needed_bytes=needed_bytes
    ) as folder:
        folder.mkdir()
        yield folder


def _kept_because(path: Path) -> str | None:
    """Why what stands where a bundle goes is not replaced; None: it is a bundle with its own files
    alone, or empty.
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
    return f"holds {others[0]!r}, which is not the bundle's" if others else None


def _files_of_bundle(folder: Path) -> set[str] | None:
    """The files that a bundle's manifest of any schema lists; None if the folder is no bundle."""
    # Other programs call files manifest.json too, web applications above all: the name alone must
    # not cost a folder.
    path = folder / MANIFEST_FILE
    try:
        manifest = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(manifest, dict) or not {"schema_version", "files"} <= manifest.keys():
        return None
    # Bundles of schema 1 have "denoiser" in the place of "loop".
    if not {"loop", "denoiser"} & manifest.keys() or not isinstance(manifest["files"], dict):
        return None
    return {*manifest["files"]}
