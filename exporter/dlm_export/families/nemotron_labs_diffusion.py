"""Defines NVIDIA's family Nemotron-Labs-Diffusion, whose networks have draft and causal passes.

The layers are the same as those of Ministral 3 in transformers: the layers of Llama, with YaRN and
with queries that are scaled on long canvases. In a draft pass, the tokens of a block attend to each
other. In all other passes, attention is causal. Each row of logits of a draft pass predicts the
token at its own position. Each row of a causal pass predicts the token at the next position. The
releases contain a LoRA adapter for the draft passes of self-speculation.
"""

from __future__ import annotations

from dataclasses import replace

from dlm_export.checkpoints.adapters import DRAFT_ADAPTERS, WITHOUT
from dlm_export.checkpoints.folder import Checkpoint, CheckpointError
from dlm_export.families.base import Family, Overrides
from dlm_export.families.draft_updates import origins_with_updates, with_updates
from dlm_export.families.reading import block_length
from dlm_export.families.trunks import TRUNK, trunk_network
from dlm_export.network.spec import NetworkSpec

ADAPTER, _ = DRAFT_ADAPTERS
OF_TRAINING = ("ar_loss_weight", "dlm_loss_weight", "dp_varying_mask_ratio")
"""Config keys that are used in training only."""


def read_network(checkpoint: Checkpoint, overrides: Overrides) -> NetworkSpec:
    """Read the network from a released config.json. Raises CheckpointError."""
    config = checkpoint.config
    config.require("attention_bias", False)
    config.require("sliding_window", None)
    config.require("dlm_paradigm", "bidirectional")
    # With dlm_type "dream", the rows of draft passes would predict the next positions.
    config.require("dlm_type", "llada")
    for key in OF_TRAINING:
        config.get(key)
    config.get("attn_implementation")  # chooses between equivalent attention kernels
    network = trunk_network(
        checkpoint,
        overrides,
        "nemotron-labs-diffusion",
        qkv_bias=False,
        qk_norm=False,
        block_length=block_length(checkpoint, "block_size", overrides),
        visibility="draft",
        has_query_scale=True,
    )
    if overrides.no_adapter:
        return network
    try:
        return with_updates(network, LAYOUT, checkpoint, ADAPTER)
    except CheckpointError as err:
        raise CheckpointError(f"{str(err).removesuffix('.')}. {WITHOUT}") from err


LAYOUT = replace(
    TRUNK,
    embed="encoder.embed_tokens",
    layer="encoder.layers.{i}.",
    final_norm="encoder.norm",
    head="diffusion_head",
)

FAMILY = Family(
    "nemotron-labs-diffusion",
    ("NemotronLabsDiffusionModel",),
    "Nemotron-Labs-Diffusion 3B, 8B and 14B",
    "self-speculation",
    read_network,
    lambda network, checkpoint: origins_with_updates(network, LAYOUT, checkpoint, ADAPTER),
    draft_adapter=ADAPTER,
)
