"""Tests of LLaDA2.2's loop, whose passes delete and insert tokens of a block.

SGLang's loop was written again from ``JointThresholdInDel`` in sglang 0.5.23.
``test_published_loops`` compares with SGLang's own code, and ``test_block_experts`` tests the network.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from constraints import compiled, made_up_vocabulary
from denoisers import under_native_loop
from hypothesis import given, settings
from hypothesis import strategies as st
from published import random_network
from test_infill import Letters
from torch import Tensor

from dlm_export.network import reference
from dlm_export.network.denoiser import Denoiser
from dlm_export.network.loop_turns import Canvas
from dlm_runtime import (
    Bundle,
    CallbackPass,
    DenoiserInfo,
    Generation,
    Policy,
    RequestError,
    from_callback,
)
from dlm_runtime.presets import PRESETS

# A small vocabulary, so that random networks often predict the two tokens.
VOCABULARY, END, DELETE, SPLIT, MASK = 14, 10, 11, 12, 13
PRESET = PRESETS["llada2.2"]


def network_of(seed: int, block: int) -> Denoiser:
    return random_network(
        block,
        0,
        seed,
        vocab_size=VOCABULARY,
        mask_token_id=MASK,
        eos_token_ids=(END,),
        delete_token_id=DELETE,
        split_token_id=SPLIT,
    )


def prompt_of(seed: int, length: int) -> list[int]:
    return np.random.RandomState(seed).randint(0, END, length).tolist()


class SglangBlock:
    """SGLang's state of one block, with ``prompt`` tokens of the prompt at its start."""

    def __init__(self, tokens: list[int], threshold: float, edit: float, post: int) -> None:
        self.threshold, self.edit, self.most_post = threshold, edit, post
        self.tokens = tokens
        self.prompt = tokens.index(MASK)
        self.is_original = [token == MASK for token in tokens]
        self.updates = self.post = 0
        self.seen: set[tuple[int, ...]] = set()
        self.sampled: dict[int, set[int]] = {}
        self.counts = {"delete": 0, "split": 0, "cut": 0, "cleanup": 0, "repeat": 0}

    def step(self, logits: Tensor) -> bool:
        """One update. ``logits`` ``[block, V]`` exclude the mask token. Returns True at the end."""
        size, old = len(self.tokens), list(self.tokens)
        suffix = range(self.prompt, size)
        best = logits.argmax(-1).tolist()
        p = logits.softmax(-1).max(-1).values.tolist()
        masks = [i for i in suffix if old[i] == MASK]
        originals = [i for i in masks if self.is_original[i]]
        self.updates += 1
        self.post += not originals
        is_final = (
            (self.most_post > 0 and self.post >= self.most_post)
            or (self.most_post == 0 and not originals)
            or self.updates > size + self.most_post
        )
        write = list(masks)
        if originals and not is_final:
            needed = 1 + len(masks) - len(originals)
            write = [i for i in masks if p[i] > self.threshold]
            if len(write) < needed:
                write = sorted(masks, key=lambda i: -p[i])[:needed]
            if self.most_post == 0 and not set(originals) - set(write):
                is_final, write = True, list(masks)
        write += [i for i in suffix if old[i] != MASK and p[i] > self.edit and best[i] != old[i]]
        if not write:
            return True

        def other(at: int, ruled_out: set[int]) -> int:
            row = logits[at].clone()
            row[list(ruled_out)] = -torch.inf
            return int(row.argmax())

        if is_final:
            for i in write:
                if best[i] in (DELETE, SPLIT):
                    best[i] = other(i, {DELETE, SPLIT})
                    self.counts["cleanup"] += 1
        elif tuple(old) in self.seen:
            changing = [i for i in sorted(write) if best[i] != old[i]]
            if changing:
                least = min(changing, key=lambda i: p[i])
                best[least] = other(least, self.sampled.get(least, set()))
                self.counts["repeat"] += 1
        self.seen.add(tuple(old))
        pairs = list(zip(old, self.is_original, strict=True))
        new = pairs[: self.prompt]
        for i in suffix:
            if i not in write:
                new.append(pairs[i])
                continue
            self.sampled.setdefault(i, set()).add(best[i])
            if best[i] == SPLIT:
                new += [(MASK, False), pairs[i]]
            elif best[i] != DELETE:
                new.append((best[i], self.is_original[i]))
            self.counts["delete"] += best[i] == DELETE
            self.counts["split"] += best[i] == SPLIT
        self.counts["cut"] += max(0, len(new) - size)
        new = (new + [(MASK, False)] * size)[:size]
        self.tokens = [token for token, _ in new]
        self.is_original = [flag for _, flag in new]
        return is_final


@torch.no_grad()
def sglang_loop(
    denoiser: Denoiser,
    prompt: list[int],
    length: int,
    block: int,
    policy: Policy,
    counts: dict[str, int],
) -> list[list[int]]:
    """Return the canvas after each update. Adds to ``counts`` how often the loop did what."""
    canvas, canvases = prompt + [MASK] * (length - len(prompt)), list[list[int]]()
    for start in range(len(prompt) // block * block, length, block):
        end = min(start + block, length)
        state = SglangBlock(
            canvas[start:end], policy.threshold, policy.edit_threshold, policy.edit_passes
        )
        done = False
        while not done:
            ids = torch.tensor(canvas[:end])[None]
            features, _ = denoiser.hidden(ids, torch.arange(end)[None])
            logits = denoiser.project(features[0, start:])
            logits[:, MASK] = -torch.inf
            done = state.step(logits)
            canvas[start:end] = state.tokens
            canvases.append(list(canvas))
        for name, count in state.counts.items():
            counts[name] += count
        if END in canvas[max(start, len(prompt)) : end] and policy.stop == "eos":
            canvas[end:] = canvases[-1][end:] = [END] * (length - end)
            break
    return canvases


def compare(
    denoiser: Denoiser,
    policy: Policy,
    prompt: list[int],
    length: int,
    **request: Any,
) -> tuple[list[list[int]], Generation]:
    """Check that the native loop equals the reference after every pass.

    Returns the canvases after the passes that score positions, and the native loop's result.
    """
    after, scores = list[Canvas](), list[bool]()
    start = np.array(prompt + [MASK] * (length - len(prompt)))
    wanted = reference.fill(
        denoiser,
        Canvas(start, start == MASK),
        policy,
        max_steps=request.get("max_steps", 0),
        on_step=after.append,
        on_pass=lambda turn, *_: scores.append(len(turn.positions) > 0),
    )
    with under_native_loop(denoiser) as bundle:
        events = list(
            bundle.stream(
                tokens=prompt, new_tokens=length - len(prompt), **request, **policy.as_dict()
            )
        )
    out = events[-1].result
    assert out is not None
    assert (out.tokens, out.nfe) == (wanted.tokens, wanted.nfe)
    for event, canvas in zip(events, after, strict=False):
        if not event.done:
            assert list(event.canvas) == canvas.tokens.tolist()
            assert list(event.undecided) == canvas.undecided.tolist()
    made = zip(after, scores, strict=True)
    return [canvas.tokens.tolist() for canvas, is_scored in made if is_scored], out


def test_the_preset_equals_sglangs_loop() -> None:
    counts = dict.fromkeys(("delete", "split", "cut", "cleanup", "repeat"), 0)
    for seed in range(32):
        block = (32, 8, 8, 16)[seed % 4]
        prompt = prompt_of(seed, (5, block + 3, 2 * block, 1, block - 1)[seed % 5])
        length = (len(prompt) // block + 1 + (block == 8)) * block
        policy = PRESET.with_fields(
            {
                "cache": ("block", "none")[seed % 2],
                "stop": ("eos", "none")[seed // 2 % 2],
                "edit_passes": (16, 16, 3, 1, 0)[seed // 3 % 5],
                "edit_threshold": (0.0, 0.2)[seed // 5 % 2],
            }
        )
        denoiser = network_of(seed, block)
        wanted = sglang_loop(denoiser, prompt, length, block, policy, counts)
        found, out = compare(denoiser, policy, prompt, length)
        if out.tokens != found[-1]:  # the blocks after an end token
            found[-1] = out.tokens
        assert found == wanted, seed
    assert min(counts.values()) > 10


policies = st.builds(
    dict,
    commit=st.sampled_from(
        ("dynamic", "threshold", "static", "factor", "timestep", "longest_prefix")
    ),
    compare=st.sampled_from((">", ">=")),
    threshold=st.floats(0.1, 0.9),
    edit_threshold=st.floats(0, 0.9),
    edit_passes=st.sampled_from((0, 1, 2, 16)),
    steps_per_block=st.sampled_from((0, 0, 2, 5)),
    schedule=st.sampled_from(("masked", "block", "floor")),
    cache=st.sampled_from(("none", "block")),
    stop=st.sampled_from(("none", "eos", "early-eos")),
    cfg_scale=st.sampled_from((0.0, 0.0, 0.7)),
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


@settings(max_examples=60)
@given(
    changes=policies,
    sampled=st.just({}) | sampling,
    prompt=st.integers(1, 14),
    new=st.integers(1, 14),
    max_steps=st.sampled_from((0, 0, 3)),
    seed=st.integers(0, 9),
)
def test_the_native_loop_equals_the_reference(
    changes: dict[str, Any],
    sampled: dict[str, Any],
    prompt: int,
    new: int,
    max_steps: int,
    seed: int,
) -> None:
    """The last block may be shorter than the others."""
    policy = PRESET.with_fields(changes | sampled)
    given_tokens, length = prompt_of(seed, prompt), prompt + new
    _, out = compare(network_of(seed, 6), policy, given_tokens, length, max_steps=max_steps)
    assert out.tokens[:prompt] == given_tokens
    assert len(out.tokens) == len(out.log_probs) == length
    assert not {DELETE, SPLIT, MASK}.intersection(out.tokens)
    assert out.prompt_tokens == prompt
    if not max_steps:
        decided = [p is not None for p in out.log_probs[prompt:]]
        assert all(decided) or END in out.tokens


def test_alternatives_move_with_their_tokens() -> None:
    moved = 0
    for seed in range(8):
        policy = PRESET.with_fields({"stop": "none", "edit_threshold": 0.3})
        canvases, out = compare(
            network_of(seed, 8), policy, prompt_of(seed, 3), 16, top_log_probs=VOCABULARY - 1
        )
        moved += sum(b.count(MASK) > a.count(MASK) for a, b in itertools.pairwise(canvases))
        for token, p, tops in list(zip(out.tokens, out.log_probs, out.top_log_probs, strict=True))[
            3:
        ]:
            assert dict(tops)[token] == pytest.approx(p, abs=1e-5)
    assert moved > 10


def test_requests_in_a_batch_equal_single_requests() -> None:
    prompts = [prompt_of(seed, 3) for seed in range(5)]
    with under_native_loop(network_of(1, 8)) as bundle:
        policy = PRESET.with_fields({"edit_threshold": 0.3}).as_dict()
        alone = [bundle.generate(tokens=each, new_tokens=20, **policy).tokens for each in prompts]
        found = bundle.generate_batch(tokens=prompts, new_tokens=20, max_batch=3, **policy)
    assert [each.tokens for each in found] == alone


# ---- A denoiser that follows a script ----

LETTERS_MASK, LETTERS_SPLIT, LETTERS_DELETE, LETTERS_END = 299, 297, 298, 296


def correcting(canvas: list[int], at: int) -> int:
    """Write "abbdefg" to the first block, and correct it to "abcdefg". Then write "h"."""
    now, before = canvas[at], canvas[at - 1]
    if now == LETTERS_MASK:
        text = b"?abcdefgh" if ord("a") in canvas else b"?abbdefgh"
        return text[at] if at < len(text) else LETTERS_END
    if now == before == ord("b"):
        return LETTERS_DELETE
    return LETTERS_SPLIT if (before, now) == (ord("b"), ord("d")) else now


def scripted(predict: Callable[[list[int], int], int] = correcting, **changes: Any) -> Bundle:
    """Return a bundle with a tokenizer of letters. ``predict`` gets a canvas and a position."""
    info = {
        "eos_token_ids": (LETTERS_END,),
        "delete_token_id": LETTERS_DELETE,
        "split_token_id": LETTERS_SPLIT,
        "visible_block": 8,
    } | changes

    def run(p: CallbackPass) -> None:
        for i, row in enumerate(p.score_rows):
            logits = np.full(300, -20.0, np.float32)
            logits[predict(p.input_ids.tolist(), int(p.position_ids[row]))] = 5.0
            order = np.argsort(-logits, kind="stable")[:2]
            p.top_tokens[i], p.top_probs[i] = order, (1, 0)
            if p.logits is not None:
                p.logits[i] = logits

    policy = PRESET.with_fields({"cache": "none"})
    bundle = from_callback(DenoiserInfo(300, LETTERS_MASK, 64, **info), run, policy=policy)
    bundle._tokenizer = Letters()  # type: ignore[assignment]
    return bundle


def test_a_stream_gives_text_when_a_block_is_finished() -> None:
    with scripted() as bundle:
        events = list(bundle.stream(prompt="", max_new_tokens=15))
    shown = [bytes(x if x < 256 else ord("_") for x in event.canvas[1:8]) for event in events[:4]]
    assert shown == [b"abbdefg", b"ab_defg", b"abcdefg", b"abcdefg"]
    assert [event.text for event in events] == ["", "", "", "abcdefg", "abcdefg", "abcdefgh"]
    assert [event.committed for event in events] == [0, 0, 0, 7, 0, 8]
    assert events[1].guess[3:6] == [-1, ord("d"), ord("e")]


def test_a_request_that_stops_early_keeps_only_text() -> None:
    with scripted() as bundle:
        done = bundle.generate(prompt="", max_new_tokens=15, max_steps=2)
        assert (done.tokens[1:8], done.finish) == ([*b"ab", LETTERS_END, *b"defg"], "steps")
        assert sum(done.undecided) == 15


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"remask": "edit"}, 'which has delete and split tokens: use remask = "rewrite"'),
        ({"cache": "block-dual"}, 'this cache: use cache = "block" or "none"'),
        ({"store": "reuse", "cache": "block"}, "this store"),
        ({"reserve": "end"}, "a reserved end"),
        ({"sub_block_length": 4}, "sub-blocks"),
        ({"score": "margin"}, 'this score: use score = "confidence"'),
        ({"commit": "entropy_bound"}, "a rule that does not compare entropies"),
        ({"next_block": 0.5, "commit": "threshold"}, 'use remask = "none"'),
    ],
)
def test_what_cannot_be_combined_is_refused(fields: dict[str, Any], says: str) -> None:
    with scripted(has_cache=True) as bundle, pytest.raises(RequestError, match=says):
        bundle.generate(prompt="", max_new_tokens=4, **fields)


def test_other_denoisers_refuse_to_rewrite() -> None:
    with (
        scripted(delete_token_id=None, split_token_id=None) as bundle,
        pytest.raises(RequestError, match='has no split token: use remask = "edit" or "none"'),
    ):
        bundle.generate(prompt="", max_new_tokens=4)


def test_infilling_and_constraints_are_refused() -> None:
    special = (LETTERS_SPLIT, LETTERS_DELETE, LETTERS_END, LETTERS_MASK)
    automaton = compiled("[a-z]+", made_up_vocabulary(300, special), 300, (LETTERS_END,))
    with scripted() as bundle:
        with pytest.raises(RequestError, match="position 2 is to be filled before tokens that are"):
            bundle.generate(tokens=[1, 2, LETTERS_MASK, 3], max_new_tokens=4)
        with pytest.raises(RequestError, match="a constraint does not suit this denoiser"):
            bundle.generate(tokens=[3], max_new_tokens=4, constraint=automaton.constraint)


@pytest.mark.parametrize(
    ("info", "says"),
    [
        ({"split_token_id": 300}, r"split_token_id = 300 is outside 0\.\.299"),
        ({"delete_token_id": None}, r"delete_token_id = -1 is outside 0\.\.299"),
        ({"split_token_id": LETTERS_DELETE}, "split_token_id must differ from delete_token_id"),
        ({"delete_token_id": LETTERS_MASK}, "neither may be the mask token"),
        ({"visible_block": None}, "split_token_id needs block-causal attention"),
        ({"shift": 1}, "split_token_id needs block-causal attention and shift 0"),
        ({"expand_token_id": 5}, "and no expand_token_id"),
    ],
)
def test_descriptions_of_other_denoisers_are_refused(info: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        scripted(**info)
