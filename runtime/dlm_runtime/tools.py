"""Checks descriptions of tools, and reads calls of tools from generated text.

A tool is a function that the generated text may call. A tool is described by a JSON Schema, as in
OpenAI's API. Chat templates receive the tools in the same form as from the transformers library. If
a call is required, a constraint allows only calls that are valid for the tools' schemas.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from dlm_runtime.constraints.layout import COMPACT, Layout
from dlm_runtime.errors import RequestError, shown
from dlm_runtime.text.tokenizer import AddedToken

CHOICES = ("auto", "required", "none")
_NO_ARGUMENTS = {"type": "object", "additionalProperties": False}


@dataclass(frozen=True)
class ToolCall:
    """A call of a function.

    Args:
        name: Name of the function.
        arguments: A dict of the arguments of the call.
        id: An identifier: ``call_`` and 24 hexadecimal digits. The message with the function's
            result refers to this identifier. The digits are random and do not depend on the seed.
            When two calls are compared, the ids are ignored.
    """

    name: str
    arguments: dict[str, Any]
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}", compare=False)


@dataclass(frozen=True)
class CallFormat:
    """How calls are written as text.

    Each call is a JSON object with the keys ``name`` and ``arguments``, unless ``quote`` is given.
    If one of the texts contains the name of an added token, such as ``<tool_call>``, this token is
    written there.

    Args:
        before, after: Text before each call, and text after each call.
        between: Text between two calls.
        start, end: Text before the first call, and text after the last call.
        name, arguments: The keys of the object.
        quote: Name of an added token. If it is given, each call is the name of the function and the
            object of its arguments, as Gemma 4 and DiffusionGemma write them. Names of properties
            are in alphabetical order and have no quotes. Strings stand between two ``quote``
            tokens, and nothing in them is escaped. Such a format needs ``before``.

    Raises RequestError if a field is not a string, or ``before`` is missing.
    """

    before: str = ""
    after: str = ""
    between: str = "\n"
    start: str = ""
    end: str = ""
    name: str = "name"
    arguments: str = "arguments"
    quote: str = ""

    def __post_init__(self) -> None:
        for each in fields(self):
            if not isinstance(getattr(self, each.name), str):
                raise RequestError(
                    f"call_format: {each.name} = {shown(getattr(self, each.name))} is not a text"
                )
        if self.quote and not self.before:
            raise RequestError(
                "call_format: a format with quote needs before, a text before each call"
            )


FORMATS = {
    "object": CallFormat(),  # one object per line
    "list": CallFormat(between=",", start="[", end="]"),
    "lines": CallFormat(between=",\n", start="[\n", end="\n]"),  # a list with one call per line
    "tool_call": CallFormat(
        before="<tool_call>\n", after="\n</tool_call>"
    ),  # Hermes, Qwen2.5, Qwen3
    "gemma": CallFormat(
        before="<|tool_call>call:", after="<tool_call|>", between="", quote='<|"|>'
    ),  # Gemma 4, DiffusionGemma
}
_SHOWN = {"<|tool_call>": "gemma", "<tool_call>": "tool_call"}
"""The formats that a chat template shows by the name of a token."""


def format_of(chosen: str | CallFormat | None, template: str | None) -> CallFormat:
    """Return the call format to use.

    If ``chosen`` is None, the result is the format that the chat template shows. If the template
    does not show a format, the result is one JSON object per line. Raises RequestError for an
    unknown name.
    """
    if isinstance(chosen, CallFormat):
        return chosen
    if chosen is None:
        shown_by = (name for token, name in _SHOWN.items() if token in (template or ""))
        chosen = next(shown_by, "object")
    if not isinstance(chosen, str) or chosen not in FORMATS:
        raise RequestError(f"call_format = {shown(chosen)} is not one of {', '.join(FORMATS)}")
    return FORMATS[chosen]


@dataclass(frozen=True)
class Tools:
    """The tools of one request.

    ``choice`` is "auto", "required", "none", or the name of a function. If ``is_parallel`` is True,
    one text may contain several calls. ``otherwise`` is a part of a "tree" for texts that are not
    calls, which the constraint also allows.
    """

    listed: tuple[Mapping[str, Any], ...]
    choice: str
    written: CallFormat
    is_parallel: bool
    otherwise: Mapping[str, Any] | None = None

    @classmethod
    def checked(cls, tools: Any, choice: Any, written: CallFormat, is_parallel: bool) -> Tools:
        """Check the tools that a caller passed.

        Raises RequestError. The message names the invalid entry and the reason.
        """
        if isinstance(tools, (str, Mapping)) or not isinstance(tools, Sequence) or not tools:
            raise RequestError(
                "tools: give a list of functions, such as [{'type': 'function', 'function': {'name': '...', 'description': "
                "'...', 'parameters': {...}}}]"
            )
        found = cls(tuple(tools), choice, written, is_parallel)
        names: list[str] = []
        for number, tool in enumerate(tools):
            names.append(_name_of(tool, f"tools[{number}]"))
            if names[-1] in names[:-1]:
                raise RequestError(f"tools[{number}]: the name {names[-1]!r} is used twice")
        if isinstance(choice, Mapping) and isinstance(function := choice.get("function"), Mapping):
            choice = function.get("name")  # the form of OpenAI's API
            found = replace(found, choice=choice)
        if not isinstance(choice, str) or choice not in (*CHOICES, *names):
            raise RequestError(
                f"tool_choice = {shown(choice)} is not one of {', '.join((*CHOICES, *names))}"
            )
        return found

    @property
    def told(self) -> list[dict[str, Any]] | None:
        """The descriptions that the chat template receives, or None if it receives no functions."""
        return None if self.choice == "none" else [dict(tool) for tool in self.listed]

    @property
    def is_forced(self) -> bool:
        """True if the constraint must force the text to be a call."""
        return self.choice not in ("auto", "none")

    def has_marks(self, split: Callable[[str], Sequence[str]]) -> bool:
        """Return True if added tokens are written before, after or between calls."""
        f = self.written
        texts = (f.start, f.before, f.between, f.after, f.end, f.quote)
        return any(isinstance(part, AddedToken) for text in texts for part in split(text))

    def tree(
        self, split: Callable[[str], Sequence[str]], layout: Layout = COMPACT
    ) -> dict[str, Any]:
        """Return the source of a constraint that allows one call.

        If ``is_parallel`` is true, the constraint allows several calls. If ``otherwise`` is given,
        the constraint allows its texts too. The kind of the constraint is "tree". ``split`` is
        ``Tokenizer.split`` of the tokenizer that will write the text.
        """
        f = self.written
        call = self._call_tree(split, layout)
        parts = [_fixed(f.start, split), call]
        if self.is_parallel:
            parts.append({"repeat": {"sequence": [_fixed(f.between, split), call]}})
        calls = {"sequence": [*parts, _fixed(f.end, split)]}
        return calls if self.otherwise is None else {"either": [calls, self.otherwise]}

    def _call_tree(self, split: Callable[[str], Sequence[str]], layout: Layout) -> dict[str, Any]:
        """Return the part of the tree for one call."""
        f = self.written
        opening, closing = _fixed(f.before, split), _fixed(f.after, split)
        functions = [tool["function"] for tool in self.listed]
        chosen = [each for each in functions if self.choice in (*CHOICES, each["name"])]
        if f.quote:
            if all(not isinstance(part, AddedToken) for part in split(f.quote)):
                raise RequestError(
                    f"call_format: this format needs the added token {f.quote!r}, which the tokenizer does not have: pass "
                    "another call_format"
                )
            for each in chosen:
                if "{" in each["name"]:
                    raise RequestError(
                        f"tools: {each['name']}: in this call_format, the name of a function cannot contain a brace"
                    )
            calls = [
                {"sequence": [{"text": each["name"]}, _arguments(each, f.quote)]} for each in chosen
            ]
            return {"sequence": [opening, {"either": calls}, closing]}
        start, between, end = layout.around(0, False)
        name, arguments = (
            layout.dumps(key) + layout.key_separator for key in (f.name, f.arguments)
        )
        calls = []
        for each in chosen:
            head = f"{{{start}{name}{layout.dumps(each['name'])}{between}{arguments}"
            calls.append({"sequence": [{"text": head}, _arguments(each)]})
        return {"sequence": [opening, {"either": calls}, {"text": end + "}"}, closing]}

    def calls(self, text: str | None) -> list[ToolCall]:
        """Return the calls in a text.

        If the format has texts before and after a call, calls are found between these texts.
        Otherwise, the whole text must consist of calls. If ``choice`` is "none" or the text contains
        no calls, the list is empty. A call counts only if it names a function in ``listed`` and its
        arguments are a JSON object. The arguments are not checked further.
        """
        if text is None or self.choice == "none":
            return []
        before, after = self.written.before.strip(), self.written.after.strip()
        if not before:
            return self._read(text, 0, "")[0]
        found, at = list[ToolCall](), text.find(before)
        while at >= 0:
            calls, end = self._read(text, at + len(before), after)
            found += calls
            at = text.find(before, end)
        return found

    def calls_of(self, pieces: Sequence[str]) -> list[ToolCall]:
        """Like ``calls``, for the result of ``Tokenizer.pieces``.

        Use this method if added tokens mark calls or strings, because a text may lack them.
        """
        if not self.written.quote:
            return self.calls("".join(pieces))
        if self.choice == "none":
            return []
        before, after = self.written.before, self.written.after
        text, found = _as_json(pieces, self.written.quote), list[ToolCall]()
        at = text.find(before)
        while at >= 0:
            at += len(before)
            brace = text.find("{", at)
            if brace < 0:
                break
            try:
                arguments, end = _DECODER.raw_decode(text, brace)
            except (ValueError, RecursionError):
                end = at
            else:
                if text.startswith(after, end):
                    found += self._named(text[at:brace], arguments)
            at = text.find(before, end)
        return found

    def _read(self, text: str, at: int, after: str) -> tuple[list[ToolCall], int]:
        """Parse JSON values from a position up to ``after``, or up to the end of the text.

        Each value must be a call or a list of calls. Returns the calls and the position after them.
        If the text has a different form, there are no calls, and the position is ``at``.
        """
        found, start = list[ToolCall](), at
        keys = {self.written.name, self.written.arguments}
        while True:
            at = _SPACE.match(text, at).end()  # type: ignore[union-attr]
            if at == len(text) or (after and text.startswith(after, at)):
                return found, at
            try:
                value, at = _DECODER.raw_decode(text, at)
            except (ValueError, RecursionError):
                return [], start
            for each in value if isinstance(value, list) else [value]:
                if not isinstance(each, dict) or each.keys() != keys:
                    return [], start
                calls = self._named(each[self.written.name], each[self.written.arguments])
                if not calls:
                    return [], start
                found += calls

    def _named(self, name: Any, arguments: Any) -> list[ToolCall]:
        """Return a call, or nothing if there is no such function or no object of arguments."""
        is_known = any(tool["function"]["name"] == name for tool in self.listed)
        return [ToolCall(name, arguments)] if is_known and isinstance(arguments, dict) else []


_SPACE = re.compile(r"\s*")
_NAME = re.compile(r'([{,] *)([^ ,:{}\[\]<"\\][^,:{}\[\]<"\\]*):')


def _as_json(pieces: Sequence[str], quote: str) -> str:
    """Write the strings and the names of properties between added tokens as in JSON."""
    text: str = ""
    string: str | None = None  # the string that has begun
    for piece in pieces:
        if isinstance(piece, AddedToken) and piece == quote:
            text, string = (text, "") if string is None else (text + json.dumps(string), None)
        elif string is not None:
            string += piece
        else:
            text += _NAME.sub(lambda at: f"{at[1]}{json.dumps(at[2])}:", piece)
    return text


def _fixed(text: str, split: Callable[[str], Sequence[str]]) -> dict[str, Any]:
    """Return the part of a "tree" for a text, in which added tokens are written as tokens."""
    kinds = ("text", "token")
    return {"sequence": [{kinds[isinstance(part, AddedToken)]: part} for part in split(text)]}


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)


def _name_of(tool: Any, where: str) -> str:
    """Return the name of a function. Raises RequestError if its description is invalid."""
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or tool.get("type") != "function":
        raise RequestError(
            f"{where}: not of the form {{'type': 'function', 'function': {{'name': '...', ...}}}}"
        )
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise RequestError(f"{where}: its function has no name")
    if name in CHOICES:
        raise RequestError(
            f"{where}: a function cannot have the name {name!r}, which is a value of tool_choice"
        )
    parameters = function.get("parameters")
    if parameters is not None and (
        not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object"
    ):
        raise RequestError(f"{where}, {name}: parameters are not a JSON Schema of an object")
    return name


def _arguments(function: Mapping[str, Any], quote: str = "") -> dict[str, Any]:
    """Return the "tree" constraint for a function's arguments.

    Properties that the function's schema does not list are allowed only if the schema allows them
    explicitly.
    """
    schema = {"type": "object", **(function.get("parameters") or {})}
    if not schema.get("properties"):
        schema = _NO_ARGUMENTS | schema
    name = function["name"].replace("\0", "\\0")  # the library's JSON rejects NUL
    part: dict[str, Any] = {"schema": schema, "level": 1, "name": f"tools: {name}"}
    return part | ({"schema": _in_order(schema), "quote": quote} if quote else {})


def _in_order(value: Any) -> Any:
    """Sort all properties and objects in a schema by name, as Gemma's chat template does."""
    if isinstance(value, list):
        return [_in_order(each) for each in value]
    if not isinstance(value, Mapping):
        return value
    items = sorted(value.items(), key=lambda item: str(item[0]).lower())
    return {name: _in_order(each) for name, each in items}
