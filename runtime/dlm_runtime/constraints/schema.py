"""JSON Schema as a regular expression over JSON text of a layout.

A schema's assertions are kept, or rejected by name: a text that matches is always valid. But some
valid texts do not match. Objects have their properties in the schema's order and only those that it
lists. Strings use the short escapes. The layout says where white space is. Draft 2020-12;
https://json-schema.org/draft/2020-12/json-schema-validation names the keywords.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from dlm_runtime.constraints import expressions
from dlm_runtime.constraints.byte_automaton import CompileLimits
from dlm_runtime.constraints.conjunction import Choice, Conjunction
from dlm_runtime.constraints.document import NUMBER_KEYWORDS, Document, Part, shown
from dlm_runtime.constraints.expressions import either, quote
from dlm_runtime.constraints.layout import COMPACT, Layout
from dlm_runtime.constraints.patterns import inside_text
from dlm_runtime.constraints.validity import Validity
from dlm_runtime.errors import RequestError

ANY_DEPTH = 3  # containers inside each other, of values that a schema leaves open
MOST_DEPTH = 10_000  # of max_depth
MOST_BYTES = 4 << 20  # of the expression
MOST_COUNT = 10_000  # of minItems, maxLength and the like
MOST_BOUND = 10**9  # of a bounded number that is no integer
MOST_DIGITS = 40  # of a bound of an integer

# Formats of the specification that are not enforced.
_NOT_ENFORCED = {
    *(
        "duration",
        "idn-email",
        "idn-hostname",
        "ipv6",
        "iri",
        "iri-reference",
        "json-pointer",
        "regex",
    ),
    *("relative-json-pointer", "uri-reference", "uri-template"),
}


def expression(
    schema: Any,
    max_depth: int | None = None,
    layout: Layout = COMPACT,
    level: int = 0,
    limits: CompileLimits | None = None,
) -> str:
    """The expression that matches only JSON texts of ``layout`` that are valid by ``schema``.

    Args:
        schema: A JSON Schema as parsed JSON. References to other documents are rejected; nothing is retrieved.
        max_depth: The number of times that a schema may contain itself, and the number of containers that may be inside each
            other where a schema allows any value (default ANY_DEPTH). By default, recursive schemas are rejected.
        layout: The white space between the parts of the text.
        level: The number of containers around the value.
        limits: The limits of the automaton. ``states`` rejects large objects at once; ``seconds`` and ``memory_bytes``
            also limit the comparison of an enum's values with patterns.

    Raises RequestError that names the place and the keyword, or if no value is valid. Warns
    (SchemaWarning) about keywords that look misspelled.
    """
    check_max_depth(max_depth)
    if limits is not None and not isinstance(limits, CompileLimits):
        raise RequestError(f"limits: give a CompileLimits, not {reprlib.repr(limits)}")
    try:
        document = Document(schema)
        found = _Writer(document, max_depth, layout, limits or CompileLimits()).write(
            [document.root], level
        )
    except RecursionError as err:
        raise RequestError("schema: its parts are nested too deep") from err
    if found is None:
        raise RequestError(
            "schema: no value is valid by it"
            + ("" if max_depth is None else f" within max_depth {max_depth}")
        )
    return found


def any_object(max_depth: int | None = None, layout: Layout = COMPACT, level: int = 0) -> str:
    """The expression of any JSON object in a layout.

    At most ``max_depth`` containers, including the object, are inside each other; None: ANY_DEPTH.
    ``level`` is the number of containers around the object.
    """
    check_max_depth(max_depth)
    return expression(
        {"type": "object"}, ANY_DEPTH if max_depth is None else max_depth, layout, level
    )


def choices(values: Sequence[Any]) -> str:
    """The expression of texts, each as it is given. Raises RequestError for what is no text, or no
    list of such.
    """
    if (
        isinstance(values, str)
        or not values
        or not all(isinstance(each, str) and each for each in values)
    ):
        raise RequestError("enum: give a list of texts that are not empty")
    return either(quote(each) for each in values)


def check_max_depth(max_depth: Any) -> None:
    """Raise RequestError unless ``max_depth`` is None or an integer from 0 to MOST_DEPTH."""
    is_count = (
        isinstance(max_depth, int)
        and not isinstance(max_depth, bool)
        and 0 <= max_depth <= MOST_DEPTH
    )
    if max_depth is not None and not is_count:
        raise RequestError(
            f"max_depth: give an integer from 0 to {MOST_DEPTH}, not {reprlib.repr(max_depth)}"
        )


class _Writer:
    """Writes the expressions of a schema and its parts; None: no value is valid."""

    def __init__(
        self, document: Document, max_depth: int | None, layout: Layout, limits: CompileLimits
    ) -> None:
        self.document, self.max_depth, self.layout, self.limits = (
            document,
            max_depth,
            layout,
            limits,
        )
        self.key_separator = quote(layout.key_separator)
        self.validity = Validity(document, limits)
        self.open = [id(document.root.schema)]  # the referenced schemas that are being written

    def write(self, parts: Sequence[Part], level: int) -> str | None:
        """The values that satisfy all parts."""
        return self.conjunction(Conjunction(self.document, parts), level)

    def conjunction(self, found: Conjunction, level: int) -> str | None:
        self.document.spend(1 + len(found.parts))
        if found.is_false or self.is_too_deep(found):
            return None
        self.open += found.references
        written = self.conjuncts(found, level)
        del self.open[len(self.open) - len(found.references) :]
        return written

    def is_too_deep(self, found: Conjunction) -> bool:
        """Tell whether a recursive reference exceeds max_depth. Raises RequestError for one without
        max_depth.
        """
        within = {each: self.open.count(each) for each in found.references}
        if self.max_depth is None:
            for part in found.having("$ref"):
                if within.get(id(self.document.referenced(part).schema)):
                    reference = shown(part.schema["$ref"])
                    part.refuse(
                        "$ref",
                        f"= {reference} is recursive: give max_depth, how often a schema may contain itself",
                    )
        return max(within.values(), default=0) > (self.max_depth or 0)

    def conjuncts(self, found: Conjunction, level: int) -> str | None:
        if found.lists:
            values = self.validity.allowed(found)
            return self.either(quote(self.layout.dumps(value, level)) for value in values)
        if found.choices:
            return self.choice(found, found.choices[0], level)
        if found.kinds is None:
            types = found.types_of_keywords
            if not types:
                return self.anything(level, 0)
        else:
            types = [
                each
                for each in ("string", "number", "integer", "array", "object", "boolean", "null")
                if each in found.kinds
            ]
            types = [
                "number" if each == "integer" and "fraction" in found.kinds else each
                for each in types
            ]
        writers: dict[str, Callable[[Conjunction, int], str | None]]
        writers = {"string": self.string, "integer": self.integer, "number": self.number}
        writers |= {"array": self.array, "object": self.object}
        constants = {"boolean": "(?:true|false)", "null": "null"}
        return self.either(
            constants[each] if each in constants else writers[each](found, level) for each in types
        )

    def choice(self, found: Conjunction, choice: Choice, level: int) -> str | None:
        """The branches of an anyOf or oneOf, each together with all else that the value must
        satisfy.
        """
        branches = list[Conjunction]()
        for branch in choice.branches:
            self.document.step(1 + len(found.parts))
            branches.append(found.with_branch(choice, branch))
        if choice.keyword == "oneOf" and not self.validity.are_apart(branches):
            choice.part.refuse(
                "oneOf",
                "has branches that one value may satisfy together: give anyOf, or a const that differs in each of them",
            )
        inside = len(found.references)
        for made in branches:
            del made.references[:inside]  # they are open already
        return self.either(self.conjunction(each, level) for each in branches)

    def either(self, found: Iterable[str | None]) -> str | None:
        kept = self.bounded(each for each in found if each is not None)
        return either(kept) if kept else None

    def bounded(self, found: Iterable[str]) -> list[str]:
        """The pieces of an expression. Raises RequestError before they have more than MOST_BYTES
        together.
        """
        size, kept = 0, list[str]()
        for each in found:
            size += len(each)
            self.check_size(size)
            kept.append(each)
        return kept

    def check_size(self, size: float) -> None:
        if size > MOST_BYTES:
            raise RequestError(
                f"schema: its expression has more than {MOST_BYTES >> 20} MiB: make max_depth or the schema smaller"
            )

    def anything(self, level: int, around: int) -> str:
        """Any value; ``around`` of the containers that may be inside each other are already open."""
        depth = ANY_DEPTH if self.max_depth is None else self.max_depth
        found = scalar = either([expressions.text(), expressions.NUMBER, "true", "false", "null"])
        for inner in reversed(range(level, level + depth - around)):
            pair = expressions.text() + self.key_separator + found
            found = either(
                [
                    scalar,
                    self.container(inner, False, pair, 0, None),
                    self.container(inner, True, found, 0, None),
                ]
            )
            if len(found) > MOST_BYTES:
                raise RequestError(
                    f"max_depth {depth} is too much for values that a schema leaves open: {ANY_DEPTH} is usual"
                )
        return found

    def inside(self, parts: Sequence[Part], level: int) -> str | None:
        """A value inside an array or object, whose schemas may say nothing of it."""
        return self.write(parts, level) if parts else self.anything(level, 1)

    # ---- types

    def string(self, found: Conjunction, _: int) -> str | None:
        low, high = self.counts(found, "Length")
        patterns = {part.schema["pattern"]: part for part in found.having("pattern")}
        formats = {part.schema["format"]: part for part in found.having("format")}
        for name, part in formats.items():
            if name in _NOT_ENFORCED:
                self.document.warn(
                    f"schema: {part.where}: format {name!r} is not enforced: give a pattern"
                )
        enforced = {name: part for name, part in formats.items() if name in expressions.FORMATS}
        if not patterns and not enforced:
            return None if high is not None and low > high else expressions.text(low, high)
        whole = [(part, "pattern") for part in patterns.values()] + [
            (part, "format") for part in enforced.values()
        ]
        part, keyword = whole[0]
        if len(whole) > 1 or low or high is not None:
            part.refuse(
                keyword,
                "is not supported beside minLength, maxLength, pattern and format: say it in one pattern",
            )
        if keyword == "format":
            return f'"{expressions.FORMATS[part.schema["format"]]}"'
        inside = inside_text(part.schema["pattern"], f"schema: {part.where}")
        return None if inside is None else f'"{inside}"'

    def integer(self, found: Conjunction, _: int) -> str | None:
        found.refuse_rejected("number")
        low, high = found.bounds()
        for keyword in NUMBER_KEYWORDS:
            for part in found.having(keyword):
                bound = part.schema[keyword]
                if abs(bound) >= 10**MOST_DIGITS:
                    part.refuse(
                        keyword,
                        f"= {shown(bound)} is not supported: bounds have at most {MOST_DIGITS} digits",
                    )
        lowest = None if low is None else math.floor(low[0]) + 1 if low[1] else math.ceil(low[0])
        highest = (
            None if high is None else math.ceil(high[0]) - 1 if high[1] else math.floor(high[0])
        )
        return expressions.integers(lowest, highest)

    def number(self, found: Conjunction, _: int) -> str | None:
        found.refuse_rejected("number")
        for keyword in NUMBER_KEYWORDS:
            for part in found.having(keyword):
                bound = part.schema[keyword]
                if bound != int(bound) or abs(bound) > MOST_BOUND:
                    part.refuse(
                        keyword,
                        f"= {shown(bound)} of a number is not supported: only integers up to {MOST_BOUND}",
                    )
        low, high = found.bounds()
        return expressions.numbers(
            None if low is None else int(low[0]),
            None if high is None else int(high[0]),
            low is not None and low[1],
            high is not None and high[1],
        )

    def array(self, found: Conjunction, level: int) -> str | None:
        found.refuse_rejected("array")
        low, high = self.counts(found, "Items")
        if high is None or high > 1:
            for part in found.having("uniqueItems"):
                if part.schema["uniqueItems"]:
                    part.refuse("uniqueItems", "is not regular: say maxItems 1, or leave it out")
        prefix, size = list[str](), 0
        for index in range(found.prefix if high is None else min(found.prefix, high)):
            item = self.inside(found.item(index), level + 1)
            if item is None:
                high = index
                break
            prefix.append(item)
            size += len(item)
            self.check_size(size)
        if high is not None and low > high:
            return None
        item = None
        if high is None or high > len(prefix):
            item = self.inside(found.item(found.prefix), level + 1)
            if item is None and low > len(prefix):
                return None
        if not prefix:
            return self.container(level, True, item, low, high)
        start, between, end = map(quote, self.layout.around(level, True))
        rest = ""
        if item is not None:
            rest = expressions.repeated(
                between + item,
                max(low - len(prefix), 0),
                None if high is None else high - len(prefix),
            )
        others = ["" if low > number else "(?:" for number in range(1, len(prefix))]
        rest = (
            "".join(
                opening + between + each for opening, each in zip(others, prefix[1:], strict=True)
            )
            + rest
        )
        rest += ")?" * others.count("(?:")
        written = start + prefix[0] + rest + end
        return rf"\[{written}\]" if low else rf"\[(?:{written})?\]"

    def object(self, found: Conjunction, level: int) -> str | None:
        found.refuse_rejected("object")
        low, high = found.counts("Properties")
        names, required = found.names, set(found.required)
        if high is not None and (low > high or len(required) > high):
            return None
        if not names:
            if low > 1:  # a name may be written twice
                found.having("minProperties")[0].refuse(
                    "minProperties", "of more than 1 is not supported without properties"
                )
            value = self.inside(found.other_properties(), level + 1)
            if value is None:
                return None if low else r"\{\}"
            return self.container(
                level, False, expressions.text() + self.key_separator + value, low, high
            )
        self.check_states(found, names)
        pairs, size = list[tuple[str, bool]](), 0
        for name in names:
            self.document.step(len(found.parts))
            written = self.inside(found.property(name), level + 1)
            if written is None and name in required:
                return None
            if written is not None:
                pairs.append(
                    (
                        quote(self.layout.dumps(name)) + self.key_separator + written,
                        name in required,
                    )
                )
                size += len(pairs[-1][0])
                self.check_size(size)
        if low > max(len(required), 1):
            found.having("minProperties")[0].refuse(
                "minProperties", "is not supported: list names in required instead"
            )
        if high is not None and high < len(pairs):
            found.having("maxProperties")[0].refuse(
                "maxProperties", "is not supported: list fewer properties"
            )
        if not pairs:
            return None if low else r"\{\}"
        if not required:
            self.check_size(size * (1 + math.log2(len(pairs)) / 2))
        start, between, end = map(quote, self.layout.around(level, False))
        text = start + _pairs(pairs, between) + end
        return rf"\{{{text}\}}" if low or required else rf"\{{(?:{text})?\}}"

    def check_states(self, found: Conjunction, names: Sequence[str]) -> None:
        """Reject an object whose names alone need more states than an automaton may have: each name
        is written only once.
        """
        states = sum(len(name.encode()) + len('"":0,') for name in names)
        if states > self.limits.states:
            raise RequestError(
                f"schema: {found.parts[0].where}: {len(names)} properties need more than {states} states, and an automaton "
                f"may have {self.limits.states}: list fewer, or raise limits"
            )

    def container(
        self, level: int, is_array: bool, item: str | None, fewest: int, most: int | None
    ) -> str:
        """An array of ``fewest`` to ``most`` items, or an object of such pairs; an item of None: it
        is empty.
        """
        opening, closing = (r"\[", r"\]") if is_array else (r"\{", r"\}")
        if item is None or most == 0:
            return opening + closing
        start, between, end = map(quote, self.layout.around(level, is_array))
        more = expressions.repeated(
            between + item, max(fewest - 1, 0), None if most is None else most - 1
        )
        found = start + item + more + end
        return opening + (found if fewest else f"(?:{found})?") + closing

    def counts(self, found: Conjunction, noun: str) -> tuple[int, int | None]:
        low, high = found.counts(noun)
        for keyword, count in ((f"min{noun}", low), (f"max{noun}", high or 0)):
            if count > MOST_COUNT:
                found.having(keyword)[0].refuse(
                    keyword, f"= {shown(count)} is more than {MOST_COUNT}"
                )
        return low, high


def _pairs(pairs: Sequence[tuple[str, bool]], between: str) -> str:
    """At least one property, in order, without some of those that are not required, and ``between``
    two of them.
    """
    first = next((number for number, (_, is_required) in enumerate(pairs) if is_required), None)
    if first is None:
        return _some([pair for pair, _ in pairs], between)
    before = "".join(f"(?:{pair}{between})?" for pair, _ in pairs[:first])
    return before + pairs[first][0] + _others(pairs[first + 1 :], between)


def _others(pairs: Iterable[tuple[str, bool]], between: str) -> str:
    return "".join(
        between + pair if is_required else f"(?:{between}{pair})?" for pair, is_required in pairs
    )


def _some(pairs: Sequence[str], between: str) -> str:
    """At least one of the properties, in order. Each is written log2(n) / 2 times on average."""
    if len(pairs) == 1:
        return pairs[0]
    middle = len(pairs) // 2
    behind = _others(((pair, False) for pair in pairs[middle:]), between)
    return either([_some(pairs[:middle], between) + behind, _some(pairs[middle:], between)])
