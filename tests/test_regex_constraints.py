"""Tests of regular expressions as constraints.

A constraint must allow exactly the texts that match its regular expression. The tests also cover
limits, control characters and Unicode. ``test_patterns.py`` tests patterns in JSON Schemas.
"""

from __future__ import annotations

import itertools
import json
import random
import re
import sys
import unicodedata

import pytest
from constraints import byte_automaton, drawn_texts, schema_content
from hypothesis import given, settings
from hypothesis import strategies as st

from dlm_runtime import RequestError
from dlm_runtime.constraints.compiled import Content
from dlm_runtime.tools import CallFormat, Tools


def texts_over(letters: str, longest: int) -> list[str]:
    return [
        "".join(each)
        for length in range(longest + 1)
        for each in itertools.product(letters, repeat=length)
    ]


# ---- The expression must match the whole text ----


@pytest.mark.parametrize(
    "expression",
    [
        *(
            ".*d",
            "[^a]*",
            r"\D+d?",
            r"\W|d.",
            r"(?s:.)",
            r"\S+@\S+\.com",
            "a|ab",
            "(?:a|ab)(?:c|bcd)",
            "a|[^b]*b",
        ),
        *(
            "a$",
            "^a",
            "(abc|a)$",
            "a(b*(X|$))?",
            "^(a|^b)|c$",
            "(?:^|a)b",
            "(^a)?b?",
            r"\Aa\z",
            "^^a$$",
            "(?i)^A|^(?:^b)",
        ),
        *(
            "[]a]|[^]a]",
            "[[ab]&&[^b]]",
            r"\^\$",
            "[$^]",
            "(?P<x>^a)b|(?:)",
            "^",
            "$",
            "^$",
            "(?x) a [b # ^[\n ] # ^(\n b",
        ),
        *("(?m)^a$\n^b$", "(?m:^)a|(?m)^b", r"(?-u:\b)a(?-u:\B)b", "(?m)(?:^a\n?)*"),
        # Anchors and word boundaries may be anywhere in an expression, and may be repeated.
        *(
            "(^a)*",
            "(?:^a|b)+",
            "(^a)?{2}",
            "(?x)^a",
            "a(b|^)",
            "(?:a$|b)*",
            r"(?:\b.)*",
            r"(?:a\b|b)*",
            r"\b\w+\b",
            r"(?:\ba\B|b)+a*",
            r"(?m)(?:^|a|$\n)*b?",
            r"(a|\b){2,3}b",
            r"(?m)(a$|^b|\n){0,4}",
        ),
    ],
)
def test_a_text_is_accepted_if_all_of_it_matches(expression: str) -> None:
    made = byte_automaton(expression)
    python = (
        expression.replace("(?-u:", "(?:")
        .replace(r"\z", r"\Z")
        .replace("[[ab]&&[^b]]", "a")
        .replace("[b # ^[\n ]", "b")
        .replace("?{2}", "?(^a)?")
    )
    pattern = re.compile(re.sub(r"(.*)(\(\?[mix]\))", r"\2\1", python, flags=re.DOTALL))
    for text in [
        *texts_over("abcdX\n@", 4),
        "a@b.com",
        "@.com",
        "a^$b",
        "^",
        "$",
        "^$",
        "é",
        "dé",
        "a#b",
    ]:
        is_right = bool(pattern.fullmatch(text)) and not (
            text.endswith("\n") and "$" in expression and "(?m)" not in expression
        )
        assert made.matches(text) == is_right, text
    for text in ("\0", "a\0b", "d\0", "\0d"):
        assert not made.matches(text), "texts with a NUL are left out"


@st.composite
def expressions(draw: st.DrawFn, depth: int = 3) -> str:
    kinds = ("letter", "letter", "look", "either", "both", "both", "many", "maybe", "twice")
    kind = draw(st.sampled_from(kinds)) if depth else "letter"
    if kind == "letter":
        return draw(st.sampled_from(("a", "b", "[ab]", ".", "[^a]", r"\W", r"\D", r"\S", "é", "")))
    if kind == "look":
        return draw(st.sampled_from(("^", "$", r"\b", "(?m:^)", "(?m:$)")))
    first = draw(expressions(depth - 1))
    if kind in ("either", "both"):
        second = draw(expressions(depth - 1))
        return f"(?:{first}|{second})" if kind == "either" else first + second
    return f"(?:{first})" + {"many": "*", "maybe": "?", "twice": "{1,2}"}[kind]


@settings(max_examples=200)
@given(expression=expressions())
def test_random_expressions_accept_what_python_matches(expression: str) -> None:
    # In Python, $ also matches before a newline at the end of the text.
    pattern = re.compile(re.sub(r"(?<!m:)\$", r"(?-m:\\Z)", expression))
    texts = texts_over("abé\n", 4)
    is_right = [bool(pattern.fullmatch(text)) for text in texts]
    made, message = None, ""
    try:
        made = byte_automaton(expression)
    except RequestError as err:
        message = str(err)
    if made is None:
        assert message == "regex: no text matches it"
        assert not any(is_right)
        return
    assert [made.matches(text) for text in texts] == is_right


@pytest.mark.parametrize(
    ("expression", "what"),
    [
        ("a(b", r"a group without its \) at character 1"),
        ("a)", r"an unmatched \) at character 1"),
        ("é[a", r"a \[ without its \] at character 1"),
        ("*a", "nothing to repeat at character 0"),
        ("a{2,1}", "a count whose end is below its start, at character 6"),
        (r"(a)\1", "a back-reference, which is not regular, at character 5"),
        ("(?!a)b", "look-around, which this syntax does not have, at character 1"),
        (r"\p{Klingon}", "a property that Unicode does not have, Klingon, at character 11"),
        ("[z-a]", "a range whose end is below its start at character 4"),
        (r"(?-u:\W)", "a class of bytes beyond ASCII, which may be no UTF-8,"),
        ("(" * 300 + ")" * 300, "groups nested more than 250 deep"),
        ("a{2000000}", "a count above 1,000,000"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(expression: str, what: str) -> None:
    with pytest.raises(RequestError, match=rf"^regex: .*{what}"):
        byte_automaton(expression)


@pytest.mark.parametrize("expression", ["a^b", "(?m:a)^", r"\Ba\B", "[a&&b]", r"\P{any}"])
def test_an_expression_that_matches_no_text_is_refused(expression: str) -> None:
    with pytest.raises(RequestError, match=r"^regex: no text matches it$"):
        byte_automaton(expression)


def test_categories_are_those_of_unicode() -> None:
    """Python and this project's tables use different versions of Unicode.

    A few characters have different categories in the two versions, so 5 differences are allowed.
    """
    source, changed = random.Random(2), 0
    points = [source.randrange(1, 0x30000) for _ in range(4000)] + list(range(1, 0x600))
    texts = [chr(point) for point in points if not 0xD800 <= point <= 0xDFFF]
    for category in ("Lu", "Ll", "Lt", "Lm", "Lo", "Mn", "Mc", "Nd", "Nl", "No", "Pc", "Po", "Zs"):
        made = byte_automaton(rf"\p{{{category}}}|b{{2}}")
        for text in texts:
            found = unicodedata.category(text)
            if found != "Cn":
                changed += made.matches(text) != (found == category)
    assert changed <= 5, sys.version


@pytest.mark.parametrize(
    ("expression", "text"),
    [(r"\a\f\t\n\r\v", "\x07\x0c\t\n\r\x0b"), (r"\p{gc=Lu}\p{gc!=Lu}", "Aa")],
)
def test_escapes_and_properties_have_their_meaning(expression: str, text: str) -> None:
    made = byte_automaton(expression)
    assert made.matches(text)
    assert not made.matches(text[::-1])


# ---- Control characters ----


def test_texts_with_control_characters_are_generated_as_they_are() -> None:
    listed = ["a\x01b", "a\x02b", "\x7f", "\x1f", "x\x01"]
    made = byte_automaton(Content("enum", json.dumps(listed)))
    assert drawn_texts(made, random.Random(0), 200) == set(listed)
    every = {f"a{chr(control)}b" for control in range(1, 32)}
    made = byte_automaton(Content("enum", json.dumps(sorted(every))))
    assert drawn_texts(made, random.Random(0), 2000) == every


def test_control_characters_of_call_formats_stay_what_they_are() -> None:
    written = CallFormat(
        before="\x01<", after="\x02>", between="\x01", start="\x01\x01", end="\x03"
    )
    tool = {
        "type": "function",
        "function": {"name": "f\x01\x00g", "parameters": {"properties": {"x": {"type": "string"}}}},
    }
    tree = json.dumps(Tools.checked([tool], "required", written, True).tree(lambda text: [text]))
    made = byte_automaton(Content("tree", tree))
    call = '\x01<{"name":"f\\u0001\\u0000g","arguments":{"x":"é"}}\x02>'
    assert made.matches(f"\x01\x01{call}\x01{call}\x03")
    assert not made.matches(f"\x01\x01{call}o{call}\x03")
    assert not made.matches(f"\x01\x01{call}\0{call}\x03")
    assert byte_automaton(Content("tree", tree, before="\x01\x01\x01<", behind="\x03")).matches(
        call[2:]
    )


def test_control_characters_of_expressions_and_patterns_stay_what_they_are() -> None:
    for expression in ("a\x01b", r"a\x01b", r"a[\x01-\x02]b"):
        made = byte_automaton(expression)
        assert made.matches(b"a\x01b")
        assert not made.matches(b"aob")
    for pattern in ("^a\x01?b$", r"^a\u0001?b$", r"^a\x01?b$"):
        made = byte_automaton(schema_content({"type": "string", "pattern": pattern}))
        assert made.matches(b'"ab"')
        assert not made.matches(b'"aob"')
