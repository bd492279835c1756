"""Tests of DreamOn, whose expand and delete tokens change the length of a canvas.

The published loop was written again from generation_utils.py of the release DreamOn-v0-7B, which
github.com/DreamLM/DreamOn (commit 8a0a549) describes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import dream_config, write_checkpoint
from constraints import compiled, made_up_vocabulary
from denoisers import load, under_native_loop
from hypothesis import given, settings
from hypothesis import strategies as st
from published import random_network
from test_infill import Letters
from torch import Tensor

import dlm_runtime
from dlm_export import families
from dlm_export.build import BuildOptions, QuantiseOptions, build
from dlm_export.checkpoints.folder import Checkpoint, CheckpointError
from dlm_export.families.base import Overrides
from dlm_export.judging.accuracy.effort import Effort
from dlm_export.judging.parity.ties import Decided, find_divergence
from dlm_export.network import reference
from dlm_export.network.denoiser import Denoiser
from dlm_export.network.loop_turns import Canvas
from dlm_export.quantising.samples import CalibrationOptions
from dlm_runtime import Bundle, BundleError, CallbackPass, DenoiserInfo, Policy, RequestError
from dlm_runtime.presets import PRESETS

# A small vocabulary, so that random networks often predict the two tokens.
VOCABULARY, DELETE, EXPAND, MASK = 12, 9, 10, 11
GREEDY = PRESETS["dreamon"].with_fields({"temperature": 0.0})


def network_of(seed: int, delete: int = DELETE, shift: int = 1) -> Denoiser:
    return random_network(
        0,
        shift,
        seed,
        vocab_size=VOCABULARY,
        mask_token_id=MASK,
        eos_token_ids=(DELETE,),
        expand_token_id=EXPAND,
        delete_token_id=delete,
        max_canvas_length=64,
    )


def canvas_of(seed: int, prefix: int, masks: int, suffix: int) -> list[int]:
    text = np.random.RandomState(seed).randint(0, DELETE, prefix + suffix).tolist()
    return [*text[:prefix], *[MASK] * masks, *text[prefix:]]


def start_of(tokens: list[int]) -> Canvas:
    return Canvas(np.array(tokens), np.array(tokens) == MASK)


def the_authors_loop(
    logits_of: Callable[[list[int]], Tensor], tokens: list[int], longest: int
) -> list[list[int]]:
    """Return the canvas after each pass of the published loop, at temperature 0.

    It never predicts the mask token. The published loop may do so, and then repeats the pass.
    """
    canvases, budget = [], 2 * (longest - tokens.index(MASK))
    while MASK in tokens:
        rows = logits_of(tokens)
        shifted = torch.cat([rows[:1], rows[:-1]])
        masks = [at for at, token in enumerate(tokens) if token == MASK]
        logits = shifted[masks]
        logits[:, MASK] = -torch.inf
        if len(tokens) == longest or budget == 0:
            logits[:, EXPAND] -= 1e9
        probs = logits.softmax(-1)
        surest = int((probs * (probs + 1e-10).log()).sum(-1).argmax())
        at, token = masks[surest], int(probs[surest].argmax())
        written = {DELETE: [], EXPAND: [MASK, MASK]}.get(token, [token])
        budget -= token == EXPAND
        tokens = [*tokens[:at], *written, *tokens[at + 1 :]]
        canvases.append(tokens)
    return canvases


@torch.no_grad()
def test_the_preset_equals_the_authors_loop() -> None:
    expanded = deleted = full = 0
    for seed in range(30):
        tokens, denoiser = canvas_of(seed, 5, 3 + seed % 3, 4), network_of(seed)
        longest = len(tokens) + seed % 5

        def logits_of(canvas: list[int], denoiser: Denoiser = denoiser) -> Tensor:
            ids = torch.tensor(canvas)[None]
            features, _ = denoiser.hidden(ids, torch.arange(len(canvas))[None])
            return denoiser.project(features[0])

        wanted, found = the_authors_loop(logits_of, tokens, longest), list[list[int]]()
        done = reference.fill(
            denoiser,
            start_of(tokens),
            GREEDY,
            longest=longest,
            on_step=lambda canvas, found=found: found.append(canvas.tokens.tolist()),
        )
        assert found == wanted, seed
        assert (done.tokens, done.nfe) == (wanted[-1], len(wanted))
        lengths = [len(tokens), *map(len, wanted)]
        steps = np.diff(lengths)
        expanded, deleted = expanded + (steps > 0).sum(), deleted + (steps < 0).sum()
        full += lengths.count(longest)
    assert min(expanded, deleted, full) > 20


policies = st.one_of(
    st.just(PRESETS["dreamon"]),
    st.just(GREEDY),
    st.builds(
        Policy,
        commit=st.sampled_from(("threshold", "dynamic", "factor")),
        threshold=st.floats(0.1, 0.9),
        steps_per_block=st.integers(0, 5),
    ),
    st.builds(
        Policy,
        commit=st.sampled_from(("static", "timestep", "sequential", "entropy_bound")),
        score=st.sampled_from(("entropy", "margin", "random")),
        schedule=st.sampled_from(("masked", "block", "floor")),
        steps_per_block=st.integers(1, 5),
        entropy_bound=st.floats(0.5, 6),
    ),
)
sampling = st.fixed_dictionaries(
    {
        "select": st.just("sample"),
        "temperature": st.floats(0.2, 2),
        "top_p": st.floats(0.5, 1),
        "score_of": st.sampled_from(("prediction", "draw")),
        "seed": st.integers(0, 9),
    }
)


def compare(
    denoiser: Denoiser, policy: Policy, tokens: list[int], room: int, max_steps: int = 0
) -> list[int]:
    """Check that the native loop equals the reference. Returns the canvas's length after each pass."""
    after = list[Canvas]()
    wanted = reference.fill(
        denoiser,
        start_of(tokens),
        policy,
        longest=len(tokens) + room,
        max_steps=max_steps,
        on_step=after.append,
    )
    with under_native_loop(denoiser) as bundle:
        events = list(
            bundle.stream(
                tokens=tokens, max_new_tokens=room, max_steps=max_steps, **policy.as_dict()
            )
        )
    out = events[-1].result
    assert out is not None
    assert (out.tokens, out.nfe) == (wanted.tokens, wanted.nfe)
    for event, canvas in zip(events, after, strict=False):
        if not event.done:
            assert list(event.canvas) == canvas.tokens.tolist()
            assert list(event.undecided) == canvas.undecided.tolist()
    lengths = [len(tokens), *(len(canvas.tokens) for canvas in after)]
    assert max(lengths) <= len(tokens) + room
    assert len(out.log_probs) == len(out.undecided) == len(out.tokens)
    committed = [token for token, p in zip(out.tokens, out.log_probs, strict=True) if p is not None]
    resizing = {EXPAND, denoiser.network.delete_token_id, MASK}
    assert not resizing.intersection(committed)
    assert out.prompt_tokens == len(tokens) - tokens.count(MASK)
    return lengths


@settings(max_examples=100)
@given(
    policy=policies,
    sampled=st.just({}) | sampling,
    gaps=st.sets(st.integers(0, 13), min_size=1, max_size=7),
    room=st.integers(0, 6),
    delete=st.sampled_from((DELETE, 3)),
    shift=st.integers(0, 1),
    max_steps=st.sampled_from((0, 0, 3)),
    seed=st.integers(0, 9),
)
def test_the_native_loop_equals_the_reference(
    policy: Policy,
    sampled: dict[str, Any],
    gaps: set[int],
    room: int,
    delete: int,
    shift: int,
    max_steps: int,
    seed: int,
) -> None:
    policy = policy.with_fields({**sampled, "block_length": 0, "stop": "none"})
    tokens = [MASK if at in gaps else (0, 1, 2, 4, 5, 6, 7, 8)[at % 8] for at in range(14)]
    compare(network_of(seed, delete, shift), policy, tokens, room, max_steps)


@pytest.mark.parametrize("schedule", ["masked", "block"])
def test_the_native_loop_equals_the_reference_if_passes_commit_several_tokens(
    schedule: str,
) -> None:
    policy = Policy(
        score="margin",
        schedule=schedule,
        steps_per_block={"masked": 2, "block": 6}[schedule],
        block_length=0,
        stop="none",
    )
    steps = [
        np.diff(compare(network_of(seed), policy, canvas_of(seed, 2, 7, 3), 1 + seed % 4))
        for seed in range(50)
    ]
    changes = np.concatenate(steps)
    assert (changes > 0).sum() > 5
    assert (changes < 0).sum() > 5
    assert (abs(changes) > 1).sum() > 5


# ---- A denoiser that follows a script ----

LETTERS_MASK, LETTERS_EXPAND, LETTERS_END = 299, 297, 298


def scripted(predict: Callable[[list[int], int], Sequence[int]], **changes: Any) -> Bundle:
    """Return a bundle with a tokenizer of letters. Its denoiser calls ``predict``.

    ``predict`` receives a canvas and a position, and returns tokens, the most likely one first.
    """
    info = {
        "eos_token_ids": (LETTERS_END,),
        "expand_token_id": LETTERS_EXPAND,
        "delete_token_id": LETTERS_END,
        "max_new_tokens": 20,
    } | changes

    def run(p: CallbackPass) -> None:
        for i, row in enumerate(p.score_rows):
            logits = np.full(300, -20.0, np.float32)
            best = predict(p.input_ids.tolist(), int(p.position_ids[row]))
            for rank, token in enumerate(best):
                logits[token] = 5.0 - 3 * rank
            order = np.argsort(-logits, kind="stable")[:2]
            probs = np.exp(logits) / np.exp(logits).sum()
            p.top_tokens[i], p.top_probs[i] = order, probs[order]
            if p.logits is not None:
                p.logits[i] = logits
            if p.entropy is not None:
                p.entropy[i] = (probs * np.log(probs + 1e-10)).sum()

    bundle = dlm_runtime.from_callback(
        DenoiserInfo(300, LETTERS_MASK, 64, **info), run, policy=GREEDY
    )
    bundle._tokenizer = Letters()  # type: ignore[assignment]
    return bundle


def spelling(word: str) -> Callable[[list[int], int], Sequence[int]]:
    """Predict a word after the first "(", and the tokens that make room for exactly this word."""

    def predict(canvas: list[int], at: int) -> Sequence[int]:
        first, end = canvas.index(ord("(")) + 1, canvas.index(ord(")"))
        if end - first < len(word):
            return LETTERS_EXPAND, ord("x")
        if end - first > len(word):
            return LETTERS_END, ord("y")
        return (ord(word[at - first]),)

    return predict


@pytest.mark.parametrize("length", [1, 4, 6, 12])
def test_infilling_finds_the_length_of_the_hole(length: int) -> None:
    with scripted(spelling("length")) as bundle:
        assert bundle.resizes
        done = bundle.infill("f(<mask>) = y", lengths=length)
        assert (done.text, done.holes, done.lengths) == ("f(length) = y", ["length"], (6,))
        assert done.generation.nfe == 6 + abs(6 - length)
        assert done.log_prob is not None
        assert done.generation.text == done.text
        short = bundle.infill("f(<mask>) = y", lengths=2, max_new_tokens=1)
    assert short.text == "f(xxx) = y"  # there is no room for more


def test_tries_of_several_lengths_share_a_batch() -> None:
    with scripted(spelling("length")) as bundle:
        found = bundle.generate_batch(
            tokens=[
                [1, *b"f(", *[LETTERS_MASK] * count, *b")=y"[: 3 - count % 2]]
                for count in (1, 4, 9)
            ],
            max_new_tokens=9,
        )
        assert bundle.infill("(<mask>)", lengths=[[2, 9]]).text == "(length)"
    wanted = ["f(length)=", "f(length)=y", "f(length)="]
    assert ["".join(map(chr, one.tokens[1:])) for one in found] == wanted


def test_a_denoiser_that_never_stops_expanding_ends() -> None:
    """Whenever there is room, it expands. Otherwise, it deletes."""
    tokens, room = [1, LETTERS_MASK, 2], 1
    with scripted(lambda *_: (LETTERS_EXPAND, LETTERS_END)) as bundle:
        done = bundle.generate(tokens=tokens, max_new_tokens=room)
        assert done.tokens == [1, 2]
        assert done.nfe == 1 + 2 * (2 * 3)  # the authors allow 2 * 3 expansions
        whole = bundle.generate(tokens=[LETTERS_MASK], max_new_tokens=0)
    assert (whole.tokens, whole.nfe) == ([], 1)


def test_a_request_that_stops_early_keeps_only_text() -> None:
    with scripted(spelling("length")) as bundle:
        done = bundle.generate(
            tokens=[*b"(", *[LETTERS_MASK] * 2, *b")"], max_new_tokens=9, max_steps=3
        )
        assert (done.tokens, done.finish) == (list(b"()"), "steps")
        done = bundle.generate(
            tokens=[*b"(", *[LETTERS_MASK] * 6, *b")"], max_new_tokens=9, max_steps=3
        )
    assert done.tokens == list(b"(length)")
    assert sum(done.undecided) == 3


def test_text_after_a_prompt_may_become_shorter() -> None:
    with scripted(lambda canvas, at: (LETTERS_END if at > 4 else 97 + at,)) as bundle:
        done = bundle.generate(prompt="ab", max_new_tokens=6)
    assert (done.text, len(done.tokens)) == ("de", 5)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"cache": "dual"}, 'this cache .* use cache = "none"'),
        ({"block_length": 4}, "block_length above 0 .* use block_length = 0"),
        ({"next_block": 0.5, "commit": "entropy_threshold"}, "next_block below 1"),
        ({"remask": "edit"}, 'this remask .* use remask = "none"'),
        ({"stop": "early-eos"}, 'stop = "early-eos" does not suit'),
        ({"reserve": "end"}, "a reserved end"),
        ({"cfg_scale": 1.0}, "guidance .*changes the length of canvases: use cfg_scale = 0"),
    ],
)
def test_what_cannot_be_combined_is_refused(fields: dict[str, Any], says: str) -> None:
    with (
        scripted(spelling("length"), has_cache=True) as bundle,
        pytest.raises(RequestError, match=says),
    ):
        bundle.generate(tokens=[*b"(", LETTERS_MASK, *b")"], max_new_tokens=4, **fields)


def test_a_constraint_is_refused() -> None:
    special = (LETTERS_EXPAND, LETTERS_END, LETTERS_MASK)
    automaton = compiled("[a-z]+", made_up_vocabulary(300, special), 300, (LETTERS_END,))
    with (
        scripted(spelling("length")) as bundle,
        pytest.raises(RequestError, match="a constraint does not suit this denoiser"),
    ):
        bundle.generate(tokens=[3, LETTERS_MASK, 4], constraint=automaton.constraint)


def test_two_holes_are_refused() -> None:
    with scripted(spelling("length")) as bundle:
        with pytest.raises(RequestError, match="the text has 2: fill them one after the other"):
            bundle.infill("(<mask>) <mask>")
        with pytest.raises(RequestError, match="new_tokens is for text after a prompt"):
            bundle.infill("(<mask>)", new_tokens=4)


@pytest.mark.parametrize(
    ("info", "says"),
    [
        ({"expand_token_id": None}, r"expand_token_id = -1 is outside 0\.\.299"),
        ({"delete_token_id": 300}, r"delete_token_id = 300 is outside 0\.\.299"),
        ({"delete_token_id": LETTERS_EXPAND}, "must differ from delete_token_id"),
        ({"expand_token_id": LETTERS_MASK}, "neither may be the mask token"),
        ({"visible_block": 4}, "needs full attention"),
    ],
)
def test_descriptions_of_other_denoisers_are_refused(info: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        scripted(spelling("length"), **info)


# ---- Checkpoints and bundles ----


def dreamon_config(**changes: Any) -> dict[str, Any]:
    """The config.json of a tiny DreamOn, whose delete token is the end token, as in DreamOn-v0-7B."""
    small = {"vocab_size": 24, "mask_token_id": 20, "eos_token_id": 22, "pad_token_id": 22}
    return dream_config(**small | {"expand_token_id": 21} | changes)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("dreamon"), dreamon_config())


@pytest.fixture(scope="module")
def bundle(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundle") / "dreamon"
    built = build(checkpoint, folder)
    assert built.parity is not None
    assert not built.parity.misses
    return folder


def test_a_bundle_equals_the_reference(checkpoint: Path, bundle: Path) -> None:
    denoiser, changes = load(checkpoint), np.zeros(2, int)
    tokens = [[seed % 19, 3, *[20] * (2 + seed % 3), 5, seed % 7, 22] for seed in range(12)]
    with dlm_runtime.open(bundle, threads=1) as opened:
        assert list(opened.manifest["loop"]["presets"]) == ["dreamon"]
        for given_tokens in tokens:
            wanted = reference.fill(
                denoiser,
                Canvas(np.array(given_tokens), np.array(given_tokens) == 20),
                PRESETS["dreamon"],
                longest=len(given_tokens) + 5,
            )
            done = opened.generate(tokens=given_tokens, max_new_tokens=5)
            assert (done.tokens, done.nfe) == (wanted.tokens, wanted.nfe)
            change = len(wanted.tokens) - len(given_tokens)
            changes += [change > 0, change < 0]
        alone = [opened.generate(tokens=each, max_new_tokens=5).tokens for each in tokens]
        batch = opened.generate_batch(tokens=tokens, max_new_tokens=5, max_batch=4)
    assert [one.tokens for one in batch] == alone
    assert (changes > 0).all()


def test_a_quantised_build_is_calibrated_and_judged(checkpoint: Path, tmp_path: Path) -> None:
    few = CalibrationOptions(samples=8, states_per_sample=4)
    quantise = QuantiseOptions(few, effort=Effort("default", judged=3))
    report = build(checkpoint, tmp_path / "int8", BuildOptions(("cpu",), "int8", quantise=quantise))
    assert report.judgement is not None
    assert report.judgement.frontier is not None
    assert 0 < report.judgement.overall["kl_mean"] < 0.5


def test_a_pass_that_decides_differently_is_found_and_ties_are_known() -> None:
    """A bundle expands where the reference deletes, or the other way round."""
    tokens, found = canvas_of(1, 3, 3, 2), set[tuple[bool, bool]]()
    for seed in range(12):
        denoiser, passes = network_of(seed), list[Decided]()
        after = list[Canvas]()
        reference.fill(
            denoiser,
            start_of(tokens),
            GREEDY,
            longest=20,
            on_step=after.append,
            on_pass=lambda turn, made, logits, passes=passes: passes.append(
                Decided(turn, made, logits.numpy())
            ),
        )
        assert find_divergence(passes, after, GREEDY, (EXPAND, DELETE)) is None
        for number, each in enumerate(passes):
            best = int(each.proposals.scores.argmax())
            token, at = each.proposals.tokens[best], int(each.turn.positions[best])
            before = np.isin(np.arange(each.turn.span.last), each.turn.positions)
            if token not in (EXPAND, DELETE):
                continue
            is_expanded = token == EXPAND
            open_now = np.delete(before, at) if is_expanded else np.insert(before, at, True)
            other = Canvas(np.where(open_now, MASK, 0), open_now)
            divergence = find_divergence(
                passes[: number + 1], [*after[:number], other], GREEDY, (EXPAND, DELETE)
            )
            assert divergence is not None
            assert divergence.number == number + 1
            behind = each.logits[best, token] - each.logits[best, EXPAND + DELETE - token]
            assert divergence.needed >= behind / 2 or len(each.turn.positions) > 1
            found.add((is_expanded, np.isfinite(divergence.needed)))
    assert {(True, True), (False, True)} <= found


@pytest.mark.parametrize(
    ("config", "generation", "found"),
    [
        ({}, {}, (21, 22)),
        ({"delete_token_id": 19}, {}, (21, 19)),
        ({"expand_token_id": None}, {"expand_token_id": 18}, (18, 22)),
        ({}, {"expand_token_id": 18, "delete_token_id": 17}, (21, 17)),
        ({"expand_token_id": None}, {}, (None, None)),
    ],
)
def test_the_tokens_are_read_from_the_checkpoint(
    config: dict[str, Any], generation: dict[str, Any], found: tuple[Any, Any], tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, dreamon_config(**config))
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    network = families.read_network(Checkpoint(tmp_path), Overrides())
    assert (network.expand_token_id, network.delete_token_id) == found
    wanted = "dream-block" if found[0] is None else "dreamon"
    assert families.FAMILIES[network.family].preset_for(network) == wanted
    assert ("dreamon" in network.presets()) == (wanted == "dreamon")


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"expand_token_id": 24}, r"expand_token_id 24 is outside the vocabulary \(0\.\.23\)"),
        ({"expand_token_id": None, "delete_token_id": 3}, "expand_token_id None is outside"),
        ({"eos_token_id": None}, "delete_token_id None is outside"),
        (
            {"expand_token_id": 22},
            "expand_token_id 22, delete_token_id 22, mask_token_id 20 must be different",
        ),
    ],
)
def test_wrong_tokens_are_refused(config: dict[str, Any], says: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, dreamon_config(**config))
    with pytest.raises(CheckpointError, match=says):
        families.read_network(Checkpoint(tmp_path), Overrides())


@pytest.mark.parametrize(
    ("loop", "says"),
    [
        ({"delete_token_id": None}, "delete_token_id"),
        ({"expand_token_id": 20}, "must differ from delete_token_id, and neither may be the mask"),
        ({"expand_token_id": 24}, "expand_token_id"),
    ],
)
def test_damaged_manifests_are_refused(
    bundle: Path, loop: dict[str, Any], says: str, tmp_path: Path
) -> None:
    for file in bundle.iterdir():
        (tmp_path / file.name).symlink_to(file) if file.name != "manifest.json" else None
    manifest = json.loads((bundle / "manifest.json").read_text())
    manifest["loop"] = {
        key: value for key, value in (manifest["loop"] | loop).items() if value is not None
    }
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match=says):
        dlm_runtime.open(tmp_path, engine="none", check_hashes=False)
