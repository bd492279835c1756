"""The bodies of requests. An unknown field is an error, so a misspelled one is never ignored.

The names and types are those of OpenAI's API and of Mercury's, which adds ``diffusing``,
``realtime``, ``reasoning_summary`` and fill-in-the-middle. Options that exist only here are in the
object ``dlm``.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from dlm_export.serving.errors import ApiError

MOST_CHOICES = 16
MOST_STOPS = 16
MOST_MESSAGES = 4096
MOST_TOOLS = 128
MOST_PROMPTS = 64

_Item = TypeVar("_Item")
Items = Annotated[list[_Item], Field(fail_fast=True)]
"""A list that is read up to its first wrong item. Without it, a body of a million wrong items takes
seconds."""
Count = Annotated[int, Field(ge=1, le=1 << 24)]
Effort = Literal["instant", "low", "medium", "high"]


class Body(BaseModel):
    """A part of a body that rejects unknown fields."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class Own(Body):
    """Options of this server that OpenAI's API does not have.

    ``policy`` holds fields of the runtime's ``Policy``, such as ``{"threshold": 0.8}``.
    """

    preset: str | None = None
    policy: dict[str, Any] = Field(default_factory=dict)
    steps: Annotated[int, Field(ge=0)] = 0
    max_steps: Annotated[int, Field(ge=0)] = 0
    deadline_ms: Annotated[float, Field(ge=0)] = 0.0
    regex: str | None = None
    grammar: str | None = None
    enum: Items[str] | None = None
    prefix: str = ""
    special_tokens: bool = False


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: bool = False  # a hint


class Part(Body):
    type: str
    text: str | None = None


class CalledFunction(Body):
    name: str
    arguments: str = "{}"


class Call(Body):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Items[Part] | None = None
    name: str | None = None
    tool_calls: Items[Call] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None


class JsonSchema(Body):
    name: str
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Function(Body):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


class FunctionName(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: FunctionName


class Sampling(Body):
    """Fields that all completions share."""

    model: str
    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] | None = None
    stop: str | Items[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    reasoning_effort: Effort | None = None
    diffusing: bool | None = None
    # This server has no penalties: only the values that switch them off are accepted.
    frequency_penalty: Literal[0] | None = None
    presence_penalty: Literal[0] | None = None
    repetition_penalty: Literal[1] | None = None
    logit_bias: dict[str, float] | None = None
    dlm: Own = Field(default_factory=Own)
    # Hints, which have no effect here.
    user: str | None = None
    realtime: bool | None = None
    service_tier: Literal["auto", "default"] | None = None
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    store: Literal[False] | None = None


class ChatBody(Sampling):
    """The body of ``/v1/chat/completions``."""

    messages: Annotated[Items[Message], Field(min_length=1, max_length=MOST_MESSAGES)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[Items[Tool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: Literal["auto", "required", "none"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    # Hints of Mercury's API: this server has no text of reasoning to sum up.
    reasoning_summary: bool | None = None
    reasoning_summary_wait: bool | None = None


Prompt = str | Items[int] | Items[str] | Items[Items[int]]


class CompletionBody(Sampling):
    """The body of ``/v1/completions``."""

    prompt: Prompt
    suffix: str | None = None
    echo: Literal[False] | None = None
    best_of: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None


class FimBody(Sampling):
    """The body of ``/v1/fim/completions``."""

    prompt: str
    suffix: str = ""


class TokenizeBody(Body):
    """The body of ``/tokenize``: a text, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Items[Message] | None = None
    special_tokens: bool = False


class DetokenizeBody(Body):
    """The body of ``/detokenize``."""

    model: str | None = None
    tokens: Annotated[Items[int], Field(max_length=1 << 20)]


def read(kind: type[Body], content: bytes) -> Any:
    """Read a body. Raises ApiError with the field that is wrong."""
    try:
        return kind.model_validate_json(content)
    except ValidationError as err:
        raise _invalid(err.errors(include_url=False, include_context=False)) from err


def _invalid(errors: list[ErrorDetails]) -> ApiError:
    """The error for the first problem of a body."""
    unknown = [each for each in errors if each["type"] == "extra_forbidden"]
    first = _most_specific(unknown or errors)
    path = _path(first)
    param = ""
    for part in path:
        param += f"[{part}]" if isinstance(part, int) else f".{part}" if param else str(part)
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {first['msg']}", code="invalid_json")
    if unknown:
        return ApiError(
            400, f"{param}: this server does not know the field", param, "unknown_field"
        )
    code = "missing_field" if first["type"] == "missing" else "invalid_value"
    return ApiError(
        400, f"{param}: {first['msg'][0].lower()}{first['msg'][1:]}", param or None, code
    )


def _most_specific(errors: list[ErrorDetails]) -> ErrorDetails:
    """The first problem. If its field has alternatives, each has a problem: take the deepest one.

    A problem other than a wrong type goes before a wrong type, which means another alternative.
    """
    path = _path(errors[0])
    same = [each for each in errors if _path(each)[: len(path)] == path]
    return max(same, key=lambda each: (len(_path(each)), not each["type"].endswith("_type")))


def _path(error: ErrorDetails) -> list[int | str]:
    """The field of a problem. Names of alternatives are left out."""
    place = error["loc"]
    return [part for at, part in enumerate(place) if not _is_variant(place, at)]


VARIANTS = ("str", "NamedTool", "NamedFunction", "MessageItem", "CallItem", "OutputItem")


def _is_variant(place: tuple[int | str, ...], at: int) -> bool:
    """True for a part of pydantic's path that names the alternative of a union, not a field."""
    part = place[at]
    if place[0] == "questions" and at in (1, 2):  # the name of a question, then its type
        return at == 2
    return isinstance(part, str) and (
        part in VARIANTS or part.startswith(("list[", "dict[", "literal["))
    )
