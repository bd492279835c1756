"""Defines the family SDAR (arXiv:2510.06303).

SDAR has block-causal attention with blocks of 4 to 64 tokens. Each row of logits predicts the token
at its own position (no shift). Layers and tensor names are the same as in Qwen3 or Qwen3-MoE. If a
release's config.json does not contain the block length, the user must pass ``--attention-block``.
"""

from __future__ import annotations

from dlm_export.checkpoints.folder import Checkpoint
from dlm_export.families import uno
from dlm_export.families.base import Family, Overrides
from dlm_export.families.reading import block_length
from dlm_export.families.trunks import MIXTURE, TRUNK, mixture_network, trunk_network
from dlm_export.network.spec import NetworkSpec


def read_network(checkpoint: Checkpoint, overrides: Overrides) -> NetworkSpec:
    """Read the network from a released SDAR config.json. Raises CheckpointError."""
    checkpoint.config.require("attention_bias", False)
    checkpoint.config.get("fuse_cross_entropy")  # used in training only
    block = block_length(checkpoint, "block_size", overrides)
    return trunk_network(
        checkpoint, overrides, "sdar", qkv_bias=False, qk_norm=True, block_length=block
    )


def read_mixture(checkpoint: Checkpoint, overrides: Overrides) -> NetworkSpec:
    """Read the network from a released SDAR-MoE config.json. Raises CheckpointError."""
    uno.refuse_causal(checkpoint)
    checkpoint.config.get("fuse_cross_entropy")  # used in training only
    return mixture_network(
        checkpoint,
        overrides,
        "sdar-moe",
        block_length=block_length(checkpoint, "block_size", overrides),
    )


FAMILY = Family(
    "sdar",
    ("SDARForCausalLM",),
    "SDAR 1.7B to 8B",
    "sdar",
    read_network,
    TRUNK.origins,
    "Qwen3ForCausalLM",
    claims=lambda checkpoint: not uno.is_causal(checkpoint),
)
MIXTURE_FAMILY = Family(
    "sdar-moe",
    ("SDARMoeForCausalLM",),
    "SDAR 30B-A3B",
    FAMILY.default_preset,
    read_mixture,
    MIXTURE.origins,
)
