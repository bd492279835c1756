"""Creates, reads and checks manifest.json, the description of a bundle.

The format is documented in docs/reference/bundle.md. The file ``manifest.schema.json`` contains the
JSON schema of the format.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import dlm_runtime
from dlm_export.bundle.default_loop import published
from dlm_export.network.spec import NetworkSpec
from dlm_runtime.cache_dtypes import CACHE_ROWS
from dlm_runtime.errors import BundleError
from dlm_runtime.manifest import MANIFEST_FILE, check_manifest
from dlm_runtime.policy import Policy

SCHEMA_VERSION = 2
LOOP_FIELDS = ("vocab_size", "mask_token_id", "eos_token_ids", "max_canvas_length", "shift")
"""Network fields that the decoding loop needs. The manifest stores them under ``loop`` only.
"""
RESIZING = ("expand_token_id", "delete_token_id", "split_token_id")
"""More such fields, which are only there for networks whose loop deletes and inserts tokens."""


def read_manifest(folder: Path, *, check_hashes: bool = True) -> dict[str, Any]:
    """Read a bundle's manifest, and check the manifest and the files that it lists.

    If ``check_hashes`` is false, the sizes of the files are checked, but not their hashes. Raises
    BundleError.
    """
    with dlm_runtime.open(folder, engine="none", check_hashes=check_hashes) as opened:
        opened.check_text()
        manifest = opened.manifest
    check_manifest(manifest, folder)
    network_of(manifest, folder)
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
    hub: dict[str, Any] | None = None,
    json_layout: str | None = None,
    call_format: str | None = None,
) -> dict[str, Any]:
    """Create a manifest without the entry ``files``, which ``finish`` adds later.

    Args:
        network: The denoiser's description.
        graph: The description of the graph, which ``trace.describe`` returns.
        opset: ONNX opset version of the graph.
        precision: The manifest's entry ``precision``.
        kernels: For a CPU graph, the native kernels that it calls (``Fused.as_dict``). For a GPU
            graph, ``None``.
        targets: Names of the targets.
        presets: Maps the name of each preset to the preset's policy (the settings of the decoding
            loop).
        default_preset: Name of the default preset.
        max_new_tokens: The length of the answers that the denoiser was trained on, in tokens, or
            ``None``.
        tokenizer: Name of the tokenizer file, or ``None``.
        chat_template: The manifest's entry ``chat_template``, or ``None``.
        text: The entry for text.bin, the file in which C programs find the tokenizer and the chat
            template, or ``None``.
        config_sha256: SHA-256 of the checkpoint's config.json, or ``None`` if unknown.
        hub: The origin of a downloaded checkpoint, or ``None`` if the checkpoint was not
            downloaded.
        json_layout: Name of the JSON layout that the denoiser was trained on, or ``None``.
        call_format: Name of the tool-call format that the denoiser was trained on, or ``None``.
    """
    described = network.as_dict()
    unused = described.pop("unused_tokens")
    resizing = {name: described.pop(name) for name in RESIZING if name in described}
    return {
        "schema_version": SCHEMA_VERSION,
        "producer": {"name": "dlm-export", "version": metadata.version("dlm-export")},
        "loop": {
            **{name: described.pop(name) for name in LOOP_FIELDS},
            **({"unused_tokens": unused} if unused else {}),
            **resizing,
            **({} if network.visible_block is None else {"visible_block": network.visible_block}),
            **({} if network.draft_block is None else {"draft_block": network.draft_block}),
            **({"shifted_drafts": True} if network.has_shifted_drafts else {}),
            **({"blocks_after_prompt": True} if network.blocks_after_prompt else {}),
            **({"draft_updates": True} if network.has_draft_updates else {}),
            **({} if network.noise == "absorbing" else {"noise": network.noise}),
            **({} if network.conditioning is None else {"conditioning_size": network.hidden_size}),
            "graph": graph,
            "presets": {name: policy.as_dict() for name, policy in presets.items()},
            "default_preset": default_preset,
            **({} if max_new_tokens is None else {"max_new_tokens": max_new_tokens}),
        },
        "default_loop": published(default_preset),
        "network": described,
        "opset": opset,
        **({} if config_sha256 is None else {"source": _source(config_sha256, hub)}),
        "precision": precision,
        **({} if kernels is None else {"kernels": kernels}),
        "targets": targets,
        "tokenizer": tokenizer,
        "chat_template": chat_template,
        **({} if json_layout is None else {"json_layout": json_layout}),
        **({} if call_format is None else {"call_format": call_format}),
        **({} if text is None else {"text": text}),
    }


def _source(config_sha256: str, hub: dict[str, Any] | None) -> dict[str, Any]:
    """Return the manifest's entry that describes the checkpoint."""
    return {"config_sha256": config_sha256} | ({} if hub is None else {"hub": hub})


def network_of(manifest: Mapping[str, Any], folder: Path = Path()) -> NetworkSpec:
    """Read the description of the network from a checked manifest of the bundle in ``folder``.

    Raises BundleError if the shapes of the network's layers contradict each other, or if a scaling
    of rotary positions is invalid.
    """
    try:
        return NetworkSpec.from_dict(
            manifest["network"]
            | {name: manifest["loop"][name] for name in LOOP_FIELDS}
            | {"unused_tokens": manifest["loop"].get("unused_tokens", [])}
            | {name: manifest["loop"][name] for name in RESIZING if name in manifest["loop"]}
        )
    except ValueError as err:
        place = folder / MANIFEST_FILE
        raise BundleError(f"{place}: network: {err}. Build the bundle again.") from err


def table_bytes_of(manifest: Mapping[str, Any]) -> int | None:
    """Return the number of bytes that each element of a bundle's embedding table takes.

    Returns ``None`` if the table is quantised, or if the manifest does not record its type.
    """
    dtype = manifest["precision"].get("embedding_dtype")
    return None if dtype is None else CACHE_ROWS[dtype][0]
