"""Tests of infilling.

Infilling replaces the holes in a text. The tests check that the other text does not change, that
the text of a hole ends before its first end token, and that the most likely length of a hole is
chosen.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

import dlm_runtime
from dlm_export.cli import main
from dlm_runtime import Bundle, CallbackPass, DenoiserInfo, RequestError

EOS, MASK = 298, 299


class Letters:
    """A tokenizer with one token per byte.

    ``encode``, for prompts, adds the token 1 before the text. ``encode_plain`` adds no tokens.
    """

    def encode(self, text: str, special_tokens: bool = False) -> list[int]:
        return [1, *text.encode()]

    def encode_plain(self, text: str, special_tokens: bool = False) -> list[int]:
        return list(text.encode())

    def added_tokens(self) -> dict[int, Any]:
        return {}

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token > 1).decode()

    def close(self) -> None: ...


def lettered(predict: Callable[[list[int], int], tuple[int, float]], **info: Any) -> Bundle:
    """Return a bundle whose denoiser calls ``predict``.

    ``predict`` receives a canvas and a position, and returns a token and its probability.
    """

    def run(p: CallbackPass) -> None:
        canvas = p.input_ids.tolist()
        for i, row in enumerate(p.score_rows):
            token, prob = predict(canvas, int(p.position_ids[row]))
            p.top_tokens[i], p.top_probs[i] = (token, 0), (prob, 0)

    bundle = dlm_runtime.from_callback(
        DenoiserInfo(300, MASK, 512, eos_token_ids=(EOS,), **info), run
    )
    bundle._tokenizer = Letters()  # type: ignore[assignment]
    return bundle


def counted(_: list[int], position: int) -> tuple[int, float]:
    """Predict the letters a to z in turn, one for each position."""
    return ord("a") + position % 26, 0.5


@settings(max_examples=100)
@given(parts=st.lists(st.text("xyzé ", max_size=5), min_size=2, max_size=4), data=st.data())
def test_what_is_given_stays_and_every_hole_is_filled(
    parts: list[str], data: st.DataObject
) -> None:
    lengths = [data.draw(st.integers(1, 6)) for _ in parts[1:]]
    with lettered(counted) as bundle:
        done = bundle.infill("<mask>".join(parts), lengths=lengths)
    at, wanted = len(parts[0].encode()) + 1, [parts[0]]
    for length, part in zip(lengths, parts[1:], strict=True):
        wanted += ["".join(chr(counted([], i)[0]) for i in range(at, at + length)), part]
        at += length + len(part.encode())
    assert done.text == done.generation.text == "".join(wanted)
    assert done.holes == wanted[1::2]
    assert done.lengths == tuple(lengths)
    assert done.generation.prompt_tokens == 1 + sum(len(part.encode()) for part in parts)
    assert done.log_prob == pytest.approx(-0.6931472)


def test_a_hole_ends_with_its_padding_and_the_next_one_does_not() -> None:
    with lettered(lambda canvas, at: (EOS if at in (5, 6) else ord("a") + at, 0.5)) as bundle:
        done = bundle.infill("x<mask>y<mask>z", lengths=[6, 2], block_length=4)
    # In the first hole, tokens 4 and 5 are end tokens, so the hole's text has only three letters.
    assert (done.text, done.holes) == (
        "xcdeyjkz",
        ["cde", "jk"],
    )


def test_the_length_whose_tokens_are_surest_is_taken() -> None:
    """The denoiser's probabilities are highest if the hole has three positions."""

    def predict(canvas: list[int], position: int) -> tuple[int, float]:
        return ord("o"), 0.9 if len(canvas) == 1 + 2 + 3 else 0.4

    with lettered(predict) as bundle:
        done = bundle.infill("a<mask>b", lengths=[[1, 2, 3, 5]])
        assert (done.text, done.lengths, done.log_prob) == (
            "aooob",
            (3,),
            pytest.approx(-0.1053605),
        )
        both = bundle.infill("<mask>b<mask>", lengths=[[1, 2], [2, 4]])
    assert both.lengths == (1, 2) or sum(both.lengths) == 4


@pytest.mark.parametrize(
    ("text", "lengths", "sentence"),
    [
        ("no hole", [4], "the text has no hole: write <mask>"),
        ("<mask>", [0], r"\[0\] is not a length of a hole"),
        ("<mask>", [[]], r"\[\] is not a length of a hole"),
        ("<mask>", [[3, "4"]], "is not a length of a hole"),
        ("<mask> <mask> <mask>", [1, 2], "2 lengths for 3 holes"),
        ("<mask>" * 3, [[1, 2, 3, 4, 5]], "trying all lengths takes 125 requests; the limit is 64"),
        ("<mask>", [600], "longer than the denoiser's 512"),
        ("<mask>", 1.5, "lengths = 1.5: give tokens, 1 or more, or a list"),
        ("<mask>", [None], r"lengths = \[None\]: give tokens"),
    ],
)
def test_wrong_holes_are_refused(text: str, lengths: Any, sentence: str) -> None:
    with lettered(counted) as bundle, pytest.raises(RequestError, match=sentence):
        bundle.infill(text, lengths=lengths)


def test_a_number_is_a_length_for_all_holes_and_no_request_of_an_infill_is_longer() -> None:
    with lettered(counted) as bundle:
        assert bundle.infill("a<mask>b<mask>", lengths=3).lengths == (3, 3)
        with pytest.raises(
            RequestError, match="max_new_tokens is for text after a prompt: give lengths"
        ):
            bundle.infill("a<mask>", lengths=3, max_new_tokens=9)


class Turns(Letters):
    """A tokenizer that adds the token 2 before a prompt and the token 3 after the prompt. Chat
    templates mark the start and end of a message in the same way.
    """

    def encode(self, text: str, special_tokens: bool = False) -> list[int]:
        return [2, *text.encode(), 3]

    def encode_plain(self, text: str, special_tokens: bool = False) -> list[int]:
        return [2 if letter == "^" else ord(letter) for letter in text]

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token > 3).decode()


@pytest.mark.parametrize("text", ["ab<mask>c", "^ab<mask>c", "<mask>c", "^<mask>c"])
def test_nothing_that_ends_a_prompt_stands_in_front_of_a_hole_and_nothing_twice(text: str) -> None:
    with lettered(counted) as bundle:
        bundle._tokenizer = Turns()  # type: ignore[assignment]
        tokens = bundle.infill(text, lengths=1).generation.tokens
    before = list(text.partition("<mask>")[0].lstrip("^").encode())
    assert tokens[: len(before) + 1] == [2, *before]
    assert tokens[-1] == ord("c")
    assert len(tokens) == len(before) + 3


@pytest.mark.parametrize(
    ("block", "says"),
    [(4, "block-causal, in blocks of 4"), (1, "causal: a hole does not see the text after it.")],
)
def test_a_denoiser_that_does_not_look_ahead_infills_nothing(block: int, says: str) -> None:
    with (
        lettered(counted, visible_block=block) as bundle,
        pytest.raises(RequestError, match=says),
    ):
        bundle.infill("a<mask>b")


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (("--infill", "a <mask>"), 2, "has no tokenizer: put mask tokens among the tokens"),
        (("--infill", "a <mask>", "--tokens", "1"), 2, "--infill takes text"),
        (("--infill", "a <mask>", "--prompt", "b", "--prefix", "c"), 2, "without --infill"),
        (("--prompt", "a", "--tokens", "1"), 2, "give one of"),
        (("--tokens", "1", "--hole-tokens", "3"), 2, "--hole-tokens needs --infill"),
        (
            ("--infill", "a <mask>", "--hole-tokens", "x"),
            2,
            "--hole-tokens: 'x' is not a list of integers",
        ),
        (("--infill", "a <mask>", "--watch"), 2, "--watch shows one canvas"),
        (
            ("--infill", "a <mask>", "--max-new-tokens", "4"),
            2,
            "--infill does not take --max-new-tokens",
        ),
    ],
)
def test_the_command_says_what_it_does_not_take(
    llada_bundle: Path, options: tuple[str, ...], code: int, says: str
) -> None:
    done = CliRunner().invoke(main, ["run", str(llada_bundle), "--threads", "1", *options])
    assert (done.exit_code, says in done.output) == (code, True), done.output


def test_the_command_fills_in_what_was_asked_for(demo_bundle: Path) -> None:
    call = '{"name":"set_light","arguments":{"room":"<mask>","brightness":40}}'
    command, how = (
        "turn the kitchen lights to forty percent",
        ["--threads", "1", "--hole-tokens", "1"],
    )
    text = f"{command}<|assistant|>{call}"
    for options, whole in (
        (["--prompt", command, "--infill", call], call),
        (["--chat", command, "--infill", call], call),
        (["--infill", text, "--special-tokens"], text),
    ):
        done = CliRunner().invoke(main, ["run", str(demo_bundle), *how, *options])
        assert done.exit_code == 0, done.output
        assert done.stdout == whole.replace("<mask>", "kitchen") + "\n"


def test_the_examples_of_the_help_work_on_the_demo(demo_bundle: Path) -> None:
    told = (
        CliRunner().invoke(main, ["run", "--help"], terminal_width=200).output.replace("\\\n", " ")
    )
    answers = []
    for line in re.findall(r"dlm-export run .*", told):
        words = shlex.split(line)
        assert words[:3] == ["dlm-export", "run", "build/demo"]
        done = CliRunner().invoke(main, ["run", str(demo_bundle), "--threads", "1", *words[3:]])
        assert done.exit_code == 0, done.output
        answers.append(json.loads(done.stdout))
    reminder = {"name": "add_reminder", "arguments": {"text": "call the garage", "time": "07:00"}}
    assert answers == [reminder, reminder]
