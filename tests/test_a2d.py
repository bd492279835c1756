"""Tests of A2D conversions of Qwen3.

An A2D conversion is an autoregressive model that was trained further, so that it became a denoiser.
In Qwen3, each head has a norm for its queries and a norm for its keys. Heads are wider than hidden
size / number of heads.

``test_capture`` compares the checkpoints of these tests with the Qwen3 class of transformers.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from checkpoints import a2d_qwen3_config, write_checkpoint
from denoisers import load
from safetensors.torch import load_file
from test_checkpoint import _attention, _rms_norm
from torch.nn import functional as F

import dlm_runtime
from dlm_calibration.states import random_tokens
from dlm_export import families
from dlm_export.build import build
from dlm_export.checkpoints.folder import Checkpoint, CheckpointError
from dlm_export.families.base import Overrides
from dlm_export.graph import GRAPH_FILE
from dlm_export.network import reference
from dlm_runtime import PRESETS

VARIANTS: list[dict[str, Any]] = [
    {},
    {"tie_word_embeddings": True, "num_key_value_heads": 4},
    {"head_dim": 8},
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(
        tmp_path_factory.mktemp("a2d") / "checkpoint", a2d_qwen3_config(), seed=7
    )


@pytest.fixture(scope="module")
def bundle(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("a2d") / "bundle"
    report = build(checkpoint, path)
    assert report.parity is not None
    assert report.parity.misses == []
    return path


def forward(config: dict[str, Any], w: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    """Compute logits ``[B, L, V]`` as in Qwen3's published layer, without the exporter's code."""
    eps, D = config["rms_norm_eps"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    x = w["model.embed_tokens.weight"][ids]
    for i in range(config["num_hidden_layers"]):
        b = f"model.layers.{i}."
        h = _rms_norm(x, w[f"{b}input_layernorm.weight"], eps)
        q, k, v = (h @ w[f"{b}self_attn.{name}_proj.weight"].T for name in "qkv")
        q = _rms_norm(q.unflatten(-1, (heads, D)), w[f"{b}self_attn.q_norm.weight"], eps).flatten(
            -2
        )
        k = _rms_norm(
            k.unflatten(-1, (kv_heads, D)), w[f"{b}self_attn.k_norm.weight"], eps
        ).flatten(-2)
        x = (
            x
            + _attention(q, k, v, heads, kv_heads, config["rope_theta"])
            @ w[f"{b}self_attn.o_proj.weight"].T
        )
        h = _rms_norm(x, w[f"{b}post_attention_layernorm.weight"], eps)
        gate, up = (h @ w[f"{b}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (F.silu(gate) * up) @ w[f"{b}mlp.down_proj.weight"].T
    x = _rms_norm(x, w["model.norm.weight"], eps)
    return (
        x @ w["model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"].T
    )


@torch.no_grad()
@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_logits_equal_an_independent_forward(tmp_path: Path, changes: dict[str, Any]) -> None:
    config = a2d_qwen3_config(**changes)
    path = write_checkpoint(tmp_path, config, seed=3)
    ids = torch.randint(0, 140, (2, 33), generator=torch.Generator().manual_seed(0))
    expected = forward(config, load_file(path / "model.safetensors"), ids)
    difference = (load(path)(ids) - expected).abs().max() / (expected.max() - expected.min())
    assert float(difference) < 1e-5


def test_what_is_told_of_it(checkpoint: Path) -> None:
    network = families.read_network(Checkpoint(checkpoint), Overrides())
    attention = network.layers[0].attention
    assert (network.family, network.shift, attention.qk_norm, attention.qkv_bias) == (
        "a2d-qwen3",
        0,
        True,
        False,
    )
    assert attention.head_size != network.hidden_size // attention.heads


def test_attention_is_fused_with_the_norms_of_its_heads(bundle: Path) -> None:
    """In each layer, one call of an ONNX function computes attention and the norms of the heads.

    Each norm before a layer's attention or MLP is fused with the addition before it.
    """
    model = onnx.load(bundle / GRAPH_FILE, load_external_data=False)
    layers = a2d_qwen3_config()["num_hidden_layers"]
    found = Counter(node.op_type for node in model.graph.node)
    assert (found["NormedCachedAttention"], found["AddNorm"]) == (layers, 2 * layers)
    assert (found["Attention"], found["RotaryEmbedding"], found["RMSNormalization"]) == (0, 0, 1)


@pytest.mark.parametrize("cache", ["none", "prefix", "dual"])
def test_whole_canvases_equal_the_reference(checkpoint: Path, bundle: Path, cache: str) -> None:
    denoiser = load(checkpoint)
    policy = PRESETS["fast-dllm"].with_fields({"cache": cache, "block_length": 8, "threshold": 0.3})
    with dlm_runtime.open(bundle, threads=1) as opened:
        for seed in range(3):
            tokens = random_tokens(9, 140, (), np.random.default_rng(seed)).tolist()
            wanted = reference.generate(denoiser, tokens, policy, 24)
            out = opened.generate(tokens=tokens, max_new_tokens=24, **policy.as_dict())
            assert (out.tokens, out.nfe) == (wanted.tokens, wanted.nfe)


def test_biases_in_attention_are_refused(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, a2d_qwen3_config())
    (path / "config.json").write_text(json.dumps(a2d_qwen3_config(attention_bias=True)))
    with pytest.raises(CheckpointError, match="attention_bias = true is not supported"):
        families.read_network(Checkpoint(path), Overrides())
