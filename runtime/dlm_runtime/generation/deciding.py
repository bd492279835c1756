"""Decisions: answers to named questions about a state.

A decision gives a probability for each option of a question.

The answer to all questions is one text on the canvas, by default a JSON object. The part of this
text that answers a question is the question's slot. Only the options of the question are legal
texts in its slot. A pass predicts all positions of the answer. From these predictions, the native
library computes how probable each option is among all legal answers.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dlm_runtime.constraints.compiled import CompileLimits
from dlm_runtime.constraints.layout import Layout
from dlm_runtime.errors import CancelledError, RequestError, shown
from dlm_runtime.generation.request import count_of, text_of, token_ids
from dlm_runtime.generation.results import Generation

if TYPE_CHECKING:
    from dlm_runtime.constraints.compiled import Constraint
    from dlm_runtime.generation.constraining import Constraints
    from dlm_runtime.text.tokenizer import Tokenizer

MOST_OPTIONS = 255
MOST_CHARACTERS = 4 << 20
"""The largest total number of characters of all answers that are tokenised to measure the options."""
POLICY: dict[str, Any] = {
    "select": "argmax",
    "temperature": 0.0,
    "score": "confidence",
    "score_of": "prediction",
    "commit": "threshold",
    "compare": ">=",
    "threshold": 0.0,
    "remask": "none",
    "stop": "none",
    "block_length": 0,
    "sub_block_length": 0,
    "next_block": 1.0,
}
"""The policy of a decision: one pass predicts and commits all positions of a block."""
_NOISE = {"remask": "noise", "steps_per_block": 1, "temperature_drop": 0.0, "stable_entropy": 0.0}
"""The fields of the policy that differ if the denoiser starts from random tokens."""
_SLOT = re.compile("<mask:(.*?)>", re.DOTALL)


@dataclass(frozen=True)
class Choice:
    """A question whose answer is one of several options.

    Args:
        options: The options, 1 to 255. A mapping maps each option to its description, or to None.
        instructions: The question in words. If None, only the question's name says what is asked.
    """

    options: Sequence[str] | Mapping[str, str | None]
    instructions: str | None = None


@dataclass(frozen=True)
class YesNo:
    """A question whose answer is ``true`` or ``false``.

    Args:
        instructions: The question in words. If None, only the question's name says what is asked.
        true, false: Descriptions of the two answers, or None.
    """

    instructions: str | None = None
    true: str | None = None
    false: str | None = None


@dataclass(frozen=True)
class Score:
    """A question whose answer is a level on a scale.

    Args:
        levels: Descriptions of the levels, 1 to 255, from the lowest to the highest. The answer is
            the index of a level, counted from 0.
        instructions: The question in words. If None, only the question's name says what is asked.
    """

    levels: Sequence[str]
    instructions: str | None = None


Question = Choice | YesNo | Score


@dataclass(frozen=True)
class Answer:
    """The answer to one question.

    Args:
        probabilities: The probability of each option. The probabilities add up to 1. The options of
            a ``YesNo`` are "true" and "false". The options of a ``Score`` are "0", "1", and so on.
        made_in: The number of the prediction that gave the probabilities, 1 or more. A prediction
            knows the answers that became final after earlier predictions.
        score: For a ``Score``, the expected level: the mean of the levels, weighted with the
            levels' probabilities. The value is None for other questions.
    """

    probabilities: dict[str, float]
    made_in: int
    score: float | None = None

    @property
    def best(self) -> str:
        """The most probable option, or the first of several equally probable options."""
        return max(self.probabilities, key=self.probabilities.__getitem__)

    @property
    def confidence(self) -> float:
        """The probability of the most probable option."""
        return self.probabilities[self.best]


@dataclass(frozen=True)
class Decision:
    """The answers to all questions.

    Args:
        answers: A dict with the answer to each question, in the order of the questions. The keys
            are the names of the questions.
        text: The text of the answer. For each question, this text contains the most probable
            option.
        generations: The results of the requests. Each request predicted the answer once.
    """

    answers: dict[str, Answer]
    text: str
    generations: list[Generation]

    @property
    def nfe(self) -> int:
        """The number of passes, including passes that fill a cache."""
        return sum(made.nfe for made in self.generations)


@dataclass(frozen=True)
class _Slot:
    """A question, with the name, the written text and the description of each option."""

    question: Question
    labels: tuple[str, ...]
    written: tuple[str, ...]
    descriptions: tuple[str | None, ...]


class Deciding:
    """A decision that is not yet complete. ``Bundle.deciding`` creates this object.

    While ``is_open`` is True, run a request with ``arguments``, for example with
    ``Scheduler.submit``, and pass the result of the request to ``take``. When ``is_open`` is False,
    ``decision`` returns the answers.
    """

    def __init__(
        self,
        compile: Callable[[str], Constraint],
        tokenizer: Tokenizer,
        visible_block: int | None,
        blocks_after_prompt: bool,
        has_mask_token: bool,
        given: Sequence[int],
        parts: Sequence[str | tuple[str, _Slot]],
        passes: int,
        rest: int,
    ) -> None:
        self._compile, self._tokenizer = compile, tokenizer
        self._visible_block, self._given = visible_block, given
        self._first_block = len(given) if blocks_after_prompt else 0
        self._policy = POLICY | ({} if has_mask_token else _NOISE)
        self._parts, self._rest = parts, rest
        self._slots = {part[0]: part[1] for part in parts if not isinstance(part, str)}
        self._passes = min(passes, len(self._slots))
        self._answers: dict[str, Answer] = {}
        self._made: list[Generation] = []

    @property
    def is_open(self) -> bool:
        """True if a question has no answer yet."""
        return len(self._answers) < len(self._slots)

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of ``Bundle.generate`` for the next request. Raises RequestError."""
        parts = [part if isinstance(part, str) else self._texts_of(part[0]) for part in self._parts]
        room = self._room(parts)
        content = {"parts": parts, "is_open": self._rest > 0}
        chosen = {
            "tokens": self._given,
            "constraint": self._compile(json.dumps(content)),
            "new_tokens": room,
        }
        return chosen | self._policy | ({"cache": "none"} if self._visible_block is None else {})

    def take(self, made: Generation) -> None:
        """Read the answers from ``made``, the result of a request with ``arguments``.

        Raises CancelledError if the request ended early.
        """
        self._made.append(made)
        open_slots = {name: self._texts_of(name) for name in self._slots}
        probs = made.option_probs
        if made.finish in ("cancelled", "deadline", "steps"):
            raise CancelledError("the request ended early, so there is no decision")
        if probs is None:  # no pass was needed, because each question had only one legal text
            probs = [1.0] * len(open_slots)
        found: dict[str, list[float]] = {}
        for name, texts in open_slots.items():
            found[name], probs = probs[: len(texts)], probs[len(texts) :]
        waiting = [name for name in self._slots if name not in self._answers]
        waiting.sort(key=lambda name: -max(found[name]))
        number = len(self._made)
        count = -(-len(waiting) // max(1, self._passes - number + 1))
        for name in waiting[:count]:
            self._answers[name] = _answer(self._slots[name], found[name], number)

    def decision(self) -> Decision:
        """Return the answers to all questions. ``is_open`` must be False."""
        assert not self.is_open
        text = "".join(
            part if isinstance(part, str) else self._texts_of(part[0])[0] for part in self._parts
        )
        return Decision({name: self._answers[name] for name in self._slots}, text, self._made)

    def _texts_of(self, name: str) -> tuple[str, ...]:
        """Return the legal texts of a question's slot.

        If the answer is final, only the chosen option is legal. Otherwise, all options are legal.
        """
        slot, answer = self._slots[name], self._answers.get(name)
        if answer is None:
            return slot.written
        return (slot.written[slot.labels.index(answer.best)],)

    def _room(self, parts: Sequence[str | tuple[str, ...]]) -> int:
        """Return an upper limit on the number of tokens of the answer and of the tokens after it.

        The answer is followed by an end token, or by ``rest`` mask tokens.
        """
        plain = [part if isinstance(part, str) else part[0] for part in parts]
        whole = "".join(plain)
        options = [
            (at, text)
            for at, part in enumerate(parts)
            for text in (() if isinstance(part, str) else part[1:])
        ]
        # Check the size before the answers are made. Their size grows with the product of the
        # number of options and the length of an answer.
        characters = sum(len(whole) - len(plain[at]) + len(text) for at, text in options)
        if characters > MOST_CHARACTERS:
            raise RequestError(
                f"{len(options)} answers, one for each option, have {characters} characters, more than {MOST_CHARACTERS}: "
                "ask fewer questions, or use shorter options"
            )
        texts = [whole]
        texts += ["".join([*plain[:at], text, *plain[at + 1 :]]) for at, text in options]
        owners = [-1, *(at for at, _ in options)]
        counts = []
        for text, tokens in zip(texts, self._tokenizer.encode_each(texts), strict=True):
            if tokens is None:
                raise RequestError(f"the bundle's tokenizer rejects the answer {shown(text)}")
            counts.append(len(tokens))
        extra: dict[int, int] = {}
        for at, count in zip(owners, counts, strict=True):
            extra[at] = max(extra.get(at, 0), count - counts[0])
        answer = counts[0] + sum(extra.values())
        rest = self._rest or 1
        # With block-causal attention, tokens after the answer's last block have no effect.
        if self._visible_block is not None:
            end = len(self._given) + answer - self._first_block
            rest = min(rest, max(1, -end % self._visible_block))
        return answer + rest


class Decides:
    """The methods of ``Bundle`` that make decisions."""

    if TYPE_CHECKING:
        _constraints: Constraints
        visible_block: int | None
        blocks_after_prompt: bool
        mask_token_id: int
        vocab_size: int

        @property
        def tokenizer(self) -> Tokenizer | None: ...

        @property
        def generate(self) -> Callable[..., Generation]: ...

    def decide(
        self,
        questions: Mapping[str, Question],
        *,
        prompt: str | None = None,
        tokens: Sequence[int] | None = None,
        chat: Sequence[Mapping[str, Any]] | None = None,
        passes: int = 1,
        answer: str | None = None,
        rest: int = 0,
        special_tokens: bool = False,
        cancel: threading.Event | None = None,
    ) -> Decision:
        """Answer named questions about a state, with a probability for each option.

        The probability of an answer is the product of its tokens' probabilities in one pass over
        the masked answer. If the answer can be split into tokens in several ways, the products of
        all ways are added. The probability of an option is the total probability of all legal
        answers with this option, divided by the total probability of all legal answers. If
        attention is block-causal, each block of the answer takes one pass. The pass sees the
        answers in earlier blocks.

        Args:
            questions: A dict that maps the name of each question to a ``Choice``, ``YesNo`` or
                ``Score``. If a question has instructions or descriptions, a list of all questions
                follows the prompt, or the last message of the chat.
            prompt: The state, as a text.
            tokens: The state, as token ids. In this case, the questions must have no instructions
                and no descriptions, because these are added to the state as text.
            chat: The state, as messages. Pass one of ``prompt``, ``tokens`` and ``chat``.
            passes: The number of times that the answer is predicted, 1 or more. After each
                prediction, the answers to the questions with the most certain answers become final.
                About the same number of answers becomes final each time. If ``passes`` is 1, all
                questions are answered together.
            answer: The text of the answer. ``<mask:NAME>`` marks the slot of the question ``NAME``.
                An option is written into this slot unchanged. If None, the answer is a JSON object
                with the names of the questions, in the layout that the denoiser was trained on.
            rest: Number of mask tokens after the answer. If above 0, any text may follow the
                answer, and the answer must not end in a slot. If 0, an end token must follow.
            special_tokens: As in ``generate``.
            cancel: An event that ends the decision within one pass.

        Returns:
            The answers.

        Raises:
            RequestError: A question or ``answer`` is invalid, or the bundle has no tokenizer.
            CancelledError: ``cancel`` was set.
        """
        deciding = self.deciding(
            questions,
            prompt=prompt,
            tokens=tokens,
            chat=chat,
            passes=passes,
            answer=answer,
            rest=rest,
            special_tokens=special_tokens,
        )
        while deciding.is_open:
            deciding.take(self.generate(**deciding.arguments(), cancel=cancel))
        return deciding.decision()

    def deciding(
        self,
        questions: Mapping[str, Question],
        *,
        prompt: str | None = None,
        tokens: Sequence[int] | None = None,
        chat: Sequence[Mapping[str, Any]] | None = None,
        passes: int = 1,
        answer: str | None = None,
        rest: int = 0,
        special_tokens: bool = False,
        limits: CompileLimits | None = None,
    ) -> Deciding:
        """Prepare a decision. The calling program runs its requests, for example with a scheduler.

        Args and Raises: as for ``decide``. ``limits`` are limits on compiling the constraints of
        the answers, as in ``constraint``.

        Returns:
            A ``Deciding`` object. It provides the arguments of each request, and reads the result
            of each request.
        """
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise RequestError("decisions need a tokenizer, and this bundle has none")
        if sum(value is not None for value in (prompt, tokens, chat)) != 1:
            raise RequestError("give one of prompt, tokens and chat")
        if count_of("passes", passes) < 1:
            raise RequestError("passes = 0: give 1 or more")
        is_json = answer is None
        slots = _slots(questions, self._constraints.layout if is_json else None)
        parts = (
            _object(slots, self._constraints.layout)
            if answer is None
            else _template(slots, text_of("answer", answer))
        )
        asked, chosen = described(questions), limits or CompileLimits()
        if tokens is not None:
            if asked:
                raise RequestError(
                    "the questions have instructions or descriptions, which cannot follow tokens: give prompt or chat"
                )
            given = token_ids(tokens)
        elif prompt is not None:
            text = text_of("prompt", prompt)
            given = tokenizer.encode(f"{text}\n\n{asked}" if asked else text, special_tokens)
        else:
            given = tokenizer.encode_chat(_told(chat, asked), None, special_tokens)
        return Deciding(
            lambda content: self._constraints.of_decisions(tokenizer, content, chosen),
            tokenizer,
            self.visible_block,
            self.blocks_after_prompt,
            self.mask_token_id < self.vocab_size,
            given,
            parts,
            passes,
            count_of("rest", rest),
        )


def described(questions: Mapping[str, Question]) -> str:
    """Return a text that lists the questions with instructions, options and descriptions.

    Returns "" if no question has instructions or descriptions.
    """
    slots = _slots(questions, None)
    lines = ["Answer these questions with a JSON object:"]
    is_needed = False
    for name, slot in slots.items():
        said = slot.question.instructions
        is_needed |= said is not None or any(each is not None for each in slot.descriptions)
        lines.append(f"{name}:" if said is None else f"{name}: {said}")
        for label, about in zip(slot.labels, slot.descriptions, strict=True):
            lines.append(f"- {label}" if about is None else f"- {label}: {about}")
    return "\n".join(lines) if is_needed else ""


def _told(chat: Any, asked: str) -> Any:
    """Return the chat, with the text ``asked`` added to its last message."""
    if not asked or not isinstance(chat, Sequence) or isinstance(chat, str) or not chat:
        return chat
    last = chat[-1]
    if not isinstance(last, Mapping) or not isinstance(last.get("content"), str):
        raise RequestError(
            "chat: the questions follow the text of the last message, so its content must be a text"
        )
    return [*chat[:-1], {**last, "content": f"{last['content']}\n\n{asked}"}]


def _slots(questions: Mapping[str, Question], layout: Layout | None) -> dict[str, _Slot]:
    """Check the questions and return their slots. With a layout, options are JSON."""
    if not isinstance(questions, Mapping) or not questions:
        raise RequestError(
            f"questions = {shown(questions)}: give a dict with at least one question"
        )
    found = {}
    for name, question in questions.items():
        where = f"questions[{text_of('the name of a question', name)!r}]"
        labels, about = _options(where, question)
        if question.instructions is not None:
            text_of(f"{where}.instructions", question.instructions)
        is_text = isinstance(question, Choice) and layout is not None
        written = tuple(layout.dumps(label) for label in labels) if is_text and layout else labels
        found[name] = _Slot(question, labels, written, about)
    return found


def _options(where: str, question: Question) -> tuple[tuple[str, ...], tuple[str | None, ...]]:
    """Return the labels and the descriptions of a question's options. Raises RequestError."""
    labels: tuple[str, ...]
    about: tuple[str | None, ...]
    if isinstance(question, YesNo):
        labels, about = ("true", "false"), (question.true, question.false)
    elif isinstance(question, Choice):
        options = question.options
        if isinstance(options, str) or not isinstance(options, (Mapping, Sequence)):
            raise RequestError(f"{where}: options = {shown(options)}: give a list or a dict")
        labels = tuple(text_of(f"{where}: an option", each) for each in options)
        about = tuple(options.values()) if isinstance(options, Mapping) else (None,) * len(labels)
        if len(set(labels)) < len(labels):
            raise RequestError(f"{where}: an option occurs twice")
    elif isinstance(question, Score):
        if isinstance(question.levels, str) or not isinstance(question.levels, Sequence):
            raise RequestError(f"{where}: levels = {shown(question.levels)}: give a list of texts")
        about = tuple(question.levels)
        labels = tuple(str(level) for level in range(len(about)))
    else:
        raise RequestError(f"{where} = {shown(question)}: give a Choice, YesNo or Score")
    if not 1 <= len(labels) <= MOST_OPTIONS:
        raise RequestError(f"{where} has {len(labels)} options: give 1 to {MOST_OPTIONS}")
    for each in about:
        if each is not None:
            text_of(f"{where}: a description", each)
    return labels, about


def _object(slots: Mapping[str, _Slot], layout: Layout) -> list[str | tuple[str, _Slot]]:
    """Return a JSON object with the answers, as a list of fixed texts and named slots."""
    start, between, end = layout.around(0, False)
    parts: list[str | tuple[str, _Slot]] = []
    for name, slot in slots.items():
        before = between if parts else "{" + start
        parts += [before + layout.dumps(name) + layout.key_separator, (name, slot)]
    return [*parts, end + "}"]


def _template(slots: Mapping[str, _Slot], answer: str) -> list[str | tuple[str, _Slot]]:
    """Split an answer at ``<mask:NAME>`` into texts and slots. Raises RequestError."""
    pieces = _SLOT.split(answer)
    names = pieces[1::2]
    for name in names:
        if name not in slots:
            raise RequestError(
                f"answer: <mask:{name}> names no question: the questions are {', '.join(slots)}"
            )
    if sorted(names) != sorted(slots):
        raise RequestError("answer: write <mask:NAME> exactly once for each question")
    return [
        (piece, slots[piece]) if at % 2 else piece
        for at, piece in enumerate(pieces)
        if at % 2 or piece
    ]


def _answer(slot: _Slot, found: Sequence[float], number: int) -> Answer:
    total = sum(found)
    probs = {label: each / total for label, each in zip(slot.labels, found, strict=True)}
    score = None
    if isinstance(slot.question, Score):
        score = sum(level * each for level, each in enumerate(probs.values()))
    return Answer(probs, number, score)
