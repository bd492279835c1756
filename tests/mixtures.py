"""Loads a checkpoint's weights into the mixture-of-experts classes of transformers.

Tests compare the logits of these classes with the logits of this project's networks.

transformers 5 stores the matrices of all experts of a layer in one tensor, and concatenates the
gate and up matrices. This module converts the tensors of a released checkpoint to this form, as
transformers does when it loads one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file


def qwen3_moe(config: dict[str, Any], **fields: Any) -> transformers.PretrainedConfig:
    """Make a Qwen3-MoE configuration for transformers from a checkpoint's configuration.

    ``fields`` contains the fields that have other names in the checkpoint's configuration.
    """
    same = (
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "num_experts",
        "vocab_size",
    )
    further = (
        "num_experts_per_tok",
        "rope_theta",
        "rms_norm_eps",
        "max_position_embeddings",
        "tie_word_embeddings",
    )
    return transformers.Qwen3MoeConfig(
        **{name: config[name] for name in (*same, *further)} | fields
    )


@torch.no_grad()
def logits_of(
    kind: type,
    config: transformers.PretrainedConfig,
    tensors: dict[str, torch.Tensor],
    folder: Path,
    ids: torch.Tensor,
    is_visible: torch.Tensor | None = None,
) -> torch.Tensor:
    """Create a network of a transformers class and return its logits ``[B, L, V]``.

    ``tensors`` maps transformers' names to the weights. ``is_visible`` bool ``[L, L]`` is True at
    (i, j) if position i attends to position j.
    """
    folder.mkdir()
    config.architectures = [kind.__name__]
    config.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    model, told = kind.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
    )
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    assert not told["mismatched_keys"]
    length = ids.shape[1]
    visible = torch.ones(length, length, dtype=torch.bool) if is_visible is None else is_visible
    mask = torch.zeros(1, 1, length, length).masked_fill(~visible, torch.finfo(torch.float32).min)
    logits: torch.Tensor = model.eval()(
        input_ids=ids, attention_mask=mask.expand(len(ids), -1, -1, -1), use_cache=False
    ).logits
    return logits


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Read all tensors of a checkpoint that consists of one file."""
    return load_file(path / "model.safetensors")


def rewritten(path: Path, changes: dict[str, torch.Tensor | None]) -> Path:
    """Add, replace or remove (None) tensors of a checkpoint in place. Returns ``path``."""
    tensors = read_tensors(path) | changes
    save_file(
        {name: tensor for name, tensor in tensors.items() if tensor is not None},
        path / "model.safetensors",
    )
    return path


def merged(path: Path, layers: list[int]) -> Path:
    """Change a checkpoint in place, and return ``path``.

    In each of ``layers``, the matrices of all experts are stacked into one tensor, separately for
    gate, up and down projections.
    """
    tensors, changes = read_tensors(path), {}
    for i in layers:
        for name in ("gate_proj", "up_proj", "down_proj"):
            parts = [f"model.layers.{i}.mlp.experts.{expert}.{name}.weight" for expert in range(8)]
            changes[f"model.layers.{i}.mlp.experts.{name}"] = torch.stack(
                [tensors[part] for part in parts]
            )
            changes |= dict.fromkeys(parts)
    return rewritten(path, changes)


def glm4_moe(config: dict[str, Any]) -> transformers.PretrainedConfig:
    same = (
        *(
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "intermediate_size",
        ),
        *(
            "moe_intermediate_size",
            "num_experts_per_tok",
            "n_group",
            "topk_group",
            "routed_scaling_factor",
            "rms_norm_eps",
        ),
        *(
            "first_k_dense_replace",
            "vocab_size",
            "norm_topk_prob",
            "tie_word_embeddings",
            "max_position_embeddings",
        ),
    )
    rope = {
        "rope_type": "default",
        "rope_theta": config["rope_theta"],
        "partial_rotary_factor": 0.5,
    }
    other = {
        "n_routed_experts": config["num_experts"],
        "n_shared_experts": 1,
        "use_qk_norm": True,
        "rope_parameters": rope,
    }
    return transformers.Glm4MoeConfig(**{name: config[name] for name in same} | other)


def as_glm4_moe(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of LLaDA2 with the names of Glm4Moe."""
    names = {
        "word_embeddings": "embed_tokens",
        "attention.dense": "self_attn.o_proj",
        "attention.query_layernorm": "self_attn.q_norm",
        "attention.key_layernorm": "self_attn.k_norm",
        "gate.expert_bias": "gate.e_score_correction_bias",
    }
    found = {}
    for name, tensor in tensors.items():
        if "query_key_value" in name:
            parts = zip("qkv", tensor.split([64, 32, 32]), strict=True)
            prefix = name.partition("attention")[0]
            found |= {f"{prefix}self_attn.{role}_proj.weight": part.clone() for role, part in parts}
            continue
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        found[name] = tensor
    return found
