"""Tests of tool calls in the format of Gemma 4 and DiffusionGemma.

Names of properties have no quotes there, and an added token stands before and after strings.
"""

from __future__ import annotations

import itertools
import json
import random
import re
from typing import Any

import pytest
import tokenizer_files
import tokenizers
from constraints import Automaton, following
from jsonschema import Draft202012Validator

from dlm_runtime import RequestError, ToolCall
from dlm_runtime.constraints.compiled import Content, compile_content
from dlm_runtime.constraints.vocabulary import NAMED, Vocabulary
from dlm_runtime.text.tokenizer import AddedToken, Tokenizer
from dlm_runtime.tools import FORMATS, CallFormat, Tools

GEMMA = FORMATS["gemma"]
OPEN, CLOSE, QUOTE = (AddedToken(name) for name in ("<|tool_call>", "<tool_call|>", '<|"|>'))
NAMES = (OPEN, CLOSE, QUOTE)
BYTES = Vocabulary(
    (*(bytes([byte]) for byte in range(256)), *(NAMED + name.encode() for name in NAMES), None)
)
END = len(BYTES.tokens) - 1
NUMBER = re.compile(r"-?\d+(\.\d+)?([eE][+-]?\d+)?")
TEXT = {"type": "string", "maxLength": 6}
SCHEMAS: dict[str, dict[str, Any]] = {
    "plain": {"place": TEXT, "days": {"enum": [1, 2]}, "Now": {"type": "boolean"}},
    "escapes": {"text": {"type": "string", "pattern": '^["\\\\\\n{}:,<|>a]{0,6}$'}},
    "enum": {
        "x": {"enum": ["nn", "\nn", 'a"b', "\\", "", None, True, 2.5, {"b": "c", "a": [1, "d"]}]}
    },
    "nested": {
        "o": {
            "type": "object",
            "properties": {"z": TEXT, "a": {"type": "integer"}},
            "required": ["a"],
        },
        "list": {"type": "array", "items": {"anyOf": [TEXT, {"type": "integer"}]}, "maxItems": 3},
    },
    "recursive": {"tree": {"$ref": "#/$defs/node"}},
    "date": {
        "day": {"type": "string", "format": "date"},
        "odd name": TEXT,
        "été": {"const": "oui"},
    },
    "free": {"any": {}},
    "none": {},
}
NODE = {
    "type": "object",
    "properties": {
        "value": TEXT,
        "next": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
    },
}


def _tools(name: str) -> tuple[Tools, dict[str, Any]]:
    schema: dict[str, Any] = {
        "type": "object",
        "properties": SCHEMAS[name],
        "$defs": {"node": NODE},
    }
    schema["required"] = list(SCHEMAS[name])[:1]
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    return Tools.checked([tool], "required", GEMMA, False), schema


def _split(text: str) -> list[str]:
    pieces: list[str] = [text]
    for name in NAMES:
        parts = [p if isinstance(p, AddedToken) else p.split(name) for p in pieces]
        pieces = []
        for part in parts:
            if isinstance(part, AddedToken):
                pieces.append(part)
                continue
            for at, each in enumerate(part):
                pieces += [name] * (at > 0) + [each] * bool(each)
    return pieces


def _written(value: Any) -> list[str]:
    """Write an argument in the form of Gemma's chat template, as a list of pieces."""
    if isinstance(value, str):
        return [QUOTE, value, QUOTE]
    if isinstance(value, dict):
        items = sorted(value.items(), key=lambda item: item[0].lower())
        rows = [[f"{name}:", *_written(each)] for name, each in items]
        around = "{}"
    elif isinstance(value, list):
        rows, around = [_written(each) for each in value], "[]"
    else:
        return [json.dumps(value)]
    parts = [[around[0]]]
    for at, row in enumerate(rows):
        parts += [[","]] * (at > 0) + [row]
    return [*itertools.chain(*parts), around[1]]


def _call(arguments: dict[str, Any]) -> list[str]:
    return _pieces(_tokens([OPEN, "call:f", *_written(arguments), CLOSE]))


def _tokens(pieces: list[str]) -> list[int]:
    found: list[int] = []
    for piece in pieces:
        found += [256 + NAMES.index(piece)] if isinstance(piece, AddedToken) else piece.encode()
    return found


def _pieces(tokens: list[int]) -> list[str]:
    pieces: list[str] = []
    for is_byte, group in itertools.groupby(tokens, lambda token: token < 256):
        if is_byte:
            pieces.append(bytes(group).decode())
        else:
            pieces += [NAMES[token - 256] for token in group]
    return pieces


def _automaton(tools: Tools) -> Automaton:
    content = Content("tree", json.dumps(tools.tree(_split)))
    made = compile_content(content, vocabulary=BYTES, vocab_size=END + 1, ends=(END,))
    return Automaton.from_bytes(made.data)


def _accepts(automaton: Automaton, tokens: list[int]) -> bool:
    state = 0
    for token in (*tokens, END):
        state = following(automaton, state, token)
        if state < 0:
            return False
    return True


def _drawn(automaton: Automaton, source: random.Random, length: int) -> list[int]:
    """Return the tokens of a random text of about ``length`` tokens."""
    state, tokens = 0, list[int]()
    while True:
        edges = range(automaton.edge_starts[state], automaton.edge_starts[state + 1])
        if len(tokens) >= length:
            nearest = min(automaton.distances[automaton.edge_states[edge]] for edge in edges)
            edges = [e for e in edges if automaton.distances[automaton.edge_states[e]] == nearest]
        edge = source.choice(edges)
        group = automaton.edge_groups[edge]
        first, last = automaton.group_starts[group], automaton.group_starts[group + 1]
        members = [
            t
            for t, c in enumerate(automaton.token_class)
            if c in automaton.group_classes[first:last]
        ]
        token = source.choice(members)
        if token == END:
            return tokens
        tokens.append(token)
        state = int(automaton.edge_states[edge])


@pytest.mark.parametrize("name", SCHEMAS)
def test_drawn_calls_are_valid_and_written_as_the_template_writes_them(name: str) -> None:
    tools, schema = _tools(name)
    automaton, source = _automaton(tools), random.Random(0)
    checked = Draft202012Validator(schema)
    for length in (0, 10, 20, 40, 80) * 8:
        pieces = _pieces(_drawn(automaton, source, length))
        (call,) = tools.calls_of(pieces)
        checked.validate(call.arguments)
        again = _call(call.arguments)
        assert tools.calls_of(again) == [call]
        # A number may be written in several ways.
        assert NUMBER.sub("0", "".join(pieces)) == NUMBER.sub("0", "".join(again))


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("plain", {"place": "ulm"}),
        ("plain", {"Now": True, "days": 2, "place": 'a\nb"c'}),
        ("escapes", {"text": '{:,"\\\n'}),
        ("enum", {"x": "\nn"}),
        ("enum", {"x": None}),
        ("enum", {"x": {"a": [1, "d"], "b": "c"}}),
        ("nested", {"o": {"a": -1, "z": ""}, "list": ["a", 7, "é"]}),
        ("recursive", {"tree": {"value": "x", "next": [{"value": "y"}, {}]}}),
        ("date", {"day": "2026-11-30", "odd name": "<|>", "été": "oui"}),
        ("free", {"any": [1.5, False, "x", {"a": [""]}]}),
        ("none", {}),
    ],
)
def test_calls_are_allowed_and_read(name: str, arguments: dict[str, Any]) -> None:
    tools, _ = _tools(name)
    pieces = _call(arguments)
    assert _accepts(_automaton(tools), _tokens(pieces))
    assert tools.calls_of(["I look. ", *pieces, " Well."]) == [ToolCall("f", arguments)]
    assert tools.calls_of([*pieces, *pieces]) == [ToolCall("f", arguments)] * 2


@pytest.mark.parametrize(
    "pieces",
    [
        [OPEN, "call:f{place:", QUOTE, "ulm"],
        [OPEN, "call:f{place:", QUOTE, "ulm", QUOTE, "}"],
        [OPEN, "call:g{place:", QUOTE, "ulm", QUOTE, "}", CLOSE],
        [OPEN, "call:f[1]", CLOSE],
        [OPEN, "call:f{place:ulm}", CLOSE],
        [OPEN, "call:f" + "{a:" * 100_000, CLOSE],
        ["f{place:1}"],
    ],
)
def test_other_texts_are_no_calls(pieces: list[str]) -> None:
    tools, _ = _tools("plain")
    assert tools.calls_of(pieces) == []
    if len(pieces) < 10 and all(len(piece) < 100 for piece in pieces):
        assert not _accepts(_automaton(tools), _tokens(pieces))


def test_ordinary_tokens_do_not_stand_for_added_ones() -> None:
    tools, _ = _tools("plain")
    text = "".join(_call({"place": "ulm"}))
    assert not _accepts(_automaton(tools), list(text.encode()))


@pytest.mark.parametrize("name", ["a:b", "", " a", 'a"', "{"])
def test_names_that_need_quotes_are_refused(name: str) -> None:
    schema = {"properties": {name: {"type": "null"}}, "required": [name]}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    with pytest.raises(
        RequestError, match="tools: f: names of properties are written without quotes"
    ):
        _automaton(Tools.checked([tool], "required", GEMMA, False))


@pytest.mark.parametrize("part", [{"token": ""}, {"schema": {}, "quote": ""}, {"token": 3}])
def test_a_tree_names_tokens(part: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="tree: "):
        compile_content(
            Content("tree", json.dumps(part)), vocabulary=BYTES, vocab_size=END + 1, ends=(END,)
        )


def test_a_tokenizer_without_the_tokens_is_refused() -> None:
    tools, _ = _tools("plain")
    with pytest.raises(
        RequestError, match=r"needs the added token .*, which the tokenizer does not"
    ):
        tools.tree(lambda text: [text])


def test_formats_and_functions_that_cannot_be_parsed_are_refused() -> None:
    with pytest.raises(RequestError, match="a format with quote needs before"):
        CallFormat(quote=QUOTE)
    tool = {"type": "function", "function": {"name": "f{"}}
    with pytest.raises(RequestError, match="the name of a function cannot contain a brace"):
        Tools.checked([tool], "required", GEMMA, False).tree(_split)


# ---- A real tokenizer ----


def test_texts_are_split_at_added_tokens() -> None:
    made = tokenizers.Tokenizer.from_str(tokenizer_files.made("Gemma"))
    made.add_special_tokens([*NAMES])
    tokenizer = Tokenizer(made.to_str().encode(), None, {})
    parts: list[str] = [OPEN, "call:f{a:", QUOTE, " x ", QUOTE, "}", CLOSE]
    assert tokenizer.split("".join(parts)) == parts
    assert [type(part) for part in tokenizer.split("".join(parts))] == [type(p) for p in parts]
    tokens = tokenizer.encode_plain("".join(parts), special_tokens=True)
    assert tokenizer.pieces(tokens) == parts
    assert tokenizer.split("no token") == ["no token"]
    tokenizer.close()


def test_marks_of_calls_are_added_tokens_where_the_tokenizer_has_them() -> None:
    """Qwen's tokenizers have the added tokens <tool_call> and </tool_call>."""
    form = CallFormat(before="<tool_call>\n", after="\n</tool_call>")
    tool = {"type": "function", "function": {"name": "f"}}
    tools = Tools.checked([tool], "required", form, False)
    tree = tools.tree(
        lambda text: [AddedToken(part) if "<" in part else part for part in text.split("\n")]
    )
    assert {"token": "<tool_call>"} in tree["sequence"][1]["sequence"][0]["sequence"]
    call = '{"name":"f","arguments":{}}'
    pieces = [AddedToken("<tool_call>"), f"\n{call}\n", AddedToken("</tool_call>")]
    assert tools.has_marks(lambda text: [AddedToken(text)] if "<" in text else [text])
    assert not tools.has_marks(lambda text: [text])
    assert tools.calls_of(pieces) == [ToolCall("f", {})]
