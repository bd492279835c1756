"""JSON Schema as a regular expression over JSON text of a layout.

What a schema says is kept, or refused by name: a text that matches is always valid. Not every valid text matches: objects have
their properties in the schema's order and none that it does not list, strings use the short escapes, and white space is what
the layout says. Draft 2020-12; https://json-schema.org/draft/2020-12/json-schema-validation names the keywords.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import unquote

from dlm_runtime.constraints import expressions
from dlm_runtime.constraints.expressions import either, quote
from dlm_runtime.constraints.layout import COMPACT, Layout
from dlm_runtime.constraints.patterns import inside_text
from dlm_runtime.errors import RequestError

if TYPE_CHECKING:
    from jsonschema.exceptions import SchemaError

ANY_DEPTH = 3  # containers inside each other, of values that a schema leaves open
MOST_PARTS = 20_000  # subschemas, counted as often as they are used
MOST_BYTES = 4 << 20  # of the expression
MOST_COUNT = 10_000  # of minItems, maxLength and the like
MOST_BOUND = 10**9  # of a bounded number that is no integer

_SAYS_NOTHING = {"$schema", "$id", "$anchor", "$comment", "$defs", "definitions", "title", "description", "default", "examples"}
_SAYS_NOTHING |= {"deprecated", "readOnly", "writeOnly", "contentEncoding", "contentMediaType", "contentSchema"}
_OF_TYPE = {
    "string": {"minLength", "maxLength", "pattern", "format"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"},
    "array": {"items", "prefixItems", "minItems", "maxItems", "uniqueItems"},
    "object": {"properties", "required", "additionalProperties"},
    "boolean": set[str](),
    "null": set[str](),
}
_OF_TYPE["integer"] = _OF_TYPE["number"]
_SPLITS = ("enum", "const", "anyOf", "oneOf", "allOf", "$ref")  # what says all of a value
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


def expression(schema: Any, max_depth: int | None = None, layout: Layout = COMPACT, level: int = 0) -> str:
    """The expression that matches only JSON texts of ``layout`` that are valid by ``schema``.

    ``max_depth`` is how often a schema may contain itself, and how many containers may be inside each other where a schema
    allows any value (ANY_DEPTH); None rejects recursive schemas. ``level`` is the number of containers around the value.
    Raises RequestError that names the place and the keyword, or if no value is valid.
    """
    _check(schema)
    found = _Writer(schema, max_depth, layout).write(schema, "#", level)
    if found is None:
        raise RequestError("schema: no value is valid by it" + ("" if max_depth is None else f" within max_depth {max_depth}"))
    return found


def any_object(max_depth: int | None = None, layout: Layout = COMPACT, level: int = 0) -> str:
    """The expression of any JSON object in a layout.

    At most ``max_depth`` containers, including the object, are inside each other; None: ANY_DEPTH. ``level`` is the number of
    containers around the object.
    """
    return expression({"type": "object"}, ANY_DEPTH if max_depth is None else max_depth, layout, level)


def choices(values: Sequence[Any]) -> str:
    """The expression of texts, each as it is given. Raises RequestError for what is no text, or no list of such."""
    if isinstance(values, str) or not values or not all(isinstance(each, str) and each for each in values):
        raise RequestError("enum: give a list of texts that are not empty")
    return either(quote(each) for each in values)


def _hint(schema: Any, error: SchemaError) -> str:
    if isinstance(schema, str):
        return ": give what its JSON says, which json.loads reads"
    is_type = error.validator == "anyOf" and "type" in list(error.absolute_path)[-1:]
    return ": types are array, boolean, integer, null, number, object and string" if is_type else ""


def _check(schema: Any) -> None:
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import SchemaError

    try:
        json.dumps(schema, ensure_ascii=False, allow_nan=False).encode("utf-8")
        Draft202012Validator.check_schema(schema)
    except SchemaError as err:
        place = "/".join(map(str, ["#", *err.absolute_path]))
        raise RequestError(f"schema: {place}: {err.message[:200]}{_hint(schema, err)}") from err
    except (TypeError, ValueError, RecursionError) as err:
        raise RequestError(f"schema: not JSON ({err})"[:300]) from err


class _Writer:
    """Writes the expressions of a schema and its parts; None: no value is valid."""

    def __init__(self, root: Any, max_depth: int | None, layout: Layout) -> None:
        self.root, self.max_depth, self.layout, self.parts = root, max_depth, layout, 0
        self.key_separator = quote(layout.key_separator)
        self.open: list[str] = []  # the references that are being written

    def write(self, schema: Any, where: str, level: int) -> str | None:
        self.parts += 1
        if self.parts > MOST_PARTS:
            raise RequestError(
                f"schema: more than {MOST_PARTS} parts, counted as often as they are used: make max_depth or it smaller"
            )
        found = self._write(schema, where, level)
        if found is not None and len(found) > MOST_BYTES:
            raise RequestError(
                f"schema: {where}: its expression has more than {MOST_BYTES >> 20} MiB: make max_depth or the schema smaller"
            )
        return found

    def _write(self, schema: Any, where: str, level: int) -> str | None:
        if isinstance(schema, bool):
            return self.anything(where, level) if schema else None
        said = schema.keys() - _SAYS_NOTHING
        if split := [keyword for keyword in _SPLITS if keyword in said]:
            return getattr(self, _METHODS[split[0]])(schema, said, where, level)  # type: ignore[no-any-return]
        types = schema.get("type", [kind for kind, keywords in _OF_TYPE.items() if keywords & said])
        types = [types] if isinstance(types, str) else types
        for keyword in sorted(said - {"type"}):
            if not any(keyword in keywords for keywords in _OF_TYPE.values()):
                self.refuse(where, keyword, "is not supported")
        if not types:
            return self.anything(where, level)
        writers: dict[str, Callable[[Mapping[str, Any], str, int], str | None]] = {
            "string": self.string,
            "integer": self.integer,
            "number": self.number,
            "array": self.array,
            "object": self.object,
            "boolean": lambda *_: "(?:true|false)",
            "null": lambda *_: "null",
        }
        return _either(writers[kind](schema, where, level) for kind in types if not (kind == "integer" and "number" in types))

    def refuse(self, where: str, keyword: str, why: str) -> NoReturn:
        raise RequestError(f"schema: {where}: keyword {keyword!r} {why}")

    def alone(self, said: set[str], keyword: str, where: str) -> None:
        if others := sorted(said - {keyword, "type"}):
            self.refuse(where, others[0], f"is not supported beside {keyword!r}")

    def anything(self, where: str, level: int) -> str | None:
        depth = ANY_DEPTH if self.max_depth is None else self.max_depth
        found = scalar = either([expressions.text(), expressions.NUMBER, "true", "false", "null"])
        for inner in reversed(range(level, level + depth - where.count("/*"))):
            pair = expressions.text() + self.key_separator + found
            found = either([scalar, self.container(inner, False, pair, 0, None), self.container(inner, True, found, 0, None)])
            if len(found) > MOST_BYTES:
                raise RequestError(f"max_depth {depth} is too much for values that a schema leaves open: {ANY_DEPTH} is usual")
        return found

    # ---- what says all of a value

    def enum(self, schema: Mapping[str, Any], said: set[str], where: str, level: int) -> str | None:
        from jsonschema import Draft202012Validator

        if "$ref" in said:
            self.refuse(where, "$ref", "is not supported beside 'enum' and 'const'")
        validator = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
        values = schema["enum"] if "enum" in schema else [schema["const"]]
        return _either(quote(self.layout.dumps(each, level)) for each in values if validator.is_valid(each))

    def any_of(self, schema: Mapping[str, Any], said: set[str], where: str, level: int) -> str | None:
        self.alone(said - {"type"}, "anyOf", where)
        self.no_type(schema, "anyOf", where)
        return _either(self.write(each, f"{where}/anyOf/{number}", level) for number, each in enumerate(schema["anyOf"]))

    def one_of(self, schema: Mapping[str, Any], said: set[str], where: str, level: int) -> str | None:
        self.alone(said, "oneOf", where)
        self.no_type(schema, "oneOf", where)
        branches = [self.resolved(each) for each in schema["oneOf"]]
        for number, one in enumerate(branches):
            for other in branches[:number]:
                if not _are_apart(one, other):
                    self.refuse(
                        where, "oneOf", "has branches that one value may meet together: give anyOf, or a const that differs"
                    )
        return _either(self.write(each, f"{where}/oneOf/{number}", level) for number, each in enumerate(schema["oneOf"]))

    def all_of(self, schema: Mapping[str, Any], said: set[str], where: str, level: int) -> str | None:
        self.alone(said, "allOf", where)
        self.no_type(schema, "allOf", where)
        if len(schema["allOf"]) != 1:
            self.refuse(where, "allOf", "of several schemas is not supported: merge them")
        return self.write(schema["allOf"][0], f"{where}/allOf/0", level)

    def no_type(self, schema: Mapping[str, Any], keyword: str, where: str) -> None:
        if "type" in schema and any(each.get("type") != schema["type"] for each in schema[keyword] if isinstance(each, dict)):
            self.refuse(where, "type", f"is not supported beside {keyword!r}: say it in each of them")

    def reference(self, schema: Mapping[str, Any], said: set[str], where: str, level: int) -> str | None:
        self.alone(said | ({"type"} & schema.keys()), "$ref", where)
        name = schema["$ref"]
        within = self.open.count(name)
        if within:
            if self.max_depth is None:
                self.refuse(where, "$ref", f"{name} lies within itself: give max_depth, how often it may")
            if within > self.max_depth:
                return None
        self.open.append(name)
        found = self.write(self.resolved(schema), name, level)
        self.open.pop()
        return found

    def resolved(self, schema: Any) -> Any:
        """What a reference leads to; other schemas as they are."""
        seen = set[str]()
        while isinstance(schema, dict) and "$ref" in schema:
            name = schema["$ref"]
            if name in seen:
                raise RequestError(f"schema: $ref {name} leads to itself alone")
            seen.add(name)
            if name != "#" and not name.startswith("#/"):
                raise RequestError(f"schema: $ref {name!r} is not of this schema: references start with #/")
            schema = self.root
            for part in unquote(name).split("/")[1:]:
                key = part.replace("~1", "/").replace("~0", "~")
                try:
                    schema = schema[int(key)] if isinstance(schema, list) else schema[key]
                except (KeyError, IndexError, ValueError, TypeError) as err:
                    raise RequestError(f"schema: $ref {name} leads nowhere") from err
        if not isinstance(schema, (dict, bool)):
            raise RequestError("schema: a $ref leads to what is no schema")
        return schema

    # ---- types

    def string(self, schema: Mapping[str, Any], where: str, _: int) -> str | None:
        low, high = self.counts(schema, "minLength", "maxLength", where)
        whole = [keyword for keyword in ("pattern", "format") if keyword in schema]
        if not whole:
            return None if high is not None and low > high else expressions.text(low, high)
        if len(whole) > 1 or low or high is not None:
            self.refuse(
                where, whole[0], "is not supported beside minLength, maxLength, pattern and format: say it in one pattern"
            )
        if "pattern" in schema:
            inside = inside_text(schema["pattern"], f"schema: {where}")
            return None if inside is None else f'"{inside}"'
        if schema["format"] not in expressions.FORMATS:
            self.refuse(where, "format", f"{schema['format']!r} is not one of: {', '.join(expressions.FORMATS)}")
        return f'"{expressions.FORMATS[schema["format"]]}"'

    def integer(self, schema: Mapping[str, Any], *_: Any) -> str | None:
        low = [math.ceil(schema["minimum"])] if "minimum" in schema else []
        high = [math.floor(schema["maximum"])] if "maximum" in schema else []
        low += [math.floor(schema["exclusiveMinimum"]) + 1] if "exclusiveMinimum" in schema else []
        high += [math.ceil(schema["exclusiveMaximum"]) - 1] if "exclusiveMaximum" in schema else []
        return expressions.integers(max(low, default=None), min(high, default=None))

    def number(self, schema: Mapping[str, Any], where: str, _: int) -> str | None:
        for keyword in _BOUNDS:
            bound = schema.get(keyword, 0)
            if bound != int(bound) or abs(bound) > MOST_BOUND:
                self.refuse(where, keyword, f"= {bound} of a number is not supported: only integers up to {MOST_BOUND}")
        low = max(
            ((int(schema[each]), each != "minimum") for each in ("minimum", "exclusiveMinimum") if each in schema), default=None
        )
        high = min(
            ((int(schema[each]), each == "maximum") for each in ("maximum", "exclusiveMaximum") if each in schema), default=None
        )
        return expressions.numbers(
            low and low[0], high and high[0], low is not None and low[1], high is not None and not high[1]
        )

    def array(self, schema: Mapping[str, Any], where: str, level: int) -> str | None:
        low, high = self.counts(schema, "minItems", "maxItems", where)
        if schema.get("uniqueItems") and (high is None or high > 1):
            self.refuse(where, "uniqueItems", "is not regular: say maxItems 1, or leave it out")
        prefix = [
            self.write(each, f"{where}/prefixItems/{number}", level + 1)
            for number, each in enumerate(schema.get("prefixItems", []))
        ]
        if high is not None:
            prefix = prefix[:high]
        if None in prefix:
            prefix = prefix[: prefix.index(None)]
            high = len(prefix)
        if high is not None and low > high:
            return None
        item = None
        if high is None or high > len(prefix):
            item = self.write(schema.get("items", True), f"{where}/items" + ("" if "items" in schema else "/*"), level + 1)
            if item is None and low > len(prefix):
                return None
        if not prefix:
            return self.container(level, True, item, low, high)
        start, between, end = map(quote, self.layout.around(level, True))
        found = ""
        if item is not None:
            found = expressions.repeated(
                between + item, max(low - len(prefix), 0), None if high is None else high - len(prefix)
            )
        for number, each in reversed(list(enumerate(prefix))[1:]):
            part = between + (each or "") + found
            found = part if low > number else f"(?:{part})?"
        found = start + (prefix[0] or "") + found + end
        return rf"\[{found}\]" if low else rf"\[(?:{found})?\]"

    def object(self, schema: Mapping[str, Any], where: str, level: int) -> str | None:
        required, others = schema.get("required", []), schema.get("additionalProperties", True)
        listed = dict(schema.get("properties", {}))
        for name in required:
            listed.setdefault(name, others)
        if not listed:
            value = self.write(
                others, f"{where}/additionalProperties" + ("" if "additionalProperties" in schema else "/*"), level + 1
            )
            return self.container(
                level, False, None if value is None else expressions.text() + self.key_separator + value, 0, None
            )
        pairs = list[tuple[str, bool]]()
        for name, part in listed.items():
            found = self.write(part, f"{where}/properties/{name}", level + 1)
            if found is None and name in required:
                return None
            if found is not None:
                pairs.append((quote(self.layout.dumps(name)) + self.key_separator + found, name in required))
        if not pairs:
            return r"\{\}"
        start, between, end = map(quote, self.layout.around(level, False))
        found = start + _pairs(pairs, between) + end
        return rf"\{{{found}\}}" if any(is_required for _, is_required in pairs) else rf"\{{(?:{found})?\}}"

    def container(self, level: int, is_array: bool, item: str | None, fewest: int, most: int | None) -> str:
        """An array of ``fewest`` to ``most`` items, or an object of such pairs; an item of None: it is empty."""
        opening, closing = (r"\[", r"\]") if is_array else (r"\{", r"\}")
        if item is None or most == 0:
            return opening + closing
        start, between, end = map(quote, self.layout.around(level, is_array))
        more = expressions.repeated(between + item, max(fewest - 1, 0), None if most is None else most - 1)
        found = start + item + more + end
        return opening + (found if fewest else f"(?:{found})?") + closing

    def counts(self, schema: Mapping[str, Any], fewest: str, most: str, where: str) -> tuple[int, int | None]:
        for keyword in (fewest, most):
            if schema.get(keyword, 0) > MOST_COUNT:
                self.refuse(where, keyword, f"= {schema[keyword]} is more than {MOST_COUNT}")
        return int(schema.get(fewest, 0)), None if most not in schema else int(schema[most])


_METHODS = {"enum": "enum", "const": "enum", "anyOf": "any_of", "oneOf": "one_of", "allOf": "all_of", "$ref": "reference"}


def _either(found: Any) -> str | None:
    kept = [each for each in found if each is not None]
    return either(kept) if kept else None


def _pairs(pairs: Sequence[tuple[str, bool]], between: str) -> str:
    """At least one property, in order, without some of those that are not required, and ``between`` two of them."""
    first = next((number for number, (_, is_required) in enumerate(pairs) if is_required), None)
    behind = [between + pair if is_required else f"(?:{between}{pair})?" for pair, is_required in pairs]
    if first is not None:
        before = "".join(f"(?:{pair}{between})?" for pair, _ in pairs[:first])
        return before + pairs[first][0] + "".join(behind[first + 1 :])
    return either(pair + "".join(behind[number + 1 :]) for number, (pair, _) in enumerate(pairs))


def _are_apart(one: Any, other: Any) -> bool:
    """Whether it is plain that no value is valid by both: of types, or of a required property, that differ."""
    if not isinstance(one, dict) or not isinstance(other, dict):
        return one is False or other is False
    values = [_values(each) for each in (one, other)]
    if values[0] is not None and values[1] is not None:
        return not values[0] & values[1]
    types = [_types(each) for each in (one, other)]
    if types[0] is not None and types[1] is not None and not types[0] & types[1]:
        return True
    if types != [{"object"}, {"object"}]:
        return False
    for name in set(one.get("required", [])) & set(other.get("required", [])):
        parts = [each.get("properties", {}).get(name) for each in (one, other)]
        if all(isinstance(part, dict) for part in parts) and _are_apart(*parts):
            return True
    return False


def _values(schema: Mapping[str, Any]) -> set[str] | None:
    values = schema["enum"] if "enum" in schema else [schema["const"]] if "const" in schema else None
    # Equal numbers may be written differently, as 1 and 1.0 are.
    return (
        None if values is None else {json.dumps(float(each) if type(each) is int else each, sort_keys=True) for each in values}
    )


def _types(schema: Mapping[str, Any]) -> set[str] | None:
    types = schema.get("type")
    if types is None:
        return None
    return {"number" if kind == "integer" else kind for kind in ([types] if isinstance(types, str) else types)}
