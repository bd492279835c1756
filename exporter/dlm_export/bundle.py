"""A bundle on disk: manifest.json (schema version 2) written and read, files with sizes and hashes, the atomic move into place.

The format is in docs/bundle.md and, for machines, in ``manifest.schema.json``.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import dlm_runtime
from dlm_export.network.spec import NetworkSpec
from dlm_runtime.errors import BundleError, DlmError
from dlm_runtime.manifest import MANIFEST_FILE, check_manifest
from dlm_runtime.policy import Policy

SCHEMA_VERSION = 2
LOOP_FIELDS = ("vocab_size", "mask_token_id", "eos_token_ids", "max_canvas_length", "shift")
"""What of a network the loop needs: in ``loop``, and in ``network`` no second time."""


class OutputError(DlmError):
    """The bundle cannot be written where it was asked for."""


def read_manifest(folder: Path, *, check_hashes: bool = True) -> dict[str, Any]:
    """The manifest of a bundle, all of it checked; ``check_hashes=False`` compares files by size only. Raises BundleError."""
    with dlm_runtime.open(folder, engine="none", check_hashes=check_hashes) as opened:
        manifest = opened.manifest
    check_manifest(manifest, folder)
    return manifest


def make_manifest(
    network: NetworkSpec,
    *,
    graph: dict[str, Any],
    opset: int,
    precision: dict[str, Any],
    kernels: dict[str, Any] | None,
    targets: list[str],
    presets: dict[str, Policy],
    default_preset: str,
    tokenizer: str | None,
    chat_template: dict[str, Any] | None,
    config_sha256: str | None,
) -> dict[str, Any]:
    """The manifest without its ``files``, which ``finish`` adds. ``graph`` is ``trace.describe``'s.

    ``kernels``: ``Fused.as_dict`` of a graph for a CPU, else None. ``config_sha256``: of the checkpoint's config.json; None
    where the source does not say.
    """
    described = network.as_dict()
    return {
        "schema_version": SCHEMA_VERSION,
        "producer": {"name": "dlm-export", "version": metadata.version("dlm-export")},
        "loop": {
            **{name: described.pop(name) for name in LOOP_FIELDS},
            "graph": graph,
            "presets": {name: policy.as_dict() for name, policy in presets.items()},
            "default_preset": default_preset,
        },
        "network": described,
        "opset": opset,
        **({} if config_sha256 is None else {"source": {"config_sha256": config_sha256}}),
        "precision": precision,
        **({} if kernels is None else {"kernels": kernels}),
        "targets": targets,
        "tokenizer": tokenizer,
        "chat_template": chat_template,
    }


def network_of(manifest: Mapping[str, Any]) -> NetworkSpec:
    """The description that a checked manifest keeps. Raises BundleError for sizes that do not go together."""
    try:
        return NetworkSpec.from_dict(manifest["network"] | {name: manifest["loop"][name] for name in LOOP_FIELDS})
    except ValueError as err:
        raise BundleError(f"{MANIFEST_FILE}: network: {err}. Build the bundle again.") from err


def finish(folder: Path, manifest: dict[str, Any], hashed: dict[str, Any] | None = None) -> dict[str, Any]:
    """Write manifest.json with the size and SHA-256 of every other file in ``folder``; returns these by name.

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
    """Write manifest.json with ``files`` (size and SHA-256 by name); one that is there is replaced in one move."""
    text = json.dumps(manifest | {"files": files}, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    new = folder / f"{MANIFEST_FILE}.new"
    try:
        new.unlink(missing_ok=True)  # a link there would be followed
        new.write_text(text, encoding="utf-8")
        os.replace(new, folder / MANIFEST_FILE)
    finally:
        new.unlink(missing_ok=True)


def sha256(path: Path) -> str:
    """A file's SHA-256 in lower-case hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


@contextlib.contextmanager
def staged(output: Path, *, force: bool, needed_bytes: int) -> Iterator[Path]:
    """A temporary folder beside ``output`` that becomes it when the block ends well, and goes away when it does not.

    Raises OutputError if ``output`` exists without ``force`` (nor is replaced unless it is a bundle or empty), or if the
    disk has no room for ``needed_bytes``.
    """
    output = Path(os.path.abspath(output))
    if output.exists() or output.is_symlink():
        _check_replaceable(output, force)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(output.parent).free
        if free < needed_bytes:
            raise OutputError(f"{output}: needs {needed_bytes:,} bytes of disk, only {free:,} are free")
        staging = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    except OSError as err:
        raise OutputError(f"{output}: cannot write there ({err.strerror})") from err
    try:
        staging.chmod(0o755)
        yield staging
        _move(staging, output)
    except OSError as err:
        if err.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OutputError(
                f"{output}: the disk is full; {needed_bytes:,} bytes are needed. Nothing was left behind."
            ) from err
        raise OutputError(f"{output}: cannot write ({err})") from err
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _check_replaceable(output: Path, force: bool) -> None:
    if not force:
        raise OutputError(f"{output} exists. Pass --force to replace it, or choose another folder.")
    if not output.is_dir() or output.is_symlink() or not (_is_bundle(output) or not any(output.iterdir())):
        raise OutputError(f"{output} is not a bundle, so --force does not replace it. Choose another folder.")


def _is_bundle(folder: Path) -> bool:
    # Other programs call files manifest.json too, web applications above all: the name alone must not cost a folder.
    path = folder / MANIFEST_FILE
    try:
        manifest = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    except (OSError, ValueError, RecursionError):
        return False
    if not isinstance(manifest, dict) or not {"schema_version", "files"} <= manifest.keys():
        return False
    return "loop" in manifest or "denoiser" in manifest  # of schema 1: it is what --force builds again


def _move(staging: Path, output: Path) -> None:
    """Put ``staging`` in ``output``'s place; an old bundle there survives until the new one stands."""
    old = None
    try:
        if output.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{output.name}.old.", dir=output.parent))
            os.rename(output, old)
        os.rename(staging, output)
    finally:  # after Ctrl-C too, at any of the lines above
        if old is not None and not output.exists():
            os.rename(old, output)
        elif old is not None:
            shutil.rmtree(old, ignore_errors=True)
