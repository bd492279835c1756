"""Schemas that one value must satisfy together: a schema, what its references lead to, and the
branches of its allOf.

A keyword that several of them have is intersected exactly where that has a simple form, such as the
larger of two minimums; otherwise a reader of ``Conjunction`` rejects it by name.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from dlm_runtime.constraints.document import (
    KINDS,
    NUMBER_KEYWORDS,
    REJECTED,
    SUPPORTED,
    Document,
    Part,
)
from dlm_runtime.errors import RequestError

Bound = tuple[Any, bool]  # a number, and whether it is itself outside the range


@dataclass(frozen=True, eq=False)
class Choice:
    """An ``anyOf`` or ``oneOf`` of a part, and the parts that contain it without a step into the
    value.
    """

    part: Part
    keyword: str
    ancestors: frozenset[int]
    branches: tuple[Part, ...]


class Conjunction:
    """The parts that a value must satisfy together. ``is_false``: no value does.

    ``choices`` are the parts' anyOf and oneOf. ``references`` are the schemas, by id, that a
    ``$ref`` led to.
    """

    def __init__(self, document: Document, roots: Iterable[Part]) -> None:
        """Raises RequestError for a reference that leads nowhere, or to itself alone."""
        self.document, self.is_false = document, False
        self.parts: list[Part] = []
        self.choices: list[Choice] = []
        self.references: list[int] = []
        self._seen = set[int]()
        for part in roots:
            self._add(part, frozenset())

    def _add(self, part: Part, ancestors: frozenset[int]) -> None:
        schema, key = part.schema, id(part.schema)
        if isinstance(schema, bool):
            self.is_false |= not schema
            return
        if key in ancestors:
            raise RequestError(
                f"schema: {part.where}: this schema refers to itself without a property or an item in between"
            )
        if key in self._seen:
            return
        self._seen.add(key)
        self.document.check(part)
        self.parts.append(part)
        inner = ancestors | {key}
        if "$ref" in schema:
            target = self.document.referenced(part)
            self.references.append(id(target.schema))
            self._add(target, inner)
        for number in range(len(schema.get("allOf", ()))):
            self._add(self.document.child(part, "allOf", number), inner)
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                branches = tuple(
                    self.document.child(part, keyword, number)
                    for number in range(len(schema[keyword]))
                )
                self.choices.append(Choice(part, keyword, inner, branches))

    def with_branch(self, choice: Choice, branch: Part) -> Conjunction:
        """The conjunction in which a branch takes the place of its choice."""
        made = Conjunction(self.document, ())
        made.parts, made.references, made._seen = (
            list(self.parts),
            list(self.references),
            set(self._seen),
        )
        made.choices, made.is_false = (
            [each for each in self.choices if each is not choice],
            self.is_false,
        )
        made._add(branch, choice.ancestors)
        return made

    def branch_alone(self, choice: Choice, branch: Part) -> Conjunction:
        """A branch without the schemas around it."""
        made = Conjunction(self.document, ())
        made._add(branch, choice.ancestors)
        return made

    def having(self, *keywords: str) -> list[Part]:
        """The parts with one of the keywords."""
        return [part for part in self.parts if any(keyword in part.schema for keyword in keywords)]

    # ---- any value

    @property
    def lists(self) -> list[tuple[Part, str]]:
        """The enum and const keywords, with their parts."""
        return [(part, keyword) for keyword in ("enum", "const") for part in self.having(keyword)]

    @property
    def kinds(self) -> frozenset[str] | None:
        """The kinds of values that the type keywords allow; None without such a keyword."""
        found: frozenset[str] | None = None
        for part in self.having("type"):
            types = part.schema["type"]
            kinds = frozenset[str]().union(
                *(KINDS[each] for each in ([types] if isinstance(types, str) else types))
            )
            found = kinds if found is None else found & kinds
        return found

    @property
    def types_of_keywords(self) -> list[str]:
        """The types that the other keywords constrain."""
        return [each for each in SUPPORTED if self.having(*SUPPORTED[each], *REJECTED[each])]

    def refuse_rejected(self, type_: str) -> None:
        """Raise RequestError for a keyword that constrains values of the type and is not supported."""
        for keyword in sorted(REJECTED[type_]):
            for part in self.having(keyword):
                part.refuse(keyword, "is not supported")

    # ---- numbers and counts

    def bounds(self) -> tuple[Bound | None, Bound | None]:
        """The bounds of a number; None: no bound."""
        lows, highs = list[Bound](), list[Bound]()
        for part in self.having(*NUMBER_KEYWORDS):
            schema = part.schema
            for keyword, exclusive, found in (
                ("minimum", "exclusiveMinimum", lows),
                ("maximum", "exclusiveMaximum", highs),
            ):
                if keyword in schema:  # Draft 4 has a boolean beside it
                    found.append((schema[keyword], schema.get(exclusive) is True))
                if not isinstance(schema.get(exclusive, True), bool):
                    found.append((schema[exclusive], True))
        return max(lows, default=None), min(
            highs, key=lambda bound: (bound[0], not bound[1]), default=None
        )

    def counts(self, noun: str) -> tuple[int, int | None]:
        """The bounds that minLength, minItems and the like set."""
        fewest, most = f"min{noun}", f"max{noun}"
        low = max((int(part.schema[fewest]) for part in self.having(fewest)), default=0)
        return low, min((int(part.schema[most]) for part in self.having(most)), default=None)

    # ---- arrays

    @property
    def prefix(self) -> int:
        """The number of items at the start that have separate schemas."""
        return max((_prefix(part)[1] for part in self.parts), default=0)

    def item(self, index: int) -> list[Part]:
        """The schemas of the item at an index."""
        found = list[Part]()
        for part in self.parts:
            keyword, count, others = _prefix(part)
            if index < count:
                found.append(self.document.child(part, keyword, index))
            elif others is not None:
                found.append(self.document.child(part, others))
        return found

    # ---- objects

    @property
    def required(self) -> list[str]:
        """The names that an object must have."""
        return list(
            dict.fromkeys(
                name for part in self.having("required") for name in part.schema["required"]
            )
        )

    @property
    def names(self) -> list[str]:
        """The names that properties lists, in order, and then the other required ones."""
        listed = [name for part in self.having("properties") for name in part.schema["properties"]]
        return list(dict.fromkeys([*listed, *self.required]))

    def property(self, name: str) -> list[Part]:
        """The schemas of a property's value."""
        found = list[Part]()
        for part in self.parts:
            if name in part.schema.get("properties", ()):
                found.append(self.document.child(part, "properties", name))
            elif "additionalProperties" in part.schema:
                found.append(self.document.child(part, "additionalProperties"))
        return found

    def other_properties(self) -> list[Part]:
        """The schemas of the values of unlisted properties."""
        return [
            self.document.child(part, "additionalProperties")
            for part in self.having("additionalProperties")
        ]


def listed(part: Part, keyword: str) -> list[Any]:
    """The values of an enum, or the one of a const."""
    return part.schema["enum"] if keyword == "enum" else [part.schema["const"]]


def _prefix(part: Part) -> tuple[str, int, str | None]:
    """The keyword and the number of the schemas of an array's first items, and the keyword of all
    others.
    """
    items = part.schema.get("items")
    if isinstance(items, list):  # before Draft 2020-12
        return "items", len(items), "additionalItems" if "additionalItems" in part.schema else None
    return (
        "prefixItems",
        len(part.schema.get("prefixItems", ())),
        None if items is None else "items",
    )
