"""Tests of effort levels: which policies are chosen for the levels, the data for fitting, and
bundles with levels.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st
from test_judge import EOS, POLICY, Scripted, answered, decode, no_text, text_sample

import dlm_runtime
from dlm_export.bundle.default_loop import FITTED, NOT_FITTED
from dlm_export.bundle.manifest import read_manifest
from dlm_export.cli import main
from dlm_export.judging.sides.side import JudgeError
from dlm_export.judging.tuning.default_loop import with_levels
from dlm_export.judging.tuning.effort_levels import (
    CAREFUL,
    LEVELS,
    LOSSES,
    LevelPoint,
    Levels,
    choose_levels,
    fastest,
    fit_levels,
    level_units,
    variants,
)
from dlm_runtime import PRESETS, Policy, RequestError
from dlm_runtime.manifest import check_manifest


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


POINTS = st.builds(
    LevelPoint,
    st.just({}),
    st.sampled_from([0.0, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0]),
    st.integers(2, 40).map(lambda half: half / 2),
)


@given(st.lists(POINTS, min_size=1, max_size=12), st.integers(0))
def test_levels_rise_in_passes_and_quality_and_keep_what_they_promise(
    curve: list[LevelPoint], number: int
) -> None:
    own = curve[number % len(curve)]
    levels = choose_levels(curve, own)
    assert tuple(levels) == LEVELS
    chosen = list(levels.values())
    assert all(point in curve for point in chosen)
    assert [point.nfe for point in chosen] == sorted(point.nfe for point in chosen)
    assert [point.quality for point in chosen] == sorted(point.quality for point in chosen)
    high = levels["high"]
    assert high.quality == max(point.quality for point in curve)
    assert high.nfe >= own.nfe or not any(
        point.quality == high.quality and point.nfe >= own.nfe for point in curve
    )
    assert levels["medium"].quality >= (1 - LOSSES["medium"]) * high.quality
    if any(point.nfe <= high.nfe / 2 and point.quality > 0 for point in curve):
        assert levels["low"].nfe <= high.nfe / 2
    else:
        assert levels["low"].quality >= (1 - LOSSES["low"]) * high.quality
    if high.quality == 0:  # in this case, all levels equal the preset
        return
    for point in curve:  # no point with fewer passes may be as good as a level
        for level in ("medium", "low"):
            assert point.quality < levels[level].quality or point.nfe >= levels[level].nfe


def test_low_takes_half_of_the_passes_where_that_loses_more_than_it_may() -> None:
    points = [
        LevelPoint({}, quality, nfe)
        for quality, nfe in ((0.1, 2), (0.4, 5), (0.52, 7), (0.53, 9), (0.54, 12))
    ]
    levels = choose_levels(points, points[2])
    assert [levels[name].nfe for name in LEVELS] == [2, 5, 9, 12]
    assert [choose_levels(points[1:], points[2])[name].nfe for name in LEVELS] == [5, 5, 9, 12]
    assert [choose_levels(points[2:], points[2])[name].nfe for name in LEVELS] == [7, 7, 9, 12]


class Rushed(Scripted):
    """A fake denoiser whose answers are right only at thresholds above ``needed``, or with one
    token per pass.
    """

    def __init__(self, needed: float) -> None:
        super().__init__(write=self._hurry)
        self.needed = needed

    def _hurry(self, tokens: Sequence[int], count: int, policy: Policy) -> tuple[list[int], int]:
        nfe = {"static": count, "dynamic": policy.steps_per_block or count}.get(
            policy.commit, 1 + round(4 * policy.threshold)
        )
        right = policy.commit == "static" or (
            policy.commit == "threshold" and policy.threshold > self.needed
        )
        return [7, 8, 9 if right else 6, *[EOS] * (count - 3)], nfe


def test_levels_are_fitted_on_right_answers_and_else_on_agreement_with_one_token_a_pass() -> None:
    told: list[None] = []
    found = fit_levels(
        Rushed(0.65),
        [answered()] * 2,
        POLICY,
        8,
        decode,
        preset="p",
        on_done=lambda: told.append(None),
    )
    assert len(told) == level_units(POLICY, Scripted(), 2)
    assert len(found.curve) == len(variants(POLICY, Scripted()))
    assert (found.quality, found.samples) == ("task", 2)
    assert [point.nfe for point in found.curve] == sorted(point.nfe for point in found.curve)
    assert found.levels["high"].changes == {}, "of equals the preset's own, for it is no quicker"
    assert found.levels["medium"].changes == {"threshold": 0.7}
    assert (found.levels["medium"].quality, found.levels["medium"].nfe) == (1.0, 4.0)
    assert found.held_out is None, "two samples are too few"
    sample = text_sample(8)
    agreed = fit_levels(Rushed(0.65), [sample], POLICY, 8, no_text, preset="p")
    assert agreed.quality == "agreement"
    assert {point.quality for point in agreed.curve} == {1.0, 7 / 8} or min(
        p.quality for p in agreed.curve
    ) < 1.0
    assert next(point for point in agreed.curve if point.changes == CAREFUL).quality == 1.0


BLOCKWISE = Policy(commit="threshold", threshold=0.6, block_length=4, cache="block")


class Stored(Rushed):
    """A fake denoiser whose answers have three blocks.

    If the policy stores each block in a separate pass, an answer takes three more passes.
    """

    def _hurry(self, tokens: Sequence[int], count: int, policy: Policy) -> tuple[list[int], int]:
        written, nfe = super()._hurry(tokens, count, policy)
        return written, nfe + (3 if policy.store == "pass" else 0)


def test_loops_that_open_a_block_as_they_store_the_one_before_are_tried_and_high_stores_as_the_preset_does() -> (
    None
):
    told: list[None] = []
    found = fit_levels(
        Stored(0.65),
        [answered()] * 2,
        BLOCKWISE,
        8,
        decode,
        preset="p",
        on_done=lambda: told.append(None),
    )
    assert len(told) == level_units(BLOCKWISE, Scripted(), 2)
    assert len(found.curve) == len(variants(BLOCKWISE, Scripted())) + 1, (
        "and the best of them as the preset stores"
    )
    high, medium = found.levels["high"], found.levels["medium"]
    assert (high.changes, high.quality, high.nfe) == ({"threshold": 0.7}, 1.0, 7.0), (
        "no quicker than the preset, and no more careful"
    )
    assert medium.changes == {"threshold": 0.7, "store": "open"}
    assert (medium.quality, medium.nfe) == (1.0, 4.0)


class Varied(Scripted):
    """A fake denoiser that is right on four of five samples with a threshold of at least 0.9.

    It is right on all samples with one token per pass, and with a threshold of 0.99 that finishes
    blocks early. Then a text takes three passes.
    """

    def __init__(self) -> None:
        super().__init__(write=self._write)
        self.texts_made = 0

    def _write(self, tokens: Sequence[int], count: int, policy: Policy) -> tuple[list[int], int]:
        self.texts_made += 1
        is_best = (policy.threshold, policy.finish_threshold) == (0.99, 0.9)
        is_careful = policy.commit == "static"
        is_easy = policy.threshold >= 0.9 and tokens[0] % 5 > 0
        right = is_best or is_careful or is_easy
        nfe = count if is_careful else 3 if is_best else 1 + round(4 * policy.threshold)
        return [7, 8, 9 if right else 6, *[EOS] * (count - 3)], nfe


def test_the_search_drops_variants_and_measures_its_choice_on_held_out_samples() -> None:
    told: list[None] = []
    side, count = Varied(), 200
    samples = [
        replace(answered(), tokens=np.array([i, *answered().tokens[1:]])) for i in range(count)
    ]
    found = fit_levels(
        side, samples, POLICY, 8, decode, preset="p", on_done=lambda: told.append(None)
    )
    assert len(told) == level_units(POLICY, side, count) > side.texts_made
    kept = [point.changes for point in found.curve]
    added = ("finish_threshold", "factor", "entropy_bound")
    is_added = {str(each): any(name in each for name in added) for each in variants(POLICY, side)}
    assert [each for each in kept if is_added[str(each)]] == [
        {"threshold": 0.99, "finish_threshold": 0.9}
    ]
    assert len(kept) == 1 + sum(not each for each in is_added.values())
    assert found.samples == 160
    best = fastest(found)
    assert best is not None
    assert best.changes == {"threshold": 0.99, "finish_threshold": 0.9}
    assert found.held_out is not None
    assert (found.held_out.samples, found.held_out.quality, found.held_out.nfe) == (40, 1.0, 3.0)
    assert found.held_out.careful == 1.0
    low, high = found.held_out.interval
    assert 0.9 < low < high == 1.0


@pytest.mark.parametrize(
    ("changes", "shift"),
    [
        ({"cache": "block-dual", "sub_block_length": 2}, 0),
        ({}, 1),
    ],
)
def test_no_loop_is_tried_that_cannot_open_a_block_as_it_stores(
    changes: dict[str, Any], shift: int
) -> None:
    policy = BLOCKWISE.with_fields(changes)
    side = Scripted(shift=shift)
    assert not any("store" in tried for tried in variants(policy, side))
    assert len(variants(BLOCKWISE, Scripted())) == len(variants(policy, side)) + 1


def test_what_cannot_be_fitted_is_refused() -> None:
    with pytest.raises(JudgeError, match="no samples"):
        fit_levels(Scripted(), [], POLICY, 8, decode, preset="p")
    with pytest.raises(RequestError, match="has no threshold to fit"):
        fit_levels(
            Scripted(),
            [answered()],
            PRESETS["llada"],
            8,
            decode,
            preset="p",
        )


# ---- The default loop ----


def _levels(points: Sequence[LevelPoint], samples: int = 64) -> Levels:
    ascending = sorted(points, key=lambda point: point.nfe)
    return Levels("fast-dllm", "task", samples, ascending, choose_levels(points, points[0]))


CURVES = st.lists(POINTS, min_size=1, max_size=12).map(
    lambda points: [
        LevelPoint({"threshold": i / 100} if i else {}, point.quality, point.nfe)
        for i, point in enumerate(points)
    ]
)


@given(CURVES, st.sampled_from([0.0, 0.5, 0.95, 1.0]))
def test_the_default_loop_is_as_good_as_one_token_a_pass_in_the_fewest_passes(
    curve: list[LevelPoint], quality: float
) -> None:
    careful = LevelPoint(CAREFUL, quality, 64.0)
    found = fastest(_levels([*curve, careful]))
    as_good = [point for point in curve if point.quality >= quality]
    if not as_good or quality == 0:
        assert found is None
        return
    assert found in as_good
    fewest = min(point.nfe for point in as_good)
    assert found.nfe == fewest or (not found.changes and fewest > 0.9 * found.nfe)


def test_the_default_loop_is_a_preset_that_the_manifest_explains(llada_bundle: Path) -> None:
    manifest = read_manifest(llada_bundle)
    assert manifest["loop"]["default_preset"] == "fast-dllm"
    assert manifest["default_loop"]["reason"] == NOT_FITTED
    points = [
        LevelPoint({}, 0.9, 4),
        LevelPoint({"threshold": 0.3}, 1.0, 1),
        LevelPoint(CAREFUL, 1.0, 32),
    ]
    made = with_levels(manifest, _levels(points))
    check_manifest(made, llada_bundle)
    wanted = Policy(**manifest["loop"]["presets"]["fast-dllm"]).with_fields({"threshold": 0.3})
    assert made["loop"]["default_preset"] == FITTED
    assert made["loop"]["presets"][FITTED] == wanted.as_dict()
    reason = (
        "on 64 samples, 100.0% right answers in 1.00 passes; one token a pass gets 100.0% in 32.00"
    )
    assert made["default_loop"] == {
        "published": "fast-dllm",
        "preset": "fast-dllm",
        "changes": {"threshold": 0.3},
        "reason": reason,
    }
    again = with_levels(made, _levels(points, 3))
    assert FITTED not in again["loop"]["presets"]
    assert again["loop"]["default_preset"] == "fast-dllm"
    assert "3 samples are too few" in again["default_loop"]["reason"]


# ---- Bundles ----


@pytest.fixture(scope="module")
def fitted(llada_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle whose levels the command fitted on random ids."""
    copied = Path(shutil.copytree(llada_bundle, tmp_path_factory.mktemp("effort") / "bundle"))
    result = invoke("effort", copied, "--samples", 3, "--threads", 1)
    assert result.exit_code == 0, result.output
    assert "agreement with one token a pass" in result.stdout
    assert "3 samples are few" in result.stdout
    assert "no --data: judged on made-up samples" in result.stderr
    return copied


def test_a_level_is_the_loop_that_the_manifest_says(fitted: Path) -> None:
    manifest = read_manifest(fitted)
    effort = manifest["effort"]
    assert effort["preset"] == "fast-dllm"
    assert effort["samples"] == 3
    with dlm_runtime.open(fitted, threads=1) as bundle:
        for level in LEVELS:
            changed = bundle.policy("fast-dllm").with_fields(effort["levels"][level]["changes"])
            assert (
                bundle.policy(effort=level) == bundle.policy("fast-dllm", effort=level) == changed
            )
            assert changed.as_dict() == manifest["loop"]["effort"]["levels"][level]
        request = {"tokens": [5, 17, 9], "max_new_tokens": 12}
        low, same = (
            bundle.generate(effort="low", **request),
            bundle.generate(**request, **bundle.policy(effort="low").as_dict()),
        )
        assert (low.tokens, low.nfe) == (same.tokens, same.nfe)
        careful = bundle.generate(effort="low", commit="static", steps_per_block=0, **request)
        assert careful.nfe == 12, "a field that is given wins"
        with pytest.raises(
            RequestError, match="effort low was fitted for preset fast-dllm, not for llada"
        ):
            bundle.generate(effort="low", preset="llada", **request)
        with pytest.raises(
            RequestError, match='effort "most" is not one of instant, low, medium, high'
        ):
            bundle.generate(effort="most", **request)
        with pytest.raises(RequestError, match="effort = 3 is not a name"):
            bundle.generate(effort=3, **request)


def test_the_command_line_runs_and_shows_levels(fitted: Path, llada_bundle: Path) -> None:
    run = ("--tokens", "1,2", "--max-new-tokens", 8, "--threads", 1, "--json")
    low, high = (
        json.loads(invoke("run", fitted, "--effort", level, *run).stdout)["nfe"]
        for level in ("instant", "high")
    )
    assert low <= high
    shown = invoke("inspect", fitted).stdout
    assert "Effort, loops of fast-dllm, by generations of 3 samples" in shown
    assert all(level in shown for level in LEVELS)
    assert "default preset: fast-dllm: the loop published for this family" in shown
    none = invoke("run", llada_bundle, "--effort", "low", *run)
    assert none.exit_code == 2
    assert (
        "this bundle has no levels: `dlm-export effort BUNDLE --data FILE` fits instant"
        in none.stderr
    )


def test_levels_are_fitted_again_in_the_place_of_others(fitted: Path, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(fitted, tmp_path / "bundle"))
    told = json.loads(
        invoke(
            "effort", copied, "--samples", 1, "--preset", "dream-block", "--threads", 1, "--json"
        ).stdout
    )
    assert told["preset"] == read_manifest(copied)["loop"]["effort"]["preset"] == "dream-block"
    refused = invoke("effort", copied, "--preset", "llada", "--threads", 1)
    assert refused.exit_code == 2
    assert "has no threshold to fit" in refused.stderr
    assert read_manifest(copied)["effort"] == told


def test_a_build_says_that_levels_of_its_source_do_not_hold_for_it(
    fitted: Path, tmp_path: Path
) -> None:
    done = invoke("build", fitted, "-o", tmp_path / "fp16", "--precision", "fp16", "--no-verify")
    assert done.exit_code == 0, done.output
    assert (
        f"the effort levels of {fitted} were fitted to it and are not in this bundle"
        in " ".join(done.stderr.split())
    )
    assert "effort" not in read_manifest(tmp_path / "fp16")["loop"]
