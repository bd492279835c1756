"""Defines the bodies of requests. Unknown fields are rejected, because they may be misspelled.

OpenAI's API defines the names and types of most fields. Mercury's API adds ``diffusing``,
``realtime``, ``reasoning_summary`` and fill-in-the-middle. The object ``dlm`` contains the options
that only this server has.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from dlm_serve.errors import ApiError

MOST_CHOICES = 16
MOST_STOPS = 16
MOST_MESSAGES = 2048
MOST_TOOLS = 128
MOST_PROMPTS = 64
MOST_VALUES = 1 << 14
"""The maximum total number of strings, lists and objects in a body.

The limit is needed because pydantic holds the interpreter's lock while it checks a body, even in a
separate thread. All other requests wait during this time.
"""
MOST_COMMAS = 1 << 18
"""The maximum number of commas outside strings in a body, for models with long contexts.

Commas separate the numbers in lists, so this limits how many numbers a body contains. pydantic
checks a number faster than a string, so this limit is larger than ``MOST_VALUES``. See
``commas_for``.
"""
MOST_PROBLEMS = 1000
"""If a body contains more problems than this, the error message states only their number.
"""

_Item = TypeVar("_Item")
Items = Annotated[list[_Item], Field(fail_fast=True)]
"""A list whose check stops at the first wrong item.

Otherwise, checking a million wrong items would take seconds.
"""
Count = Annotated[int, Field(ge=1, le=1 << 24)]
Effort = Literal["none", "minimal", "instant", "low", "medium", "high", "xhigh", "max"]
EFFORTS = {"none": "instant", "minimal": "instant", "xhigh": "high", "max": "high"}
"""Maps the values of OpenAI's API that are not effort levels to the nearest level."""
Verbosity = Literal["low", "medium", "high"]


class Body(BaseModel):
    """A body of a request, or a part of it. Unknown fields are rejected.

    A field that is null counts as absent, whether it is known or not. Clients send null for fields
    that they do not set, such as ``audio`` of an earlier answer.
    """

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {name: each for name, each in given.items() if each is not None}


class Own(Body):
    """Options that OpenAI's API does not contain.

    ``policy`` contains fields of the runtime's ``Policy``, such as ``{"threshold": 0.8}``.
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
    new_tokens: Count | None = None


Counts = Literal["none", "last", "each"]
"""Which events of a stream contain token counts: no event, the last event, or each event."""


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: bool = False  # a field of vLLM's API
    include_obfuscation: bool = False  # a hint, which has no effect

    @property
    def counts(self) -> Counts:
        if not self.include_usage:
            return "none"
        return "each" if self.continuous_usage_stats else "last"


class Cached(Body):
    cache_control: dict[str, Any] | None = None  # a hint for other servers' caches of prompts


class Part(Cached):
    type: str
    text: str | None = None


class CalledFunction(Body):
    name: str
    arguments: str = "{}"
    parsed_arguments: Any = None  # OpenAI's Python client adds it to ``arguments``


class Call(Body):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class Message(Cached):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Items[Part] | None = None
    name: str | None = None
    tool_calls: Items[Call] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None  # a field of DeepSeek's API, which chat templates read
    refusal: str | None = None
    # OpenAI's clients send these fields back with an earlier answer. They have no effect.
    parsed: Any = None
    annotations: Items[dict[str, Any]] | None = None


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


class Tool(Cached):
    type: Literal["function"]
    function: Function


class FunctionName(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: FunctionName


class Shared(Body):
    """The fields that all completions and responses share."""

    model: str
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    stream: bool | None = None
    dlm: Own = Field(default_factory=Own)
    # The following fields are hints, which have no effect on this server.
    user: str | None = None
    service_tier: str | None = None
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    store: bool | None = None


class Sampling(Shared):
    """The fields that all completions share."""

    max_tokens: Count | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] | None = None
    stop: str | Items[str] | None = None
    stream_options: StreamOptions | None = None
    reasoning_effort: Effort | None = None
    diffusing: bool | None = None
    # This server does not implement penalties, so it accepts only the values that switch penalties
    # off.
    frequency_penalty: Literal[0] | None = None
    presence_penalty: Literal[0] | None = None
    repetition_penalty: Literal[1] | None = None
    logit_bias: dict[str, float] | None = None
    realtime: bool | None = None  # a hint of Mercury's API, which has no effect

    @property
    def length_field(self) -> str:
        """The name of the field that limits the length of an answer."""
        return "max_tokens"


class ChatSampling(Sampling):
    """The fields that chats and edits share."""

    max_completion_tokens: Count | None = None

    @property
    def length_field(self) -> str:
        """The name of the field that limits the length of an answer.

        If the body contains both fields, ``max_completion_tokens`` has priority.
        """
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def length(self) -> int | None:
        """The maximum length of an answer in tokens, or None for the default of the bundle."""
        found: int | None = getattr(self, self.length_field)
        return found


class ChatBody(ChatSampling):
    """The body of ``/v1/chat/completions``."""

    messages: Annotated[Items[Message], Field(min_length=1, max_length=MOST_MESSAGES)]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[Items[Tool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: Literal["auto", "required", "none"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    modalities: Items[Literal["text"]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # a field of vLLM's API
    # The following hints have no effect. This server generates no reasoning text.
    nextEdit: bool | None = None
    verbosity: Verbosity | None = None
    reasoning_summary: bool | None = None
    reasoning_summary_wait: bool | None = None


TokenId = Annotated[int, Field(strict=True)]
# In the mode "left_to_right", pydantic stops at the first type that fits. In its default mode,
# pydantic would check a list of token ids several times. ``TokenId`` is strict, so that pydantic
# does not convert the text "7" to a number.
Prompt = Annotated[
    str | Items[TokenId] | Items[str] | Items[Items[TokenId]], Field(union_mode="left_to_right")
]


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
    """The body of ``/tokenize``, which contains either a text or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Items[Message] | None = None
    special_tokens: bool = False


class DetokenizeBody(Body):
    """The body of ``/detokenize``."""

    model: str | None = None
    tokens: Annotated[Items[int], Field(max_length=1 << 20)]


def commas_for(context: int) -> int:
    """Return the maximum number of commas outside strings in a body.

    ``context`` is the longest context of the server's models, in tokens. The result leaves room for
    the maximum number of prompts with ``context`` token IDs each, but is at most ``MOST_COMMAS``.
    """
    return min(MOST_VALUES + MOST_PROMPTS * context, MOST_COMMAS)


def read(kind: type[BaseModel], content: bytes, most_commas: int = MOST_COMMAS) -> Any:
    """Read a body.

    Raises ApiError if a field is wrong, or if the body contains too many values. The error names
    the field.
    """
    # The count is an upper bound, because it includes brackets inside strings.
    at_most = content.count(b'"') // 2 + content.count(b"[") + content.count(b"{")
    if at_most > MOST_VALUES or content.count(b",") > most_commas:
        count, commas = counts(content)
        if count > MOST_VALUES:
            said = f"the body has more than {MOST_VALUES} strings, lists and objects"
            raise ApiError(400, said, code="too_many_values")
        if commas > most_commas:
            said = f"the body has more than {most_commas} commas outside strings"
            raise ApiError(400, said, code="too_many_values")
    try:
        return kind.model_validate_json(content)
    except ValidationError as err:
        if err.error_count() > MOST_PROBLEMS:
            said = f"the body has {err.error_count()} unknown fields or wrong values"
            raise ApiError(400, said, code="invalid_value") from None
        found = err.errors(include_url=False, include_context=False, include_input=False)
        raise _invalid(found) from err


def counts(content: bytes) -> tuple[int, int]:
    """Count the values in JSON text.

    Returns the total number of strings, lists and objects, and the number of commas outside
    strings. Names of fields count as strings. If there are more than ``MOST_VALUES`` strings, the
    number of commas is 0.
    """
    # Remove escaped quotes, which do not delimit strings.
    bare = content.replace(rb"\\", b"").replace(rb"\"", b"")
    count = bare.count(b'"') // 2
    if count > MOST_VALUES:
        return count, 0  # do not count commas, because there are already too many strings
    outside = b"".join(bare.split(b'"')[::2])
    return count + outside.count(b"[") + outside.count(b"{"), outside.count(b",")


def _invalid(errors: list[ErrorDetails]) -> ApiError:
    """Convert the first problem of a body into an error of the API."""
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
    """Return the most specific problem of the first wrong field.

    If a field allows several types, pydantic reports a problem for each allowed type. This function
    chooses the problem with the longest path. If several paths are equally long, the function
    ignores problems of the kind "wrong type", because the value may have a different allowed type.
    """
    path = _path(errors[0])
    same = [each for each in errors if _path(each)[: len(path)] == path]
    return max(same, key=lambda each: (len(_path(each)), not each["type"].endswith("_type")))


def _path(error: ErrorDetails) -> list[int | str]:
    """Return the path of the wrong field: pydantic's path without the names of allowed types."""
    place = error["loc"]
    return [part for at, part in enumerate(place) if not _is_variant(place, at)]


BODIES = ("DecisionsBody", "SystemOneBody")
VARIANTS = (
    "str",
    "bool",
    "NamedTool",
    "NamedFunction",
    "MessageItem",
    "CallItem",
    "OutputItem",
    *BODIES,
)


def _is_variant(place: tuple[int | str, ...], at: int) -> bool:
    """Return True if element ``at`` of pydantic's path ``place`` names a type, not a field."""
    part = place[at]
    # In ``questions``, the path contains a question's name or number, then the question's type.
    field = int(place[0] in BODIES)
    if place[field : field + 1] == ("questions",) and at - field in (1, 2):
        return at - field == 2
    return isinstance(part, str) and (
        part in VARIANTS or part.startswith(("list[", "dict[", "literal[", "function-before["))
    )
