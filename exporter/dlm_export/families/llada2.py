"""Defines the family LLaDA2.0, 2.1 and 2.2, mini and flash (arXiv:2512.15745).

LLaDA2 has block-causal attention with blocks of 32 tokens. Each row of logits predicts the token at
its own position (no shift). The layers are the same as in Bailing-MoE. One matrix computes queries,
keys and values. The first rows of this matrix are the query heads, followed by the key heads and
the value heads. Queries and keys are normed, and then half of each head's features are rotated. The
router first chooses the best groups of experts, and then the experts with the best scores in the
chosen groups. A score is a sigmoid plus a bias. The routing weights do not include the bias. Config
keys and tensor names are the same as in the released ``LLaDA2MoeModelLM``.

LLaDA2.2 has no groups. Instead, all tokens of a block choose from the same ``expert_capacity``
experts. A token for deleting and one for splitting rewrite blocks in its decoding loop.
"""

from __future__ import annotations

from dlm_export.checkpoints.folder import Checkpoint, CheckpointError, Config
from dlm_export.families.base import Family, Layout, Overrides
from dlm_export.families.reading import read_heads, with_tokens
from dlm_export.families.rope_config import read_rope
from dlm_export.families.trunks import EXPERT_NAMES, expert_counts, network_of
from dlm_export.network.spec import (
    AttentionSpec,
    ExpertsSpec,
    LayerSpec,
    MlpSpec,
    NetworkSpec,
    RouterSpec,
)

# All releases were trained with this block length, but their config.json does not contain the block
# length.
BLOCK_LENGTH = 32


def read_network(checkpoint: Checkpoint, overrides: Overrides) -> NetworkSpec:
    """Read the network from a released LLaDA2 config.json. Raises CheckpointError."""
    config = checkpoint.config
    config.require("hidden_act", "silu")
    config.require("use_qkv_bias", False)
    config.require("use_bias", False)
    config.require("use_sliding_window", False)
    config.require("score_function", "sigmoid")
    config.require("norm_topk_prob", True)
    config.require("router_dtype", "fp32")
    config.require("norm_head", False)
    for without_effect in (
        "sliding_window",
        "use_qk_norm",
        "output_router_logits",
        "router_aux_loss_coef",
    ):
        config.get(without_effect)
    attention = AttentionSpec(
        *read_heads(config, head_size_key="head_dim"),
        read_rope(config),
        qk_norm=_has(checkpoint, "attention.query_layernorm.weight"),
        visibility="block",
        block_length=_block_length(config, overrides),
    )
    norm_eps = config.number("rms_norm_eps")
    count = config.integer("num_hidden_layers", high=1024)
    dense = config.integer("first_k_dense_replace", default=0, low=0, high=count)
    experts = _experts(config, has_bias=_has(checkpoint, "mlp.gate.expert_bias"))
    mlps: list[MlpSpec | ExpertsSpec] = [experts] * count
    mlps[:dense] = [MlpSpec(config.integer("intermediate_size"))] * dense
    layers = tuple(LayerSpec(attention, mlp, norm_eps) for mlp in mlps)
    network = network_of(checkpoint, overrides, "llada2", layers, norm_eps)
    tokens = {key: config.get(key) for key in LOOP_TOKENS}
    if experts.router.block_experts is None and set(tokens.values()) == {None}:
        return network
    if None in tokens.values():
        raise CheckpointError(
            f"{config.path}: expert_capacity, delete_token_id and split_token_id belong to LLaDA2.2, whose loop needs both "
            "tokens. Add the missing ones. Their ids are defaults of generate() in the checkpoint's modeling file."
        )
    return with_tokens(checkpoint, network, **tokens)


LOOP_TOKENS = ("delete_token_id", "split_token_id")
"""Config keys that only LLaDA2.2 has. The released config.json may lack them."""


def _block_length(config: Config, overrides: Overrides) -> int:
    """Return the block length of the attention. Routers with a capacity use the same blocks."""
    if config.get("expert_capacity") is not None:
        return config.integer("block_size", instead=overrides.attention_block)
    return config.integer("block_length", BLOCK_LENGTH, instead=overrides.attention_block)


def _has(checkpoint: Checkpoint, tensor: str) -> bool:
    """Return True if any layer contains a tensor named ``tensor``.

    Callers need this function because config.json does not record which tensors the layers contain.
    """
    return any(
        name.startswith("model.layers.") and name.endswith(f".{tensor}")
        for name in checkpoint.tensors
    )


def _experts(config: Config, *, has_bias: bool) -> ExpertsSpec:
    # Mark this key as read. Its value is ignored, because the tensors show whether there is a bias.
    config.get("moe_router_enable_expert_bias")
    count, active = expert_counts(config)
    of_block = None
    groups = config.integer("n_group", default=1, high=count)
    kept = config.integer("topk_group", default=groups, high=groups)
    if config.get("expert_capacity") is not None:
        of_block = config.integer("expert_capacity", low=active, high=count)
        groups = kept = 1  # a router with a capacity ignores groups
    if count % groups or (groups > 1 and count == groups) or active > count // groups * kept:
        raise CheckpointError(
            f"{config.path}: num_experts {count} in n_group {groups}, of which topk_group {kept} are active, cannot give each "
            f"token num_experts_per_tok {active}"
        )
    size = config.integer("moe_intermediate_size")
    shared = config.integer("num_shared_experts", default=0, low=0, high=1 << 10)
    shared_size = config.integer(
        "moe_shared_expert_intermediate_size", default=size * shared, low=0
    )
    scale = config.number("routed_scaling_factor", 1.0)
    router = RouterSpec(
        "sigmoid",
        "choice" if has_bias else None,
        scale=scale,
        groups=groups,
        active_groups=kept,
        block_experts=of_block,
    )
    return ExpertsSpec(count, active, size, shared_size, router=router)


LAYOUT = Layout(
    embed="model.word_embeddings",
    layer="model.layers.{i}.",
    names=EXPERT_NAMES
    | {
        "attention_norm": "input_layernorm",
        "attention.q": "attention.query_key_value",
        "attention.k": "attention.query_key_value",
        "attention.v": "attention.query_key_value",
        "attention.out": "attention.dense",
        "attention.q_norm": "attention.query_layernorm",
        "attention.k_norm": "attention.key_layernorm",
        "mlp_norm": "post_attention_layernorm",
        "mlp.gate": "mlp.gate_proj",
        "mlp.up": "mlp.up_proj",
        "mlp.down": "mlp.down_proj",
        "mlp.router.bias": "mlp.gate.expert_bias",
        "mlp.shared.gate": "mlp.shared_experts.gate_proj",
        "mlp.shared.up": "mlp.shared_experts.up_proj",
        "mlp.shared.down": "mlp.shared_experts.down_proj",
    },
    final_norm="model.norm",
    head="lm_head",
    fused=("q", "k", "v"),
)


FAMILY = Family(
    "llada2",
    ("LLaDA2MoeModelLM",),
    "LLaDA2.0, 2.1 and 2.2, mini and flash",
    "llada2",
    read_network,
    LAYOUT.origins,
)
