"""Tests of how much work judging does.

Judging compares a candidate with its reference. The tests count canvases, and check when judging
stops early. They also check thresholds that are tried on stored passes.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from denoisers import load
from judging import judge
from test_judge import (
    EOS,
    POLICY,
    Scripted,
    answered,
    decode,
    knows,
    no_text,
    text_sample,
)

from dlm_calibration.samples import Sample
from dlm_calibration.states import MASK_RATIOS, random_tokens
from dlm_export import families
from dlm_export.judging.accuracy import rounds
from dlm_export.judging.accuracy.evidence import Evidence
from dlm_export.judging.accuracy.frontier import Met, follow, meet, meet_within
from dlm_export.judging.accuracy.rounds import Effort, judge_in_rounds
from dlm_export.judging.accuracy.verdict import Budgets
from dlm_export.judging.sides.layerwise import SweptPredictor
from dlm_export.judging.sides.side import Seer, View
from dlm_export.judging.sides.torch import TorchPredictor
from dlm_export.sources import open_source
from dlm_runtime import Policy

NEW = 24


class Sides:
    """A reference denoiser, loaded in two ways, and a candidate.

    ``free`` is the reference, loaded completely, and can run its own loop. ``seer`` is the
    reference, loaded layer by layer, and can only predict given canvases. ``candidate`` is the
    reference with a little noise added to its weights.
    """

    def __init__(self, checkpoint: Path, noise: float = 0.02) -> None:
        source = open_source(checkpoint)
        self.free = TorchPredictor(load(checkpoint), "fp32")
        self.seer = SweptPredictor(families.layered(source.parameters, source.network), "fp32")
        denoiser = copy.deepcopy(self.free.denoiser)
        torch.manual_seed(0)
        with torch.no_grad():
            for parameter in denoiser.parameters():
                parameter += torch.randn_like(parameter) * parameter.std() * noise
        self.candidate = TorchPredictor(denoiser, "noisy")

    def samples(self, number: int, length: int = 14) -> list[Sample]:
        rng, special = np.random.default_rng(5), (self.free.mask_token_id, *self.free.eos_token_ids)
        tokens = [random_tokens(length, self.free.vocab_size, special, rng) for _ in range(number)]
        return [
            Sample(np.append(t, self.free.eos_token_ids[0]), 6, decode(t[6:].tolist()), "a prompt")
            for t in tokens
        ]


@pytest.fixture(scope="module", params=["llada_checkpoint", "dream_checkpoint"])
def sides(request: pytest.FixtureRequest) -> Sides:
    return Sides(request.getfixturevalue(request.param))


def _met(predictor: TorchPredictor, samples: Sequence[Sample], policy: Policy) -> list[Met]:
    return [
        meet(predictor, sample, i, policy, NEW, predictor.max_canvas_length)
        for i, sample in enumerate(samples)
    ]


# --- A reference that only predicts given canvases ---

LOOPS: dict[str, dict[str, Any]] = {
    "no cache": {"commit": "threshold", "threshold": 0.05, "block_length": 8},
    "dual cache": {"commit": "threshold", "threshold": 0.05, "block_length": 8, "cache": "dual"},
    "prefix cache": {
        "commit": "static",
        "steps_per_block": 4,
        "block_length": 8,
        "cache": "prefix",
    },
    "refreshed cache": {
        "commit": "threshold",
        "threshold": 0.05,
        "block_length": 6,
        "cache": "dual",
        "refresh": 4,
    },
    "one block": {
        "commit": "timestep",
        "score": "entropy",
        "block_length": 0,
        "steps_per_block": 6,
    },
}


@pytest.mark.parametrize("name", LOOPS)
def test_a_run_that_is_equal_by_induction_is_the_references_own(sides: Sides, name: str) -> None:
    """``follow`` reports whether the reference's own loop would give the canvases of a run.

    ``follow`` only uses ``seer``, not the loop. The test runs the loop of ``free`` and compares the
    canvases.
    """
    policy = Policy(**LOOPS[name])
    samples = sides.samples(6)
    runs = _met(sides.candidate, samples[:4], policy) + _met(sides.free, samples[4:], policy)
    sides.seer.see([], [run.walk(sides.seer) for run in runs])
    found = []
    for walk, run in enumerate(runs):
        followed = follow(sides.seer, walk, run, policy)
        own = sides.free.states(run.prompt, run.room, policy)
        same = [a.tokens.tolist() for a in own] == [b.tokens.tolist() for b in run.canvases]
        assert followed.is_equal == same
        if same:
            assert followed.nfe == len(own) - 1
        found.append(same)
    assert found[4:] == [True, True]
    assert not all(found)


def test_a_run_that_ends_early_is_followed_to_its_end(llada_checkpoint: Path) -> None:
    sides = Sides(llada_checkpoint)
    policy = Policy(block_length=4)
    (sample,) = sides.samples(1)
    first = sides.free.generate(sample.tokens[:6].tolist(), 12, policy)[0][7]
    for one in (sides.free, sides.seer):
        one.eos_token_ids = (first,)
    sides.free.denoiser.network = replace(sides.free.denoiser.network, eos_token_ids=(first,))
    (run,) = _met(sides.free, [sample], policy)
    assert run.nfe == 4
    sides.seer.see([], [run.walk(sides.seer)])
    assert follow(sides.seer, 0, run, policy).is_equal


def test_what_it_was_shown_is_what_a_whole_denoiser_predicts(sides: Sides) -> None:
    """``seer`` computes canvases of the same length in one batch.

    Numbers are added in another order in a batch, so logits may differ by rounding errors.
    """
    rng = np.random.default_rng(1)
    canvases = [rng.integers(0, sides.free.vocab_size, length) for length in (9, 14, 9, 20)]
    views = [View(canvas, np.array([0, 3, len(canvas) - 1])) for canvas in canvases]
    assert isinstance(sides.seer, Seer)
    sides.seer.see([*views, views[0]])
    for canvas, positions, _ in views:
        rows = np.maximum(positions - sides.seer.shift, 0)
        ours, theirs = sides.seer.logits(canvas, rows), sides.free.logits(canvas, rows)
        assert np.abs(ours - theirs).max() <= 2e-5 * np.ptp(theirs)
    sides.seer.see(views[:1])
    with pytest.raises(KeyError):
        sides.seer.logits(canvases[1], np.array([0]))


def test_masked_positions_cost_the_same_by_either_effort_and_the_reference_runs_freely_where_asked(
    sides: Sides,
) -> None:
    samples = sides.samples(3)
    given: dict[str, Any] = {
        "policy": replace(POLICY, cache="dual"),
        "max_new_tokens": 8,
        "decode": decode,
    }
    full = judge(sides.free, sides.candidate, samples, **given)
    evidence = Evidence(sides.seer, sides.candidate, samples, free=sides.free, free_runs=1, **given)
    for _ in samples:
        evidence.add(1)
    found = evidence.judgement()
    for ours, theirs in zip(
        [found.overall, *found.buckets], [full.overall, *full.buckets], strict=True
    ):
        for name in ("positions", "top1", "top5"):
            assert ours[name] == theirs[name]
        for name in ("reference_ce", "candidate_ce", "kl_mean"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4)
    assert found.data == full.data
    assert found.effort == {"states_of": "candidate", "free_runs": 1}
    assert full.effort == {"states_of": "reference", "free_runs": 3}
    assert found.free_running["candidate_nfe"] == full.free_running["candidate_nfe"]
    assert found.free_running["reference_nfe"][0] == full.free_running["reference_nfe"][0]
    everything = Evidence(
        sides.seer, sides.candidate, samples, free=sides.free, free_runs=3, **given
    )
    everything.add(3)
    known = everything.judgement().free_running
    assert {name: known[name] for name in full.free_running if name != "equal_by_induction"} == {
        name: value for name, value in full.free_running.items() if name != "equal_by_induction"
    }


def test_a_candidate_that_takes_a_pass_a_token_runs_fewer_prompts() -> None:
    slow = Scripted(write=lambda tokens, new, policy: ([EOS] * new, new))
    samples = list(enumerate([answered()] * 6))
    assert len(meet_within(slow, samples, POLICY, 8, 64, passes=20)) == 2
    assert len(meet_within(slow, samples, POLICY, 8, 64, passes=1)) == 1
    assert len(meet_within(slow, samples, POLICY, 8, 64, passes=1, least=3)) == 3
    evidence = Evidence(
        Scripted(), slow, [answered((7,))] * 6, policy=POLICY, max_new_tokens=40, decode=decode
    )
    evidence.add(6)
    found = evidence.judgement()
    masked = len(MASK_RATIOS) * 6
    assert 0 < found.free_running["prompts"] * 40 <= masked
    assert found.data["samples"] == 6


# --- Rounds ---


class Clock:
    """A fake clock. It advances by 0.25 seconds for each judged sample."""

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence

    def perf_counter(self) -> float:
        return self.evidence.judged / 4


def _in_rounds(
    monkeypatch: pytest.MonkeyPatch,
    effort: Effort,
    budgets: Budgets,
    candidate: Any = None,
    samples: int = 40,
) -> tuple[dict[str, Any], list[int]]:
    """Judge samples in rounds.

    Returns a dict that describes the effort, and the number of judged samples after each round.
    """
    pool = [text_sample(12)] * min(samples, effort.most)
    evidence = Evidence(
        Scripted(), candidate or Scripted(), pool, policy=POLICY, max_new_tokens=4, decode=no_text
    )
    monkeypatch.setattr(rounds, "time", Clock(evidence))
    seen: list[int] = []
    add = evidence.add
    monkeypatch.setattr(
        evidence, "add", lambda *given: (add(*given), seen.append(evidence.judged))[0]
    )
    found = judge_in_rounds(evidence, effort, budgets, 4)
    assert found.data["samples"] == seen[-1]
    return found.effort, seen


def test_judging_stops_when_its_time_is_spent_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    effort, judged = _in_rounds(monkeypatch, Effort(seconds=5), Budgets())
    assert judged == [4, 20], "four a second, and four seconds were left"
    assert (effort["judge"], effort["stopped"], effort["states_of"]) == (
        "default",
        "time",
        "candidate",
    )
    assert _in_rounds(monkeypatch, Effort(seconds=0.5), Budgets())[1] == [4]


def test_judging_takes_32_samples_at_most_and_as_many_as_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    effort, judged = _in_rounds(monkeypatch, Effort(seconds=1e9), Budgets())
    assert (judged, effort["stopped"]) == ([4, 32], "most")
    effort, judged = _in_rounds(monkeypatch, Effort(judged=35, seconds=0), Budgets())
    assert (judged, effort["stopped"]) == ([35], "asked")
    effort, judged = _in_rounds(monkeypatch, Effort(judged=100, seconds=0), Budgets())
    assert (judged, effort["stopped"]) == ([40], "all")
    assert Effort().lasting(1).seconds == rounds.LEAST_SECONDS
    assert Effort().lasting(70).seconds == 70


def test_rounds_double_until_every_budget_is_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = Scripted(knows(text_sample(12).tokens + 1, 0))
    effort, judged = _in_rounds(
        monkeypatch, Effort(seconds=1e9), Budgets(max_ce_increase=0.01), wrong
    )
    assert (judged, effort["stopped"]) == ([4, 8], "decided"), "fewer than eight decide nothing"
    # The candidate and the reference make the same predictions, so the confidence interval of the
    # top-1 agreement is the single point 1.0. This point equals the limit ``min_top1``, so the
    # budget is never decided.
    undecided = Budgets(max_ce_increase=0.01, min_top1=1.0)
    effort, judged = _in_rounds(monkeypatch, Effort(seconds=1e9), undecided)
    assert (judged, effort["stopped"]) == ([4, 8, 16, 32], "most")
    assert all(after <= 2 * before for before, after in pairwise(judged))
