"""Defines the family CoDA, 1.7B (arXiv:2510.03270), with full attention and shift 1.

CoDA was initialised from Qwen3-1.7B, so its layers and tensor names are the same as in Qwen3. The
released code computes a causal mask, but does not pass it to attention. It never ties the head.
"""

from __future__ import annotations

from dlm_export.checkpoints.folder import Checkpoint
from dlm_export.families.base import Family, Overrides
from dlm_export.families.trunks import TRUNK, trunk_network
from dlm_export.network.spec import NetworkSpec

OF_TRAINING = (
    "attention_kernel",
    "prefix_probability",
    "truncate_probability",
    "block_masking_probability",
    "mask_block_sizes",
    "masking_scheduler",
    "sampling_eps",
)
"""Config keys that the released code uses only in training."""


def read_network(checkpoint: Checkpoint, overrides: Overrides) -> NetworkSpec:
    """Read the network from a released CoDA config.json. Raises CheckpointError."""
    checkpoint.config.require("attention_bias", False)
    for key in OF_TRAINING:
        checkpoint.config.get(key)
    return trunk_network(checkpoint, overrides, "coda", qkv_bias=False, qk_norm=True, shift=1)


FAMILY = Family(
    "coda",
    ("CoDALanguageModel",),
    "CoDA 1.7B",
    "dream",
    read_network,
    TRUNK.origins,
    "Qwen3ForCausalLM",
)
