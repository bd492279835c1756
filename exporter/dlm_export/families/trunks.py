"""The trunk that Llama, Qwen2 and Qwen3 share: tensor names and config keys, which most conversions to denoisers keep."""

from __future__ import annotations

import reprlib

from dlm_export.checkpoints.folder import CheckpointError, Config
from dlm_export.families.base import Layout
from dlm_export.families.reading import read_rope
from dlm_export.network.spec import AttentionSpec, LayerSpec, MlpSpec

TRUNK = Layout(
    embed="model.embed_tokens",
    layer="model.layers.{i}.",
    names={
        "attention_norm": "input_layernorm",
        "attention.q": "self_attn.q_proj",
        "attention.k": "self_attn.k_proj",
        "attention.v": "self_attn.v_proj",
        "attention.out": "self_attn.o_proj",
        "attention.q_norm": "self_attn.q_norm",
        "attention.k_norm": "self_attn.k_norm",
        "mlp_norm": "post_attention_layernorm",
        "mlp.gate": "mlp.gate_proj",
        "mlp.up": "mlp.up_proj",
        "mlp.down": "mlp.down_proj",
    },
    final_norm="model.norm",
    head="lm_head",
)
"""Tensor names of transformers' Llama, Qwen2 and Qwen3."""


def trunk_layers(config: Config, *, norm_eps: float, qkv_bias: bool, qk_norm: bool) -> tuple[LayerSpec, ...]:
    """The layers of a Llama, Qwen2 or Qwen3 trunk in full attention. Raises CheckpointError."""
    config.require("hidden_act", "silu")
    config.require("use_sliding_window", False)
    config.get("sliding_window")  # read, and without effect where use_sliding_window is false
    config.require("use_mrope", False)
    config.require("mlp_bias", False)
    kinds = config.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds)):
        found = reprlib.repr(kinds)
        raise CheckpointError(f"{config.path}: layer_types other than full_attention are not supported: {found}")
    hidden_size = config.integer("hidden_size")
    heads = config.integer("num_attention_heads", high=4096)
    kv_heads = config.integer("num_key_value_heads", default=heads, high=4096)
    head_size = config.integer("head_dim", default=max(1, hidden_size // heads), high=4096)
    if heads % kv_heads or (config.get("head_dim") is None and hidden_size % heads):
        raise CheckpointError(
            f"{config.path}: hidden_size {hidden_size}, num_attention_heads {heads} and num_key_value_heads {kv_heads} "
            "do not divide"
        )
    attention = AttentionSpec(heads, kv_heads, head_size, read_rope(config), qk_norm=qk_norm, qkv_bias=qkv_bias)
    layer = LayerSpec(attention, MlpSpec(config.integer("intermediate_size")), norm_eps)
    return (layer,) * config.integer("num_hidden_layers", high=1024)
