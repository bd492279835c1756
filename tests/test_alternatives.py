"""Tests of the alternatives of each token (``top_log_probs``), compared with results that the tests
compute from the logits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from constraints import compiled, made_up_vocabulary
from denoisers import ArithmeticDenoiser
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_loop import policies, requests
from test_request_options import uneven

import dlm_runtime
from dlm_runtime import Bundle, CallbackPass, DenoiserInfo, EngineError, Policy

VOCABULARY, MASK = 50, 41


def logits_of(positions: np.ndarray, masked: int) -> np.ndarray:
    """Return logits that depend on the position and on the number of masked positions."""
    rows = [np.random.default_rng([at, masked]).normal(0, 2, VOCABULARY) for at in positions]
    return np.array(rows, np.float32)


def log_probs_of(logits: np.ndarray) -> np.ndarray:
    """Return ln p of each token in the softmax over all tokens except the mask token."""
    allowed = logits.astype(np.float64)
    allowed[MASK] = -np.inf
    return allowed - np.logaddexp.reduce(allowed)


@contextlib.contextmanager
def opened(top_k: int, shift: int = 0) -> Iterator[tuple[Bundle, list[bool]]]:
    """Open a bundle, and return it with a list.

    For each pass, the list says whether the pass had to return its logits.
    """
    had_logits: list[bool] = []

    def run(p: CallbackPass) -> None:
        masked = int((p.input_ids == MASK).sum())
        logits = logits_of(p.position_ids[p.score_rows], masked)
        had_logits.append(p.logits is not None)
        for row, each in enumerate(logits):
            log_probs = log_probs_of(each)
            best = np.argsort(-log_probs, kind="stable")[:top_k]
            p.top_tokens[row], p.top_probs[row] = best, np.exp(log_probs[best])
        if p.logits is not None:
            p.logits[:] = logits

    info = DenoiserInfo(VOCABULARY, MASK, 64, shift=shift, top_k=top_k)
    with dlm_runtime.from_callback(info, run) as bundle:
        yield bundle, had_logits


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("temperature", [0.0, 1.5])
@pytest.mark.parametrize("count", [1, 2, 3, 20])
@pytest.mark.parametrize("top_k", [2, 8])
def test_alternatives_are_those_of_the_pass_that_committed_the_token(
    top_k: int, count: int, temperature: float, shift: int
) -> None:
    request: dict[str, Any] = {
        "tokens": [1, 2],
        "max_new_tokens": 12,
        "commit": "static",
        "block_length": 6,
        "steps_per_block": 3,
        "temperature": temperature,
    }
    with opened(top_k, shift) as (bundle, had_logits):
        events = list(bundle.stream(**request, top_log_probs=count))
        out = events[-1].result
        plain = bundle.generate(**request)
    assert out is not None
    assert (out.tokens, out.nfe, out.log_probs) == (plain.tokens, plain.nfe, plain.log_probs)
    assert plain.top_log_probs == []
    assert len(out.top_log_probs) == len(out.tokens)
    assert had_logits[: out.nfe] == [temperature > 0 or count > top_k] * out.nfe
    masked, checked = 12, 0
    before = [False] * 2 + [True] * 12
    for event in events:
        for at, (was_open, is_open) in enumerate(zip(before, event.undecided, strict=True)):
            if not was_open or is_open:
                continue
            log_probs = log_probs_of(logits_of(np.array([at - shift]), masked)[0])
            best = np.argsort(-log_probs, kind="stable")[:count]
            found = out.top_log_probs[at]
            assert [token for token, _ in found] == best.tolist()
            np.testing.assert_allclose([p for _, p in found], log_probs[best], atol=1e-5)
            checked += 1
        before, masked = event.undecided, sum(event.undecided)
    assert checked == 12
    assert out.top_log_probs[:2] == [[], []]


@settings(max_examples=100)
@given(policy=policies, request=requests(), count=st.integers(1, 20))
def test_alternatives_change_nothing_else(
    policy: Policy, request: dict[str, Any], count: int
) -> None:
    assume(39 in request["tokens"] or request["max_new_tokens"])
    bundle = ArithmeticDenoiser(eos=5).bundle
    fields = request | policy.as_dict()
    plain = bundle.generate(**fields)
    out = bundle.generate(**fields, top_log_probs=count)
    assert (out.tokens, out.nfe, out.undecided) == (plain.tokens, plain.nfe, plain.undecided)
    for token, log_prob, alternatives in zip(
        out.tokens, out.log_probs, out.top_log_probs, strict=True
    ):
        assert len(alternatives) == (0 if log_prob is None else count)
        assert len({each for each, _ in alternatives}) == len(alternatives)
        assert 39 not in dict(alternatives)
        values = [value for _, value in alternatives]
        assert values == sorted(values, reverse=True)
        if token in dict(alternatives):
            assert dict(alternatives)[token] == log_prob


@pytest.mark.parametrize(("count", "tokens"), [(3, [2, 0, 1]), (20, [2, 0, 1, 3])])
def test_a_small_vocabulary_has_few_alternatives_and_the_lowest_of_equal_ones_come_first(
    count: int, tokens: list[int]
) -> None:
    def run(p: CallbackPass) -> None:
        p.top_tokens[:], p.top_probs[:] = (2, 0), (0.4, 0.2)
        if p.logits is not None:
            p.logits[:] = np.log([0.2, 0.2, 0.4, 0.2, 1])

    with dlm_runtime.from_callback(DenoiserInfo(5, 4, 8), run) as bundle:
        out = bundle.generate(tokens=[1], max_new_tokens=1, top_log_probs=count)
    assert [token for token, _ in out.top_log_probs[1]] == tokens
    np.testing.assert_allclose(
        [p for _, p in out.top_log_probs[1]], np.log([0.4, 0.2, 0.2, 0.2][:count]), rtol=1e-6
    )


@pytest.mark.parametrize(
    ("token", "prob", "said"), [(3, 0.1, "invalid token 3"), (1, np.nan, "not finite")]
)
def test_a_wrong_candidate_ends_a_request_that_reports_it(
    token: int, prob: float, said: str
) -> None:
    def run(p: CallbackPass) -> None:
        p.top_tokens[:], p.top_probs[:] = (2, token), (0.5, prob)

    with dlm_runtime.from_callback(DenoiserInfo(4, 3, 8), run) as bundle:
        assert bundle.generate(tokens=[1], max_new_tokens=1).tokens == [1, 2]
        with pytest.raises(EngineError, match=said):
            bundle.generate(tokens=[1], max_new_tokens=1, top_log_probs=2)


def test_requests_with_and_without_alternatives_share_passes() -> None:
    with opened(2) as (bundle, _), bundle.scheduler(max_running=4) as scheduler:
        request: dict[str, Any] = {"tokens": [3], "max_new_tokens": 8, "steps": 8}
        counts = (0, 1, 5, 20)
        jobs = [scheduler.submit(**request, top_log_probs=count) for count in counts]
        made = [job.result() for job in jobs]
    for count, out in zip(counts, made, strict=True):
        assert out.tokens == made[0].tokens
        wanted = [each[:count] for each in made[-1].top_log_probs] if count else []
        assert [[t for t, _ in each] for each in out.top_log_probs] == [
            [t for t, _ in each] for each in wanted
        ]
        for found, expected in zip(out.top_log_probs, wanted, strict=True):
            assert [p for _, p in found] == pytest.approx([p for _, p in expected], abs=1e-5)


def test_a_token_that_a_constraint_forces_has_no_alternatives() -> None:
    """The constraint's longest text ends before the last two positions, so end tokens are forced at
    these two positions.
    """
    info = DenoiserInfo(160, 39, 512, eos_token_ids=(7,), has_cache=False)
    automaton = compiled("[ab]{6}", made_up_vocabulary(160, (7, 39)), 160)
    with dlm_runtime.from_callback(info, uneven) as bundle:
        out = bundle.generate(
            tokens=[1, 2],
            max_new_tokens=8,
            stop="none",
            constraint=automaton.constraint,
            top_log_probs=3,
        )
    assert [len(each) for each in out.top_log_probs] == [0] * 2 + [3] * 6 + [0] * 2
