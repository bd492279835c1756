"""A request: its options in Python, and its struct in the C ABI."""

from __future__ import annotations

import ctypes as C
import math
import operator
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypedDict

from dlm_runtime.abi import native as _native
from dlm_runtime.constraints.layout import LAYOUTS, Layout
from dlm_runtime.errors import RequestError, shown
from dlm_runtime.generation.results import Event, Generation
from dlm_runtime.policy import TEXT_FIELDS, Policy
from dlm_runtime.tools import CallFormat, ToolCall, Tools, format_of

if TYPE_CHECKING:
    from dlm_runtime.constraints.compiled import Constraint
    from dlm_runtime.text.tokenizer import Tokenizer


KINDS = ("schema", "regex", "grammar", "enum", "json_object", "json_lines", "csv", "xml")
"""The arguments of ``Bundle.constraint`` that describe the allowed texts, except ``tools``."""
MOST_TOP_LOG_PROBS = 20
JSON_KINDS = ("schema", "json_object", "json_lines", "tools")


@dataclass(frozen=True)
class Options:
    """The options of a request, without its prompt, tokens or chat.

    The default value of each option means "not set".

    Args:
        max_new_tokens: The largest number of tokens to generate after the prompt, 0 or more. If the
            canvas has less room, the limit is lowered to this room. If None, the limit is
            ``Bundle.max_new_tokens``.
        new_tokens: The exact number of mask tokens to add after the prompt and then fill, as in
            published decoding loops. If None, ``max_new_tokens`` applies. With full attention, the
            canvas then starts with the answer length that the denoiser was trained on. It grows by
            one block when all its positions are decided without an end token. If ``Bundle.resizes``
            is true, it grows only by expand tokens, and a prompt with mask tokens gets no others.
        preset: Name of one of the bundle's presets. If None, the bundle's default preset is used.
        effort: The effort level: "instant", "low", "medium" or "high". The policy that was fitted
            for this level is used.
        steps: Planned number of passes for all mask tokens with which the canvas starts. The passes
            are split evenly over the blocks. 0 means the number that the policy plans.
        max_steps: The request ends after this many passes. 0 means no limit.
        deadline_ms: The time limit of the request in milliseconds. When this time is over, the
            request ends within one pass. 0 means no limit.
        stop_strings: The text ends before the first occurrence of one of these strings. Blocks
            after the block that contains this occurrence are not filled.
        prefix: The start of the answer.
        top_log_probs: Number of alternatives to report for each token, 0 to 20. If this number is
            larger than the denoiser's number of candidates, each pass must also return its logits.
            Returning logits takes memory and time.
        special_tokens: How the text of a special token, such as ``<|eos|>``, is encoded in the
            prompt, the messages, the tools and ``prefix``. If True, the text is encoded as the
            special token. By default, the text is encoded as ordinary text, so that a user cannot
            end or mask an answer. Tokens that the tokenizer and the chat template add are not
            affected.
        prefix_group: Number of a group of requests, 0 or more. A request reuses the keys and values
            of prompts only from requests with the same number, and from prompt caches.
        constraint: A constraint that ``Bundle.constraint`` compiled. The text satisfies the
            constraint with every policy and every limit. The only exception is a text that a stop
            string cuts off.
        schema, regex, grammar, enum, json_object, json_lines, csv, xml: A constraint, as an
            argument of ``Bundle.constraint``. The constraint is compiled when it is first used. The
            constrained text includes ``prefix``. (For a compiled ``constraint``, pass the prefix to
            ``Bundle.constraint`` as ``before``.)
        json_layout: The white space of the JSON text for ``schema``, ``json_object``,
            ``json_lines`` or ``tools``: a name of ``LAYOUTS``, or a ``Layout``. None means the
            layout that the denoiser was trained on, or "compact" if this layout is unknown.
        max_depth, any_order, more_properties: As in ``Bundle.constraint``.
        tools: The functions that the text may call, or the result of ``Bundle.tools``. The chat
            template receives these functions. Each function has the form ``{"type": "function",
            "function": {"name", "description", "parameters"}}``, where ``parameters`` is a JSON
            Schema.
        tool_choice: "auto": the text may consist of calls, or of ordinary text. "required": the
            text is constrained to be a call. "none": the chat template does not receive the tools.
            The name of a function, or ``{"type": "function", "function": {"name": "..."}}``: the
            text is constrained to be a call of this function.
        parallel_tool_calls: If True, a text that is constrained to be a call may contain several
            calls. If None, several calls are allowed if the call format defines a text before the
            first call and a text after the last call, as the formats "list" and "lines" do.
        call_format: The format of calls: a name of ``tools.FORMATS``, or a ``CallFormat``. If None,
            the format that the denoiser was trained on is used. If this format is unknown, the
            format that the chat template shows is used. If the chat template shows no format, each
            call is a JSON object on a separate line.
        template_options: More variables of the chat template, such as ``{"enable_thinking": False}``.
            The template decides which variables have an effect.
        policy: A dict of the fields of ``Policy`` to change. These fields are changed after
            ``preset`` and ``effort`` were applied.

    If a request ends because of ``max_steps``, ``deadline_ms`` or a cancellation, the result
    contains the canvas at the time when the request ended. ``Generation.finish`` gives the reason.
    In this case, ``Generation.tool_calls`` is empty, unless the whole text was already decided.

    Raises:
        RequestError: An option has the wrong type. The message names the option.
    """

    max_new_tokens: int | None = None
    new_tokens: int | None = None
    preset: str | None = None
    effort: str | None = None
    steps: int = 0
    max_steps: int = 0
    deadline_ms: float = 0.0
    stop_strings: Sequence[str] = ()
    prefix: str = ""
    top_log_probs: int = 0
    special_tokens: bool = False
    prefix_group: int = 0
    constraint: Constraint | None = None
    schema: Any = None
    regex: str | None = None
    grammar: str | None = None
    enum: Sequence[str] | None = None
    json_object: bool = False
    json_lines: Any = None
    csv: Any = None
    xml: Any = None
    json_layout: str | Layout | None = None
    max_depth: int | None = None
    any_order: bool = False
    more_properties: bool = False
    tools: Sequence[Mapping[str, Any]] | Tools | None = None
    tool_choice: str | Mapping[str, Any] = "auto"
    parallel_tool_calls: bool | None = None
    call_format: str | CallFormat | None = None
    template_options: Mapping[str, Any] = field(default_factory=dict)
    policy: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("steps", "max_steps", "prefix_group"):
            count_of(name, getattr(self, name))
        count_of("top_log_probs", self.top_log_probs, MOST_TOP_LOG_PROBS)
        for name in ("json_object", "special_tokens"):
            flag_of(name, getattr(self, name))
        if not isinstance(self.template_options, Mapping):
            raise RequestError(
                f"template_options = {shown(self.template_options)}: give a dict of the template's variables"
            )
        if self.parallel_tool_calls is not None and not isinstance(self.parallel_tool_calls, bool):
            raise RequestError(
                f"parallel_tool_calls = {shown(self.parallel_tool_calls)}: give True, False or None"
            )
        for name in ("max_new_tokens", "new_tokens"):
            if getattr(self, name) is not None:
                count_of(name, getattr(self, name))
        if self.max_new_tokens is not None and self.new_tokens is not None:
            raise RequestError(
                "give max_new_tokens, a limit, or new_tokens, an exact number, not both"
            )
        milliseconds_of("deadline_ms", self.deadline_ms)
        texts_of("stop_strings", self.stop_strings)
        text_of("prefix", self.prefix)
        kinds = {*self.constrained_by} | ({"tools"} if self.tools is not None else set())
        is_json = not kinds.isdisjoint(JSON_KINDS)
        for name in ("json_layout", "any_order", "more_properties"):
            if getattr(self, name) not in (None, False) and not is_json:
                raise RequestError(f"{name} is for {listed(JSON_KINDS)}: give one of these as well")
        if self.max_depth is not None:
            count_of("max_depth", self.max_depth)
            if not (is_json or kinds & {"grammar", "xml"}):
                raise RequestError(
                    "max_depth is for schema, grammar, json_object, json_lines, xml and tools: give one of these "
                    "as well"
                )

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Options:
        """Create options from ``values``.

        A name that is not an option must be the name of a policy field.
        """
        own = {name: value for name, value in values.items() if name in OPTION_NAMES}
        return cls(**own, policy={name: value for name, value in values.items() if name not in own})

    @property
    def constrained_by(self) -> dict[str, Any]:
        """Return the options that define a constraint, as arguments of ``Bundle.constraint``."""
        given = {name: getattr(self, name) for name in KINDS}
        given["json_object"] = self.json_object or None
        return {name: value for name, value in given.items() if value is not None}

    def tools_for(self, tokenizer: Tokenizer | None, call_format: str | None) -> Tools | None:
        """Check the tools in these options. Returns None if the options contain no tools.

        ``call_format`` is the name of the call format that the bundle's denoiser was trained on.
        Raises RequestError if a tool is invalid.
        """
        others = {
            "tool_choice": self.tool_choice != "auto",
            "parallel_tool_calls": self.parallel_tool_calls is not None,
        }
        others |= {"call_format": self.call_format is not None}
        given = [name for name, is_given in others.items() if is_given]
        if self.tools is None:
            if given:
                raise RequestError(f"{given[0]} is for tools: give tools as well")
            return None
        if self.constrained_by:
            raise RequestError(
                f"give tools or {next(iter(self.constrained_by))}, not both: each constrains the text"
            )
        if tokenizer is None:
            raise RequestError("tools need a tokenizer, and this bundle has none: leave them out")
        if isinstance(self.tools, Tools):
            if given:
                raise RequestError(
                    f"{given[0]}: these tools were made with Bundle.tools: give {given[0]} there"
                )
            return self.tools
        written = format_of(
            call_format if self.call_format is None else self.call_format,
            tokenizer.template,
        )
        is_parallel = (
            bool(written.start) if self.parallel_tool_calls is None else self.parallel_tool_calls
        )
        return Tools.checked(self.tools, self.tool_choice, written, is_parallel)


OPTION_NAMES = tuple(each.name for each in fields(Options) if each.name != "policy")


class RequestOptions(TypedDict, total=False):
    """The options of ``generate`` for type checkers.

    These options are the fields of ``Options`` and ``Policy``.
    """

    max_new_tokens: int | None
    new_tokens: int | None
    preset: str | None
    effort: str | None
    steps: int
    max_steps: int
    deadline_ms: float
    stop_strings: Sequence[str]
    prefix: str
    top_log_probs: int
    special_tokens: bool
    prefix_group: int
    constraint: Constraint | None
    schema: Any
    regex: str | None
    grammar: str | None
    enum: Sequence[str] | None
    json_object: bool
    json_lines: Any
    csv: Any
    xml: Any
    json_layout: str | Layout | None
    max_depth: int | None
    any_order: bool
    more_properties: bool
    tools: Sequence[Mapping[str, Any]] | Tools | None
    tool_choice: str | Mapping[str, Any]
    parallel_tool_calls: bool | None
    call_format: str | CallFormat | None
    template_options: Mapping[str, Any]

    select: str
    score: str
    commit: str
    compare: str
    remask: str
    cache: str
    stop: str
    block_length: int
    steps_per_block: int
    refresh: int
    threshold: float
    factor: float
    entropy_bound: float
    timestep_eps: float
    temperature: float
    seed: int
    store: str
    sub_block_length: int
    edit_passes: int
    edit_threshold: float
    top_p: float
    top_k: int
    score_of: str
    cfg_scale: float
    schedule: str
    reserve: str
    reuse_prompt: int
    next_block: float
    temperature_drop: float
    stable_entropy: float
    stable_passes: int
    cache_delay: int
    refresh_interval: int
    finish_threshold: float
    force_next: float


class InfillOptions(RequestOptions, total=False):
    """The options of ``infill`` for type checkers.

    These options are the options of ``generate_batch``.
    """

    max_batch: int
    policies: Sequence[Mapping[str, Any]] | None
    cancel: threading.Event | Sequence[threading.Event | None] | None


class Request:
    """A request in the form of the C ABI. This object owns the memory to which the C structs point.

    Args:
        tokenizer: The tokenizer of the bundle. None if the bundle only accepts token ids.
        given: The prompt, the tokens and the chat. Exactly one of these three values is not None.
        options: The options, already checked.
        policy: The complete policy, including the changes of the options.
        tools: The checked tools of the options.
        constraint: The constraint on the text, or None.
        note: A function to which each result of a constrained request is passed, except the results
            of decisions.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        given: tuple[Any, ...],
        options: Options,
        policy: Policy,
        tools: Tools | None,
        constraint: Constraint | None,
        note: Callable[[Generation], None],
    ) -> None:
        prompt, tokens, chat = given
        if sum(value is not None for value in given) != 1:
            raise RequestError("give one of prompt, tokens and chat")
        self.tools, self._tokenizer, self._note = tools, tokenizer, note
        self.is_constrained = constraint is not None
        stop_strings = texts_of("stop_strings", options.stop_strings)
        if tokenizer is None and stop_strings:
            raise RequestError(
                "stop_strings need a tokenizer, and this bundle has none: leave them out"
            )
        if options.template_options and (tokens is not None or prompt is not None):
            raise RequestError("template_options are for the chat template: give chat")
        if tokens is not None:
            self.given = token_ids(tokens)
        elif tokenizer is None:
            raise RequestError("this bundle has no tokenizer: give tokens")
        elif prompt is not None:
            if not isinstance(prompt, str):
                raise RequestError(f"prompt = {shown(prompt)} is not a text: give a str, or tokens")
            self.given = tokenizer.encode(text_of("prompt", prompt), options.special_tokens)
        else:
            self.given = tokenizer.encode_chat(
                chat,
                None if tools is None else tools.told,
                options.special_tokens,
                options.template_options,
            )
        before = len(self.given)
        if options.prefix:
            if tokenizer is None:
                raise RequestError(
                    "a prefix needs a tokenizer, and this bundle has none: append its tokens to the others"
                )
            prefix = tokenizer.encode_plain(options.prefix, options.special_tokens)
            self.given = [*self.given, *prefix]
        self.native = native = _native.initialised(_native.Request)
        # The C struct ``native`` points into the memory of these attributes, so they must live as
        # long as ``native``.
        self._policy, self._constraint = native_policy(policy), constraint
        self._tokens = (C.c_int32 * len(self.given))(*self.given)
        self._stops = (C.c_char_p * len(stop_strings))(
            *(stop.encode().replace(b"\0", b"\xff") for stop in stop_strings)
        )
        self._decode = _native.DecodeFn(self.decoded) if tokenizer is not None else None
        self.error: BaseException | None = None  # the exception that the tokenizer raised
        if self.given:
            native.tokens = C.cast(self._tokens, _native.i32p)
            native.token_count = len(self.given)
        native.policy = C.pointer(self._policy)
        if options.new_tokens:
            native.new_tokens = options.new_tokens
        elif options.new_tokens == 0 or options.max_new_tokens is not None:
            native.max_new_tokens = options.max_new_tokens or 0
        native.steps = count_of("steps", options.steps)
        native.max_steps = count_of("max_steps", options.max_steps)
        native.deadline_ms = milliseconds_of("deadline_ms", options.deadline_ms)
        native.top_log_probs, native.prefix_group = options.top_log_probs, options.prefix_group
        native.constraint = None if constraint is None else constraint.handle
        if stop_strings:
            native.stop_strings, native.stop_count = self._stops, len(stop_strings)
        has_room = 0 not in (options.new_tokens, options.max_new_tokens)
        native.text_start = before if options.prefix and has_room else -1
        if self._decode is not None:
            native.text, native.decode = _native.TEXT_RESULT, self._decode

    def decoded(
        self, _: int, tokens: Any, count: int, string: int, capacity: int, size: Any
    ) -> int:
        """Decode tokens for the native library. This function is a ``dlm_decode_fn``."""
        assert self._tokenizer is not None
        try:
            text = self._tokenizer.decode(tokens[:count]).encode()
        except BaseException as err:  # ctypes would print and ignore the error
            self.error = err
            return 5  # DLM_ENGINE_FAILED
        size[0] = len(text)
        C.memmove(string, text, min(capacity, len(text)))
        return 0

    def generation(self, result: Any) -> Generation:
        """Convert a ``dlm_result`` to a ``Generation``.

        The request must have ended without an error.
        """
        stats, length = result.stats.contents, result.length
        text = (
            None if self._tokenizer is None else C.string_at(result.text, result.text_size).decode()
        )
        is_call = self.tools is not None and text is not None and result.is_text_decided
        made = Generation(
            tokens=result.tokens[:length],
            text=text,
            nfe=stats.nfe,
            timings={name: getattr(stats, f"{name}_s") for name in TIMINGS},
            cache_bytes=stats.cache_bytes,
            cached_tokens=stats.cached_tokens,
            passes={name: getattr(stats, f"{name}_passes") for name in PASSES}
            | ({"verify": stats.verify_passes} if stats.verify_passes else {}),
            acceptance_length=(
                stats.verified_tokens / stats.verify_passes if stats.verify_passes else None
            ),
            finish=_native.finish_name(result.finish),
            prompt_tokens=result.prompt_tokens,
            completion_tokens=result.completion_tokens,
            log_probs=[None if math.isnan(value) else value for value in result.log_probs[:length]],
            undecided=[bool(flag) for flag in result.undecided[:length]],
            constraint_log_prob_loss=result.constraint_log_prob_loss,
            top_log_probs=_alternatives(result),
            option_probs=result.option_probs[: result.option_count]
            if result.option_count
            else None,
            tool_calls=self._calls(text or "", result) if is_call else [],
        )
        # A large loss usually means that the constraint demands an unusual JSON layout. A decision
        # commits all positions in one pass, so its loss says nothing about the layout.
        if self.is_constrained and made.option_probs is None:
            self._note(made)
        return made

    def _calls(self, text: str, result: Any) -> list[ToolCall]:
        assert self.tools is not None
        assert self._tokenizer is not None
        if not self.tools.has_marks(self._tokenizer.split):
            return self.tools.calls(text)
        first = result.prompt_tokens
        tokens = result.tokens[first : first + result.completion_tokens]
        return self.tools.calls_of(self._tokenizer.pieces(tokens))

    def event(self, step: Any, text: str | None) -> Event:
        """Convert a step that the native library reports to an ``Event`` without a result.

        ``text`` is the text that was complete after the previous step.
        """
        length = step.length
        delta = None if self._tokenizer is None else C.string_at(step.text, step.text_size).decode()
        return Event(
            canvas=step.canvas[:length],
            undecided=[bool(flag) for flag in step.undecided[:length]],
            guess=step.guess[:length],
            score=step.score[:length],
            block=(step.block_start, step.block_end),
            nfe=step.nfe,
            committed=step.committed,
            text=None if delta is None else (text or "") + delta,
            delta=delta,
            done=bool(step.done),
            result=None,
        )


TIMINGS = ("prefill", "passes", "selection", "cache", "total")
PASSES = ("prefill", "denoise", "store")

MOST_COUNT = (1 << 24) - 1
MOST_INDENT = 64  # largest number of spaces per level in a JSON layout


def _alternatives(result: Any) -> list[list[tuple[int, float]]]:
    count = result.top_count
    if count == 0:
        return []
    tokens = result.top_tokens[: result.length * count]
    pairs = list(zip(tokens, result.top_log_probs[: len(tokens)], strict=True))
    return [
        [(token, log_prob) for token, log_prob in pairs[first : first + count] if token >= 0]
        for first in range(0, len(pairs), count)
    ]


def count_of(name: str, value: int, most: int = MOST_COUNT) -> int:
    """Check an option that must be an integer from 0 to ``most``.

    Raises RequestError, which names the option.
    """
    try:
        count = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        count = -1
    if not 0 <= count <= most:
        raise RequestError(f"{name} = {shown(value)} is not an integer in 0..{most}")
    return count


def milliseconds_of(name: str, value: float) -> float:
    """Check an option that must be a time. Raises RequestError, which names the option."""
    try:
        return C.c_double(value).value
    except (TypeError, ValueError, OverflowError) as err:
        raise RequestError(f"{name} = {shown(value)} is not a number of milliseconds") from err


def text_of(name: str, value: str) -> str:
    """Check an option that must be text without unpaired surrogates.

    Raises RequestError, which names the option.
    """
    if not isinstance(value, str):
        raise RequestError(f"{name} = {shown(value)} is not a text")
    try:
        value.encode()
    except UnicodeEncodeError as err:
        raise RequestError(
            f"{name} = {shown(value)}: character {err.start} is half of a surrogate pair, which UTF-8 cannot encode"
        ) from err
    return value


def flag_of(name: str, value: bool) -> bool:
    """Check an option that must be True or False. Raises RequestError, which names the option."""
    if not isinstance(value, bool):
        raise RequestError(f"{name} = {shown(value)}: give True or False")
    return value


def listed(names: Sequence[str]) -> str:
    """Join names for a message, as in "a, b and c"."""
    return f"{', '.join(names[:-1])} and {names[-1]}"


def texts_of(name: str, value: Sequence[str]) -> tuple[str, ...]:
    """Check that an option is a list of texts. Raises RequestError, which names the option."""
    try:
        texts = None if isinstance(value, (str, bytes, Mapping)) else tuple(value)
    except TypeError:
        texts = None
    if texts is None or not all(isinstance(text, str) and text for text in texts):
        raise RequestError(f"{name} = {shown(value)}: give a list of texts that are not empty")
    return tuple(text_of(name, text) for text in texts)


def layout_of(chosen: str | Layout) -> Layout:
    """Return the layout of a name, or the caller's ``Layout`` unchanged. Raises RequestError."""
    if isinstance(chosen, Layout):
        separators = [(chosen.item_separator, ","), (chosen.key_separator, ":")]
        is_json = all(
            isinstance(text, str) and text.strip(" \t\n\r") == mark for text, mark in separators
        )
        if not is_json or not isinstance(chosen.has_lines, bool):
            raise RequestError(
                f"json_layout = {chosen}: item_separator is a comma, key_separator is a colon, each with white space of JSON "
                "around it, and has_lines is True or False"
            )
        if chosen.indent is not None:
            count_of("json_layout: indent", chosen.indent, MOST_INDENT)
        return chosen
    if not isinstance(chosen, str) or chosen not in LAYOUTS:
        raise RequestError(
            f"json_layout = {shown(chosen)} is not one of {', '.join(LAYOUTS)}, nor a Layout"
        )
    return LAYOUTS[chosen]


def check_cancel(cancel: threading.Event | None) -> None:
    """Raise RequestError unless ``cancel`` is an event or ``None``."""
    if cancel is not None and not callable(getattr(cancel, "is_set", None)):
        raise RequestError(f"cancel = {shown(cancel)}: give a threading.Event, or None")


def token_ids(tokens: Sequence[int]) -> list[int]:
    """Check that token ids fit the int32 of C. Raises RequestError."""
    try:
        ids = [operator.index(token) for token in tokens]
    except TypeError as err:
        raise RequestError(f"tokens: not integers ({err})") from err
    for position, token in enumerate(ids):
        if not -(1 << 31) <= token < 1 << 31:
            raise RequestError(
                f"token id {shown(token)} at position {position} is outside the vocabulary"
            )
    return ids


def native_policy(policy: Policy) -> Any:
    """Convert a policy to its C struct. Raises RequestError if a value has the wrong type."""
    native = _native.initialised(_native.Policy)
    for each in fields(Policy):
        value = getattr(policy, each.name)
        try:
            given = value.encode() if each.name in TEXT_FIELDS else value
            setattr(native, each.name, given)
        except (AttributeError, TypeError, ValueError, OverflowError) as err:
            raise RequestError(
                f"policy: {each.name} = {shown(value)} is not of the right type"
            ) from err
        # ctypes raises no error for a value that does not fit into its field. Instead, ctypes drops
        # the high bits of an integer, and cuts a text at a NUL.
        if isinstance(given, (int, bytes)) and getattr(native, each.name) != given:
            raise RequestError(f"policy: {each.name} = {shown(value)} is out of range")
    return native


def entries_of(name: str, values: Any) -> Sequence[Any]:
    """Check an argument that must have one entry per request. Raises RequestError."""
    if (
        isinstance(values, (str, bytes, Mapping))
        or not hasattr(values, "__len__")
        or not hasattr(values, "__getitem__")
    ):
        raise RequestError(f"{name} = {shown(values)}: give a list with an entry for each request")
    found: Sequence[Any] = values
    return found
