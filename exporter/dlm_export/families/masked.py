"""Reads masked language models with the config keys and tensor names of BERT (arXiv:1810.04805).

BERT and RoBERTa have the same layers: full attention, a norm after each residual sum, and an MLP
without a gate. BERT and RoBERTa use different rows of the position table for the first position,
and some of their tensor names differ.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

from dlm_export.checkpoints.folder import Checkpoint, CheckpointError, Config
from dlm_export.families.base import Family, Layout, Origin, Overrides
from dlm_export.families.reading import read_heads, special_tokens
from dlm_export.network.spec import (
    AttentionSpec,
    EmbeddingSpec,
    HeadSpec,
    LayerSpec,
    MlpSpec,
    NetworkSpec,
)

PRESET = "llada"
"""The default preset of masked language models. It commits one token per pass, without a cache."""
_LAYER = {
    "attention.q": "attention.self.query",
    "attention.k": "attention.self.key",
    "attention.v": "attention.self.value",
    "attention.out": "attention.output.dense",
    "attention_sum_norm": "attention.output.LayerNorm",
    "mlp.up": "intermediate.dense",
    "mlp.down": "output.dense",
    "mlp_sum_norm": "output.LayerNorm",
}
# The names that the parameters of a LayerNorm have in checkpoints from before 2019.
_OLD_NAMES = {"weight": "gamma", "bias": "beta"}


def layout(encoder: str, transform: str, transform_norm: str, decoder: str, bias: str) -> Layout:
    """Return the tensor names of a checkpoint whose encoder has the name ``encoder``.

    The other arguments are the names of the parts of the prediction head.
    """
    embeddings = f"{encoder}.embeddings"
    return Layout(
        embed=f"{embeddings}.word_embeddings",
        layer=f"{encoder}.encoder.layer.{{i}}.",
        names=_LAYER,
        final_norm="",
        head=decoder,
        outside={
            "embed.positions": f"{embeddings}.position_embeddings",
            "embed.types": f"{embeddings}.token_type_embeddings",
            "embed.norm": f"{embeddings}.LayerNorm",
            "transform": transform,
            "transform.norm": transform_norm,
            "head.bias": bias,
        },
    )


def family(
    name: str,
    architectures: tuple[str, ...],
    description: str,
    layout: Layout,
    first_position: Callable[[Checkpoint], int],
    mask_text: str,
    left_out: tuple[str, ...],
) -> Family:
    """Return a family of masked language models.

    Args:
        name: Name of the family.
        architectures: Entries of ``architectures`` in config.json.
        description: A text that describes the family in messages.
        layout: The names of the tensors.
        first_position: A function that returns the row of the position table for position 0 of a
            canvas.
        mask_text: The usual text of the mask token, for checkpoints that do not record it.
        left_out: Prefixes of the names of unused tensors, such as those of BERT's head for
            next-sentence prediction.
    """

    def read_network(checkpoint: Checkpoint, overrides: Overrides) -> NetworkSpec:
        """Read the network from a released config.json. Raises CheckpointError."""
        first = first_position(checkpoint)
        return _read_network(checkpoint, overrides, name, first, mask_text)

    encoder = layout.embed.partition(".")[0]
    pooler = f"{encoder}.pooler."
    return Family(
        name,
        architectures,
        description,
        PRESET,
        read_network,
        functools.partial(_origins, layout),
        left_out=(pooler, layout.outside["head.bias"], *left_out),
    )


def _read_network(
    checkpoint: Checkpoint,
    overrides: Overrides,
    family: str,
    first_position: int,
    mask_text: str,
) -> NetworkSpec:
    config = checkpoint.config
    config.require("hidden_act", "gelu")
    config.require("position_embedding_type", "absolute")
    config.require("is_decoder", False)
    config.require("add_cross_attention", False)
    for of_training in (
        "hidden_dropout_prob",
        "attention_probs_dropout_prob",
        "classifier_dropout",
    ):
        config.get(of_training)
    hidden_size, attention = read_attention(config, "hidden_size", "num_attention_heads")
    mlp = MlpSpec(config.integer("intermediate_size"), "gelu", is_gated=False, bias=True)
    norm_eps = config.number("layer_norm_eps", 1e-12)  # the default of transformers' BertConfig
    norms = ("attention_sum_norm", "mlp_sum_norm")
    layer = LayerSpec(attention, mlp, norm_eps, norms, "layer-bias")
    rows = config.integer("max_position_embeddings", low=first_position + 1)
    vocab_size = config.integer("vocab_size")
    tokens = special_tokens(checkpoint, vocab_size, overrides, mask_text)
    return NetworkSpec(
        family=family,
        architecture=config.get("architectures")[0],
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        layers=(layer,) * config.integer("num_hidden_layers", high=1024),
        norm_eps=norm_eps,
        tied_head=config.flag("tie_word_embeddings", True),
        max_canvas_length=max_canvas_length(config, overrides, rows - first_position),
        shift=0,
        mask_token_id=tokens.mask,
        # Masked language models have no end tokens. In training, the token after a text does not
        # mark the end of an answer.
        eos_token_ids=(),
        pad_token_id=tokens.pad,
        norm_kind="layer-bias",
        embedding=EmbeddingSpec(
            rows,
            first_position,
            config.integer("type_vocab_size"),
            norm=True,
            padding=first_position - 1 if first_position else None,
        ),
        head=HeadSpec(final_norm=False, transform="gelu", transform_bias=True, bias=True),
    )


def read_attention(config: Config, size_key: str, heads_key: str) -> tuple[int, AttentionSpec]:
    """Return the hidden size and the attention of an encoder with learned positions.

    ``size_key`` and ``heads_key`` are the names of the hidden size and the number of heads in
    config.json. Raises CheckpointError.
    """
    heads = read_heads(config, size_key, heads_key, None)
    attention = AttentionSpec(*heads, rope=None, qkv_bias=True, out_bias=True)
    return config.integer(size_key), attention


def max_canvas_length(config: Config, overrides: Overrides, learned: int) -> int:
    """Return the maximum canvas length. ``learned`` is the number of learned positions.

    Raises CheckpointError if the user wants longer canvases.
    """
    wanted = overrides.max_canvas_length
    if wanted is not None and wanted > learned:
        raise CheckpointError(
            f"{config.path}: --max-canvas-length {wanted} is more than the {learned} positions "
            "that the checkpoint learned"
        )
    return wanted or learned


def _origins(layout: Layout, network: NetworkSpec, checkpoint: Checkpoint) -> dict[str, Origin]:
    found, tensors = layout.origins(network, checkpoint), checkpoint.tensors
    if f"{layout.head}.bias" in tensors:  # if there are two biases, transformers uses this one
        found["head.bias"] = Origin.of(f"{layout.head}.bias")
    for parameter, origin in found.items():
        (piece,) = origin.pieces
        start, _, kind = piece.tensor.rpartition(".")
        old = f"{start}.{_OLD_NAMES.get(kind, kind)}"
        if piece.tensor not in tensors and old in tensors:
            found[parameter] = replace(origin, pieces=(replace(piece, tensor=old),))
    return found
