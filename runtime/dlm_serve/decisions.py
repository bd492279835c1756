"""Implements ``/v1/systemone``, which answers questions about a given situation.

The form is that of TypeSafe's API. Mercury uses this form for its path ``/v1/decisions``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from dlm_runtime import Choice, Decision, DlmError, Score, YesNo
from dlm_runtime.generation.deciding import MOST_OPTIONS, Deciding, Question
from dlm_serve.errors import of_runtime, unsupported
from dlm_serve.field_arguments import COMPILE_LIMITS
from dlm_serve.fields import Body, Items
from dlm_serve.hosting import Model

MOST_QUESTIONS = 400

Text = str | dict[str, Any] | list[Any]
"""Text or JSON. The model reads JSON as text."""


class NoulCriteria(Body):
    true: Text | None = None
    false: Text | None = None


class NoulQuestion(Body):
    """A question whose answer is the probability that a statement is true."""

    type: Literal["noul"]
    instructions: Text | None = None
    criteria: NoulCriteria | None = None


class ChoiceQuestion(Body):
    """A question whose answer is a key of ``criteria``, which maps each key to a description."""

    type: Literal["choice"]
    instructions: Text | None = None
    criteria: Annotated[dict[str, Text | None], Field(min_length=1, max_length=MOST_OPTIONS)]


class ScoreQuestion(Body):
    """A question whose answer is the number of a level, counted from 0.

    ``criteria`` contains a description of each level, in order.
    """

    type: Literal["score"]
    instructions: Text | None = None
    criteria: Annotated[Items[Text], Field(min_length=1, max_length=MOST_OPTIONS)]


AnyQuestion = Annotated[NoulQuestion | ChoiceQuestion | ScoreQuestion, Field(discriminator="type")]


class OwnOptions(Body):
    """Options that other APIs do not contain. ``Bundle.decide`` documents them."""

    passes: Annotated[int, Field(ge=1, le=MOST_QUESTIONS)] = 1
    answer: str | None = None
    rest: Annotated[int, Field(ge=0, le=1 << 16)] = 0
    special_tokens: bool = False


class SystemOneBody(Body):
    """The body of ``/v1/systemone``, and of ``/v1/decisions`` in Mercury's form."""

    model: str | None = None
    state: Text
    questions: Annotated[dict[str, AnyQuestion], Field(min_length=1, max_length=MOST_QUESTIONS)]
    dlm: OwnOptions = Field(default_factory=OwnOptions)


def read(body: SystemOneBody, model: Model) -> Deciding:
    """Read a body. Raises ApiError."""
    for where, value in _texts(body):
        _refuse_images(where, value)
    questions = {name: _question(each) for name, each in body.questions.items()}
    fields = {name: f"questions.{name}" for name in questions}
    return begin(questions, given_text(_text(body.state), model), body.dlm, model, fields, "state")


def given_text(text: str, model: Model) -> dict[str, Any]:
    """Return a text as a chat, or as the prompt if the model has no chat template."""
    return {"chat": [{"role": "user", "content": text}]} if model.has_chat else {"prompt": text}


def begin(
    questions: Mapping[str, Question],
    given: Mapping[str, Any],
    own: OwnOptions,
    model: Model,
    fields: Mapping[str, str],
    where: str,
) -> Deciding:
    """Begin a decision about a prompt or a chat.

    Errors name the field ``where`` of the prompt, or one of ``fields``, which maps the name of each
    question to its field. Raises ApiError.
    """
    try:
        return model.bundle.deciding(questions, **given, **own.model_dump(), limits=COMPILE_LIMITS)
    except DlmError as err:
        said = str(err)
        found = (fields[name] for name in questions if said.startswith(f"questions[{name!r}]"))
        other = "dlm.answer" if said.startswith("answer") else prompt_or_questions(err, where)
        raise of_runtime(err, next(found, other)) from err


def prompt_or_questions(err: DlmError, where: str) -> str:
    """Return ``where``, the field of the prompt, if an error is about the prompt's text."""
    is_prompt = re.search("canvas of|template|^chat|^prompt|^the text", str(err)) is not None
    return where if is_prompt else "questions"


def reply(body: SystemOneBody, model: Model, made: Decision, counts: dict[str, int]) -> Any:
    answers: dict[str, Any] = {}
    for name, answer in made.answers.items():
        question = body.questions[name]
        if isinstance(question, NoulQuestion):
            answers[name] = {"type": "noul", "noul": answer.probabilities["true"]}
            continue
        answers[name] = {
            "type": question.type,
            "confidence": answer.confidence,
            "probabilities": answer.probabilities,
        }
        if isinstance(question, ScoreQuestion):
            legend = {str(level): each for level, each in enumerate(question.criteria)}
            answers[name] |= {"score": answer.score, "legend": legend}
        else:
            answers[name] |= {"choice": answer.best}
    usage = {
        "input_tokens": counts["prompt_tokens"],
        "output_tokens": counts["completion_tokens"],
        "denoising_passes": counts["denoising_passes"],
    }
    return {"answers": answers, "model": model.name, "usage": usage}


def counted(made: Decision) -> dict[str, int]:
    """Count the tokens and passes of a decision.

    The tokens of the prompt are counted once, even if the decision consists of several requests.
    """
    last = made.generations[-1]
    return {
        "prompt_tokens": last.prompt_tokens,
        "completion_tokens": last.completion_tokens,
        "denoising_passes": made.nfe,
    }


def _question(given: NoulQuestion | ChoiceQuestion | ScoreQuestion) -> Question:
    said = _text_or_none(given.instructions)
    if isinstance(given, NoulQuestion):
        about = given.criteria or NoulCriteria()
        return YesNo(said, _text_or_none(about.true), _text_or_none(about.false))
    if isinstance(given, ChoiceQuestion):
        options = {label: _text_or_none(each) for label, each in given.criteria.items()}
        return Choice(options, said)
    return Score([_text(each) for each in given.criteria], said)


def _text(value: Text) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _text_or_none(value: Text | None) -> str | None:
    return None if value is None else _text(value)


def _texts(body: SystemOneBody) -> Iterator[tuple[str, Any]]:
    """Yield the path and the value of each field whose value may be JSON."""
    yield "state", body.state
    for name, question in body.questions.items():
        yield f"questions.{name}.instructions", question.instructions


def _refuse_images(where: str, value: Any) -> None:
    """Raise ApiError if a state or an instruction contains an image."""
    open_values = [value]
    while open_values:
        each = open_values.pop()
        if isinstance(each, dict):
            if each.get("type") in ("image", "image_url", "input_image"):
                raise unsupported(where, "a bundle reads text, and no images")
            open_values += each.values()
        elif isinstance(each, list):
            open_values += each
