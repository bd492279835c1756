"""Reads and writes the demo networks in the file layouts of the released LLaDA and SDAR.

A checkpoint consists of ``config.json``, ``generation_config.json`` and ``model.safetensors``
(bf16).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from dlm_export import families
from dlm_export.checkpoints.folder import Checkpoint
from dlm_export.families import llada
from dlm_export.families.base import Overrides
from dlm_export.families.trunks import TRUNK
from dlm_export.network.denoiser import Denoiser
from dlm_export.network.spec import NetworkSpec


def llada_config(c: NetworkSpec) -> dict[str, object]:
    """Return the content of ``config.json`` in the form of a released LLaDA."""
    layer = c.layers[0]
    assert layer.attention.rope is not None
    return {
        "activation_type": "silu",
        "block_type": "llama",
        "d_model": c.hidden_size,
        "embedding_size": c.vocab_size,
        "eos_token_id": c.eos_token_ids[0],
        "include_bias": False,
        "include_qkv_bias": layer.attention.qkv_bias,
        "layer_norm_type": "rms",
        "mask_token_id": c.mask_token_id,
        "max_sequence_length": c.max_canvas_length,
        "mlp_hidden_size": layer.mlp.size,
        "n_heads": layer.attention.heads,
        "n_kv_heads": layer.attention.kv_heads,
        "n_layers": len(c.layers),
        "pad_token_id": c.pad_token_id,
        "rms_norm_eps": c.norm_eps,
        "rope": True,
        "rope_theta": layer.attention.rope.theta,
        "torch_dtype": "bfloat16",
        "vocab_size": c.vocab_size,
        "weight_tying": c.tied_head,
    }


def sdar_config(c: NetworkSpec) -> dict[str, object]:
    """Return the content of ``config.json`` in the form of a released SDAR."""
    layer = c.layers[0]
    assert layer.attention.rope is not None
    return {
        "attention_bias": layer.attention.qkv_bias,
        "block_size": layer.attention.block_length,
        "eos_token_id": c.eos_token_ids[0],
        "head_dim": layer.attention.head_size,
        "hidden_act": "silu",
        "hidden_size": c.hidden_size,
        "intermediate_size": layer.mlp.size,
        "mask_token_id": c.mask_token_id,
        "max_position_embeddings": c.max_canvas_length,
        "num_attention_heads": layer.attention.heads,
        "num_hidden_layers": len(c.layers),
        "num_key_value_heads": layer.attention.kv_heads,
        "pad_token_id": c.pad_token_id,
        "rms_norm_eps": c.norm_eps,
        "rope_scaling": None,
        "rope_theta": layer.attention.rope.theta,
        "tie_word_embeddings": c.tied_head,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "vocab_size": c.vocab_size,
    }


LAYOUTS = {"llada": (llada.LAYOUT, llada_config), "sdar": (TRUNK, sdar_config)}
"""For each family: the names of its weights, and its config.json."""


def save_checkpoint(
    folder: Path,
    network: NetworkSpec,
    parameters: dict[str, Tensor],
    generation: Mapping[str, object],
) -> None:
    """Write a checkpoint in the layout of its family.

    If the program is interrupted, no incomplete file is left.

    ``generation`` is the content of ``generation_config.json``.
    """
    layout, config_of = LAYOUTS[network.family]
    config = {"architectures": [network.architecture], "model_type": network.family} | config_of(
        network
    )
    matrices = {linear.weight for linear in network.linear_layers()}
    tensors = {}
    for name in network.parameters():
        parameter = parameters[name].detach()
        # Matrices in released checkpoints are [out, in]. The denoiser's Linear stores [in, out].
        tensors[layout.released(name)] = (
            (parameter.T if name in matrices else parameter).to(torch.bfloat16).contiguous()
        )
    partial = folder / "model.safetensors.partial"
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.chmod(0o644)
    partial.replace(folder / "model.safetensors")
    for name, said in {"generation_config.json": generation, "config.json": config}.items():
        partial = folder / f"{name}.partial"
        partial.write_text(json.dumps(said, indent=2) + "\n")
        partial.replace(folder / name)


def load_checkpoint(folder: Path) -> Denoiser:
    """Load the denoiser in ``folder``. Its bf16 weights are converted to fp32."""
    checkpoint = Checkpoint(folder)
    network = families.read_network(checkpoint, Overrides())
    return families.load(families.open_weights(checkpoint, network), network)
