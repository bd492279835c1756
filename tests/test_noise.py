"""Tests of blocks that start from random tokens instead of mask tokens (DiffusionGemma's loop).

The tests cover the rules of transformers' code, self-conditioning, and the equality of the native
loop and the reference loop.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from denoisers import ArithmeticDenoiser, under_native_loop
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from networks import make_network
from test_visibility import random_denoiser, seeing

from dlm_export.network import reference
from dlm_export.network.commit_rules import choose
from dlm_export.network.denoiser import Denoiser
from dlm_export.network.loop_random import random_tokens, temperature_of
from dlm_export.network.loop_turns import Canvas, start_canvas
from dlm_export.planning.predicted_passes import Loop, list_passes
from dlm_runtime import (
    Bundle,
    CallbackPass,
    DenoiserInfo,
    DlmError,
    Event,
    Policy,
    from_callback,
)
from dlm_runtime.presets import PRESETS, presets_for

generation = pytest.importorskip(
    "transformers.models.diffusion_gemma.generation_diffusion_gemma",
    reason="needs a transformers with DiffusionGemma",
)

GEMMA = PRESETS["diffusion-gemma"]
KINDS = ("full", "block", "draft")


def policy_for(kind: str, **changes: Any) -> Policy:
    cache, length = ("none", 6) if kind == "full" else ("block", 0)
    return replace(GEMMA, cache=cache, block_length=length, steps_per_block=5, **changes)


# ---- The rules of transformers' code ----


@pytest.mark.parametrize(("first", "last"), [(0.8, 0.4), (1.7, 0.3), (0.9, 0.0)])
@pytest.mark.parametrize("steps", [1, 7, 48])
def test_the_temperature_falls_as_in_transformers(first: float, last: float, steps: int) -> None:
    scale = generation.LinearTemperatureScheduleLogitsProcessor(last, first, steps)
    policy = replace(GEMMA, temperature=first, temperature_drop=first - last)
    for step in range(steps):
        remaining = torch.tensor(steps - step, dtype=torch.int32)
        one = torch.ones(1)
        wanted = float(scale(None, one, remaining))
        found = float(one / torch.tensor(temperature_of(policy, step, steps)))
        assert found == pytest.approx(wanted, rel=2e-7)


@settings(max_examples=60)
@given(seed=st.integers(0, 10**6), bound=st.sampled_from([1e-9, 0.1, 1.0, 5.0]))
def test_positions_are_accepted_as_in_transformers(seed: int, bound: float) -> None:
    torch.manual_seed(seed)
    logits = torch.randn(1, 24, 11, dtype=torch.float64) * torch.rand(1, 24, 1) * 12
    sampler = generation.EntropyBoundSampler(
        generation.EntropyBoundSamplerConfig(bound), 24, 11, max_denoising_steps=9
    )
    sampler.accept_canvas(torch.zeros(1, 24), torch.ones(1, 24), logits, 3)
    scores = (logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)[0].numpy()
    found = choose(scores, replace(GEMMA, entropy_bound=bound), 0)
    assert found.tolist() == sampler.accepted_token_mask[0].tolist()


class Scripted:
    """A fake denoiser with given logits for each pass. Row i of a pass predicts position i."""

    def __init__(self, logits: np.ndarray) -> None:
        """``logits`` are ``[passes, L, V]``, without a mask token."""
        self.logits, self.made, self.seen = logits, 0, list[np.ndarray]()
        vocab = logits.shape[-1]
        self.info = DenoiserInfo(vocab, vocab, 64, has_cache=True, visible_block=1, draft_block=6)
        self.bundle = from_callback(self.info, self._run)

    def _run(self, p: CallbackPass) -> None:
        rows = self.logits[self.made][p.score_rows]
        self.seen.append(p.input_ids.copy())
        self.made += 1
        wide = rows.astype(np.float64)
        probs = np.exp(wide - wide.max(-1, keepdims=True))
        probs /= probs.sum(-1, keepdims=True)
        order = np.argsort(-rows, axis=-1, kind="stable")[:, :2]
        p.top_tokens[:], p.top_probs[:] = order, np.take_along_axis(probs, order, -1)
        if p.logits is not None:
            p.logits[:] = rows


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    stable=st.integers(0, 3),
    confident=st.sampled_from([0.02, 0.3, 2.0]),
    spread=st.sampled_from([3.0, 40.0]),
)
def test_a_block_ends_when_it_does_in_transformers(
    seed: int, stable: int, confident: float, spread: float
) -> None:
    random, steps = np.random.default_rng(seed), 12
    base = random.normal(0, spread, (1, 6, 9))
    logits = (base + random.normal(0, 0.1 * spread, (steps, 6, 9))).astype(np.float32)
    policy = replace(GEMMA, steps_per_block=steps, stable_passes=stable, stable_entropy=confident)
    criterion = generation.StableAndConfidentStoppingCriteria(stable, confident)
    wanted = steps
    for step in range(steps):
        scaled = torch.from_numpy(logits[step])[None] / temperature_of(policy, step, steps)
        if criterion(scaled.argmax(-1), scaled):
            wanted = step + 1
            break
    scripted = Scripted(logits)
    with scripted.bundle as bundle:
        out = bundle.generate(tokens=[], max_new_tokens=6, **policy.as_dict())
    assert (out.nfe, out.passes["denoise"]) == (wanted, wanted)
    assert out.tokens == logits[wanted - 1].argmax(-1).tolist()


# ---- The two loops ----


@pytest.fixture(scope="module")
def denoisers() -> dict[str, Denoiser]:
    network = make_network(
        vocab_size=30, layers=2, heads=4, kv_heads=2, head_size=8, eos_token_ids=(7,)
    )
    return {
        "full": random_denoiser(network),
        "block": random_denoiser(seeing(network, [("block", 6)] * 2)),
        "draft": random_denoiser(seeing(network, [("draft", 6)] * 2)),
    }


@pytest.fixture(scope="module")
def bundles(denoisers: dict[str, Denoiser]) -> dict[str, Bundle]:
    return {kind: under_native_loop(denoiser) for kind, denoiser in denoisers.items()}


fields = st.fixed_dictionaries(
    {
        "commit": st.sampled_from(("entropy_bound", "threshold", "factor")),
        "entropy_bound": st.sampled_from([0.0, 0.5, 4.0, 30.0]),
        "threshold": st.sampled_from([0.05, 0.2, 0.6]),
        "score_of": st.sampled_from(("prediction", "draw")),
        "temperature": st.sampled_from([0.0, 0.1, 0.8]),
        "temperature_drop": st.sampled_from([0.0, 0.05]),
        "steps_per_block": st.integers(0, 8),
        "stable_entropy": st.sampled_from([0.0, 1.0, 4.0]),
        "stable_passes": st.integers(0, 2),
        "seed": st.integers(0, 2**64 - 1),
        "stop": st.sampled_from(("eos", "early-eos", "none")),
        "top_k": st.sampled_from([0, 5]),
    }
)


def suited(kind: str, changes: dict[str, Any]) -> Policy:
    if changes["commit"] != "entropy_bound":
        changes = changes | {"stable_entropy": 0.0, "score": "confidence"}
    if not changes["temperature"]:
        changes = changes | {
            "temperature_drop": 0.0,
            "select": "argmax",
            "score_of": "prediction",
            "top_k": 0,
        }
    return replace(policy_for(kind), **changes)


def differs_after_a_tie(events: list[Event], seen: list[Canvas]) -> bool:
    """Return True if the first pass with another canvas scored two positions almost equally.

    The two loops round scores differently, and two neighbours with the same random token have
    almost the same predictions.
    """
    for event, canvas in zip(events, seen, strict=False):
        if event.canvas != canvas.tokens.tolist():
            scores = np.array(event.score)[np.array(event.guess) >= 0]
            return bool((np.diff(np.sort(scores)) < 1e-5).any())
    return False


@settings(max_examples=60)
@given(
    kind=st.sampled_from(KINDS),
    changes=fields,
    tokens=st.lists(st.one_of(st.integers(8, 28), st.just(29)), max_size=14),
    new=st.integers(1, 16),
)
def test_the_native_loop_equals_the_reference(
    denoisers: dict[str, Denoiser],
    bundles: dict[str, Bundle],
    kind: str,
    changes: dict[str, Any],
    tokens: list[int],
    new: int,
) -> None:
    """Both loops must also fill mask tokens in the prompt, and must not change given tokens."""
    policy, seen = suited(kind, changes), list[Canvas]()
    wanted = reference.generate(denoisers[kind], tokens, policy, new, on_step=seen.append)
    events = list(bundles[kind].stream(tokens=tokens, max_new_tokens=new, **policy.as_dict()))
    assert events[-1].result is not None
    assume(not differs_after_a_tie(events, seen))
    assert (events[-1].result.tokens, events[-1].nfe) == (wanted.tokens, wanted.nfe)
    for event, canvas in zip(events[:-1], seen, strict=False):
        assert (event.canvas, event.undecided) == (
            canvas.tokens.tolist(),
            canvas.undecided.tolist(),
        )
    assert 29 not in wanted.tokens
    assert all(
        ours == theirs for ours, theirs in zip(wanted.tokens, tokens, strict=False) if theirs != 29
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_that_ends_early_keeps_its_most_likely_tokens(
    denoisers: dict[str, Denoiser], bundles: dict[str, Bundle], kind: str
) -> None:
    policy = policy_for(kind, stable_entropy=0.0)
    for steps in range(1, 9):
        canvas = start_canvas([9, 10, 11], 12, 29)
        wanted = reference.fill(denoisers[kind], canvas, policy, max_steps=steps)
        out = bundles[kind].generate(
            tokens=[9, 10, 11], max_new_tokens=12, max_steps=steps, **policy.as_dict()
        )
        assert (out.tokens, out.nfe, out.finish) == (wanted.tokens, steps, "steps")


@pytest.mark.parametrize("kind", KINDS)
def test_the_text_depends_on_the_seed_and_not_on_other_requests(
    bundles: dict[str, Bundle], kind: str
) -> None:
    policy = policy_for(kind, temperature=1.5, stop="none").as_dict()
    prompts = [[9, 10, 11], [12, 13, 14], [9, 10, 11], [15, 16, 17, 18]]
    alone = [
        bundles[kind].generate(tokens=tokens, max_new_tokens=12, **policy) for tokens in prompts
    ]
    together = bundles[kind].generate_batch(tokens=prompts, max_new_tokens=12, **policy)
    assert [out.tokens for out in together] == [out.tokens for out in alone]
    other = bundles[kind].generate(tokens=prompts[0], max_new_tokens=12, **policy | {"seed": 1})
    assert other.tokens != alone[0].tokens


@settings(max_examples=30)
@given(
    seed=st.integers(0, 2**64 - 1),
    vocab=st.integers(3, 40),
    has_mask=st.booleans(),
    data=st.data(),
)
def test_noise_is_uniform_without_the_mask_token(
    seed: int, vocab: int, has_mask: bool, data: st.DataObject
) -> None:
    mask = data.draw(st.integers(0, vocab - 1)) if has_mask else vocab
    counts = np.bincount(random_tokens(seed, 3, np.arange(20_000), vocab, mask), minlength=vocab)
    assert len(counts) == vocab
    kept = np.delete(counts, mask) if has_mask else counts
    assert counts.sum() == kept.sum()
    expected = 20_000 / len(kept)
    # Chi-squared test with len(kept) - 1 degrees of freedom. Uniform random tokens exceed this
    # limit about once in 10^6 tests.
    assert ((kept - expected) ** 2 / expected).sum() < len(kept) + 5 * (2 * len(kept)) ** 0.5 + 30


@pytest.mark.parametrize("kind", KINDS)
def test_the_passes_are_planned_as_they_are_made(bundles: dict[str, Bundle], kind: str) -> None:
    policy = replace(policy_for(kind, stable_entropy=0.0, stop="none"), steps_per_block=3)
    block = {"full": None, "block": 6, "draft": 1}[kind]
    loop = Loop(policy, block, 0, draft_block=6 if kind == "draft" else None)
    sizes = [(made.size.tokens, made.size.cached) for made in list_passes(9, 12, 1.0, loop)]
    out = bundles[kind].generate(tokens=[9] * 9, max_new_tokens=12, **policy.as_dict())
    assert len(sizes) == out.nfe
    if kind == "draft":
        assert sizes == [(9, 0), *[(6, 9)] * 3, (6, 9), *[(6, 15)] * 3]


# ---- Denoisers without a mask token, and self-conditioning ----


def test_self_conditioning_goes_from_a_pass_to_the_next_one_over_the_block() -> None:
    """A prompt of 3 tokens is followed by two blocks of 6 positions. A block takes 5 passes."""
    width, seen, before = 4, list[tuple[bool, int]](), np.zeros((6, 4), np.float32)
    policy = policy_for("draft", stable_entropy=0.0, stop="none")

    def run(p: CallbackPass) -> None:
        nonlocal before
        assert p.conditioning is not None
        assert p.temperature is not None
        is_draft = p.position_ids[0] >= 64
        assert (p.input_ids < 10).all()
        step = sum(done for done, _ in seen) % 5
        seen.append((bool(is_draft), len(p.input_ids)))
        p.top_tokens[:], p.top_probs[:] = [1, 2], [0.5, 0.25]
        if not is_draft:
            assert not p.conditioning.any()
            assert p.next_conditioning is None
            return
        assert p.logits is not None
        p.logits[:] = np.random.default_rng(len(seen)).normal(0, 2, p.logits.shape)
        assert p.next_conditioning is not None
        assert p.score_rows.tolist() == list(range(6))
        assert p.temperature == pytest.approx(temperature_of(policy, step, 5))
        assert np.array_equal(p.conditioning, before if step else np.zeros_like(before))
        before = np.random.default_rng(len(seen)).normal(size=(6, width)).astype(np.float32)
        p.next_conditioning[:] = before

    info = DenoiserInfo(
        10, 10, 64, has_cache=True, visible_block=1, draft_block=6, conditioning_size=width
    )
    with from_callback(info, run) as bundle:
        bundle.generate(tokens=[1, 2, 3], max_new_tokens=12, **policy.as_dict())
        assert seen == [(False, 3), *[(True, 6)] * 5, (False, 6), *[(True, 6)] * 5]
        with pytest.raises(DlmError, match="position 1 is to be filled, but this denoiser has no"):
            bundle.generate(tokens=[1, 10, 3], max_new_tokens=6, **policy.as_dict())
        with pytest.raises(DlmError, match="has no mask token and starts from random tokens"):
            bundle.generate(tokens=[1], max_new_tokens=6, **PRESETS["self-speculation"].as_dict())


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"draft_block": None, "visible_block": None}, "which needs draft_block above 0"),
        (
            {"mask_token_id": 9, "conditioning_size": 4},
            "needs shift 0 and mask_token_id = vocab_size",
        ),
        ({"mask_token_id": 11}, "mask_token_id = 11 is outside 0..10"),
        ({"conditioning_size": 1 << 17}, "conditioning_size = 131072 is outside 0..65536"),
    ],
    ids=str,
)
def test_denoisers_without_a_mask_token_have_draft_passes(
    changes: dict[str, Any], sentence: str
) -> None:
    known = {"has_cache": True, "visible_block": 1, "draft_block": 6, "mask_token_id": 10}
    info = DenoiserInfo(vocab_size=10, max_canvas_length=64, **known | changes)
    with pytest.raises(DlmError, match=sentence):
        from_callback(info, lambda _: None)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a count": ({"commit": "static"}, 'commit = "static" is not one: use commit = "entropy_bound"'),
    "a dual cache": ({"cache": "dual"}, 'this cache: use cache = "block" or "none"'),
    "an open store": ({"store": "open"}, 'this store: use store = "pass"'),
    "a reserved end": ({"reserve": "end"}, 'a reserved end: use reserve = "none"'),
    "guidance": ({"cfg_scale": 1.0}, "guidance: use cfg_scale = 0"),
    "sub-blocks": ({"sub_block_length": 2}, "sub-blocks: use sub_block_length = 0"),
    "a large drop": ({"temperature_drop": 0.9}, "temperatures cannot fall below 0"),
    "confidences": (
        {"commit": "threshold", "score": "confidence"},
        'stable_entropy = 0.005 needs score = "entropy", not "confidence"',
    ),
    "a drop with masks": (
        {"remask": "none"},
        'temperature_drop = 0.4 needs remask = "noise", not "none"',
    ),
    "stability with masks": (
        {"remask": "none", "temperature_drop": 0.0},
        'stable_entropy = 0.005 needs remask = "noise"',
    ),
}


@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_fields_that_do_not_go_together_are_refused(case: str) -> None:
    changes, sentence = REFUSED[case]
    bundle = ArithmeticDenoiser(visible_block=6).bundle
    with pytest.raises(DlmError) as caught:
        bundle.generate(tokens=[1, 2, 3], max_new_tokens=8, **replace(GEMMA, **changes).as_dict())
    assert sentence in str(caught.value)


def test_shifted_block_causal_denoisers_refuse_noise() -> None:
    bundle = ArithmeticDenoiser(visible_block=6, shift=1).bundle
    with pytest.raises(DlmError, match='remask = "noise" needs each row to predict its own'):
        bundle.generate(tokens=[1, 2, 3], max_new_tokens=8, **GEMMA.as_dict())


def test_only_denoisers_without_a_mask_token_get_the_preset() -> None:
    assert list(presets_for(1, 0, 256, "uniform")) == ["diffusion-gemma"]
    assert presets_for(1, 0, 256, "uniform")["diffusion-gemma"].block_length == 256
    for shape in ((None, 0), (None, 1), (32, 0), (1, 0, 8)):
        assert "diffusion-gemma" not in presets_for(*shape)


def test_taking_the_most_likely_token_drops_the_temperatures() -> None:
    greedy = GEMMA.greedy()
    assert (greedy.select, greedy.temperature, greedy.temperature_drop) == ("argmax", 0, 0)
    assert GEMMA.with_fields({"select": "argmax"}).temperature_drop == 0
    assert GEMMA.with_fields({"temperature": 0.2}).temperature_drop == pytest.approx(0.1)
    assert GEMMA.with_fields({"temperature": 0.9, "temperature_drop": 0.1}).temperature_drop == 0.1
