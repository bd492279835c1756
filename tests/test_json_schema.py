"""Tests of JSON Schemas as constraints: intersections of schemas, rejected schemas, ignored
keywords, warnings, and limits.
"""

from __future__ import annotations

import http.server
import json
import random
import re
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
from constraints import ByteAutomaton, byte_automaton, drawn_texts, schema_content
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from referencing import Registry
from schema_strategies import URIS

from dlm_runtime import RequestError
from dlm_runtime.constraints.compiled import CompileLimits, Content, compile_content
from dlm_runtime.constraints.vocabulary import Vocabulary
from dlm_runtime.errors import SchemaWarning

DRAFT_4, DRAFT_7 = (
    "http://json-schema.org/draft-04/schema#",
    "http://json-schema.org/draft-07/schema#",
)


def texts_of(found: Any, max_depth: int | None = None) -> ByteAutomaton:
    return byte_automaton(schema_content(found, max_depth=max_depth))


def accepts(texts: ByteAutomaton, value: Any) -> bool:
    return texts.matches(json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode())


def validator(found: Any) -> Draft202012Validator:
    return Draft202012Validator(found, registry=Registry())


# ---- Lengths ----


@pytest.mark.parametrize(
    ("name", "lengths"),
    [
        ("uri", {"maxLength": 2083, "minLength": 1}),
        ("iri-reference", {"maxLength": 2083, "minLength": 1}),
        ("idn-email", {"maxLength": 254}),
        ("idn-hostname", {"maxLength": 254}),
    ],
)
def test_addresses_of_limited_length_compile(name: str, lengths: dict[str, int]) -> None:
    vocabulary = Vocabulary((*(bytes([byte]) for byte in range(256)), None))
    urls = {f"url{i}": {"type": "string", "format": name, **lengths} for i in range(2)}
    content = schema_content({"type": "object", "properties": urls, "required": [*urls]})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SchemaWarning)
        made = compile_content(content, vocabulary=vocabulary, vocab_size=257, ends=(256,))
    assert made.states < 1 << 17


def test_an_address_of_limited_length_keeps_its_length_and_format() -> None:
    found = {"type": "string", "format": "uri", "minLength": 12, "maxLength": 30}
    texts = texts_of(found)
    checker = Draft202012Validator(found, format_checker=Draft202012Validator.FORMAT_CHECKER)
    for value in ("https://a.example:80/b?c#d", "http://[::1]/abc", "urn:x:abcdefg", "a" * 12):
        assert accepts(texts, value) == (":" in value), value
    assert accepts(texts, "http://a.b/" + "x" * 19)
    assert not accepts(texts, "http://a.b/" + "x" * 20)
    assert not accepts(texts, "http://a.b/")
    for text in drawn_texts(texts, random.Random(3), 50):
        assert checker.is_valid(json.loads(text)), text


def test_a_string_that_is_too_large_is_named() -> None:
    hard = {"type": "string", "pattern": "(a|b)*a(a|b){6}$", "maxLength": 2000}
    content = schema_content({"type": "object", "properties": {"name": hard}, "required": ["name"]})
    with pytest.raises(RequestError, match=r"^schema: #/properties/name: this length is too large"):
        byte_automaton(content, CompileLimits(states=1000))


def test_an_integer_of_const_and_enum_has_no_decimal_point() -> None:
    assert accepts(texts_of({"const": 1.0}), 1)
    assert not accepts(texts_of({"const": 1.0}), 1.0)
    texts = byte_automaton(Content("schema", '{"enum": [-2.0, 1e2, -0.0, 2.50, 1e20]}'))
    assert all(texts.matches(text) for text in ("-2", "100", "0", "2.50", "1e20"))
    assert not any(texts.matches(text) for text in ("-2.0", "1e2", "-0.0", "-0"))


@pytest.mark.parametrize("key", ["contentEncoding", "contentMediaType"])
@pytest.mark.parametrize("draft", [7, 2020])
def test_the_content_of_a_string_is_not_checked_and_that_is_said(key: str, draft: int) -> None:
    found = {"$schema": URIS[draft], "properties": {"a": {"type": "string", key: "x"}}}
    with pytest.warns(SchemaWarning, match=f"#/properties/a: keyword '{key}' is ignored"):
        texts_of(found)


TREE = {"type": "object", "properties": {"a": {"$ref": "#/$defs/tree"}}}
DEEP: dict[str, Any] = {"required": ["a"]}
NESTED: dict[str, Any] = {"a": {}}
for _ in range(5):
    DEEP, NESTED = {"required": ["a"], "properties": {"a": DEEP}}, {"a": NESTED}


@pytest.mark.parametrize(
    ("found", "value", "limit"),
    [
        ({"contains": False}, None, "a schema without 'type'"),
        ({"type": "string", "format": "email", "minLength": 400}, "a@b." + "c" * 396, "'email'"),
        ({"type": "number", "not": {"const": 12345678901234567}}, 1, "number of digits"),
        (
            {"allOf": [{"$ref": "#/$defs/tree"}, DEEP], "$defs": {"tree": TREE}},
            NESTED,
            "max_depth 3",
        ),
        (
            {"type": "object", "properties": {"a": {"type": "null"}}, "minProperties": 3},
            {"a": None, "b": 1, "c": 2},
            "minProperties 3 is not supported",
        ),
        (
            {
                "type": "object",
                "properties": {"a": {}},
                "minProperties": 3,
                "additionalProperties": False,
            },
            None,
            "",
        ),
        (
            {
                "type": "object",
                "properties": {"a": {}},
                "additionalProperties": False,
                "not": {"anyOf": [{"required": ["a"]}, {"additionalProperties": {"const": 1}}]},
            },
            None,
            "",
        ),
        ({"type": "integer", "minimum": 5, "maximum": 4}, None, ""),
        ({"type": "string", "allOf": [{"pattern": "^a$"}, {"pattern": "^b$"}]}, None, ""),
    ],
)
def test_a_schema_without_values_says_which_limits_left_them_out(
    found: Any, value: Any, limit: str
) -> None:
    with pytest.raises(RequestError, match=r"^schema: no value is valid by it") as raised:
        texts_of(found)
    assert ("within the compiler's limits: " in str(raised.value)) == bool(limit)
    assert limit in str(raised.value)
    if value is not None or limit.endswith("'type'"):
        assert validator(found).is_valid(value)


# ---- References ----


def test_nothing_is_retrieved(tmp_path: Path) -> None:
    requests = list[str]()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            requests.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"type":"integer"}')

        def log_message(self, format: str, *args: Any) -> None:
            pass

    (tmp_path / "x.json").write_text('{"type":"integer"}')
    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            for uri in (
                f"http://127.0.0.1:{server.server_port}/x",
                (tmp_path / "x.json").as_uri(),
                "//other/x#/y",
            ):
                for found in (
                    {"$ref": uri},
                    {"enum": [1, 2], "anyOf": [{"$ref": uri}]},
                    {"oneOf": [{"const": 1}, {"$ref": uri}]},
                    {"$id": uri + "#", "properties": {"a": {"$ref": "other"}}},
                ):
                    with pytest.raises(
                        RequestError,
                        match=r"^schema: #.*\$ref .* is not in this schema, and other documents",
                    ):
                        texts_of(found)
            with pytest.raises(
                RequestError,
                match=rf"\$ref \"http://127.0.0.1:{server.server_port}/x\" is not in this schema",
            ):
                texts_of({"$ref": f"http://127.0.0.1:{server.server_port}/x"})
        finally:
            server.shutdown()
            thread.join()
    assert requests == []


@pytest.mark.parametrize(
    "reference",
    [
        "http://[",
        "#/a",
        "#anchor",
        "#/%zz",
        "#/$defs/x/0",
        "#/enum/7",
        "#/$defs/list/-1",
        "urn:x#/y",
        "#/$schema",
    ],
)
def test_references_that_lead_nowhere_are_rejected(reference: str) -> None:
    with pytest.raises(RequestError, match=r"^schema: .*\$ref "):
        texts_of(
            {
                "properties": {"a": {"$ref": reference}},
                "$defs": {"x": {}, "list": [{}]},
                "$schema": "x",
            }
        )


# ---- Cases: a schema, values that its constraint allows, and values that it rejects ----

EXACT: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "a nested $id": (
        {
            "properties": {
                "a": {
                    "$id": "http://x/inner",
                    "$ref": "#/$defs/y",
                    "$defs": {"y": {"type": "integer"}},
                }
            },
            "required": ["a"],
            "$defs": {"y": {"type": "string"}},
        },
        [{"a": 1}],
        [{"a": "x"}],
    ),
    "a reference by $id": (
        {
            "$ref": "item",
            "$id": "http://x/root",
            "$defs": {"y": {"$id": "item", "type": "integer"}},
        },
        [1],
        ["x"],
    ),
    "an anchor": ({"$ref": "#y", "$defs": {"y": {"$anchor": "y", "type": "integer"}}}, [1], ["x"]),
    "an intersection of bounds": (
        {
            "type": "integer",
            "minimum": 3,
            "allOf": [{"minimum": 5, "maximum": 9}, {"exclusiveMaximum": 9}],
        },
        [5, 8],
        [3, 4, 9],
    ),
    "properties of several schemas": (
        {
            "allOf": [
                {"type": "object", "properties": {"a": {"minimum": 1}}, "required": ["a"]},
                {
                    "properties": {"a": {"type": "integer", "maximum": 2}, "b": {"const": 0}},
                    "additionalProperties": False,
                },
            ]
        },
        [{"a": 1}, {"a": 2, "b": 0}],
        [{"a": 3}, {"b": 0}, {"a": 1, "c": 1}],
    ),
    "an anyOf beside properties": (
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
        },
        [{"a": 1}, {"b": 1}, {"a": 1, "b": 2}],
        [{}, {"a": "x", "b": 1}],
    ),
    "true is not one": ({"oneOf": [{"const": 1}, {"const": True}]}, [1, True], [False, 0]),
    "an exclusive bound of Draft 4": (
        {
            "$schema": DRAFT_4,
            "type": "integer",
            "minimum": 1,
            "exclusiveMinimum": True,
            "maximum": 3,
        },
        [2, 3],
        [1, 4],
    ),
    "items of Draft 7": (
        {
            "$schema": DRAFT_7,
            "type": "array",
            "items": [{"const": 1}, {"const": 2}],
            "additionalItems": {"const": 3},
            "minItems": 1,
        },
        [[1], [1, 2], [1, 2, 3, 3]],
        [[], [2], [1, 2, 1]],
    ),
    "unknown keywords and formats": (
        {
            "type": "string",
            "id": "a",
            "x-order": 1,
            "example": 1,
            "nullable": True,
            "format": "int64",
            "$defs": {},
            "ui:widget": 2,
        },
        ["", "x"],
        [None, 1],
    ),
    "keywords of other types": (
        {"type": "string", "patternProperties": {}, "multipleOf": 2, "contains": {}},
        ["x"],
        [2],
    ),
    "an if without branches": (
        {"type": "integer", "if": {"const": 1}, "minContains": 2},
        [1],
        ["x"],
    ),
    "a pattern beside an enum": (
        {"enum": ["aa", "ab", "b", 1], "pattern": "^a+$", "type": "string"},
        ["aa"],
        ["ab", "b", 1],
    ),
    "a format beside an enum": (
        {"enum": ["2024-01-01", "x"], "format": "date"},
        ["2024-01-01"],
        ["x"],
    ),
    "not of properties": (
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "not": {"properties": {"a": {"const": 1}}, "required": ["a"]},
        },
        [{}, {"b": 1}, {"a": 2}],
        [{"a": 1}, {"a": 1, "b": 2}],
    ),
    "not of an object": (
        {
            "type": "object",
            "properties": {"a": {"enum": [1, {"b": 1}]}, "c": {"const": 1}},
            "not": {"enum": [{}, {"a": 1}, {"c": 1, "a": {"b": 1.0}}]},
        },
        [{"c": 1}, {"a": {"b": 1}}, {"a": 1, "c": 1}],
        [{}, {"a": 1}, {"a": {"b": 1}, "c": 1}],
    ),
    "not of an object without properties": (
        {"not": {"const": {"a": 1}}},
        [{}, [], "a"],
        [{"a": 1}],
    ),
    "not of an array": (
        {"type": "array", "items": {}, "not": {"enum": [[], [1, [True]]]}},
        [[1], [1, []], [1, [1]], [1, [True], 1]],
        [[], [1, [True]]],
    ),
    "if, then and else": (
        {
            "type": "object",
            "properties": {"k": {"enum": ["x", "y"]}, "v": {}},
            "required": ["k"],
            "if": {"properties": {"k": {"const": "x"}}},
            "then": {"properties": {"v": {"type": "string"}}, "required": ["v"]},
            "else": {"properties": {"v": {"type": "integer"}}},
        },
        [{"k": "x", "v": "a"}, {"k": "y"}, {"k": "y", "v": 3}],
        [{"k": "x"}, {"k": "x", "v": 3}, {"k": "y", "v": "a"}],
    ),
    "dependent properties": (
        {
            "type": "object",
            "properties": {name: {"const": 1} for name in "abc"},
            "dependentRequired": {"a": ["c"]},
            "dependentSchemas": {"b": {"maxProperties": 2}},
        },
        [{}, {"c": 1}, {"a": 1, "c": 1}, {"b": 1}],
        [{"a": 1}, {"a": 1, "b": 1}, {"a": 1, "b": 1, "c": 1}],
    ),
    "patterns of names": (
        {
            "type": "object",
            "patternProperties": {"^x": {"const": 1}, "y$": {"type": "integer"}},
            "additionalProperties": False,
        },
        [{}, {"xa": 1}, {"ay": 7}, {"xy": 1}],
        [{"xa": 2}, {"xy": 2}, {"a": 1}],
    ),
    "names of properties": (
        {
            "type": "object",
            "propertyNames": {"maxLength": 2},
            "additionalProperties": {"const": 1},
        },
        [{"ab": 1}],
        [{"abc": 1}],
    ),
    "counts of items that match": (
        {
            "type": "array",
            "items": {"type": "integer"},
            "contains": {"minimum": 5},
            "minContains": 2,
            "maxContains": 3,
        },
        [[5, 6], [1, 5, 2, 6, 7]],
        [[5], [5, 6, 7, 8], ["x", 5, 6]],
    ),
    "items that differ": (
        {"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True},
        [[], ["b", "a"], ["a", "b", "c"]],
        [["a", "a"], ["a", "b", "a"]],
    ),
    "unevaluated properties": (
        {
            "type": "object",
            "properties": {"a": {"const": 1}},
            "anyOf": [{"properties": {"b": {"const": 1}}}, {"properties": {"c": {"const": 1}}}],
            "unevaluatedProperties": False,
        },
        [{}, {"a": 1, "b": 1}, {"c": 1}],
        [{"d": 1}, {"a": 2}],
    ),
    "multiples": ({"type": "integer", "multipleOf": 7, "minimum": 8}, [14, 70], [7, 15]),
    "patterns and lengths": (
        {"type": "string", "pattern": "^a+$", "minLength": 2, "maxLength": 3},
        ["aa", "aaa"],
        ["a", "aaaa", "ab"],
    ),
    "one of two ranges with a common end": (
        {"oneOf": [{"type": "integer", "minimum": 5}, {"type": "integer", "maximum": 5}]},
        [4, 6],
        [5],
    ),
    "a dynamic reference": (
        {
            "$dynamicAnchor": "n",
            "type": "object",
            "properties": {"n": {"$dynamicRef": "#n"}},
            "additionalProperties": False,
        },
        [{}, {"n": {}}, {"n": {"n": {}}}],
        [{"n": 1}],
    ),
}


@pytest.mark.parametrize("name", EXACT)
def test_schemas_are_intersected_exactly(name: str) -> None:
    found, valid, invalid = EXACT[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        texts = texts_of(found)
    assert [value for value in valid if not accepts(texts, value)] == []
    assert [value for value in invalid if accepts(texts, value)] == []


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({"oneOf": [{"const": [1]}, {"const": [1.0]}]}, "no value is valid by it"),
        (
            {"type": "object", "not": {"propertyNames": {"maxLength": 2}}},
            "#/not: keyword 'propertyNames' is not supported within a negation",
        ),
        ({"type": "object", "minProperties": 2}, "#: keyword 'minProperties' of more than 1"),
        (
            {"$schema": DRAFT_7, "prefixItems": [{}]},
            "#: keyword 'prefixItems' does not exist in the draft",
        ),
        (
            {"$schema": "http://json-schema.org/draft-03/schema#"},
            "is not supported: write it for Draft 4 or later",
        ),
        ({"$dynamicRef": "#x"}, r'#: \$dynamicRef "#x" leads nowhere'),
        (
            {"anyOf": [{"const": 1}, {"$ref": "#"}]},
            "refers to itself without a property or an item in between",
        ),
        ({"required": ["a"], "properties": {"a": {"$ref": "#"}}}, "no value is valid by it"),
        ({"type": "object", "required": "a"}, '#/required: "a" is not a list of names'),
        ({"properties": {"a": {"minLength": -1}}}, "#/properties/a/minLength: -1 is not a count"),
        ({"properties": {"a": 5}}, "#/properties/a: 5 is not a schema"),
        ({"type": "string", "minLength": 20_000}, "#: keyword 'minLength' = 20000 is more than"),
        ([], r"#: \[\] is not a schema"),
    ],
)
def test_what_cannot_be_said_is_rejected_by_name(found: Any, message: str) -> None:
    with pytest.raises(RequestError, match=f"^schema: .*{message}"):
        texts_of(found)


def test_a_schema_contains_itself_at_most_max_depth_times() -> None:
    found = {"type": "object", "properties": {"next": {"$ref": "#"}}, "additionalProperties": False}
    texts = texts_of(found, 2)
    assert [
        accepts(texts, value)
        for value in ({}, {"next": {"next": {}}}, {"next": {"next": {"next": {}}}})
    ] == [
        True,
        True,
        False,
    ]


# ---- Comparison with jsonschema ----

SCALARS: tuple[Any, ...] = (None, True, 0, 1, 1.0, 2, -1, 1.5, "", "a", "ab")
VALUES = (
    *SCALARS,
    [],
    [1],
    [1, 1.0],
    ["a", 1],
    [1, "a", 1],
    {},
    {"a": 1},
    {"a": "a"},
    {"b": 1.5},
    {"a": 2, "b": None},
    {"c": [1]},
)


def keywords(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    names, count = st.sampled_from("abc"), st.integers(0, 2)
    types = st.sampled_from(("integer", "number", "string", "array", "object", "null", "boolean"))
    branches = st.lists(inner, min_size=1, max_size=3)
    optional: dict[str, st.SearchStrategy[Any]] = {
        "type": types | st.lists(types, min_size=1, max_size=3, unique=True),
        "enum": st.lists(st.sampled_from(VALUES), max_size=4),
        "const": st.sampled_from(VALUES),
        **dict.fromkeys(("minimum", "exclusiveMaximum"), st.sampled_from((0, 1, 1.5, 2))),
        **dict.fromkeys(("maxLength", "minItems", "maxItems", "minProperties"), count),
        **dict.fromkeys(("items", "additionalProperties"), inner),
        **dict.fromkeys(("anyOf", "oneOf", "allOf", "prefixItems"), branches),
        "properties": st.dictionaries(names, inner, max_size=2),
        "required": st.lists(names, max_size=2),
        "uniqueItems": st.booleans(),
        "$ref": st.sampled_from(("#/$defs/x", "#/$defs/y")),
    }
    some = st.lists(st.sampled_from(sorted(optional)), max_size=4, unique=True)
    return some.flatmap(
        lambda chosen: st.fixed_dictionaries({each: optional[each] for each in chosen})
    )


SCHEMAS = st.recursive(st.booleans() | keywords(st.booleans()), keywords, max_leaves=12)
DOCUMENTS = st.builds(
    lambda root, x, y: (
        (root if isinstance(root, dict) else {"allOf": [root]}) | {"$defs": {"x": x, "y": y}}
    ),
    *(SCHEMAS, SCHEMAS, SCHEMAS),
)


def is_valid(found: Any, value: Any) -> bool:
    """Return whether the package jsonschema accepts the value.

    For some recursive schemas, jsonschema recurses endlessly. Tests skip these schemas.
    """
    try:
        return bool(validator(found).is_valid(value))
    except RecursionError:
        recurses = True
    assume(not recurses)
    raise AssertionError


@settings(max_examples=150)
@given(found=DOCUMENTS)
def test_listed_values_are_valid_as_jsonschema_says(found: Any) -> None:
    # Test each value with its own constraint. One constraint with an enum of all values would merge
    # equal values such as 1 and 1.0.
    allowed = [value for value in VALUES if is_allowed(found, value)]
    # repr() distinguishes 1, 1.0 and true.
    assert list(map(repr, allowed)) == [repr(value) for value in VALUES if is_valid(found, value)]


def _as_written(value: Any) -> Any:
    """Replace each float that is an integer by the integer, as the compiler writes it."""
    return json.loads(
        json.dumps(value), parse_float=lambda t: int(t[:-2]) if t.endswith(".0") else float(t)
    )


def is_allowed(found: Any, value: Any) -> bool:
    """Return whether the constraint of the schema ``found`` allows this value."""
    try:
        texts = texts_of({"allOf": [{"const": value}, found], "$defs": found["$defs"]})
    except RequestError as err:
        reason = str(err)
    else:
        return accepts(texts, _as_written(value))
    assume(not re.search("refers to itself|beside enum|within a negation", reason))
    assert "no value is valid" in reason or "no text" in reason, reason
    return False


@settings(max_examples=40)
@given(found=DOCUMENTS)
def test_no_value_is_accepted_that_jsonschema_rejects(found: Any) -> None:
    try:
        texts = texts_of(found, 1)
    except RequestError:
        return
    assert [value for value in VALUES if accepts(texts, value) and not is_valid(found, value)] == []


# ---- Misspelled keywords ----


@pytest.mark.parametrize(
    ("keyword", "known"),
    [
        ("requried", "required"),
        ("propertes", "properties"),
        ("minlength", "minLength"),
        ("tpye", "type"),
        ("ref", "$ref"),
    ],
)
def test_misspelled_keywords_give_one_warning(keyword: str, known: str) -> None:
    found = {
        "properties": {name: {"$ref": "#/$defs/x"} for name in "ab"},
        "$defs": {"x": {"const": 1, keyword: 1}},
    }
    with pytest.warns(SchemaWarning) as caught:
        texts_of(found)
    assert [str(each.message) for each in caught] == [
        f"schema: #/$defs/x: keyword {keyword!r} is not known and is ignored: did you mean {known!r}?"
    ]


def test_what_is_left_out_gives_a_warning() -> None:
    with pytest.warns(SchemaWarning, match=r"^schema: #: keyword 'uniqueItems' is not regular"):
        texts = texts_of({"type": "array", "uniqueItems": True})
    assert accepts(texts, [1])
    assert not accepts(texts, [1, 2])


def test_strings_are_cut_before_depths_where_the_automaton_would_be_too_large() -> None:
    text: dict[str, Any] = {"type": "string", "maxLength": 9000}
    deep = {"type": "array", "items": {"type": "array", "items": {"type": "array"}}}
    found = {"type": "object", "properties": {"text": text, "deep": deep}}
    # Two automata of the most states that are allowed take more than 5 s.
    with pytest.warns(SchemaWarning, match=r"^schema: strings of limited length have at most 2048"):
        texts = texts_of(found)
    assert accepts(texts, {"text": "x" * 2048, "deep": [[[]]]})
    assert not accepts(texts, {"text": "x" * 2049})
    assert not accepts(texts, {"text": "x" * 9001})
    text["minLength"] = 3000
    with pytest.warns(SchemaWarning, match=r"^schema: strings of limited length"):
        texts = texts_of(found)
    assert accepts(texts, {"text": "x" * 3000})
    assert not accepts(texts, {"text": "x" * 2048})


def test_a_smaller_automaton_is_tried_where_the_estimate_was_too_low() -> None:
    content = schema_content({"type": "string", "pattern": "^[^x]*$", "maxLength": 2000})
    with pytest.warns(SchemaWarning, match=r"^schema: strings of limited length have at most 256"):
        texts = byte_automaton(content, CompileLimits(states=10_000))
    assert accepts(texts, "é" * 256)
    assert not accepts(texts, "é" * 257)


# ---- Limits ----


def test_patterns_of_an_enum_are_not_matched_by_backtracking() -> None:
    texts = texts_of({"enum": ["a" * 40 + "!", "aa"], "pattern": "^(a+)+$"})
    assert accepts(texts, "aa")
    assert not accepts(texts, "a" * 40 + "!")


LARGE: dict[str, Any] = {
    "optional properties": {
        "type": "object",
        "properties": {f"property{i}": {"type": "string"} for i in range(9000)},
    },
    "doubled references": {
        "$ref": "#/$defs/0",
        "$defs": {
            str(i): {
                "type": "object",
                "properties": {name: {"$ref": f"#/$defs/{i + 1}"} for name in "ab"},
            }
            for i in range(60)
        }
        | {"60": {"type": "integer"}},
    },
    "items": {"prefixItems": [{"enum": ["x" * 1000]}] * 10000},
    "levels": json.loads('{"items":' * 300 + "{}" + "}" * 300),
    "digits": {"type": "integer", "minimum": -(10**3999), "maximum": 10**3999},
}
SMALL: dict[str, Any] = {
    "constants": {"oneOf": [{"const": i} for i in range(3000)]},
    "branches with a constant": {
        "oneOf": [
            {"type": "object", "properties": {"k": {"const": i}}, "required": ["k"]}
            for i in range(1000)
        ]
    },
    "values times branches": {
        "enum": list(range(3000)),
        "anyOf": [{"const": i} for i in range(3000)],
    },
    "products of branches": {
        "type": "integer",
        "allOf": [{"anyOf": [{"minimum": i}, {"maximum": -i}]} for i in range(1, 60)],
    },
    "80 optional properties": {
        "type": "object",
        "properties": {f"p{i}": {"type": "string"} for i in range(80)},
    },
    "a list of values": {"enum": [f"value{i}" for i in range(10_000)]},
}


@pytest.mark.parametrize("name", LARGE)
def test_schemas_that_are_too_large_are_rejected(name: str) -> None:
    with pytest.raises(RequestError) as caught:
        byte_automaton(schema_content(LARGE[name]), CompileLimits(seconds=20))
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("name", SMALL)
def test_large_schemas_with_few_states_are_compiled(name: str) -> None:
    byte_automaton(schema_content(SMALL[name]), CompileLimits(seconds=20))
