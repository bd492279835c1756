"""Defines the family of masked language models whose layers are a ``torch.nn.TransformerEncoder``.

A model of this family adds learned positions to the embeddings of the tokens, runs the encoder, and
applies one matrix with a bias. The keys of config.json are the argument names of
``torch.nn.TransformerEncoderLayer``. The tensors have the names of ``state_dict()``. The guide
docs/guides/masked-models.md shows the torch module.
"""

from __future__ import annotations

from dlm_export.checkpoints.folder import Checkpoint
from dlm_export.families.base import Family, Layout, Overrides
from dlm_export.families.masked import PRESET, max_canvas_length, read_attention
from dlm_export.families.reading import special_tokens
from dlm_export.network.spec import (
    EmbeddingSpec,
    HeadSpec,
    LayerSpec,
    MlpSpec,
    NetworkSpec,
)

ARCHITECTURE = "TransformerEncoderForMaskedLM"


def read_network(checkpoint: Checkpoint, overrides: Overrides) -> NetworkSpec:
    """Read the network from config.json. Raises CheckpointError."""
    config = checkpoint.config
    config.require("bias", True)
    config.get("dropout")  # only used in training
    config.require("activation", "relu", "gelu")
    activation = config.get("activation") or "relu"  # the default of TransformerEncoderLayer
    hidden_size, attention = read_attention(config, "d_model", "nhead")
    mlp = MlpSpec(config.integer("dim_feedforward"), activation, is_gated=False, bias=True)
    norm_eps = config.number("layer_norm_eps", 1e-5)  # the default of TransformerEncoderLayer
    norms = (
        ("attention_norm", "mlp_norm")
        if config.flag("norm_first")
        else ("attention_sum_norm", "mlp_sum_norm")
    )
    layer = LayerSpec(attention, mlp, norm_eps, norms, "layer-bias")
    positions = config.integer("max_position_embeddings")
    vocab_size = config.integer("vocab_size")
    tokens = special_tokens(checkpoint, vocab_size, overrides, "[MASK]")
    return NetworkSpec(
        family=FAMILY.name,
        architecture=ARCHITECTURE,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        layers=(layer,) * config.integer("num_layers", high=1024),
        norm_eps=norm_eps,
        tied_head=False,
        max_canvas_length=max_canvas_length(config, overrides, positions),
        shift=0,
        mask_token_id=tokens.mask,
        # As in BERT, the token after a text does not mark the end of an answer.
        eos_token_ids=(),
        pad_token_id=tokens.pad,
        norm_kind="layer-bias",
        embedding=EmbeddingSpec(positions),
        head=HeadSpec(final_norm="encoder.norm.weight" in checkpoint.tensors, bias=True),
    )


LAYOUT = Layout(
    embed="embed",
    layer="encoder.layers.{i}.",
    names={
        "attention_norm": "norm1",
        **{f"attention.{x}.weight": "self_attn.in_proj_weight" for x in "qkv"},
        **{f"attention.{x}.bias": "self_attn.in_proj_bias" for x in "qkv"},
        "attention.out": "self_attn.out_proj",
        "attention_sum_norm": "norm1",
        "mlp_norm": "norm2",
        "mlp.up": "linear1",
        "mlp.down": "linear2",
        "mlp_sum_norm": "norm2",
    },
    final_norm="encoder.norm",
    head="head",
    outside={"embed.positions": "positions"},
    fused=("q", "k", "v"),
)


FAMILY = Family(
    "torch-encoder",
    (ARCHITECTURE,),
    "torch.nn.TransformerEncoder",
    PRESET,
    read_network,
    LAYOUT.origins,
)
