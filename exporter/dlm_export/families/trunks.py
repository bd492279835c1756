"""The trunk that Llama, Qwen2 and Qwen3 share: tensor names and config keys, which most conversions to denoisers keep."""

from __future__ import annotations

import reprlib

from dlm_export.checkpoints.folder import Checkpoint, CheckpointError, Config
from dlm_export.families.base import Layout, Overrides
from dlm_export.families.reading import read_rope, special_tokens
from dlm_export.network.spec import AttentionSpec, LayerSpec, MlpSpec, NetworkSpec

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


def trunk_network(
    checkpoint: Checkpoint,
    overrides: Overrides,
    family: str,
    *,
    qkv_bias: bool,
    qk_norm: bool,
    block_length: int | None = None,
    shift: int = 0,
    longest: int | None = None,
    mask_text: str | None = None,
) -> NetworkSpec:
    """The network of a config.json under the keys of transformers' Llama, Qwen2 or Qwen3. Raises CheckpointError.

    ``block_length`` None: full attention. ``longest``: tokens of the canvases that it was trained on, if fewer than its
    positions. ``mask_text``: see ``special_tokens``.
    """
    config = checkpoint.config
    norm_eps = config.number("rms_norm_eps", 1e-6)  # the default of all three classes
    layer = LayerSpec(
        _attention(config, qkv_bias=qkv_bias, qk_norm=qk_norm, block_length=block_length),
        MlpSpec(config.integer("intermediate_size")),
        norm_eps,
    )
    vocab_size = config.integer("vocab_size")
    tokens = special_tokens(checkpoint, vocab_size, overrides, mask_text)
    positions = config.integer("max_position_embeddings", default=longest)
    return NetworkSpec(
        family=family,
        architecture=config.get("architectures")[0],
        vocab_size=vocab_size,
        hidden_size=config.integer("hidden_size"),
        layers=(layer,) * config.integer("num_hidden_layers", high=1024),
        norm_eps=norm_eps,
        tied_head=config.flag("tie_word_embeddings"),
        max_canvas_length=overrides.max_canvas_length or min(positions, longest or positions),
        shift=shift,
        mask_token_id=tokens.mask,
        eos_token_ids=tokens.eos,
        pad_token_id=tokens.pad,
    )


def _attention(config: Config, *, qkv_bias: bool, qk_norm: bool, block_length: int | None) -> AttentionSpec:
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
    visibility = "full" if block_length is None else "block"
    rope = read_rope(config)
    return AttentionSpec(heads, kv_heads, head_size, rope, qk_norm, qkv_bias, visibility=visibility, block_length=block_length)
