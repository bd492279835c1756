"""Writing a bundle: manifest.json (schema version 1), its files with sizes and hashes, and the atomic move into place.

The native runtime is the only reader. The format is in docs/bundle.md and, for machines, in ``manifest.schema.json``.
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
from typing import TYPE_CHECKING, Any

from dlm_runtime.errors import DlmError
from dlm_runtime.policy import Policy

if TYPE_CHECKING:
    from dlm_export.network.spec import NetworkSpec

SCHEMA_VERSION = 1
MANIFEST_FILE = "manifest.json"


class OutputError(DlmError):
    """The bundle cannot be written where it was asked for."""


def make_manifest(
    network: NetworkSpec,
    *,
    precision: dict[str, Any],
    targets: list[str],
    graph: dict[str, Any],
    presets: dict[str, Policy],
    default_preset: str,
    tokenizer: str | None,
    chat_template: dict[str, Any] | None,
) -> dict[str, Any]:
    """The manifest without its ``files``, which ``finish`` adds."""
    c = network
    return {
        "schema_version": SCHEMA_VERSION,
        "producer": {"name": "dlm-export", "version": metadata.version("dlm-export")},
        "family": c.family,
        "architecture": c.architecture,
        "denoiser": _denoiser(c),
        "tokens": {"mask": c.mask_token_id, "eos": list(c.eos_token_ids), "pad": c.pad_token_id},
        "graph": graph,
        "precision": precision,
        "targets": targets,
        "presets": {name: policy.as_dict() for name, policy in presets.items()},
        "default_preset": default_preset,
        "tokenizer": tokenizer,
        "chat_template": chat_template,
    }


def _denoiser(c: NetworkSpec) -> dict[str, Any]:  # MERGE: schema 1
    a = c.layers[0].attention
    return {
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "layers": len(c.layers),
        "heads": a.heads,
        "kv_heads": a.kv_heads,
        "head_size": a.head_size,
        "mlp_size": c.layers[0].mlp.size,
        "parameters": c.parameter_count(),
        "max_canvas_length": c.max_canvas_length,
        "attention": "full",
        "noise": c.noise,
        "shift": c.shift,
        "rope_theta": a.rope.theta,
        "norm_eps": c.norm_eps,
        "qkv_bias": a.qkv_bias,
        "tied_head": c.tied_head,
    }


def network_of(manifest: Mapping[str, Any]) -> NetworkSpec:
    """The description that a bundle's manifest keeps."""
    from dlm_export.network.spec import AttentionSpec, LayerSpec, MlpSpec, NetworkSpec, Rope

    d, tokens = manifest["denoiser"], manifest["tokens"]
    a = AttentionSpec(d["heads"], d["kv_heads"], d["head_size"], Rope(d["rope_theta"]), qkv_bias=d["qkv_bias"])
    return NetworkSpec(
        manifest["family"],
        manifest["architecture"],
        d["vocab_size"],
        d["hidden_size"],
        (LayerSpec(a, MlpSpec(d["mlp_size"]), d["norm_eps"]),) * d["layers"],
        d["norm_eps"],
        d["tied_head"],
        d["max_canvas_length"],
        d["shift"],
        tokens["mask"],
        tuple(tokens["eos"]),
        tokens["pad"],
    )


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
    return isinstance(manifest, dict) and {"schema_version", "denoiser", "files"} <= manifest.keys()


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
