"""Defines ByteDance's family Stable-DiffCoder (arXiv:2601.15892): code models made from Seed-Coder.

Layers and tensor names are the same as in Llama. Attention is block-causal. Each row of logits
predicts the token at its own position (no shift). The mask token is an added token of the tokenizer.
"""

from __future__ import annotations

from dlm_export.checkpoints.folder import Checkpoint
from dlm_export.families.base import Family, Overrides
from dlm_export.families.trunks import TRUNK, trunk_network
from dlm_export.network.spec import NetworkSpec

MASK = "<[MASK_TOKEN]>"
BLOCK_LENGTH = 4
"""The default block length of the released ``generate``. The released config.json has no key for
it."""


def read_network(checkpoint: Checkpoint, overrides: Overrides) -> NetworkSpec:
    """Read the network from a released Stable-DiffCoder config.json. Raises CheckpointError."""
    checkpoint.config.require("attention_bias", False)
    checkpoint.config.get("pretraining_tp")  # splits matrix products, with equal results
    return trunk_network(
        checkpoint,
        overrides,
        "stable-diffcoder",
        qkv_bias=False,
        qk_norm=False,
        block_length=overrides.attention_block or BLOCK_LENGTH,
        mask_text=MASK,
    )


FAMILY = Family(
    "stable-diffcoder",
    ("StableDiffcoderForCausalLM",),
    "Stable-DiffCoder 8B",
    "stable-diffcoder",
    read_network,
    TRUNK.origins,
    "LlamaForCausalLM",
)
