"""A request: what it says by name, and what becomes of that in the C ABI's terms: what is given, its policy, its text."""

from __future__ import annotations

import ctypes as C
import operator
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from dlm_runtime import _native
from dlm_runtime.errors import RequestError
from dlm_runtime.policy import Policy
from dlm_runtime.results import Generation
from dlm_runtime.text_stream import TextStream, find_stop
from dlm_runtime.tools import CallFormat, Tools, format_of

if TYPE_CHECKING:
    from dlm_runtime.bundle import Bundle
    from dlm_runtime.constraints.compiled import Constraint
    from dlm_runtime.tokenizer import Tokenizer

TEXT_FIELDS = tuple(each.name for each in fields(Policy) if each.type == "str")


@dataclass(frozen=True)
class Options:
    """What a request says by name beside what is given, in every method that generates; 0, None and empty: nothing.

    ``max_new_tokens`` mask tokens are put behind what is given, and filled; None: the bundle's own number. The loop is a
    ``preset`` of the bundle (None: its default), or the one fitted for an ``effort``: instant, low, medium or high; ``policy``
    has the fields of ``Policy`` that are changed by name, whatever these say. ``steps`` plans that many passes for the whole
    generation, split evenly over the blocks.

    It ends before all is decided, within one pass, after ``max_steps`` passes, or ``deadline_ms`` milliseconds after its start;
    ``Generation.finish`` then says so, and the result has what it came to. ``stop_strings`` end the text, and the passes behind
    the block that holds one.

    ``prefix`` is text that the answer starts with.

    ``special_tokens``: if true, text that spells a special token, such as ``<|eos|>``, is that token in the prompt, the
    messages, the tools and ``prefix``. By default it is ordinary text, so that users cannot end or mask an answer. The tokens
    that the tokenizer and the chat template add are not affected.

    ``constraint`` (of ``Bundle.constraint``), or in its place ``schema``, ``regex``, ``enum`` or ``json_object``, which are its
    arguments: the text is then valid by it, whatever the policy, the room, and what ends the request but for ``stop_strings``.
    With the latter four ``prefix`` is part of that text; a ``constraint`` has it as its ``before``.

    ``tools``: functions that may be called, ``{"type": "function", "function": {"name", "description", "parameters"}}`` each,
    with a JSON Schema of their parameters; the chat template is given them. ``tool_choice``: "auto" (the text may be calls),
    "required" or a function's name (it is constrained to be one), "none" (nobody is told of them). ``parallel_tool_calls``: it
    may be several. ``call_format``: how calls are written, one of ``tools.FORMATS`` by name or another ``CallFormat``; None: as
    the chat template has it, else an object a line.
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
    tools: Sequence[Mapping[str, Any]] | None = None
    tool_choice: str = "auto"
    parallel_tool_calls: bool = False
    call_format: str | CallFormat | None = None
    policy: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Options:
        """Options by name among ``values``; all others are fields of the policy."""
        own = {name: value for name, value in values.items() if name in OPTION_NAMES}
        return cls(**own, policy={name: value for name, value in values.items() if name not in own})

    @property
    def constrained_by(self) -> dict[str, Any]:
        """The arguments of ``Bundle.constraint`` that were given."""
        given = {"schema": self.schema, "regex": self.regex, "enum": self.enum, "json_object": self.json_object or None}
        return {name: value for name, value in given.items() if value is not None}

    def tools_for(self, tokenizer: Tokenizer | None) -> Tools | None:
        """Its tools, checked; a chat template may say how calls are written. Raises RequestError."""
        if self.tools is None:
            others = {"tool_choice": self.tool_choice != "auto", "parallel_tool_calls": self.parallel_tool_calls}
            others |= {"call_format": self.call_format is not None}
            if unused := [name for name, is_given in others.items() if is_given]:
                raise RequestError(f"{unused[0]} is of tools: give these as well")
            return None
        if self.constrained_by:
            raise RequestError(f"give tools or {next(iter(self.constrained_by))}, not both: each says what the text may be")
        if tokenizer is None:
            raise RequestError("calls are text, and this bundle has no tokenizer: leave tools out")
        written = format_of(self.call_format, tokenizer.template)
        return Tools.checked(self.tools, self.tool_choice, written, self.parallel_tool_calls)


OPTION_NAMES = tuple(each.name for each in fields(Options) if each.name != "policy")


class Request:
    """Keeps alive what the structs point to."""

    def __init__(self, bundle: Bundle, given: tuple[Any, ...], options: Options, policy: Policy, tools: Tools | None) -> None:
        """``given``: prompt, tokens and chat, of which one is not None."""
        prompt, tokens, chat = given
        if not isinstance(options.special_tokens, bool):
            raise RequestError(f"special_tokens = {reprlib.repr(options.special_tokens)} is not True or False")
        if sum(value is not None for value in given) != 1:
            raise RequestError("give one of prompt, tokens and chat")
        self.bundle, self.stop_strings, self.tools = bundle, options.stop_strings, tools
        self.is_edited = policy.remask == "edit"
        if isinstance(self.stop_strings, str) or not all(isinstance(stop, str) and stop for stop in self.stop_strings):
            raise RequestError(f"stop_strings = {self.stop_strings!r}: give a list of texts, none of them empty")
        if bundle.tokenizer is None and self.stop_strings:
            raise RequestError("this bundle has no tokenizer, so that no text can stop it: leave stop_strings out")
        if tokens is not None:
            self.given = token_ids(tokens)
        elif bundle.tokenizer is None:
            raise RequestError("this bundle has no tokenizer: give tokens")
        elif prompt is not None:
            if not isinstance(prompt, str):
                raise RequestError(f"prompt = {str(prompt)[:40]!r} is no text: give a str, or tokens")
            self.given = bundle.tokenizer.encode(prompt, options.special_tokens)
        else:
            self.given = bundle.tokenizer.encode_chat(chat, None if tools is None else tools.told, options.special_tokens)
        before = len(self.given)
        if options.prefix:
            if bundle.tokenizer is None:
                raise RequestError("this bundle has no tokenizer, so that a prefix is no tokens: put them behind the others")
            self.given = [*self.given, *bundle.tokenizer.encode_plain(options.prefix, options.special_tokens)]
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
        try:
            self.options.deadline_ms = options.deadline_ms
        except TypeError as err:
            raise RequestError(f"deadline_ms = {options.deadline_ms!r} is not a number of milliseconds") from err

    def generation(
        self,
        canvas: list[int],
        outcome: Mapping[str, Any],
        stream: TextStream | None = None,
        stats: _native.Stats | None = None,
        passes: Mapping[str, int] | None = None,
    ) -> Generation:
        """What it came to. ``outcome``: what the native loop tells of it; ``stream`` has given out its text, where there is
        one; ``stats`` and ``passes`` are those of its call."""
        found = dict(outcome)
        text = stream.text if stream is not None else self.text(canvas)
        if stream is None and text is not None and (stop := find_stop(text, self.stop_strings)) is not None:
            text, found["finish"] = text[:stop], "stop"
        if stream is not None and stream.is_stopped:
            found |= {"finish": "stop", "completion_tokens": stream.tokens}
        names = ("prefill", "passes", "selection", "cache", "total")
        return Generation(
            tokens=canvas,
            text=text,
            timings={} if stats is None else {name: getattr(stats, f"{name}_s") for name in names},
            cache_bytes=0 if stats is None else stats.cache_bytes,
            passes=dict(passes or {}),
            tool_calls=[] if self.tools is None else self.tools.calls(text),
            **found,
        )

    def text_stream(self) -> TextStream | None:
        """What decodes its tokens as they are decided; None where text is none of the bundle's business."""
        tokenizer = self.bundle.tokenizer
        return None if tokenizer is None else TextStream(tokenizer.decode, self.stop_strings)

    def push(self, stream: TextStream, view: _native.Step, undecided: list[bool]) -> str:
        """What a step adds to the text: the tokens in front of the first undecided position, none of which will change."""
        end = undecided.index(True) if True in undecided and not view.done else view.length
        if self.is_edited and not view.done:
            end = min(end, view.block_start)
        written = self.written(view.canvas[:end])
        return stream.push(written[stream.tokens :], bool(view.done))

    def written(self, canvas: list[int]) -> list[int]:
        """The tokens whose text is asked for, up to the first end token; mask tokens that were left are no text."""
        generated = canvas[self.start :]
        end = next((at for at, token in enumerate(generated) if token in self.bundle.eos_token_ids), len(generated))
        return [token for token in generated[:end] if token != self.bundle.mask_token_id]

    def text(self, canvas: list[int]) -> str | None:
        """The text of a finished canvas."""
        return None if self.bundle.tokenizer is None else self.bundle.tokenizer.decode(self.written(canvas))


def count_of(name: str, value: int) -> int:
    """An argument that counts something. Raises RequestError, by its name, for what is no such number."""
    try:
        count = operator.index(value)
    except TypeError:
        count = -1
    if not 0 <= count < 1 << 24:
        raise RequestError(f"{name} = {value!r} is not an integer in 0..{(1 << 24) - 1}")
    return count


def token_ids(tokens: Sequence[int]) -> list[int]:
    """Ids that fit into C's int32. Raises RequestError."""
    try:
        ids = [operator.index(token) for token in tokens]
    except TypeError as err:
        raise RequestError(f"tokens: not integers ({err})") from err
    for position, token in enumerate(ids):
        if not -(1 << 31) <= token < 1 << 31:
            raise RequestError(f"token id {token} at position {position} is outside the vocabulary")
    return ids


def native_policy(policy: Policy) -> _native.Policy:
    """The C struct of a policy. Raises RequestError for a value of the wrong type."""
    native = _native.initialised(_native.Policy)
    for each in fields(Policy):
        value = getattr(policy, each.name)
        try:
            setattr(native, each.name, value.encode() if each.name in TEXT_FIELDS else value)
        except (AttributeError, TypeError, ValueError, OverflowError) as err:
            raise RequestError(f"policy: {each.name} = {reprlib.repr(value)} is not of the right type") from err
        # ctypes wraps integers around in silence.
        if isinstance(value, int) and getattr(native, each.name) != value:
            raise RequestError(f"policy: {each.name} = {value} is out of range")
    return native
