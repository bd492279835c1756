"""Tests of passes that decide positions of several blocks (next_block below 1).

``test_published_loops`` compares the presets with d3LLM's code.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from denoisers import load, under_native_loop
from hypothesis import given, settings
from hypothesis import strategies as st
from published import END, MASK, prompt_of, random_network

import dlm_runtime
from dlm_calibration.states import random_tokens
from dlm_export.network import reference
from dlm_runtime import DlmError, Policy
from dlm_runtime.presets import PRESETS

policies = st.builds(
    Policy,
    commit=st.sampled_from(("threshold", "entropy_threshold")),
    compare=st.sampled_from((">", ">=")),
    stop=st.sampled_from(("eos", "early-eos", "none")),
    block_length=st.integers(0, 9),
    threshold=st.floats(0.2, 0.9),
    entropy_bound=st.floats(0.1, 4),
    next_block=st.floats(0, 0.99),
    finish_threshold=st.sampled_from((1.0, 0.3)),
)
caches = st.fixed_dictionaries(
    {
        "cache": st.just("prefix"),
        "cache_delay": st.integers(0, 4),
        "refresh_interval": st.integers(0, 4),
    }
)


@settings(max_examples=40)
@given(
    policy=policies,
    cache=st.just({}) | caches,
    new=st.integers(0, 24),
    gaps=st.sets(st.integers(0, 11), max_size=6),
    shift=st.integers(0, 1),
    seed=st.integers(0, 20),
)
def test_the_native_loop_equals_the_reference(
    policy: Policy, cache: dict[str, Any], new: int, gaps: set[int], shift: int, seed: int
) -> None:
    policy, shift = policy.with_fields(cache), 0 if cache else shift
    tokens = [MASK if at in gaps else token for at, token in enumerate(prompt_of(12, seed))]
    denoiser = random_network(0, shift, seed)
    canvases: list[np.ndarray] = []
    wanted = reference.generate(
        denoiser, tokens, policy, new, on_step=lambda canvas: canvases.append(canvas.undecided)
    )
    with under_native_loop(denoiser) as bundle:
        out = bundle.generate(tokens=tokens, max_new_tokens=new, **policy.as_dict())
    assert (out.tokens, out.nfe) == (wanted.tokens, wanted.nfe)
    assert MASK not in out.tokens
    assert [t for at, t in enumerate(out.tokens[:12]) if at not in gaps] == [
        t for at, t in enumerate(tokens) if at not in gaps
    ]
    _check_progress(tokens, new, policy, canvases)


def _check_progress(tokens: list[int], new: int, policy: Policy, after: list[np.ndarray]) -> None:
    """Every pass decides a position of the first unfinished block."""
    before = np.array([*tokens, *[MASK] * new]) == MASK
    if not before.any():
        return
    origin = int(before.argmax())
    for undecided in after:
        block = policy.block_length or len(before)
        start = origin + (int(before.argmax()) - origin) // block * block
        assert undecided[start : start + block].sum() < before[start : start + block].sum()
        before = undecided


def test_later_blocks_start_before_earlier_blocks_are_finished() -> None:
    """With next_block 1, the same policy finishes each block before the next block starts, and
    needs more passes.
    """
    ahead, total = 0, {0.1: 0, 1.0: 0}
    for seed in range(8):
        denoiser = random_network(0, 0, seed)
        for next_block in total:
            policy = PRESETS["d3llm"].with_fields(
                {"block_length": 8, "next_block": next_block, "entropy_bound": 1.5, "stop": "none"}
            )
            seen: list[np.ndarray] = []
            out = reference.generate(
                denoiser,
                prompt_of(4, seed),
                policy,
                32,
                on_step=lambda canvas, seen=seen: seen.append(canvas.undecided),
            )
            total[next_block] += out.nfe
            early = [left for left in seen if left[4:12].any() and not left[12:20].all()]
            assert next_block < 1 or not early
            ahead += len(early)
    assert ahead > 0
    assert total[0.1] < total[1.0]


def test_all_tokens_after_an_end_token_are_end_tokens() -> None:
    ended = 0
    for seed in range(40):
        with under_native_loop(random_network(0, 0, seed)) as bundle:
            policy = PRESETS["d3llm"].with_fields({"block_length": 4, "entropy_bound": 2.0})
            out = bundle.generate(
                tokens=prompt_of(3, seed), max_new_tokens=16, **policy.as_dict()
            ).tokens[3:]
        if END in out:
            ended += 1
            assert set(out[out.index(END) :]) == {END}
    assert ended > 0


AHEAD = PRESETS["d3llm"].as_dict()


def test_a_longer_delay_gives_the_text_of_passes_without_a_cache() -> None:
    """With a long delay, nothing is stored. Without a delay, later passes compute fewer rows."""
    policy = PRESETS["d3llm"].with_fields({"block_length": 4, "entropy_bound": 1.5})
    rows: list[int] = []
    texts: list[list[int]] = []
    for changes in (
        {},
        {"cache": "prefix", "cache_delay": 100},
        {"cache": "prefix", "cache_delay": 1},
    ):
        counts: list[int] = []
        with under_native_loop(
            random_network(0, 0, 1), lambda p, counts=counts: counts.append(len(p.input_ids))
        ) as bundle:
            fields = policy.with_fields(changes).as_dict()
            out = bundle.generate(tokens=prompt_of(12, 1), max_new_tokens=24, **fields)
        texts.append(out.tokens)
        rows.append(sum(counts))
    assert texts[0] == texts[1]
    assert rows[2] < rows[0] == rows[1]


@pytest.mark.parametrize(
    "changes", [{"cache_delay": 0}, {"cache_delay": 2}, {"cache_delay": 1, "refresh_interval": 3}]
)
def test_bundles_cache_as_the_reference_does(
    llada_checkpoint: Path, llada_bundle: Path, changes: dict[str, Any]
) -> None:
    """Requests give the same texts alone, in a batch and in a scheduler."""
    denoiser = load(llada_checkpoint)
    fields = {"block_length": 4, "entropy_bound": 3.0, "cache": "prefix", "stop": "none"}
    policy = PRESETS["d3llm"].with_fields(fields | changes)
    special = (denoiser.network.mask_token_id, *denoiser.network.eos_token_ids)
    numbers = np.random.default_rng(2)
    prompts = [random_tokens(n, 60, special, numbers).tolist() for n in (1, 5, 9, 5)]
    wanted = [reference.generate(denoiser, prompt, policy, 20) for prompt in prompts]
    given = policy.as_dict() | {"max_new_tokens": 20}
    with dlm_runtime.open(llada_bundle, threads=1) as bundle:
        alone = [bundle.generate(tokens=prompt, **given) for prompt in prompts]
        batch = bundle.generate_batch(tokens=prompts, **given)
        with bundle.scheduler(max_running=3) as scheduler:
            jobs = [scheduler.submit(tokens=prompt, **given) for prompt in prompts]
            shared = [job.result() for job in jobs]
    for found in (alone, batch, shared):
        assert [(out.tokens, out.nfe) for out in found] == [(out.tokens, out.nfe) for out in wanted]
    assert min(out.nfe for out in wanted) < 20


def test_denoisers_that_predict_the_next_position_refuse_a_cache_by_name() -> None:
    with (
        under_native_loop(random_network(0, 1, 0)) as bundle,
        pytest.raises(DlmError, match=r"with a cache needs each row to predict its own position"),
    ):
        bundle.generate(tokens=[9], max_new_tokens=8, **AHEAD | {"cache": "prefix"})


@settings(max_examples=30)
@given(
    policy=policies,
    new=st.integers(1, 24),
    given_count=st.integers(1, 13),
    blocks=st.integers(1, 2),
    force_next=st.sampled_from((1.0, 0.5)),
    seed=st.integers(0, 20),
)
def test_block_causal_denoisers_decide_several_blocks_with_an_exact_cache(
    policy: Policy, new: int, given_count: int, blocks: int, force_next: float, seed: int
) -> None:
    """The native loop equals the reference, and texts with the cache equal those without it."""
    policy = replace(policy, block_length=4 * blocks, force_next=force_next)
    denoiser, tokens = random_network(4, 0, seed), prompt_of(given_count, seed)
    wanted = reference.generate(denoiser, tokens, policy, new)
    with under_native_loop(denoiser) as bundle:
        for cache in ("none", "block"):
            fields = policy.as_dict() | {"cache": cache}
            out = bundle.generate(tokens=tokens, max_new_tokens=new, **fields)
            assert (out.tokens, out.nfe) == (wanted.tokens, wanted.nfe)
            again = reference.generate(denoiser, tokens, replace(policy, cache=cache), new)
            assert (again.tokens, again.nfe) == (wanted.tokens, wanted.nfe)


def test_shifted_block_causal_denoisers_refuse_it_by_name() -> None:
    with (
        under_native_loop(random_network(4, 1, 0)) as bundle,
        pytest.raises(DlmError, match=r"rows predict their own positions.*use next_block = 1"),
    ):
        bundle.generate(tokens=[9], max_new_tokens=8, **AHEAD | {"block_length": 4})


def test_scores_are_entropies_whatever_the_policy_says() -> None:
    """The commit rule compares entropies, so the policy field ``score`` has no effect."""
    with under_native_loop(random_network(0, 0, 3)) as bundle:
        request: dict[str, Any] = {"tokens": prompt_of(5, 3), "max_new_tokens": 12}
        one = bundle.generate(**request, **AHEAD)
        other = bundle.generate(**request, **AHEAD | {"score": "margin"})
    assert (one.tokens, one.nfe) == (other.tokens, other.nfe)
