"""Reads a released checkpoint: its network description, and its tensors as parameters.

Each family of checkpoints is defined by one file with a ``Family`` record, and one line in
``FAMILIES``. The record defines how to read config.json, and which released tensors make up each
parameter (``base.Origin``). ``reading`` and ``trunks`` contain code that several families use.
``tensors`` checks the names, types and shapes in the headers of the tensor files. ``weights`` reads
the tensors.
"""

from __future__ import annotations

import importlib
import reprlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlm_export.checkpoints.adapters import BESIDE, CONFIG_FILE, WEIGHTS_FILE, attach, names_of
from dlm_export.checkpoints.folder import Checkpoint, CheckpointError
from dlm_export.families import (
    a2d,
    bert,
    coda,
    d2f,
    diffusion_gemma,
    dream,
    fast_dllm_v2,
    llada,
    llada2,
    llada_moe,
    modern_bert,
    nemotron_labs_diffusion,
    open_dcoder,
    rnd1,
    roberta,
    sdar,
    sdlm,
    stable_diffcoder,
    torch_encoder,
    uno,
    wedlm,
)
from dlm_export.families.base import Family, Origin, Overrides
from dlm_export.families.tensors import Tensors
from dlm_export.network.rope_scaling import RotaryTable
from dlm_export.network.spec import EMBEDDING, NetworkSpec, rotary_table

if TYPE_CHECKING:
    from dlm_export.families.weights import Weights, layered, load

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        *(llada.FAMILY, llada_moe.FAMILY, llada2.FAMILY, dream.FAMILY, *a2d.FAMILIES),
        d2f.FAMILY,  # after LLaDA and Dream, which have the same class names
        *(
            sdar.FAMILY,
            sdar.MIXTURE_FAMILY,
            uno.FAMILY,
            uno.IDLM_FAMILY,
            fast_dllm_v2.FAMILY,
            rnd1.FAMILY,
            coda.FAMILY,
        ),
        sdlm.FAMILY,  # before Open-dCoder, which has the same class name and claims every checkpoint
        open_dcoder.FAMILY,
        *(stable_diffcoder.FAMILY, wedlm.FAMILY, nemotron_labs_diffusion.FAMILY),
        *(diffusion_gemma.FAMILY, bert.FAMILY, roberta.FAMILY, modern_bert.FAMILY),
        torch_encoder.FAMILY,
    )
}


def find(checkpoint: Checkpoint, overrides: Overrides) -> Family:
    """Find a checkpoint's family by the name in ``architectures[0]``. Raises CheckpointError.

    If the user named the family, only this family is considered.
    """
    architectures = checkpoint.config.get("architectures")
    name = architectures[0] if isinstance(architectures, list) and architectures else None
    chosen = overrides.family
    if chosen is not None and chosen not in FAMILIES:
        raise CheckpointError(
            f"{checkpoint.path}: --family {reprlib.repr(chosen)} is unknown. Known: {', '.join(FAMILIES)}."
        )
    for family in FAMILIES.values() if chosen is None else (FAMILIES[chosen],):
        # The adapter of a family that the user named may be in another folder.
        is_completed = chosen and overrides.adapter and family.draft_adapter
        if name in family.architectures and (is_completed or family.claims(checkpoint)):
            if family.is_ambiguous and chosen is None:
                raise CheckpointError(
                    f"{checkpoint.config.path}: {name} is also the architecture of autoregressive models, which cannot be "
                    f"built. If the checkpoint is {family.description}, pass --family {family.name}."
                )
            return family
    if chosen is not None:
        raise CheckpointError(
            f"{checkpoint.config.path}: architecture {reprlib.repr(name)} does not belong to --family {chosen}, which has "
            f"{', '.join(FAMILIES[chosen].architectures)}."
        )
    known = ", ".join(
        architecture for family in FAMILIES.values() for architecture in family.architectures
    )
    raise CheckpointError(
        f"{checkpoint.config.path}: unknown architecture {reprlib.repr(name)}. Known: {known}."
    )


def read_network(checkpoint: Checkpoint, overrides: Overrides) -> NetworkSpec:
    """Read the description of a checkpoint's network. Raises CheckpointError."""
    block = overrides.attention_block
    if block is not None and block < 1:
        raise CheckpointError(
            f"{checkpoint.path}: --attention-block is {block}; blocks have at least one token"
        )
    family = find(checkpoint, overrides)
    overrides = _with_adapter(checkpoint, overrides, family)
    network = _with_head(checkpoint, family, family.read(checkpoint, overrides))
    if block is not None and any(layer.attention.block_length != block for layer in network.layers):
        raise CheckpointError(
            f"{checkpoint.path}: --attention-block: the attention of {network.architecture} has no blocks"
        )
    if block is not None and block > network.max_canvas_length:
        raise CheckpointError(
            f"{checkpoint.path}: --attention-block is {block}, but a canvas has at most {network.max_canvas_length} tokens"
        )
    network = replace(network, adapter=overrides.adapter)
    _check_adapters(checkpoint, network, overrides, family)
    for layer in network.layers:
        table = rotary_table(layer.attention)
        if table is not None and (table.size % 2 or table.size == 0):
            of = layer.attention.head_size
            raise CheckpointError(
                f"{checkpoint.config.path}: RoPE rotates pairs of features, but {table.size} of the {of} in a head are rotated"
            )
        _check_length(checkpoint, network, table)
    return network


def _with_adapter(checkpoint: Checkpoint, overrides: Overrides, family: Family) -> Overrides:
    """Attach the user's adapter to the checkpoint if ``overrides`` contains the path of its folder.

    In the result, ``adapter`` is the name of the adapter to merge. If the family's draft passes use
    an adapter, the folder contains this adapter, and nothing is merged.
    """
    if overrides.adapter is None or overrides.adapter in names_of(checkpoint):
        return overrides
    folder = Path(overrides.adapter)
    if not any((folder / file).is_file() for file in (CONFIG_FILE, WEIGHTS_FILE)):
        return overrides
    if folder.resolve().parent == checkpoint.path.resolve():
        return replace(overrides, adapter=folder.resolve().name)
    name = family.draft_adapter or folder.resolve().name
    attach(checkpoint, folder, name)
    return replace(overrides, adapter=None if name == family.draft_adapter else name)


def _check_adapters(
    checkpoint: Checkpoint, network: NetworkSpec, overrides: Overrides, family: Family
) -> None:
    """Raise CheckpointError if an adapter would be left out, although the user did not say so."""
    if overrides.adapter is not None and overrides.adapter == family.draft_adapter:
        raise CheckpointError(
            f"{checkpoint.path}: --adapter {overrides.adapter}: only draft passes use this adapter, so it cannot be merged. "
            "Omit the option."
        )
    used = {overrides.adapter, family.draft_adapter}
    others = [name for name in names_of(checkpoint) if name not in used]
    if others and not overrides.no_adapter:
        where = "files" if others[0] == BESIDE else f"folder {others[0]}"
        raise CheckpointError(
            f"{checkpoint.path}: has a LoRA adapter beside the weights ({where}). Pass --adapter {others[0]} to merge it, or "
            "--no-adapter to leave it out."
        )


def _with_head(checkpoint: Checkpoint, family: Family, network: NetworkSpec) -> NetworkSpec:
    """Untie the head if the files contain a head that differs from the embedding table.

    transformers decides in the same way, whatever config.json says about tied heads.
    """
    if not network.tied_head:
        return network
    head, table = head_and_table(checkpoint, family, network)
    if not {head, table} <= checkpoint.tensors.keys() or checkpoint.is_equal(head, table):
        return network
    checkpoint.note(
        f"{head} is used, although {checkpoint.config.path.name} says that the head is the embedding table: {head} and "
        f"{table} differ"
    )
    return replace(network, tied_head=False)


def head_and_table(checkpoint: Checkpoint, family: Family, network: NetworkSpec) -> tuple[str, str]:
    """Return the names of the two tensors that may contain the matrix of a tied head."""
    found = family.origins(replace(network, tied_head=False), checkpoint)
    return found["head.weight"].pieces[0].tensor, found[EMBEDDING].pieces[0].tensor


def _origins(
    checkpoint: Checkpoint, network: NetworkSpec
) -> tuple[dict[str, Origin], tuple[str, ...]]:
    """Return the tensors that make up each parameter, and the prefixes of names of unused tensors."""
    family = FAMILIES[network.family]
    origins, left_out = family.origins(network, checkpoint), family.left_out
    if network.tied_head:
        head, table = head_and_table(checkpoint, family, network)
        if table in checkpoint.tensors:
            left_out = (*left_out, head)
        elif head in checkpoint.tensors:
            origins[EMBEDDING] = Origin.of(head)
    return origins, left_out


def _check_length(checkpoint: Checkpoint, network: NetworkSpec, table: RotaryTable | None) -> None:
    """Check that one rotary table is correct for all canvas lengths. Raises CheckpointError."""
    if table is None or table.scaling is None:
        return
    longest = table.scaling.longest_canvas
    if longest is not None and network.max_canvas_length > longest:
        raise CheckpointError(
            f"{checkpoint.config.path}: rope_type {table.scaling.kind} has other frequencies for each length of more than "
            f"{longest} tokens, but a bundle contains one table for all lengths. Pass --max-canvas-length {longest}."
        )


def check_tensors(checkpoint: Checkpoint, network: NetworkSpec) -> Tensors:
    """Check that the checkpoint contains the tensors that the network needs.

    The function reads only the headers of files. Raises CheckpointError.
    """
    return Tensors(checkpoint, network, *_origins(checkpoint, network))


def open_weights(checkpoint: Checkpoint, network: NetworkSpec) -> Weights:
    """Check the checkpoint's tensors, and open them as the network's parameters.

    Raises CheckpointError.
    """
    from dlm_export.families.weights import Weights

    weights = Weights(checkpoint, network, *_origins(checkpoint, network))
    weights.check_vital()
    return weights


def __getattr__(name: str) -> Any:
    """Import a name from ``weights`` on first use, because ``weights`` needs torch."""
    if name not in ("Weights", "layered", "load"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("dlm_export.families.weights"), name)


__all__ = [
    "FAMILIES",
    "Family",
    "Tensors",
    "Weights",
    "check_tensors",
    "find",
    "head_and_table",
    "layered",
    "load",
    "open_weights",
    "read_network",
]
