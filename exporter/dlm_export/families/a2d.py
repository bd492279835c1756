"""Defines the families A2D: Qwen2, Qwen3 and Llama models that became diffusion models.

Tiny-A2D, a part of dLLM (https://github.com/ZHZisZZ/dllm), converted these models. Tensor names are
the same as in the original model. Each row of logits predicts the token at its own position (no
shift). Some checkpoints were trained on whole canvases (``mdlm``), and some in blocks (``bd3lm``).
A checkpoint's files do not record how the checkpoint was trained. This module therefore assumes
full attention, unless the option ``--attention-block`` sets a block length.
"""

from __future__ import annotations

from dlm_export.checkpoints.folder import Checkpoint
from dlm_export.families.base import Family, Overrides
from dlm_export.families.trunks import TRUNK, trunk_network
from dlm_export.network.spec import NetworkSpec


def _family(trunk: str, *, qkv_bias: bool = False, qk_norm: bool = False) -> Family:
    name = f"a2d-{trunk.lower()}"

    def read_network(checkpoint: Checkpoint, overrides: Overrides) -> NetworkSpec:
        """Read the network from a released A2D config.json. Raises CheckpointError."""
        if not qkv_bias:
            checkpoint.config.require("attention_bias", False)
        block = overrides.attention_block
        return trunk_network(
            checkpoint, overrides, name, qkv_bias=qkv_bias, qk_norm=qk_norm, block_length=block
        )

    architectures, trunk_class = (f"A2D{trunk}LMHeadModel",), f"{trunk}ForCausalLM"
    return Family(
        name,
        architectures,
        f"Tiny-A2D {trunk}",
        "fast-dllm",
        read_network,
        TRUNK.origins,
        trunk_class,
        "sdar",
    )


FAMILIES = (_family("Qwen2", qkv_bias=True), _family("Qwen3", qk_norm=True), _family("Llama"))
