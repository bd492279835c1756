"""A2D conversions of Qwen3 (dLLM's Tiny-A2D, https://github.com/ZHZisZZ/dllm): Qwen3's layout, full attention, no shift.

Qwen3 normalises every query and key head before its turn, and its heads are larger than the hidden size over their number.
Checkpoints of the same class that were trained by blocks (``bd3lm``) carry nothing that tells them apart: they run here as if
they saw the whole canvas, which is not what they learned.
"""

from __future__ import annotations

from dlm_export.checkpoints.folder import Checkpoint
from dlm_export.families.base import Family, Overrides
from dlm_export.families.reading import special_tokens
from dlm_export.families.trunks import TRUNK, trunk_layers
from dlm_export.network.spec import NetworkSpec


def read_network(checkpoint: Checkpoint, overrides: Overrides) -> NetworkSpec:
    """The network of a released A2D-Qwen3 config.json. Raises CheckpointError."""
    config = checkpoint.config
    config.require("attention_bias", False)
    norm_eps = config.number("rms_norm_eps", 1e-6)  # Qwen3Config's default
    vocab_size = config.integer("vocab_size")
    tokens = special_tokens(checkpoint, vocab_size, overrides)
    return NetworkSpec(
        family="a2d-qwen3",
        architecture="A2DQwen3LMHeadModel",
        vocab_size=vocab_size,
        hidden_size=config.integer("hidden_size"),
        layers=trunk_layers(config, norm_eps=norm_eps, qkv_bias=False, qk_norm=True),
        norm_eps=norm_eps,
        tied_head=config.flag("tie_word_embeddings"),
        max_canvas_length=overrides.max_canvas_length or config.integer("max_position_embeddings"),
        shift=0,
        mask_token_id=tokens.mask,
        eos_token_ids=tokens.eos,
        pad_token_id=tokens.pad,
    )


FAMILY = Family(
    "a2d-qwen3",
    ("A2DQwen3LMHeadModel",),
    "Tiny-A2D Qwen3",
    "llada",
    read_network,
    TRUNK.origins,
    "Qwen3ForCausalLM",
)
