"""Tests of constrained decoding.

The native loop generates the same tokens as the reference loop, and the constraint allows every
generated text.
"""

from __future__ import annotations

import itertools
import json
import random
import re
import threading
from typing import Any

import numpy as np
import pytest
import torch
from constrained_reference import Constrained
from constraints import Automaton, Longest, compiled, made_up_vocabulary, schema_content
from denoisers import under_native_loop
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from loops import loops
from networks import make_network
from referencing import Registry
from schemas import random_document
from test_block_cache import network_of
from test_visibility import random_denoiser, seeing

from dlm_export.network import reference
from dlm_export.network.denoiser import Denoiser
from dlm_export.network.loop_turns import Canvas, start_canvas
from dlm_runtime import (
    PRESETS,
    Bundle,
    CallbackPass,
    DenoiserInfo,
    EngineError,
    Policy,
    RequestError,
    from_callback,
)
from dlm_runtime.constraints.compiled import Constraint

VOCAB, MASK, ENDS, PROMPT, NEW = 128, 127, (7, 9), [11, 12, 13], 22
WORDS = made_up_vocabulary(VOCAB, (*ENDS, MASK, 3), Longest)
EXPRESSIONS = {
    "words": "[ab]+(?: [a-c]+)*",
    "a key": r'\{"a":(?:true|null|-?(?:0|[1-9][0-9]*))\}',
    "parts of characters": "(?:é|€|x)+",
    "counted": "(?:ab){2,5}é",
    "one of few": "ab|ba12|true",
}
LOOPS = loops("""
llada: preset=llada block_length=8
llada, one block: preset=llada block_length=0
random order: preset=llada block_length=11 score=random seed=3
entropies: preset=llada block_length=8 score=entropy
margins: preset=llada block_length=8 score=margin cache=prefix
threshold: preset=fast-dllm block_length=8 threshold=0.05
threshold, refresh: preset=fast-dllm block_length=5 threshold=0.05 refresh=6
factor: preset=fast-dllm block_length=7 commit=factor factor=1.5 cache=none
entropy bound: preset=llada commit=entropy_bound entropy_bound=9.0 block_length=8
dream: preset=dream temperature=0.0 steps=9
an end that is not reserved: preset=rnd1 steps_per_block=9
blocks go on: preset=fast-dllm block_length=6 threshold=0.05 stop=none
dream's draws: preset=dream steps=5
draws: preset=llada block_length=8 steps=6 temperature=1.3 seed=5
few drawn from: preset=fast-dllm block_length=9 threshold=0.3 temperature=2.0 top_k=3 score_of=draw
margins of draws: preset=fast-dllm commit=factor score=margin temperature=0.5 score_of=draw
marginals: preset=fast-dllm block_length=8 threshold=0.4 score_of=marginal
margins of marginals: preset=llada block_length=8 score=margin score_of=marginal temperature=0.7
entropies of marginals: preset=llada commit=entropy_bound entropy_bound=5.0 score_of=marginal
edits: preset=llada block_length=8 steps=6 remask=edit edit_threshold=0.02 edit_passes=5
edits of draws: preset=llada block_length=8 remask=edit edit_threshold=0.02 edit_passes=2 temperature=0.7 score_of=marginal
""")


def policy_of(loop: dict[str, Any]) -> Policy:
    return PRESETS[loop["preset"]].with_fields(
        {name: value for name, value in loop.items() if name not in ("preset", "steps")}
    )


def fields_of(loop: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a policy as options of a request, because the test bundles have no
    presets.
    """
    return vars(policy_of(loop)) | {"steps": loop.get("steps", 0)}


@pytest.fixture(scope="module")
def denoisers() -> dict[str, Denoiser]:
    sizes: dict[str, Any] = {"vocab_size": VOCAB, "layers": 2, "eos_token_ids": ENDS}
    return {
        f"shift {shift}": random_denoiser(make_network(shift=shift, **sizes)) for shift in (0, 1)
    }


@pytest.fixture(scope="module")
def bundles(denoisers: dict[str, Denoiser]) -> dict[str, Bundle]:
    return {name: under_native_loop(denoiser) for name, denoiser in denoisers.items()}


@pytest.fixture(scope="module")
def automata() -> dict[str, Automaton]:
    return {
        name: compiled(expression, WORDS, VOCAB, ENDS) for name, expression in EXPRESSIONS.items()
    }


def text_of(tokens: list[int]) -> bytes:
    """Return the bytes of the tokens before the first end token.

    Fails if a token after the first end token is not an end token.
    """
    end = next((i for i, token in enumerate(tokens) if token in ENDS), len(tokens))
    assert set(tokens[end:]) <= set(ENDS)
    return b"".join(WORDS.tokens[token] or b"?" for token in tokens[:end])


@pytest.mark.parametrize(
    ("family", "name", "loop"),
    [
        *(("shift 0", "words", loop) for loop in LOOPS),
        *(("shift 1", "a key", loop) for loop in LOOPS if "edits" not in loop),
        *(("shift 0", name, "few drawn from") for name in EXPRESSIONS),
    ],
)
def test_native_canvases_equal_the_reference_and_match_the_expression(
    denoisers: dict[str, Denoiser],
    bundles: dict[str, Bundle],
    automata: dict[str, Automaton],
    family: str,
    name: str,
    loop: str,
) -> None:
    fields = LOOPS[loop]
    canvas, policy = start_canvas(PROMPT, NEW, MASK), policy_of(fields)
    proposer = Constrained(MASK, ENDS[0], policy, automata[name], canvas)
    wanted = reference.fill(
        denoisers[family], canvas, policy, fields.get("steps", 0), proposer=proposer
    )
    constraint = automata[name].constraint
    out = bundles[family].generate(
        tokens=PROMPT, max_new_tokens=NEW, constraint=constraint, **fields_of(fields)
    )
    assert out.tokens == wanted.tokens
    assert out.nfe == wanted.nfe
    assert re.fullmatch(EXPRESSIONS[name].encode(), text_of(out.tokens[len(PROMPT) :]))


@pytest.mark.parametrize("name", ["sdar", "llada2", "llada2.1", "fast-dllm-v2"])
def test_block_causal_loops_equal_the_reference(automata: dict[str, Automaton], name: str) -> None:
    shift = int(name == "fast-dllm-v2")
    network = network_of(6, shift)
    denoiser = random_denoiser(network)
    bundle = under_native_loop(denoiser)
    never = (*network.eos_token_ids, network.mask_token_id)
    vocabulary = made_up_vocabulary(network.vocab_size, never, Longest)
    automaton = compiled("(?:ab|b)+(?: c)*", vocabulary, network.vocab_size, network.eos_token_ids)
    fields: dict[str, Any] = {"threshold": 0.05, "edit_threshold": 0.02} | (
        {"sub_block_length": 3} if shift else {}
    )
    policy = PRESETS[name].with_fields(fields)
    canvas = start_canvas(PROMPT, NEW, network.mask_token_id)
    proposer = Constrained(
        network.mask_token_id, network.eos_token_ids[0], policy, automaton, canvas
    )
    wanted = reference.fill(denoiser, canvas, policy, proposer=proposer)
    out = bundle.generate(
        tokens=PROMPT,
        max_new_tokens=NEW,
        constraint=automaton.constraint,
        **vars(policy),
    )
    assert (out.tokens, out.nfe) == (wanted.tokens, wanted.nfe)
    text = b"".join(
        vocabulary.tokens[token] or b""
        for token in out.tokens[len(PROMPT) :]
        if token not in network.eos_token_ids
    )
    assert re.fullmatch(b"(?:ab|b)+(?: c)*", text)


def test_given_tokens_between_masks_are_part_of_the_text(
    denoisers: dict[str, Denoiser], bundles: dict[str, Bundle], automata: dict[str, Automaton]
) -> None:
    letter = {text: token for token, text in enumerate(WORDS.tokens) if text}
    tokens = [*PROMPT, MASK, MASK, letter[b" "], MASK, MASK, MASK, letter[b"c"], MASK, 11]
    policy = policy_of(LOOPS["threshold"])
    canvas = Canvas(np.array(tokens), np.array(tokens) == MASK)
    proposer = Constrained(MASK, ENDS[0], policy, automata["words"], canvas)
    wanted = reference.fill(denoisers["shift 0"], canvas, policy, proposer=proposer)
    constraint = automata["words"].constraint
    out = bundles["shift 0"].generate(
        tokens=tokens, max_new_tokens=0, constraint=constraint, **fields_of(LOOPS["threshold"])
    )
    assert out.tokens == wanted.tokens
    assert out.tokens[5] == letter[b" "]
    assert re.fullmatch(EXPRESSIONS["words"].encode(), text_of(out.tokens[3:11]))
    tokens[4:] = [letter[b"1"], MASK]
    with pytest.raises(
        RequestError,
        match=r"^no text of the constraint matches the given tokens in positions 3\.\.5: ",
    ):
        bundles["shift 0"].generate(tokens=tokens, max_new_tokens=0, constraint=constraint)


@pytest.mark.parametrize("loop", ["random order", "threshold, refresh", "dream"])
@pytest.mark.parametrize("name", EXPRESSIONS)
def test_requests_that_end_early_are_completed_to_a_whole_text(
    denoisers: dict[str, Denoiser],
    bundles: dict[str, Bundle],
    automata: dict[str, Automaton],
    name: str,
    loop: str,
) -> None:
    constraint, policy = automata[name].constraint, policy_of(LOOPS[loop])
    for most in (1, 2, 4):
        canvas = start_canvas(PROMPT, NEW, MASK)
        proposer = Constrained(MASK, ENDS[0], policy, automata[name], canvas)
        steps = LOOPS[loop].get("steps", 0)
        wanted = reference.fill(
            denoisers["shift 0"], canvas, policy, steps, proposer=proposer, max_steps=most
        )
        request: dict[str, Any] = {
            "tokens": PROMPT,
            "max_new_tokens": NEW,
            "constraint": constraint,
            "max_steps": most,
        }
        out = bundles["shift 0"].generate(**request, **fields_of(LOOPS[loop]))
        assert (out.tokens, out.nfe) == (wanted.tokens, wanted.nfe)
        assert re.fullmatch(EXPRESSIONS[name].encode(), text_of(out.tokens[len(PROMPT) :]))


def test_what_no_pass_has_scored_becomes_the_shortest_text(
    bundles: dict[str, Bundle], automata: dict[str, Automaton]
) -> None:
    cancel = threading.Event()
    cancel.set()
    for name, automaton in automata.items():
        out = bundles["shift 0"].generate(
            tokens=PROMPT,
            max_new_tokens=NEW,
            constraint=automaton.constraint,
            cancel=cancel,
        )
        assert (out.finish, out.nfe) == ("cancelled", 0)
        generated = out.tokens[len(PROMPT) :]
        assert generated.index(ENDS[0]) == automaton.shortest
        assert re.fullmatch(EXPRESSIONS[name].encode(), text_of(generated))


def test_given_tokens_behind_stay_part_of_a_text_that_is_completed(
    bundles: dict[str, Bundle], automata: dict[str, Automaton]
) -> None:
    letter = {text: token for token, text in enumerate(WORDS.tokens) if text}
    tokens = [*PROMPT, *[MASK] * 9, letter[b"x"], MASK]
    out = bundles["shift 0"].generate(
        tokens=tokens,
        max_new_tokens=0,
        constraint=automata["parts of characters"].constraint,
        max_steps=1,
    )
    assert out.finish == "steps"
    assert out.tokens[12] == letter[b"x"]
    assert re.fullmatch(EXPRESSIONS["parts of characters"].encode(), text_of(out.tokens[3:]))


def test_a_budget_below_the_shortest_text_is_refused_with_what_it_needs(
    bundles: dict[str, Bundle], automata: dict[str, Automaton]
) -> None:
    constraint = automata["counted"].constraint
    assert constraint.shortest == 3
    message = r"^the shortest text of the constraint has 3 tokens, but there is room for 2: raise max_new_tokens$"
    with pytest.raises(RequestError, match=message):
        bundles["shift 0"].generate(tokens=PROMPT, max_new_tokens=2, constraint=constraint)
    with pytest.raises(RequestError, match="has 3 tokens, but there is room for 0"):
        bundles["shift 0"].generate(tokens=PROMPT, max_new_tokens=0, constraint=constraint)
    out = bundles["shift 0"].generate(tokens=PROMPT, max_new_tokens=3, constraint=constraint)
    assert text_of(out.tokens[len(PROMPT) :]) == "ababé".encode()
    assert out.nfe == 0, "there is one text of three tokens"
    assert out.finish == "constraint", "it is whole, though no end token has room"


# ---- Large vocabularies: the best token of a large class is searched among the row's best tokens
# ----

SPELLED = [
    "".join(letters)
    for length in range(1, 9)
    for letters in itertools.product("abc", repeat=length)
]
LARGE_MASK, LARGE_END, LEAST, MOST, PLACES = 13, 6100, 9, 44, 8
RULED_OUT = 3000  # number of extra tokens in the vocabulary that the constraint never allows


@pytest.fixture(scope="module")
def large() -> tuple[list[str], Constraint]:
    """Return the text of each token ("" for a token without text), and a constraint that allows all
    texts of ``LEAST`` to ``MOST`` letters from a to c.
    """
    words = [*SPELLED, *(f"d{word}" for word in SPELLED[:RULED_OUT])]
    order = iter(np.random.default_rng(11).permutation(len(words)))
    spelled = [
        "" if token in (LARGE_MASK, LARGE_END) else words[next(order)]
        for token in range(len(words) + 2)
    ]
    vocabulary = Longest(tuple(text.encode() or None for text in spelled))
    automaton = compiled(f"[abc]{{{LEAST},{MOST}}}", vocabulary, len(spelled), (LARGE_END,))
    return spelled, automaton.constraint


def heaviest(spelled: list[str], weights: np.ndarray) -> list[int]:
    """Return the tokens of the text whose token weights have the largest sum.

    ``weights`` is float64 ``[N, V]``. Among texts with equal sums, the text with the lowest ids is
    returned.
    """
    lengths = np.array([0 if not text or text[0] == "d" else len(text) for text in spelled])
    by_length = [np.flatnonzero(lengths == length) for length in range(9)]
    ended = MOST + 1  # the state after an end token; state n is the state after n letters
    ahead = dict.fromkeys(range(LEAST, ended + 1), 0.0)
    steps = list[
        dict[int, tuple[float, int, int]]
        # for each position, last one first, and each state: the best sum of weights, its token and
        # the next state
    ]()
    for row in weights[::-1]:
        best = [
            int(tokens[row[tokens].argmax()]) if length else -1
            for length, tokens in enumerate(by_length)
        ]
        found = dict[int, tuple[float, int, int]]()
        for state in range(ended + 1):
            ways = [
                (state + length, best[length])
                for length in range(1, 9)
                if state + length <= MOST < ended != state
            ]
            ways += [(ended, LARGE_END)] if state >= LEAST else []
            sums = [(ahead[to] + row[token], -token, to) for to, token in ways if to in ahead]
            if sums:
                weight, token, to = max(sums)
                found[state] = weight, -token, to
        steps.append(found)
        ahead = {state: weight for state, (weight, _, _) in found.items()}
    text, state = list[int](), 0
    for found in reversed(steps):
        _, token, state = found[state]
        text.append(token)
    return text


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**32 - 1),
    spread=st.sampled_from([0.0, 0.6, 3.0]),
    hidden=st.sampled_from([0, 60, 12_000]),
)
def test_the_most_likely_text_over_a_large_vocabulary(
    large: tuple[list[str], Constraint], seed: int, spread: float, hidden: int
) -> None:
    spelled, constraint = large
    source = np.random.default_rng(seed)
    # Rounding makes many weights equal, so that ties are tested.
    logits = np.round(source.normal(0, spread, (PLACES, len(spelled)))).astype(np.float32)
    logits[source.random(logits.shape) < 0.001] += 9
    for row in logits:
        row[source.permutation(len(spelled))[:hidden]] = -np.inf
        row[LARGE_MASK], row[-1] = -np.inf, max(row[-1], 0)
    best = np.argsort(-logits, axis=1, kind="stable")[:, :2]

    def run(p: CallbackPass) -> None:
        p.top_tokens[:], p.top_probs[:] = best, [0.5, 0.25]
        if p.logits is not None:
            p.logits[:] = logits

    bundle = from_callback(DenoiserInfo(len(spelled), LARGE_MASK, 64, (LARGE_END,)), run)
    out = bundle.generate(
        tokens=[1],
        max_new_tokens=PLACES,
        constraint=constraint,
        block_length=PLACES,
        steps_per_block=1,
        stop="none",
    )
    wide = logits.astype(np.float64)
    # The logits are whole numbers, so sums of weights are exact.
    weights = np.where(np.isinf(wide), -(2.0**30), wide - wide.max(axis=1, keepdims=True))
    assert out.tokens[1:] == heaviest(spelled, weights)


def test_constraints_of_other_bundles_are_refused(bundles: dict[str, Bundle]) -> None:
    bundle = bundles["shift 0"]
    other = compiled("a", WORDS, VOCAB + 1, ENDS).constraint
    with pytest.raises(RequestError, match="a vocabulary of 129 tokens, but the denoiser has 128"):
        bundle.generate(tokens=PROMPT, max_new_tokens=NEW, constraint=other)


def test_what_is_forced_is_decided_before_the_first_pass(bundles: dict[str, Bundle]) -> None:
    expression = schema_content(
        {"type": "object", "properties": {"ab12": {"type": "boolean"}}, "required": ["ab12"]}
    )
    constraint = compiled(expression, WORDS, VOCAB, ENDS).constraint
    events = list(
        bundles["shift 0"].stream(
            tokens=PROMPT, max_new_tokens=NEW, constraint=constraint, block_length=8
        )
    )
    key = [WORDS.tokens.index(text) for text in (b'{"', b"ab", b"12", b'":')]
    assert events[0].canvas[3:7] == key, "as the tokenizer writes it"
    assert len(events) == events[-1].nfe <= 8
    assert events[-1].result is not None
    assert events[-1].result.finish == "stop"
    assert json.loads(text_of(events[-1].canvas[3:])) in ({"ab12": True}, {"ab12": False})


@pytest.mark.parametrize("loop", ["threshold", "draws", "few drawn from"])
def test_requests_of_a_batch_are_constrained_alike(
    bundles: dict[str, Bundle], automata: dict[str, Automaton], loop: str
) -> None:
    bundle, constraint = bundles["shift 0"], automata["words"].constraint
    given: dict[str, Any] = {
        "max_new_tokens": NEW,
        "constraint": constraint,
        **fields_of(LOOPS[loop]),
    }
    prompts = [PROMPT, [21, 22, 23], [40, 41, 42]]
    together = bundle.generate_batch(tokens=prompts, **given)
    assert [out.tokens for out in together] == [
        bundle.generate(tokens=tokens, **given).tokens for tokens in prompts
    ]
    assert bundle.generate(tokens=PROMPT, max_new_tokens=NEW).tokens != together[0].tokens, (
        "the next request is free again"
    )


# ---- Extreme logits and temperatures ----

TEMPERATURES = (5e-324, 1e-300, 1e-100, 1e-28, 1e-20, 1e-16, 1e-8, 1e-3, 0.7, 1e3, 1e38, 1e300)


def says(logits: np.ndarray) -> Bundle:
    """Return a bundle whose denoiser always predicts the logits ``[L, V]``: row i for position i.

    The denoiser's probabilities are finite, even for extreme logits.
    """
    masked = logits.copy()
    masked[:, MASK] = -np.inf
    best = np.argsort(-masked, axis=1, kind="stable")[:, :2]

    def run(p: CallbackPass) -> None:
        at = p.position_ids[p.score_rows]
        p.top_tokens[:], p.top_probs[:] = best[at], [0.5, 0.25]
        if p.entropy is not None:
            p.entropy[:] = -1
        if p.logits is not None:
            p.logits[:] = logits[at]

    return from_callback(DenoiserInfo(logits.shape[1], MASK, len(logits), ENDS), run)


def in_one_pass(bundle: Bundle, length: int, automaton: Automaton, **fields: Any) -> list[int]:
    """Decide a text in a single pass, and return its tokens."""
    constraint = automaton.constraint
    given = {"block_length": length, "steps_per_block": 1, "stop": "none"} | fields
    return bundle.generate(tokens=[], max_new_tokens=length, constraint=constraint, **given).tokens


@pytest.mark.parametrize("scale", [1.0, 1e13, 1e37])
def test_draws_keep_to_the_constraint_at_every_temperature(scale: float) -> None:
    expression, length = "[a-z0-9]{40,60}", 64
    automaton = compiled(expression, WORDS, VOCAB, ENDS)
    source = np.random.default_rng(3)
    bundle = says((source.normal(0, 3, (length, VOCAB)) * scale).astype(np.float32))
    for temperature in TEMPERATURES:
        for cut in ({}, {"top_p": 0.9}, {"top_k": 3}):
            out = in_one_pass(bundle, length, automaton, temperature=temperature, seed=4, **cut)
            assert re.fullmatch(expression.encode(), text_of(out))


@pytest.mark.parametrize("logit", [np.nan, np.inf])
def test_rows_that_are_not_numbers_end_the_request(logit: float) -> None:
    automaton = compiled("[a-z]{4}", WORDS, VOCAB, ENDS)
    for token in (WORDS.tokens.index(b"x"), WORDS.tokens.index(b"~")):
        logits = np.zeros((4, VOCAB), np.float32)
        logits[2, token] = logit
        logits[:, MASK] = np.nan  # the loop must never use this logit
        bundle = says(logits)
        for fields in ({}, {"temperature": 0.5}, {"score_of": "marginal"}):
            with pytest.raises(
                EngineError, match=r"the denoiser's prediction at position 2 is not finite"
            ):
                in_one_pass(bundle, 4, automaton, **fields)


@pytest.mark.parametrize("temperature", [-1.0, float("nan"), float("inf"), -1e-300])
def test_temperatures_that_are_none_are_refused(temperature: float) -> None:
    bundle = says(np.zeros((4, VOCAB), np.float32))
    with pytest.raises(
        RequestError, match=r"^policy: temperature = -?(1|nan|inf|1e-300) is outside 0\.\.1e\+300$"
    ):
        bundle.generate(tokens=[], max_new_tokens=4, temperature=temperature)


def extreme_logits(source: np.random.Generator, length: int) -> np.ndarray:
    """Return random float32 logits ``[length, V]`` of one of several extreme kinds."""
    kind, size = source.integers(4), (length, VOCAB)
    values = np.array(
        [-np.inf, np.finfo(np.float32).min, -3e38, -1e12, -20, 0, 1, 20, 3e38, 1e-45], np.float32
    )
    found: np.ndarray = (
        source.choice(values, size) if kind == 0 else source.normal(0, 4, size).astype(np.float32)
    )
    if kind == 1:
        found[source.random(size) < 0.7] = -np.inf
    elif kind == 2:
        found = np.round(found)
    return found


@pytest.mark.parametrize(
    "loop",
    ["llada, one block", "draws", "few drawn from", "margins of draws", "entropies of marginals"],
)
def test_extreme_logits_come_to_the_same_canvas_as_in_the_reference(
    automata: dict[str, Automaton], loop: str
) -> None:
    source, policy = np.random.default_rng(8), policy_of(LOOPS[loop])
    for temperature in (1e-300, 1e-16, 0.01, 1e300) if policy.select == "sample" else (0.0,):
        policy = policy.with_fields(
            {"temperature": temperature, "commit": "static", "block_length": 0, "cache": "none"}
        )
        for automaton in automata.values():
            logits = extreme_logits(source, NEW)
            logits[:, MASK] = -np.inf
            canvas = start_canvas([], NEW, MASK)
            proposer = Constrained(MASK, ENDS[0], policy, automaton, canvas)
            run = reference.Run(
                make_network(vocab_size=VOCAB, eos_token_ids=ENDS), canvas, policy, 1, proposer
            )
            while run.advance() is not None:
                run.commit(torch.from_numpy(logits)[run.rows])
            constraint = automaton.constraint
            out = says(logits).generate(
                tokens=[], max_new_tokens=NEW, constraint=constraint, steps=1, **vars(policy)
            )
            assert out.tokens == run.tokens.tolist()


# ---- Worst cases: random networks ----

UNTAUGHT: tuple[dict[str, Any], ...] = (
    {"commit": "threshold", "threshold": 0.3, "cache": "dual"},
    {"commit": "factor", "factor": 2.0, "cache": "prefix", "refresh": 8, "score_of": "marginal"},
    {
        "commit": "static",
        "steps_per_block": 3,
        "temperature": 0.9,
        "top_p": 0.9,
        "score_of": "draw",
    },
    {"commit": "static", "steps_per_block": 4, "max_steps": 2, "cache": "dual"},
)


def check_schemas(count: int) -> None:
    """Check requests with random schemas on random networks of three kinds: full attention, full
    attention with shift 1, and block-causal attention.
    """
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "layers": 2,
        "eos_token_ids": ENDS,
        "max_canvas_length": 1024,
    }
    networks = [make_network(shift=shift, **sizes) for shift in (0, 1)]
    networks.append(seeing(make_network(**sizes), [("block", 8)] * 2))
    bundles = [under_native_loop(random_denoiser(network)) for network in networks]
    source = random.Random(23)
    for number in range(count):
        wanted, bundle = random_document(source), bundles[number % len(bundles)]
        automaton = compiled(schema_content(wanted), WORDS, VOCAB, ENDS)
        room = automaton.shortest + source.choice((0, 1, 5, 30))
        fields = {"block_length": max(8, -(-room // 24) * 8)} | source.choice(UNTAUGHT)
        if bundle.visible_block is not None:
            fields |= {"cache": "block", "refresh": 0}
        out = bundle.generate(
            tokens=PROMPT,
            max_new_tokens=room,
            constraint=automaton.constraint,
            seed=number,
            **fields,
        )
        value = json.loads(text_of(out.tokens[len(PROMPT) :]))
        Draft202012Validator(
            wanted, format_checker=Draft202012Validator.FORMAT_CHECKER, registry=Registry()
        ).validate(value)


def test_random_schemas_are_kept_by_networks_of_random_weights() -> None:
    check_schemas(9)


@pytest.mark.slow
def test_many_random_schemas_are_kept_by_networks_of_random_weights() -> None:
    check_schemas(200)
