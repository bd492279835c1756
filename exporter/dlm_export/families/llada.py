"""LLaDA 8B and 1.5 (arXiv:2502.09992, arXiv:2505.19223): Llama's layer under OLMo's tensor names, full attention."""

from __future__ import annotations

from dlm_export.checkpoints.folder import Checkpoint, CheckpointError
from dlm_export.families.base import Family, Layout, Overrides, special_tokens
from dlm_export.network.denoiser import NetworkSpec


def read_network(checkpoint: Checkpoint, overrides: Overrides) -> NetworkSpec:
    """NetworkSpec from a released LLaDA config.json. Raises CheckpointError."""
    config = checkpoint.config
    config.require("block_type", "llama")
    config.require("activation_type", "silu")
    config.require("layer_norm_type", "rms")
    config.require("rope", True)
    config.require("alibi", False)
    config.require("attention_layer_norm", False)
    config.require("block_group_size", 1)
    config.require("include_bias", False)
    config.require("bias_for_layer_norm", False)
    config.require("input_emb_norm", False)
    config.require("scale_logits", False)
    hidden_size = config.integer("d_model")
    heads = config.integer("n_heads", high=4096)
    kv_heads = config.integer("n_kv_heads", default=1 if config.flag("multi_query_attention") else heads, high=4096)
    if hidden_size % heads or heads % kv_heads:
        raise CheckpointError(f"{config.path}: d_model {hidden_size}, n_heads {heads} and n_kv_heads {kv_heads} do not divide")
    vocab_size = config.integer("embedding_size", default=config.integer("vocab_size"))
    tokens = special_tokens(checkpoint, vocab_size, overrides)
    mlp_default = config.integer("mlp_ratio", default=4) * hidden_size
    return NetworkSpec(
        family="llada",
        architecture="LLaDAModelLM",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        layers=config.integer("n_layers", high=1024),
        heads=heads,
        kv_heads=kv_heads,
        head_size=hidden_size // heads,
        mlp_size=config.integer("mlp_hidden_size", default=mlp_default),
        max_canvas_length=overrides.max_canvas_length or config.integer("max_sequence_length"),
        rope_theta=config.number("rope_theta", 10000.0),
        norm_eps=config.number("rms_norm_eps", 1e-5),
        qkv_bias=config.flag("include_qkv_bias"),
        tied_head=config.flag("weight_tying"),
        shift=0,
        mask_token_id=tokens.mask,
        eos_token_ids=tokens.eos,
        pad_token_id=tokens.pad,
    )


# The head and every MLP's last matrix share the name ff_out; the MLP's gate is ff_proj.
LAYOUT = Layout(
    embed="model.transformer.wte",
    layer="model.transformer.blocks.{i}.",
    attention_norm="attn_norm",
    q="q_proj",
    k="k_proj",
    v="v_proj",
    out="attn_out",
    mlp_norm="ff_norm",
    gate="ff_proj",
    up="up_proj",
    down="ff_out",
    final_norm="model.transformer.ln_f",
    head="model.transformer.ff_out",
)
FAMILY = Family("llada", ("LLaDAModelLM",), "LLaDA 8B, LLaDA 1.5", "llada", read_network, LAYOUT)
