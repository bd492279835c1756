"""Turns the bodies of HTTP requests into arguments of the runtime."""

from __future__ import annotations

import hashlib
import json
import secrets
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from dlm_export.serving.errors import ApiError, CompileError, of_runtime, unsupported
from dlm_export.serving.fields import (
    MOST_PROMPTS,
    MOST_STOPS,
    Call,
    ChatBody,
    CompletionBody,
    FimBody,
    Message,
    Prompt,
    Sampling,
    Tool,
)
from dlm_export.serving.hosting import Model
from dlm_runtime import RequestError
from dlm_runtime.constraints.compiled import CompileLimits
from dlm_runtime.generation.infill import HOLE_OPTIONS, Canvas, parts_of
from dlm_runtime.tools import Tools

COMPILE_LIMITS = CompileLimits(seconds=5)


@dataclass
class Ask:
    """All requests to the runtime that are made for one HTTP request.

    Args:
        given: One dict per request to the runtime. Each dict contains a prompt, token IDs or a
            chat.
        options: The options that all requests to the runtime share.
        choices: The number of answers per request. Each answer uses a different seed.
        tools: The functions that the denoiser may call. None if the HTTP request lists no
            functions.
        hole: The texts before and after the hole that is filled, and the canvas that contains the
            hole. If None, the generated text follows the prompt.
        stops: The stop strings, each of which ends the hole's text.
    """

    given: list[dict[str, Any]]
    options: dict[str, Any]
    choices: int = 1
    tools: Tools | None = None
    hole: tuple[tuple[str, str], Canvas] | None = None
    stops: list[str] = field(default_factory=list)

    def requests(self) -> list[dict[str, Any]]:
        """Return one dict per answer, with the arguments of ``Scheduler.submit``."""
        first = self.options.get("seed", 0)
        return [
            given | self.options | {"seed": first + number}
            for given in self.given
            for number in range(self.choices)
        ]


def chat(body: ChatBody, model: Model) -> Ask:
    """Read a chat. Raises ApiError.

    Reading a chat may take long, because the chat's constraint is compiled.
    """
    if not model.has_chat:
        raise ApiError(400, "this model has no chat template: use /v1/completions", "model")
    if body.top_logprobs and not body.logprobs:
        raise unsupported("top_logprobs", "it needs logprobs: true")
    messages = [message(each, f"messages[{at}]") for at, each in enumerate(body.messages)]
    options = _options(body, model, body.length)
    options["top_log_probs"] = body.top_logprobs or 0
    tools = _tools(body, model)
    constraint = _format(body)
    if tools is not None:
        options["tools"] = tools
        if tools.is_forced:
            if constraint:
                said = "a forced tool call has the format of the call"
                raise unsupported("response_format", said)
            _constrain(model, options, {"tools": tools}, "tools")
    if constraint and tools is None:
        _constrain(model, options, constraint, "response_format")
    return Ask([{"chat": messages}], options, body.n or 1, tools)


def completion(body: CompletionBody, model: Model) -> Ask:
    """Read a completion, with or without a suffix. Raises ApiError."""
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise unsupported("best_of", "it must equal n: ask for all answers")
    prompts = _prompts(body.prompt, model)
    alternatives = {"top_log_probs": body.logprobs or 0}
    if body.suffix is not None:
        if len(prompts) != 1 or "prompt" not in prompts[0]:
            raise unsupported("suffix", "give one prompt, as text")
        ask = hole(body, model, prompts[0]["prompt"], body.suffix, body.max_tokens)
        ask.options |= alternatives
        return ask
    return Ask(prompts, alternatives | _options(body, model, body.max_tokens), body.n or 1)


def fim(body: FimBody, model: Model) -> Ask:
    """Read a request that asks for the text between a prompt and a suffix. Raises ApiError."""
    return hole(body, model, body.prompt, body.suffix, body.max_tokens)


def hole(body: Sampling, model: Model, before: str, after: str, length: int | None) -> Ask:
    """Create a canvas with one hole.

    If the denoiser writes an end token into the hole, the rest of the hole is filled with padding.

    Args:
        body: The body of the HTTP request.
        model: The model that fills the hole.
        before, after: The texts before and after the hole.
        length: The number of tokens in the hole. If None, the bundle's default is used.

    Raises:
        ApiError: The model cannot fill holes, or an option cannot be used with holes.
    """
    options = _options(body, model, None)
    length = length or model.bundle.max_new_tokens
    stops = options.pop("stop_strings", [])
    own = body.dlm
    if own.prefix:
        raise unsupported("dlm.prefix", "write the text at the end of the prompt")
    try:
        canvas = Canvas(
            parts_of(model.bundle, (before, after), own.special_tokens), lengths=(length,)
        )
    except RequestError as err:
        raise of_runtime(err, "model") from err
    given = {"tokens": canvas.tokens(model.bundle.mask_token_id)}
    options.pop("max_new_tokens", None)
    return Ask(
        [given], HOLE_OPTIONS | options, body.n or 1, hole=((before, after), canvas), stops=stops
    )


# ---- Messages ----


def message(given: Message, where: str) -> dict[str, Any]:
    """Convert a message for the chat template. Raises ApiError, which names the field ``where``."""
    found: dict[str, Any] = {"role": "system" if given.role == "developer" else given.role}
    content = given.content
    if isinstance(content, list):
        for at, part in enumerate(content):
            if part.type not in ("text", "input_text") or part.text is None:
                raise unsupported(
                    f"{where}.content[{at}]", f"a part of type {part.type!r} is not text"
                )
        content = "".join(part.text or "" for part in content)
    if given.tool_calls:
        if given.role != "assistant":
            raise unsupported(f"{where}.tool_calls", "only the assistant calls functions")
        found["tool_calls"] = [_called(call) for call in given.tool_calls]
    elif content is None:
        raise ApiError(400, f"{where}.content: the message has no text", f"{where}.content")
    if content is not None:
        found["content"] = content
    for name in ("name", "tool_call_id"):
        if (value := getattr(given, name)) is not None:
            found[name] = value
    return found


def _called(call: Call) -> dict[str, Any]:
    """Convert an earlier function call for the chat template.

    In requests, the call's arguments are a JSON text. Chat templates need an object instead.
    """
    arguments: Any = call.function.arguments
    with suppress(ValueError, RecursionError):  # keep the text if it is invalid JSON
        arguments = json.loads(arguments)
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def functions(tools: list[Tool]) -> list[dict[str, Any]]:
    """Convert tools for the runtime and for chat templates."""
    return [tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for tool in tools]


def _tools(body: ChatBody, model: Model) -> Tools | None:
    chosen = body.tool_choice
    if not body.tools:
        if chosen not in (None, "auto", "none"):
            raise unsupported("tool_choice", "there are no tools to choose from: give tools")
        return None
    name = "auto" if chosen is None else chosen
    how = name if isinstance(name, str) else name.function.name
    if not isinstance(name, str) and how in ("auto", "required", "none"):
        raise unsupported("tool_choice", f"a function cannot have the name {how!r}")
    try:
        return model.bundle.tools(functions(body.tools), how, body.parallel_tool_calls)
    except RequestError as err:
        raise of_runtime(
            err, "tool_choice" if str(err).startswith("tool_choice") else "tools"
        ) from err


# ---- Options ----


CONSTRAINT_FIELDS = {
    "dlm",
    "parallel_tool_calls",
    "response_format",
    "text",
    "tool_choice",
    "tools",
}


def constraint_key(body: Any) -> bytes | None:
    """Return a hash of the fields that define a constraint, or None if there is no constraint."""
    own = body.dlm
    # A body of /v1/responses contains the format in the field ``text``.
    of_text = getattr(body, "text", None)
    found = [own.regex, own.grammar, own.enum, of_text and of_text.format]
    found += [getattr(body, name, None) for name in ("response_format", "tools")]
    if not any(found):
        return None
    return hashlib.sha256(body.model_dump_json(include=CONSTRAINT_FIELDS).encode()).digest()


def _options(body: Sampling, model: Model, max_new_tokens: int | None) -> dict[str, Any]:
    """Convert the fields that all completions share into arguments of the runtime."""
    own = body.dlm
    found: dict[str, Any] = dict(own.policy)
    for name in ("steps", "max_steps", "deadline_ms", "prefix", "special_tokens"):
        if value := getattr(own, name):
            found[name] = value
    if own.preset is not None:
        found["preset"] = own.preset
    if max_new_tokens is not None:
        found["max_new_tokens"] = max_new_tokens
    if body.logit_bias:
        raise unsupported("logit_bias", "this server cannot change the logits of single tokens")
    if body.stream_options is not None and not body.stream:
        raise unsupported("stream_options", "it needs stream: true")
    if body.diffusing and not body.stream:
        raise unsupported("diffusing", "it needs stream: true")
    if body.reasoning_effort is not None:
        if body.reasoning_effort not in model.efforts:
            raise unsupported(
                "reasoning_effort",
                "this model has no effort levels: run `dlm-export effort` on its bundle",
            )
        found["effort"] = body.reasoning_effort
    if body.temperature is not None:
        found["temperature"] = body.temperature
    if body.top_p is not None:
        found["top_p"] = body.top_p
    if body.top_k is not None:
        found["top_k"] = max(0, body.top_k)  # in the API, -1 allows all tokens
    is_random = found.get("temperature", model.bundle.policy(own.preset).temperature) > 0
    if body.seed is not None:
        found["seed"] = body.seed
    elif is_random and "seed" not in found:
        found["seed"] = secrets.randbits(48)
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if len(stops) > MOST_STOPS or not all(stops):
        raise unsupported("stop", f"give at most {MOST_STOPS} texts that are not empty")
    if stops:
        found["stop_strings"] = stops
    own_constraint = {
        name: value
        for name in ("regex", "grammar", "enum")
        if (value := getattr(own, name)) is not None
    }
    if own_constraint:
        _constrain(model, found, own_constraint, "dlm")
    return found


def _format(body: ChatBody) -> dict[str, Any]:
    """Return the arguments of ``Bundle.constraint`` for a response format.

    For the format "text", which needs no constraint, the function returns an empty dict.
    """
    wanted = body.response_format
    if wanted is None or wanted.type == "text":
        return {}
    if wanted.type == "json_object":
        return {"json_object": True}
    if wanted.json_schema is None:
        where = "response_format.json_schema"
        raise ApiError(400, f"{where}: the schema is missing", where, "missing_field")
    schema = wanted.json_schema.schema_
    return {"json_object": True} if schema is None else {"schema": schema}


def _constrain(
    model: Model, options: dict[str, Any], constraint: dict[str, Any], param: str
) -> None:
    """Compile a constraint, and add the constraint to ``options``. Raises ApiError."""
    if "constraint" in options:
        raise unsupported(param, "give one of response_format, dlm.regex, dlm.grammar and dlm.enum")
    try:
        options["constraint"] = model.bundle.constraint(
            **constraint, before=options.get("prefix", ""), limits=COMPILE_LIMITS, cache_dir=None
        )
    except RequestError as err:
        raise CompileError(400, str(err), param, "invalid_value") from err


def _prompts(prompt: Prompt, model: Model) -> list[dict[str, Any]]:
    """Return the prompts of a completion. Raises ApiError.

    The field contains one prompt or a list of prompts. Each prompt is text or a list of token IDs.
    """
    if isinstance(prompt, str):
        return [{"prompt": prompt}]
    if not prompt:
        raise ApiError(400, "prompt: the list is empty", "prompt", "invalid_value")
    if isinstance(prompt[0], int):
        return [_ids(prompt, model)]
    if len(prompt) > MOST_PROMPTS:
        raise unsupported("prompt", f"give at most {MOST_PROMPTS} prompts")
    return [{"prompt": each} if isinstance(each, str) else _ids(each, model) for each in prompt]


def _ids(ids: list[int], model: Model) -> dict[str, Any]:
    """Return a prompt that consists of token IDs. Raises ApiError if the prompt is too long.

    The runtime checks the length too, but only after converting the IDs. The conversion takes long
    for hundreds of thousands of IDs.
    """
    most = model.bundle.max_canvas_length
    if len(ids) > most:
        said = f"prompt: {len(ids)} token IDs are more than the denoiser's {most}"
        raise ApiError(400, said, "prompt", "invalid_value")
    return {"tokens": ids}
