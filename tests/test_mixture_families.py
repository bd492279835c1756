"""Compares logits of LLaDA2, RND1 and SDAR-MoE with logits of transformers' classes.

LLaDA2 is compared with Glm4Moe, which has the same layers: q/k norms, rotary embeddings on half of
a head, and the router of DeepSeek-V3. RND1 and SDAR-MoE are compared with Qwen3-MoE. Both networks
of a comparison have the same weights.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import llada2_config, qwen3_moe_config, write_checkpoint
from click.testing import CliRunner
from denoisers import load
from mixtures import logits_of, qwen3_moe, read_tensors
from test_llada_moe import difference, merged, network_of, rewritten
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM, Qwen3MoeForCausalLM

from dlm_export import families
from dlm_export.build import BuildOptions, QuantiseOptions, build
from dlm_export.checkpoints.folder import Checkpoint, CheckpointError
from dlm_export.cli import main
from dlm_export.families.base import Overrides
from dlm_export.network.spec import ExpertsSpec, MlpSpec
from dlm_export.quantising.samples import CalibrationOptions
from dlm_export.sources import open_source

LENGTH = 45
IDS = torch.randint(0, 140, (2, LENGTH), generator=torch.Generator().manual_seed(0))


def by_blocks(block_length: int) -> torch.Tensor:
    """Return a bool array ``[L, L]`` for block-causal attention.

    An entry is True if the query (row) attends to the key (column).
    """
    block = torch.arange(LENGTH) // block_length
    return block[None, :] <= block[:, None]


def glm4_moe(config: dict[str, Any]) -> Glm4MoeConfig:
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
    return Glm4MoeConfig(**{name: config[name] for name in same} | other)


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


@torch.no_grad()
def test_llada2s_logits_are_those_of_glm4_moe(tmp_path: Path) -> None:
    config = llada2_config()
    path = write_checkpoint(tmp_path / "checkpoint", config, seed=3)
    tensors = read_tensors(path)
    # This project never chooses experts outside the chosen groups. Glm4Moe sets their scores to 0
    # instead, and could still choose them if other scores were negative. Positive biases prevent
    # this.
    biases = {
        name: tensor.abs() for name, tensor in tensors.items() if name.endswith("expert_bias")
    }
    rewritten(path, dict(biases))
    expected = logits_of(
        Glm4MoeForCausalLM,
        glm4_moe(config),
        as_glm4_moe(tensors | biases),
        tmp_path / "theirs",
        IDS,
        by_blocks(32),
    )
    assert difference(load(path)(IDS), expected) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize(
    ("architecture", "changes", "block_length"),
    [
        ("RND1LM", {}, LENGTH),
        ("RND1LM", {"norm_topk_prob": False, "mlp_only_layers": [1]}, LENGTH),
        ("SDARMoeForCausalLM", {"block_size": 4}, 4),
    ],
)
def test_logits_are_those_of_qwen3_moe(
    tmp_path: Path, architecture: str, changes: dict[str, Any], block_length: int
) -> None:
    config = qwen3_moe_config(architecture, **changes)
    path = write_checkpoint(tmp_path / "checkpoint", config, seed=3)
    same = (
        "head_dim",
        "intermediate_size",
        "moe_intermediate_size",
        "norm_topk_prob",
        "mlp_only_layers",
    )
    theirs = qwen3_moe(config, **{name: config[name] for name in same})
    expected = logits_of(
        Qwen3MoeForCausalLM,
        theirs,
        read_tensors(path),
        tmp_path / "theirs",
        IDS,
        by_blocks(block_length),
    )
    assert difference(load(path)(IDS), expected) < 1e-5


def test_what_is_told_of_them(tmp_path: Path) -> None:
    llada2 = network_of(write_checkpoint(tmp_path / "llada2", llada2_config()))
    attention, dense, experts = (
        llada2.layers[0].attention,
        llada2.layers[0].mlp,
        llada2.layers[1].mlp,
    )
    assert (attention.qk_norm, attention.visible_block, llada2.shift) == (True, 32, 0)
    assert dense == MlpSpec(96)
    assert isinstance(experts, ExpertsSpec)
    assert (experts.shared_size, experts.router.bias, experts.router.scale) == (40, "choice", 2.5)
    checkpoint = write_checkpoint(tmp_path / "rnd1", qwen3_moe_config("RND1LM"))
    rnd1 = network_of(checkpoint)
    assert (rnd1.shift, rnd1.layers[0].attention.visible_block) == (1, None)
    assert open_source(checkpoint, Overrides()).default_preset == "rnd1"


def test_inspect_tells_experts_router_and_what_a_token_meets(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, llada2_config())
    told = CliRunner().invoke(main, ["inspect", str(path)])
    assert told.exit_code == 0, told.output
    network = network_of(path)
    assert network.parameter_count() - network.active_parameter_count() == 2 * 12 * 3 * 64 * 40
    assert f"{network.active_parameter_count():,} of them per token" in told.output
    assert "4 of 16 experts of 40, silu" in told.output
    assert "by sigmoid in 2 of 4 groups and" in told.output
    assert "(ceil(T / 32) - 1) * 32 of T tokens on the canvas, at most 224" in told.output


@torch.no_grad()
def test_merged_experts_of_llada2_are_the_split_ones(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, llada2_config(num_experts=8))
    split = load(path)(IDS)
    assert torch.equal(load(merged(path, [1, 2]))(IDS), split)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"num_key_value_heads": 3},
            "num_attention_heads 4 is not a multiple of num_key_value_heads 3",
        ),
        ({"n_group": 3}, "num_experts 16 in n_group 3"),
        ({"num_experts_per_tok": 9}, "cannot give each token num_experts_per_tok 9"),
        ({"score_function": "softmax"}, "score_function"),
        ({"expert_capacity": 48}, "expert_capacity belongs to LLaDA2.2, which is not supported"),
        ({"delete_token_id": 9}, "delete_token_id belongs to LLaDA2.2.*Use LLaDA2.0 or LLaDA2.1"),
        ({"split_token_id": 10}, "split_token_id belongs to LLaDA2.2"),
        ({"rope_scaling": {"type": "longrope"}}, "rope_type 'longrope' is not supported"),
    ],
    ids=str,
)
def test_another_llada2_is_refused_by_its_key(
    tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    path = write_checkpoint(tmp_path, llada2_config())
    (path / "config.json").write_text(json.dumps(llada2_config(**changes)))
    with pytest.raises(CheckpointError, match=told):
        network_of(path)


def test_a_fused_matrix_of_other_heads_is_named(tmp_path: Path) -> None:
    name = "model.layers.0.attention.query_key_value.weight"
    path = rewritten(write_checkpoint(tmp_path, llada2_config()), {name: torch.zeros(127, 64)})
    with pytest.raises(
        CheckpointError, match=r"query_key_value\.weight is \[127, 64\], expected \[128, 64\]"
    ):
        families.open_weights(Checkpoint(path), network_of(path))


def test_a_bundle_of_llada2_computes_what_torch_does_by_every_preset(tmp_path: Path) -> None:
    """The build compares logits and whole canvases with the reference loop in torch, with and
    without the exact block cache.
    """
    path = write_checkpoint(tmp_path / "checkpoint", llada2_config(num_hidden_layers=2), seed=7)
    by_blocks = QuantiseOptions(calibration=CalibrationOptions(preset="llada2"))
    report = build(path, tmp_path / "bundle", BuildOptions(quantise=by_blocks))
    assert report.parity is not None
    assert report.parity.misses == []
    assert report.kernels == {
        "calls": {"BlockNormedCachedAttention": 2, "AddNorm": 4, "Fp32Experts": 1, "Candidates": 1},
        "plain": {},
    }
