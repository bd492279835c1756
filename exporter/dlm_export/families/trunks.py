"""Defines the tensor names and config keys of Llama, Qwen2 and Qwen3.

Most diffusion models that are derived from Llama, Qwen2 or Qwen3 use the same names and keys.
"""

from __future__ import annotations

import reprlib
from dataclasses import replace

from dlm_export.checkpoints.folder import Checkpoint, CheckpointError, Config
from dlm_export.families.base import Layout, Overrides
from dlm_export.families.reading import read_heads, special_tokens, unmasked_tokens
from dlm_export.families.rope_config import read_rope
from dlm_export.network.spec import (
    AttentionSpec,
    ExpertsSpec,
    LayerSpec,
    MlpSpec,
    NetworkSpec,
    RouterSpec,
)

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
"""The tensor names of transformers' Llama, Qwen2 and Qwen3."""

EXPERT_NAMES = {
    "mlp.router": "mlp.gate",
    "mlp.experts.gate": "mlp.experts.{e}.gate_proj",
    "mlp.experts.up": "mlp.experts.{e}.up_proj",
    "mlp.experts.down": "mlp.experts.{e}.down_proj",
}
"""Maps the modules of a mixture (the router and the experts) to the tensor names in several
releases.
"""

MIXTURE = replace(TRUNK, names=TRUNK.names | EXPERT_NAMES)
"""The tensor names of transformers' Qwen3-MoE."""


def trunk_network(
    checkpoint: Checkpoint,
    overrides: Overrides,
    family: str,
    *,
    qkv_bias: bool,
    qk_norm: bool,
    block_length: int | None = None,
    visibility: str | None = None,
    shift: int = 0,
    longest: int | None = None,
    mask_text: str | None = None,
    noise: str = "absorbing",
    has_query_scale: bool = False,
) -> NetworkSpec:
    """Read a config.json that uses the keys of transformers' Llama, Qwen2 or Qwen3.

    The docstring of ``AttentionSpec`` explains ``visibility``. By default, attention is
    block-causal, or full if ``block_length`` is ``None``. With ``has_query_scale``, config.json also
    uses the keys of transformers' Ministral 3. If training used
    shorter canvases than config.json allows, ``longest`` is the length of these canvases.
    The docstring of ``special_tokens`` explains ``mask_text``, and that of ``NetworkSpec`` explains
    ``noise``. Raises CheckpointError.
    """
    config = checkpoint.config
    norm_eps = config.number("rms_norm_eps", 1e-6)  # the default of all three transformers classes
    layer = LayerSpec(
        _attention(config, qkv_bias, qk_norm, block_length, visibility, has_query_scale),
        MlpSpec(config.integer("intermediate_size")),
        norm_eps,
    )
    layers = (layer,) * config.integer("num_hidden_layers", high=1024)
    return network_of(
        checkpoint,
        overrides,
        family,
        layers,
        norm_eps,
        shift=shift,
        longest=longest,
        mask_text=mask_text,
        noise=noise,
    )


def network_of(
    checkpoint: Checkpoint,
    overrides: Overrides,
    family: str,
    layers: tuple[LayerSpec, ...],
    norm_eps: float,
    *,
    shift: int = 0,
    longest: int | None = None,
    mask_text: str | None = None,
    noise: str = "absorbing",
) -> NetworkSpec:
    """Return the network that consists of ``layers``. Reads all other values from config.json.

    The docstring of ``trunk_network`` explains ``longest``, ``mask_text`` and ``noise``. Raises
    CheckpointError.
    """
    config = checkpoint.config
    vocab_size = config.integer("vocab_size")
    if noise == "uniform":
        tokens = unmasked_tokens(checkpoint, config, vocab_size, overrides)
    else:
        tokens = special_tokens(checkpoint, vocab_size, overrides, mask_text)
    positions = config.integer(
        "max_position_embeddings", default=longest or overrides.max_canvas_length
    )
    return NetworkSpec(
        family=family,
        architecture=config.get("architectures")[0],
        vocab_size=vocab_size,
        hidden_size=config.integer("hidden_size"),
        layers=layers,
        norm_eps=norm_eps,
        tied_head=config.flag("tie_word_embeddings"),
        max_canvas_length=overrides.max_canvas_length or min(positions, longest or positions),
        shift=shift,
        mask_token_id=tokens.mask,
        eos_token_ids=tokens.eos,
        pad_token_id=tokens.pad,
        noise=noise,
    )


def mixture_network(
    checkpoint: Checkpoint,
    overrides: Overrides,
    family: str,
    *,
    block_length: int | None = None,
    shift: int = 0,
) -> NetworkSpec:
    """Read a config.json that uses the keys of transformers' Qwen3-MoE. Raises CheckpointError."""
    config = checkpoint.config
    config.require("attention_bias", False)
    for of_training in ("router_aux_loss_coef", "output_router_logits"):
        config.get(of_training)
    network = trunk_network(
        checkpoint,
        overrides,
        family,
        qkv_bias=False,
        qk_norm=True,
        block_length=block_length,
        shift=shift,
    )
    count, active = expert_counts(config)
    # The default of transformers' Qwen3MoeConfig is false.
    router = RouterSpec(renormalise=config.flag("norm_topk_prob"))
    experts = ExpertsSpec(count, active, config.integer("moe_intermediate_size"), router=router)
    step = config.integer("decoder_sparse_step", default=1)
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise CheckpointError(
            f"{config.path}: mlp_only_layers must be a list of layers, found {reprlib.repr(dense)}"
        )
    layers = (
        layer if i in dense or (i + 1) % step else replace(layer, mlp=experts)
        for i, layer in enumerate(network.layers)
    )
    return replace(network, layers=tuple(layers))


def expert_counts(config: Config) -> tuple[int, int]:
    """Return the number of experts, and the number of active experts per token.

    Raises CheckpointError.
    """
    count = config.integer("num_experts", low=2, high=1 << 16)
    return count, config.integer("num_experts_per_tok", high=count)


def _attention(
    config: Config,
    qkv_bias: bool,
    qk_norm: bool,
    block_length: int | None,
    visibility: str | None,
    has_query_scale: bool,
) -> AttentionSpec:
    config.require("hidden_act", "silu")
    config.require("use_sliding_window", False)
    config.get("sliding_window")  # has no effect if use_sliding_window is false
    config.require("use_mrope", False)
    config.require("mlp_bias", False)
    kinds = config.get("layer_types")
    if kinds is not None and (
        not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds)
    ):
        found = reprlib.repr(kinds)
        raise CheckpointError(
            f"{config.path}: layer_types other than full_attention are not supported: {found}"
        )
    heads = read_heads(config, head_size_key="head_dim")
    visibility = visibility or ("full" if block_length is None else "block")
    rope = read_rope(config, has_query_scale=has_query_scale)
    return AttentionSpec(
        *heads,
        rope,
        qk_norm,
        qkv_bias,
        visibility=visibility,
        block_length=block_length,
    )
