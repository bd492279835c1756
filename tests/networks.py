"""Made-up descriptions of networks, for tests that need sizes but no weights."""

from __future__ import annotations

from typing import Any

from dlm_export.network.spec import AttentionSpec, LayerSpec, MlpSpec, NetworkSpec, Rope


def make_network(
    *,
    vocab_size: int = 100,
    hidden_size: int = 32,
    layers: int | tuple[LayerSpec, ...] = 1,
    heads: int = 2,
    kv_heads: int = 2,
    head_size: int = 16,
    mlp_size: int = 64,
    qkv_bias: bool = False,
    **fields: Any,
) -> NetworkSpec:
    """Return the description of a network with the given layers, or with ``count`` equal layers.

    ``fields`` contains further fields of ``NetworkSpec``.
    """
    attention = AttentionSpec(heads, kv_heads, head_size, Rope(1e4), qkv_bias=qkv_bias)
    each = (
        (LayerSpec(attention, MlpSpec(mlp_size), 1e-6),) * layers
        if isinstance(layers, int)
        else layers
    )
    known: dict[str, Any] = {
        "family": "llada",
        "architecture": "LLaDAModelLM",
        "norm_eps": 1e-6,
        "tied_head": False,
        "max_canvas_length": 256,
        "shift": 0,
        "mask_token_id": vocab_size - 1,
        "eos_token_ids": (0,),
        "pad_token_id": None,
    }
    return NetworkSpec(
        vocab_size=vocab_size, hidden_size=hidden_size, layers=each, **known | fields
    )
