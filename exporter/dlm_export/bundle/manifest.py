"""Creates, reads and checks manifest.json, the description of a bundle.

The format is documented in docs/reference/bundle.md. The file ``manifest.schema.json`` contains the
JSON schema of the format.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dlm_runtime
from dlm_export.bundle.default_loop import published
from dlm_export.network.spec import NetworkSpec
from dlm_runtime.cache_dtypes import CACHE_ROWS
from dlm_runtime.errors import BundleError
from dlm_runtime.manifest import MANIFEST_FILE, check_manifest

if TYPE_CHECKING:
    from dlm_export.building.writing import Text
    from dlm_export.sources import Source

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
    source: Source,
    text: Text,
    *,
    graph: dict[str, Any],
    opset: int,
    precision: dict[str, Any],
    kernels: dict[str, Any] | None,
    targets: list[str],
) -> dict[str, Any]:
    """Create a manifest without the entry ``files``, which ``finish`` adds later.

    Args:
        source: The checkpoint or bundle from which the bundle is built.
        text: The files with the tokenizer and the chat template.
        graph: The description of the graph, which ``trace.describe`` returns.
        opset: ONNX opset version of the graph.
        precision: The manifest's entry ``precision``.
        kernels: For a CPU graph, the native kernels that it calls (``Fused.as_dict``). For a GPU
            graph, ``None``.
        targets: Names of the targets.
    """
    network, config = source.network, source.config_sha256
    hub = {} if source.hub is None else {"hub": asdict(source.hub)}
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
            "presets": {name: policy.as_dict() for name, policy in source.presets.items()},
            "default_preset": source.default_preset,
            **_given(source, "max_new_tokens"),
        },
        "default_loop": published(source.default_preset),
        "network": described,
        "opset": opset,
        **({} if config is None else {"source": {"config_sha256": config} | hub}),
        "precision": precision,
        **({} if kernels is None else {"kernels": kernels}),
        "targets": targets,
        "tokenizer": None if text.tokenizer is None else "tokenizer.json",
        "chat_template": text.chat_template,
        **_given(source, "json_layout", "call_format"),
        **({} if text.compiled is None else {"text": text.compiled}),
    }


def _given(source: Source, *names: str) -> dict[str, Any]:
    """Return the fields of a source that are not ``None``."""
    found = {name: getattr(source, name) for name in names}
    return {name: value for name, value in found.items() if value is not None}


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
