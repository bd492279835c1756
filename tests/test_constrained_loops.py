"""Tests of constraints with loops that start from random tokens, verify drafts, or decide positions
of several blocks.

The native loop generates the same tokens as the reference loop. Verified texts also equal the texts
of a loop that predicts one legal token at a time.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from constrained_reference import Constrained, by_tokens
from constraints import Automaton, Compiled, Longest, compiled, following, made_up_vocabulary
from denoisers import under_native_loop
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import make_network
from test_constrained import EXPRESSIONS
from test_visibility import random_denoiser, seeing

from dlm_export.network import reference
from dlm_export.network.denoiser import Denoiser
from dlm_export.network.loop_turns import start_canvas
from dlm_runtime import Bundle, Policy, RequestError
from dlm_runtime.presets import PRESETS

VOCAB, MASK, ENDS, PROMPT, BLOCK = 128, 127, (7, 9), [11, 12, 13], 6
WORDS = made_up_vocabulary(VOCAB, (*ENDS, MASK, 3), Longest)


@pytest.fixture(scope="module")
def denoisers() -> dict[str, Denoiser]:
    network = make_network(
        vocab_size=VOCAB, layers=2, heads=4, kv_heads=2, head_size=8, eos_token_ids=ENDS
    )
    causal = replace(network, shift=1, noise="uniform", mask_token_id=VOCAB)
    return {
        "full": random_denoiser(network),
        "block": random_denoiser(seeing(network, [("block", BLOCK)] * 2)),
        "after-prompt": random_denoiser(seeing(network, [("after-prompt", BLOCK)] * 2)),
        "draft": random_denoiser(seeing(network, [("draft", BLOCK)] * 2)),
        "causal draft": random_denoiser(seeing(causal, [("causal", BLOCK)] * 2)),
    }


@pytest.fixture(scope="module")
def bundles(denoisers: dict[str, Denoiser]) -> dict[str, Bundle]:
    return {kind: under_native_loop(denoiser) for kind, denoiser in denoisers.items()}


@pytest.fixture(scope="module")
def endless() -> Bundle:
    """A denoiser without an end token."""
    return under_native_loop(
        random_denoiser(make_network(vocab_size=VOCAB, layers=2, eos_token_ids=()))
    )


@pytest.fixture(scope="module")
def automata() -> dict[str, Compiled]:
    return {
        name: compiled(expression, WORDS, VOCAB, ENDS) for name, expression in EXPRESSIONS.items()
    }


def text_of(tokens: list[int]) -> bytes:
    """Return the bytes of the tokens before the first end token, after which only end tokens may
    follow.
    """
    end = next((i for i, token in enumerate(tokens) if token in ENDS), len(tokens))
    assert set(tokens[end:]) <= set(ENDS)
    return b"".join(WORDS.tokens[token] or b"?" for token in tokens[:end])


def check(
    denoiser: Denoiser,
    bundle: Bundle,
    automaton: Compiled,
    expression: str,
    policy: Policy,
    *,
    room: int,
    max_steps: int = 0,
) -> list[int]:
    """Compare the native loop with the reference, and return the generated tokens."""
    new, mask = automaton.shortest + room, denoiser.network.mask_token_id
    canvas = start_canvas(PROMPT, new, mask)
    proposer = Constrained(mask, ENDS[0], policy, automaton, canvas)
    wanted = reference.fill(denoiser, canvas, policy, proposer=proposer, max_steps=max_steps)
    out = bundle.generate(
        tokens=PROMPT,
        max_new_tokens=new,
        constraint=automaton.constraint,
        max_steps=max_steps,
        **policy.as_dict(),
    )
    assert re.fullmatch(expression.encode(), text_of(out.tokens[len(PROMPT) :]))
    assert (out.tokens, out.nfe) == (wanted.tokens, wanted.nfe)
    return out.tokens[len(PROMPT) :]


noise = st.fixed_dictionaries(
    {
        "entropy_bound": st.sampled_from([0.0, 0.5, 4.0, 30.0]),
        "score_of": st.sampled_from(("prediction", "draw", "marginal")),
        "temperature": st.sampled_from([0.2, 0.8, 3.0]),
        "temperature_drop": st.sampled_from([0.0, 0.1]),
        "steps_per_block": st.integers(1, 8),
        "stable_entropy": st.sampled_from([0.0, 0.3, 4.0]),
        "stable_passes": st.integers(0, 2),
        "seed": st.integers(0, 2**64 - 1),
        "stop": st.sampled_from(("eos", "none")),
        "top_k": st.sampled_from([0, 5]),
    }
)


@settings(max_examples=60)
@given(
    kind=st.sampled_from(("full", "block", "draft")),
    name=st.sampled_from(sorted(EXPRESSIONS)),
    changes=noise,
    is_greedy=st.booleans(),
    room=st.integers(0, 14),
    max_steps=st.sampled_from([0, 0, 0, 1, 3]),
)
def test_blocks_of_random_tokens_become_legal_texts(
    denoisers: dict[str, Denoiser],
    bundles: dict[str, Bundle],
    automata: dict[str, Compiled],
    kind: str,
    name: str,
    changes: dict[str, Any],
    is_greedy: bool,
    room: int,
    max_steps: int,
) -> None:
    cache, length = ("none", BLOCK) if kind == "full" else ("block", 0)
    policy = PRESETS["diffusion-gemma"].with_fields(
        changes | {"cache": cache, "block_length": length}
    )
    if is_greedy:
        policy = policy.greedy()
    check(
        denoisers[kind],
        bundles[kind],
        automata[name],
        EXPRESSIONS[name],
        policy,
        room=room,
        max_steps=max_steps,
    )


def greedy(denoiser: Denoiser, automaton: Automaton, room: int) -> list[int]:
    """Generate tokens one by one. Each token is the most likely legal one, from a full causal pass."""
    canvas, state, found = list(PROMPT), 0, list[int]()
    for left in range(automaton.shortest + room - 1, -1, -1):
        ids = torch.tensor([canvas])
        with torch.no_grad():
            hidden, _ = denoiser.hidden(ids, torch.arange(len(canvas))[None])
            logits = denoiser.project(hidden[:, -1])[0].numpy()
        logits[MASK] = -np.inf
        states = [following(automaton, state, token) for token in range(VOCAB)]
        legal = [
            token for token, to in enumerate(states) if to >= 0 and automaton.distances[to] <= left
        ]
        token = max(legal, key=lambda token: (logits[token], -token))
        canvas.append(token)
        found.append(token)
        state = states[token]
        if token in ENDS:
            return found + [ENDS[0]] * left
    return found


@settings(max_examples=90)
@given(
    kind=st.sampled_from(("draft", "causal draft")),
    name=st.sampled_from(sorted(EXPRESSIONS)),
    block_length=st.integers(1, 9),
    room=st.integers(0, 14),
    drawn=st.none()
    | st.fixed_dictionaries(
        {
            "temperature": st.sampled_from([0.3, 1.0, 4.0]),
            "top_k": st.sampled_from([0, 5]),
            "top_p": st.sampled_from([1.0, 0.7]),
            "seed": st.integers(0, 2**64 - 1),
        }
    ),
)
def test_verified_texts_are_those_of_one_legal_token_at_a_time(
    denoisers: dict[str, Denoiser],
    bundles: dict[str, Bundle],
    automata: dict[str, Compiled],
    kind: str,
    name: str,
    block_length: int,
    room: int,
    drawn: dict[str, Any] | None,
) -> None:
    given = (denoisers[kind], bundles[kind], automata[name], EXPRESSIONS[name])
    policy = PRESETS["self-speculation"].with_fields(
        {"block_length": block_length, **(drawn or {})}
    )
    found = check(*given, policy, room=room)
    if drawn is None:
        assert found == greedy(denoisers[kind], automata[name], room)
    else:
        policy = policy.with_fields({"block_length": 1})
        assert found == check(*given, policy, room=room)


@settings(max_examples=60)
@given(
    name=st.sampled_from(sorted(EXPRESSIONS)),
    commit=st.sampled_from(("threshold", "entropy_threshold")),
    threshold=st.floats(0.1, 0.9),
    entropy_bound=st.floats(0.1, 6),
    block_length=st.integers(0, 9),
    next_block=st.floats(0, 0.99),
    force_next=st.floats(0.2, 1),
    score_of=st.sampled_from(("prediction", "marginal")),
    kind_and_cache=st.sampled_from(
        (("full", "none"), ("full", "prefix"), ("after-prompt", "none"), ("after-prompt", "block"))
    ),
    stop=st.sampled_from(("eos", "none")),
    room=st.integers(0, 14),
    max_steps=st.sampled_from([0, 0, 0, 1, 3]),
)
def test_several_blocks_become_one_legal_text(
    denoisers: dict[str, Denoiser],
    bundles: dict[str, Bundle],
    automata: dict[str, Compiled],
    name: str,
    kind_and_cache: tuple[str, str],
    block_length: int,
    room: int,
    max_steps: int,
    **fields: Any,
) -> None:
    kind, cache = kind_and_cache
    length = block_length if kind == "full" else block_length // 4 * BLOCK
    check(
        denoisers[kind],
        bundles[kind],
        automata[name],
        EXPRESSIONS[name],
        Policy(cache=cache, block_length=length, **fields),
        room=room,
        max_steps=max_steps,
    )


@settings(max_examples=40)
@given(
    expression=st.sampled_from(
        ("(?:ab|ba12)é?", "(?:ab){2,5}é", "[ab]{3}|[ab]{7} c", "(?:aab)+", "x*(?:€|é)b")
    ),
    length=st.integers(1, 9),
    preset=st.sampled_from(("llada", "fast-dllm", "dream", "d3llm")),
)
def test_without_an_end_token_a_text_fills_all_masks(
    endless: Bundle, expression: str, length: int, preset: str
) -> None:
    automaton = compiled(expression, WORDS, VOCAB, ())
    table, states = by_tokens(automaton).following, {0}
    for _ in range(length):
        states = {int(to) for at in states for to in table[at] if to >= 0}
    policy = PRESETS[preset].with_fields({"block_length": 4}).as_dict()
    request: dict[str, Any] = {
        "tokens": [*PROMPT, *[MASK] * length, *PROMPT],
        "max_new_tokens": 0,
        "constraint": automaton.constraint,
    }
    if any(automaton.distances[at] == 0 for at in states):
        out = endless.generate(**request, **policy)
        found = out.tokens[len(PROMPT) : -len(PROMPT)]
        text = b"".join(WORDS.tokens[token] or b"?" for token in found)
        assert re.fullmatch(expression, text.decode())
        return
    with pytest.raises(RequestError, match="has no end token, so the text must fill all masks"):
        endless.generate(**request, **policy)
