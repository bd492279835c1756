"""Tests of the native loop and its commit rules, with fake denoisers that compute predictions by
simple arithmetic.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from denoisers import ArithmeticDenoiser
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import dlm_runtime
from dlm_export.network.commit_rules import choose, score_of, timestep_count
from dlm_export.network.loop_random import philox
from dlm_export.network.pass_plan import transfer_counts
from dlm_runtime import (
    CallbackPass,
    DenoiserInfo,
    EngineError,
    Policy,
    RequestError,
)

COMMITS = (
    *("static", "threshold", "dynamic", "factor", "entropy_bound", "timestep", "sequential"),
    "longest_prefix",
)
CACHES = ("none", "prefix", "dual")

policies = st.builds(
    Policy,
    score=st.sampled_from(("confidence", "margin", "random")),
    commit=st.sampled_from(COMMITS),
    compare=st.sampled_from((">", ">=")),
    cache=st.sampled_from(CACHES),
    stop=st.sampled_from(("eos", "early-eos", "none")),
    block_length=st.integers(0, 40),
    steps_per_block=st.integers(0, 40),
    refresh=st.integers(0, 50),
    threshold=st.floats(0, 1),
    factor=st.floats(0, 4),
    entropy_bound=st.floats(0, 4),
    seed=st.integers(0, 2**64 - 1),
    schedule=st.sampled_from(("masked", "block", "floor")),
    finish_threshold=st.sampled_from((1.0, 0.5, 0.1)),
).map(lambda policy: replace(policy, refresh=0) if policy.cache == "none" else policy)


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    """Return a strategy for requests. The given tokens may include mask tokens."""
    tokens = draw(st.lists(st.one_of(st.integers(0, 38), st.just(39)), max_size=20))
    new = draw(st.integers(0, 50))
    assume(tokens or new)
    return {"tokens": tokens, "max_new_tokens": new}


@settings(max_examples=80)
@given(policy=policies, request=requests(), shift=st.integers(0, 1))
def test_every_run_fills_the_canvas_keeps_what_was_given_and_counts_its_passes(
    policy: Policy, request: dict[str, Any], shift: int
) -> None:
    denoiser = ArithmeticDenoiser(shift=shift, eos=5)
    out = denoiser.bundle.generate(**request, **policy.as_dict())
    mask = denoiser.info.mask_token_id
    given_tokens = request["tokens"]
    assert len(out.tokens) == len(given_tokens) + request["max_new_tokens"]
    assert mask not in out.tokens
    assert all(
        ours == theirs
        for ours, theirs in zip(out.tokens, given_tokens, strict=False)
        if theirs != mask
    )
    assert out.nfe == denoiser.passes
    assert out.nfe <= given_tokens.count(mask) + request["max_new_tokens"]


@settings(max_examples=60)
@given(policy=policies, request=requests(), shift=st.integers(0, 1))
def test_streaming_commits_only_masked_positions_and_ends_as_generate_does(
    policy: Policy, request: dict[str, Any], shift: int
) -> None:
    denoiser = ArithmeticDenoiser(shift=shift, eos=5)
    mask = denoiser.info.mask_token_id
    before = request["tokens"] + [mask] * request["max_new_tokens"]
    assume(mask in before)
    for event in denoiser.bundle.stream(**request, **policy.as_dict()):
        changed = [
            i for i, (old, new) in enumerate(zip(before, event.canvas, strict=True)) if old != new
        ]
        assert all(before[i] == mask for i in changed)
        start, end = event.block
        if not event.done:  # the last step may also write end tokens after the block
            assert all(start <= i < end for i in changed)
            assert len(changed) == event.committed >= 1
            guessed = [i for i, token in enumerate(event.guess) if token >= 0]
            assert guessed == [i for i in range(start, end) if event.canvas[i] == mask]
        before = event.canvas
    assert event.done
    assert event.result is not None
    assert before == denoiser.bundle.generate(**request, **policy.as_dict()).tokens


AHEAD = {
    "commit": "entropy_threshold",
    "score": "entropy",
    "next_block": 0.5,
    "cache": "prefix",
}


@settings(max_examples=100)
@given(
    policy=policies.filter(lambda policy: policy.score != "random"),
    changes=st.sampled_from([{}, {}, {}, {"reserve": "end"}, AHEAD]),
    given_tokens=st.lists(st.integers(0, 38), min_size=1, max_size=20),
    most=st.integers(1, 120),
    trained=st.integers(1, 40),
    shift=st.integers(0, 1),
)
def test_a_canvas_grows_by_blocks_until_an_end_token_or_the_limit(
    policy: Policy,
    changes: dict[str, Any],
    given_tokens: list[int],
    most: int,
    trained: int,
    shift: int,
) -> None:
    """Each block must equal the block of a request that is given all tokens before it."""
    fields = policy.as_dict() | changes
    if changes is AHEAD:
        shift, fields["refresh"] = 0, 0
    bundle = ArithmeticDenoiser(shift=shift, eos=5, vocab_size=140, trained=trained).bundle
    grown = bundle.generate(tokens=given_tokens, max_new_tokens=most, **fields)
    tokens, left, nfe, new = given_tokens, most, 0, min(trained, most)
    is_reserved = False
    while True:
        out = bundle.generate(tokens=tokens, new_tokens=new, **fields)
        left, nfe = left - new + is_reserved, nfe + out.nfe
        if left == 0 or out.finish == "stop":
            break
        is_reserved = fields["reserve"] == "end" and new > 1
        tokens = out.tokens[:-1] if is_reserved else out.tokens
        new = min(policy.block_length or trained, left) + is_reserved
    assert (grown.tokens, grown.nfe, grown.finish) == (out.tokens, nfe, out.finish)
    assert grown.prompt_tokens == len(given_tokens)
    assert len(grown.log_probs) == len(grown.undecided) == len(grown.tokens)


def first_commit(scores: list[float], policy: Policy, steps: int) -> list[int]:
    """Return the positions that the native loop commits in its first pass.

    ``scores`` are the confidences of the positions.
    """

    def run(p: CallbackPass) -> None:
        p.top_tokens[:] = [0, 1]
        p.top_probs[:, 0] = np.array(scores, np.float32)[p.score_rows]
        p.top_probs[:, 1] = 0
        if p.entropy is not None:
            p.entropy[:] = np.array(scores, np.float32)[p.score_rows] - 1

    with dlm_runtime.from_callback(DenoiserInfo(8, 7, 256), run) as bundle:
        event = next(
            iter(
                bundle.stream(
                    tokens=[], max_new_tokens=len(scores), steps=steps, **policy.as_dict()
                )
            )
        )
    return [i for i, token in enumerate(event.canvas) if token != 7]


# A few values are frequent, so that scores are often equal to each other or to the threshold.
scores = st.lists(
    st.one_of(st.sampled_from([0.0, 0.25, 0.5, 0.75, 0.9, 1.0]), st.floats(0, 1, width=32)),
    min_size=1,
    max_size=24,
)


@settings(max_examples=150)
@given(
    scores=scores,
    commit=st.sampled_from([c for c in COMMITS if c != "timestep"]),
    compare=st.sampled_from((">", ">=")),
    threshold=st.sampled_from([0.25, 0.5, 0.9, 1.0]),
    factor=st.floats(0, 4),
    bound=st.floats(0, 4),
    finish=st.sampled_from([0.0, 0.25, 0.75, 1.0, 1.0]),
    steps=st.integers(1, 30),
)
def test_native_commit_rules_choose_what_the_reference_chooses(
    scores: list[float],
    commit: str,
    compare: str,
    threshold: float,
    factor: float,
    bound: float,
    finish: float,
    steps: int,
) -> None:
    policy = Policy(
        commit=commit,
        compare=compare,
        threshold=threshold,
        factor=factor,
        entropy_bound=bound,
        finish_threshold=finish,
        block_length=0,
    )
    values = np.array(scores, np.float32)
    wide = values.astype(np.float64)
    wide = (values - 1).astype(np.float64) if commit == "entropy_bound" else score_of(wide)
    wanted = choose(wide, policy, transfer_counts(len(scores), steps)[0])
    assert first_commit(scores, policy, steps) == np.flatnonzero(wanted).tolist()


@settings(max_examples=25)
@given(
    masked=st.integers(1, 120), steps=st.integers(1, 120), eps=st.sampled_from([1e-3, 1e-2, 0.5])
)
def test_native_timestep_schedule_equals_the_references(
    masked: int, steps: int, eps: float
) -> None:
    denoiser = ArithmeticDenoiser()
    policy = Policy(commit="timestep", block_length=0, timestep_eps=eps)
    left, step = masked, 0
    for event in denoiser.bundle.stream(
        tokens=[1], max_new_tokens=masked, steps=steps, **policy.as_dict()
    ):
        assert event.committed == min(left, timestep_count(left, step, steps, eps))
        left, step = left - event.committed, step + 1
    assert left == 0
    assert step <= steps


@settings(max_examples=150)
@given(
    data=st.data(),
    masked=st.integers(1, 2048),
    steps=st.integers(1, 1024),
    eps=st.floats(1e-5, 0.9),
)
def test_the_timestep_schedule_is_that_of_torchs_linspace(
    data: st.DataObject, masked: int, steps: int, eps: float
) -> None:
    step = data.draw(st.integers(0, steps - 1))
    t = torch.linspace(1, eps, steps + 1)
    wanted = masked if step == steps - 1 else max(1, int(masked * (1 - t[step + 1] / t[step])))
    assert timestep_count(masked, step, steps, eps) == wanted


@pytest.mark.parametrize("cache", CACHES)
def test_a_reserved_position_holds_an_end_token_and_counts_as_given(cache: str) -> None:
    """``reserve="end"`` writes an end token to the last position before the first pass.

    ``finish`` and ``completion_tokens`` must ignore this end token.
    """
    fields: dict[str, Any] = {"tokens": [3, 4], "cache": cache, "block_length": 4}
    out = ArithmeticDenoiser(eos=5).bundle.generate(
        max_new_tokens=9, reserve="end", stop="none", **fields
    )
    given = [3, 4, *[39] * 8, 5]
    infilled = ArithmeticDenoiser(eos=5).bundle.generate(
        max_new_tokens=0, stop="none", **fields | {"tokens": given}
    )
    assert out.tokens == infilled.tokens
    assert (out.nfe, out.finish, out.completion_tokens) == (8, "length", 8)
    assert out.prompt_tokens == 2


@pytest.mark.parametrize(
    ("tokens", "new", "eos"),
    [([3], 1, 5), ([3, 39, 4], 0, 5), ([3], 4, None)],
    ids=["only masked position", "last position is given", "no end token"],
)
def test_nothing_is_reserved_without_room_or_an_end_token(
    tokens: list[int], new: int, eos: int | None
) -> None:
    bundle = ArithmeticDenoiser(eos=eos).bundle
    out, plain = (
        bundle.generate(tokens=tokens, max_new_tokens=new, stop="none", reserve=reserve)
        for reserve in ("end", "none")
    )
    assert (out.tokens, out.nfe) == (plain.tokens, plain.nfe)


def test_philox_gives_the_published_vectors() -> None:
    """The Random123 distribution publishes these known answers for philox4x32-10."""
    ones = 0xFFFFFFFF
    assert philox(0, (0, 0, 0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    assert philox(ones << 32 | ones, (ones, ones, ones, ones)) == (
        0x408F276D,
        0x41C83B0E,
        0xA20BC7C6,
        0x6D5451FD,
    )
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    assert philox(0x299F31D0A4093822, pi) == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)


def test_blocks_after_one_with_an_end_token_are_not_run() -> None:
    calls: list[int] = []

    def run(p: CallbackPass) -> None:
        calls.append(len(p.input_ids))
        p.top_tokens[:] = [3, 1]
        p.top_probs[:] = [0.9, 0.1]

    with dlm_runtime.from_callback(DenoiserInfo(8, 7, 64, eos_token_ids=(3, 2)), run) as bundle:
        out = bundle.generate(tokens=[1, 3], max_new_tokens=32, block_length=4, steps=8)
        assert out.tokens == [1, 3] + [3] * 32
        assert out.nfe == len(calls) == 1
        assert (
            bundle.generate(tokens=[1], max_new_tokens=32, block_length=4, steps=8, stop="none").nfe
            == 8
        )


@pytest.mark.parametrize(("refresh", "opening"), [(0, (0, 10)), (2, (2, 10))])
def test_cached_passes_of_a_shifted_denoiser_stay_inside_the_block(
    refresh: int, opening: tuple[int, int]
) -> None:
    spans: list[tuple[int, int]] = []

    def run(p: CallbackPass) -> None:
        spans.append((int(p.position_ids[0]), int(p.position_ids[-1]) + 1))
        assert (p.score_rows >= 0).all()
        p.top_tokens[:] = [3, 1]
        p.top_probs[:] = np.linspace(0.5, 0.6, len(p.score_rows))[:, None]

    info = DenoiserInfo(8, 7, 64, shift=1, has_cache=True)
    with dlm_runtime.from_callback(info, run) as bundle:
        events = list(
            bundle.stream(
                tokens=[1, 1], max_new_tokens=8, block_length=4, cache="dual", refresh=refresh
            )
        )
    assert spans == [(0, 10), (2, 6), (2, 6), (2, 6), opening, (6, 10), (6, 10), (6, 10)]
    # The first position of a block is committed in the first pass of the block, even if its score
    # is the lowest.
    assert (events[0].canvas[2], events[0].canvas[3:]) == (3, [7] * 7)
    assert (events[4].canvas[6], events[4].canvas[7:]) == (3, [7] * 3)


def spans_of(tokens: list[int], new: int, shift: int = 0, **fields: Any) -> list[tuple[int, int]]:
    """Return the positions of each pass, as pairs (first, end). The mask token is 7."""
    spans: list[tuple[int, int]] = []

    def run(p: CallbackPass) -> None:
        spans.append((int(p.position_ids[0]), int(p.position_ids[-1]) + 1))
        assert (p.score_rows >= 0).all()
        assert (p.score_rows < len(p.input_ids)).all()
        p.top_tokens[:] = [3, 1]
        p.top_probs[:] = [0.5, 0.1]

    with dlm_runtime.from_callback(
        DenoiserInfo(8, 7, 64, shift=shift, has_cache=True), run
    ) as bundle:
        bundle.generate(tokens=tokens, max_new_tokens=new, **fields)
    return spans


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize(
    ("refresh", "reached"),
    [
        (0, [(0, 13), (0, 13), (0, 13)]),
        (1, [(0, 13), (2, 10), (6, 13)]),
        (6, [(0, 13), (0, 10), (4, 13)]),
    ],
)
def test_refresh_starts_later_blocks_with_the_block_before_at_least(
    refresh: int, reached: list[tuple[int, int]], shift: int
) -> None:
    spans = spans_of([1, 1], 11, shift, block_length=4, cache="dual", refresh=refresh)
    assert spans == [
        reached[0],
        *[(2, 6)] * 3,
        reached[1],
        *[(6, 10)] * 3,
        reached[2],
        *[(10, 13)] * 2,
    ]
    spans = spans_of([1, 1], 11, shift, block_length=4, cache="prefix", refresh=refresh)
    starts = [first for first, _ in reached]
    assert spans == [(at, 13) for at in (starts[0], 2, 2, 2, starts[1], 6, 6, 6, starts[2], 10, 10)]


def test_refresh_reaches_back_over_blocks_that_were_given_whole() -> None:
    # The blocks are the positions 1-2, 3-4, 5-6 and 7. All tokens of the second and third block are
    # given.
    tokens = [1, 7, 7, 1, 1, 1, 1, 7]
    assert spans_of(tokens, 0, block_length=2, cache="dual", refresh=1) == [(0, 8), (1, 3), (1, 8)]


def test_failures_of_a_pass_end_the_request_and_leave_the_bundle_usable() -> None:
    state = {"fail": True}

    def run(p: CallbackPass) -> None:
        if state["fail"]:
            raise RuntimeError("no more memory on the device")
        p.top_tokens[:] = [3, 1]
        p.top_probs[:] = [0.5, 0.1]

    with dlm_runtime.from_callback(DenoiserInfo(8, 7, 64), run) as bundle:
        with pytest.raises(EngineError) as caught:
            bundle.generate(tokens=[1], max_new_tokens=4)
        assert isinstance(caught.value.__cause__, RuntimeError)
        state["fail"] = False
        assert bundle.generate(tokens=[1], max_new_tokens=4).tokens == [1, 3, 3, 3, 3]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"score": "sureness"}, "one of: confidence, margin, entropy, random"),
        ({"cache": "delta"}, "one of: none, prefix, dual, block"),
        ({"threshold": 1.5}, "outside 0..1"),
        ({"threshold": float("nan")}, "outside 0..1"),
        ({"block_length": -1}, "outside 0"),
        ({"refresh": -1, "cache": "dual"}, "refresh = -1 is outside 0"),
        (
            {"refresh": 32},
            'refresh = 32, but cache = "none" keeps no rows to refresh: use cache = "prefix" or "dual"',
        ),
        ({"temperature": -1}, "temperature = -1 is outside 0..1e"),
        ({"temperature": 0.2, "select": "argmax"}, 'temperature = 0.2 needs select = "sample"'),
        ({"select": "sample"}, "needs a temperature above 0"),
        ({"top_k": -1}, "top_k = -1 is outside 0"),
        ({"commit": "threshold", "score": "entropy"}, "entropies are not"),
        ({"next_block": 0.5}, 'needs commit = "threshold" or "entropy_threshold", not "static"'),
        (
            {"next_block": 0.5, "commit": "threshold", "cache": "dual"},
            'decides positions of several blocks: use cache = "none", "prefix" or "block"',
        ),
        (
            {"next_block": 0.5, "commit": "threshold", "cache": "prefix", "refresh": 4},
            "cannot be combined with refresh: use refresh = 0 and refresh_interval",
        ),
        ({"cache_delay": 1}, 'need cache = "prefix" and next_block below 1'),
        (
            {"next_block": 0.5, "commit": "threshold", "refresh_interval": 2},
            'need cache = "prefix" and next_block below 1',
        ),
        ({"cache": "prefix", "cache_delay": -1}, "cache_delay = -1 is outside 0"),
        (
            {"cache": "prefix", "commit": "entropy_threshold"},
            "would run Fast-dLLM's cache, not d3LLM's: set next_block = 0.9999",
        ),
        (
            {"next_block": 0.5, "commit": "threshold", "remask": "edit"},
            "cannot be combined with edits",
        ),
        (
            {"finish_threshold": 0.5, "commit": "threshold", "remask": "noise", "cache": "none"},
            "cannot be combined with finish_threshold",
        ),
        ({"next_block": 1.5}, "next_block = 1.5 is outside 0..1"),
        ({"steps": 1}, "fewer than the 2 blocks"),
        ({"max_new_tokens": None, "new_tokens": 600}, "longer than the denoiser's 512"),
        ({"tokens": [40]}, "token id 40 at position 0 is outside the vocabulary"),
        ({"seed": -1}, "out of range"),
        ({"block_length": "8"}, "not of the right type"),
        ({"surety": 1}, "unknown argument 'surety': one of prompt, tokens, .* block_length"),
        ({"max_tokens": 3}, r"unknown argument 'max_tokens': did you mean max_new_tokens\?"),
        ({"treshold": 0.5}, r"did you mean threshold\?"),
    ],
)
def test_wrong_requests_are_refused_by_name(changes: dict[str, Any], sentence: str) -> None:
    denoiser = ArithmeticDenoiser()
    with pytest.raises(RequestError, match=sentence):
        denoiser.bundle.generate(**({"tokens": [1], "max_new_tokens": 64} | changes))
    assert denoiser.passes == 0


def test_a_misspelled_argument_is_told_by_the_method_that_it_was_given_to() -> None:
    bundle = ArithmeticDenoiser().bundle
    with pytest.raises(RequestError, match=r"'max_batches': did you mean max_batch\?"):
        bundle.generate_batch(tokens=[[1]], max_batches=2)
    with pytest.raises(RequestError, match=r"'prompts': did you mean prompt\?"):
        bundle.stream(prompts=["a"])
    with pytest.raises(
        RequestError,
        match=r"unknown policy field 'tresholds': did you mean threshold\? Known are select",
    ):
        bundle.policy(tresholds=0.5)
