"""Defines Tencent's family WeDLM (arXiv:2512.22737), which predicts mask tokens causally.

Layers and tensor names are the same as in Qwen2.5 (7B) or Qwen3 (8B). The released code moves the
mask tokens of a canvas after all decided tokens, but does not change their rotary positions.
Attention is causal in the new order. A decided token therefore never attends to a mask token, and
its cached keys and values stay exact. Each row of logits predicts the token at its own position (no
shift).
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
        # In the released WeDLMConfig, attention_bias is true and qk_norm is false by default.
        qkv_bias=config.flag("attention_bias", default=True),
        qk_norm=config.flag("qk_norm"),
        visibility="masks-last",
    )


FAMILY = Family(
    "wedlm", ("WeDLMForCausalLM",), "WeDLM 7B and 8B", "wedlm", read_network, TRUNK.origins
)
