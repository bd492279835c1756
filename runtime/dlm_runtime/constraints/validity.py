"""Decides whether a schema allows a value. It filters the values of enum and const, and tells
branches of oneOf apart.

Patterns are matched by byte automata, which are compiled in a process with limits. Python's own
matcher may take exponential time, and cannot be interrupted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dlm_runtime.constraints.byte_automaton import (
    Budget,
    ByteAutomaton,
    CompileLimits,
    byte_automaton,
)
from dlm_runtime.constraints.conjunction import Choice, Conjunction, listed
from dlm_runtime.constraints.document import KINDS, Document, Part, shown
from dlm_runtime.constraints.expressions import FORMATS
from dlm_runtime.constraints.layout import COMPACT
from dlm_runtime.constraints.patterns import inside_text
from dlm_runtime.errors import RequestError

_ALL_KINDS = frozenset[str]().union(*KINDS.values())
_COMPARED_DEPTH = 8  # properties inside each other that tell branches apart


def canonical(value: Any) -> Any:
    """A hashable form of a JSON value that is equal for equal values: 1 and 1.0 are, true and 1 are
    not.
    """
    if isinstance(value, bool):
        return "boolean", value
    if isinstance(value, list):
        return "array", tuple(map(canonical, value))
    if isinstance(value, dict):
        return "object", frozenset((name, canonical(each)) for name, each in value.items())
    return value


class Validity:
    """Decides about values and branches of one document, within ``limits``."""

    def __init__(self, document: Document, limits: CompileLimits) -> None:
        self.document = document
        self._budget = Budget(limits)  # of all automata of patterns
        self._automata: dict[str, ByteAutomaton] = {}
        self._sets: dict[tuple[int, str], set[Any]] = {}
        self._branches: dict[tuple[int, str], list[Conjunction]] = {}

    # ---- values

    def allowed(self, found: Conjunction) -> list[Any]:
        """The values of enum and const that all of the schema allows."""
        return [value for value in self._fewest(found) if self.allows(found, value)]

    def allows(self, found: Conjunction, value: Any) -> bool:
        """Tell whether a value is valid. Raises RequestError for a keyword that is not supported."""
        self.document.step(1 + len(found.parts))
        kinds, kind = found.kinds, self._kind(value)
        if found.is_false or (kinds is not None and kind not in kinds):
            return False
        if any(canonical(value) not in self._set(*each) for each in found.lists):
            return False
        check = {"integer": self._number, "fraction": self._number, "string": self._string}
        check |= {"array": self._array, "object": self._object}
        if kind in check and not check[kind](found, value):
            return False
        return all(self._chosen(found, choice, value) for choice in found.choices)

    def _kind(self, value: Any) -> str:
        if isinstance(value, float):  # Draft 4 does not count 1.0 as an integer
            return "integer" if value.is_integer() and self.document.draft > 4 else "fraction"
        return {bool: "boolean", int: "integer", str: "string", list: "array", dict: "object"}.get(
            type(value), "null"
        )

    def _fewest(self, found: Conjunction) -> list[Any]:
        """The shortest of the lists of values, without repetitions."""
        values = min((listed(*each) for each in found.lists), key=len)
        self.document.step(len(values))
        return list({canonical(value): value for value in values}.values())

    def _set(self, part: Part, keyword: str) -> set[Any]:
        key = id(part.schema), keyword
        if key not in self._sets:
            values = listed(part, keyword)
            self.document.step(len(values))
            self._sets[key] = set(map(canonical, values))
        return self._sets[key]

    def _chosen(self, found: Conjunction, choice: Choice, value: Any) -> bool:
        key = id(choice.part.schema), choice.keyword
        branches = self._branches.get(key)
        if branches is None:
            branches = self._branches[key] = [
                found.branch_alone(choice, branch) for branch in choice.branches
            ]
        valid = (self.allows(branch, value) for branch in branches)
        return any(valid) if choice.keyword == "anyOf" else sum(valid) == 1

    def _number(self, found: Conjunction, value: Any) -> bool:
        found.refuse_rejected("number")
        low, high = found.bounds()
        is_above = low is None or value > low[0] or (value == low[0] and not low[1])
        return is_above and (high is None or value < high[0] or (value == high[0] and not high[1]))

    def _string(self, found: Conjunction, value: str) -> bool:
        low, high = found.counts("Length")
        if len(value) < low or (high is not None and len(value) > high):
            return False
        text = COMPACT.dumps(value).encode()
        for part in found.having("pattern"):
            if not self._matches(
                inside_text(part.schema["pattern"], f"schema: {part.where}"), part, "pattern", text
            ):
                return False
        formats = [part for part in found.having("format") if part.schema["format"] in FORMATS]
        return all(
            self._matches(FORMATS[part.schema["format"]], part, "format", text) for part in formats
        )

    def _matches(self, inside: str | None, part: Part, keyword: str, text: bytes) -> bool:
        if inside is None:
            return False
        if inside not in self._automata:
            try:
                self._automata[inside] = byte_automaton(
                    f'"{inside}"', self._budget.limits, True, self._budget
                )
            except RequestError as err:
                raise RequestError(
                    f"schema: {part.where}: {keyword} {shown(part.schema[keyword])}: {err}"
                ) from err
        return self._automata[inside].matches(text)

    def _array(self, found: Conjunction, value: list[Any]) -> bool:
        found.refuse_rejected("array")
        low, high = found.counts("Items")
        if len(value) < low or (high is not None and len(value) > high):
            return False
        is_unique = any(part.schema["uniqueItems"] for part in found.having("uniqueItems"))
        if is_unique and len(set(map(canonical, value))) < len(value):
            return False
        return all(
            self.allows(self._joined(found.item(index)), each) for index, each in enumerate(value)
        )

    def _object(self, found: Conjunction, value: dict[str, Any]) -> bool:
        found.refuse_rejected("object")
        low, high = found.counts("Properties")
        if (
            len(value) < low
            or (high is not None and len(value) > high)
            or not value.keys() >= set(found.required)
        ):
            return False
        return all(
            self.allows(self._joined(found.property(name)), each) for name, each in value.items()
        )

    def _joined(self, parts: Sequence[Part]) -> Conjunction:
        return Conjunction(self.document, parts)

    # ---- branches

    def are_apart(self, branches: Sequence[Conjunction]) -> bool:
        """Tell whether no two branches share a value. Also returns False if that is undecided."""
        possible = [branch for branch in branches if not branch.is_false]
        with_lists = [branch for branch in possible if branch.lists]
        others = [branch for branch in possible if not branch.lists]
        if not self._have_different_values(with_lists):
            return False
        if any(
            self.allows(other, value)
            for other in others
            for branch in with_lists
            for value in self._fewest(branch)
        ):
            return False
        if all(branch.kinds == KINDS["object"] for branch in others):
            shared = (
                set[str]()
                .union(*(branch.required for branch in others))
                .intersection(*(branch.required for branch in others))
            )
            if any(self._tells_apart(name, others) for name in sorted(shared)):
                return True
        pairs = ((one, other) for number, one in enumerate(others) for other in others[:number])
        return all(self._two_are_apart(one, other, _COMPARED_DEPTH) for one, other in pairs)

    def _have_different_values(self, branches: Sequence[Conjunction]) -> bool:
        allowed = dict[Any, list[Conjunction]]()
        for branch in branches:
            for value in self._fewest(branch):
                same = allowed.setdefault(canonical(value), [])
                if (
                    same
                    and self.allows(branch, value)
                    and any(self.allows(other, value) for other in same)
                ):
                    return False
                same.append(branch)
        return True

    def _tells_apart(self, name: str, branches: Sequence[Conjunction]) -> bool:
        """Tell whether all branches list values of a property that they require, and no two share
        one.
        """
        values = [self._joined(branch.property(name)) for branch in branches]
        self.document.step(len(values))
        return all(each.lists for each in values) and self._have_different_values(values)

    def _two_are_apart(self, one: Conjunction, other: Conjunction, depth: int) -> bool:
        self.document.step(len(one.parts) + len(other.parts))
        if one.is_false or other.is_false:
            return True
        if one.lists or other.lists:
            return self.are_apart((one, other))
        kinds = [each.kinds for each in (one, other) if each.kinds is not None]
        common = _ALL_KINDS.intersection(*kinds)
        if not common:
            return True
        # A value of both has all the properties that either of them requires.
        return (
            common == KINDS["object"]
            and depth > 0
            and any(
                self._two_are_apart(
                    self._joined(one.property(name)), self._joined(other.property(name)), depth - 1
                )
                for name in dict.fromkeys((*one.required, *other.required))
            )
        )
