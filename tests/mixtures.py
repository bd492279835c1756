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
