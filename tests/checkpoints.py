"""Small seeded random checkpoints in the released layouts, for tests and benchmarks."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file


def llada_config(**changes: Any) -> dict[str, Any]:
    """config.json of a tiny LLaDA under the released keys."""
    return {
        "architectures": ["LLaDAModelLM"],
        "model_type": "llada",
        "d_model": 64,
        "n_layers": 2,
        "n_heads": 4,
        "n_kv_heads": 4,
        "mlp_hidden_size": 96,
        "vocab_size": 160,
        "embedding_size": 160,
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5,
        "max_sequence_length": 256,
        "block_type": "llama",
        "activation_type": "silu",
        "layer_norm_type": "rms",
        "include_bias": False,
        "include_qkv_bias": False,
        "weight_tying": False,
        "rope": True,
        "mask_token_id": 150,
        "eos_token_id": 151,
        "pad_token_id": 151,
    } | changes


def dream_config(**changes: Any) -> dict[str, Any]:
    """config.json of a tiny Dream under the released keys."""
    return {
        "architectures": ["DreamModel"],
        "model_type": "Dream",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "vocab_size": 160,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 256,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "mask_token_id": 150,
        "eos_token_id": 151,
        "pad_token_id": 151,
    } | changes


def llada_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Released tensor names and shapes, ``[out, in]``."""
    hidden, mlp, vocab = config["d_model"], config["mlp_hidden_size"], config["embedding_size"]
    kv = hidden // config["n_heads"] * config["n_kv_heads"]
    prefix = "model.transformer."
    shapes: dict[str, tuple[int, ...]] = {f"{prefix}wte.weight": (vocab, hidden)}
    for i in range(config["n_layers"]):
        block = f"{prefix}blocks.{i}."
        rows = {"q_proj": hidden, "k_proj": kv, "v_proj": kv, "attn_out": hidden, "ff_proj": mlp, "up_proj": mlp}
        for name, out in rows.items():
            shapes[f"{block}{name}.weight"] = (out, hidden)
            if config["include_qkv_bias"] and name in ("q_proj", "k_proj", "v_proj"):
                shapes[f"{block}{name}.bias"] = (out,)
        shapes[f"{block}ff_out.weight"] = (hidden, mlp)
        shapes[f"{block}attn_norm.weight"] = shapes[f"{block}ff_norm.weight"] = (hidden,)
    shapes[f"{prefix}ln_f.weight"] = (hidden,)
    if not config["weight_tying"]:
        shapes[f"{prefix}ff_out.weight"] = (vocab, hidden)
    return shapes


def dream_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Released tensor names and shapes, ``[out, in]``."""
    hidden, mlp, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        for name, out in {"q_proj": hidden, "k_proj": kv, "v_proj": kv}.items():
            shapes[f"{layer}self_attn.{name}.weight"] = (out, hidden)
            shapes[f"{layer}self_attn.{name}.bias"] = (out,)
        shapes[f"{layer}self_attn.o_proj.weight"] = (hidden, hidden)
        shapes[f"{layer}mlp.gate_proj.weight"] = shapes[f"{layer}mlp.up_proj.weight"] = (mlp, hidden)
        shapes[f"{layer}mlp.down_proj.weight"] = (hidden, mlp)
        shapes[f"{layer}input_layernorm.weight"] = shapes[f"{layer}post_attention_layernorm.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


def random_tensor(name: str, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Weights that keep activations near unit size and spread the logits, so that predictions are not all ties."""
    noise = torch.randn(shape, generator=generator)
    if "norm" in name or "ln_f" in name:
        return (1 + 0.1 * noise).to(dtype)
    if name.endswith("bias"):
        return (0.1 * noise).to(dtype)
    is_table = name.endswith(("wte.weight", "embed_tokens.weight"))
    is_head = name in ("model.transformer.ff_out.weight", "lm_head.weight")
    return (noise * (1.0 if is_table else (3.0 if is_head else 1.0) / math.sqrt(shape[-1]))).to(dtype)


def write_checkpoint(
    path: Path, config: dict[str, Any], *, seed: int = 0, dtype: torch.dtype = torch.float32, shards: int = 1
) -> Path:
    """Write config.json and safetensors (one file, or shards with an index) into ``path``."""
    is_llada = config["architectures"] == ["LLaDAModelLM"]
    shapes = llada_shapes(config) if is_llada else dream_shapes(config)
    generator = torch.Generator().manual_seed(seed)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    names = list(shapes)
    weight_map = {}
    for shard in range(shards):
        file = "model.safetensors" if shards == 1 else f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        mine = names[shard * len(names) // shards : (shard + 1) * len(names) // shards]
        save_file({name: random_tensor(name, shapes[name], dtype, generator) for name in mine}, path / file)
        weight_map |= dict.fromkeys(mine, file)
    if shards > 1:
        (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path
