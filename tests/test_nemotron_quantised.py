"""Nemotron-Labs-Diffusion, quantised: calibration states, accuracy of drafts and of causal passes,
and effort levels.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from checkpoints import ADAPTED, nemotron_config, write_adapter, write_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from quantised_drafts import (
    ANSWER,
    BLOCK,
    PROMPT,
    WORDS,
    after_a_file,
    check_generations,
    check_layers,
    invoke,
    make_samples,
    states_of,
)
from torch_side import TorchPredictor

import dlm_runtime
from dlm_calibration.states import (
    MASK_RATIOS,
    NOISE_RATIOS,
    Draft,
    State,
    mask_draft_block,
)
from dlm_export import build as building
from dlm_export import families
from dlm_export.build import BuildOptions, BuildReport, QuantiseOptions
from dlm_export.bundle.manifest import read_manifest
from dlm_export.judging.accuracy.effort import Effort
from dlm_export.judging.accuracy.frontier import meet, predict_commitment
from dlm_export.judging.accuracy.masked import MaskedCanvas, masked_canvases
from dlm_export.judging.accuracy.run import JudgingOptions, judge_source
from dlm_export.judging.accuracy.verdict import Judgement
from dlm_export.judging.precision_search import sensitivity
from dlm_export.judging.sides.bundle import BundlePredictor
from dlm_export.judging.sides.layerwise import SweptPredictor
from dlm_export.judging.sides.side import DraftPass, JudgeError, View, finite_logits
from dlm_export.network import reference
from dlm_export.network.denoiser import Denoiser
from dlm_export.network.loop_turns import Canvas, start_canvas
from dlm_export.quantising import samples
from dlm_export.quantising.samples import CalibrationOptions
from dlm_export.sources import Source, open_source
from dlm_runtime import Bundle

MASK = WORDS


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a random adapter for the drafts of self-speculation."""
    config = nemotron_config()
    path = write_checkpoint(tmp_path_factory.mktemp("nemotron") / "checkpoint", config, seed=2)
    write_adapter(path, config, target_modules=ADAPTED)
    return path


@pytest.fixture(scope="module")
def source(checkpoint: Path) -> Source:
    return open_source(checkpoint)


@pytest.fixture(scope="module")
def denoiser(source: Source) -> Denoiser:
    return families.load(source.parameters, source.network)


# ---- Calibration states ----


@settings(max_examples=80)
@given(
    seed=st.integers(0, 1 << 20),
    prompt=st.integers(0, 20),
    answer=st.integers(2, 30),
    ratio=st.sampled_from(NOISE_RATIOS),
    length=st.none() | st.integers(2, 30),
)
def test_only_positions_of_one_block_are_masked(
    seed: int, prompt: int, answer: int, ratio: float, length: int | None
) -> None:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, MASK, prompt + answer)
    origin = max(1, prompt)
    end = None if length is None else min(origin + length, len(tokens))
    canvas, start = mask_draft_block(tokens, ratio, MASK, BLOCK, rng, prompt, end)
    is_masked = canvas == MASK
    assert (start + 1 - origin) % BLOCK == 0
    assert origin <= start + 1 < (len(tokens) if end is None else end)
    assert len(canvas) == min(start + BLOCK, len(tokens))
    assert not is_masked[: start + 1].any()
    assert np.array_equal(canvas[~is_masked], tokens[: len(canvas)][~is_masked])
    assert abs(is_masked.sum() - max(1, ratio * (len(canvas) - start - 1))) <= 0.5


def test_every_masked_state_is_a_draft_pass(source: Source) -> None:
    """Only draft passes see mask tokens, and causal passes see clean text."""
    states = states_of(source, make_samples(20), has_drafts=True)
    assert {state.source for state in states} == {"masked", "clean"}
    buckets = set()
    for state in states:
        is_masked = state.is_masked(MASK)
        assert is_masked.tolist() == (state.canvas == MASK).tolist()
        assert is_masked.any() == (state.draft is not None) == (state.source == "masked")
        if state.draft is not None:
            assert state.mask_ratio == is_masked[state.draft.start :].mean()
            assert not state.draft.is_updated or is_masked[state.draft.start + 1 :].all()
            buckets.add(state.bucket)
    assert len(buckets) >= 6
    # Ranges of activations must be observed in the draft passes of self-speculation too.
    assert {state.draft.is_updated for state in states if state.draft is not None} == {True, False}


@pytest.fixture(scope="module")
def drafted(source: Source) -> list[State]:
    """States of generations with and without the adapter, masked states and clean states."""
    found = []
    for preset in ("self-speculation", "nemotron-diffusion"):
        layered = families.layered(source.parameters, source.network)
        runs = samples.trajectories(layered, source.presets[preset], None, lambda: None)
        found += states_of(
            source, make_samples(4), has_drafts=True, per_sample=5, trajectories=runs
        )
    return found


def test_states_survive_a_file(drafted: list[State], tmp_path: Path) -> None:
    found = after_a_file(drafted, tmp_path / "states.npz")
    updated = [None if each.draft is None else each.draft.is_updated for each in found]
    assert {True, False, None} == set(updated)
    one = next(each for each in found if each.draft is not None and each.draft.is_updated)
    assert one.draft is not None
    assert one.sha256 != replace(one, draft=Draft(one.draft.start)).sha256


@pytest.mark.parametrize("preset", ["self-speculation", "nemotron-diffusion"])
def test_states_of_a_generation_are_the_passes_that_the_loop_makes(
    source: Source, preset: str
) -> None:
    for made in check_generations(source, source.presets[preset], 3):
        for state in made:
            assert state.draft is not None
            assert state.draft.is_updated == (preset == "self-speculation")
            assert state.mask_ratio == np.mean(state.canvas[state.draft.start :] == MASK)


def test_layers_compute_a_draft_pass_after_a_causal_pass(
    source: Source, drafted: list[State]
) -> None:
    one = State(drafted[0].canvas[:5], "masked", 1.0, 0, Draft(0, is_updated=True))
    check_layers(source, [*drafted, one])


# ---- Losses of layers ----


def test_losses_of_layers_are_measured_in_draft_passes_and_causal_passes(
    source: Source, drafted: list[State]
) -> None:
    for most in (2, 7, 16):
        chosen = sensitivity.swept(drafted, source.network, most)
        causal = [state for state in chosen if state.draft is None]
        assert len(causal) == min(most // 2, sum(state.draft is None for state in drafted))
        assert len(chosen) == most
        for state in causal:
            rows = sensitivity.predicting_rows(state, source.network)
            assert rows.tolist() == list(range(len(state.canvas) - 1))
    masked = [state for state in drafted if state.draft is not None]
    assert len(sensitivity.swept(masked, source.network, 6)) == 6


# ---- Sides of a comparison ----


@pytest.fixture(scope="module")
def exact(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bundle]:
    """A bundle in full precision."""
    path = tmp_path_factory.mktemp("exact") / "bundle"
    building.build(checkpoint, path, BuildOptions(check_parity=False))
    with dlm_runtime.open(path, threads=1) as opened:
        yield opened


def canvases_of(source: Source, count: int = 3) -> list[MaskedCanvas]:
    side = SweptPredictor(families.layered(source.parameters, source.network), "swept")
    policy = source.presets["nemotron-diffusion"]
    return [
        seen
        for number, sample in enumerate(make_samples(count))
        for seen in masked_canvases(sample, number, side, policy=policy, limit=64, seed=1)
    ]


def test_all_kinds_of_passes_are_compared(source: Source) -> None:
    seen = canvases_of(source)
    masked = [each for each in seen if each.kind == "masked"]
    assert {each.ratio for each in masked} == set(range(len(MASK_RATIOS)))
    assert all(each.draft is not None and not each.draft.is_updated for each in masked)
    for number, sample in enumerate(make_samples(3)):
        (draft,) = [each for each in seen if (each.sample, each.kind) == (number, "draft")]
        assert draft.draft is not None
        assert draft.draft.is_updated
        start = draft.draft.start
        assert (draft.canvas[start + 1 :] == MASK).all()
        assert draft.positions.tolist() == list(range(start + 1, min(start + BLOCK, 24)))
        (causal,) = [each for each in seen if (each.sample, each.kind) == (number, "causal")]
        assert causal.draft is None
        assert causal.canvas.tolist() == sample.tokens.tolist()
        assert causal.positions.tolist() == list(range(PROMPT, PROMPT + ANSWER))
    assert all(np.isin(each.truth, np.arange(2, MASK)).all() for each in seen)


def test_all_sides_of_a_comparison_predict_the_same(
    source: Source, denoiser: Denoiser, exact: Bundle
) -> None:
    swept = SweptPredictor(families.layered(source.parameters, source.network), "swept")
    whole, ours = TorchPredictor(denoiser, "whole"), BundlePredictor(exact, "bundle")
    views = [each.view for each in canvases_of(source)]
    one = views[-2]  # the same draft pass, without the adapter
    assert one.draft is not None
    views += [one._replace(draft=DraftPass(one.draft.start)), View(one.canvas[-3:], np.arange(3))]
    views.append(View(np.array([MASK, MASK]), np.arange(2), DraftPass(0)))
    swept.see(views)
    found = []
    for view in views:
        wanted, *others = (
            np.delete(finite_logits(side, *view), MASK, 1) for side in (whole, swept, ours)
        )
        for other in others:
            assert np.abs(other - wanted).max() <= 1e-4 * np.ptp(wanted)
        found.append(wanted)
    assert np.abs(found[-3] - found[-5]).max() > 1e-2


def test_drafts_and_causal_passes_are_those_of_the_loop(
    source: Source, denoiser: Denoiser, exact: Bundle
) -> None:
    """After two passes, the canvas contains the first token and the drafted tokens."""
    policy, side = source.presets["self-speculation"], BundlePredictor(exact, "bundle")
    for sample in make_samples(5):
        prompt = sample.tokens[:PROMPT]
        canvas = start_canvas(prompt.tolist(), BLOCK, MASK)
        seen: list[Canvas] = []
        reference.fill(denoiser, canvas, policy, on_step=seen.append, max_steps=2)
        first, drafted = (each.tokens for each in seen)
        causal = finite_logits(side, first, np.array([PROMPT])).argmax(-1)
        assert causal.tolist() == first[PROMPT : PROMPT + 1].tolist()
        last = PROMPT + BLOCK - 1
        positions, draft = np.arange(PROMPT + 1, last), DraftPass(PROMPT, is_updated=True)
        guesses = finite_logits(side, first[:last], positions, draft)
        assert guesses.argmax(-1).tolist() == drafted[positions].tolist()


def judged(source: Source, bundle: Bundle, preset: str) -> Judgement:
    options = JudgingOptions(effort=Effort("default", judged=4))
    policy = source.presets[preset]
    return judge_source(source, bundle, make_samples(4), "bundle", policy, options, lambda: None)


def test_an_exact_bundle_differs_in_no_pass(source: Source, exact: Bundle) -> None:
    """Draft passes and causal passes are conditioned as in the loop, so nothing differs."""
    found = judged(source, exact, "nemotron-diffusion")
    assert found.overall["top1"] == 1
    assert found.overall["kl_mean"] < 1e-6
    assert found.frontier is not None
    assert found.frontier["flips"] == 0
    assert found.frontier["jaccard"] == 1
    assert found.frontier["committed"] > 0
    assert found.free_running is not None
    assert found.free_running["exact_match"] == 1
    assert found.free_running["nfe_ratio"] == 1
    assert found.speculation is not None
    for passes in found.speculation.values():
        assert passes["top1"] == 1
        assert passes["kl_mean"] < 1e-6


def test_predicted_commitments_are_those_of_the_loop(source: Source, exact: Bundle) -> None:
    """The frontier is computed without the cache, but with the tokens that the loop's passes see."""
    side, policy = BundlePredictor(exact, "bundle"), source.presets["nemotron-diffusion"]
    policy = policy.with_fields({"threshold": 0.1})
    counts = []
    for number, sample in enumerate(make_samples(4)):
        run = meet(side, sample, number, policy, 3 * BLOCK, 64)
        for state, before, after in zip(
            run.states, run.canvases[:-1], run.canvases[1:], strict=True
        ):
            found = predict_commitment(side, state, policy)
            positions = state.turn.positions[found.is_chosen]
            is_decided = before.undecided & ~after.undecided
            assert positions.tolist() == np.flatnonzero(is_decided).tolist()
            assert found.guess[found.is_chosen].tolist() == after.tokens[positions].tolist()
            counts.append(len(positions))
    assert max(counts) > 1


def test_a_preset_without_draft_passes_cannot_be_judged(source: Source, exact: Bundle) -> None:
    with pytest.raises(JudgeError, match="makes no draft passes: choose another preset"):
        judged(source, exact, "autoregressive")


# ---- Bundles ----


@pytest.fixture(scope="module")
def built(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., BuildReport]:
    made: dict[str, BuildReport] = {}

    def build(precision: str) -> BuildReport:
        if precision not in made:
            output = tmp_path_factory.mktemp(precision) / "bundle"
            few = CalibrationOptions(samples=16, states_per_sample=4)
            quantise = QuantiseOptions(few, effort=Effort("default", judged=3))
            options = BuildOptions(("cpu",), precision, quantise=quantise)
            made[precision] = building.build(checkpoint, output, options)
        return made[precision]

    return build


PRECISIONS = ("int4", *(pytest.param(each, marks=pytest.mark.slow) for each in ("int8", "fp8")))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_bundle_is_built_and_judged(built: Callable[[str], BuildReport], precision: str) -> None:
    report = built(precision)
    assert not any("accuracy" in warning for warning in report.warnings)
    found = report.judgement
    assert found is not None
    ratios = [bucket["mask_ratio"] for bucket in found.buckets]
    assert ratios == [0.05, 0.15, 0.25, 0.55, 0.65, 0.75]
    assert found.overall["reference_bits_per_byte"] is None
    assert 0 < found.overall["kl_mean"] < 0.5
    assert found.frontier is not None
    assert found.speculation is not None
    assert set(found.speculation) == {"draft", "causal"}
    for passes in found.speculation.values():
        assert 0 < passes["kl_mean"] < 0.5
    assert all(row["kl"] > 0 for row in found.layers)
    record = json.loads((report.output / "accuracy.json").read_text())
    assert record["judgement"]["speculation"] == found.speculation
    page = (report.output / "report.html").read_text()
    assert "Passes of self-speculation" in page
    assert "Cross-entropy of causal passes" in page
    assert '<a href="#speculation">' in page
    assert "a draft pass over this block predicts them" in page


def test_verify_judges_a_bundle(built: Callable[[str], BuildReport], checkpoint: Path) -> None:
    bundle = built("int4").output
    given = ("verify", bundle, "--checkpoint", checkpoint, "--judged", 2)
    done = invoke(*given, "--max-ce-increase", 5)
    assert done.exit_code == 0, done.output
    assert "Passes of self-speculation" in done.stdout
    assert "Budget max_causal_ce_increase 5: " in done.stdout
    limits = ("--calib-preset", "self-speculation", "--max-nfe-ratio", 2)
    done = invoke(*given, *limits)
    assert done.exit_code == 0, done.output
    assert (
        "Frontier: not compared, because the passes of self-speculation depend on drafts"
        in done.stdout
    )
    refused = invoke(*given, "--calib-preset", "autoregressive")
    assert refused.exit_code == 2
    assert "makes no draft passes" in refused.stderr


# ---- Effort levels ----


def test_effort_levels_are_fitted_and_self_speculation_stays_the_default(
    built: Callable[[str], BuildReport], tmp_path: Path
) -> None:
    bundle = tmp_path / "bundle"
    built("int4").output.rename(bundle)
    try:
        timed = invoke("effort", bundle, "--preset", "self-speculation", "--samples", 1, "--json")
        assert json.loads(timed.stdout)["preset"] == "self-speculation"
        chosen = read_manifest(bundle)["default_loop"]["changes"]
        done = invoke("effort", bundle, "--samples", 2)
        assert done.exit_code == 0, done.output
        told = invoke("inspect", bundle).stdout
        assert "no effort levels for self-speculation, autoregressive" in told
        assert "Effort, loops of nemotron-diffusion" in told
        # Fitting levels does not change the block length that was fitted before.
        assert read_manifest(bundle)["default_loop"]["changes"] == chosen
        name = (
            "fitted (self-speculation with block_length" if chosen else "self-speculation: the loop"
        )
        assert f"default preset: {name}" in told
        with dlm_runtime.open(bundle, threads=1) as opened:
            for level in ("instant", "high"):
                policy = opened.policy(effort=level)
                assert policy.commit in ("threshold", "dynamic", "static")
                out = opened.generate(tokens=[3, 4], max_new_tokens=BLOCK, effort=level)
                assert MASK not in out.tokens
    finally:
        bundle.rename(built("int4").output)
