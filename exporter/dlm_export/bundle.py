"""A bundle on disk: manifest.json (schema version 2) written and read, files with sizes and hashes,
what may be replaced.

The format is in docs/bundle.md and, for machines, in ``manifest.schema.json``.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import dlm_runtime
from dlm_export import outputs
from dlm_export.network.spec import NetworkSpec
from dlm_runtime.errors import BundleError
from dlm_runtime.manifest import MANIFEST_FILE, check_manifest
from dlm_runtime.policy import Policy

SCHEMA_VERSION = 1
LOOP_FIELDS = ("vocab_size", "mask_token_id", "eos_token_ids", "max_canvas_length", "shift")
"""What of a network the loop needs: in ``loop``, and in ``network`` no second time."""
_OWN_FILES = re.compile(r"manifest\.json(\.new)?|engines/[^/]+\.engine(\.new)?")
"""Besides what its manifest lists, what a bundle may hold: that file, and what a killed `dlm-export
engine` leaves.
"""


def read_manifest(folder: Path, *, check_hashes: bool = True) -> dict[str, Any]:
    """The manifest of a bundle, all of it checked; ``check_hashes=False`` compares files by size
    only. Raises BundleError.
    """
    with dlm_runtime.open(folder, engine="none", check_hashes=check_hashes) as opened:
        opened.check_text()
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
    max_new_tokens: int | None,
    tokenizer: str | None,
    chat_template: dict[str, Any] | None,
    text: dict[str, str] | None,
    config_sha256: str | None,
    json_layout: str | None = None,
    call_format: str | None = None,
) -> dict[str, Any]:
    """The manifest without its ``files``, which ``finish`` adds. ``graph`` is ``trace.describe``'s.

    ``kernels``: ``Fused.as_dict`` of a graph for a CPU, else None. ``max_new_tokens``: of a request
    that does not say; None: nobody said. ``config_sha256``: of the checkpoint's config.json; None
    where the source does not say. ``json_layout``, ``call_format``: names of what the denoiser was
    trained on, or None.
    """
    described = network.as_dict()
    return {
        "schema_version": SCHEMA_VERSION,
        "producer": {"name": "dlm-export", "version": metadata.version("dlm-export")},
        "loop": {
            **{name: described.pop(name) for name in LOOP_FIELDS},
            **({} if network.visible_block is None else {"visible_block": network.visible_block}),
            "graph": graph,
            "presets": {name: policy.as_dict() for name, policy in presets.items()},
            "default_preset": default_preset,
            **({} if max_new_tokens is None else {"max_new_tokens": max_new_tokens}),
        },
        "network": described,
        "opset": opset,
        **({} if config_sha256 is None else {"source": {"config_sha256": config_sha256}}),
        "precision": precision,
        **({} if kernels is None else {"kernels": kernels}),
        "targets": targets,
        "tokenizer": tokenizer,
        "chat_template": chat_template,
        **({} if json_layout is None else {"json_layout": json_layout}),
        **({} if call_format is None else {"call_format": call_format}),
        **({} if text is None else {"text": text}),
    }


def network_of(manifest: Mapping[str, Any]) -> NetworkSpec:
    """The description that a checked manifest keeps. Raises BundleError for sizes that do not go
    together.
    """
    try:
        return NetworkSpec.from_dict(
            manifest["network"] | {name: manifest["loop"][name] for name in LOOP_FIELDS}
        )
    except ValueError as err:
        raise BundleError(f"{MANIFEST_FILE}: network: {err}. Build the bundle again.") from err


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
    """The files that a bundle's manifest lists, of whatever schema; None if the folder is no
    bundle.
    """
    # Other programs call files manifest.json too, web applications above all: the name alone must
    # not cost a folder.
    path = folder / MANIFEST_FILE
    try:
        manifest = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(manifest, dict) or not {"schema_version", "files"} <= manifest.keys():
        return None
    if not {"loop", "denoiser"} & manifest.keys() or not isinstance(
        manifest["files"], dict
    ):  # "denoiser": schema 1
        return None
    return {*manifest["files"]}
