"""Hypothesis strategies for JSON Schemas.

The random schemas combine and nest all keywords of a draft (a version of JSON Schema).
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

URIS = {
    4: "http://json-schema.org/draft-04/schema#",
    6: "http://json-schema.org/draft-06/schema#",
    7: "http://json-schema.org/draft-07/schema#",
    2019: "https://json-schema.org/draft/2019-09/schema",
    2020: "https://json-schema.org/draft/2020-12/schema",
}
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, 1.0, 2, 3, -1, -2, 1.5, 0.1, -0.5, 10),
    *("", "a", "b", "ab", "aab", "é", "2024-01-31", "1.2.3.4", "a@b.c", "12"),
    *([], [1], [1, 1], [1, 1.0], [0, 1], ["a", 1], [1, "a", 1], [[], {}], [True, 1], [None] * 3),
    *({}, {"a": 1}, {"a": "a"}, {"b": 1.5}, {"a": 2, "b": None}, {"c": [1]}, {"a": {"a": 1}}),
    *({"a": 1, "b": 1, "c": 1}, {"ab": 1}, {"b": {"b": 1}, "c": "a"}, {"x": 0}, {"a": [1, 2]}),
)
NAMES = ("a", "b", "c", "ab")
PATTERNS = ("^a", "b$", "^[ab]$", "a|c", "^.{2}", "^(?!a)", "", "\\d", "^\\w+$")
# If the only pattern in patternProperties is empty, the package jsonschema ignores this pattern
# when it checks additionalProperties. Empty patterns are therefore written as (?:).
NAME_PATTERNS = tuple(pattern or "(?:)" for pattern in PATTERNS)
FORMATS = ("date", "ipv4", "email", "unknown", "uuid", "regex")
NUMBERS = (0, 1, -1, 2, 1.5, -1.5, 10, -10, 0.5)
STEPS = (1, 2, 3, 0.5, 0.1, 1.5, 10)
TYPES = ("integer", "number", "string", "array", "object", "null", "boolean")


def _keywords(draft: int, inner: st.SearchStrategy[Any]) -> dict[str, st.SearchStrategy[Any]]:
    names, count, some = st.sampled_from(NAMES), st.integers(0, 3), st.sampled_from(VALUES)
    types = st.sampled_from(TYPES)
    number = st.sampled_from(NUMBERS)
    schemas = st.lists(inner, min_size=1, max_size=3)
    required = st.lists(names, min_size=1 if draft == 4 else 0, max_size=2, unique=True)
    made: dict[str, st.SearchStrategy[Any]] = {
        "type": types | st.lists(types, min_size=1, max_size=3, unique=True),
        "enum": st.lists(some, min_size=1, max_size=4),
        **dict.fromkeys(("minimum", "maximum"), number),
        "multipleOf": st.sampled_from(STEPS),
        **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems"), count),
        **dict.fromkeys(("minProperties", "maxProperties"), count),
        "uniqueItems": st.booleans(),
        "pattern": st.sampled_from(PATTERNS),
        "format": st.sampled_from(FORMATS),
        **dict.fromkeys(("not", "additionalProperties"), inner),
        **dict.fromkeys(("anyOf", "oneOf", "allOf"), schemas),
        "properties": st.dictionaries(names, inner, max_size=3),
        "patternProperties": st.dictionaries(st.sampled_from(NAME_PATTERNS), inner, max_size=2),
        "required": required,
        "$ref": st.sampled_from(("#/$defs/x", "#/$defs/y", "#", "#/properties/a")),
    }
    if draft == 4:
        made |= dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), st.booleans())
    else:
        made |= dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), number)
        made |= {"const": some, "contains": inner, "propertyNames": inner}
    if draft >= 7:
        made |= dict.fromkeys(("if", "then", "else"), inner)
    if draft >= 2019:
        made |= dict.fromkeys(("minContains", "maxContains"), count)
        made |= dict.fromkeys(("unevaluatedItems", "unevaluatedProperties"), inner)
        made["dependentRequired"] = st.dictionaries(names, required, max_size=2)
        made["dependentSchemas"] = st.dictionaries(names, inner, max_size=2)
    else:
        made["dependencies"] = st.dictionaries(names, inner | required, max_size=2)
    if draft == 2020:
        made |= {"prefixItems": schemas, "items": inner}
    else:
        made |= {"items": inner | schemas, "additionalItems": inner}
    return made


# Groups of keywords that affect each other. A random schema often uses several keywords of a group.
GROUPS = (
    ("if", "then", "else"),
    ("contains", "minContains", "maxContains"),
    ("properties", "patternProperties", "additionalProperties"),
    ("prefixItems", "items", "additionalItems"),
    ("properties", "required"),
    ("minimum", "exclusiveMinimum"),
    ("type", "minItems", "uniqueItems"),
    ("anyOf", "unevaluatedProperties"),
    ("allOf", "unevaluatedItems"),
)


def schemas(draft: int) -> st.SearchStrategy[Any]:
    """Strategy for schemas without ``$schema`` and ``$defs``."""

    def extended(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        optional = _keywords(draft, inner)
        single = st.lists(st.sampled_from(sorted(optional)), min_size=1, max_size=4, unique=True)
        groups = [known for group in GROUPS if (known := tuple(k for k in group if k in optional))]
        together = st.tuples(st.sampled_from(groups), st.lists(single, max_size=1)).map(
            lambda found: sorted({*found[0], *(each for more in found[1] for each in more[:2])})
        )
        return (single | together).flatmap(
            lambda chosen: st.fixed_dictionaries({each: optional[each] for each in chosen})
        )

    booleans = st.booleans() if draft > 4 else st.just({})
    return st.recursive(booleans | extended(booleans), extended, max_leaves=10)


def documents(draft: int) -> st.SearchStrategy[dict[str, Any]]:
    """Return a strategy for schemas of a draft. Each schema defines two schemas that it can
    reference with ``$ref``.
    """
    made = schemas(draft)
    return st.builds(
        lambda root, x, y: {
            "$schema": URIS[draft],
            **(root if isinstance(root, dict) else {"allOf": [root]}),
            "$defs": {"x": x, "y": y},
        },
        made,
        made,
        made,
    )
