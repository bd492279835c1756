"""A JSON Schema as a document: its parts, their keywords, and where their references lead.

References lead only to places in the document; other documents are never retrieved. Keywords are
read by Draft 2020-12, or by the older draft that ``$schema`` names.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from dlm_runtime.errors import DlmWarning, RequestError

if TYPE_CHECKING:
    from referencing import Specification
    from referencing._core import Resolver

MOST_PARTS = 20_000  # subschemas that are written, counted each time they are used
MOST_STEPS = 200_000  # subschemas that a value or a branch is compared with
MOST_TEXT = 16 << 20  # characters of a schema's JSON text
MOST_SHOWN = 60  # characters of a value in a message

TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
# The kinds of values of each type. "fraction" is a number that is not an integer.
KINDS = {each: frozenset([each]) for each in TYPES} | {"number": frozenset(["integer", "fraction"])}
NUMBER_KEYWORDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
SUPPORTED = {
    "string": {"minLength", "maxLength", "pattern", "format"},
    "number": set(NUMBER_KEYWORDS),
    "array": {"items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems"},
    "object": {"properties", "required", "additionalProperties", "minProperties", "maxProperties"},
}
# Keywords that constrain values of a type and that are rejected.
REJECTED = {
    "string": set[str](),
    "number": {"multipleOf"},
    "array": {"contains", "unevaluatedItems"},
    "object": {
        *(
            "patternProperties",
            "propertyNames",
            "dependentRequired",
            "dependentSchemas",
            "dependencies",
        ),
        "unevaluatedProperties",
    },
}
_REJECTED_ALWAYS = ("not", "$dynamicRef", "$recursiveRef")
_APPLIED = (
    "type",
    "enum",
    "const",
    "anyOf",
    "oneOf",
    "allOf",
    "$ref",
    *_REJECTED_ALWAYS,
    "if",
    "then",
    "else",
)
_CONSTRAINING = {*_APPLIED}.union(*SUPPORTED.values(), *REJECTED.values())
_ANNOTATIONS = {
    *(
        "$schema",
        "$id",
        "$anchor",
        "$dynamicAnchor",
        "$recursiveAnchor",
        "$vocabulary",
        "$comment",
        "$defs",
        "definitions",
    ),
    *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
    *("contentEncoding", "contentMediaType", "contentSchema", "minContains", "maxContains"),
    *("id", "example", "nullable", "discriminator", "xml", "externalDocs"),  # draft 4 and OpenAPI
}

_DRAFT_3, _DRAFT_4, _DRAFT_2020 = 3.0, 4.0, 2020.0
_DRAFTS = {
    "http://json-schema.org/draft-03/schema": _DRAFT_3,
    "http://json-schema.org/draft-04/schema": _DRAFT_4,
    "http://json-schema.org/draft-06/schema": 6.0,
    "http://json-schema.org/draft-07/schema": 7.0,
    "https://json-schema.org/draft/2019-09/schema": 2019.0,
}


class SchemaWarning(DlmWarning):
    """A schema has something that is not enforced and was probably meant to be, such as a
    misspelled keyword.
    """


@dataclass(frozen=True, eq=False)
class Part:
    """A subschema, its place for messages, and what resolves its references."""

    schema: Any
    where: str
    resolver: Resolver[Any]

    def refuse(self, keyword: str, why: str) -> NoReturn:
        raise RequestError(f"schema: {self.where}: keyword {keyword!r} {why}")


def shown(value: Any) -> str:
    """The start of a value's JSON text, for messages."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MOST_SHOWN else text[:MOST_SHOWN] + "..."


class Document:
    """A schema and the work done for it: ``spend`` counts parts, ``step`` counts comparisons."""

    def __init__(self, schema: Any) -> None:
        """Raises RequestError if ``schema`` is not JSON or not a schema."""
        from referencing import Registry

        if isinstance(schema, str):
            raise RequestError(
                "schema: #: a string is not a schema: give the parsed JSON, as json.loads returns it"
            )
        try:
            text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
            text.encode("utf-8")
        except (TypeError, ValueError, RecursionError) as err:
            raise RequestError(f"schema: not JSON ({err})"[:300]) from err
        if len(text) > MOST_TEXT:
            raise RequestError(
                f"schema: its JSON text has more than {MOST_TEXT >> 20} Mi characters: make it smaller"
            )
        found = json.loads(
            text
        )  # a copy of plain dicts and lists, in which equal parts are different objects
        if not isinstance(found, (dict, bool)):
            raise RequestError(
                f"schema: #: {shown(found)} is not a schema: give an object or a boolean"
            )
        self.draft, self.parts, self.steps = _draft(found), 0, 0
        self._checked, self._warned = set[int](), set[str]()
        self._specification = _specification(self.draft)
        try:
            # A registry without a function to retrieve documents: references to other documents
            # raise.
            resolver: Resolver[Any] = Registry().resolver_with_root(
                self._specification.create_resource(found)
            )
        except (TypeError, ValueError, AttributeError) as err:
            raise RequestError(f"schema: #: $id is not a URI ({err})"[:300]) from err
        self.root = Part(found, "#", resolver)

    def spend(self, parts: int) -> None:
        """Count parts that are written. Raises RequestError for more than MOST_PARTS."""
        self.parts += parts
        if self.parts > MOST_PARTS:
            raise RequestError(
                f"schema: more than {MOST_PARTS} parts, counted each time they are used: make max_depth or the schema smaller"
            )

    def step(self, count: int) -> None:
        """Count comparisons. Raises RequestError for more than MOST_STEPS."""
        self.steps += count
        if self.steps > MOST_STEPS:
            raise RequestError(
                f"schema: comparing its values and branches takes more than {MOST_STEPS} steps: make it smaller"
            )

    def child(self, part: Part, *keys: str | int) -> Part:
        """The subschema of ``part`` that ``keys`` lead to."""
        schema, where = part.schema, part.where
        for key in keys:
            schema, where = schema[key], f"{where}/{key}"
        if not isinstance(schema, (dict, bool)):
            raise RequestError(
                f"schema: {where}: {shown(schema)} is not a schema: give an object or a boolean"
            )
        resolver = part.resolver
        if isinstance(schema, dict) and ("$id" in schema or "id" in schema):
            try:
                resolver = resolver.in_subresource(self._specification.create_resource(schema))
            except (TypeError, ValueError, AttributeError) as err:
                raise RequestError(f"schema: {where}: $id is not a URI ({err})"[:300]) from err
        return Part(schema, where, resolver)

    def referenced(self, part: Part) -> Part:
        """Where the ``$ref`` of a part leads. Raises RequestError that names the reference."""
        from referencing.exceptions import NoSuchAnchor, PointerToNowhere, Unresolvable

        name = part.schema["$ref"]
        reference = shown(name)
        try:
            found = part.resolver.lookup(name)
        except (PointerToNowhere, NoSuchAnchor) as err:
            raise RequestError(f"schema: {part.where}: $ref {reference} leads nowhere") from err
        except Unresolvable as err:
            raise RequestError(
                f"schema: {part.where}: $ref {reference} is not in this schema, and other documents are never retrieved: "
                "copy what it names into $defs"
            ) from err
        except (
            TypeError,
            ValueError,
            AttributeError,
            KeyError,
            IndexError,
        ) as err:  # the library walks parts not yet checked
            raise RequestError(
                f"schema: {part.where}: $ref {reference} cannot be resolved ({err})"[:300]
            ) from err
        if not isinstance(found.contents, (dict, bool)):
            raise RequestError(
                f"schema: {part.where}: $ref {reference} leads to something that is not a schema"
            )
        return Part(found.contents, str(name)[:MOST_SHOWN], found.resolver)

    def check(self, part: Part) -> None:
        """Raise RequestError for a keyword with a wrong value or one that is never supported; warn
        of misspelled ones.
        """
        if id(part.schema) in self._checked:
            return
        for keyword, value in part.schema.items():
            if keyword in _SHAPES:
                is_right, expected = _SHAPES[keyword]
                if not is_right(value) and not self._is_of_older_draft(keyword, value):
                    raise RequestError(
                        f"schema: {part.where}/{keyword}: {shown(value)} is not {expected}"
                    )
            elif keyword in _REJECTED_ALWAYS:
                part.refuse(keyword, "is not supported")
            elif keyword not in _CONSTRAINING and keyword not in _ANNOTATIONS:
                self._warn_of_misspelled(part, keyword)
        if "if" in part.schema and ("then" in part.schema or "else" in part.schema):
            part.refuse("if", "is not supported")
        if "prefixItems" in part.schema and self.draft < _DRAFT_2020:
            part.refuse(
                "prefixItems",
                f"does not exist in the draft that $schema names, {self.root.schema['$schema']!r}",
            )
        if "$schema" in part.schema and _draft(part.schema) != self.draft:
            part.refuse("$schema", "names another draft than the whole schema does")
        self._checked.add(id(part.schema))

    def warn(self, text: str) -> None:
        """Warn once."""
        if text not in self._warned:
            self._warned.add(text)
            warnings.warn(text, SchemaWarning, stacklevel=2)

    def _is_of_older_draft(self, keyword: str, value: Any) -> bool:
        if keyword in ("exclusiveMinimum", "exclusiveMaximum"):
            return self.draft == _DRAFT_4 and isinstance(value, bool)
        return keyword == "items" and self.draft < _DRAFT_2020 and isinstance(value, list)

    def _warn_of_misspelled(self, part: Part, keyword: str) -> None:
        if (
            not keyword[:1].isalpha()
            or keyword.startswith("x-")
            or len(keyword) > max(map(len, _CONSTRAINING)) + 2
        ):
            return
        close = [(_distance(keyword, known), known) for known in _CONSTRAINING if len(known) > 3]
        distance, known = min(close)
        if distance <= (1 if len(keyword) < 6 else 2):
            self.warn(
                f"schema: {part.where}: keyword {keyword!r} is not known and is ignored: did you mean {known!r}?"
            )


def _draft(schema: Any) -> float:
    name = schema.get("$schema", "") if isinstance(schema, dict) else ""
    draft = (
        _DRAFTS.get(name.rstrip("#").rstrip("/"), _DRAFT_2020)
        if isinstance(name, str)
        else _DRAFT_2020
    )
    if draft == _DRAFT_3:
        raise RequestError(
            f"schema: $schema {name!r} is not supported: write it for Draft 4 or later"
        )
    return draft


def _specification(draft: float) -> Specification[Any]:
    from referencing import jsonschema

    older = {
        4.0: jsonschema.DRAFT4,
        6.0: jsonschema.DRAFT6,
        7.0: jsonschema.DRAFT7,
        2019.0: jsonschema.DRAFT201909,
    }
    return older.get(draft, jsonschema.DRAFT202012)


def _distance(one: str, other: str) -> int:
    """The Damerau-Levenshtein distance of two words that does not edit a swapped pair again; case
    counts as one edit in all.
    """
    if one.lower() == other.lower():
        return int(one != other)
    before, last = list[int](), list(range(len(other) + 1))
    for i, letter in enumerate(one, 1):
        row = [i]
        for j, wanted in enumerate(other, 1):
            cost = min(last[j] + 1, row[j - 1] + 1, last[j - 1] + (letter != wanted))
            if i > 1 and j > 1 and letter == other[j - 2] and one[i - 2] == wanted:
                cost = min(cost, before[j - 2] + 1)
            row.append(cost)
        before, last = last, row
    return last[-1]


def _is_schema(value: Any) -> bool:
    return isinstance(value, (dict, bool))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_number(value) and value >= 0 and value == int(value)


def _is_types(value: Any) -> bool:
    kinds = [value] if isinstance(value, str) else value
    return (
        isinstance(kinds, list)
        and bool(kinds)
        and all(isinstance(each, str) and each in TYPES for each in kinds)
    )


_SHAPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "type": (_is_types, f"a type, or a list of types: {', '.join(TYPES)}"),
    "enum": (lambda value: isinstance(value, list), "a list of values"),
    "required": (
        lambda value: isinstance(value, list) and all(isinstance(each, str) for each in value),
        "a list of names",
    ),
    "properties": (lambda value: isinstance(value, dict), "an object of schemas"),
    "uniqueItems": (lambda value: isinstance(value, bool), "true or false"),
}
_SHAPES |= dict.fromkeys(
    ("$ref", "pattern", "format", "$schema"), (lambda value: isinstance(value, str), "a string")
)
_SHAPES |= dict.fromkeys(NUMBER_KEYWORDS, (_is_number, "a number"))
_SHAPES |= dict.fromkeys(
    ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
    (_is_count, "a count"),
)
_SHAPES |= dict.fromkeys(
    ("anyOf", "oneOf", "allOf", "prefixItems"),
    (lambda value: isinstance(value, list) and bool(value), "a list of schemas"),
)
_SHAPES |= dict.fromkeys(
    ("items", "additionalProperties"), (_is_schema, "a schema: an object or a boolean")
)
