"""Tests of how much work judging does.

Judging compares a candidate with its reference, on a number of samples that does not depend on the
speed of the machine. The tests count canvases, samples and texts.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from denoisers import load
from loops import loops
from test_judge import (
    EOS,
    MASK,
    POLICY,
    Scripted,
    answered,
    decode,
    no_text,
    text_sample,
)
from torch_side import TorchPredictor

from dlm_calibration.samples import Sample
from dlm_calibration.states import MASK_RATIOS, random_tokens
from dlm_export import families
from dlm_export.judging.accuracy.effort import Effort
from dlm_export.judging.accuracy.evidence import judge
from dlm_export.judging.accuracy.frontier import meet_within
from dlm_export.judging.sides.layerwise import SweptPredictor
from dlm_export.judging.sides.side import View
from dlm_export.sources import open_source
from dlm_runtime import Policy


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


@pytest.fixture(scope="module")
def sides(dream_checkpoint: Path) -> Sides:
    return Sides(dream_checkpoint)


# --- A reference whose layers are loaded one at a time ---

LOOPS = loops("""
dual cache: commit=threshold threshold=0.05 block_length=8 cache=dual
static, prefix cache: commit=static steps_per_block=4 block_length=8 cache=prefix
""")


@pytest.mark.parametrize("name", LOOPS)
def test_a_reference_loaded_layer_by_layer_judges_like_a_whole_one(sides: Sides, name: str) -> None:
    samples = sides.samples(3)
    given: dict[str, Any] = {"policy": Policy(**LOOPS[name]), "max_new_tokens": 8, "decode": decode}
    whole, layered = (
        judge(each, sides.candidate, samples, **given) for each in (sides.free, sides.seer)
    )
    assert whole.free_running == layered.free_running
    assert layered.free_running["prompts"] == 3
    assert whole.data == layered.data
    for ours, theirs in zip(
        [layered.overall, *layered.buckets], [whole.overall, *whole.buckets], strict=True
    ):
        for figure in ("positions", "top1", "top5"):
            assert ours[figure] == theirs[figure]
        for figure in ("reference_ce", "candidate_ce", "kl_mean"):
            assert ours[figure] == pytest.approx(theirs[figure], rel=1e-4)
    for figure in ("committed", "flips", "jaccard"):
        assert layered.frontier[figure] == whole.frontier[figure]


def test_what_it_was_shown_is_what_a_whole_denoiser_predicts(sides: Sides) -> None:
    """``seer`` computes canvases of the same length in one batch.

    Numbers are added in another order in a batch, so logits may differ by rounding errors.
    """
    rng = np.random.default_rng(1)
    canvases = [rng.integers(0, sides.free.vocab_size, length) for length in (9, 14, 9, 20)]
    views = [View(canvas, np.array([0, 3, len(canvas) - 1])) for canvas in canvases]
    sides.seer.see([*views, views[0]])
    for canvas, positions, _ in views:
        rows = np.maximum(positions - sides.seer.shift, 0)
        ours, theirs = sides.seer.logits(canvas, rows), sides.free.logits(canvas, rows)
        assert np.abs(ours - theirs).max() <= 2e-5 * np.ptp(theirs)
    sides.seer.see(views[:1])
    with pytest.raises(KeyError):
        sides.seer.logits(canvases[1], np.array([0]))


# --- How much is compared ---


def test_the_cache_is_judged_on_fewer_prompts_if_a_run_takes_a_pass_a_token() -> None:
    slow = Scripted(write=lambda tokens, new, policy: ([EOS] * new, new))
    samples = list(enumerate([answered()] * 6))
    assert len(meet_within(slow, samples, POLICY, 8, 64, passes=20)) == 2
    assert len(meet_within(slow, samples, POLICY, 8, 64, passes=1)) == 1


def test_every_sample_gets_an_answer_of_both_however_many_passes_it_takes() -> None:
    slow = Scripted(write=lambda tokens, new, policy: ([EOS] * new, new))
    found = judge(
        Scripted(), slow, [answered()] * 40, policy=POLICY, max_new_tokens=40, decode=decode
    )
    assert found.free_running["prompts"] == found.data["samples"] == 40
    assert len(found.free_running["right_answers"]["reference_right"]) == 40


def test_few_canvases_of_a_sample_cover_all_mask_ratios_together() -> None:
    reference = Scripted()
    samples = [text_sample(40)] * len(MASK_RATIOS)
    found = judge(
        reference,
        Scripted(),
        samples,
        policy=POLICY,
        max_new_tokens=8,
        decode=no_text,
        canvases=Effort().canvases,
    )
    assert [row["mask_ratio"] for row in found.buckets] == list(MASK_RATIOS)
    masked = [canvas for canvas in reference.seen if len(canvas) == 40]
    assert len(masked) == Effort().canvases * len(samples)
    shares = [round(float((canvas == MASK).mean()), 2) for canvas in masked[:4]]
    assert shares == [0.05, 0.55, 0.15, 0.65]
