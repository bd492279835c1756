"""The released mixtures of experts that the benchmarks for GPUs build, with few layers.

The widths, heads, routers and experts are those of the released models. The weights are random, and
the vocabulary has 1024 tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.shapes import random_checkpoint

# The import of shapes adds the tests' folder to the path.
from checkpoints import (  # isort: skip
    diffusion_gemma_config,
    llada2_config,
    llada_moe_config,
    qwen3_moe_config,
)

IDS = {"vocab_size": 1024, "mask_token_id": 1000, "eos_token_id": 1001, "pad_token_id": 1001}
WIDE = IDS | {"hidden_size": 2048, "num_experts_per_tok": 8, "max_position_embeddings": 4096}
QWEN3_30B = WIDE | {
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "moe_intermediate_size": 768,
}


@dataclass(frozen=True)
class Model:
    """A released model.

    ``few`` is the number of layers to compare with torch. ``config`` returns the configuration for
    a number of layers, with the keys of ``changes``.
    """

    layers: int
    vocab_size: int
    config: Callable[..., dict[str, Any]]
    few: int = 2


def _llada_moe(layers: int) -> dict[str, Any]:
    return llada_moe_config(
        **WIDE,
        num_attention_heads=16,
        num_key_value_heads=16,
        num_experts=64,
        expert_intermediate_size=1024,
        num_hidden_layers=layers,
        moe_layer_freq=[1] * layers,
    )


def _llada2(layers: int, **changes: Any) -> dict[str, Any]:
    return llada2_config(
        **{**WIDE, "first_k_dense_replace": 0} | changes,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=256,
        moe_intermediate_size=512,
        n_group=8,
        topk_group=4,
        num_hidden_layers=layers,
    )


def _qwen3_moe(architecture: str, layers: int, **changes: Any) -> dict[str, Any]:
    return qwen3_moe_config(architecture, **QWEN3_30B, num_hidden_layers=layers, **changes)


def _gemma(layers: int, *, vocab_size: int = 1024) -> dict[str, Any]:
    """The last layer and every sixth layer before it attend to all tokens."""
    full = range(layers - 1, -1, -6)
    kinds = ["full_attention" if i in full else "sliding_attention" for i in range(layers)]
    return diffusion_gemma_config(
        vocab_size=vocab_size,
        hidden_size=2816,
        intermediate_size=2112,
        moe_intermediate_size=704,
        num_hidden_layers=layers,
        layer_types=kinds,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=256,
        per_layer_config={str(i): {"head_dim": 512, "num_key_value_heads": 2} for i in full},
        num_experts=128,
        top_k_experts=8,
        sliding_window=1024,
        canvas_length=256,
        max_position_embeddings=8192,
    )


MODELS = {
    "LLaDA-MoE": Model(16, 157184, _llada_moe),
    "LLaDA2-mini": Model(20, 157184, _llada2),
    "SDAR-30B-A3B": Model(
        48, 151936, functools.partial(_qwen3_moe, "SDARMoeForCausalLM", block_size=4)
    ),
    "RND1": Model(48, 151936, functools.partial(_qwen3_moe, "RND1LM")),
    "DiffusionGemma": Model(30, 262144, _gemma, few=3),
}


def checkpoint_of(model: str, layers: int) -> Path:
    """Return the folder of a random checkpoint of a model, which is written once."""
    return random_checkpoint(f"{model}-{layers}", MODELS[model].config(layers), shards=layers)
