"""Random JSON Schemas of every supported kind, for tests of constraints."""

from __future__ import annotations

import random
from typing import Any

NAMES = ("a", "id", "name", "größe", 'say "hi"', "back\\slash", "x y", "12")
PATTERNS = ("^[a-c]{2,3}$", "ab", '^"?[^x]$', "^(on|off|a\\d)$", "^\\w+ \\w+$", "^[^\\W\\d]{1,4}$")
FORMATS = ("date", "time", "date-time", "uuid", "email", "hostname", "ipv4", "uri")
VALUES: tuple[Any, ...] = (
    None,
    True,
    0,
    -3,
    1.5,
    "",
    "a",
    'q"',
    "tab\t",
    "é",
    [1, "b"],
    {"k": None},
    {},
)


def random_document(source: random.Random) -> dict[str, Any]:
    """Return a random schema document, which may contain references to its own parts."""
    made = random_schema(source)
    if source.random() < 0.8:
        return made
    return {
        "$defs": {"it": made},
        "type": "array",
        "prefixItems": [{"$ref": "#/$defs/it"}],
        "items": False,
        "minItems": 1,
    }


def random_schema(source: random.Random, depth: int = 3) -> dict[str, Any]:
    """Return a random schema for which at least one value is valid."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "pattern", "format"]
    kinds += ["object", "object", "array", "anyOf", "types"] if depth else []
    kind = source.choice(kinds)
    return _MAKERS[kind](source, depth)


def _string(source: random.Random, _: int) -> dict[str, Any]:
    low = source.randrange(4)
    limits = source.choice(
        (
            {},
            {"minLength": low},
            {"maxLength": low + 2},
            {"minLength": low, "maxLength": low + source.randrange(3)},
        )
    )
    return {"type": "string", **limits}


def _integer(source: random.Random, _: int) -> dict[str, Any]:
    low, span = source.randrange(-300, 300), source.randrange(0, 400)
    lows = ({}, {"minimum": low}, {"exclusiveMinimum": low})
    highs = ({}, {"maximum": low + span + 2}, {"exclusiveMaximum": low + span + 2})
    return {"type": "integer", **source.choice(lows), **source.choice(highs)}


def _number(source: random.Random, _: int) -> dict[str, Any]:
    return {**_integer(source, 0), "type": "number"}


def _enum(source: random.Random, _: int) -> dict[str, Any]:
    if source.random() < 0.3:
        return {"const": source.choice(VALUES)}
    return {"enum": source.sample(VALUES, source.randrange(1, 5))}


def _object(source: random.Random, depth: int) -> dict[str, Any]:
    names = source.sample(NAMES, source.randrange(0, 4))
    if not names:
        return {"type": "object", "additionalProperties": random_schema(source, depth - 1)}
    properties = {name: random_schema(source, depth - 1) for name in names}
    required = [name for name in names if source.random() < 0.6]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": source.random() < 0.5,
    }


def _array(source: random.Random, depth: int) -> dict[str, Any]:
    low = source.randrange(3)
    made: dict[str, Any] = {"type": "array", "items": random_schema(source, depth - 1)}
    if source.random() < 0.3:
        made["prefixItems"] = [
            random_schema(source, depth - 1) for _ in range(source.randrange(1, 3))
        ]
    return made | source.choice(
        ({}, {"minItems": low}, {"maxItems": low + 1}, {"minItems": low, "maxItems": low + 2})
    )


def _any_of(source: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [random_schema(source, depth - 1) for _ in range(source.randrange(1, 4))]}


_MAKERS = {
    "string": _string,
    "integer": _integer,
    "number": _number,
    "boolean": lambda *_: {"type": "boolean"},
    "null": lambda *_: {"type": "null"},
    "enum": _enum,
    "pattern": lambda source, _: {"type": "string", "pattern": source.choice(PATTERNS)},
    "format": lambda source, _: {"type": "string", "format": source.choice(FORMATS)},
    "object": _object,
    "array": _array,
    "anyOf": _any_of,
    "types": lambda source, _: {
        "type": source.sample(["string", "integer", "number", "boolean", "null"], 2)
    },
}
