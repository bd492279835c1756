"""Patterns of JSON Schema (ECMA-262) as expressions over the JSON text of the strings that they
match.

A pattern speaks of a string's characters; JSON text writes some of them as two. What is not regular
(references back, looking around), or not there (flags), is refused by name.
"""

from __future__ import annotations

from typing import NoReturn

from dlm_runtime.constraints.expressions import (
    ALL,
    CHARACTER,
    Ranges,
    characters,
    complement,
    either,
    repeated,
    union,
)
from dlm_runtime.errors import RequestError

MOST_REPEATS = 10_000
_NEST_LIMIT = 100

# The classes of ECMA-262 with the flag u: \d and \w are ASCII, \s is WhiteSpace and LineTerminator.
_DIGIT: Ranges = ((48, 57),)
_WORD: Ranges = ((48, 57), (65, 90), (95, 95), (97, 122))
_SPACE: Ranges = (
    *(
        (9, 13),
        (32, 32),
        (0xA0, 0xA0),
        (0x1680, 0x1680),
        (0x2000, 0x200A),
        (0x2028, 0x2029),
        (0x202F, 0x202F),
    ),
    *((0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)),
)
_LINE_ENDS: Ranges = ((10, 10), (13, 13), (0x2028, 0x2029))
_CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "0": 0}


def inside_text(pattern: str, where: str) -> str | None:
    """What matches the inside of a JSON string that ``pattern`` is found in; None if there is none.

    Raises RequestError, which starts with ``where``, for a pattern that is none, or that is not
    regular.
    """
    return _Reader(pattern, where).read()


class _Reader:
    """Reads a pattern from its left; an expression of None matches nothing."""

    def __init__(self, pattern: str, where: str) -> None:
        self.pattern, self.where, self.at, self.depth = pattern, where, 0, 0

    def read(self) -> str | None:
        found = self.choices(is_outermost=True)
        if self.at < len(self.pattern):
            self.refuse("an unmatched )")
        return found

    def refuse(self, what: str) -> NoReturn:
        raise RequestError(
            f"{self.where}: pattern {self.pattern[:80]!r} has {what} at character {self.at}"
        )

    def take(self, text: str) -> bool:
        if not self.pattern.startswith(text, self.at):
            return False
        self.at += len(text)
        return True

    def next(self) -> str:
        if self.at >= len(self.pattern):
            self.refuse("an end too early")
        self.at += 1
        return self.pattern[self.at - 1]

    def choices(self, is_outermost: bool = False) -> str | None:
        found = [self.sequence(is_outermost)]
        while self.take("|"):
            found.append(self.sequence(is_outermost))
        kept = [each for each in found if each is not None]
        return either(kept) if kept else None

    def sequence(self, is_outermost: bool) -> str | None:
        """A branch; of the outermost ones, what does not hold on to an end of the string may have
        anything around it.
        """
        anything = repeated(CHARACTER, 0, None)
        parts: list[str | None] = [] if not is_outermost or self.take("^") else [anything]
        is_ended = not is_outermost
        while self.at < len(self.pattern) and self.pattern[self.at] not in "|)":
            if (
                is_outermost
                and self.pattern[self.at] == "$"
                and self.pattern[self.at + 1 : self.at + 2] in ("", "|")
            ):
                self.at += 1
                is_ended = True
                break
            parts.append(self.quantified(self.atom()))
        if not is_ended:
            parts.append(anything)
        return None if None in parts else "".join(part for part in parts if part is not None)

    def atom(self) -> str | None:
        letter = self.next()
        if letter == "(":
            return self.group()
        if letter == "[":
            return characters(self.letters_in_class())
        if letter == ".":
            return characters(complement(_LINE_ENDS))
        if letter == "\\":
            return characters(self.escape())
        if letter in "^$":
            self.refuse(f"{letter} inside: it is supported at the ends alone,")
        if letter in "*+?{":
            self.refuse(f"{letter} with nothing to repeat")
        return characters(((ord(letter), ord(letter)),))

    def group(self) -> str | None:
        if self.take("?") and not self.take(":"):
            self.refuse("a group that is not regular or not supported, (?...")
        self.depth += 1
        if self.depth > _NEST_LIMIT:
            self.refuse(f"groups nested more than {_NEST_LIMIT} deep")
        found = self.choices()
        if not self.take(")"):
            self.refuse("a group without its )")
        self.depth -= 1
        return None if found is None else f"(?:{found})"

    def quantified(self, item: str | None) -> str | None:
        bounds: tuple[int, int | None]
        if self.take("*"):
            bounds = (0, None)
        elif self.take("+"):
            bounds = (1, None)
        elif self.take("?"):
            bounds = (0, 1)
        elif self.take("{"):
            bounds = self.counts()
        else:
            return item
        self.take("?")  # which of the matches is found first makes no other set of strings
        if item is None:
            return None if bounds[0] else ""
        return repeated(item, *bounds)

    def counts(self) -> tuple[int, int | None]:
        end = self.pattern.find("}", self.at)
        fewest, comma, most = self.pattern[self.at : max(end, self.at)].partition(",")
        if (
            end < 0
            or not fewest.isdecimal()
            or (most and not most.isdecimal())
            or len(fewest + most) > 20
        ):
            self.refuse("{ that is no count: write \\{ for the brace,")
        self.at = end + 1
        low = int(fewest)
        high = (int(most) if most else None) if comma else low
        if low > MOST_REPEATS or (high is not None and not low <= high <= MOST_REPEATS):
            self.refuse(f"a count that is no range of 0..{MOST_REPEATS}")
        return low, high

    def letters_in_class(self) -> Ranges:
        is_negated, found = self.take("^"), list[tuple[int, int]]()
        while not self.take("]"):
            low = self.class_letters()
            if self.pattern[self.at : self.at + 1] == "-" and self.pattern[
                self.at + 1 : self.at + 2
            ] not in ("]", ""):
                self.at += 1
                high = self.class_letters()
                if [len(ends) == 1 and ends[0][0] == ends[0][1] for ends in (low, high)] != [
                    True,
                    True,
                ] or low[0] > high[0]:
                    self.refuse("a range whose ends are no two characters in order")
                low = ((low[0][0], high[0][0]),)
            found += low
        return complement(found) if is_negated else union(found)

    def class_letters(self) -> Ranges:
        letter = self.next()
        if letter != "\\":
            return ((ord(letter), ord(letter)),)
        if self.take("b"):
            return ((8, 8),)
        return self.escape()

    def escape(self) -> Ranges:
        letter = self.next()
        kinds = {"d": _DIGIT, "w": _WORD, "s": _SPACE}
        if letter in kinds:
            return kinds[letter]
        if letter.lower() in kinds:
            return complement(kinds[letter.lower()])
        if letter in _CONTROLS and not (
            letter == "0" and self.pattern[self.at : self.at + 1].isdecimal()
        ):
            point = _CONTROLS[letter]
        elif letter == "x":
            point = self.hexadecimal(2)
        elif letter == "u" and self.take("{"):
            end = self.pattern.find("}", self.at)
            point = self.hexadecimal(max(0, end - self.at))
            self.at += 1
        elif letter == "u":
            point = self.hexadecimal(4)
        elif letter.isalnum():
            self.refuse(f"\\{letter}, which is not supported,")
        else:
            point = ord(letter)
        return ((point, point),)

    def hexadecimal(self, count: int) -> int:
        digits = self.pattern[self.at : self.at + count]
        try:
            point = (
                int(digits, 16)
                if len(digits) == count and 0 < count <= 6 and digits.isalnum()
                else -1
            )
        except ValueError:
            point = -1
        # NUL can be named, in a class to leave it out, though no text has it.
        if point and not any(low <= point <= high for low, high in ALL):
            self.refuse("an escape that names no character")
        self.at += count
        return point
