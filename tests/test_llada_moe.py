"""Tests of the family LLaDA-MoE: reading its config.json and tensors, and its logits.

The logits are compared with a network of transformers' Qwen3-MoE layers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import llada_moe_config, write_checkpoint
from denoisers import load
from mixtures import logits_of, qwen3_moe, read_tensors
from safetensors.torch import save_file
from test_checkpoint import _attention, _rms_norm
from torch.nn import functional as F
from transformers import Qwen3MoeForCausalLM

import dlm_runtime
from dlm_calibration.states import random_tokens
from dlm_export import families
from dlm_export.build import BuildOptions, build
from dlm_export.checkpoints.folder import Checkpoint, CheckpointError
from dlm_export.families.base import Overrides
from dlm_export.network import reference
from dlm_export.network.spec import ExpertsSpec, MlpSpec, NetworkSpec
from dlm_export.targets import TargetError
from dlm_runtime import PRESETS

IDS = torch.randint(0, 140, (2, 29), generator=torch.Generator().manual_seed(0))


def network_of(path: Path) -> NetworkSpec:
    return families.read_network(Checkpoint(path), Overrides())


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / (expected.max() - expected.min()))


@torch.no_grad()
@pytest.mark.parametrize(
    "changes", [{}, {"moe_layer_freq": [0, 1], "num_key_value_heads": 2}], ids=str
)
def test_logits_are_those_of_transformers_own_layer(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    config = llada_moe_config(**changes)
    path = write_checkpoint(tmp_path / "checkpoint", config, seed=3)
    theirs = qwen3_moe(
        config,
        head_dim=16,
        moe_intermediate_size=config["expert_intermediate_size"],
        intermediate_size=config["dense_intermediate_size"],
        norm_topk_prob=False,
        mlp_only_layers=[
            i for i, has_experts in enumerate(config["moe_layer_freq"]) if not has_experts
        ],
    )
    expected = logits_of(Qwen3MoeForCausalLM, theirs, read_tensors(path), tmp_path / "theirs", IDS)
    assert difference(load(path)(IDS), expected) < 1e-5


def forward(config: dict[str, Any], w: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    """Compute logits ``[B, L, V]`` like the published code of LLaDA-MoE.

    For simplicity, every expert is computed for every token.
    """
    eps, heads, kv_heads = (
        config["rms_norm_eps"],
        config["num_attention_heads"],
        config["num_key_value_heads"],
    )
    size = config["hidden_size"] // heads

    def gated(x: torch.Tensor, prefix: str) -> torch.Tensor:
        gate, up = (x @ w[f"{prefix}.{name}_proj.weight"].T for name in ("gate", "up"))
        return (F.silu(gate) * up) @ w[f"{prefix}.down_proj.weight"].T

    x = w["model.embed_tokens.weight"][ids]
    for i in range(config["num_hidden_layers"]):
        b = f"model.layers.{i}."
        h = _rms_norm(x, w[f"{b}input_layernorm.weight"], eps)
        q, k, v = (h @ w[f"{b}self_attn.{name}_proj.weight"].T for name in "qkv")
        q = _rms_norm(
            q.unflatten(-1, (heads, size)), w[f"{b}self_attn.q_norm.weight"], eps
        ).flatten(-2)
        k = _rms_norm(
            k.unflatten(-1, (kv_heads, size)), w[f"{b}self_attn.k_norm.weight"], eps
        ).flatten(-2)
        x = (
            x
            + _attention(q, k, v, heads, kv_heads, config["rope_theta"])
            @ w[f"{b}self_attn.o_proj.weight"].T
        )
        h = _rms_norm(x, w[f"{b}post_attention_layernorm.weight"], eps)
        scores = (h @ w[f"{b}mlp.gate.weight"].T).softmax(-1) + w[f"{b}mlp.expert_bias"]
        kept = (
            scores
            >= scores.sort(descending=True).values[..., config["num_experts_per_tok"] - 1, None]
        )
        for expert in range(config["num_experts"]):
            weight = (scores * kept)[..., expert, None]
            x = x + weight * gated(h, f"{b}mlp.experts.{expert}")
        x = x + gated(h, f"{b}shared_expert")
    return _rms_norm(x, w["model.norm.weight"], eps) @ w["lm_head.weight"].T


@torch.no_grad()
def test_a_bias_enters_the_weights_and_a_shared_expert_sees_all_tokens(tmp_path: Path) -> None:
    config = llada_moe_config(
        moe_router_enable_expert_bias=True, shared_expert_intermediate_size=24
    )
    path = write_checkpoint(tmp_path, config, seed=5)
    assert difference(load(path)(IDS), forward(config, read_tensors(path), IDS)) < 1e-5


def test_what_is_told_of_it(tmp_path: Path) -> None:
    network = network_of(write_checkpoint(tmp_path, llada_moe_config(moe_layer_freq=[0, 1])))
    dense, experts = (layer.mlp for layer in network.layers)
    assert (network.family, network.shift, network.layers[0].attention.qk_norm) == (
        "llada-moe",
        0,
        True,
    )
    assert dense == MlpSpec(96)
    assert isinstance(experts, ExpertsSpec)
    assert (experts.count, experts.active, experts.size, experts.router.renormalise) == (
        8,
        3,
        40,
        False,
    )
    idle = 5 * 3 * 64 * 40
    assert network.parameter_count() - network.active_parameter_count() == idle


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"num_experts_per_tok": 9}, r"num_experts_per_tok must be an integer in 1\.\.8, found 9"),
        ({"moe_layer_freq": [1]}, "moe_layer_freq must be a list of 2 numbers"),
        ({"norm_topk_prob": True}, "norm_topk_prob = true is not supported"),
        ({"moe_router_score_function": "sigmoid"}, "moe_router_score_function"),
        ({"clip_qkv": 8.0}, r"clip_qkv = 8\.0 is not supported"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3 do not divide"),
        ({"rope_scaling": {"type": "longrope"}}, "rope_type 'longrope' is not supported"),
    ],
    ids=str,
)
def test_another_network_is_refused_by_its_key(
    tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    path = write_checkpoint(tmp_path, llada_moe_config())
    (path / "config.json").write_text(json.dumps(llada_moe_config(**changes)))
    with pytest.raises(CheckpointError, match=told):
        network_of(path)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with two layers.

    The first layer is dense. The second layer has experts, a router bias and a shared expert.
    """
    config = llada_moe_config(
        moe_layer_freq=[0, 1],
        moe_router_enable_expert_bias=True,
        shared_expert_intermediate_size=24,
    )
    return write_checkpoint(tmp_path_factory.mktemp("llada-moe") / "checkpoint", config, seed=7)


@pytest.fixture(scope="module")
def bundle(checkpoint: Path) -> Path:
    report = build(checkpoint, checkpoint.with_name("bundle"))
    assert report.parity is not None
    assert report.parity.misses == []
    assert report.kernels == {
        "calls": {"NormedCachedAttention": 2, "AddNorm": 4, "Fp32Experts": 1, "Candidates": 1},
        "plain": {},
    }
    return report.output


def test_whole_canvases_equal_the_reference(checkpoint: Path, bundle: Path) -> None:
    denoiser = load(checkpoint)
    policy = PRESETS["fast-dllm"].with_fields({"block_length": 8, "threshold": 0.3})
    with dlm_runtime.open(bundle, threads=1) as opened:
        for seed in range(3):
            tokens = random_tokens(9, 140, (), np.random.default_rng(seed)).tolist()
            wanted = reference.generate(denoiser, tokens, policy, 24)
            out = opened.generate(tokens=tokens, max_new_tokens=24, **policy.as_dict())
            assert (out.tokens, out.nfe) == (wanted.tokens, wanted.nfe)


def test_many_experts_are_refused_for_a_gpu(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "checkpoint", llada_moe_config(num_experts=17))
    with pytest.raises(
        TargetError, match=r"layer 0 routes a token to 3 of 17 experts.*limited to 16"
    ):
        build(path, tmp_path / "bundle", BuildOptions(precision="fp16", targets=("cuda",)))


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


@torch.no_grad()
def test_merged_experts_are_the_split_ones(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, llada_moe_config())
    split = load(path)(IDS)
    assert torch.equal(load(merged(path, [0, 1]))(IDS), split)


LAYER = "model.layers.0.mlp"
WRONG: dict[str, tuple[dict[str, torch.Tensor | None], str]] = {
    "missing": (
        {f"{LAYER}.experts.5.up_proj.weight": None},
        r"1 tensors missing: model\.layers\.0\.mlp\.experts\.5\.up_proj",
    ),
    "router": (
        {f"{LAYER}.gate.weight": torch.zeros(7, 64)},
        r"mlp\.gate\.weight is \[7, 64\], expected \[8, 64\]",
    ),
    "extra": (
        {f"{LAYER}.experts.8.up_proj.weight": torch.zeros(40, 64)},
        r"1 tensors not known: model\.layers\.0\.mlp\.experts\.8",
    ),
    "shape": (
        {f"{LAYER}.experts.2.down_proj.weight": torch.zeros(40, 64)},
        r"experts\.2\.down_proj\.weight is \[40, 64\]",
    ),
}


@pytest.mark.parametrize(("change", "told"), WRONG.values(), ids=WRONG.keys())
def test_wrong_tensors_are_named(
    tmp_path: Path, change: dict[str, torch.Tensor | None], told: str
) -> None:
    path = rewritten(write_checkpoint(tmp_path, llada_moe_config()), change)
    with pytest.raises(CheckpointError, match=told):
        families.open_weights(Checkpoint(path), network_of(path))


def test_experts_in_both_forms_are_refused(tmp_path: Path) -> None:
    path = merged(write_checkpoint(tmp_path, llada_moe_config()), [1])
    told = r"model\.layers\.0\.mlp\.experts\.0\.gate_proj\.weight has one expert and model\.layers\.1\.mlp\.experts\.gate_proj"
    with pytest.raises(CheckpointError, match=told):
        families.open_weights(Checkpoint(path), network_of(path))


def test_an_expert_that_its_shard_lacks_is_named(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, llada_moe_config(), shards=2)
    index = json.loads((path / "model.safetensors.index.json").read_text())
    name = "model.layers.0.mlp.experts.0.gate_proj.weight"
    index["weight_map"][name] = next(
        file for file in index["weight_map"].values() if file != index["weight_map"][name]
    )
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(
        CheckpointError,
        match=r"model\.layers\.0\.mlp\.experts\.0\.gate_proj\.weight is not in this shard",
    ):
        Checkpoint(path)
