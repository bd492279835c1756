"""Checks descriptions of tools, and reads calls of tools from generated text.

A tool is a function that the generated text may call. A tool is described by a JSON Schema, as in
OpenAI's API. Chat templates receive the tools in the same form as from the transformers library. If
a call is required, a constraint allows only calls that are valid for the tools' schemas.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from dlm_runtime.constraints.layout import COMPACT, Layout
from dlm_runtime.errors import RequestError, shown

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

    Each call is a JSON object with the keys ``name`` and ``arguments``.

    Args:
        before, after: Text before each call, and text after each call.
        between: Text between two calls.
        start, end: Text before the first call, and text after the last call.
        name, arguments: The keys of the object.

    Raises RequestError if a field is not a string.
    """

    before: str = ""
    after: str = ""
    between: str = "\n"
    start: str = ""
    end: str = ""
    name: str = "name"
    arguments: str = "arguments"

    def __post_init__(self) -> None:
        for each in fields(self):
            if not isinstance(getattr(self, each.name), str):
                raise RequestError(
                    f"call_format: {each.name} = {shown(getattr(self, each.name))} is not a text"
                )


FORMATS = {
    "object": CallFormat(),  # one object per line
    "list": CallFormat(between=",", start="[", end="]"),
    "lines": CallFormat(between=",\n", start="[\n", end="\n]"),  # a list with one call per line
    "tool_call": CallFormat(
        before="<tool_call>\n", after="\n</tool_call>"
    ),  # Hermes, Qwen2.5, Qwen3
}


def format_of(chosen: str | CallFormat | None, template: str | None) -> CallFormat:
    """Return the call format to use.

    If ``chosen`` is None, the result is the format that the chat template shows. If the template
    does not show a format, the result is one JSON object per line. Raises RequestError for an
    unknown name.
    """
    if isinstance(chosen, CallFormat):
        return chosen
    if chosen is None:
        chosen = "tool_call" if template is not None and "<tool_call>" in template else "object"
    if not isinstance(chosen, str) or chosen not in FORMATS:
        raise RequestError(f"call_format = {shown(chosen)} is not one of {', '.join(FORMATS)}")
    return FORMATS[chosen]


@dataclass(frozen=True)
class Tools:
    """The tools of one request.

    ``choice`` is "auto", "required", "none", or the name of a function. If ``is_parallel`` is True,
    one text may contain several calls.
    """

    listed: tuple[Mapping[str, Any], ...]
    choice: str
    written: CallFormat
    is_parallel: bool

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

    def tree(self, layout: Layout = COMPACT) -> dict[str, Any]:
        """Return the source of a constraint that allows one call.

        If ``is_parallel`` is true, the constraint allows several calls. The kind of the constraint
        is "tree".
        """
        f = self.written
        start, between, end = layout.around(0, False)
        name, arguments = (
            layout.dumps(key) + layout.key_separator for key in (f.name, f.arguments)
        )
        calls: list[dict[str, Any]] = []
        for tool in self.listed:
            function = tool["function"]
            if self.choice in (*CHOICES, function["name"]):
                head = f"{{{start}{name}{layout.dumps(function['name'])}{between}{arguments}"
                calls.append({"sequence": [{"text": head}, _arguments(function)]})
        opening, closing = {"text": f.before}, {"text": end + "}" + f.after}
        call = {"sequence": [opening, {"either": calls}, closing]}
        parts = [{"text": f.start}, call]
        if self.is_parallel:
            parts.append({"repeat": {"sequence": [{"text": f.between}, call]}})
        return {"sequence": [*parts, {"text": f.end}]}

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
        if before:
            pieces = [
                piece.partition(after)[0] if after else piece for piece in text.split(before)[1:]
            ]
            return [call for piece in pieces for call in self._of(piece) or []]
        return self._of(text) or []

    def _of(self, text: str) -> list[ToolCall] | None:
        """Parse a sequence of JSON values.

        Each JSON value in the text must be a call or a list of calls. Returns None if the text has
        a different form.
        """
        found: list[ToolCall] = []
        rest = text.strip()
        while rest:
            try:
                value, end = _DECODER.raw_decode(rest)
            except (ValueError, RecursionError):
                return None
            for each in value if isinstance(value, list) else [value]:
                call = self._call(each)
                if call is None:
                    return None
                found.append(call)
            rest = rest[end:].strip()
        return found

    def _call(self, value: Any) -> ToolCall | None:
        if not isinstance(value, dict) or value.keys() != {
            self.written.name,
            self.written.arguments,
        }:
            return None
        name, arguments = value[self.written.name], value[self.written.arguments]
        is_known = any(tool["function"]["name"] == name for tool in self.listed)
        return ToolCall(name, arguments) if is_known and isinstance(arguments, dict) else None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)


def _name_of(tool: Any, where: str) -> str:
    """Return the name of a function.

    Raises RequestError if the description of the function is invalid.
    """
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


def _arguments(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return the "tree" constraint for a function's arguments.

    Properties that the function's schema does not list are allowed only if the schema allows them
    explicitly.
    """
    schema = {"type": "object", **(function.get("parameters") or {})}
    if not schema.get("properties"):
        schema = _NO_ARGUMENTS | schema
    name = function["name"].replace("\0", "\\0")  # the library's JSON rejects NUL
    return {"schema": schema, "level": 1, "name": f"tools: {name}"}
