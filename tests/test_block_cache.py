"""Tests of decoding with block-causal attention: the planned passes, the exact cache, edits of
finished blocks, and equality with the reference loop.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from denoisers import ArithmeticDenoiser, under_native_loop
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import make_network
from test_visibility import random_denoiser, seeing

from dlm_export.network import reference
from dlm_export.network.denoiser import Denoiser
from dlm_export.network.loop_turns import Canvas
from dlm_export.network.pass_plan import Span, plan
from dlm_export.network.spec import NetworkSpec
from dlm_runtime import CallbackPass, DenoiserInfo, Policy, RequestError, from_callback
from dlm_runtime.presets import PRESETS, presets_for

BLOCK_CAUSAL = ("sdar", "llada2", "llada2.1", "fast-dllm-v2")


def network_of(block: int, shift: int = 0, layers: int = 2) -> NetworkSpec:
    network = make_network(
        layers=layers, heads=4, kv_heads=2, head_size=8, shift=shift, eos_token_ids=(7,)
    )
    return seeing(network, [("block", block)] * layers)


def preset(name: str, block: int, shift: int, **changes: Any) -> Policy | None:
    """Return a published preset for a network with the given block length and shift.

    The thresholds are lowered, so that random denoisers reach them. Returns None if the network
    does not support the preset.
    """
    size = (
        {"sub_block_length": next(part for part in (3, 2, 1) if block % part == 0)}
        if name == "fast-dllm-v2"
        else {}
    )
    reached = {"threshold": 0.1, "edit_threshold": 0.08}
    takes = not (name == "llada2.1" and shift)
    return PRESETS[name].with_fields(reached | size | changes) if takes else None


# ---- The plan ----


@st.composite
def plans(draw: st.DrawFn) -> tuple[np.ndarray, Policy, NetworkSpec]:
    """Strategy for canvases, policies and networks.

    The canvases have given tokens at the start, and sometimes in the middle. The policies are of
    all kinds that block-causal networks support.
    """
    block, shift = draw(st.integers(1, 6)), draw(st.integers(0, 1))
    undecided = np.array(draw(st.lists(st.booleans(), min_size=1, max_size=40)))
    undecided[: draw(st.integers(0, len(undecided)))] = False
    length = block * draw(st.integers(1, 3))
    policy = Policy(
        cache=draw(st.sampled_from(("none", "block"))),
        block_length=draw(st.sampled_from((0, length))),
        store="pass" if shift else draw(st.sampled_from(("pass", "reuse", "open"))),
    )
    sizes = [size for size in range(1, length + 1) if (policy.block_length or block) % size == 0]
    policy = replace(policy, sub_block_length=draw(st.sampled_from((0, *sizes))))
    if (
        policy.cache == "block"
        and policy.store == "pass"
        and policy.block_length in (0, block)
        and draw(st.booleans())
    ):
        policy = replace(policy, cache="block-dual")
    return undecided, policy, network_of(block, shift, 1)


@settings(max_examples=200)
@given(made=plans())
def test_a_plan_decides_every_position_once_and_stores_what_is_finished_on_the_grid(
    made: tuple[np.ndarray, Policy, NetworkSpec],
) -> None:
    undecided, policy, network = made
    length, n = len(undecided), network.visible_block
    assert n is not None
    size = policy.block_length or n
    has_parts = policy.cache == "block-dual" and policy.sub_block_length > 0
    decided, stored, opened = ~undecided, 0, (0, 0)
    for stage in plan(undecided, policy, network):
        span = stage.span
        assert 0 <= span.first < span.last <= length
        if not (has_parts and stage.kind == "denoise"):
            assert span.first % n == 0
            assert span.last % n == 0 or span.last == length
        if policy.cache == "none":
            assert span == Span(0, length, "drop")
        elif has_parts and stage.kind == "denoise":
            assert (span.first, span.last) == (stage.first, stage.last)
            assert (
                opened == (stage.first, stage.last) or not undecided[stage.first : stage.last].any()
            )
        elif has_parts and span.first == stage.start:
            assert span == Span(stored, stage.end, "append")
            opened = stage.first, stage.last
            assert stage.awaited == stage.first + network.shift
        elif stage.kind == "denoise":
            assert (span.first, span.last) == (stage.start, stage.end)
            assert span.first <= stored, "what is read is stored"
        else:
            is_opening = span.last > stage.start
            assert span.first == stored, "what is stored lies behind what was"
            assert decided[: stage.start if is_opening else span.last].all(), "and is finished"
            assert not is_opening or (policy.store == "open" and span.last == stage.end)
        if policy.cache == "block" and policy.store == "open" and span.is_stored:
            stored = stage.start if span.last == stage.end else span.last
        elif span.is_stored and opened != (stage.first, stage.last):
            stored = span.last
        origin = 0 if n > 1 else int(undecided.argmax())  # causal attention has no grid of blocks
        assert (stage.start - origin) % size == 0
        assert stage.end == min(stage.start + size, length)
        assert stage.start <= stage.first <= stage.last <= stage.end
        decided[stage.first : stage.last] = True
    assert decided.all()
    stages = plan(undecided, policy, network)
    repeated = [
        position
        for stage in stages
        if stage.is_repeated and stage.kind == "denoise"
        for position in range(stage.first, stage.awaited)
    ]
    assert len(repeated) == len(set(repeated))
    if stages:
        assert stages[-1].kind == "denoise", "nothing is stored that nothing reads"


# ---- The native loop and the reference ----


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    """Strategy for requests. Prompts and canvases end at the end of a block or inside a block.
    Every preset is used, sometimes with another commit rule or another cache.
    """
    block, shift = draw(st.sampled_from((1, 2, 3, 4, 6))), draw(st.integers(0, 1))
    name = draw(st.sampled_from(BLOCK_CAUSAL))
    policy = preset(name, block, shift, cache=draw(st.sampled_from(("block", "none"))))
    if policy is None:
        policy = preset("sdar", block, shift)
    assert policy is not None
    changes: dict[str, Any] = {"stop": draw(st.sampled_from(("eos", "early-eos", "none")))}
    if draw(st.booleans()):
        changes |= {
            "commit": draw(
                st.sampled_from(("static", "threshold", "factor", "sequential", "longest_prefix"))
            ),
            "steps_per_block": draw(st.integers(0, 4)),
            "schedule": draw(st.sampled_from(("masked", "block", "floor"))),
            "reserve": draw(st.sampled_from(("none", "end"))),
            "score": draw(st.sampled_from(("confidence", "margin", "random"))),
        }
    if draw(st.booleans()):
        changes["block_length"] = block * draw(st.integers(1, 3))
    if not shift and policy.cache == "block" and draw(st.booleans()):
        changes["store"] = draw(st.sampled_from(("reuse", "open")))
    elif (
        policy.cache == "block"
        and policy.remask == "none"
        and "block_length" not in changes
        and draw(st.booleans())
    ):
        changes["cache"] = "block-dual"
        changes["sub_block_length"] = draw(
            st.sampled_from([size for size in range(1, block + 1) if block % size == 0])
        )
    # Edits write sampled tokens too. With classifier-free guidance, a second canvas, whose prompt is
    # masked, has a separate cache.
    changes |= draw(
        st.sampled_from([{}, {}, {"temperature": 0.9, "top_p": 0.9, "seed": 3}, {"cfg_scale": 1.2}])
    )
    # Without a prompt, all masks of the first block have equal scores, and rounding ranks them.
    prompt = draw(st.lists(st.integers(8, 98), min_size=1, max_size=14))
    return {
        "network": network_of(block, shift),
        "policy": policy.with_fields(changes),
        "tokens": [*prompt, *draw(st.lists(st.sampled_from((9, 99)), max_size=8))],
        "new": draw(st.integers(1, 17)),
        "seed": draw(st.integers(0, 5)),
    }


def seeded(network: NetworkSpec, seed: int) -> Denoiser:
    denoiser = random_denoiser(network)
    torch.manual_seed(seed)
    for parameter in denoiser.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=0.02)
    return denoiser


@settings(max_examples=40)
@given(case=cases())
def test_the_native_loop_equals_the_reference_token_for_token_and_pass_for_pass(
    case: dict[str, Any],
) -> None:
    denoiser, policy = seeded(case["network"], case["seed"]), case["policy"]
    canvases: list[Canvas] = []
    wanted = reference.generate(
        denoiser, case["tokens"], policy, case["new"], on_step=canvases.append
    )
    with under_native_loop(denoiser) as bundle:
        out = bundle.generate(tokens=case["tokens"], max_new_tokens=case["new"], **policy.as_dict())
        events = list(
            bundle.stream(tokens=case["tokens"], max_new_tokens=case["new"], **policy.as_dict())
        )
    assert (out.tokens, out.nfe) == (wanted.tokens, wanted.nfe)
    assert sum(out.passes.values()) == out.nfe
    assert [event.canvas for event in events[:-1]] == [
        canvas.tokens.tolist() for canvas in canvases[:-1]
    ]
    assert [event.undecided for event in events[:-1]] == [
        canvas.undecided.tolist() for canvas in canvases[:-1]
    ]


@pytest.mark.parametrize(
    ("name", "block", "shift"), [("sdar", 4, 0), ("llada2.1", 4, 0), ("fast-dllm-v2", 4, 1)]
)
def test_the_block_cache_is_exact(name: str, block: int, shift: int) -> None:
    """Decoding with the block cache must give the same canvas as decoding without a cache.

    With the cache, NFE also counts the passes that only store blocks.
    """
    policy = preset(name, block, shift)
    assert policy is not None
    for prompt_length in (1, 3, 4, 6, 8, 9):
        denoiser = seeded(network_of(block, shift), prompt_length)
        tokens = [8 + i for i in range(prompt_length)]
        plain = reference.generate(
            denoiser, tokens, policy.with_fields({"cache": "none"}), 3 * block + 1
        )
        with under_native_loop(denoiser) as bundle:
            out = bundle.generate(tokens=tokens, max_new_tokens=3 * block + 1, **policy.as_dict())
        assert out.tokens == plain.tokens
        # If row i predicts position i + 1, the first position of a block is predicted by the row
        # before the block. A pass over this row is needed with and without the cache.
        is_shared = shift and prompt_length % block == 0
        only_store = (0 if is_shared else out.passes["prefill"]) + (
            0 if shift else out.passes["store"]
        )
        assert out.nfe - only_store == plain.nfe
        assert out.passes["prefill"] == (prompt_length >= block)
        assert 0 < out.passes["store"] <= 4


@pytest.mark.parametrize("name", ["sdar", "llada2.1"])
def test_a_pass_that_stores_a_block_and_opens_the_next_saves_one_for_the_same_canvas(
    name: str,
) -> None:
    block = 4
    policy = preset(name, block, 0)
    assert policy is not None
    for prompt_length in (1, 3, 4, 6, 8, 9):
        denoiser = seeded(network_of(block), prompt_length)
        request = {
            "tokens": [8 + i for i in range(prompt_length)],
            "max_new_tokens": 3 * block + 1,
        } | policy.as_dict()
        with under_native_loop(denoiser) as bundle:
            stored, opened = (
                bundle.generate(**request | {"store": store}) for store in ("pass", "open")
            )
            both = bundle.generate_batch(
                **request | {"tokens": [request["tokens"]] * 2, "store": "open"}
            )
        assert opened.tokens == stored.tokens
        # If the prompt ends inside a block and covers the first sub-block of this block, the first
        # pass over the block cannot also store the prompt's part of the block. One more pass stores
        # this part.
        is_whole = not policy.sub_block_length or prompt_length % block < policy.sub_block_length
        saved = sum(stored.passes[kind] for kind in ("prefill", "store"))
        assert opened.nfe == stored.nfe - saved + (0 if is_whole or prompt_length < block else 1)
        assert opened.passes["store"] == stored.passes["store"] > 0
        assert [one.tokens for one in both] == [opened.tokens] * 2


def test_what_is_reused_is_stored_without_a_pass_and_requests_do_not_share_it() -> None:
    denoiser = seeded(network_of(4), 0)
    policy = PRESETS["sdar"].with_fields({"store": "reuse", "threshold": 0.1, "stop": "none"})
    with under_native_loop(denoiser) as bundle:
        out = bundle.generate(tokens=[8] * 4, max_new_tokens=12, **policy.as_dict())
        stored = bundle.generate(
            tokens=[8] * 4, max_new_tokens=12, **policy.as_dict() | {"store": "pass"}
        )
        both = bundle.generate_batch(tokens=[[8] * 4] * 2, max_new_tokens=12, **policy.as_dict())
    assert (out.passes["prefill"], out.passes["store"]) == (1, 0)
    assert (stored.passes["prefill"], stored.passes["store"]) == (1, 2)
    assert [one.tokens for one in both] == [out.tokens] * 2
    assert [one.passes for one in both] == [out.passes] * 2


# ---- Published loops ----


@pytest.mark.parametrize("name", [*BLOCK_CAUSAL, "dream-block"])
def test_confidences_are_those_of_the_distribution_that_tokens_are_drawn_from(name: str) -> None:
    """With ``top_k`` 1, each drawn token has probability 1, so all positions commit together."""
    network = network_of(4, int(name == "fast-dllm-v2"))
    if name == "dream-block":
        network = make_network(layers=2, heads=4, kv_heads=2, head_size=8, shift=1)
    policy = preset(name, 4, network.shift, temperature=1.0, top_k=1, block_length=4)
    assert policy is not None
    denoiser = seeded(network, 1)
    passes = [
        reference.generate(
            denoiser, [8] * 6, policy.with_fields({"threshold": threshold, "stop": "none"}), 10
        ).nfe
        for threshold in (0.0, 0.99)
    ]
    assert passes[0] == passes[1]


class Scripted:
    """A fake denoiser whose prediction is a given function of the position and the canvas.

    The denoiser records its passes.
    """

    def __init__(self, predict: Any, *, block: int, shift: int = 0) -> None:
        # For each pass: the positions that it computed, and the rows that it scored.
        self.passes: list[tuple[list[int], list[int]]] = []
        self.ids: dict[int, int] = {}

        def run(p: CallbackPass) -> None:
            self.passes.append((p.position_ids.tolist(), p.score_rows.tolist()))
            self.ids |= dict(zip(p.position_ids.tolist(), p.input_ids.tolist(), strict=True))
            for i, row in enumerate(p.score_rows):
                token, probability = predict(int(p.position_ids[row]), self.ids)
                p.top_tokens[i] = token, (token + 1) % 39
                p.top_probs[i] = probability, 0.0

        info = DenoiserInfo(40, 39, 64, (5,), shift=shift, has_cache=True, visible_block=block)
        self.bundle = from_callback(info, run)


@pytest.mark.parametrize(
    ("stop", "passes"), [(PRESETS["nemotron-diffusion"].stop, 4), ("eos", 8), ("none", 16)]
)
def test_early_eos_ends_when_the_text_before_the_end_token_is_decided(
    stop: str, passes: int
) -> None:
    """Each pass decides one position of a block: position 5, then the end token at position 2, and
    then positions 0 and 1.
    """
    probs = {5: 0.8, 2: 0.7, 0: 0.6, 1: 0.5}
    scripted = Scripted(
        lambda position, ids: (5 if position == 10 else 10, probs.get(position - 8, 0.1)), block=8
    )
    out = scripted.bundle.generate(
        tokens=[1] * 8, max_new_tokens=16, **PRESETS["sdar"].as_dict() | {"stop": stop}
    )
    assert out.passes["denoise"] == passes
    assert (out.tokens[8:11], out.completion_tokens, out.finish) == ([10, 10, 5], 2, "stop")


# ---- Invalid combinations ----


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"cache": "dual"},
            'cache = "dual" needs full attention, but this .* in blocks of 4: use cache = "block"',
        ),
        ({"cache": "prefix"}, 'cache = "prefix" needs full attention'),
        (
            {"block_length": 6},
            "block_length = 6 does not suit .* set a multiple of 4, or 0 for 4; .* set sub_block_length",
        ),
        ({"block_length": 2}, "block_length = 2 does not suit"),
        ({"sub_block_length": 3}, "sub_block_length = 3 does not divide the block of 4 positions"),
        (
            {"cache": "none", "store": "reuse"},
            'store = "reuse" needs cache = "block", not "none"',
        ),
        ({"refresh": 4}, 'refresh = 4, but cache = "block" keeps no rows to refresh'),
        ({"edit_threshold": 1.5}, "edit_threshold = 1.5 is outside 0..1"),
        (
            {"cache": "block-dual", "block_length": 8},
            'cache = "block-dual" keeps rows .* a block is 4 positions .* block_length = 4, or',
        ),
        ({"cache": "block-dual", "remask": "edit"}, 'remask = "edit" scores whole blocks'),
        (
            {"cache": "block-dual", "store": "open"},
            'store = "open" needs cache = "block", not "block-dual"',
        ),
    ],
)
def test_policies_that_a_block_causal_denoiser_does_not_take_are_refused(
    fields: dict[str, Any], sentence: str
) -> None:
    bundle = ArithmeticDenoiser(visible_block=4).bundle
    with pytest.raises(RequestError, match=sentence):
        bundle.generate(tokens=[1], max_new_tokens=8, **PRESETS["sdar"].as_dict() | fields)


@pytest.mark.parametrize(
    ("fields", "shift", "sentence"),
    [
        (
            {"cache": "block"},
            None,
            'cache = "block" needs block-causal attention, but this denoiser\'s is full: use',
        ),
        ({"cache": "block-dual"}, None, 'cache = "block-dual" needs block-causal attention'),
        ({"sub_block_length": 8}, None, "sub_block_length = 8 needs block-causal attention"),
        (
            {"remask": "edit", "cache": "block"},
            1,
            'remask = "edit" needs each row to predict its own position',
        ),
        (
            {"store": "reuse", "cache": "block"},
            1,
            'store = "reuse" skips the pass that predicts',
        ),
        (
            {"store": "open", "cache": "block"},
            1,
            'store = "open" skips the pass that predicts',
        ),
    ],
)
def test_policies_of_other_denoisers_are_refused(
    fields: dict[str, Any], shift: int | None, sentence: str
) -> None:
    bundle = ArithmeticDenoiser(shift=shift or 0, visible_block=None if shift is None else 4).bundle
    with pytest.raises(RequestError, match=sentence):
        bundle.generate(tokens=[1], max_new_tokens=8, **PRESETS["llada"].as_dict() | fields)


@pytest.mark.parametrize("block", [None, 1, 4, 32, 64])
@pytest.mark.parametrize("shift", [0, 1])
def test_the_presets_for_a_denoiser_are_those_that_it_takes(block: int | None, shift: int) -> None:
    bundle = ArithmeticDenoiser(shift=shift, visible_block=block).bundle
    suiting = presets_for(block, shift)
    others = {"nemotron-diffusion", "wedlm", "diffusion-gemma", "dreamon", "sdlm"}
    if (block or 0) > 1 and not shift:
        others |= {"d3llm", "d3llm-dream", "d2f"}
    for name, policy in PRESETS.items():
        if name in suiting:
            bundle.generate(tokens=[1], max_new_tokens=16, **suiting[name].as_dict())
        elif (
            name not in others
            or (name in ("diffusion-gemma", "sdlm") and block is None)
            or (name == "diffusion-gemma" and shift)
        ):  # the others would also run, but they were published for other denoisers
            with pytest.raises(RequestError):
                bundle.generate(tokens=[1], max_new_tokens=16, **policy.as_dict())
    assert ("llada" in suiting) == (block != 64)
