"""JSON Schemas as constraints: what is intersected, rejected, ignored and warned about, and what a
schema may cost.
"""

from __future__ import annotations

import http.server
import itertools
import json
import re
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from referencing import Registry

from dlm_runtime import RequestError
from dlm_runtime.constraints import schema
from dlm_runtime.constraints.byte_automaton import ByteAutomaton, CompileLimits, byte_automaton
from dlm_runtime.constraints.conjunction import Conjunction
from dlm_runtime.constraints.document import Document, SchemaWarning
from dlm_runtime.constraints.validity import Validity

DRAFT_4, DRAFT_7 = (
    "http://json-schema.org/draft-04/schema#",
    "http://json-schema.org/draft-07/schema#",
)


def texts_of(found: Any, max_depth: int | None = None) -> ByteAutomaton:
    return byte_automaton(schema.expression(found, max_depth), CompileLimits(), True)


def accepts(texts: ByteAutomaton, value: Any) -> bool:
    return texts.matches(json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode())


def validator(found: Any) -> Draft202012Validator:
    return Draft202012Validator(found, registry=Registry())


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
                        schema.expression(found)
            with pytest.raises(
                RequestError,
                match=rf"\$ref \"http://127.0.0.1:{server.server_port}/x\" is not in this schema",
            ):
                schema.expression({"$ref": f"http://127.0.0.1:{server.server_port}/x"})
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
        "\x00",
        "#/$schema",
    ],
)
def test_references_that_lead_nowhere_are_rejected(reference: str) -> None:
    with pytest.raises(RequestError, match=r"^schema: .*\$ref "):
        schema.expression(
            {
                "properties": {"a": {"$ref": reference}},
                "$defs": {"x": {}, "list": [{}]},
                "$schema": "x",
            }
        )


# ---- What is accepted: a schema, some valid values of which all are made, and others ----

NODE = {"S": {"$ref": "#/$defs/N", "maxLength": 3}, "N": {"type": "string"}}
EXACT: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "siblings of an intermediate reference": (
        {"$ref": "#/$defs/S", "$defs": NODE},
        ["", "abc"],
        ["abcd", 1],
    ),
    "required beside a reference": (
        {
            "$ref": "#/$defs/x",
            "required": ["b"],
            "$defs": {"x": {"type": "object", "properties": {"a": {"const": 1}}}},
        },
        [{"a": 1, "b": 2}, {"b": None}],
        [{"a": 1}, {"a": 2, "b": 2}],
    ),
    "type beside a reference": (
        {"$ref": "#/$defs/x", "type": "string", "$defs": {"x": {"type": ["string", "integer"]}}},
        ["a"],
        [1],
    ),
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
    "a boolean branch of anyOf": ({"type": "integer", "anyOf": [True]}, [1, -5], [{}, "x", 1.5]),
    "a boolean branch of allOf": ({"type": "integer", "allOf": [True]}, [1], [{}, "x"]),
    "boolean branches of oneOf": ({"type": "integer", "oneOf": [True, False]}, [1], [{}, "x"]),
    "an intersection of numbers": (
        {"type": ["number", "null"], "allOf": [{"type": ["integer", "string"]}]},
        [1, 20],
        [1.5, "x", None],
    ),
    "an intersection of bounds": (
        {
            "type": "integer",
            "minimum": 3,
            "allOf": [{"minimum": 5, "maximum": 9}, {"exclusiveMaximum": 9}],
        },
        [5, 8],
        [3, 4, 9],
    ),
    "an intersection of lengths": (
        {"type": "string", "minLength": 1, "allOf": [{"maxLength": 2}, {"minLength": 2}]},
        ["ab"],
        ["a", "abc"],
    ),
    "an intersection of values": (
        {"enum": [1, 2, "a", [1]], "allOf": [{"enum": [2, "a", [1.0], 5]}]},
        [2, "a", [1]],
        [1, 5],
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
    "a reference and an enum": (
        {
            "properties": {"a": {"enum": ["yes"], "allOf": [{"$ref": "#/$defs/y"}]}},
            "$defs": {"y": {"enum": ["yes", "no"]}},
        },
        [{}, {"a": "yes"}],
        [{"a": "no"}],
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
    "branches with other required properties": (
        {
            "oneOf": [
                {
                    "type": "object",
                    "properties": {name: {"const": 1}},
                    "required": [name],
                    "additionalProperties": False,
                }
                for name in "ab"
            ]
        },
        [{"a": 1}, {"b": 1}],
        [{}, {"a": 1, "b": 1}],
    ),
    "a value that a branch rejects": (
        {"oneOf": [{"const": 1}, {"type": "integer", "minimum": 2}]},
        [1, 2],
        [0],
    ),
    "true is not one": ({"oneOf": [{"const": 1}, {"const": True}]}, [1, True], [False, 0]),
    "counts of properties": (
        {
            "properties": {"a": {"const": 1}, "b": {"const": 1}},
            "minProperties": 1,
            "maxProperties": 2,
            "type": "object",
        },
        [{"a": 1}, {"a": 1, "b": 1}],
        [{}],
    ),
    "a map with few properties": (
        {
            "type": "object",
            "additionalProperties": {"const": 1},
            "minProperties": 1,
            "maxProperties": 2,
        },
        [{"x": 1}, {"x": 1, "y": 1}],
        [{}, {"x": 1, "y": 1, "z": 1}],
    ),
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
    "a long enum in a branch": (
        {"anyOf": [{"enum": ["x"]}, {"enum": [1]}], "type": "string"},
        ["x"],
        [1],
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
        (
            {"$ref": "#/$defs/x", "not": {"const": 1}, "$defs": {"x": {"type": "integer"}}},
            "#: keyword 'not' is not supported",
        ),
        (
            {"oneOf": [{"const": [1]}, {"const": [1.0]}]},
            "#: keyword 'oneOf' has branches that one value may satisfy together",
        ),
        ({"oneOf": [True, {"const": 1}]}, "#: keyword 'oneOf' has branches"),
        (
            {"oneOf": [{"required": ["a"]}, {"required": ["b"]}], "type": "object"},
            "#: keyword 'oneOf' has branches",
        ),
        (
            {"oneOf": [{"properties": {"a": {"const": n}}, "required": ["a"]} for n in (1, 2)]},
            "#: keyword 'oneOf' has branches",
        ),
        (
            {"type": "string", "pattern": "a", "allOf": [{"pattern": "b"}]},
            "#: keyword 'pattern' is not supported beside",
        ),
        (
            {"type": "string", "pattern": "a", "allOf": [{"maxLength": 2}]},
            "#: keyword 'pattern' is not supported beside",
        ),
        ({"enum": [2], "multipleOf": 2}, "#: keyword 'multipleOf' is not supported"),
        ({"type": "integer", "if": {}, "then": {}}, "#: keyword 'if' is not supported"),
        (
            {"type": "object", "dependencies": {"a": ["b"]}},
            "#: keyword 'dependencies' is not supported",
        ),
        ({"type": "object", "minProperties": 2}, "#: keyword 'minProperties' of more than 1"),
        (
            {"type": "object", "properties": {"a": {}, "b": {}}, "maxProperties": 1},
            "#: keyword 'maxProperties' is not supported",
        ),
        ({"items": [{}]}, r"#/items: \[{}\] is not a schema"),
        (
            {"type": "integer", "minimum": 1, "exclusiveMinimum": True},
            "#/exclusiveMinimum: true is not a number",
        ),
        (
            {"$schema": DRAFT_7, "prefixItems": [{}]},
            "#: keyword 'prefixItems' does not exist in the draft",
        ),
        (
            {"$schema": "http://json-schema.org/draft-03/schema#"},
            "is not supported: write it for Draft 4 or later",
        ),
        ({"$dynamicRef": "#x"}, r"#: keyword '\$dynamicRef' is not supported"),
        ({"$recursiveRef": "#"}, r"#: keyword '\$recursiveRef' is not supported"),
        (
            {"anyOf": [{"const": 1}, {"$ref": "#"}]},
            "refers to itself without a property or an item in between",
        ),
        (
            {"required": ["a"], "properties": {"a": {"$ref": "#"}}},
            r'\$ref\' = "#" is recursive: give max_depth',
        ),
        ({"type": "object", "required": "a"}, '#/required: "a" is not a list of names'),
        ({"properties": {"a": {"minLength": -1}}}, "#/properties/a/minLength: -1 is not a count"),
        ({"properties": {"a": 5}}, "#/properties/a: 5 is not a schema"),
        ([], r"#: \[\] is not a schema"),
    ],
)
def test_what_cannot_be_intersected_is_rejected_by_name(found: Any, message: str) -> None:
    with pytest.raises(RequestError, match=f"^schema: .*{message}"):
        schema.expression(found)


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


# ---- Against jsonschema ----

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
    """What jsonschema says. It does not end for some schemas that refer to themselves; such
    documents are not tested.
    """
    try:
        return bool(validator(found).is_valid(value))
    except RecursionError:
        recurses = True
    assume(not recurses)
    raise AssertionError


@settings(max_examples=300, deadline=None)
@given(found=DOCUMENTS)
def test_values_are_valid_as_jsonschema_says(found: Any) -> None:
    document = Document(found)
    try:
        conjunction, validity = (
            Conjunction(document, [document.root]),
            Validity(document, CompileLimits()),
        )
        allowed = [value for value in VALUES if validity.allows(conjunction, value)]
    except RequestError as err:
        reason = str(err)
    else:
        reason = ""
    if reason:
        assert "refers to itself" in reason
        return
    # repr() tells 1, 1.0 and true apart.
    assert list(map(repr, allowed)) == [repr(value) for value in VALUES if is_valid(found, value)]


@settings(max_examples=40, deadline=None)
@given(found=DOCUMENTS)
def test_no_value_is_accepted_that_jsonschema_rejects(found: Any) -> None:
    try:
        texts = texts_of(found, 1)
    except RequestError:
        return
    assert [value for value in VALUES if accepts(texts, value) and not is_valid(found, value)] == []


@settings(max_examples=30, deadline=None)
@given(count=st.integers(1, 7), data=st.data())
def test_properties_are_in_order_and_all_required_ones_are_there(
    count: int, data: st.DataObject
) -> None:
    required = [name for name in "abcdefg"[:count] if data.draw(st.booleans())]
    found = {
        "type": "object",
        "properties": {name: {"const": 1} for name in "abcdefg"[:count]},
        "required": required,
    }
    expression = schema.expression(found)
    for size in range(count + 1):
        for names in itertools.combinations("abcdefg"[:count], size):
            text = json.dumps(dict.fromkeys(names, 1), separators=(",", ":"))
            assert bool(re.fullmatch(expression, text)) == (set(required) <= set(names))
    assert not re.fullmatch(expression, '{"b":1,"a":1}')


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
        schema.expression(found)
    assert [str(each.message) for each in caught] == [
        f"schema: #/$defs/x: keyword {keyword!r} is not known and is ignored: did you mean {known!r}?"
    ]


def test_formats_of_the_specification_that_are_not_enforced_give_a_warning() -> None:
    with pytest.warns(
        SchemaWarning, match=r"^schema: #: format 'ipv6' is not enforced: give a pattern$"
    ):
        texts = texts_of({"type": "string", "format": "ipv6"})
    assert accepts(texts, "any")


# ---- What a schema may cost ----


def run_limited(code: str) -> str:
    """What a program prints that may take 20 s of processor time."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_CPU, (20, -1))\nfrom dlm_runtime.constraints import schema\n"
    done = subprocess.run(
        [sys.executable, "-c", limit + code],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_patterns_of_an_enum_are_not_matched_by_backtracking() -> None:
    found = {"enum": ["a" * 40 + "!", "aa"], "pattern": "^(a+)+$"}
    assert run_limited(f"print(schema.expression({found}))") == '"aa"\n'


LARGE = {
    "optional properties": "{'type': 'object', 'properties': {f'property{i}': {'type': 'string'} for i in range(9000)}}",
    "constants": "{'oneOf': [{'const': i} for i in range(3000)]}",
    "branches with a constant": (
        "{'oneOf': [{'type': 'object', 'properties': {'k': {'const': i}}, 'required': ['k']} for i in range(2000)]}"
    ),
    "branches without a constant": (
        "{'oneOf': [{'type': 'object', 'properties': {f'k{i}': {'const': i}}, 'required': [f'k{i}']} for i in range(2000)]}"
    ),
    "values times branches": "{'enum': list(range(3000)), 'anyOf': [{'const': i} for i in range(3000)]}",
    "doubled references": (
        "{'$ref': '#/$defs/0', '$defs': {str(i):"
        " {'type': 'object', 'properties': {name: {'$ref': f'#/$defs/{i + 1}'} for name in 'ab'}}"
        " for i in range(60)} | {'60': {'type': 'integer'}}}"
    ),
    "doubled branches": (
        "{'enum': [1], 'anyOf': [{'$ref': '#/$defs/0'}], '$defs': {str(i): {'anyOf': [{'$ref': f'#/$defs/{i + 1}'}] * 2}"
        " for i in range(60)} | {'60': {'type': 'string'}}}"
    ),
    "products of branches": (
        "{'type': 'integer', 'allOf': [{'anyOf': [{'minimum': i}, {'maximum': -i}]} for i in range(1, 60)]}"
    ),
    "items": "{'prefixItems': [{'enum': ['x' * 1000]}] * 10000}",
    "levels": "(lambda d: [d := {'items': d} for _ in range(600)][-1])({})",
    "digits": "{'type': 'integer', 'minimum': -10 ** 3999, 'maximum': 10 ** 3999}",
}


ATTEMPTS = """
def attempt(name, found):
    try:
        schema.expression(found)
    except schema.RequestError as err:
        assert len(str(err)) < 300
        return name + ": rejected"
    return name + ": written"
"""


def test_large_schemas_are_written_or_rejected_with_little_memory() -> None:
    tries = [f"print(attempt({name!r}, {found}), flush=True)" for name, found in LARGE.items()]
    peak = "print(*(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))"
    *outcomes, kibibytes = run_limited("\n".join([ATTEMPTS, *tries, peak])).splitlines()
    written = {"constants", "branches with a constant"}
    assert outcomes == [f"{name}: {'written' if name in written else 'rejected'}" for name in LARGE]
    assert int(kibibytes) >> 10 < 300


def test_patterns_of_an_enum_stay_within_the_limits() -> None:
    found = {
        "anyOf": [
            {"enum": ["q"], "pattern": f"^(a|b)*a(a|b){{{40 + number}}}$"} for number in range(20)
        ]
    }
    with pytest.raises(
        RequestError,
        match=r"^schema: #/anyOf/0: pattern .*: regex: .*(memory_bytes|processor time|states)",
    ):
        schema.expression(found, limits=CompileLimits(seconds=1, memory_bytes=200 << 20))


@pytest.mark.parametrize(
    "given",
    [
        {"max_depth": "2"},
        {"max_depth": -1},
        {"max_depth": True},
        {"max_depth": 1.0},
        {"max_depth": 10**400},
        {"limits": 30},
    ],
)
def test_options_of_wrong_types_are_rejected_by_name(given: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=f"^{next(iter(given))}: give "):
        schema.expression({}, **given)


@pytest.mark.parametrize(
    "found", [{"enum": [1], "allOf": [{"$ref": "#"}]}, {"allOf": [{"$ref": "#"}]}, {"$ref": "#"}]
)
def test_schemas_that_refer_to_themselves_alone_are_rejected(found: Any) -> None:
    with pytest.raises(
        RequestError, match="refers to itself without a property or an item in between"
    ):
        schema.expression(found, 3)
