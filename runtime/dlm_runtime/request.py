"""A request: its options by name, and their form in the C ABI: token ids, policy, limits."""

from __future__ import annotations

import ctypes as C
import operator
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypedDict

from dlm_runtime import _native
from dlm_runtime.constraints.layout import LAYOUTS, Layout
from dlm_runtime.errors import RequestError, shown
from dlm_runtime.policy import Policy
from dlm_runtime.results import Generation
from dlm_runtime.text_stream import TextStream, find_stop
from dlm_runtime.tools import CallFormat, Tools, format_of

if TYPE_CHECKING:
    from dlm_runtime.bundle import Bundle
    from dlm_runtime.constraints.compiled import Constraint

TEXT_FIELDS = tuple(each.name for each in fields(Policy) if each.type == "str")


@dataclass(frozen=True)
class Options:
    """The options of a request, beside its prompt, tokens or chat. The defaults mean: not given.

    Args:
        max_new_tokens: Number of mask tokens to add after the prompt and fill. None: the bundle's own number.
        preset: Name of one of the bundle's loops. None: the bundle's default preset.
        effort: Take the loop that was fitted for this effort level instead: instant, low, medium or high.
        steps: Plan this many passes for the whole generation, split evenly over the blocks. 0: the policy's own plan.
        max_steps: Stop after this many passes. 0: no limit.
        deadline_ms: Stop this many milliseconds after the start, within one pass. 0: no limit.
        stop_strings: End the text before the first of these. No further block is started after the one that holds it.
        prefix: Text that the answer starts with.
        special_tokens: If True, text that spells a special token, such as ``<|eos|>``, is that token in the prompt, the
            messages, the tools and ``prefix``. By default it is ordinary text, so that users cannot end or mask an answer.
            The tokens that the tokenizer and the chat template add are not affected.
        constraint: A compiled constraint of ``Bundle.constraint``. The text is then valid whatever the policy and the limits,
            unless a stop string cuts it.
        schema, regex, enum, json_object: A constraint that is compiled on first use: see ``Bundle.constraint``. ``prefix`` is
            part of the constrained text. (A ``constraint`` has its own ``before``.)
        json_layout: White space of JSON that a schema, ``json_object`` or tools ask for: a name of ``LAYOUTS``, or a
            ``Layout``. None: the layout that the bundle was trained on, or compact.
        tools: Functions that may be called, each as ``{"type": "function", "function": {"name", "description",
            "parameters"}}`` with a JSON Schema of its parameters, or the ``Tools`` of ``Bundle.tools``. The chat template
            receives them.
        tool_choice: "auto" (the text may be calls), "required" or a function's name (the text is constrained to be a call;
            also ``{"type": "function", "function": {"name": "..."}}``), or "none" (the chat template does not receive them).
        parallel_tool_calls: Whether a required text may be several calls. None: if the call format has a text around all
            calls, as the lists of "list" and "lines" have.
        call_format: How calls are written: a name of ``tools.FORMATS``, or a ``CallFormat``. None: the format that the bundle
            was trained on. If it does not say, the chat template's; the default is one JSON object per line.
        policy: Fields of ``Policy`` to change, by name. They are applied last.

    A request that is stopped by ``max_steps``, ``deadline_ms`` or a cancellation returns what it
    has: ``Generation.finish`` gives the reason, and ``Generation.tool_calls`` is empty unless the
    whole text was decided.

    Raises RequestError for a value of the wrong type, naming the option.
    """

    max_new_tokens: int | None = None
    preset: str | None = None
    effort: str | None = None
    steps: int = 0
    max_steps: int = 0
    deadline_ms: float = 0.0
    stop_strings: Sequence[str] = ()
    prefix: str = ""
    special_tokens: bool = False
    constraint: Constraint | None = None
    schema: Any = None
    regex: str | None = None
    enum: Sequence[str] | None = None
    json_object: bool = False
    json_layout: str | Layout | None = None
    tools: Sequence[Mapping[str, Any]] | Tools | None = None
    tool_choice: str | Mapping[str, Any] = "auto"
    parallel_tool_calls: bool | None = None
    call_format: str | CallFormat | None = None
    policy: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("steps", "max_steps"):
            count_of(name, getattr(self, name))
        for name in ("json_object", "special_tokens"):
            if not isinstance(value := getattr(self, name), bool):
                raise RequestError(f"{name} = {shown(value)}: give True or False")
        if self.parallel_tool_calls is not None and not isinstance(self.parallel_tool_calls, bool):
            raise RequestError(
                f"parallel_tool_calls = {shown(self.parallel_tool_calls)}: give True, False or None"
            )
        if self.max_new_tokens is not None:
            count_of("max_new_tokens", self.max_new_tokens)
        milliseconds_of("deadline_ms", self.deadline_ms)
        texts_of("stop_strings", self.stop_strings)
        text_of("prefix", self.prefix)
        if (
            self.json_layout is not None
            and self.schema is None
            and self.tools is None
            and not self.json_object
        ):
            raise RequestError(
                "json_layout is of schema, json_object and tools: give one of these as well"
            )

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Options:
        """Options by name among ``values``; all others are fields of the policy."""
        own = {name: value for name, value in values.items() if name in OPTION_NAMES}
        return cls(**own, policy={name: value for name, value in values.items() if name not in own})

    @property
    def constrained_by(self) -> dict[str, Any]:
        """The arguments of ``Bundle.constraint`` that were given."""
        given = {
            "schema": self.schema,
            "regex": self.regex,
            "enum": self.enum,
            "json_object": self.json_object or None,
        }
        return {name: value for name, value in given.items() if value is not None}

    def tools_for(self, bundle: Bundle) -> Tools | None:
        """The checked tools; None if the request has none. Raises RequestError."""
        others = {
            "tool_choice": self.tool_choice != "auto",
            "parallel_tool_calls": self.parallel_tool_calls is not None,
        }
        others |= {"call_format": self.call_format is not None}
        given = [name for name, is_given in others.items() if is_given]
        if self.tools is None:
            if given:
                raise RequestError(f"{given[0]} is of tools: give these as well")
            return None
        if self.constrained_by:
            raise RequestError(
                f"give tools or {next(iter(self.constrained_by))}, not both: each says what the text may be"
            )
        if bundle.tokenizer is None:
            raise RequestError("calls are text, and this bundle has no tokenizer: leave tools out")
        if isinstance(self.tools, Tools):
            if given:
                raise RequestError(
                    f"{given[0]}: these tools were made with Bundle.tools: give {given[0]} there"
                )
            return self.tools
        written = format_of(
            bundle.call_format if self.call_format is None else self.call_format,
            bundle.tokenizer.template,
        )
        is_parallel = (
            bool(written.start) if self.parallel_tool_calls is None else self.parallel_tool_calls
        )
        return Tools.checked(self.tools, self.tool_choice, written, is_parallel)


OPTION_NAMES = tuple(each.name for each in fields(Options) if each.name != "policy")


class RequestOptions(TypedDict, total=False):
    """The options of ``generate`` and its relatives for type checkers: those of ``Options``, and
    the fields of ``Policy``.
    """

    max_new_tokens: int | None
    preset: str | None
    effort: str | None
    steps: int
    max_steps: int
    deadline_ms: float
    stop_strings: Sequence[str]
    prefix: str
    special_tokens: bool
    constraint: Constraint | None
    schema: Any
    regex: str | None
    enum: Sequence[str] | None
    json_object: bool
    json_layout: str | Layout | None
    tools: Sequence[Mapping[str, Any]] | Tools | None
    tool_choice: str | Mapping[str, Any]
    parallel_tool_calls: bool | None
    call_format: str | CallFormat | None

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


class InfillOptions(RequestOptions, total=False):
    """The options of ``infill`` for type checkers: those of ``generate_batch``."""

    max_batch: int
    max_depth: int | None
    policies: Sequence[Mapping[str, Any]] | None
    cancel: threading.Event | Sequence[threading.Event | None] | None


class Request:
    """A request in the C ABI's terms. It keeps the memory that the structs point to."""

    def __init__(
        self,
        bundle: Bundle,
        given: tuple[Any, ...],
        options: Options,
        policy: Policy,
        tools: Tools | None,
    ) -> None:
        """``given``: prompt, tokens and chat, of which one is not None."""
        prompt, tokens, chat = given
        if sum(value is not None for value in given) != 1:
            raise RequestError("give one of prompt, tokens and chat")
        self.bundle, self.tools = bundle, tools
        self.stop_strings = texts_of("stop_strings", options.stop_strings)
        self.is_edited = policy.remask == "edit"
        is_call = tools is not None and tools.is_forced
        self.is_constrained = (
            is_call or options.constraint is not None or bool(options.constrained_by)
        )
        if bundle.tokenizer is None and self.stop_strings:
            raise RequestError(
                "this bundle has no tokenizer, so that no text can stop it: leave stop_strings out"
            )
        if tokens is not None:
            self.given = token_ids(tokens)
        elif bundle.tokenizer is None:
            raise RequestError("this bundle has no tokenizer: give tokens")
        elif prompt is not None:
            if not isinstance(prompt, str):
                raise RequestError(f"prompt = {shown(prompt)} is no text: give a str, or tokens")
            self.given = bundle.tokenizer.encode(text_of("prompt", prompt), options.special_tokens)
        else:
            self.given = bundle.tokenizer.encode_chat(
                chat, None if tools is None else tools.told, options.special_tokens
            )
        before = len(self.given)
        if options.prefix:
            if bundle.tokenizer is None:
                raise RequestError(
                    "this bundle has no tokenizer, so that a prefix is no tokens: put them behind the others"
                )
            self.given = [
                *self.given,
                *bundle.tokenizer.encode_plain(options.prefix, options.special_tokens),
            ]
        wanted = bundle.max_new_tokens if options.max_new_tokens is None else options.max_new_tokens
        max_new_tokens = count_of("max_new_tokens", wanted)
        self.capacity = len(self.given) + max_new_tokens
        self.start = before if max_new_tokens else 0  # of what its text decodes
        self.policy = native_policy(policy)
        self.options = _native.initialised(_native.GenerateOptions)
        self.options.policy = C.pointer(self.policy)
        self.options.max_new_tokens = max_new_tokens
        self.options.steps = count_of("steps", options.steps)
        self.options.max_steps = count_of("max_steps", options.max_steps)
        self.options.deadline_ms = milliseconds_of("deadline_ms", options.deadline_ms)

    def generation(
        self,
        canvas: list[int],
        outcome: Mapping[str, Any],
        stream: TextStream | None = None,
        stats: _native.Stats | None = None,
        passes: Mapping[str, int] | None = None,
    ) -> Generation:
        """What it came to. ``outcome``: what the native loop tells of it; ``stream`` has given out
        its text, where there is one; ``stats`` and ``passes`` are those of its call.
        """
        found = dict(outcome)
        text = stream.text if stream is not None else self.text(canvas)
        if (
            stream is None
            and text is not None
            and (stop := find_stop(text, self.stop_strings)) is not None
        ):
            text, found["finish"] = text[:stop], "stop"
        if stream is not None and stream.is_stopped:
            found |= {"finish": "stop", "completion_tokens": stream.tokens}
        names = ("prefill", "passes", "selection", "cache", "total")
        made = Generation(
            tokens=canvas,
            text=text,
            timings={} if stats is None else {name: getattr(stats, f"{name}_s") for name in names},
            cache_bytes=0 if stats is None else stats.cache_bytes,
            passes=dict(passes or {}),
            tool_calls=self.tools.calls(text)
            if self.tools is not None and self._is_decided(canvas, outcome, stream)
            else [],
            **found,
        )
        if self.is_constrained:
            self.bundle.warn_if_unlikely(made)
        return made

    def _is_decided(
        self, canvas: list[int], outcome: Mapping[str, Any], stream: TextStream | None
    ) -> bool:
        """Return True if every token of the text, and its end, was decided when the request ended."""
        undecided = outcome["undecided"]
        if True not in undecided:
            return True
        decided = canvas[: undecided.index(True)]
        if stream is not None and stream.is_stopped:
            return stream.tokens <= len(self.written(decided))
        return any(token in self.bundle.eos_token_ids for token in decided[self.start :])

    def text_stream(self) -> TextStream | None:
        """What decodes its tokens as they are decided; None where text is none of the bundle's
        business.
        """
        tokenizer = self.bundle.tokenizer
        return None if tokenizer is None else TextStream(tokenizer.decode, self.stop_strings)

    def push(self, stream: TextStream, view: _native.Step, undecided: list[bool]) -> str:
        """What a step adds to the text: the tokens in front of the first undecided position, none
        of which will change.
        """
        end = undecided.index(True) if True in undecided and not view.done else view.length
        if self.is_edited and not view.done:
            end = min(end, view.block_start)
        written = self.written(view.canvas[:end])
        return stream.push(written[stream.tokens :], bool(view.done))

    def written(self, canvas: list[int]) -> list[int]:
        """The tokens whose text is asked for, up to the first end token; mask tokens that were left
        are no text.
        """
        generated = canvas[self.start :]
        end = next(
            (at for at, token in enumerate(generated) if token in self.bundle.eos_token_ids),
            len(generated),
        )
        return [token for token in generated[:end] if token != self.bundle.mask_token_id]

    def text(self, canvas: list[int]) -> str | None:
        """The text of a finished canvas."""
        return (
            None
            if self.bundle.tokenizer is None
            else self.bundle.tokenizer.decode(self.written(canvas))
        )


MOST_COUNT = (1 << 24) - 1
MOST_INDENT = 64  # spaces a level of a JSON layout


def count_of(name: str, value: int, most: int = MOST_COUNT) -> int:
    """An option that is a count, at most ``most``. Raises RequestError with the option's name."""
    try:
        count = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        count = -1
    if not 0 <= count <= most:
        raise RequestError(f"{name} = {shown(value)} is not an integer in 0..{most}")
    return count


def milliseconds_of(name: str, value: float) -> float:
    """An option that is a time. Raises RequestError with the option's name."""
    try:
        return C.c_double(value).value
    except (TypeError, ValueError, OverflowError) as err:
        raise RequestError(f"{name} = {shown(value)} is not a number of milliseconds") from err


def text_of(name: str, value: str) -> str:
    """An option that is text. Raises RequestError with the option's name, also for half a surrogate
    pair.
    """
    if not isinstance(value, str):
        raise RequestError(f"{name} = {shown(value)} is not a text")
    try:
        value.encode()
    except UnicodeEncodeError as err:
        raise RequestError(
            f"{name} = {shown(value)}: character {err.start} is half of a surrogate pair, which UTF-8 cannot hold"
        ) from err
    return value


def texts_of(name: str, value: Sequence[str]) -> tuple[str, ...]:
    """An option that is a list of texts. Raises RequestError with the option's name."""
    try:
        texts = () if isinstance(value, (str, bytes, Mapping)) else tuple(value)
        is_good = not isinstance(value, (str, bytes, Mapping)) and all(
            isinstance(text, str) and text for text in texts
        )
    except TypeError:
        is_good = False
    if not is_good:
        raise RequestError(f"{name} = {shown(value)}: give a list of texts, none of them empty")
    return tuple(text_of(name, text) for text in texts)


def layout_of(chosen: str | Layout) -> Layout:
    """A layout by its name, or one of the caller's own. Raises RequestError."""
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
            f"json_layout = {shown(chosen)} is not one of {', '.join(LAYOUTS)}, and no Layout"
        )
    return LAYOUTS[chosen]


def cancel_of(name: str, value: threading.Event | None) -> threading.Event | None:
    """An option that is an event. Raises RequestError with the option's name."""
    if value is not None and not callable(getattr(value, "is_set", None)):
        raise RequestError(f"{name} = {shown(value)}: give a threading.Event, or None")
    return value


def token_ids(tokens: Sequence[int]) -> list[int]:
    """Ids that fit into C's int32. Raises RequestError."""
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


def native_policy(policy: Policy) -> _native.Policy:
    """The C struct of a policy. Raises RequestError for a value of the wrong type."""
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
        # ctypes wraps integers around, and ends a text at a NUL, without an error.
        if isinstance(given, (int, bytes)) and getattr(native, each.name) != given:
            raise RequestError(f"policy: {each.name} = {shown(value)} is out of range")
    return native
