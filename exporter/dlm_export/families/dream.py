"""Dream 7B (arXiv:2508.15487) and DiffuCoder (arXiv:2506.20639): Qwen2.5's layout, full attention, shift 1."""

from __future__ import annotations

from dlm_export.checkpoints.folder import Checkpoint, CheckpointError
from dlm_export.families.base import Family, Layout, Overrides, special_tokens
from dlm_export.network.denoiser import NetworkSpec

# Both were trained on canvases of 2048 tokens; max_position_embeddings still says what the Qwen2.5 they started from took.
TRAINED_LENGTH = 2048


def read_network(checkpoint: Checkpoint, overrides: Overrides) -> NetworkSpec:
    """NetworkSpec from a released Dream config.json. Raises CheckpointError."""
    config = checkpoint.config
    config.require("hidden_act", "silu")
    config.require("rope_scaling", None)
    config.require("use_sliding_window", False)
    config.require("use_mrope", False)
    hidden_size = config.integer("hidden_size")
    heads = config.integer("num_attention_heads", high=4096)
    kv_heads = config.integer("num_key_value_heads", default=heads, high=4096)
    head_size = config.integer("head_dim", default=hidden_size // heads, high=4096)
    if hidden_size % heads or heads % kv_heads:
        raise CheckpointError(
            f"{config.path}: hidden_size {hidden_size}, num_attention_heads {heads} and num_key_value_heads {kv_heads} "
            "do not divide"
        )
    vocab_size = config.integer("vocab_size")
    tokens = special_tokens(checkpoint, vocab_size, overrides)
    positions = config.integer("max_position_embeddings", default=TRAINED_LENGTH)
    return NetworkSpec(
        family="dream",
        architecture="DreamModel",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        layers=config.integer("num_hidden_layers", high=1024),
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        mlp_size=config.integer("intermediate_size"),
        max_canvas_length=overrides.max_canvas_length or min(positions, TRAINED_LENGTH),
        rope_theta=config.number("rope_theta", 10000.0),
        norm_eps=config.number("rms_norm_eps", 1e-6),
        qkv_bias=True,
        tied_head=config.flag("tie_word_embeddings"),
        shift=1,
        mask_token_id=tokens.mask,
        eos_token_ids=tokens.eos,
        pad_token_id=tokens.pad,
    )


# Qwen2's names.
LAYOUT = Layout(
    embed="model.embed_tokens",
    layer="model.layers.{i}.",
    attention_norm="input_layernorm",
    q="self_attn.q_proj",
    k="self_attn.k_proj",
    v="self_attn.v_proj",
    out="self_attn.o_proj",
    mlp_norm="post_attention_layernorm",
    gate="mlp.gate_proj",
    up="mlp.up_proj",
    down="mlp.down_proj",
    final_norm="model.norm",
    head="lm_head",
)
FAMILY = Family("dream", ("DreamModel",), "Dream 7B, DiffuCoder", "dream", read_network, LAYOUT)
