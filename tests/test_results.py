"""Tests of how requests end, how results report this, and of the text of streamed events."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from denoisers import ArithmeticDenoiser
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_infill import MASK as LETTERS_MASK
from test_infill import counted, lettered
from test_loop import policies, requests

import dlm_runtime
from dlm_runtime import Bundle, CallbackPass, DenoiserInfo, Policy, RequestError

EOS, MASK = 5, 39


def scripted(
    predict: Callable[[int], tuple[int, float]], on_pass: Callable[[int], None] = lambda _: None
) -> Bundle:
    """Return a bundle whose denoiser predicts a given token and probability for each position.

    ``on_pass`` is called with the number of each pass, counted from 1.
    """
    passes = [0]

    def run(p: CallbackPass) -> None:
        passes[0] += 1
        on_pass(passes[0])
        for i, row in enumerate(p.score_rows):
            token, prob = predict(int(p.position_ids[row]))
            p.top_tokens[i], p.top_probs[i] = (token, 0), (prob, 0)
            if p.logits is not None:
                p.logits[i] = -20
                p.logits[i, token] = 0

    return dlm_runtime.from_callback(
        DenoiserInfo(40, MASK, 512, eos_token_ids=(EOS,), has_cache=True), run
    )


def steady(position: int) -> tuple[int, float]:
    """Predict a token. Its probability decreases from left to right, so positions are decided in
    order.
    """
    return 10 + position % 20, 1 / (2 + position)


# ---- Finish, counts and probabilities ----


@pytest.mark.parametrize("cache", ["none", "dual"])
def test_a_result_says_why_it_ended_and_counts_its_tokens(cache: str) -> None:
    with scripted(lambda at: (EOS, 0.5) if at == 12 else steady(at)) as bundle:
        stopped = bundle.generate(tokens=[1, 2], max_new_tokens=40, block_length=8, cache=cache)
        assert (stopped.finish, stopped.prompt_tokens, stopped.completion_tokens) == ("stop", 2, 10)
        whole = bundle.generate(
            tokens=[1, 2, MASK, 3], max_new_tokens=6, block_length=8, cache=cache
        )
        assert (whole.finish, whole.prompt_tokens, whole.completion_tokens) == ("length", 3, 7)
        nothing = bundle.generate(tokens=[1, EOS], max_new_tokens=0)
        assert (nothing.finish, nothing.prompt_tokens, nothing.completion_tokens, nothing.nfe) == (
            "length",
            2,
            0,
            0,
        )
    assert not any(stopped.undecided + whole.undecided)
    for position, said in enumerate(stopped.log_probs):
        prob = 0.5 if position == 12 else 1 / (2 + position)
        assert said == (
            None if position < 2 or position >= 18 else pytest.approx(math.log(prob), rel=1e-6)
        )


def test_log_probs_of_draws_are_the_denoisers_whatever_the_temperature() -> None:
    logits = np.random.default_rng(2).normal(0, 1, 20).astype(np.float32)

    def run(p: CallbackPass) -> None:
        masked = np.where(np.arange(20) == 3, -np.inf, logits.astype(np.float64))
        probs = np.exp(masked) / np.exp(masked).sum()
        p.top_tokens[:], p.top_probs[:] = np.argsort(-probs)[:2], np.sort(probs)[::-1][:2]
        if p.logits is not None:
            p.logits[:] = logits

    with dlm_runtime.from_callback(DenoiserInfo(20, 3, 64), run) as bundle:
        out = bundle.generate(
            tokens=[], max_new_tokens=30, temperature=2.0, top_k=12, block_length=0, steps=2
        )
    allowed = np.delete(logits.astype(np.float64), 3)
    wanted = logits.astype(np.float64) - np.log(np.exp(allowed).sum())
    assert len(set(out.tokens)) > 5
    np.testing.assert_allclose(np.array(out.log_probs, float), wanted[out.tokens], atol=1e-5)


# ---- Requests that end early ----


@settings(max_examples=100)
@given(policy=policies, request=requests(), shift=st.integers(0, 1), most=st.integers(1, 12))
def test_a_request_of_few_passes_has_what_the_whole_one_had_then(
    policy: Policy, request: dict[str, Any], shift: int, most: int
) -> None:
    denoiser = ArithmeticDenoiser(shift=shift, eos=EOS)
    assume(MASK in request["tokens"] or request["max_new_tokens"])
    events = list(denoiser.bundle.stream(**request, **policy.as_dict()))
    out = denoiser.bundle.generate(**request, **policy.as_dict(), max_steps=most)
    assert out.nfe == min(most, len(events))
    if most >= len(events):
        assert out.finish in ("stop", "length")
        assert events[-1].result is not None
        assert (out.tokens, out.log_probs) == (
            events[-1].result.tokens,
            events[-1].result.log_probs,
        )
        return
    then = events[most - 1]
    assert (out.finish, out.undecided) == ("steps", then.undecided)
    for token, is_open, stood, guess in zip(
        out.tokens, out.undecided, then.canvas, then.guess, strict=True
    ):
        assert token == (stood if not is_open else guess if guess >= 0 else EOS)
    assert all(
        said is None for said, is_open in zip(out.log_probs, out.undecided, strict=True) if is_open
    )


def test_what_is_undecided_stays_masked_without_an_end_token_and_is_no_text() -> None:
    with ArithmeticDenoiser().bundle as bundle:
        out = bundle.generate(tokens=[1], max_new_tokens=20, block_length=10, max_steps=4)
    assert (out.finish, out.tokens[11:]) == ("steps", [MASK] * 10)
    assert MASK not in out.tokens[:11]
    assert out.completion_tokens == 20


@pytest.mark.parametrize("cache", ["none", "prefix", "dual"])
@pytest.mark.parametrize("call", ["generate", "stream"])
def test_a_cancelled_request_ends_before_its_next_pass(call: str, cache: str) -> None:
    """Another thread cancels the request while a pass runs.

    The bundle then runs the next request as usual.
    """
    cancel = threading.Event()

    def on_pass(number: int) -> None:
        if number == 5:
            other = threading.Thread(target=cancel.set)
            other.start()
            other.join()

    fields: dict[str, Any] = {
        "tokens": [1],
        "max_new_tokens": 24,
        "block_length": 8,
        "cache": cache,
    }
    with scripted(steady, on_pass) as bundle:
        if call == "generate":
            out = bundle.generate(**fields, cancel=cancel)
        else:
            *_, last = bundle.stream(**fields, cancel=cancel)
            assert last.result is not None
            out = last.result
        assert (out.finish, out.nfe, sum(out.undecided)) == ("cancelled", 5, 19)
        assert out.tokens[1:9] == [steady(at)[0] for at in range(1, 9)]
        assert out.tokens[9:] == [EOS] * 16
        assert bundle.generate(**fields, cancel=cancel).nfe == 0
        assert bundle.generate(**fields).finish == "length"


def test_lists_of_a_batch_have_an_entry_for_each_request() -> None:
    with scripted(steady) as bundle:
        for changes in ({"policies": [{}]}, {"cancel": [None] * 3}):
            with pytest.raises(RequestError, match=r"entries for 2 requests: give one for each"):
                bundle.generate_batch(tokens=[[1], [2]], max_new_tokens=4, **changes)
        with pytest.raises(RequestError, match="request 1: unknown policy field 'tresholds'"):
            bundle.generate_batch(
                tokens=[[1], [2]], max_new_tokens=4, policies=[{}, {"tresholds": 1}]
            )


# ---- Different policies in a batch ----


drawing = st.builds(
    lambda policy, temperature, top_k: policy.with_fields(
        {"temperature": temperature, "top_k": top_k}
    ),
    policies,
    st.sampled_from([0.0, 0.5, 2.0]),
    st.sampled_from([0, 4]),
)


@settings(max_examples=100)
@given(
    each=st.lists(drawing, min_size=2, max_size=5),
    cache=st.sampled_from(["own", "none", "dual"]),
    new=st.integers(1, 30),
    shift=st.integers(0, 1),
)
def test_requests_of_different_policies_get_in_a_batch_what_they_get_alone(
    each: list[Policy], cache: str, new: int, shift: int
) -> None:
    """The requests of a batch have different policies, for example different commit rules."""
    changes = [
        policy.as_dict() | ({} if cache == "own" else {"cache": cache, "refresh": 0})
        for policy in each
    ]
    denoiser = ArithmeticDenoiser(shift=shift, eos=EOS)
    tokens = [[number, 2] for number in range(len(each))]
    together = denoiser.bundle.generate_batch(tokens=tokens, max_new_tokens=new, policies=changes)
    for given_tokens, own, out in zip(tokens, changes, together, strict=True):
        alone = denoiser.bundle.generate(tokens=given_tokens, max_new_tokens=new, **own)
        assert (out.tokens, out.nfe, out.log_probs, out.finish) == (
            alone.tokens,
            alone.nfe,
            alone.log_probs,
            alone.finish,
        )


@settings(max_examples=60)
@given(
    policy=policies,
    request=requests(),
    shift=st.integers(0, 1),
    max_steps=st.sampled_from([0, 0, 1, 4]),
)
def test_every_way_to_run_a_request_gives_the_same_result(
    policy: Policy, request: dict[str, Any], shift: int, max_steps: int
) -> None:
    """Canvases, finish reasons and statistics must be equal. Times may differ."""
    denoiser = ArithmeticDenoiser(shift=shift, eos=EOS)
    given_tokens = request["tokens"]
    new = request["max_new_tokens"]
    fields: dict[str, Any] = policy.as_dict() | {"max_new_tokens": new, "max_steps": max_steps}
    with denoiser.bundle as bundle:
        alone = bundle.generate(tokens=given_tokens, **fields)
        (batched,) = bundle.generate_batch(tokens=[given_tokens], **fields)
        streamed = list(bundle.stream(tokens=given_tokens, **fields))[-1].result
        with bundle.scheduler() as scheduler:
            submitted = scheduler.submit(tokens=given_tokens, events=True, **fields)
            events = [*submitted]
    assert streamed is not None
    assert events[-1].done
    for other in (batched, streamed, submitted.result(), events[-1].result):
        assert other is not None
        assert replace(other, timings={}) == replace(alone, timings={})
    assert alone.nfe == sum(alone.passes.values())


# ---- Text ----


BROKEN = "\ufffd"


class Bytes:
    """A tokenizer with one token per byte. ``decoded`` is the number of tokens it has decoded."""

    template = None

    def __init__(self) -> None:
        self.decoded = 0

    def decode(self, tokens: Any) -> str:
        self.decoded += len(tokens)
        return bytes(tokens).decode("utf-8", "replace")


@settings(max_examples=150)
@given(data=st.data(), text=st.text(st.sampled_from("ab cé€😀\n"), min_size=1, max_size=40))
def test_deltas_are_the_text_in_whole_characters_up_to_a_stop_string(
    data: st.DataObject, text: str
) -> None:
    """Each token is one byte of a UTF-8 text, and an event may end inside a character.

    The test also checks that tokens are not decoded again in every event.
    """
    stops = data.draw(
        st.lists(st.text(st.sampled_from("ab cé€"), min_size=1, max_size=4), max_size=2)
    )
    said = text.encode()
    fields: dict[str, Any] = {
        "max_new_tokens": len(said),
        "block_length": data.draw(st.integers(0, len(said))),
        "steps_per_block": data.draw(st.integers(1, len(said))),
        "stop_strings": stops,
    }
    with lettered(lambda _, position: (said[position - 1], 1 / (1 + position))) as bundle:
        bundle._tokenizer = tokenizer = Bytes()  # type: ignore[assignment]
        given_tokens = [LETTERS_MASK - 1]
        events = list(bundle.stream(tokens=given_tokens, **fields))
        so_far = ""
        for event in events:
            so_far += event.delta or ""
            assert event.text == so_far
            assert BROKEN not in so_far
            assert text.startswith(so_far)
        ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
        assert so_far == (text[: min(ends)[1]] if ends else text)
        assert tokenizer.decoded <= 3 * len(said) + 12 * len(events)
        result = events[-1].result
        assert result is not None
        out = bundle.generate(tokens=given_tokens, **fields)
        (batched,) = bundle.generate_batch(tokens=[given_tokens], **fields)
        with bundle.scheduler() as scheduler:
            submitted = scheduler.submit(tokens=given_tokens, **fields).result(60)
        for each in (result, out, batched, submitted):
            assert (each.text, each.finish) == (so_far, "stop" if ends else "length")
            assert (each.tokens, each.undecided, each.log_probs, each.passes, each.nfe) == (
                out.tokens,
                out.undecided,
                out.log_probs,
                out.passes,
                out.nfe,
            )


def test_bytes_that_never_become_a_character_are_told_at_the_end() -> None:
    said = bytes([97, 0xE2, 0x82])
    with lettered(lambda _, position: (said[position - 1], 1 / (1 + position))) as bundle:
        bundle._tokenizer = Bytes()  # type: ignore[assignment]
        events = list(bundle.stream(tokens=[1], max_new_tokens=3))
        assert [event.delta for event in events] == ["a", "", BROKEN]
        assert events[-1].text == said.decode("utf-8", "replace")


def test_what_a_tokenizer_raises_ends_the_request_and_is_raised() -> None:
    class Refusing(Bytes):
        def decode(self, tokens: Any) -> str:
            raise RequestError("made to refuse")

    with lettered(counted) as bundle:
        bundle._tokenizer = Refusing()  # type: ignore[assignment]
        for call in ("generate", "stream"):
            with pytest.raises(RequestError, match="made to refuse"):
                list(getattr(bundle, call)(tokens=[1], max_new_tokens=4))
        with bundle.scheduler() as scheduler:
            job = scheduler.submit(tokens=[1], max_new_tokens=4)
            with pytest.raises(RequestError, match="made to refuse"):
                job.result(60)


def test_a_stop_string_ends_text_and_passes() -> None:
    fields: dict[str, Any] = {"max_new_tokens": 40, "block_length": 4, "stop_strings": ["zz", "gh"]}
    with lettered(counted) as bundle:
        events = list(bundle.stream(tokens=[1], **fields))
        assert [event.delta for event in events] == [
            "b",
            "c",
            "d",
            "e",
            "f",
            "",
            "",
        ]  # "g" is not reported yet, because a stop string may start with it
        out = bundle.generate(tokens=[1], **fields)
        assert events[-1].result is not None
        assert (
            (out.text, out.tokens)
            == (events[-1].result.text, events[-1].result.tokens)
            == ("bcdef", out.tokens)
        )
        assert (out.finish, out.nfe, out.completion_tokens, sum(out.undecided)) == (
            "stop",
            7,
            7,
            33,
        )
        (batched,) = bundle.generate_batch(tokens=[[1]], **fields)
        assert (batched.text, batched.finish, batched.nfe) == ("bcdef", "stop", 7)
        assert (
            bundle.generate(tokens=[1], **fields | {"stop_strings": ["never"]}).finish == "length"
        )
