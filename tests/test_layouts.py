"""Tests of the layouts of JSON text.

For each layout, a constraint must allow exactly the white space that json.dumps writes.
"""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
from constraints import ByteAutomaton, byte_automaton, drawn_text, schema_content
from hypothesis import given, settings
from hypothesis import strategies as st
from schemas import random_document

from dlm_runtime.constraints.compiled import Content
from dlm_runtime.constraints.layout import LAYOUTS

SCALAR = re.compile(r'"(?:[^"\\]|\\.)*"|-?[0-9][0-9.eE+-]*|true|false|null')


def reference(value: Any, layout: str) -> str:
    """Return the JSON text of a value in a layout, made with json.dumps."""
    if layout == "lines" and isinstance(value, list) and value:
        return "[\n" + ",\n".join(reference(item, "compact") for item in value) + "\n]"
    given: dict[str, Any] = {"spaced": {}, "indented": {"indent": 2}}.get(
        layout, {"separators": (",", ":")}
    )
    return json.dumps(value, ensure_ascii=False, **given)


def skeleton(text: str) -> str:
    """Replace each string, number and literal of a JSON text by 0.

    Tests compare only brackets, separators and white space, because strings and numbers can be
    written in several ways.
    """
    return SCALAR.sub("0", text)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text('ab"\né', max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text("ab,: ", max_size=2), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(value=VALUES, layout=st.sampled_from(list(LAYOUTS)))
def test_layouts_write_as_json_dumps_does(value: Any, layout: str) -> None:
    assert LAYOUTS[layout].dumps(value) == reference(value, layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_texts_of_schemas_are_in_the_layout(layout: str) -> None:
    source = random.Random(5)
    for _ in range(12):
        texts = byte_automaton(schema_content(random_document(source), layout=LAYOUTS[layout]))
        for _ in range(20):
            text = drawn_text(texts, source, source.randrange(120))
            # A name may occur twice in an object.
        value = json.loads(
            text,
            object_pairs_hook=lambda pairs: {f"{i}{p[0]}": p[1] for i, p in enumerate(pairs)},
        )
        assert skeleton(text) == skeleton(reference(value, layout))


@pytest.mark.parametrize("layout", LAYOUTS)
@settings(max_examples=20)
@given(value=VALUES)
def test_constants_are_in_the_layout(layout: str, value: Any) -> None:
    texts = byte_automaton(schema_content({"const": value}, layout=LAYOUTS[layout]))
    written = json.loads(json.dumps(value), parse_float=_number)
    assert texts.matches(reference(written, layout).encode())


def _number(text: str) -> float:
    """Return the number that the library writes: whole numbers have no point."""
    number = float(text)
    return int(number) if number.is_integer() and abs(number) < 1e15 else number


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_object_is_in_the_layout(layout: str) -> None:
    texts = byte_automaton(Content("json_object", "", LAYOUTS[layout], 2))
    for value in ({}, {"a": 1}, {"a": [1, "x"], "b": {"c": None}, "d": [], "e": {}}):
        assert texts.matches(reference(value, layout).encode())
    source = random.Random(3)
    for _ in range(50):
        text = drawn_text(texts, source, source.randrange(60))
        # A name may occur twice in an object.
        value = json.loads(
            text,
            object_pairs_hook=lambda pairs: {f"{i}{p[0]}": p[1] for i, p in enumerate(pairs)},
        )
        assert skeleton(text) == skeleton(reference(value, layout))


def test_values_inside_other_containers_are_indented_by_their_level() -> None:
    wanted = {
        "type": "array",
        "prefixItems": [{"const": {"a": [1]}}],
        "minItems": 1,
        "items": False,
    }

    def texts_of(layout: str, level: int) -> ByteAutomaton:
        tree = json.dumps({"schema": wanted, "level": level})
        return byte_automaton(Content("tree", tree, LAYOUTS[layout]))

    texts = texts_of("indented", 2)
    assert texts.matches(
        json.dumps([[[{"a": [1]}]]], indent=2).encode()[len("[\n  [\n    ") : -len("\n  ]\n]")]
    )
    assert texts_of("lines", 1).matches(b'[{"a":[1]}]'), "only a top-level array has lines"
