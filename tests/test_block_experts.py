"""Tests of LLaDA2.2's network, whose routers limit the experts of a block, and of its bundles.

The router was written again from ``_block_aggregation_kernel`` and ``_token_topk_kernel`` of
sglang 0.5.23. ``test_llada22`` tests the loop.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import llada2_config, write_checkpoint
from click.testing import CliRunner
from denoisers import load
from hypothesis import given, settings
from hypothesis import strategies as st
from mixtures import as_glm4_moe, glm4_moe, logits_of, read_tensors
from torch import Tensor
from transformers import Glm4MoeForCausalLM
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter

import dlm_runtime
from dlm_export import families
from dlm_export.build import BuildOptions, QuantiseOptions, build
from dlm_export.checkpoints.folder import Checkpoint, CheckpointError
from dlm_export.cli import main
from dlm_export.families.base import Overrides
from dlm_export.judging.accuracy.effort import Effort
from dlm_export.judging.sides.side import JudgeError, check_tuned
from dlm_export.network import reference
from dlm_export.network.experts import Router, rows_of_blocks
from dlm_export.network.spec import ExpertsSpec, RouterSpec
from dlm_export.planning.roofline import Costs
from dlm_export.quantising.samples import CalibrationOptions
from dlm_runtime import BundleError

LENGTH = 75


def route_as_sglang(
    logits: Tensor, bias: Tensor, block: int, capacity: int, active: int
) -> tuple[Tensor, Tensor]:
    """Return each token's experts and their weights before scaling, both ``[T, active]``.

    ``logits`` are ``[T, E]``. A block uses the ``capacity`` experts with the highest score of any of
    its tokens.
    """
    scores = 1 / (1 + (-logits.float()).exp())
    judged, chosen = scores + bias, list[list[int]]()
    for rows in judged.split(block):
        best = rows.max(0).values.tolist()
        allowed = sorted(range(len(best)), key=lambda e: (-best[e], e))[:capacity]
        for row in rows.tolist():
            chosen.append(sorted(allowed, key=lambda e: (-row[e], e))[:active])
    index = torch.tensor(chosen)
    weights = scores.gather(1, index)
    return index, weights / (weights.sum(1, keepdim=True) + 1e-20)


def router_of(seed: int, capacity: int, active: int) -> Router:
    rule = RouterSpec("sigmoid", "choice", scale=2.5, block_experts=capacity)
    router = Router(ExpertsSpec(12, active, 4, router=rule), 6, 1e-6)
    generator = torch.Generator().manual_seed(seed)
    router.weight.copy_(2 * torch.randn(6, 12, generator=generator))
    router.bias.copy_(0.2 * torch.randn(12, generator=generator))
    return router


@settings(max_examples=60)
@given(
    block=st.integers(1, 9),
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=3),
    start=st.integers(0, 2),
    active=st.integers(1, 4),
    more=st.integers(0, 8),
    seed=st.integers(0, 99),
)
@torch.no_grad()
def test_the_router_equals_sglangs(
    block: int, lengths: list[int], start: int, active: int, more: int, seed: int
) -> None:
    """A pass contains several requests, which start at a block. Their last blocks may be short."""
    router = router_of(seed, active + more, active)
    x = torch.randn(1, sum(lengths), 6, generator=torch.Generator().manual_seed(seed))
    places = torch.cat([torch.arange(start * block, start * block + count) for count in lengths])
    blocks = rows_of_blocks(places[None], block)
    chosen, weights = router(x, blocks)
    wanted = [
        route_as_sglang(part @ router.weight, router.bias, block, active + more, active)
        for part in x[0].split(lengths)
    ]
    assert chosen[0].tolist() == torch.cat([index for index, _ in wanted]).tolist()
    torch.testing.assert_close(weights[0], 2.5 * torch.cat([share for _, share in wanted]))
    _, judged = router.scores(x)
    assert not router.shortfall(judged, chosen, blocks).any()


@torch.no_grad()
def test_wrong_experts_fall_short() -> None:
    """The best experts of each token alone are too many for the block."""
    router = router_of(1, 3, 2)
    x = torch.randn(1, 16, 6, generator=torch.Generator().manual_seed(1))
    blocks = rows_of_blocks(torch.arange(16)[None], 8)
    _, judged = router.scores(x)
    alone = judged.topk(2).indices
    assert router.shortfall(judged, alone, blocks).isinf().any()
    second = judged.clone().scatter(-1, router(x, blocks)[0][..., :1], -torch.inf)
    worse = torch.cat((router(x, blocks)[0][..., 1:], second.topk(2).indices[..., 1:]), -1)
    assert (router.shortfall(judged, worse, blocks) > 0).any()


# ---- Checkpoints and bundles ----


def llada22_config(**changes: Any) -> dict[str, Any]:
    """The config.json of a tiny LLaDA2.2, with blocks of 8 tokens and 4 of 16 experts per block."""
    small = {"vocab_size": 24, "mask_token_id": 20, "eos_token_id": 23, "pad_token_id": 23}
    tokens = {"delete_token_id": 21, "split_token_id": 22}
    experts = {"expert_capacity": 4, "block_size": 8, "num_experts_per_tok": 2}
    return llada2_config(**small | tokens | experts | changes)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("llada22"), llada22_config(), seed=3)


@torch.no_grad()
def test_logits_equal_those_of_glm4_moe_with_sglangs_router(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = llada22_config()

    def route(self: Any, x: Tensor) -> tuple[None, Tensor, Tensor]:
        chosen, weights = [], []
        for canvas in (x.float() @ self.weight.float().T).view(-1, LENGTH, 16):
            index, shares = route_as_sglang(canvas, self.e_score_correction_bias, 8, 4, 2)
            chosen.append(index)
            weights.append(shares * self.routed_scaling_factor)
        return None, torch.cat(weights), torch.cat(chosen)

    monkeypatch.setattr(Glm4MoeTopkRouter, "forward", route)
    ids = torch.randint(0, 24, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    block = torch.arange(LENGTH) // 8
    tensors = as_glm4_moe(read_tensors(checkpoint))
    expected = logits_of(
        Glm4MoeForCausalLM,
        glm4_moe(config),
        tensors,
        tmp_path / "theirs",
        ids,
        block[None, :] <= block[:, None],
    )
    found = load(checkpoint)(ids)
    assert (found - expected).abs().max() / (expected.max() - expected.min()) < 1e-5


def test_inspect_prints_the_limit(checkpoint: Path) -> None:
    done = CliRunner().invoke(main, ["inspect", str(checkpoint)], env={"COLUMNS": "400"})
    assert "2 of 16 experts of 64, silu, 4 in a block" in done.stdout


@pytest.fixture(scope="module")
def bundle(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundle") / "llada22"
    built = build(checkpoint, folder)
    assert built.parity is not None
    assert not built.parity.misses
    return folder


def test_a_bundle_equals_the_reference(checkpoint: Path, bundle: Path) -> None:
    denoiser = load(checkpoint)
    prompts = [
        np.random.RandomState(seed).randint(0, 20, 1 + 3 * seed).tolist() for seed in range(8)
    ]
    with dlm_runtime.open(bundle, threads=1) as opened:
        assert list(opened.manifest["loop"]["presets"]) == ["llada2.2"]
        wanted = [reference.generate(denoiser, each, opened.policy(), 21) for each in prompts]
        alone = [opened.generate(tokens=each, new_tokens=21) for each in prompts]
        # requests of a shared pass, whose last blocks are short
        batch = opened.generate_batch(tokens=prompts, new_tokens=21, max_batch=4)
    assert [(one.tokens, one.nfe) for one in alone] == [(one.tokens, one.nfe) for one in wanted]
    assert [one.tokens for one in batch] == [one.tokens for one in alone]


def test_a_quantised_build_is_calibrated_and_judged(checkpoint: Path, tmp_path: Path) -> None:
    few = CalibrationOptions(samples=8, states_per_sample=4)
    quantise = QuantiseOptions(few, effort=Effort("default", judged=3))
    report = build(checkpoint, tmp_path / "int8", BuildOptions(("cpu",), "int8", quantise=quantise))
    assert report.judgement is not None
    assert report.judgement.frontier is None  # a pass depends on the passes before it
    assert 0 < report.judgement.overall["kl_mean"] < 0.5


def test_a_block_reads_at_most_the_weights_of_its_experts(checkpoint: Path) -> None:
    network = families.read_network(Checkpoint(checkpoint), Overrides())
    unlimited = replace(
        network,
        layers=tuple(
            replace(
                layer, mlp=replace(layer.mlp, router=replace(layer.mlp.router, block_experts=None))
            )
            if isinstance(layer.mlp, ExpertsSpec)
            else layer
            for layer in network.layers
        ),
    )
    expert = 3 * 64 * 64 * 4
    for blocks in (1, 2):
        less = Costs(unlimited, {}).work(8 * blocks, 0, 8).weight_bytes
        less -= Costs(network, {}).work(8 * blocks, 0, 8).weight_bytes
        reached = 16 * (1 - (1 - 2 / 16) ** (8 * blocks))
        assert less == pytest.approx(expert * (reached - 4 * blocks), abs=4)


def test_effort_levels_are_not_fitted(checkpoint: Path) -> None:
    network = families.read_network(Checkpoint(checkpoint), Overrides())
    with pytest.raises(JudgeError, match="deletes and inserts tokens"):
        check_tuned(network)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"delete_token_id": None}, "Add the missing ones"),
        ({"expert_capacity": None, "split_token_id": None}, "Add the missing ones"),
        ({"split_token_id": 24}, r"split_token_id 24 is outside the vocabulary \(0\.\.23\)"),
        ({"split_token_id": 20}, "split_token_id 20, mask_token_id 20 must be different tokens"),
        ({"expert_capacity": 1}, r"expert_capacity must be an integer in 2\.\.16"),
        ({"block_size": None}, "block_size must be an integer"),
    ],
)
def test_wrong_configs_are_refused(config: dict[str, Any], says: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, llada22_config(**config))
    with pytest.raises(CheckpointError, match=says):
        families.read_network(Checkpoint(tmp_path), Overrides())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"block_experts": 1}, "2 active experts of the 1 that a block uses, of 16"),
        ({"block_experts": 4, "groups": 4, "active_groups": 2}, "cannot both be limited"),
    ],
)
def test_routers_that_cannot_be_are_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ExpertsSpec(16, 2, 4, router=RouterSpec(**changes))


@pytest.mark.parametrize(
    ("loop", "says"),
    [
        ({"delete_token_id": None}, "delete_token_id"),
        ({"split_token_id": 20}, "must differ from delete_token_id, and neither may be the mask"),
        ({"split_token_id": 24}, "split_token_id"),
        ({"expand_token_id": 3}, "and no expand_token_id"),
    ],
)
def test_damaged_manifests_are_refused(
    bundle: Path, loop: dict[str, Any], says: str, tmp_path: Path
) -> None:
    for file in bundle.iterdir():
        (tmp_path / file.name).symlink_to(file) if file.name != "manifest.json" else None
    manifest = json.loads((bundle / "manifest.json").read_text())
    manifest["loop"] = {
        key: value for key, value in (manifest["loop"] | loop).items() if value is not None
    }
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match=says):
        dlm_runtime.open(tmp_path, engine="none", check_hashes=False)
