"""Defines the family SDLM (Sequential Diffusion Language Models, arXiv:2509.24007).

Layers and tensor names are the same as in Qwen2.5, and config.json names transformers' class for
Qwen2. A decided token attends to the tokens before it. A draft pass computes the last decided token
and the mask tokens after it. These rows attend to each other and to all decided tokens before them,
and each row predicts the token at the next position. Draft passes decide the text: training computes
no loss for the rows of decided tokens (https://github.com/OpenGVLab/SDLM, sdlm/preprocess).
"""

from __future__ import annotations

from dataclasses import replace

from dlm_export.checkpoints.folder import Checkpoint
from dlm_export.families.base import Family, Overrides
from dlm_export.families.reading import block_length
from dlm_export.families.trunks import TRUNK, trunk_network
from dlm_export.network.spec import NetworkSpec

BLOCK, MASK, MASK_TEXT = "block_size", "text_mask_token_id", "<text_mask>"


def read_network(checkpoint: Checkpoint, overrides: Overrides) -> NetworkSpec:
    """Read the network from a released SDLM config.json. Raises CheckpointError."""
    config = checkpoint.config
    config.require("causal_attn", False)
    for key in ("text_mask_token", "max_window_layers", "attn_implementation"):
        config.get(key)  # does not change the network's results
    mask = config.get(MASK)
    if mask is not None and overrides.mask_token_id is None:
        overrides = replace(overrides, mask_token_id=mask)
    return trunk_network(
        checkpoint,
        overrides,
        "sdlm",
        qkv_bias=True,
        qk_norm=False,
        block_length=block_length(checkpoint, BLOCK, overrides),
        visibility="draft",
        shift=1,
        mask_text=MASK_TEXT,
    )


FAMILY = Family(
    "sdlm",
    ("Qwen2ForCausalLM",),
    "SDLM 3B and 32B",
    "sdlm",
    read_network,
    TRUNK.origins,
    claims=lambda checkpoint: checkpoint.config.get(BLOCK) is not None,
)
