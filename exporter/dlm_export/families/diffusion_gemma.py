"""Defines the family DiffusionGemma: a causal encoder and a bidirectional decoder with one trunk.

The layers are the same as those of Gemma 4 in transformers. The encoder computes the prompt in
causal passes. The decoder denoises 256 tokens at a time in draft passes, in which all of these
tokens attend to each other. Both kinds of passes use the same weights, with one exception: the
output of each layer is multiplied by a learned number, which differs between the two kinds. The
decoder starts with random tokens, so there is no mask token. The predictions of each draft pass are
an input of the next draft pass (self-conditioning).

The vision tower of a release is left out.
"""

from __future__ import annotations

import reprlib
from typing import Any

from dlm_export.checkpoints.folder import Checkpoint, CheckpointError, Config
from dlm_export.families.base import Family, Layout, Origin, Overrides, Piece
from dlm_export.families.reading import unmasked_tokens
from dlm_export.families.trunks import TRUNK
from dlm_export.network.rope_scaling import Linear
from dlm_export.network.spec import (
    CONDITIONING,
    AttentionSpec,
    ConditioningSpec,
    EmbeddingSpec,
    ExpertsSpec,
    HeadSpec,
    LayerSpec,
    NetworkSpec,
    Rope,
    RouterSpec,
)

NAME, ARCHITECTURE = "diffusion-gemma", "DiffusionGemmaForBlockDiffusion"
FULL, SLIDING = "full_attention", "sliding_attention"
ACTIVATION = "gelu-tanh"
# The defaults of transformers' DiffusionGemmaTextConfig.
_EVERY, _GLOBAL_HEAD_SIZE, _SOFTCAP, _CANVAS = 6, 512, 30.0, 256
_ROPES: dict[str, dict[str, Any]] = {
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}
_OF_IMAGES = (
    *("vision_config", "image_token_id", "boi_token_id", "eoi_token_id"),
    "vision_soft_tokens_per_image",
)


def read_network(checkpoint: Checkpoint, overrides: Overrides) -> NetworkSpec:
    """Read the network from a released config.json. Raises CheckpointError."""
    outer = checkpoint.config
    for key in _OF_IMAGES:
        outer.get(key)
    outer.require("tie_word_embeddings", True)
    config = outer.section("text_config")
    config.require("tie_word_embeddings", True)
    config.require("attention_bias", False)
    config.require("hidden_activation", "gelu_pytorch_tanh")
    config.require("attention_k_eq_v", True)
    # With "vision", only the tokens of an image attend to each other in both directions.
    config.require("use_bidirectional_attention", "vision")
    vocab_size, hidden_size = config.integer("vocab_size"), config.integer("hidden_size")
    norm_eps = config.number("rms_norm_eps", 1e-6)
    block = outer.integer("canvas_length", _CANVAS, instead=overrides.attention_block)
    size = config.integer("intermediate_size")
    count = config.integer("num_experts", low=2, high=1 << 16)
    experts = ExpertsSpec(
        count,
        config.integer("top_k_experts", high=count),
        config.integer("moe_intermediate_size"),
        shared_size=size,
        activation=ACTIVATION,
        router=RouterSpec(has_norm=True, has_expert_scales=True),
        branch_norms=True,
    )
    attentions = _attentions(config, block)
    layers = tuple(
        LayerSpec(
            attention,
            experts,
            norm_eps,
            ("attention_norm", "attention_out_norm", "mlp_out_norm"),
            has_scalar=True,
        )
        for attention in attentions
    )
    tokens = unmasked_tokens(checkpoint, config, vocab_size, overrides)
    return NetworkSpec(
        family=NAME,
        architecture=ARCHITECTURE,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        layers=layers,
        norm_eps=norm_eps,
        tied_head=True,
        max_canvas_length=config.integer(
            "max_position_embeddings", instead=overrides.max_canvas_length
        ),
        shift=0,
        mask_token_id=tokens.mask,
        eos_token_ids=tokens.eos,
        pad_token_id=tokens.pad,
        noise="uniform",
        embedding=EmbeddingSpec(scale=hidden_size**0.5),
        head=HeadSpec(softcap=config.number("final_logit_softcapping", _SOFTCAP)),
        conditioning=ConditioningSpec(size, ACTIVATION),
    )


def _attentions(config: Config, block: int) -> list[AttentionSpec]:
    kinds = _kinds(config)
    heads = config.integer("num_attention_heads", high=4096)
    kv_heads = config.integer("num_key_value_heads", high=4096)
    head_size = config.integer("head_dim", high=4096)
    ropes = _ropes(config)
    # A window of transformers includes the query itself.
    window = config.integer("sliding_window", low=2) - 1
    found = []
    for i, (kind, own) in enumerate(zip(kinds, _of_layers(config, kinds), strict=True)):
        of_layer = {"num_key_value_heads": kv_heads, "head_dim": head_size} | own
        if heads % of_layer["num_key_value_heads"]:
            raise CheckpointError(
                f"{config.path}: num_attention_heads {heads} is not a multiple of the {of_layer['num_key_value_heads']} key "
                f"and value heads of layer {i}"
            )
        found.append(
            AttentionSpec(
                heads,
                of_layer["num_key_value_heads"],
                of_layer["head_dim"],
                ropes[kind],
                qk_norm=True,
                visibility="draft",
                block_length=block,
                window=window if kind == SLIDING else None,
                scale=1.0,
                has_values=kind == SLIDING,
                value_norm=True,
            )
        )
    return found


def _kinds(config: Config) -> list[str]:
    """Return the kind of attention of each layer."""
    count = config.integer("num_hidden_layers", high=1024)
    kinds = config.get("layer_types")
    if kinds is None:
        kinds = [SLIDING if i % _EVERY else FULL for i in range(1, count + 1)]
        return [*kinds[:-1], FULL]
    if not isinstance(kinds, list) or len(kinds) != count:
        raise CheckpointError(
            f"{config.path}: layer_types must be a list of {count} entries, found {reprlib.repr(kinds)}"
        )
    for i, kind in enumerate(kinds):
        if kind not in (FULL, SLIDING):
            raise CheckpointError(
                f"{config.path}: layer {i} has the type {reprlib.repr(kind)} in layer_types, which is not supported, only "
                f"{FULL} and {SLIDING}"
            )
    if kinds[-1] != FULL:
        raise CheckpointError(
            f"{config.path}: the last entry of layer_types must be {FULL}, as in the released code, found {kinds[-1]}"
        )
    return kinds


def _of_layers(config: Config, kinds: list[str]) -> list[dict[str, int]]:
    """Return the head size and number of key heads that config.json sets for each layer.

    An older config.json sets them for all layers with full attention.
    """
    head_size = config.integer("global_head_dim", _GLOBAL_HEAD_SIZE, high=4096)
    kv_heads = config.get("num_global_key_value_heads")
    by_layer = config.get("per_layer_config")
    if by_layer is None:
        full = {"head_dim": head_size}
        if kv_heads is not None:
            full["num_key_value_heads"] = config.integer("num_global_key_value_heads", high=4096)
        return [full if kind == FULL else {} for kind in kinds]
    if not isinstance(by_layer, dict) or not all(
        isinstance(own, dict) for own in by_layer.values()
    ):
        raise CheckpointError(
            f"{config.path}: per_layer_config must have an object for each layer, found {reprlib.repr(by_layer)}"
        )
    found: list[dict[str, int]] = [{} for _ in kinds]
    for layer, own in by_layer.items():
        if layer not in map(str, range(len(kinds))):
            raise CheckpointError(
                f"{config.path}: per_layer_config names layer {reprlib.repr(layer)}, but the layers are 0 to {len(kinds) - 1}"
            )
        section = Config(config.path, own)
        found[int(layer)] = {
            key: section.integer(key, high=4096)
            for key in ("head_dim", "num_key_value_heads")
            if section.get(key) is not None
        }
        if unknown := section.unread():
            raise CheckpointError(
                f"{config.path}: {reprlib.repr(unknown[0])} of layer {layer} in per_layer_config is not supported"
            )
    return found


def _ropes(config: Config) -> dict[str, Rope]:
    """Return the rotary positions of each kind of attention."""
    found = config.get("rope_parameters")
    if found is None:
        found = _ROPES
    if not isinstance(found, dict) or not all(isinstance(found.get(kind), dict) for kind in _ROPES):
        raise CheckpointError(
            f"{config.path}: rope_parameters must have an object for {SLIDING} and one for {FULL}, found "
            f"{reprlib.repr(found)}"
        )
    return {kind: _rope(config, kind, found[kind]) for kind in _ROPES}


def _rope(config: Config, kind: str, values: dict[str, Any]) -> Rope:
    settings = Config(config.path, values)
    name = settings.get("rope_type")
    if name not in ("default", "proportional"):
        raise CheckpointError(
            f"{config.path}: rope_type {reprlib.repr(name)} of {kind} is not supported, only default and proportional"
        )
    theta = settings.number("rope_theta")
    share = settings.number("partial_rotary_factor", 1.0)
    factor = settings.number("factor", 1.0) if name == "proportional" else 1.0
    if share > 1:
        raise CheckpointError(
            f"{config.path}: partial_rotary_factor {share:g} of {kind} is greater than 1"
        )
    if unknown := settings.unread():
        raise CheckpointError(
            f"{config.path}: {reprlib.repr(unknown[0])} in the rope_parameters of {kind} is not supported"
        )
    if name == "default":
        return Rope(theta, share)
    try:
        return Rope(theta, scaling=None if factor == 1 else Linear(factor), turning=share)
    except ValueError as err:
        raise CheckpointError(f"{config.path}: rope_parameters of {kind}: {err}") from err


LAYOUT = Layout(
    embed="model.decoder.embed_tokens",
    layer="model.decoder.layers.{i}.",
    names=TRUNK.names
    | {
        "attention_out_norm": "post_attention_layernorm",
        "mlp.shared_norm": "pre_feedforward_layernorm",
        "mlp.shared.gate": "mlp.gate_proj",
        "mlp.shared.up": "mlp.up_proj",
        "mlp.shared.down": "mlp.down_proj",
        "mlp.shared_out_norm": "post_feedforward_layernorm_1",
        "mlp.router.norm.weight": "router.scale",
        "mlp.router": "router.proj",
        "mlp.router.expert_scales": "router.per_expert_scale",
        "mlp.experts_norm": "pre_feedforward_layernorm_2",
        "mlp.experts.gate.weight": "experts.gate_up_proj",
        "mlp.experts.up.weight": "experts.gate_up_proj",
        "mlp.experts.down.weight": "experts.down_proj",
        "mlp.experts_out_norm": "post_feedforward_layernorm_2",
        "mlp_out_norm": "post_feedforward_layernorm",
        "draft_scalar": "layer_scalar",
        "scalar": "layer_scalar",
    },
    final_norm="model.decoder.norm",
    head="lm_head",
    outside={
        f"{CONDITIONING}.norm": "model.decoder.self_conditioning.pre_norm",
        f"{CONDITIONING}.gate": "model.decoder.self_conditioning.gate_proj",
        f"{CONDITIONING}.up": "model.decoder.self_conditioning.up_proj",
        f"{CONDITIONING}.down": "model.decoder.self_conditioning.down_proj",
    },
)


def origins(network: NetworkSpec, checkpoint: Checkpoint) -> dict[str, Origin]:
    """Return the origin of each parameter.

    The gate and up matrices of all experts are in one tensor ``[experts, 2 * size, hidden]``. The
    encoder and the decoder have the same weights, except that each has its own tensor
    ``layer_scalar`` in every layer.
    """
    found = LAYOUT.origins(network, checkpoint)
    for i in range(len(network.layers)):
        found[f"blocks.{i}.scalar"] = Origin.of(
            f"model.encoder.language_model.layers.{i}.layer_scalar"
        )
    for gate, up, _ in network.mixtures():
        for number, stack in enumerate((gate, up)):
            (piece,) = found[stack.weight].pieces
            rows = (number * stack.outputs, (number + 1) * stack.outputs)
            found[stack.weight] = Origin((Piece(piece.tensor, rows, axis=1),), transpose=True)
    return found


FAMILY = Family(
    NAME,
    (ARCHITECTURE,),
    "DiffusionGemma 26B-A4B, text only",
    NAME,
    read_network,
    origins,
    left_out=("model.encoder.vision_tower.", "model.encoder.embed_vision."),
)
