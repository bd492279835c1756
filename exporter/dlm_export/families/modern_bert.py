"""Defines the family ModernBERT (arXiv:2412.13663) of masked language models.

ModernBERT has rotary positions and gated MLPs, and most layers have attention in a window. Layers
with full attention and layers with attention in a window have different rotary bases. The first
layer has no norm before attention, because the embeddings are normalised.
"""

from __future__ import annotations

import reprlib

from dlm_export.checkpoints.folder import Checkpoint, CheckpointError, Config
from dlm_export.families.base import Family, Layout, Overrides
from dlm_export.families.masked import PRESET
from dlm_export.families.reading import read_heads, special_tokens
from dlm_export.network.spec import (
    AttentionSpec,
    EmbeddingSpec,
    HeadSpec,
    LayerSpec,
    MlpSpec,
    NetworkSpec,
    Rope,
)

FULL, LOCAL = "full_attention", "sliding_attention"
# The defaults of transformers' ModernBertConfig.
_EVERY, _THETAS = 3, {FULL: 160_000.0, LOCAL: 10_000.0}
_THETA_KEYS = {FULL: "global_rope_theta", LOCAL: "local_rope_theta"}


def read_network(checkpoint: Checkpoint, overrides: Overrides) -> NetworkSpec:
    """Read the network from a released ModernBERT config.json. Raises CheckpointError."""
    config = checkpoint.config
    config.require("hidden_activation", "gelu")
    config.require("classifier_activation", "gelu")
    config.require("rope_scaling")
    # These keys affect only training, heads for tasks such as classification, or the choice of an
    # attention implementation.
    for key in (
        *("mlp_dropout", "classifier_dropout", "classifier_pooling", "sparse_prediction"),
        *("sparse_pred_ignore_index", "deterministic_flash_attn", "reference_compile"),
        *("layer_norm_eps", "position_embedding_type", "repad_logits_with_grad"),
    ):
        config.get(key)
    heads = read_heads(config, kv_key=None)
    kinds = _kinds(config)
    thetas = _thetas(config)
    # local_attention counts the tokens on both sides of a token, but ``window`` counts one side.
    window = config.integer("local_attention", 128, low=2) // 2
    bias = config.flag("attention_bias")
    mlp = MlpSpec(config.integer("intermediate_size"), "gelu", bias=config.flag("mlp_bias"))
    norm_eps = config.number("norm_eps", 1e-5)
    norm_kind = "layer-bias" if config.flag("norm_bias") else "layer"
    layers = tuple(
        LayerSpec(
            AttentionSpec(
                *heads,
                Rope(thetas[kind]),
                qkv_bias=bias,
                out_bias=bias,
                window=window if kind == LOCAL else None,
            ),
            mlp,
            norm_eps,
            ("attention_norm", "mlp_norm") if i else ("mlp_norm",),
            norm_kind,
        )
        for i, kind in enumerate(kinds)
    )
    vocab_size = config.integer("vocab_size")
    tokens = special_tokens(checkpoint, vocab_size, overrides, "[MASK]")
    return NetworkSpec(
        family="modern-bert",
        architecture="ModernBertForMaskedLM",
        vocab_size=vocab_size,
        hidden_size=config.integer("hidden_size"),
        layers=layers,
        norm_eps=norm_eps,
        tied_head=config.flag("tie_word_embeddings", True),
        max_canvas_length=config.integer(
            "max_position_embeddings", 8192, instead=overrides.max_canvas_length
        ),
        shift=0,
        mask_token_id=tokens.mask,
        # Masked language models have no end tokens. In training, the token after a text does not
        # mark the end of an answer.
        eos_token_ids=(),
        pad_token_id=tokens.pad,
        norm_kind=norm_kind,
        embedding=EmbeddingSpec(norm=True),
        head=HeadSpec(
            transform="gelu",
            transform_bias=config.flag("classifier_bias"),
            bias=config.flag("decoder_bias", True),
        ),
    )


def _kinds(config: Config) -> list[str]:
    """Return the kind of attention of each layer."""
    count = config.integer("num_hidden_layers", high=1024)
    every = config.integer("global_attn_every_n_layers", _EVERY)
    kinds = config.get("layer_types")
    if kinds is None:
        return [LOCAL if i % every else FULL for i in range(count)]
    if not isinstance(kinds, list) or len(kinds) != count or {*kinds} - {FULL, LOCAL}:
        raise CheckpointError(
            f"{config.path}: layer_types must be a list of {count} entries {FULL} or {LOCAL}, found {reprlib.repr(kinds)}"
        )
    return kinds


def _thetas(config: Config) -> dict[str, float]:
    """Return the rotary base of each kind of attention."""
    found = {kind: config.number(key, _THETAS[kind]) for kind, key in _THETA_KEYS.items()}
    parameters = config.get("rope_parameters")
    for kind in found if isinstance(parameters, dict) else ():
        own = parameters.get(kind)
        if not isinstance(own, dict) or own.get("rope_type", "default") != "default":
            raise CheckpointError(
                f"{config.path}: rope_parameters of {kind} must have the rope_type default, found {reprlib.repr(own)}"
            )
        found[kind] = config.positive("rope_theta", own.get("rope_theta", found[kind]))
    return found


LAYOUT = Layout(
    embed="model.embeddings.tok_embeddings",
    layer="model.layers.{i}.",
    names={
        "attention_norm": "attn_norm",
        "attention.q": "attn.Wqkv",
        "attention.k": "attn.Wqkv",
        "attention.v": "attn.Wqkv",
        "attention.out": "attn.Wo",
        "mlp_norm": "mlp_norm",
        "mlp.gate": "mlp.Wi",
        "mlp.up": "mlp.Wi",
        "mlp.down": "mlp.Wo",
    },
    final_norm="model.final_norm",
    head="decoder",
    outside={
        "embed.norm": "model.embeddings.norm",
        "transform": "head.dense",
        "transform.norm": "head.norm",
    },
    fused=("q", "k", "v", "gate", "up"),
)


FAMILY = Family(
    "modern-bert",
    ("ModernBertForMaskedLM",),
    "ModernBERT",
    PRESET,
    read_network,
    LAYOUT.origins,
)
