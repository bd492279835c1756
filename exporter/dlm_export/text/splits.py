"""Compiles split patterns to automata over character classes.

A tokenizer cuts text at the matches of a regular expression. The tokenizer finds matches by
backtracking, and uses the leftmost match. If several matches start at the same position, it uses
the one that backtracking finds first.

This module first compiles the expression to *places*. A place is one instruction, such as "consume
a character of this set". A state of the automaton is a list of places, in the order in which
backtracking would try them (R. Cox, "Regular Expression Matching in the Wild", 2010). If a place
ends the expression, all later places in the list are dropped. The automaton therefore finds the
same matches as backtracking.

A match may depend on the next character, as in ``\\s+(?!\\S)``. The automaton therefore reports a
match only when it reads the next character. The module calls the tokenizers library to find which
characters ``\\s`` or ``\\p{L}`` match.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from dlm_export.text.refusal import NotCompiled

CODE_POINTS = 0x110000
MOST_PLACES, MOST_STATES, MOST_CLASSES, MOST_SETS = 2048, 1024, 255, 60
_MOST_REPEATS = 64
_SHORT = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "e": "\x1b", "a": "\a"}
_PROPERTY = re.compile(r"\\[pP]\{\^?[A-Za-z_ ]{1,32}\}|\\[sSdDwW]")
_HEX = re.compile(r"\\u([0-9a-fA-F]{4})|\\x([0-9a-fA-F]{2})|\\x\{([0-9a-fA-F]{1,6})\}")
_REPEAT = re.compile(r"\{(\d{0,3})(,?)(\d{0,3})\}")
# Non-ASCII characters that equal an ASCII letter if case is ignored, such as the Kelvin sign.
_FOLDED = {"s": "\N{LATIN SMALL LETTER LONG S}", "k": "\N{KELVIN SIGN}"}


@dataclass(frozen=True)
class Split:
    """A split pattern, or the name of the pre-tokenizer "Digits", which has no pattern."""

    pattern: str
    is_literal: bool = False


@dataclass(frozen=True, eq=False)
class Splits:
    """Compiled split patterns.

    ``classes``, uint8 ``[0x110000]``, contains the class of each code point. Each pattern has a
    table, int32 ``[states, classes + 1]``. A row of the table is for a state of the automaton, and
    a column is for the class of the next character. The last column is for the end of the text. An
    entry is 0 if there is no next state. Otherwise, the entry is 2 * (next state + 1). If a match
    ends before the next character, 1 is added to the entry.
    """

    classes: np.ndarray
    count: int
    tables: list[np.ndarray]


# The kinds of places: consume a character, choose between places, look ahead, end the expression.
@dataclass(frozen=True)
class _Take:
    characters: int  # index of the set of characters that this place consumes
    to: int


@dataclass(frozen=True)
class _Choose:
    # The places to continue with, in the order in which backtracking tries them.
    to: tuple[int, ...]


@dataclass(frozen=True)
class _Look:
    characters: int
    is_negative: bool
    to: int


class _End:
    pass


_Place = _Take | _Choose | _Look | _End
# The type of a function that creates the places of a part of the expression. The argument is the
# place after the part. The result is the first place of the part.
_Make = Callable[[int], int]


@dataclass(eq=False)
class _Sets:
    """The sets of characters that occur in the patterns. Each set has an index."""

    numbers: dict[bytes, int] = field(default_factory=dict)
    members: list[np.ndarray] = field(default_factory=list)

    def number(self, members: np.ndarray) -> int:
        key = np.packbits(members).tobytes()
        if key not in self.numbers:
            if len(self.members) == MOST_SETS:
                raise NotCompiled(
                    f"its split patterns name more than {MOST_SETS} sets of characters"
                )
            self.numbers[key] = len(self.members)
            self.members.append(members)
        return self.numbers[key]


def compile_splits(splits: Sequence[Split]) -> Splits:
    """Compile split patterns. Raises NotCompiled if a pattern is not supported or is too large."""
    sets = _Sets()
    programs = [_Parser(split, sets).program() for split in splits]
    classes, signatures = _classes(sets.members)
    return Splits(
        classes,
        len(signatures),
        [_determinised(places, first, signatures) for places, first in programs],
    )


def _classes(sets: Sequence[np.ndarray]) -> tuple[np.ndarray, list[int]]:
    """Group code points by the sets they are in. Returns their classes, and a bit mask for each."""
    signature = np.zeros(CODE_POINTS, np.uint64)
    for number, members in enumerate(sets):
        signature |= members.astype(np.uint64) << np.uint64(number)
    # The start of each sequence of equal entries. There are few such sequences.
    starts = np.append(0, np.nonzero(np.diff(signature))[0] + 1)
    found, numbers = np.unique(signature[starts], return_inverse=True)
    if len(found) > MOST_CLASSES:
        raise NotCompiled(
            f"its split patterns tell {len(found)} classes of characters apart, more than {MOST_CLASSES}"
        )
    lengths = np.diff(np.append(starts, CODE_POINTS))
    return np.repeat(numbers.reshape(-1).astype(np.uint8), lengths), [int(each) for each in found]


def _determinised(places: Sequence[_Place], first: int, signatures: Sequence[int]) -> np.ndarray:
    numbers: dict[tuple[int, ...], int] = {(first,): 0}
    order: list[tuple[int, ...]] = [(first,)]
    rows: list[list[int]] = []
    for state in order:
        row: list[int] = []
        for signature in [*signatures, None]:  # ``None`` stands for the end of the text
            has_matched, behind = _step(places, state, signature)
            if has_matched and not rows:
                raise NotCompiled("a split pattern matches an empty text")
            if behind and behind not in numbers:
                if len(order) == MOST_STATES:
                    raise NotCompiled(f"a split pattern needs more than {MOST_STATES} states")
                numbers[behind] = len(order)
                order.append(behind)
            row.append(2 * (numbers[behind] + 1 if behind else 0) + has_matched)
        rows.append(row)
    return np.array(rows, np.int32)


def _step(
    places: Sequence[_Place], state: tuple[int, ...], signature: int | None
) -> tuple[bool, tuple[int, ...]]:
    """Compute one step of the automaton from a state and a class of characters.

    Returns a bool and the next state. The bool is True if a match ends before the character.
    ``signature`` is a bit mask of the sets that contain the character. ``None`` means the end of
    the text.
    """
    behind: dict[int, None] = {}
    seen: set[int] = set()
    waiting = [*reversed(state)]
    while waiting:
        at = waiting.pop()
        if at in seen:
            continue
        seen.add(at)
        place = places[at]
        if isinstance(place, _End):
            return True, tuple(behind)
        if isinstance(place, _Choose):
            waiting += reversed(place.to)
            continue
        is_in = signature is not None and bool(signature >> place.characters & 1)
        if isinstance(place, _Look):
            if is_in != place.is_negative:
                waiting.append(place.to)
        elif is_in:
            behind[place.to] = None
    return False, tuple(behind)


class _Parser:
    """Parses the supported part of Oniguruma's syntax into places."""

    def __init__(self, split: Split, sets: _Sets) -> None:
        self._split, self._sets = split, sets
        self._text, self._at = split.pattern, 0
        self._places: list[_Place] = []
        self._ignores_case = False

    def program(self) -> tuple[list[_Place], int]:
        end = self._new(_End())
        if self._split == DIGITS or self._split == DIGIT_RUNS:
            digit = self._sets.number(_digits())
            make: _Make = lambda to: self._new(_Take(digit, to))  # noqa: E731
            make = make if self._split == DIGITS else self._repeated(make, 1, None)
        elif self._split.is_literal:
            make = self._joined([self._taking(_only(letter)) for letter in self._text])
        else:
            make = self._alternatives()
            if self._at < len(self._text):
                raise self._refused("an unmatched )")
        return self._places, make(end)

    def _new(self, place: _Place) -> int:
        if len(self._places) == MOST_PLACES:
            raise NotCompiled(f"a split pattern has more than {MOST_PLACES} places")
        self._places.append(place)
        return len(self._places) - 1

    def _refused(self, what: str) -> NotCompiled:
        return NotCompiled(
            f"its split pattern has {what} at character {self._at}, which is not compiled: {self._text!r:.200}"
        )

    def _take(self, word: str) -> bool:
        if not self._text.startswith(word, self._at):
            return False
        self._at += len(word)
        return True

    def _alternatives(self) -> _Make:
        parts = [self._sequence()]
        while self._take("|"):
            parts.append(self._sequence())
        if len(parts) == 1:
            return parts[0]
        return lambda to: self._new(_Choose(tuple(part(to) for part in parts)))

    def _sequence(self) -> _Make:
        parts: list[_Make] = []
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            part = self._part()
            fewest, most = self._counts()
            parts.append(part if (fewest, most) == (1, 1) else self._repeated(part, fewest, most))
        return self._joined(parts)

    def _joined(self, parts: Sequence[_Make]) -> _Make:
        def make(to: int) -> int:
            for part in reversed(parts):
                to = part(to)
            return to

        return make

    def _repeated(self, part: _Make, fewest: int, most: int | None) -> _Make:
        def make(to: int) -> int:
            if most == 1:  # ``x?`` matches x once or not at all
                return self._new(_Choose((part(to), to)))
            # Reject a repeated part that can match an empty text, because engines treat it
            # differently. The tokenizers library stops at the first empty iteration. Other engines
            # continue.
            again = self._new(_Choose(()))
            first = part(again)
            if self._is_empty(first, again):
                raise self._refused("a repeat of a part that can match an empty text")
            if most is None:
                self._places[again] = _Choose((first, to))
                to = again
            else:
                end = to
                for _ in range(most - fewest):
                    to = self._new(_Choose((part(to), end)))
            for _ in range(fewest):
                to = part(to)
            return to

        return make

    def _is_empty(self, first: int, last: int) -> bool:
        """Return True if a path from ``first`` to ``last`` consumes no character."""
        waiting, seen = [first], set[int]()
        while waiting:
            at = waiting.pop()
            place = self._places[at]
            if at == last:
                return True
            if at not in seen and not isinstance(place, _Take | _End):
                waiting += place.to if isinstance(place, _Choose) else [place.to]
            seen.add(at)
        return False

    def _counts(self) -> tuple[int, int | None]:
        found: tuple[int, int | None] = (1, 1)
        if match := _REPEAT.match(self._text, self._at):
            low, comma, high = match.groups()
            if not low and not high:
                raise self._refused("a repeat without counts")
            self._at = match.end()
            found = (int(low or 0), int(high) if high else (None if comma else int(low)))
            if max(found[0], found[1] or 0) > _MOST_REPEATS or found[0] > (
                found[1] or _MOST_REPEATS
            ):
                raise self._refused("such counts")
        else:
            for sign, counts in {"?": (0, 1), "*": (0, None), "+": (1, None)}.items():
                if self._take(sign):
                    found = counts
                    break
        if found != (1, 1) and self._text[self._at : self._at + 1] in ("?", "+", "*"):
            raise self._refused("a lazy or possessive repeat")
        return found

    def _part(self) -> _Make:
        if self._take("(?:"):
            return self._group()
        if self._take("(?i:"):
            before, self._ignores_case = self._ignores_case, True
            made = self._group()
            self._ignores_case = before
            return made
        for sign, is_negative in {"(?!": True, "(?=": False}.items():
            if self._take(sign):
                number = self._sets.number(self._set())
                self._close()
                return self._looking(number, is_negative)
        if self._text.startswith("(?", self._at):
            raise self._refused("a group of that kind")
        return self._group() if self._take("(") else self._taking(self._set())

    def _group(self) -> _Make:
        made = self._alternatives()
        self._close()
        return made

    def _close(self) -> None:
        if not self._take(")"):
            raise self._refused("unsupported syntax before the ) of a group")

    def _taking(self, members: np.ndarray) -> _Make:
        number = self._sets.number(members)
        return lambda to: self._new(_Take(number, to))

    def _looking(self, number: int, is_negative: bool) -> _Make:
        return lambda to: self._new(_Look(number, is_negative, to))

    def _set(self) -> np.ndarray:
        """Parse one character, class or escape, and return its set of characters."""
        if self._take("["):
            return self._class()
        if self._take("."):
            return ~_only("\n")
        letter = self._text[self._at : self._at + 1]
        if letter in ("", "^", "$", "*", "+", "?", "{", ")", "]"):
            raise self._refused(repr(letter) if letter else "its end")
        found = self._letter()
        if isinstance(found, np.ndarray):
            return found
        if not self._ignores_case:
            return _only(found)
        if not found.isascii():
            raise self._refused("a non-ASCII letter that must match in any case")
        return _only(found.lower() + found.upper() + _FOLDED.get(found.lower(), ""))

    def _class(self) -> np.ndarray:
        if self._ignores_case:
            raise self._refused("a class that must match in any case")
        members, is_negative = np.zeros(CODE_POINTS, bool), self._take("^")
        while not self._take("]"):
            if self._text[self._at : self._at + 1] in ("", "[") or self._text.startswith(
                "&&", self._at
            ):
                raise self._refused("a class of that kind")
            low = self._letter()
            if isinstance(low, np.ndarray):
                members |= low
                continue
            high = low
            if self._text[self._at : self._at + 1] == "-" and self._text[
                self._at + 1 : self._at + 2
            ] not in ("]", ""):
                self._at += 1
                end = self._letter()
                if isinstance(end, np.ndarray) or end < low:
                    raise self._refused("a range of that kind")
                high = end
            members[ord(low) : ord(high) + 1] = True
        return ~members if is_negative else members

    def _letter(self) -> str | np.ndarray:
        """Parse a character or an escape. Returns the set of characters that this part matches."""
        if self._text[self._at] != "\\":
            self._at += 1
            return self._text[self._at - 1]
        if match := _PROPERTY.match(self._text, self._at):
            self._at = match.end()
            return _members(match[0])
        if match := _HEX.match(self._text, self._at):
            point = int(next(filter(None, match.groups())), 16)
            if point >= CODE_POINTS or 0xD800 <= point < 0xE000:
                raise self._refused("half a character")
            self._at = match.end()
            return chr(point)
        letter = self._text[self._at + 1 : self._at + 2]
        if letter not in _SHORT and (not letter or letter.isalnum() or not letter.isascii()):
            raise self._refused(f"\\{letter}")
        self._at += 2
        return _SHORT.get(letter, letter)


DIGITS, DIGIT_RUNS = Split("Digits"), Split("Digits, runs of them")


def _only(letters: str) -> np.ndarray:
    members = np.zeros(CODE_POINTS, bool)
    members[[ord(letter) for letter in letters]] = True
    return members


@functools.cache
def _members(escape: str) -> np.ndarray:
    """Return the characters of an escape such as ``\\p{L}``. Raises NotCompiled."""
    from tokenizers import Regex, pre_tokenizers

    try:
        split = pre_tokenizers.Split(Regex(escape), behavior="removed")
    except Exception as err:  # the library raises no specific exception here
        raise NotCompiled(f"its split pattern names {escape}, which is unknown: {err}") from err
    members = np.ones(CODE_POINTS, bool)
    for start, text in _planes():
        for _, (first, last) in split.pre_tokenize_str(text):
            members[start + first : start + last] = False
    return _filled(members)


@functools.cache
def _digits() -> np.ndarray:
    """Return the characters that the pre-tokenizer Digits treats as digits."""
    from tokenizers import pre_tokenizers

    members = np.zeros(CODE_POINTS, bool)
    for start, text in _planes():
        # The text starts with a letter, so the parts into which Digits splits it alternate between
        # non-digits and digits.
        pieces = pre_tokenizers.Digits(individual_digits=False).pre_tokenize_str("a" + text)
        for _, (first, last) in pieces[1::2]:
            members[start + first - 1 : start + last - 1] = True
    return _filled(members)


def _filled(members: np.ndarray) -> np.ndarray:
    """Complete a set of characters that was found by testing.

    The result contains no surrogates. In some of Unicode's planes, only the first character was
    tested. If this first character is in the set, the result contains the whole plane.
    """
    members[0xD800:0xE000] = False
    for plane in _ALIKE:
        members[plane << 16 : plane + 1 << 16] = members[plane << 16]
    return members


# Unicode's planes that are empty or for private use. All code points of such a plane behave alike,
# so only the first code point is tested.
_ALIKE = (*range(4, 14), 15, 16)


@functools.cache
def _planes() -> list[tuple[int, str]]:
    """Return the characters to test, in texts of consecutive characters.

    Each element is the code point of a text's first character, and the text.
    """
    whole = [(plane << 16, plane + 1 << 16) for plane in (1, 2, 3, 14)]
    bounds = [
        (0, 0xD800),
        (0xE000, 0x10000),
        *whole,
        *((plane << 16, (plane << 16) + 1) for plane in _ALIKE),
    ]
    return [(first, "".join(map(chr, range(first, last)))) for first, last in bounds]
