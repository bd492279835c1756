"""Tests of grammars in GBNF as constraints.

A constraint allows exactly the texts of its grammar. Random texts that it allows are checked with
other parsers.
"""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import pytest
from constraints import byte_automaton, drawn_texts
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from lark import Lark

from dlm_runtime import RequestError
from dlm_runtime.constraints.compiled import CompileLimits, Content

LONGEST = 5
DEEP = LONGEST + 1  # each level of recursion adds at least one letter
JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws     ::= | " " | "\n" [ \t]{0,20}
"""  # llama.cpp's grammars/json.gbnf

Rules = dict[str, Any]


def content(text: str, depth: int | None = None) -> Content:
    return Content("grammar", text, max_depth=depth)


def test_texts_of_the_json_grammar_of_llama_cpp_are_json() -> None:
    drawn = drawn_texts(byte_automaton(content(JSON, 1)), random.Random(4), 200)
    assert len(drawn) > 50
    for text in drawn:
        assert isinstance(json.loads(text), dict), text
    texts = byte_automaton(content(JSON))  # with the default limit of recursion
    assert texts.matches('{"a":[{"b":1.5e3}], "c":null}')
    assert not texts.matches('{"a":1,}')


def test_texts_of_a_small_language_are_read_by_lark() -> None:
    rules = """
        root ::= line ("\\n" line)*
        line ::= name " = " sum ";"
        sum  ::= product (("+" | "-") product)*
        product ::= atom ("*" atom)*
        atom ::= name | [0-9]{1,3} | "(" sum ")"
        name ::= [a-z] [a-z0-9_]*
    """
    parser = Lark(
        r"""
        start: line (/\n/ line)*
        line: NAME " = " sum ";"
        sum: product (("+" | "-") product)*
        product: atom ("*" atom)*
        atom: NAME | /[0-9]{1,3}/ | "(" sum ")"
        NAME: /[a-z][a-z0-9_]*/
        """
    )
    for depth in (0, 2):
        texts = byte_automaton(content(rules, depth))
        drawn = drawn_texts(texts, random.Random(depth), 150)
        assert len(drawn) > 50
        assert any("(" in text for text in drawn) == (depth > 0)
        for text in drawn:
            parser.parse(text)


# ---- Small grammars, compared text by text ----


def _parts() -> st.SearchStrategy[Any]:
    """A random part of a grammar, as tuples: ("text", t), ("rule", name), ("choice", parts),
    ("row", parts) and ("times", part, low, high).
    """
    leaves = st.one_of(
        st.tuples(st.just("text"), st.sampled_from(["", "a", "b", "ab"])),
        st.tuples(st.just("rule"), st.sampled_from(["root", "x", "y"])),
    )
    bounds = st.sampled_from([(0, 1), (0, None), (1, None), (2, 2), (1, 2)])
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.tuples(st.just("choice"), st.lists(inner, min_size=1, max_size=3)),
            st.tuples(st.just("row"), st.lists(inner, min_size=1, max_size=3)),
            st.tuples(st.just("times"), inner, bounds),
        ),
        max_leaves=6,
    )


def written(part: Any) -> str:
    kind, value = part[:2]
    if kind == "text":
        return json.dumps(value)
    if kind == "rule":
        return str(value)
    if kind == "times":
        low, high = part[2]
        return f"({written(value)}){{{low},{'' if high is None else high}}}"
    return "(" + (" | " if kind == "choice" else " ").join(map(written, value)) + ")"


def joined(first: set[str], second: set[str]) -> set[str]:
    return {one + other for one in first for other in second if len(one + other) <= LONGEST}


def texts_of(part: Any, known: dict[str, set[str]]) -> set[str]:
    """Return all texts of up to ``LONGEST`` letters that a part of a grammar matches.

    ``known`` maps the name of each rule to the texts that the rule matches.
    """
    kind, value = part[:2]
    if kind == "text":
        return {value}
    if kind == "rule":
        return known[value]
    if kind == "choice":
        return set().union(*(texts_of(each, known) for each in value))
    made = {""}
    if kind == "row":
        for each in value:
            made = joined(made, texts_of(each, known))
        return made
    low, high = part[2]
    inner, out = texts_of(value, known), set()
    for count in range(LONGEST + 1 + low if high is None else high + 1):
        if count >= low:
            out |= made
        made = joined(made, inner)
    return out


def language(rules: Rules) -> set[str]:
    known: dict[str, set[str]] = {name: set() for name in rules}
    while True:
        more = {name: texts_of(part, known) for name, part in rules.items()}
        if more == known:
            return known["root"]
        known = more


ALL = ["".join(each) for n in range(LONGEST + 1) for each in itertools.product("ab", repeat=n)]


@given(st.fixed_dictionaries({"root": _parts(), "x": _parts(), "y": _parts()}))
@settings(max_examples=150)
def test_a_grammar_has_exactly_its_texts(rules: Rules) -> None:
    text = "\n".join(f"{name} ::= {written(part)}" for name, part in rules.items())
    limits = CompileLimits(seconds=5, states=1 << 12)
    try:
        deep = byte_automaton(content(text, DEEP), limits)
        flat = byte_automaton(content(text, 0), limits)
    except RequestError as err:
        said = str(err)
        refused = ("left recursion", "has no text", "raise limits", "no text", "raise it")
        assert any(reason in said for reason in refused), said
        assume(False)
    wanted = language(rules)
    assert {each for each in ALL if deep.matches(each)} == wanted
    assert {each for each in ALL if flat.matches(each)} <= wanted


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('root ::= x\nx ::= "a" |\n  y', "line 3, column 3: rule 'y' is not defined"),
        ('root ::= root "+" | "a"', "line 1, column 10: left recursion: rule 'root' starts with"),
        ('root ::= "é" <think>', "line 1, column 14: references to tokens are not supported"),
        ('root ::= "(" root ")"', "rule 'root' has no text within max_depth 3"),
        ("start ::= root", "rule 'root' is not defined"),
    ],
)
def test_a_grammar_that_cannot_be_is_refused_with_its_place(text: str, said: str) -> None:
    with pytest.raises(RequestError) as raised:
        byte_automaton(content(text))
    assert said in str(raised.value)


def test_a_default_depth_fits_the_limits() -> None:
    arms = " | ".join(f'"{letter}(" root "){letter}"' for letter in "abcdefgh")
    texts = byte_automaton(content(f'root ::= {arms} | "x"'), CompileLimits(states=1000))
    assert texts.matches("a(x)a")
    assert len(texts.accepting) <= 1000
    with pytest.raises(RequestError, match="states"):
        byte_automaton(content(f'root ::= {arms} | "x"', 6), CompileLimits(states=1000))
