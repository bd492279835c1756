"""Defines the family Fast-dLLM v2 (arXiv:2509.26328).

Attention is block-causal. Layers and tensor names are the same as in Qwen2.5. As in Qwen2.5, each
row of logits predicts the next token (shift 1). The mask token is one of the added tokens of the
tokenizer, but no file records its id.
"""

from __future__ import annotations

from dlm_export.checkpoints.folder import Checkpoint, CheckpointError
from dlm_export.families.base import Family, Overrides
from dlm_export.families.reading import block_length
from dlm_export.families.trunks import TRUNK, trunk_network
from dlm_export.network.spec import NetworkSpec
from dlm_runtime.presets import PRESETS

MASK = "|<MASK>|"


def read_network(checkpoint: Checkpoint, overrides: Overrides) -> NetworkSpec:
    """Read the network from a released Fast-dLLM v2 config.json. Raises CheckpointError."""
    block = block_length(checkpoint, "bd_size", overrides)
    together = PRESETS[FAMILY.default_preset].sub_block_length
    if block % together:
        raise CheckpointError(
            f"{checkpoint.config.path}: its loop decides {together} positions at a time, which does not divide a block of "
            f"{block}"
        )
    return trunk_network(
        checkpoint,
        overrides,
        "fast-dllm-v2",
        qkv_bias=True,
        qk_norm=False,
        block_length=block,
        shift=1,
        mask_text=MASK,
    )


FAMILY = Family(
    "fast-dllm-v2",
    ("Fast_dLLM_QwenForCausalLM",),
    "Fast-dLLM v2 1.5B, 7B",
    "fast-dllm-v2",
    read_network,
    TRUNK.origins,
    "Qwen2ForCausalLM",
)
