"""The family WeDLM of Tencent (arXiv:2512.22737): mask tokens are predicted with causal attention.

Layers and tensor names are the same as in Qwen2.5 (7B) or Qwen3 (8B). The released code moves the
mask tokens of a canvas behind all decided tokens, and keeps their rotary positions. Attention is
causal in this order. So a cache of decided tokens is exact. Each row of logits predicts the token at
its own position (no shift).
"""

from __future__ import annotations

from dlm_export.checkpoints.folder import Checkpoint
from dlm_export.families.base import Family, Overrides
from dlm_export.families.trunks import TRUNK, trunk_network
from dlm_export.network.spec import NetworkSpec


def read_network(checkpoint: Checkpoint, overrides: Overrides) -> NetworkSpec:
    """Read the network from a released WeDLM config.json. Raises CheckpointError."""
    config = checkpoint.config
    config.get("max_window_layers")  # has no effect if use_sliding_window is false
    return trunk_network(
        checkpoint,
        overrides,
        "wedlm",
        # The defaults of the released WeDLMConfig are true and false.
        qkv_bias=config.flag("attention_bias", default=True),
        qk_norm=config.flag("qk_norm"),
        has_masks_last=True,
    )


FAMILY = Family(
    "wedlm", ("WeDLMForCausalLM",), "WeDLM 7B and 8B", "wedlm", read_network, TRUNK.origins
)
