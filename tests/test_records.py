"""Tests of JSON Lines, CSV and XML as constraints.

The tests draw random texts that a constraint allows. Python must be able to parse these texts, and
the parsed values must be valid according to the schema.
"""

from __future__ import annotations

import csv
import io
import json
import random
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from constraints import ByteAutomaton, byte_automaton, drawn_texts
from hypothesis import given, settings
from hypothesis import strategies as st

import dlm_runtime
from dlm_runtime import Bundle, Csv, JsonLines, RequestError
from dlm_runtime.constraints.compiled import Content
from dlm_runtime.constraints.layout import LAYOUTS

ROW = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "count": {"type": "integer", "minimum": -5, "maximum": 500},
        "price": {"type": ["number", "null"]},
        "day": {"enum": ["monday", "fri,day", 'say "hi"', ""]},
        "born": {"type": "string", "format": "date"},
        "paid": {"type": "boolean"},
    },
    "required": ["name", "count", "price", "day", "born"],
    "additionalProperties": False,
}
TYPES: dict[str, Any] = {"count": int, "price": float, "paid": {"true": True, "false": False}.get}
PLAIN = "abc ,;|\t\n\r\"'&<>]é€😀"


@pytest.fixture(scope="module")
def demo(demo_bundle: Path) -> Iterator[Bundle]:
    with dlm_runtime.open(demo_bundle, threads=1) as bundle:
        yield bundle


def tree(**member: Any) -> Content:
    return Content("tree", json.dumps(member))


def row_of(cells: dict[str, str]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, cell in cells.items():
        if name in TYPES and cell == "":
            if name in ROW["required"]:  # type: ignore[operator]
                out[name] = None
            continue
        out[name] = TYPES[name](cell) if name in TYPES else cell
    return out


@pytest.mark.parametrize(
    ("delimiter", "line_end"), [(",", "\n"), (";", "\r\n"), ("|", "\n"), ("\t", "\r\n")]
)
def test_rows_of_csv_are_valid(delimiter: str, line_end: str) -> None:
    texts = byte_automaton(tree(csv=ROW, delimiter=delimiter, line_end=line_end, low=2, high=4))
    drawn = drawn_texts(texts, random.Random(3), 40)
    assert len(drawn) > 20
    for text in drawn:
        reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
        rows = list(reader)
        assert reader.fieldnames == list(ROW["properties"])
        assert 2 <= len(rows) <= 4
        for row in rows:
            assert not {None} & {*row, *row.values()}, text
            jsonschema.validate(row_of(row), ROW)
        if "\r" in text.replace(line_end, ""):
            # csv.writer quotes "\r" only if its line terminator contains "\r".
            continue
        again = io.StringIO(newline="")
        writer = csv.writer(again, delimiter=delimiter, lineterminator=line_end)
        writer.writerows([reader.fieldnames, *(row.values() for row in rows)])
        assert again.getvalue() == text + line_end, "it is written as csv.writer writes it"


@given(st.lists(st.text(PLAIN, max_size=6), min_size=1, max_size=3), st.booleans())
@settings(max_examples=40)
def test_what_csv_writes_is_accepted(cells: list[str], header: bool) -> None:
    names = [f"c{number}" for number in range(len(cells))]
    columns = {name: {"const": cell} for name, cell in zip(names, cells, strict=True)}
    schema = {"type": "object", "properties": columns, "required": names}
    texts = byte_automaton(tree(csv=schema, header=header, line_end="\r\n"))
    out = io.StringIO(newline="")
    csv.writer(out).writerows([*([names] if header else []), cells])
    assert texts.matches(out.getvalue().removesuffix("\r\n"))
    assert not texts.matches(out.getvalue() + "x")


ORDER = {
    "type": "object",
    "xml": {"name": "order"},
    "properties": {
        "id": {"type": "string", "maxLength": 6, "xml": {"attribute": True}},
        "rush": {"type": "boolean", "xml": {"attribute": True, "name": "is-rush"}},
        "note": {"type": "string", "maxLength": 6},
        "item": {"type": "array", "items": {"$ref": "#/$defs/item"}, "minItems": 1, "maxItems": 3},
        "tags": {
            "type": "array",
            "items": {"type": "string", "maxLength": 3, "xml": {"name": "tag"}},
            "xml": {"wrapped": True},
        },
    },
    "required": ["id", "item"],
    "$defs": {
        "item": {
            "type": "object",
            "properties": {"name": {"enum": ["nut & bolt", "<b>"]}, "count": {"type": "integer"}},
            "required": ["name", "count"],
        }
    },
}


def order_of(root: ElementTree.Element) -> dict[str, Any]:
    """Convert the XML element of an order to a JSON value that the schema describes."""
    out: dict[str, Any] = {"id": root.get("id")}
    if "is-rush" in root.attrib:
        out["rush"] = json.loads(root.attrib["is-rush"])
    for child in root:
        assert not (child.tail or "").strip()
        if child.tag == "item":
            name, count = child
            assert (name.tag, count.tag) == ("name", "count")
            item = {"name": name.text, "count": int(count.text or "")}
            out.setdefault("item", []).append(item)
        elif child.tag == "tags":
            assert all(tag.tag == "tag" for tag in child)
            out["tags"] = [tag.text or "" for tag in child]
        else:
            assert child.tag == "note"
            out["note"] = child.text or ""
    return out


def test_elements_of_xml_are_valid() -> None:
    drawn = drawn_texts(byte_automaton(tree(xml=ORDER)), random.Random(5), 100)
    assert len(drawn) > 20
    assert any("&lt;" in text for text in drawn)
    for text in drawn:
        root = ElementTree.fromstring(text)
        assert root.tag == "order"
        jsonschema.validate(order_of(root), ORDER)


@given(st.text(PLAIN, max_size=8), st.text(PLAIN, max_size=8))
@settings(max_examples=40)
def test_xml_texts_are_read_as_they_were_meant(inside: str, attribute: str) -> None:
    schema = {
        "type": "object",
        "xml": {"name": "e"},
        "properties": {
            "a": {"const": attribute, "xml": {"attribute": True}},
            "t": {"const": inside},
        },
        "required": ["a", "t"],
    }
    texts = byte_automaton(tree(xml=schema))
    (text,) = drawn_texts(texts, random.Random(1), 5)
    root = ElementTree.fromstring(text)
    assert (root.get("a"), root[0].text or "") == (attribute, inside)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_lines_are_json_values_of_the_schema(layout: str) -> None:
    content = Content("tree", json.dumps({"json_lines": ROW, "low": 2, "high": 3}), LAYOUTS[layout])
    drawn = drawn_texts(byte_automaton(content), random.Random(2), 40)
    assert len(drawn) > 20
    for text in drawn:
        lines = text.split("\n")
        assert len(lines) in (2, 3)
        for line in lines:
            jsonschema.validate(json.loads(line), ROW)


def test_properties_in_any_order_and_further_ones_are_options() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"const": 1}, "b": {"const": 2}},
        "required": ["a", "b"],
        "additionalProperties": {"type": "integer"},
    }

    def texts(**options: bool) -> ByteAutomaton:
        return byte_automaton(Content("schema", json.dumps(schema), **options))

    plain, ordered, more = '{"a":1,"b":2}', '{"b":2,"a":1}', '{"a":1,"b":2,"c":3}'
    found = {
        name: [each.matches(text) for text in (plain, ordered, more)]
        for name, each in {
            "none": texts(),
            "order": texts(any_order=True),
            "more": texts(more_properties=True),
            "both": texts(any_order=True, more_properties=True),
        }.items()
    }
    assert found == {
        "none": [True, False, False],
        "order": [True, True, False],
        "more": [True, False, True],
        "both": [True, True, True],
    }
    for text in drawn_texts(texts(any_order=True, more_properties=True), random.Random(8), 30):
        jsonschema.validate(json.loads(text), schema)


class Model:
    """A class with the method ``model_json_schema``, like a Pydantic model."""

    @staticmethod
    def model_json_schema() -> dict[str, Any]:
        return ROW


def test_a_bundle_takes_records_and_grammars(demo: Bundle) -> None:
    text = demo.generate(prompt="go", csv=Csv(Model, max_rows=2), max_new_tokens=120).text
    assert text is not None
    (row, *_) = csv.DictReader(io.StringIO(text, newline=""))
    jsonschema.validate(row_of(row), ROW)
    lines = demo.generate(prompt="go", json_lines=JsonLines(Model, 1, 1), max_new_tokens=120).text
    assert lines is not None
    jsonschema.validate(json.loads(lines), ROW)
    element = demo.generate(prompt="go", xml=ORDER, max_new_tokens=120).text
    assert element is not None
    jsonschema.validate(order_of(ElementTree.fromstring(element)), ORDER)
    said = demo.generate(prompt="go", grammar='root ::= "yes" | "no"').text
    assert said in ("yes", "no")
    for kind in ("grammar", "csv", "xml"):
        value = 'root ::= "x"' if kind == "grammar" else ORDER
        with pytest.raises(RequestError, match=f"any_order is for .* not for {kind}"):
            demo.constraint(**{kind: value}, any_order=True)


@pytest.mark.parametrize(
    ("member", "said"),
    [
        ({"csv": {"type": "array"}}, "csv: #: a row is a schema of type object"),
        (
            {"csv": {"type": "object", "properties": {"a": {}}}},
            "csv: #/properties/a: csv has only strings, numbers, booleans and null here",
        ),
        (
            {"csv": {"type": "object", "properties": {"a": {"type": "null"}}, "minProperties": 1}},
            "keyword 'minProperties' is not supported here in csv",
        ),
        ({"xml": {"type": "integer"}}, "xml: #: give the root element a name"),
        (
            {"xml": ORDER | {"properties": {"x y": {"type": "null"}}, "required": []}},
            'xml: #/properties/x y: "x y" is not a name of an element',
        ),
        ({"csv": ROW, "low": 3, "high": 2}, "low is above high"),
    ],
)
def test_a_record_that_cannot_be_is_refused_with_its_place(
    member: dict[str, Any], said: str
) -> None:
    with pytest.raises(RequestError) as raised:
        byte_automaton(tree(**member))
    assert said in str(raised.value)
