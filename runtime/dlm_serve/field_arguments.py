"""Turns the bodies of HTTP requests into arguments of the runtime."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from dlm_runtime import Job, Policy, RequestError
from dlm_runtime.constraints.compiled import CompileLimits, Constraint
from dlm_runtime.generation.infill import HOLE_OPTIONS, Canvas, parts_of
from dlm_runtime.text.tokenizer import Tokenizer
from dlm_runtime.tools import Tools
from dlm_serve.errors import ApiError, of_runtime, unsupported
from dlm_serve.fields import (
    EFFORTS,
    MOST_PROMPTS,
    MOST_STOPS,
    MOST_VALUES,
    Call,
    ChatBody,
    CompletionBody,
    FimBody,
    Message,
    Prompt,
    Sampling,
    Tool,
    counts,
)
from dlm_serve.hosting import Model

COMPILE_LIMITS = CompileLimits(seconds=5)


@dataclass(frozen=True)
class Wanted:
    """A constraint that is not compiled yet.

    Args:
        arguments: The arguments of ``Bundle.constraint``.
        field: The field of the body that contains the constraint.
    """

    arguments: dict[str, Any]
    field: str


@dataclass
class Ask:
    """All requests to the runtime that are made for one HTTP request.

    Args:
        given: The token IDs of each prompt.
        options: The options that all requests to the runtime share.
        choices: The number of answers per prompt. Each answer uses a different seed.
        wanted: The constraint on the answers. None if there is no constraint.
        tools: The functions that the denoiser may call. None if the HTTP request lists no
            functions.
        hole: The texts before and after the hole that is filled, and the canvas that contains the
            hole. If None, the generated text follows the prompt.
        stops: The stop strings, each of which ends the hole's text.
        fence: The line before and after the hole's text in an answer, if it is not empty.
    """

    given: list[list[int]]
    options: dict[str, Any]
    choices: int = 1
    wanted: Wanted | None = None
    tools: Tools | None = None
    hole: tuple[tuple[str, str], Canvas] | None = None
    stops: list[str] = field(default_factory=list)
    fence: str = ""

    def find_constraint(self, model: Model) -> bool:
        """Use the constraint if it is stored. Return True if nothing must be compiled.

        Raises ApiError if the constraint is known to be invalid.
        """
        return self._constrain(model.bundle.stored_constraint)

    def compile_constraint(self, model: Model) -> None:
        """Compile the constraint, unless it is stored. Raises ApiError."""
        self._constrain(model.bundle.constraint)

    def _constrain(self, make: Callable[..., Constraint | None]) -> bool:
        if self.wanted is None:
            return True
        how = {"before": self.options.get("prefix", ""), "limits": COMPILE_LIMITS}
        try:
            made = make(**self.wanted.arguments, **how, cache_dir=None)
        except RequestError as err:
            raise of_runtime(err, self.wanted.field) from err
        self.options["constraint"] = made
        return made is not None

    def submit(self, model: Model, has_events: bool) -> list[Job]:
        """Submit one request per answer. Raises DlmError.

        If one of these requests is rejected, the other requests are cancelled.
        """
        first = self.options.get("seed", 0)
        return [
            model.scheduler.submit(
                tokens=tokens, events=has_events, **(self.options | {"seed": first + number})
            )
            for tokens in self.given
            for number in range(self.choices)
        ]


def chat(body: ChatBody, model: Model) -> Ask:
    """Read a chat, and convert it to tokens. Raises ApiError."""
    if body.top_logprobs and not body.logprobs:
        raise unsupported("top_logprobs", "it needs logprobs: true")
    messages = [message(each, f"messages[{at}]") for at, each in enumerate(body.messages)]
    options = _options(body, model, body.length)
    options["top_log_probs"] = body.top_logprobs or 0
    tools = _tools(body, model)
    own, wanted, field = _own_constraint(body), _format(body), "response_format"
    if tools is not None:
        options["tools"] = tools
        if tools.is_forced:  # a response format is only for answers without calls
            wanted, field = {"tools": tools}, "tools"
        elif wanted and tools.choice == "auto":
            wanted = {"tools": replace(tools, otherwise=wanted)}
    if own and wanted:
        raise unsupported(field, "give one of response_format, dlm.regex, dlm.grammar and dlm.enum")
    tokens = chat_tokens(messages, model, body.dlm.special_tokens, tools, template_options(body))
    constraint = own or (Wanted(wanted, field) if wanted else None)
    return Ask([tokens], options, body.n or 1, constraint, tools)


def completion(body: CompletionBody, model: Model) -> Ask:
    """Read a completion, with or without a suffix. Raises ApiError."""
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise unsupported("best_of", "it must equal n: ask for all answers")
    prompts = _prompts(body.prompt, model)
    count = len(prompts) * (body.n or 1)
    if count > model.most_requests:
        said = (
            f"{count} answers are more than the {model.most_requests} that this model takes at once"
        )
        raise unsupported("prompt", said)
    alternatives = {"top_log_probs": body.logprobs or 0}
    if body.suffix is not None:
        if len(prompts) != 1 or not isinstance(prompts[0], str):
            raise unsupported("suffix", "give one prompt, as text")
        ask = hole(body, model, prompts[0], body.suffix, _hole_tokens(body, model))
        ask.options |= alternatives
        return ask
    options = alternatives | _options(body, model, body.max_tokens)
    given = [prompt_tokens(each, model, body.dlm.special_tokens) for each in prompts]
    return Ask(given, options, body.n or 1, _own_constraint(body))


def fim(body: FimBody, model: Model) -> Ask:
    """Read a request that asks for the text between a prompt and a suffix. Raises ApiError."""
    return hole(body, model, body.prompt, body.suffix, _hole_tokens(body, model))


def _hole_tokens(body: Sampling, model: Model) -> int:
    """Return the number of mask tokens in a hole. ``max_tokens`` lowers the bundle's default."""
    usual = model.bundle.max_new_tokens
    return min(body.max_tokens or usual, usual)


def hole(body: Sampling, model: Model, before: str, after: str, length: int) -> Ask:
    """Create a canvas with one hole.

    If the denoiser writes an end token into the hole, the rest of the hole is filled with padding.

    Args:
        body: The body of the HTTP request.
        model: The model that fills the hole.
        before, after: The texts before and after the hole.
        length: The number of tokens in the hole, unless ``dlm.new_tokens`` gives it. If the canvas
            has less room, the hole is shorter.

    Raises:
        ApiError: The model cannot fill holes, or an option cannot be used with holes.
    """
    options = _options(body, model, None)
    stops = options.pop("stop_strings", [])
    own = body.dlm
    if own.prefix:
        raise unsupported("dlm.prefix", "write the text at the end of the prompt")
    texts, bundle = (before, after), model.bundle
    try:
        parts = parts_of(bundle, texts, own.special_tokens)
        room = bundle.max_canvas_length - sum(len(part) for part in parts)
        canvas = Canvas(parts, lengths=(own.new_tokens or max(1, min(length, room)),))
        tokens = canvas.tokens(bundle.mask_token_id, bundle.max_canvas_length)
    except RequestError as err:
        raise of_runtime(err, None if model.can_infill else "model") from err
    options.pop("new_tokens", None)
    made = Ask([tokens], HOLE_OPTIONS | options, body.n or 1, _own_constraint(body))
    made.hole, made.stops = (texts, canvas), stops
    return made


# ---- Tokens ----


def tokenizer_of(model: Model) -> Tokenizer:
    """Return the tokenizer of a model. Raises ApiError if the model has none."""
    tokenizer = model.bundle.tokenizer
    if tokenizer is None:
        said = "this model has no tokenizer: it accepts and returns token ids"
        raise ApiError(400, said, "model")
    return tokenizer


def prompt_tokens(prompt: str | list[int], model: Model, special_tokens: bool) -> list[int]:
    """Return the token IDs of a prompt. Raises ApiError."""
    if not isinstance(prompt, str):
        return prompt
    try:
        return tokenizer_of(model).encode(prompt, special_tokens)
    except RequestError as err:
        raise of_runtime(err, "prompt") from err


def chat_tokens(
    messages: list[dict[str, Any]],
    model: Model,
    special_tokens: bool,
    tools: Tools | None = None,
    options: dict[str, Any] | None = None,
) -> list[int]:
    """Return the token IDs of a chat. Raises ApiError."""
    if not model.has_chat:
        raise ApiError(400, "this model has no chat template: use /v1/completions", "model")
    told = None if tools is None else tools.told
    try:
        return tokenizer_of(model).encode_chat(messages, told, special_tokens, options)
    except RequestError as err:
        raise of_runtime(err, "messages") from err


def template_options(body: ChatBody) -> dict[str, Any]:
    """Return more variables of the chat template.

    If the client asks for no reasoning, templates with this switch leave out the thinking.
    """
    options = {"enable_thinking": False} if body.reasoning_effort == "none" else {}
    return options | (body.chat_template_kwargs or {})


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
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (value := getattr(given, name)) is not None:
            found[name] = value
    return found


def _called(call: Call) -> dict[str, Any]:
    """Convert an earlier function call for the template, which needs arguments as an object."""
    arguments: Any = call.function.arguments
    if counts(arguments.encode("utf-8", "replace"))[0] > MOST_VALUES:
        said = f"the arguments of a call have more than {MOST_VALUES} strings, lists and objects"
        raise ApiError(400, said, code="too_many_values")
    with suppress(ValueError, RecursionError):  # keep the text if it is invalid JSON
        arguments = json.loads(arguments)
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def functions(tools: list[Tool]) -> list[dict[str, Any]]:
    """Convert tools for the runtime and for chat templates."""
    left_out: dict[str, Any] = {"cache_control": True, "function": {"strict"}}
    return [tool.model_dump(exclude_none=True, exclude=left_out) for tool in tools]


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


def _options(body: Sampling, model: Model, max_new_tokens: int | None) -> dict[str, Any]:
    """Convert the fields that all completions share into arguments of the runtime."""
    own = body.dlm
    try:
        Policy().with_fields(own.policy)  # raises an error if a name is not the name of a field
    except RequestError as err:
        raise of_runtime(err, "dlm.policy") from err
    found: dict[str, Any] = dict(own.policy)
    names = ("steps", "max_steps", "deadline_ms", "prefix", "special_tokens", "new_tokens")
    for name in names:
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
        level = EFFORTS.get(body.reasoning_effort, body.reasoning_effort)
        if level in model.efforts:
            found["effort"] = level
        elif body.reasoning_effort not in ("none", "minimal"):
            raise unsupported("reasoning_effort", f"this model has no effort levels{model.advice}")
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
    return found


def _own_constraint(body: Sampling) -> Wanted | None:
    """Return the constraint of the object ``dlm``, or None."""
    given = body.dlm.model_dump(include={"regex", "grammar", "enum"}, exclude_none=True)
    return Wanted(given, "dlm") if given else None


def _format(body: ChatBody) -> dict[str, Any]:
    """Return the constraint of a response format. It is empty for the format "text"."""
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


def _prompts(prompt: Prompt, model: Model) -> list[str | list[int]]:
    """Return the prompts, each as text or token IDs. Raises ApiError."""
    found: list[Any] = [prompt] if isinstance(prompt, str) else prompt
    if not found:
        raise ApiError(400, "prompt: the list is empty", "prompt", "invalid_value")
    if isinstance(found[0], int):
        found = [found]
    if len(found) > MOST_PROMPTS:
        raise unsupported("prompt", f"give at most {MOST_PROMPTS} prompts")
    for each in found:
        if not isinstance(each, str):
            check_ids(each, model, "prompt")
    return found


def check_ids(ids: list[int], model: Model, field: str) -> None:
    """Raise ApiError if a list of token IDs is longer than the model's context.

    The runtime checks the length too, but only after converting the IDs. The conversion takes long
    for hundreds of thousands of IDs.
    """
    most = model.bundle.max_canvas_length
    if len(ids) > most:
        said = f"{field}: {len(ids)} token IDs are more than the denoiser's {most}"
        raise ApiError(400, said, field, "invalid_value")
