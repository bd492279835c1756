"""Tests of decisions.

The probabilities must equal the probabilities from an enumeration of all answers. Errors must name
what is wrong.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from constraints import Longest
from hypothesis import given, settings
from hypothesis import strategies as st

import dlm_runtime
from dlm_export.cli import main
from dlm_runtime import (
    Bundle,
    CallbackPass,
    CancelledError,
    Choice,
    DenoiserInfo,
    Generation,
    RequestError,
    Score,
    YesNo,
    from_callback,
)
from dlm_runtime.constraints.compiled import Constraint, Content, compile_content
from dlm_runtime.constraints.vocabulary import Vocabulary
from dlm_runtime.generation.deciding import POLICY, described

SPELLED = (b"a", b"b", b"ab", b"ba", b"bb", b'"', b'a"', b'",', b'","b', b",", b":", b'":"', b"aa")
END, OTHER_END, MASK = len(SPELLED), len(SPELLED) + 1, len(SPELLED) + 2
VOCAB, ENDS = MASK + 1, (END, OTHER_END)
TOKENS = (*SPELLED, None, None, None)
Parts = Sequence[str | Sequence[str]]


def content_of(parts: Parts, is_open: bool) -> Content:
    return Content("decisions", json.dumps({"parts": parts, "is_open": is_open}))


def compile_parts(
    parts: Parts, is_open: bool = False, kind: type[Vocabulary] = Vocabulary
) -> Constraint:
    return compile_content(
        content_of(parts, is_open),
        vocabulary=kind(TOKENS),
        vocab_size=VOCAB,
        ends=ENDS,
    )


def run_with(
    constraint: Constraint,
    logits: np.ndarray,
    visible_block: int | None = None,
    *,
    blocks_after_prompt: bool = False,
) -> Generation:
    """Run a decision after a prompt of one token.

    The denoiser predicts ``logits`` ``[L, V]`` in every pass.
    """

    def run(p: CallbackPass) -> None:
        rows = logits[p.position_ids[p.score_rows] % info.max_canvas_length - 1].astype(np.float64)
        if p.logits is not None:
            p.logits[:] = rows
        rows[:, MASK] = -np.inf
        order = np.argsort(-rows, axis=1, kind="stable")[:, :2]
        probs = np.exp(rows - rows.max(1, keepdims=True))
        probs /= probs.sum(1, keepdims=True)
        p.top_tokens[:] = order
        p.top_probs[:] = np.take_along_axis(probs, order, 1)

    info = DenoiserInfo(
        vocab_size=VOCAB,
        mask_token_id=MASK,
        max_canvas_length=64,
        eos_token_ids=ENDS,
        visible_block=visible_block,
        blocks_after_prompt=blocks_after_prompt,
    )
    with from_callback(info, run) as bundle:
        made = bundle.generate(
            tokens=[0], constraint=constraint, max_new_tokens=len(logits), **POLICY
        )
    assert not any(made.undecided)
    return made


class Answers:
    """All possible answers to some questions, for computing probabilities by enumeration."""

    def __init__(self, parts: Parts, is_open: bool, vocabulary: Vocabulary) -> None:
        self.is_open, self.vocabulary = is_open, vocabulary
        choices = [[part] if isinstance(part, str) else part for part in parts]
        self.questions = [at for at, part in enumerate(parts) if not isinstance(part, str)]
        self.sizes = [len(choices[at]) for at in self.questions]
        # Maps the text of each answer to the indices of the chosen options, one per question.
        self.picked: dict[bytes, list[int]] = {}
        for picked in itertools.product(*(range(len(each)) for each in choices)):
            text = "".join(each[at] for each, at in zip(choices, picked, strict=True)).encode()
            assert text not in self.picked
            self.picked[text] = [picked[at] for at in self.questions]

    def next_tokens(self, part: bytes, is_whole: bool) -> Iterator[tuple[int, bytes, bool]]:
        """Yield the tokens that may follow the start ``part`` of an answer.

        Each item contains a token, the start of the answer including this token, and whether the
        answer has ended. After the end of an answer, the start stays the whole answer.
        """
        if is_whole:
            yield from ((token, part, True) for token in (range(MASK) if self.is_open else ENDS))
            return
        fits = [text for text in self.picked if text.startswith(part)]
        if part in self.picked:
            yield from ((token, part, True) for token in ENDS)
        longest = fits[0]
        while not all(text.startswith(longest) for text in fits):
            longest = longest[:-1]
        forced = longest[len(part) :]
        first = self.vocabulary.first_tokens([forced.decode()])[0] if forced else -1
        for token, spelled in enumerate(SPELLED):
            if first >= 0 and token != first and len(spelled) <= len(forced):
                continue
            after = part + spelled
            ended = [text for text in fits if self.is_open and after.startswith(text)]
            if ended:
                yield token, ended[0], True
            elif any(text.startswith(after) for text in fits):
                yield token, after, False

    def options(self, before: bytes, question: int) -> set[int]:
        """Return the options of a question that are still possible after the start ``before`` of an
        answer.
        """
        return {picked[question] for text, picked in self.picked.items() if text.startswith(before)}

    def weights(self, before: bytes, logits: np.ndarray, is_last: bool) -> dict[bytes, float]:
        """Enumerate all sequences of tokens after ``before``, with one token for each row of the
        logits. Returns a sum for each start of an answer: the sum of the weights of all sequences
        that lead to this start. If ``is_last``, only whole answers count.
        """
        probs = np.exp(logits.astype(np.float64))
        found: dict[bytes, float] = {}

        def follow(part: bytes, is_whole: bool, position: int, weight: float) -> None:
            if position == len(logits):
                if is_whole or not is_last:
                    found[part] = found.get(part, 0) + weight
                return
            sums: dict[tuple[bytes, bool], float] = {}
            for token, after, is_ended in self.next_tokens(part, is_whole):
                key = after, is_ended
                sums[key] = sums.get(key, 0) + probs[position, token]
            for (after, is_ended), share in sums.items():
                follow(after, is_ended, position + 1, weight * share)

        follow(before, False, 0, 1.0)
        return found


OPTION = st.text("ab", min_size=1, max_size=3)
QUESTION = st.lists(OPTION, min_size=1, max_size=4, unique=True)
QUESTIONS = st.lists(QUESTION, min_size=1, max_size=3)
KINDS = st.sampled_from([Vocabulary, Longest])


def parts_of(questions: list[list[str]], between: str, ends_in_slot: bool) -> list[Any]:
    parts: list[Any] = ['"']
    for question in questions:
        parts += [question, between]
    return parts[:-1] if ends_in_slot else parts


def random_logits(room: int, spread: float, seed: int) -> np.ndarray:
    logits = np.random.default_rng(seed).normal(0, spread, (room, VOCAB)).astype(np.float32)
    return logits - logits.max(1, keepdims=True)


def split(found: list[float], sizes: list[int]) -> list[list[float]]:
    ends = list(itertools.accumulate(sizes))
    return [found[end - size : end] for size, end in zip(sizes, ends, strict=True)]


@given(
    questions=QUESTIONS,
    between=st.sampled_from(['"', '","', '":"', ","]),
    is_open=st.booleans(),
    ends_in_slot=st.booleans(),
    room=st.integers(1, 9),
    spread=st.sampled_from([0.0, 1.0, 5.0]),
    seed=st.integers(0, 10_000),
    kind=KINDS,
)
@settings(max_examples=150)
def test_probabilities_equal_brute_force(
    questions: list[list[str]],
    between: str,
    is_open: bool,
    ends_in_slot: bool,
    room: int,
    spread: float,
    seed: int,
    kind: type[Vocabulary],
) -> None:
    """The logits are random, and all token sequences of all answers are enumerated.

    Options share tokens, differ in length, and are prefixes of other options. Some tokens contain
    the end of one option and the start of the text after it.
    """
    parts = parts_of(questions, between, ends_in_slot and not is_open)
    answers = Answers(parts, is_open, kind(TOKENS))
    constraint = compile_parts(parts, is_open, kind)
    if room < constraint.shortest:
        with pytest.raises(RequestError, match="raise max_new_tokens"):
            run_with(constraint, random_logits(room, spread, seed))
        return
    logits = random_logits(room, spread, seed)
    weights = answers.weights(b"", logits, is_last=True)
    found = run_with(constraint, logits).option_probs
    if found is None:  # no pass ran, because only one answer is short enough
        assert len(weights) == 1
        return
    total = sum(weights.values())
    for question, probs in enumerate(split(found, answers.sizes)):
        assert sum(probs) == pytest.approx(1)
        for option, prob in enumerate(probs):
            share = sum(
                weight
                for text, weight in weights.items()
                if answers.picked[text][question] == option
            )
            assert prob == pytest.approx(share / total, rel=1e-6, abs=1e-9)


@given(
    questions=QUESTIONS,
    between=st.sampled_from(['"', '","', ","]),
    block=st.integers(2, 4),
    after_prompt=st.booleans(),
    seed=st.integers(0, 10_000),
    kind=KINDS,
)
@settings(max_examples=100)
def test_block_causal_probabilities_equal_brute_force(
    questions: list[list[str]],
    between: str,
    block: int,
    after_prompt: bool,
    seed: int,
    kind: type[Vocabulary],
) -> None:
    """With block-causal attention, each block of the answer takes one pass.

    A later pass computes how probable the remaining options are, given the tokens that earlier
    passes committed.
    """
    parts = parts_of(questions, between, ends_in_slot=False)
    answers = Answers(parts, False, kind(TOKENS))
    room = max(map(len, answers.picked)) + 1  # room for every answer, even with one token per byte
    logits = random_logits(room, 2.0, seed)
    constraint = compile_parts(parts, False, kind)
    made = run_with(constraint, logits, block, blocks_after_prompt=after_prompt)
    wanted = [[1 / size] * size for size in answers.sizes]
    before = b""
    starts = [1, *range(1 + block if after_prompt else block, room + 1, block)]
    for start, end in zip(starts, [*starts[1:], room + 1], strict=True):
        rows = logits[start - 1 : end - 1]
        weights = answers.weights(before, rows, is_last=end == room + 1)
        total = sum(weights.values())
        for question, probs in enumerate(wanted):
            possible = answers.options(before, question)
            mass = sum(probs[option] for option in possible)
            shares = dict.fromkeys(possible, 0.0)
            for text, weight in weights.items():
                still = (
                    answers.options(text, question)
                    if text not in answers.picked
                    else {answers.picked[text][question]}
                )
                for option in still:
                    shares[option] += weight / total / len(still)
            for option, share in shares.items():
                probs[option] = mass * share
        for token in made.tokens[start:end]:
            before += SPELLED[token] if token < END else b""
    found = made.option_probs
    if found is None:
        assert len(answers.picked) == 1
        return
    for probs, expected in zip(split(found, answers.sizes), wanted, strict=True):
        assert probs == pytest.approx(expected, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize(
    ("parts", "is_open", "said"),
    [
        ([], False, "expected a list of options"),
        (["a"], False, "expected a list of options"),
        ([[]], False, "parts[0]: expected 1 to 255 options, found 0"),
        ([["a"] * 256], False, "parts[0]: expected 1 to 255 options, found 256"),
        ([["a", "b", "a"]], False, 'parts[0][2]: the question has the option "a" twice'),
        ([["a"], ["b"]], False, "parts[1]: expected text between two questions"),
        ([["a", "ab"], "b"], False, 'the text may also continue the option "a"'),
        ([["a"]], True, "expected text after the last question"),
        ([["a", "x"], ","], False, 'no tokens of this vocabulary make the option "x"'),
        ([["a", 1]], False, "parts[0][1]"),
    ],
)
def test_wrong_parts_are_refused(parts: Any, is_open: bool, said: str) -> None:
    with pytest.raises(RequestError) as caught:
        compile_parts(parts, is_open)
    assert said in str(caught.value)


def test_other_contents_are_refused() -> None:
    for text, said in (
        ("[", "decisions: line 1"),
        ("[]", "decisions"),
        ('{"parts": [["a"]]}', "is_open"),
        ('{"parts": [["a"]], "is_open": false, "more": 1}', "more"),
    ):
        with pytest.raises(RequestError, match="decisions") as caught:
            compile_content(
                Content("decisions", text),
                vocabulary=Vocabulary(TOKENS),
                vocab_size=VOCAB,
                ends=(END,),
            )
        assert said in str(caught.value)
    with pytest.raises(RequestError, match="before and behind"):
        compile_content(
            Content("decisions", '{"parts": [["a"]], "is_open": false}', before="a"),
            vocabulary=Vocabulary(TOKENS),
            vocab_size=VOCAB,
            ends=(END,),
        )


# ---- On a bundle with a tokenizer ----

COMMAND = [{"role": "user", "content": "turn on the kitchen lights"}]
QUESTIONS_OF_DEMO: dict[str, Any] = {
    "room": Choice(["kitchen", "hall", "living room"]),
    "urgent": YesNo(),
    "size": Score(["small", "large", "huge"]),
}


@pytest.fixture(scope="module")
def bundle(demo_bundle: Path) -> Iterator[Bundle]:
    with dlm_runtime.open(demo_bundle) as opened:
        yield opened


def test_all_kinds_are_answered_together(bundle: Bundle) -> None:
    made = bundle.decide(QUESTIONS_OF_DEMO, chat=COMMAND)
    assert list(made.answers) == ["room", "urgent", "size"]
    assert made.nfe == 1
    assert set(made.answers["room"].probabilities) == {"kitchen", "hall", "living room"}
    assert set(made.answers["urgent"].probabilities) == {"true", "false"}
    size = made.answers["size"]
    assert size.score == pytest.approx(
        size.probabilities["1"] + 2 * size.probabilities["2"], abs=1e-12
    )
    for answer in made.answers.values():
        assert sum(answer.probabilities.values()) == pytest.approx(1)
        assert answer.confidence == max(answer.probabilities.values())
        assert answer.made_in == 1
    written = json.loads(made.text)
    assert written["room"] == made.answers["room"].best
    assert json.dumps(written["urgent"]) == made.answers["urgent"].best
    assert str(written["size"]) == size.best


def test_more_passes_answer_the_most_certain_question_first(bundle: Bundle) -> None:
    one = bundle.decide(QUESTIONS_OF_DEMO, chat=COMMAND)
    made = bundle.decide(QUESTIONS_OF_DEMO, chat=COMMAND, passes=3)
    order = sorted(made.answers, key=lambda name: made.answers[name].made_in)
    assert [made.answers[name].made_in for name in order] == [1, 2, 3]
    surest = max(one.answers, key=lambda name: one.answers[name].confidence)
    assert order[0] == surest
    assert made.answers[surest].probabilities == pytest.approx(one.answers[surest].probabilities)
    assert made.nfe == 3
    many = bundle.decide(QUESTIONS_OF_DEMO, chat=COMMAND, passes=9)
    assert {name: each.probabilities for name, each in many.answers.items()} == {
        name: each.probabilities for name, each in made.answers.items()
    }


def test_255_options(bundle: Bundle) -> None:
    options = [f"room {number}" for number in range(255)]
    made = bundle.decide({"room": Choice(options)}, chat=COMMAND).answers["room"]
    assert list(made.probabilities) == options
    assert sum(made.probabilities.values()) == pytest.approx(1)


def test_a_template_has_slots_and_a_rest(bundle: Bundle) -> None:
    questions = {"call": Choice(["set_light", "play_music"])}
    made = bundle.decide(questions, chat=COMMAND, answer='{"name":"<mask:call>",', rest=32)
    assert made.answers["call"].best == "set_light"
    assert made.answers["call"].confidence > 0.9
    assert made.text == '{"name":"set_light",'


def test_a_scheduler_gives_the_same_answers(bundle: Bundle) -> None:
    wanted = bundle.decide(QUESTIONS_OF_DEMO, chat=COMMAND, passes=2)
    with bundle.scheduler() as scheduler:
        deciding = bundle.deciding(QUESTIONS_OF_DEMO, chat=COMMAND, passes=2)
        while deciding.is_open:
            deciding.take(scheduler.submit(**deciding.arguments()).result())
    for name, answer in deciding.decision().answers.items():
        assert answer.probabilities == pytest.approx(wanted.answers[name].probabilities, rel=1e-4)


def test_instructions_and_descriptions_follow_the_state(bundle: Bundle) -> None:
    plain = bundle.decide({"room": Choice(["kitchen", "hall"])}, chat=COMMAND)
    asked = {"room": Choice({"kitchen": "for cooking", "hall": None}, "Which room?")}
    assert described({"room": Choice(["kitchen"])}) == ""
    said = described(asked)
    assert said.endswith("room: Which room?\n- kitchen: for cooking\n- hall")
    made = bundle.decide(asked, chat=COMMAND)
    assert bundle.tokenizer is not None
    told = [{"role": "user", "content": f"{COMMAND[0]['content']}\n\n{said}"}]
    assert made.generations[0].prompt_tokens == len(bundle.tokenizer.encode_chat(told))
    assert made.generations[0].prompt_tokens > plain.generations[0].prompt_tokens


def test_a_cancelled_decision_raises(bundle: Bundle) -> None:
    cancel = threading.Event()
    cancel.set()
    with pytest.raises(CancelledError):
        bundle.decide(QUESTIONS_OF_DEMO, chat=COMMAND, cancel=cancel)


@pytest.mark.parametrize(
    ("questions", "others", "said"),
    [
        ({}, {}, "at least one question"),
        ([], {}, "give a dict"),
        ({1: YesNo()}, {}, "the name of a question = 1"),
        ({"a": "yes"}, {}, "give a Choice, YesNo or Score"),
        ({"a": Choice("yes")}, {}, "give a list or a dict"),
        ({"a": Choice([])}, {}, "has 0 options"),
        ({"a": Choice(["x"] * 2)}, {}, "an option occurs twice"),
        ({"a": Choice([str(each) for each in range(256)])}, {}, "has 256 options"),
        ({"a": Choice(["x", 1])}, {}, "an option = 1"),
        ({"a": Choice({"x": 1})}, {}, "a description = 1"),
        ({"a": Score("low")}, {}, "give a list of texts"),
        ({"a": YesNo(instructions=1)}, {}, "instructions = 1"),
        ({"a": YesNo()}, {"passes": 0}, "passes = 0"),
        ({"a": YesNo()}, {"rest": -1}, "rest = -1"),
        ({"a": YesNo()}, {"prompt": "x"}, "give one of prompt, tokens and chat"),
        ({"a": YesNo()}, {"answer": "<mask:b>"}, "<mask:b> names no question"),
        ({"a": YesNo()}, {"answer": "yes"}, "exactly once for each question"),
        ({"a": YesNo()}, {"answer": "<mask:a><mask:a>"}, "exactly once for each question"),
        ({"a": YesNo()}, {"answer": "<mask:a>", "rest": 4}, "expected text after the last"),
        ({"a": YesNo("Is it?")}, {"chat": None, "tokens": [1]}, "cannot follow tokens"),
    ],
)
def test_wrong_questions_are_refused(
    bundle: Bundle, questions: Any, others: dict[str, Any], said: str
) -> None:
    with pytest.raises(RequestError) as caught:
        bundle.decide(questions, **({"chat": COMMAND} | others))
    assert said in str(caught.value)


def test_a_bundle_without_a_tokenizer_refuses() -> None:
    info = DenoiserInfo(vocab_size=8, mask_token_id=7, max_canvas_length=8, eos_token_ids=(6,))
    with (
        from_callback(info, lambda _: None) as opened,
        pytest.raises(RequestError, match="decisions need a tokenizer"),
    ):
        opened.decide({"a": YesNo()}, tokens=[1])


def test_the_command_prints_probabilities(bundle: Bundle, demo_bundle: Path) -> None:
    asked = ["--choice", "call=set_light,play_music", "--answer", '{"name":"<mask:call>",']
    state = ["--chat", COMMAND[0]["content"], "--rest", "32"]
    run = CliRunner().invoke(main, ["decide", str(demo_bundle), *asked, *state, "--json"])
    assert run.exit_code == 0, run.output
    wanted = bundle.decide(
        {"call": Choice(["set_light", "play_music"])},
        chat=COMMAND,
        answer='{"name":"<mask:call>",',
        rest=32,
    )
    found = json.loads(run.stdout)
    assert found["answers"]["call"]["probabilities"] == pytest.approx(
        wanted.answers["call"].probabilities
    )
    assert found["answers"]["call"]["best"] == "set_light"
    table = CliRunner().invoke(
        main, ["decide", str(demo_bundle), *state[:2], "--yes-no", "a", "--score", "b=low,high"]
    )
    assert table.exit_code == 0, table.output
    assert "b: expected level" in table.stdout
    for wrong in (["--choice", "call"], [], ["--yes-no", "a", "--yes-no", "a"]):
        refused = CliRunner().invoke(main, ["decide", str(demo_bundle), *state, *wrong])
        assert refused.exit_code == 2
