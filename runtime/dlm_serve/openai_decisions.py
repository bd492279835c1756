"""Implements OpenAI's form of ``/v1/decisions``, which answers a list of questions about an input."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, RootModel, StrictBool, StrictStr, Tag, model_validator

from dlm_runtime import Choice, Decision, Score, YesNo
from dlm_runtime.generation.deciding import MOST_OPTIONS, Deciding, Question
from dlm_serve import decisions
from dlm_serve.errors import ApiError, unsupported
from dlm_serve.field_arguments import message
from dlm_serve.fields import MOST_MESSAGES, Body, Items
from dlm_serve.hosting import Model
from dlm_serve.response_fields import (
    CallItem,
    ItemPart,
    MessageItem,
    OutputItem,
    item_class,
    messages_of,
    translated,
)


class InputPart(ItemPart):
    data: dict[str, Any] | Items[dict[str, Any]] | None = None
    # Parts of other types have these fields. The error names the type.
    image_url: Any = None
    detail: str | None = None
    refusal: str | None = None
    prompt_cache_breakpoint: dict[str, Any] | None = None  # a hint, which has no effect

    @model_validator(mode="after")
    def _json_as_text(self) -> InputPart:
        if self.type == "input_json" and self.data is not None:
            self.type, self.text = "input_text", json.dumps(self.data, ensure_ascii=False)
        return self


class InputMessage(MessageItem):
    content: str | Items[InputPart]  # type: ignore[assignment]


Item = Annotated[
    Annotated[InputMessage, Tag("MessageItem")]
    | Annotated[CallItem, Tag("CallItem")]
    | Annotated[OutputItem, Tag("OutputItem")],
    item_class,
]


class Asked(Body):
    """The fields that all questions share."""

    name: str | None = None
    instructions: str | Items[InputPart]


class PredicateQuestion(Asked):
    """A question whose answer is the probability that a statement is true."""

    type: Literal["predicate"]


class ChoiceOption(Body):
    value: StrictStr | StrictBool
    description: str | None = None


class ValueQuestion(Asked):
    """A question whose answer is one of several values."""

    type: Literal["choice"]
    choices: Annotated[Items[ChoiceOption], Field(min_length=2, max_length=MOST_OPTIONS)]


class Level(Body):
    label: str
    description: str | None = None


class LevelQuestion(Asked):
    """A question whose answer is the number of a level, counted from 0."""

    type: Literal["score"]
    levels: Annotated[Items[Level], Field(min_length=2, max_length=MOST_OPTIONS)]


AnyQuestion = Annotated[
    PredicateQuestion | ValueQuestion | LevelQuestion, Field(discriminator="type")
]


class DecisionsBody(Body):
    """The body of ``/v1/decisions`` in OpenAI's form."""

    model: str | None = None
    input: str | Annotated[Items[Item], Field(min_length=1, max_length=MOST_MESSAGES)]
    questions: Annotated[
        Items[AnyQuestion], Field(min_length=1, max_length=decisions.MOST_QUESTIONS)
    ]
    dlm: decisions.OwnOptions = Field(default_factory=decisions.OwnOptions)
    # The following fields are hints, which have no effect on this server.
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    safety_identifier: str | None = None


def _form(given: Any) -> str:
    """Return the name of the class of a body. Mercury's form has ``state`` instead of ``input``."""
    is_mercury = isinstance(given, dict) and "state" in given and "input" not in given
    return "SystemOneBody" if is_mercury else "DecisionsBody"


class AnyDecisionBody(RootModel[Any]):
    """The body of ``/v1/decisions``, in OpenAI's or Mercury's form."""

    root: Annotated[
        Annotated[DecisionsBody, Tag("DecisionsBody")]
        | Annotated[decisions.SystemOneBody, Tag("SystemOneBody")],
        Discriminator(_form),
    ]


def read(body: DecisionsBody, model: Model) -> Deciding:
    """Read a body. Raises ApiError."""
    fields = {name: f"questions[{at}]" for at, name in enumerate(_names(body))}
    asked = zip(fields.items(), body.questions, strict=True)
    questions = {name: _question(each, where) for (name, where), each in asked}
    return decisions.begin(questions, _given(body, model), body.dlm, model, fields, "input")


def reply(body: DecisionsBody, model: Model, made: Decision, counts: dict[str, int]) -> Any:
    answers = []
    for question, answer in zip(body.questions, made.answers.values(), strict=True):
        shares = answer.probabilities
        found: dict[str, Any] = {"type": question.type, "name": question.name}
        if isinstance(question, PredicateQuestion):
            found["probability"] = shares["true"]
        elif isinstance(question, ValueQuestion):
            values = {_label(each.value): each.value for each in question.choices}
            found |= {"choice": values[answer.best], "confidence": answer.confidence}
            found["probabilities"] = [
                {"value": value, "probability": shares[label]} for label, value in values.items()
            ]
        else:
            found |= {"score": answer.score, "confidence": answer.confidence}
            found["probabilities"] = [
                {"value": at, "label": level.label, "probability": shares[str(at)]}
                for at, level in enumerate(question.levels)
            ]
        answers.append(found)
    given, generated = counts["prompt_tokens"], counts["completion_tokens"]
    usage = {
        "input_tokens": given,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": generated,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": given + generated,
        "denoising_passes": counts["denoising_passes"],
    }
    return {"answers": answers, "model": model.name, "usage": usage}


def _names(body: DecisionsBody) -> list[str]:
    """Return a different name for each question. Raises ApiError if two have the same name."""
    given = [question.name for question in body.questions]
    found = []
    for at, name in enumerate(given):
        if name is not None and name in given[:at]:
            where = f"questions[{at}].name"
            said = f"{where}: two questions have the name {name!r}"
            raise ApiError(400, said, where, "invalid_value")
        made = name or f"question_{at + 1}"
        while name is None and made in given:
            made += "_"
        found.append(made)
    return found


def _given(body: DecisionsBody, model: Model) -> dict[str, Any]:
    """Return the prompt or the chat. Raises ApiError."""
    if isinstance(body.input, str):
        return decisions.given_text(body.input, model)
    if not model.has_chat:
        raise unsupported("input", "the model has no chat template: give the input as text")
    found, places = messages_of(body.input)
    try:
        return {"chat": [message(each, f"messages[{at}]") for at, each in enumerate(found)]}
    except ApiError as err:
        raise translated(err, places) from err


def _question(given: PredicateQuestion | ValueQuestion | LevelQuestion, where: str) -> Question:
    said = given.instructions
    if not isinstance(said, str):
        for at, part in enumerate(said):
            if part.type != "input_text" or part.text is None:
                place = f"{where}.instructions[{at}]"
                raise unsupported(place, f"a part of type {part.type!r} is not text")
        said = "".join(part.text or "" for part in said)
    if isinstance(given, PredicateQuestion):
        return YesNo(said)
    if isinstance(given, LevelQuestion):
        about = [(each.label, each.description) for each in given.levels]
        return Score([label if text is None else f"{label}: {text}" for label, text in about], said)
    options = {_label(each.value): each.description for each in given.choices}
    kinds = {type(each.value) for each in given.choices}
    if len(options) < len(given.choices) or len(kinds) > 1:
        why = (
            "two choices are equal" if len(kinds) == 1 else "choices are all texts or all booleans"
        )
        raise unsupported(f"{where}.choices", why)
    if kinds == {bool}:
        return YesNo(said, options["true"], options["false"])
    return Choice(options, said)


def _label(value: str | bool) -> str:
    return value if isinstance(value, str) else json.dumps(value)
