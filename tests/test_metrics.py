"""Tests of the metrics that compare two denoisers: losses, divergences, intervals, and answers."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlm_calibration import metrics
from dlm_calibration.metrics import Commitment, Frontier, Rows, Run
from dlm_calibration.samples import Sample

VOCAB = 7
MASK = 5
quick = settings(max_examples=60)

# Logits are integers, so ties are frequent and equal logits are exactly equal.
rows_of_logits = st.lists(
    st.lists(st.integers(-6, 6), min_size=VOCAB, max_size=VOCAB), min_size=1, max_size=5
).map(lambda rows: np.array(rows, np.float32))
losses = st.lists(st.floats(0.01, 10), min_size=2, max_size=12).map(np.array)
token_lists = st.lists(st.integers(0, 3), max_size=8)


@st.composite
def two_sides(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return a strategy for the logits of two denoisers, and for true tokens (no mask tokens)."""
    first = draw(rows_of_logits)
    second = np.array(draw(st.permutations(first.reshape(-1).tolist())), np.float32).reshape(
        first.shape
    )
    truth = draw(
        st.lists(
            st.sampled_from([t for t in range(VOCAB) if t != MASK]),
            min_size=len(first),
            max_size=len(first),
        )
    )
    return first, second, np.array(truth)


# --- Masked positions ---


@quick
@given(rows_of_logits, st.floats(-50, 50))
def test_probabilities_add_up_to_one_without_the_mask_token(
    logits: np.ndarray, offset: float
) -> None:
    log_probs = metrics.log_probabilities(logits, MASK)
    assert (log_probs[:, MASK] == -np.inf).all()
    np.testing.assert_allclose(np.exp(log_probs).sum(-1), 1, rtol=1e-12)
    np.testing.assert_allclose(
        metrics.log_probabilities(logits.astype(np.float64) + offset, MASK), log_probs, atol=1e-9
    )


def test_cross_entropy_and_divergence_are_those_of_the_definition() -> None:
    reference, candidate = np.log([[0.5, 0.25, 0.25, 1.0]]), np.log([[0.25, 0.5, 0.25, 9.0]])
    rows = metrics.compare_rows(reference, candidate, np.array([1]), mask_token_id=3)
    np.testing.assert_allclose(rows.reference_ce, [-math.log(0.25)])
    np.testing.assert_allclose(rows.candidate_ce, [-math.log(0.5)])
    # The Kullback-Leibler divergence KL(reference || candidate).
    np.testing.assert_allclose(rows.kl, [0.5 * math.log(2) - 0.25 * math.log(2)])
    assert rows.rank.tolist() == [1]


@quick
@given(two_sides())
def test_divergence_is_never_negative_and_zero_for_equal_logits(
    sides: tuple[np.ndarray, np.ndarray, np.ndarray],
) -> None:
    first, second, truth = sides
    assert (metrics.compare_rows(first, second, truth, MASK).kl >= 0).all()
    same = metrics.compare_rows(first, first.copy(), truth, MASK)
    assert (same.kl == 0).all()
    assert (same.rank == 0).all()
    assert (same.reference_ce == same.candidate_ce).all()


@quick
@given(two_sides())
def test_a_rank_of_zero_is_equal_argmax_and_every_rank_is_the_place_in_a_stable_order(
    sides: tuple[np.ndarray, np.ndarray, np.ndarray],
) -> None:
    first, second, truth = sides
    ranks = metrics.compare_rows(first, second, truth, MASK).rank
    for reference, candidate, rank in zip(first, second, ranks, strict=True):
        reference[MASK] = candidate[MASK] = -np.inf
        order = np.argsort(-candidate, kind="stable")
        assert order[rank] == reference.argmax()


@quick
@given(two_sides())
def test_rows_do_not_depend_on_the_size_of_the_chunks(
    sides: tuple[np.ndarray, np.ndarray, np.ndarray],
) -> None:
    whole = metrics.compare_rows(*sides, MASK)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics, "_CHUNK_ELEMENTS", 2 * VOCAB)
        chunked = metrics.compare_rows(*sides, MASK)
    for name in ("reference_ce", "candidate_ce", "kl", "rank"):
        np.testing.assert_array_equal(getattr(whole, name), getattr(chunked, name))


def test_a_summary_weighs_positions_alike_and_compares_sums() -> None:
    rows = Rows(
        np.array([1.0, 1.0, 2.0]),
        np.array([1.0, 2.0, 3.0]),
        np.array([0.0, 0.1, 0.2]),
        np.array([0, 4, 5]),
    )
    summary = metrics.summarise(rows, np.array([0, 0, 1]), samples=2, seed=0)
    assert summary["positions"] == 3
    assert summary["reference_ce"] == pytest.approx(4 / 3)
    assert summary["ce_increase"] == pytest.approx(0.5)
    # The loss of both samples increases by 50%, so the confidence interval is a single point.
    assert summary["ce_increase_interval"] == pytest.approx([0.5, 0.5])
    assert (summary["top1"], summary["top5"]) == pytest.approx((1 / 3, 2 / 3))
    assert summary["kl_mean"] == pytest.approx(0.1)
    assert summary["kl_p95"] == pytest.approx(0.19)


def test_an_increase_from_nothing_has_no_number() -> None:
    none, some = np.zeros(2), np.ones(2)
    assert (
        metrics.summarise(Rows(none, some, none, none), np.arange(2), 2, 0)["ce_increase"] is None
    )
    assert metrics.summarise(Rows(none, none, none, none), np.arange(2), 2, 0)["ce_increase"] == 0


# --- Intervals ---


@quick
@given(losses, st.floats(0.5, 2))
def test_what_is_hard_for_both_cancels_in_a_paired_interval(
    theirs: np.ndarray, factor: float
) -> None:
    low, high = metrics.ratio_interval(factor * theirs, theirs, seed=0) or (0, 0)
    assert low == pytest.approx(factor)
    assert high == pytest.approx(factor)


@settings(max_examples=20)
@given(losses, losses, st.integers(0, 99))
def test_an_interval_is_the_same_for_the_same_seed_and_within_what_samples_show(
    ours: np.ndarray, theirs: np.ndarray, seed: int
) -> None:
    size = min(len(ours), len(theirs))
    ours, theirs = ours[:size], theirs[:size]
    interval = metrics.ratio_interval(ours, theirs, seed)
    assert interval is not None
    assert interval == metrics.ratio_interval(ours, theirs, seed)
    ratios = ours / theirs
    assert ratios.min() * (1 - 1e-9) <= interval[0] <= interval[1] <= ratios.max() * (1 + 1e-9)


def test_an_interval_is_as_wide_as_the_theory_says() -> None:
    rng = np.random.default_rng(1)
    values = rng.normal(5, 1, size=400)
    low, high = metrics.ratio_interval(values, np.ones(400), seed=2) or (0, 0)
    assert low < values.mean() < high
    assert high - low == pytest.approx(2 * 1.96 * values.std() / 20, rel=0.1)


@pytest.mark.parametrize(
    ("hits", "count", "low", "high"),
    # Table I of Newcombe, Statistics in Medicine 17 (1998), pages 857 to 872, method 3
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_the_score_interval_is_the_published_one(
    hits: int, count: int, low: float, high: float
) -> None:
    assert metrics.wilson_interval(hits / count, count) == pytest.approx((low, high), abs=5e-5)
    one_each = np.arange(count) < hits
    assert metrics.share_interval(one_each, np.ones(count)) == pytest.approx((low, high), abs=5e-5)


def test_positions_of_one_sample_count_as_one_if_they_are_alike() -> None:
    ten = np.full(30, 10)
    alike, mixed = np.where(np.arange(30) < 27, 10, 0), np.full(30, 9)
    widths = [high - low for low, high in (metrics.share_interval(h, ten) for h in (alike, mixed))]
    assert widths[0] > 2.5 * widths[1]
    # All positions agree: this does not show more than 30 samples can show.
    assert metrics.share_interval(ten, ten) == metrics.wilson_interval(1.0, 30)


def test_paired_intervals_contain_the_true_difference_as_often_as_they_claim() -> None:
    """A bootstrap claims certainty in every draw without a difference: here 27% of the draws."""
    rng = np.random.default_rng(0)
    covered, draws, certain = 0, 1000, 0
    for _ in range(draws):
        hard = rng.random(32)
        theirs, ours = ((hard < share).astype(int) for share in (0.9, 0.86))
        low, high = metrics.paired_interval(theirs, ours)
        covered += low <= -0.04 <= high
        certain += low == high
    assert 0.93 * draws <= covered
    assert certain == 0
    same = metrics.paired_interval(np.ones(32), np.ones(32))
    assert same == pytest.approx((-0.1072, 0.1072), abs=1e-4)


# --- The frontier ---


def _commitment(guess: list[int], is_chosen: list[bool]) -> Commitment:
    logits = np.zeros((len(guess), VOCAB), np.float32)
    logits[np.arange(len(guess)), guess] = 3
    return Commitment(logits, np.array(guess), np.array(is_chosen))


def test_a_flip_is_another_token_at_a_position_that_both_commit() -> None:
    frontier = Frontier(MASK)
    reference = _commitment([0, 1, 2, 3], [True, True, True, False])
    candidate = _commitment([0, 2, 3, 4], [True, True, False, False])
    frontier.add(0, 0.36, reference, candidate)
    frontier.add(1, 1.0, reference, reference)
    found = frontier.as_dict()
    assert [row["mask_ratio"] for row in found["buckets"]] == [0.35, 0.95]
    low, full = found["buckets"]
    assert (low["committed"], low["flips"], low["states"]) == (2, 1, 1)
    assert low["jaccard"] == pytest.approx(2 / 3)
    assert (full["committed"], full["flips"], full["jaccard"]) == (3, 0, 1)
    assert found["flip_rate"] == pytest.approx(1 / 5)
    assert found["jaccard"] == pytest.approx((2 / 3 + 1) / 2)
    # The predictions differ at 2 of the 6 positions that the reference commits. The divergence is
    # the same at both positions.
    apart = metrics.compare_rows(reference.logits, candidate.logits, reference.guess, MASK).kl
    assert found["kl_mean"] * 6 / 2 == pytest.approx(apart[1])
    assert found["kl_mean"] > 0


# --- Free runs ---


@quick
@given(token_lists, token_lists)
def test_sequences_without_divergence_agree_in_every_token(
    first: list[int], second: list[int]
) -> None:
    position = metrics.first_divergence(first, second)
    same, count = metrics.token_agreement(first, second)
    assert (position is None) == (first == second)
    assert (position is None) == (same == count)
    if position is not None:
        assert first[:position] == second[:position]
        assert first[position : position + 1] != second[position : position + 1]
        assert position <= same


@pytest.mark.parametrize(
    ("text", "answer", "is_same"),
    [
        ('{"a": 1, "b": [true]}', '{"b":[true],"a":1.0}', True),
        ('{"a": true}', '{"a": 1}', False),
        ("[1, 2]", "[1,2]", True),
        ("[1, 2, 3]", "[1,2]", False),
        ("  four\n score ", "four score", True),
        ("1.0", "1", False),  # a number is compared as text
        ("[" * 100_000, "[]", False),
        ("[" * 100_000, "[" * 100_000, True),
        (None, "", False),
    ],
)
def test_answers_are_the_same_as_json_or_else_as_text(
    text: str | None, answer: str, is_same: bool
) -> None:
    assert metrics.same_answer(text, answer) is is_same


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3)
    ),
    max_leaves=6,
)


@quick
@given(json_values, json_values)
def test_json_is_the_same_however_it_is_laid_out_and_no_other_json_is(
    first: Any, second: Any
) -> None:
    answer = json.dumps([first])
    assert metrics.same_answer(
        json.dumps([first], indent=3, sort_keys=True, ensure_ascii=False), answer
    )
    is_equal = json.dumps(first, sort_keys=True) == json.dumps(second, sort_keys=True)
    assert metrics.same_answer(json.dumps([second]), answer) == is_equal


def _sample(answer: str | None) -> Sample:
    return Sample(np.array([0, 1]), 1, answer, "a prompt")


def test_runs_are_shown_with_the_differing_ones_first_and_bounded() -> None:
    theirs = [Run([1, 2], "x", 4) for _ in range(20)]
    ours = [Run([1, 2 + (i >= 15)], "x" if i % 2 else "y", 5) for i in range(20)]
    found = metrics.summarise_runs(
        [_sample("x")] * 20, [str(i) for i in range(20)], theirs, ours, seed=0
    )
    assert [row["prompt"] for row in found["samples"][:6]] == ["15", "16", "17", "18", "19", "0"]
    assert len(found["samples"]) == metrics.SHOWN_SAMPLES
    assert found["exact_match"] == 0.75
    assert found["token_agreement"] == pytest.approx(35 / 40)
    assert found["first_divergence_median"] == 1
    assert found["nfe_ratio"] == 1.25
    assert found["nfe_ratio_interval"] == pytest.approx([1.25, 1.25])
    assert found["right_answers"]["difference"] == -0.5
    low, high = found["right_answers"]["difference_interval"]
    assert -0.8 < low < -0.5 < high < -0.2
    json.dumps(found, allow_nan=False)


def test_equal_runs_without_answers_have_neither_divergence_nor_right_answers() -> None:
    runs = [Run([1, 2], None, 4)] * 2
    found = metrics.summarise_runs([_sample(None)] * 2, [None, None], runs, runs, seed=0)
    assert (found["exact_match"], found["first_divergence_median"], found["right_answers"]) == (
        1,
        None,
        None,
    )
    # Two equal texts do not show that all texts are equal.
    assert found["exact_match_interval"][0] < 0.5


def test_an_end_token_is_counted_and_not_decoded() -> None:
    seen: list[list[int]] = []

    def decode(tokens: list[int]) -> str:
        seen.append(tokens)
        return "text"

    assert metrics.as_run([9, 9, 4, 5, 3, 3], [9, 9], 2, (3,), decode) == Run([4, 5, 3], "text", 2)
    assert metrics.as_run([9, 9, 4, 5], [9, 9], 2, (3,), decode).tokens == [4, 5]
    assert seen == [[4, 5], [4, 5]]
