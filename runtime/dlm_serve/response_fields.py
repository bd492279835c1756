"""Defines the body of ``/v1/responses``, and translates such a body into the body of a chat.

A response is a chat in a different format, so the same code handles both after the translation. The
module translates error messages about the chat back, so that they name the fields of
``/v1/responses``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from dlm_serve.errors import ApiError, unsupported
from dlm_serve.field_arguments import Ask, chat
from dlm_serve.fields import (
    MOST_MESSAGES,
    MOST_TOOLS,
    Body,
    Call,
    CalledFunction,
    ChatBody,
    Count,
    Effort,
    Function,
    FunctionName,
    Items,
    JsonSchema,
    Message,
    NamedTool,
    Part,
    ResponseFormat,
    Shared,
    Tool,
    Verbosity,
)
from dlm_serve.hosting import Model

LOGPROBS = "message.output_text.logprobs"
"""If the body's field ``include`` contains this entry, the response contains log probabilities."""
REFUSED = {
    "previous_response_id": "this server stores no responses: send the earlier items in input",
    "conversation": "this server stores no conversations: send the earlier items in input",
    "prompt": "this server stores no prompts: send the text in instructions and input",
    "background": "send the request with stream, or wait for its answer",
    "truncation": "this server does not shorten the input: give disabled",
}
"""Maps each unsupported field to the reason why it is not supported.

For these fields, the server accepts only the values None, false and "disabled".
"""
Status = Literal["in_progress", "completed", "incomplete"]


class ItemPart(Part):
    """A part of a message.

    The parts of an earlier answer may contain annotations and log probabilities.
    """

    annotations: Items[dict[str, Any]] | None = None
    logprobs: Items[dict[str, Any]] | None = None


class MessageItem(Body):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Items[ItemPart]
    id: str | None = None
    status: Status | None = None
    phase: str | None = None


class CallItem(Body):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: Status | None = None


class OutputItem(Body):
    type: Literal["function_call_output"]
    call_id: str
    output: str | Items[ItemPart]
    id: str | None = None
    status: Status | None = None


ITEMS = {
    "message": "MessageItem",
    "function_call": "CallItem",
    "function_call_output": "OutputItem",
}


def _item(given: Any) -> str | None:
    """Return the name of an item's class. An item without a type is a message."""
    kind = given.get("type", "message") if isinstance(given, dict) else given
    return ITEMS.get(kind) if isinstance(kind, str) else None


item_class = Discriminator(
    _item,
    custom_error_type="item_type",
    custom_error_message=f"an item is an object whose type is one of {', '.join(ITEMS)}",
)
Item = Annotated[
    Annotated[MessageItem, Tag("MessageItem")]
    | Annotated[CallItem, Tag("CallItem")]
    | Annotated[OutputItem, Tag("OutputItem")],
    item_class,
]


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: str = "schema"
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class Text(Body):
    format: TextFormat | None = None
    verbosity: Verbosity | None = None  # a hint, which has no effect


class Reasoning(Body):
    effort: Effort | None = None
    # Hints that have no effect, because this server generates no reasoning text.
    summary: str | None = None
    generate_summary: str | None = None


class FunctionTool(Body):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedFunction(Body):
    type: Literal["function"]
    name: str


class ResponseStreamOptions(Body):
    include_obfuscation: bool | None = None  # a hint, which has no effect


class ResponsesBody(Shared):
    """The body of ``/v1/responses``."""

    input: str | Annotated[Items[Item], Field(min_length=1, max_length=MOST_MESSAGES - 1)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    text: Text = Field(default_factory=Text)
    reasoning: Reasoning | None = None
    tools: Annotated[Items[FunctionTool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: Literal["auto", "required", "none"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    include: (
        Items[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None
    ) = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    stream_options: ResponseStreamOptions | None = None
    # This server does not support the following fields, for the reasons in REFUSED.
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None
    background: bool | None = None
    truncation: str | None = None

    @property
    def length_field(self) -> str:
        """The name of the field that limits the length of an answer."""
        return "max_output_tokens"

    @property
    def has_logprobs(self) -> bool:
        return LOGPROBS in (self.include or [])


def response(body: ResponsesBody, model: Model) -> Ask:
    """Read a request to ``/v1/responses``, and compile the request's constraint. Raises ApiError."""
    for name, why in REFUSED.items():
        if getattr(body, name) not in (None, False, "disabled"):
            raise unsupported(name, why)
    if body.top_logprobs and not body.has_logprobs:
        raise unsupported("top_logprobs", f"it needs include: [{LOGPROBS!r}]")
    messages, places = messages_of(body.input, body.instructions)
    try:
        ask = chat(_chat_body(body, messages), model)
    except ApiError as err:
        raise translated(err, places) from err
    if ask.wanted is not None and ask.wanted.field == "response_format":
        ask.wanted = replace(ask.wanted, field="text.format")
    return ask


def _chat_body(body: ResponsesBody, messages: list[Message]) -> ChatBody:
    chosen: Any = body.tool_choice
    if isinstance(chosen, NamedFunction):
        chosen = NamedTool(type="function", function=FunctionName(name=chosen.name))
    tools = None
    if body.tools is not None:
        tools = [
            Tool(type="function", function=Function(**each.model_dump(exclude={"type"})))
            for each in body.tools
        ]
    return ChatBody(
        model=body.model,
        messages=messages,
        max_completion_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        response_format=_format(body.text.format),
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
        tools=tools,
        tool_choice=chosen,
        parallel_tool_calls=body.parallel_tool_calls,
        logprobs=body.has_logprobs,
        top_logprobs=body.top_logprobs,
        stream=body.stream,
        dlm=body.dlm,
    )


def _format(wanted: TextFormat | None) -> ResponseFormat | None:
    if wanted is None:
        return None
    if wanted.type != "json_schema":
        return ResponseFormat(type=wanted.type)
    if wanted.schema_ is None:
        where = "text.format.schema"
        raise ApiError(400, f"{where}: the schema is missing", where, "missing_field")
    schema = JsonSchema(name=wanted.name, schema=wanted.schema_, strict=wanted.strict)
    return ResponseFormat(type=wanted.type, json_schema=schema)


def messages_of(
    given: str | Sequence[MessageItem | CallItem | OutputItem], instructions: str | None = None
) -> tuple[list[Message], list[str]]:
    """Return the messages of a chat, and the path of each message's field in the body.

    If a function call follows a message of the assistant, the call is added to this message,
    because the message and the call are parts of one answer.
    """
    found: list[Message] = []
    places: list[str] = []
    if instructions is not None:
        found.append(Message(role="system", content=instructions))
        places.append("instructions")
    if isinstance(given, str):
        return [*found, Message(role="user", content=given)], [*places, "input"]
    for at, item in enumerate(given):
        if isinstance(item, CallItem):
            function = CalledFunction(name=item.name, arguments=item.arguments)
            call = Call(id=item.call_id, function=function)
            if found and found[-1].role == "assistant":
                found[-1].tool_calls = [*(found[-1].tool_calls or []), call]
                continue
            made = Message(role="assistant", tool_calls=[call])
        elif isinstance(item, OutputItem):
            made = Message(role="tool", tool_call_id=item.call_id, content=_content(item.output))
        else:
            made = Message(role=item.role, content=_content(item.content))
        found.append(made)
        places.append(f"input[{at}]")
    return found, places


def _content(given: str | Sequence[ItemPart]) -> str | list[Part]:
    """Return the content of a message, in which all texts have the type that chats use."""
    if isinstance(given, str):
        return given
    return [
        Part(type="text" if part.type == "output_text" else part.type, text=part.text)
        for part in given
    ]


def translated(err: ApiError, places: list[str]) -> ApiError:
    """Translate an error about a chat, so that the error names a field of the original body."""

    def renamed(found: re.Match[str]) -> str:
        if found[1] is not None:
            return places[int(found[1])] if int(found[1]) < len(places) else found[0]
        return {"response_format": "text.format", "reasoning_effort": "reasoning.effort"}[found[0]]

    def translated(text: str) -> str:
        return re.sub(r"messages\[(\d+)\]|response_format|reasoning_effort", renamed, text)

    param = "input" if err.param == "messages" else err.param and translated(err.param)
    return ApiError(err.status, translated(err.message), param, err.code)
