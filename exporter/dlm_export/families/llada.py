"""Defines the family LLaDA: LLaDA 8B and 1.5 (arXiv:2502.09992, arXiv:2505.19223), and iLLaDA 8B.

LLaDA has full attention. The layers are the same as in Llama, but the tensor names are from OLMo.
iLLaDA has grouped queries and a tied head, so its files contain no tensor for the head.
"""

from __future__ import annotations

from dlm_export.checkpoints.folder import Checkpoint
from dlm_export.families.base import Family, Layout, Overrides
from dlm_export.families.reading import read_heads, special_tokens
from dlm_export.families.rope_config import read_rope
from dlm_export.network.spec import AttentionSpec, LayerSpec, MlpSpec, NetworkSpec


def read_network(checkpoint: Checkpoint, overrides: Overrides) -> NetworkSpec:
    """Read the shape of the network from a released LLaDA config.json. Raises CheckpointError."""
    config = checkpoint.config
    # LLaDA's configuration class contains all settings of OLMo. This module supports only the
    # values below. Other values would change what the network computes, so they are rejected.
    config.require("block_type", "llama", is_said=True)
    config.require("activation_type", "silu", is_said=True)
    config.require("layer_norm_type", "rms", is_said=True)
    config.require("rope", True, is_said=True)
    config.require("include_bias", False, is_said=True)
    config.require("weight_tying", True, False, is_said=True)
    config.require("alibi", False)
    config.require("attention_layer_norm", False)
    config.require("block_group_size", 1)
    config.require("bias_for_layer_norm", False)
    config.require("layer_norm_with_affine", True)
    config.require("input_emb_norm", False)
    config.require("scale_logits", False)
    # The following settings have no effect, because the checks above reject the features that use
    # these settings.
    for without_effect in ("alibi_bias_max", "attention_layer_norm_with_affine"):
        config.get(without_effect)
    hidden_size = config.integer("d_model")
    kv_heads = 1 if config.flag("multi_query_attention") else None
    heads = read_heads(config, "d_model", "n_heads", "n_kv_heads", kv_heads=kv_heads)
    vocab_size = config.integer("embedding_size", default=config.integer("vocab_size"))
    tokens = special_tokens(checkpoint, vocab_size, overrides)
    norm_eps = config.number("rms_norm_eps", 1e-5)  # the default of LLaDAConfig
    mlp_size = config.integer(
        "mlp_hidden_size", default=config.integer("mlp_ratio", default=4) * hidden_size
    )
    qkv_bias = config.flag("include_qkv_bias")
    attention = AttentionSpec(*heads, read_rope(config), qkv_bias=qkv_bias)
    return NetworkSpec(
        family="llada",
        architecture="LLaDAModelLM",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        layers=(LayerSpec(attention, MlpSpec(mlp_size), norm_eps),)
        * config.integer("n_layers", high=1024),
        norm_eps=norm_eps,
        tied_head=config.flag("weight_tying"),
        max_canvas_length=config.integer(
            "max_sequence_length", instead=overrides.max_canvas_length
        ),
        shift=0,
        mask_token_id=tokens.mask,
        eos_token_ids=tokens.eos,
        pad_token_id=tokens.pad,
    )


# The head and the last matrix of every MLP are both called ff_out. The gate of an MLP is called
# ff_proj.
LAYOUT = Layout(
    embed="model.transformer.wte",
    layer="model.transformer.blocks.{i}.",
    names={
        "attention_norm": "attn_norm",
        "attention.q": "q_proj",
        "attention.k": "k_proj",
        "attention.v": "v_proj",
        "attention.out": "attn_out",
        "mlp_norm": "ff_norm",
        "mlp.gate": "ff_proj",
        "mlp.up": "up_proj",
        "mlp.down": "ff_out",
    },
    final_norm="model.transformer.ln_f",
    head="model.transformer.ff_out",
)
FAMILY = Family(
    "llada",
    ("LLaDAModelLM",),
    "LLaDA 8B, LLaDA 1.5, iLLaDA 8B",
    "fast-dllm",
    read_network,
    LAYOUT.origins,
)
