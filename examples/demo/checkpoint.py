"""The demo denoiser on disk, in the layout of a released LLaDA: ``config.json`` and ``model.safetensors`` (bf16)."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from dlm_export import families
from dlm_export.checkpoints.folder import Checkpoint
from dlm_export.families import llada
from dlm_export.families.base import Overrides
from dlm_export.network.denoiser import Denoiser
from dlm_export.network.spec import NetworkSpec


def save_checkpoint(folder: Path, network: NetworkSpec, parameters: dict[str, Tensor]) -> None:
    """Write ``config.json`` and ``model.safetensors``; each appears whole or not at all."""
    c, layer = network, network.layers[0]
    attention, rope = layer.attention, layer.attention.rope
    assert rope is not None
    config = {
        "architectures": [c.architecture],
        "model_type": c.family,
        "activation_type": "silu",
        "block_type": "llama",
        "d_model": c.hidden_size,
        "embedding_size": c.vocab_size,
        "eos_token_id": c.eos_token_ids[0],
        "include_bias": False,
        "include_qkv_bias": attention.qkv_bias,
        "layer_norm_type": "rms",
        "mask_token_id": c.mask_token_id,
        "max_sequence_length": c.max_canvas_length,
        "mlp_hidden_size": layer.mlp.size,
        "n_heads": attention.heads,
        "n_kv_heads": attention.kv_heads,
        "n_layers": len(c.layers),
        "pad_token_id": c.pad_token_id,
        "rms_norm_eps": c.norm_eps,
        "rope": True,
        "rope_theta": rope.theta,
        "torch_dtype": "bfloat16",
        "vocab_size": c.vocab_size,
        "weight_tying": c.tied_head,
    }
    tensors = {}
    for name, source in llada.LAYOUT.sources(c).items():
        parameter = parameters[name].detach()
        # Released matrices are [out, in]; the denoiser's Linear stores [in, out].
        assert source.whole is not None
        tensors[source.whole] = (parameter.T if source.transpose else parameter).to(torch.bfloat16).contiguous()
    partial = folder / "model.safetensors.partial"
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.chmod(0o644)
    partial.replace(folder / "model.safetensors")
    partial = folder / "config.json.partial"
    partial.write_text(json.dumps(config, indent=2) + "\n")
    partial.replace(folder / "config.json")


def load_checkpoint(folder: Path) -> Denoiser:
    """The denoiser in ``folder``, its bf16 weights held in fp32."""
    checkpoint = Checkpoint(folder)
    network = families.read_network(checkpoint, Overrides())
    return families.load(families.open_weights(checkpoint, network), network)
