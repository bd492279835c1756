"""Dream 7B (arXiv:2508.15487) and DiffuCoder (arXiv:2506.20639): Qwen2.5's layout, full attention, shift 1."""

from __future__ import annotations

from dlm_export.checkpoints.folder import Checkpoint
from dlm_export.families.base import Family, Overrides
from dlm_export.families.reading import special_tokens
from dlm_export.families.trunks import TRUNK, trunk_layers
from dlm_export.network.spec import NetworkSpec

# Both were trained on canvases of 2048 tokens; max_position_embeddings still says what the Qwen2.5 they started from took.
TRAINED_LENGTH = 2048


def read_network(checkpoint: Checkpoint, overrides: Overrides) -> NetworkSpec:
    """The network of a released Dream config.json. Raises CheckpointError."""
    config = checkpoint.config
    norm_eps = config.number("rms_norm_eps", 1e-6)  # DreamConfig's default
    layers = trunk_layers(config, norm_eps=norm_eps, qkv_bias=True, qk_norm=False)
    vocab_size = config.integer("vocab_size")
    tokens = special_tokens(checkpoint, vocab_size, overrides)
    positions = config.integer("max_position_embeddings", default=TRAINED_LENGTH)
    return NetworkSpec(
        family="dream",
        architecture="DreamModel",
        vocab_size=vocab_size,
        hidden_size=config.integer("hidden_size"),
        layers=layers,
        norm_eps=norm_eps,
        tied_head=config.flag("tie_word_embeddings"),
        max_canvas_length=overrides.max_canvas_length or min(positions, TRAINED_LENGTH),
        shift=1,
        mask_token_id=tokens.mask,
        eos_token_ids=tokens.eos,
        pad_token_id=tokens.pad,
    )


FAMILY = Family("dream", ("DreamModel",), "Dream 7B, DiffuCoder", "dream", read_network, TRUNK.origins, "Qwen2ForCausalLM")
