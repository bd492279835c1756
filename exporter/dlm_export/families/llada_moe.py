"""Defines the family LLaDA-MoE, 7B-A1B (arXiv:2509.24389), with 8 of 64 experts per token.

LLaDA-MoE has full attention. Each row of logits predicts the token at its own position (no shift).
The layers are the same as in OLMoE. Queries and keys are normed. The routing weights of a token's
experts are the experts' scores, which are not normalised. If a checkpoint contains a bias, the bias
is added both to the scores that choose experts and to the routing weights. Config keys and tensor
names are the same as in the released ``LLaDAMoEModelLM``.
"""

from __future__ import annotations

from dataclasses import replace

from dlm_export.checkpoints.folder import Checkpoint, CheckpointError, Config
from dlm_export.families.base import Family, Overrides
from dlm_export.families.reading import read_heads
from dlm_export.families.rope_config import read_rope
from dlm_export.families.trunks import MIXTURE, expert_counts, network_of
from dlm_export.network.spec import (
    AttentionSpec,
    ExpertsSpec,
    LayerSpec,
    MlpSpec,
    NetworkSpec,
    RouterSpec,
)


def read_network(checkpoint: Checkpoint, overrides: Overrides) -> NetworkSpec:
    """Read the network from a released LLaDA-MoE config.json. Raises CheckpointError."""
    config = checkpoint.config
    config.require("hidden_act", "silu")
    config.require("attention_bias", False)
    config.require("clip_qkv")
    config.require("sliding_window")
    config.require("norm_topk_prob", False)
    config.require("moe_router_score_function", "softmax")
    for unread in ("router_num_group", "router_topk_group", "routed_scaling_factor"):
        config.require(unread, 1, 1.0)
    config.get("router_aux_loss_coef")  # has an effect only in training
    qk_norm = config.flag("qk_layernorm")
    attention = AttentionSpec(*read_heads(config), read_rope(config), qk_norm=qk_norm)
    norm_eps = config.number("rms_norm_eps")
    layers = tuple(LayerSpec(attention, mlp, norm_eps) for mlp in _mlps(config))
    return network_of(checkpoint, overrides, "llada-moe", layers, norm_eps)


def _mlps(config: Config) -> list[MlpSpec | ExpertsSpec]:
    """Describe each layer's MLP, or its experts if its ``moe_layer_freq`` is not 0."""
    count, active = expert_counts(config)
    bias = "weights" if config.flag("moe_router_enable_expert_bias") else None
    shared = config.integer("shared_expert_intermediate_size", default=0, low=0)
    router = RouterSpec(bias=bias, renormalise=False)
    experts = ExpertsSpec(
        count, active, config.integer("expert_intermediate_size"), shared, router=router
    )
    layers = config.integer("num_hidden_layers", high=1024)
    frequency = config.get("moe_layer_freq")
    if frequency is None:
        frequency = [1] * layers
    if (
        not isinstance(frequency, list)
        or len(frequency) != layers
        or any(each not in (0, 1) for each in frequency)
    ):
        raise CheckpointError(
            f"{config.path}: moe_layer_freq must be a list of {layers} numbers, 1 for a layer with experts"
        )
    dense_size = config.integer(
        "dense_intermediate_size", default=0 if all(frequency) else None, low=0
    )
    return [experts if has_experts else MlpSpec(dense_size) for has_experts in frequency]


LAYOUT = replace(
    MIXTURE,
    names=MIXTURE.names
    | {
        "mlp.router.bias": "mlp.expert_bias",
        "mlp.shared.gate": "shared_expert.gate_proj",
        "mlp.shared.up": "shared_expert.up_proj",
        "mlp.shared.down": "shared_expert.down_proj",
    },
)
FAMILY = Family(
    "llada-moe", ("LLaDAMoEModelLM",), "LLaDA-MoE 7B-A1B", "fast-dllm", read_network, LAYOUT.origins
)
