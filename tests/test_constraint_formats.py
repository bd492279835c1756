"""Tests of formats and numbers of JSON Schema as constraints. jsonschema must accept all random
texts.
"""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from constraints import byte_automaton, drawn_texts, schema_content
from jsonschema import Draft202012Validator

from dlm_runtime import RequestError

# For each format: strings that the constraint must accept, and strings that it must reject. Strings
# that only some validators accept must be rejected.
FORMATS = {
    "date": (["2000-02-29", "0004-02-29"], ["1900-02-29", "0000-01-01", "2023-04-31"]),
    "date-time": (["1999-12-31T23:59:59.25+14:00"], ["1999-12-31 23:59:59Z"]),
    "time": (["00:00:00Z"], ["24:00:00Z", "23:59:60Z", "00:00:00"]),
    "duration": (["P1Y2M3DT4H5M6S", "P2W", "PT5M"], ["P", "PT", "P1Y2W", "P1Y1D", "1D"]),
    "email": (["a.b+c@d.e", "a" * 64 + "@b.c"], ["a..b@d.e", "@b.c", "a" * 65 + "@b.c"]),
    "idn-email": (["실례@실례.테스트", "a@b.c"], ["a", "@a.b"]),
    "hostname": (["a-b.c", "a" * 63, "1.2"], ["-a", "a.", "a_b", "ab--c", "a" * 64, ""]),
    "idn-hostname": (["例え.テスト", "a.b"], ["", "-a", "〮a"]),
    "ipv4": (["0.0.0.0", "255.1.2.3"], ["256.1.1.1", "01.1.1.1", "1.1.1"]),
    "ipv6": (["::", "1::", "::ffff:1.2.3.4", "1:2:3:4:5:6:7:8"], ["1::2::3", "1:2", "::1%a", "::12345"]),
    "uri": (["https://a.b:80/c?d#e", "urn:x:y", "http://[::1]/"], ["//a", "a", "http://a b", "a:%0"]),
    "uri-reference": (["", "/a", "?q", "a/b:c"], ["1a:b", "\\a"]),
    "iri": (["http://é.ß/é"], ["é:a", "é"]),
    "iri-reference": (["/é", ""], ["\\é"]),
    "uri-template": (["/a{?b*,c:3}"], ["{", "{a", "}"]),
    "json-pointer": (["", "/a~0~1/", '/"'], ["a", "/~", "/~2"]),
    "relative-json-pointer": (["0#", "10/a"], ["/a", "01", "0a"]),
    "regex": ([r"^(a|\d{2})+$", "[a-z]*"], ["(", "a**"]),
    "uuid": (["2EB8AA08-aa98-11ea-b4aa-73b441d16380"], ["2eb8aa08aa9811eab4aa73b441d16380"]),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_formats_are_those_of_validators(name: str) -> None:
    schema = {"type": "string", "format": name}
    made = byte_automaton(schema_content(schema))
    valid, invalid = FORMATS[name]
    for text in valid:
        assert made.matches(json.dumps(text, ensure_ascii=False)), text
    for text in invalid:
        assert not made.matches(json.dumps(text, ensure_ascii=False)), text
    # jsonschema checks a format only if the package for this format is installed.
    checker = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
    for text in drawn_texts(made, random.Random(7), 60):
        assert checker.is_valid(json.loads(text)), text


BOUNDS = (
    *("-30", "-7", "0", "3", "25", "-4.25", "0.5", "12.75", "1e3", "-1e-7", "0.0000001", "1e15"),
    *("9007199254740993", "1e18", "1e23", "99999999999999999999999", "0.1234567890123456789"),
)
MULTIPLES = ("1", "2", "3", "7", "60", "1000", "0.5", "0.25", "0.1", "0.01", "3.0", "2.5", "1e2")


def test_numbers_of_random_bounds_are_valid() -> None:
    source, drawn = random.Random(8), 0
    for _ in range(120):
        schema: dict[str, Any] = {"type": source.choice(("integer", "number"))}
        text = json.dumps(schema)[:-1]
        for keyword, values in (
            (source.choice(("minimum", "exclusiveMinimum")), BOUNDS),
            (source.choice(("maximum", "exclusiveMaximum")), BOUNDS),
            ("multipleOf", MULTIPLES),
        ):
            if source.random() < 0.6:
                text += f', "{keyword}": {source.choice(values)}'
        schema = json.loads(text + "}")
        try:
            made = byte_automaton(schema_content(schema))
        except RequestError:  # no number is within the bounds
            continue
        validator = Draft202012Validator(schema)
        for number in drawn_texts(made, source, 20):
            drawn += 1
            assert validator.is_valid(json.loads(number)), (schema, number)
        near = [json.loads(schema[key]) if isinstance(schema[key], str) else schema[key]
                for key in schema if key != "type"] + [0]  # fmt: skip
        for number in {int(value) + step for value in near for step in range(-3, 4)}:
            assert validator.is_valid(number) or not made.matches(str(number)), (schema, number)
    assert drawn > 800


@pytest.mark.parametrize(
    ("low", "high"),
    [
        (-(2**53), 2**53),
        (-(2**63), 2**63 - 1),
        (0, 2**64 - 1),
        (-(2**63), None),
        (None, 2**64 - 1),
        (10**18, 10**19 + 7),
    ],
)
def test_large_bounds_of_integers_are_exact(low: int | None, high: int | None) -> None:
    bounds = {"minimum": low, "maximum": high}
    kept = {name: bound for name, bound in bounds.items() if bound is not None}
    made = byte_automaton(schema_content({"type": "integer", **kept}))
    source = random.Random(1)
    near = [end + step for end in (low or 0, high or 0, 0) for step in range(-30, 31)]
    numbers = {
        *near,
        *(
            source.choice((1, -1)) * source.randrange(10 ** source.randint(1, 22))
            for _ in range(2000)
        ),
    }
    for number in numbers:
        is_in = (low is None or number >= low) and (high is None or number <= high)
        assert made.matches(str(number)) == is_in, number
    for text in ("-0", "00", "01", "1.0", "+1", "1e3", ""):
        assert not made.matches(text)
