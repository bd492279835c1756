"""Tests of sampling.

Sampled tokens must follow the distribution that the denoiser predicts. A seed must give the same
text on every engine and with any number of threads.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from denoisers import load, under_native_loop
from hypothesis import given, settings
from hypothesis import strategies as st

import dlm_runtime
from dlm_export.network.loop_turns import Canvas, Turn
from dlm_export.network.pass_plan import Span
from dlm_export.network.proposers import make_proposer
from dlm_runtime import Bundle, CallbackPass, DenoiserInfo, EngineError, Policy

MASK, VOCAB = 3, 20
LOGITS = np.random.default_rng(0).normal(0, 1.5, VOCAB).astype(np.float32)
LOGITS[MASK] = 50  # the mask token must never be sampled, even if its raw logit is high


def fixed(logits: np.ndarray, length: int = 512, top_token: int | None = None) -> Bundle:
    """Return a bundle whose denoiser predicts the same logits ``[V]`` for every row."""
    masked = np.where(
        np.arange(len(logits)) == MASK, -np.inf, np.where(np.isfinite(logits), logits, 0)
    ).astype(np.float64)
    probs = np.exp(masked - masked.max())
    probs /= probs.sum()
    best = np.argsort(-masked, kind="stable")[:2]

    def run(p: CallbackPass) -> None:
        p.top_tokens[:], p.top_probs[:] = best if top_token is None else top_token, probs[best]
        if p.entropy is not None:
            p.entropy[:] = (probs * np.log(probs + 1e-10)).sum()
        if p.logits is not None:
            p.logits[:] = logits

    return dlm_runtime.from_callback(DenoiserInfo(len(logits), MASK, length), run)


def cut(temperature: float, top_p: float, top_k: int) -> np.ndarray:
    """Return the distribution ``[V]`` after ``top_p`` and ``top_k``.

    The function adds tokens one by one, the most likely token first.
    """
    weights = np.exp(LOGITS.astype(np.float64) / temperature)
    weights[MASK] = 0
    probs, kept = weights / weights.sum(), np.zeros(VOCAB)
    for token in sorted(range(VOCAB), key=lambda token: -probs[token])[: top_k or VOCAB]:
        if kept.sum() <= top_p:
            kept[token] = probs[token]
    return kept / kept.sum()


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"),
    [
        (1.0, 1.0, 0),
        (1.0, 0.8, 0),
        (1.0, 1.0, 5),
        (2.0, 0.9, 12),
        (0.2, 0.95, 0),
    ],
)
def test_single_positions_are_drawn_from_the_softmax(
    temperature: float, top_p: float, top_k: int
) -> None:
    """A chi-squared test compares the counts of sampled tokens with the softmax.

    It uses 16 seeds with 512 positions each. A correct sampler exceeds the limit once in 10^5 tests
    (approximation of Wilson and Hilferty).
    """
    counts = np.zeros(VOCAB)
    with fixed(LOGITS) as bundle:
        for seed in range(16):
            fields = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed}
            out = bundle.generate(tokens=[], new_tokens=512, block_length=0, steps=1, **fields)
            counts += np.bincount(out.tokens, minlength=VOCAB)
    wanted = cut(temperature, top_p, top_k) * counts.sum()
    assert counts.sum() == 16 * 512
    assert (counts[wanted == 0] == 0).all()
    is_common = wanted >= 5  # the counts of rarer tokens are not approximately normal
    rare, seen = wanted[~is_common].sum(), counts[~is_common].sum()
    statistic = ((counts - wanted) ** 2 / np.maximum(wanted, 1e-9))[is_common].sum() + (
        (seen - rare) ** 2 / rare if rare else 0
    )
    freedom = max(1, int(is_common.sum()) + bool(rare) - 1)
    limit = freedom * (1 - 2 / (9 * freedom) + 4.265 * np.sqrt(2 / (9 * freedom))) ** 3
    assert statistic < limit
    assert is_common.sum() > 1


def test_steps_positions_and_seeds_have_draws_of_their_own() -> None:
    """Sampled tokens of different positions, passes or seeds must be independent.

    All tokens have the same probability, so two sampled tokens may only be equal by chance.
    """
    with fixed(np.zeros(VOCAB, np.float32)) as bundle:
        fields: dict[str, Any] = {
            "temperature": 1.0,
            "block_length": 0,
            "new_tokens": 400,
            "tokens": [],
        }
        at_once = [bundle.generate(**fields, steps=1, seed=seed).tokens for seed in (0, 1, 2**63)]
        one_by_one = bundle.generate(**fields, commit="sequential").tokens
    runs = np.array([*at_once, one_by_one, np.roll(at_once[0], 1)])
    equal = (runs[:, None] == runs[None]).mean(-1)[np.triu_indices(len(runs), 1)]
    assert (equal < 0.12).all()  # chance gives 1/19, and a deviation of 0.06 is rare


@settings(max_examples=150)
@given(
    rows=st.integers(1, 6),
    vocab=st.one_of(st.integers(5, 300), st.sampled_from([1025, 20011])),
    spread=st.sampled_from([0.0, 0.5, 3.0, 40.0]),
    temperature=st.sampled_from([1e-6, 0.2, 1.0, 7.0, 1000.0]),
    top_p=st.sampled_from([0.0, 0.31, 0.95, 1.0]),
    top_k=st.sampled_from([0, 1, 3, 1000]),
    score=st.sampled_from(["confidence", "margin", "entropy", "random"]),
    score_of=st.sampled_from(["prediction", "draw"]),
    seed=st.integers(0, 2**64 - 1),
)
def test_native_draws_and_their_scores_are_the_references(
    rows: int, vocab: int, spread: float, score: str, score_of: str, seed: int, **fields: Any
) -> None:
    logits = np.random.default_rng(rows * vocab).normal(0, spread, (rows, vocab)).astype(np.float32)
    logits[:, 4] = logits[:, 1]  # the logits of tokens 1 and 4 are equal

    def run(p: CallbackPass) -> None:
        own = torch.from_numpy(logits[p.score_rows])
        if p.logits is not None:
            p.logits[:] = own.numpy()
        own[:, MASK] = -torch.inf
        probs = own.softmax(-1)
        best = torch.sort(own, dim=-1, descending=True, stable=True).indices[:, :2]
        p.top_tokens[:], p.top_probs[:] = best.int().numpy(), probs.gather(1, best).numpy()
        if p.entropy is not None:
            p.entropy[:] = (probs * (probs + 1e-10).log()).sum(-1).numpy()

    changes = {"score": score, "score_of": score_of, "seed": seed, "block_length": 0} | fields
    policy = Policy().with_fields(changes)
    turn = Turn(0, rows, 0, 0, Span(0, rows, "drop"), np.arange(rows), 1)
    canvas = Canvas(np.full(rows, MASK), np.ones(rows, bool))
    wanted = make_proposer(MASK, policy).propose(turn, canvas, torch.from_numpy(logits))
    with dlm_runtime.from_callback(DenoiserInfo(vocab, MASK, 64), run) as bundle:
        event = next(
            iter(bundle.stream(tokens=[], max_new_tokens=rows, steps=rows, **policy.as_dict()))
        )
    drawn = [
        token if guess < 0 else guess
        for token, guess in zip(event.canvas, event.guess, strict=True)
    ]
    assert drawn == wanted.tokens.tolist()
    assert event.guess.count(-1) == 1
    guessed = [i for i, guess in enumerate(event.guess) if guess >= 0]
    reported = wanted.scores if score == "entropy" else np.tanh(wanted.scores)
    np.testing.assert_allclose(
        np.array(event.score)[guessed], reported[guessed], rtol=1e-5, atol=2e-6
    )


def test_a_draw_of_one_token_is_the_best_one() -> None:
    with fixed(LOGITS) as bundle:
        best = bundle.generate(tokens=[], max_new_tokens=64).tokens
        for fields in (
            {"top_k": 1, "temperature": 3.0},
            {"top_p": 0.0, "temperature": 3.0},
            {"temperature": 1e-9},
        ):
            assert bundle.generate(tokens=[], max_new_tokens=64, **fields).tokens == best


@pytest.mark.parametrize("temperature", [1e-320, 1e37, 1e300])
@pytest.mark.parametrize("fields", [{"top_p": 0.999999}, {"top_k": 1000}])
def test_draws_of_extreme_logits(temperature: float, fields: dict[str, Any]) -> None:
    """Two tokens have the highest logit. One token has the logit -inf.

    The difference between the highest logit and each other logit overflows a float.
    """
    logits = np.full(VOCAB, -3.4e38, np.float32)
    logits[[1, 2]], logits[5] = 3.4e38, -np.inf
    with fixed(logits) as bundle:
        out = bundle.generate(
            tokens=[],
            new_tokens=512,
            block_length=0,
            steps=1,
            temperature=temperature,
            **fields,
        )
    counts = np.bincount(out.tokens, minlength=VOCAB)
    assert counts[[MASK, 5]].tolist() == [0, 0]
    with np.errstate(over="ignore"):
        weights = np.exp((logits.astype(np.float64) - np.float64(logits[1])) / temperature)
    weights[MASK] = 0
    wanted = 512 * weights / weights.sum()
    assert (np.abs(counts - wanted) <= 5 * np.sqrt(wanted)).all()


def test_guidance_leaves_ruled_out_tokens_ruled_out() -> None:
    logits = LOGITS.copy()
    best = int(np.argsort(-logits)[1])  # the most likely token is the mask token
    logits[best] = -np.inf
    with fixed(logits) as bundle:
        for fields in ({}, {"temperature": 0.5}, {"score": "entropy"}):
            out = bundle.generate(tokens=[5], max_new_tokens=64, cfg_scale=1.5, **fields)
            assert best not in out.tokens


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_the_engines_fault(value: float) -> None:
    logits = LOGITS.copy()
    logits[7] = value
    with fixed(logits, top_token=2) as bundle, pytest.raises(EngineError, match="not finite"):
        bundle.generate(tokens=[], max_new_tokens=4, temperature=0.5)


def test_a_seed_gives_one_text_whatever_runs_it(dream_bundle: Path, dream_checkpoint: Path) -> None:
    """The test runs the same requests in ONNX Runtime with one and with two threads, and in torch.

    Each request runs alone and in a batch of eight requests.
    """
    prompts = np.random.default_rng(1).integers(5, 60, (8, 7)).tolist()
    fields: dict[str, Any] = {
        "temperature": 0.9,
        "top_p": 0.9,
        "block_length": 8,
        "max_new_tokens": 24,
        "seed": 11,
    }

    def texts(bundle: Bundle, **changes: Any) -> tuple[list[list[int]], list[list[int]]]:
        with bundle:
            alone = [
                bundle.generate(tokens=tokens, **fields | changes).tokens for tokens in prompts
            ]
            together = [
                out.tokens for out in bundle.generate_batch(tokens=prompts, **fields | changes)
            ]
        return alone, together

    opened: list[Callable[[], Bundle]] = [
        lambda: dlm_runtime.open(dream_bundle, threads=1),
        lambda: dlm_runtime.open(dream_bundle, threads=2),
        lambda: under_native_loop(load(dream_checkpoint)),
    ]
    policy = {
        "commit": "threshold",
        "threshold": 0.2,
        "cache": "dual",
        "score": "confidence",
        "score_of": "prediction",
    }
    found = [texts(bundle(), **policy) for bundle in opened]
    assert all(one == found[0] for one in found)
    assert found[0][0] == found[0][1]
    assert len({tuple(tokens) for tokens in found[0][0]}) == 8
    other, _ = texts(opened[0](), **policy | {"seed": 12})
    assert all(theirs != ours for theirs, ours in zip(other, found[0][0], strict=True))


def test_a_preset_draws_as_published_and_can_be_told_not_to(dream_bundle: Path) -> None:
    with dlm_runtime.open(dream_bundle, threads=1) as bundle:
        policy = bundle.policy("dream")
        assert (policy.select, policy.temperature, policy.top_p, policy.score_of) == (
            "sample",
            0.2,
            0.95,
            "draw",
        )
        assert bundle.policy("dream", temperature=0).select == "argmax"
        assert bundle.policy("dream", select="argmax").temperature == 0
        assert bundle.policy("llada", temperature=0.5).select == "sample"
        greedy = [
            bundle.generate(tokens=[5], max_new_tokens=16, preset="dream", temperature=0, seed=seed)
            for seed in (0, 1)
        ]
        assert greedy[0].tokens == greedy[1].tokens
