"""A request in the C ABI's terms: what is given, its policy, what ends it, and its text."""

from __future__ import annotations

import ctypes as C
import operator
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from dlm_runtime import _native
from dlm_runtime.errors import RequestError
from dlm_runtime.policy import Policy
from dlm_runtime.results import Generation
from dlm_runtime.text_stream import TextStream, find_stop

if TYPE_CHECKING:
    from dlm_runtime.bundle import Bundle

TEXT_FIELDS = tuple(field.name for field in fields(Policy) if field.type == "str")


@dataclass(frozen=True)
class Limits:
    """What ends a request before all is decided. 0: nothing does."""

    max_steps: int = 0
    deadline_ms: float = 0.0
    stop_strings: Sequence[str] = ()


class Request:
    """Keeps alive what the structs point to."""

    def __init__(
        self,
        bundle: Bundle,
        given: tuple[Any, ...],
        max_new_tokens: int,
        steps: int,
        policy: Policy,
        limits: Limits,
    ) -> None:
        """``given``: prompt, tokens and chat, of which one is not None."""
        prompt, tokens, chat = given
        if sum(value is not None for value in given) != 1:
            raise RequestError("give one of prompt, tokens and chat")
        self.bundle, self.limits, self.is_edited = bundle, limits, policy.remask == "edit"
        if isinstance(limits.stop_strings, str) or not all(isinstance(stop, str) and stop for stop in limits.stop_strings):
            raise RequestError(f"stop_strings = {limits.stop_strings!r}: give a list of texts, none of them empty")
        if bundle.tokenizer is None and limits.stop_strings:
            raise RequestError("this bundle has no tokenizer, so that no text can stop it: leave stop_strings out")
        if tokens is not None:
            self.given = token_ids(tokens)
        elif bundle.tokenizer is None:
            raise RequestError("this bundle has no tokenizer: give tokens")
        else:
            self.given = bundle.tokenizer.encode(prompt) if prompt is not None else bundle.tokenizer.encode_chat(chat or [])
        max_new_tokens, steps = count_of("max_new_tokens", max_new_tokens), count_of("steps", steps)
        self.capacity = len(self.given) + max_new_tokens
        self.start = len(self.given) if max_new_tokens else 0  # of what its text decodes
        self.policy = native_policy(policy)
        self.options = _native.initialised(_native.GenerateOptions)
        self.options.policy = C.pointer(self.policy)
        self.options.max_new_tokens = max_new_tokens
        self.options.steps = steps
        self.options.max_steps = count_of("max_steps", limits.max_steps)
        try:
            self.options.deadline_ms = limits.deadline_ms
        except TypeError as err:
            raise RequestError(f"deadline_ms = {limits.deadline_ms!r} is not a number of milliseconds") from err

    def result(
        self,
        session: C.c_void_p,
        number: int,
        canvas: list[int],
        stats: _native.Stats,
        stream: TextStream | None = None,
    ) -> Generation:
        """What the session's request of that number came to; ``stream`` has given out its text, where there is one."""
        outcome = self.bundle._outcome(session, number)
        text = stream.text if stream is not None else self.text(canvas)
        if stream is None and text is not None and (stop := find_stop(text, self.limits.stop_strings)) is not None:
            text, outcome["finish"] = text[:stop], "stop"
        if stream is not None and stream.is_stopped:
            outcome |= {"finish": "stop", "completion_tokens": stream.tokens}
        timings = {name: getattr(stats, f"{name}_s") for name in ("prefill", "passes", "selection", "cache", "total")}
        return Generation(tokens=canvas, text=text, timings=timings, cache_bytes=stats.cache_bytes, **outcome)

    def text_stream(self) -> TextStream | None:
        """What decodes its tokens as they are decided; None where text is none of the bundle's business."""
        tokenizer = self.bundle.tokenizer
        return None if tokenizer is None else TextStream(tokenizer.decode, self.limits.stop_strings)

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
    for field in fields(Policy):
        value = getattr(policy, field.name)
        try:
            setattr(native, field.name, value.encode() if field.name in TEXT_FIELDS else value)
        except (AttributeError, TypeError, ValueError, OverflowError) as err:
            raise RequestError(f"policy: {field.name} = {reprlib.repr(value)} is not of the right type") from err
        # ctypes wraps integers around in silence.
        if isinstance(value, int) and getattr(native, field.name) != value:
            raise RequestError(f"policy: {field.name} = {value} is out of range")
    return native
