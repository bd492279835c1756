"""Pieces of regular expressions over JSON text: quoted text, characters of strings, ranges of
numbers, formats.

What they are written in is the syntax of Rust's regex crate, which outlines-core compiles. JSON
text is compact: nothing stands between its parts, and a character of a string is written as itself
wherever JSON allows that.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from dlm_runtime.errors import RequestError

Ranges = Sequence[tuple[int, int]]  # of code points, both ends included, ascending and apart

ALL: Ranges = ((1, 0xD7FF), (0xE000, 0x10FFFF))  # what UTF-8 can hold, but for NUL
DIGITS = "[0-9]"
INTEGER = "-?(?:0|[1-9][0-9]*)"
# Two digits of exponent: readers of JSON keep such numbers finite.
NUMBER = rf"{INTEGER}(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{{1,2}})?"
FRACTION_DIGITS = (
    6  # of bounded numbers: with nine before the point they stay as they are in a double
)

_SHORT = {
    0x08: "b",
    0x09: "t",
    0x0A: "n",
    0x0C: "f",
    0x0D: "r",
    0x22: '"',
    0x5C: "\\",
}  # JSON's escapes of one letter
_WRITTEN: Ranges = ((0x20, 0x21), (0x23, 0x5B), (0x5D, 0x7E), (0xA0, 0xD7FF), (0xE000, 0x10FFFF))
# A placeholder for any one character of a string. It is NUL, and no text has a NUL: quote() rejects
# it, and JSON escapes it. byte_automaton replaces it, since outlines-core takes up to 10 ms for
# every place that spells out the characters.
CHARACTER = r"\x{0}"
_SPECIAL = frozenset("\\.+*?()|[]{}^$#&-~")


def _gaps(ranges: Ranges) -> Ranges:
    found, start = [], 0
    for low, high in union(ranges):
        if low > start:
            found.append((start, low - 1))
        start = high + 1
    return (*found, (start, 0x10FFFF)) if start <= 0x10FFFF else tuple(found)


def _span(low: int, high: int) -> str:
    ends = [rf"\x{{{point:X}}}" for point in (low, high)]
    return ends[0] if low == high else "-".join(ends)


def quote(text: str) -> str:
    """The expression that matches ``text`` alone. Raises RequestError for a text with a NUL, which
    no constraint can have.
    """
    if "\0" in text:
        raise RequestError(f"a constraint cannot have a text with a NUL character: {text[:80]!r}")
    return "".join("\\" + letter if letter in _SPECIAL else letter for letter in text)


def value(found: Any) -> str:
    """What matches a JSON value as it is written compactly. Raises ValueError for what JSON cannot
    say.
    """
    text = json.dumps(found, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    text.encode("utf-8")
    # C1's controls and DEL are legal and unprintable: they come as they are, since JSON has no
    # short form of them.
    return quote(text)


def either(choices: Iterable[str]) -> str:
    """What matches any of them; there is at least one."""
    kept = list(dict.fromkeys(choices))
    return kept[0] if len(kept) == 1 else "(?:" + "|".join(kept) + ")"


def repeated(item: str, fewest: int, most: int | None) -> str:
    """``item`` between ``fewest`` and ``most`` times, None: without an end."""
    if (fewest, most) == (0, None):
        return f"(?:{item})*"
    return f"(?:{item}){{{fewest},{'' if most is None else most}}}"


def complement(ranges: Ranges) -> Ranges:
    """All other characters."""
    return intersection(ALL, _gaps(ranges))


def intersection(one: Ranges, other: Ranges) -> Ranges:
    """The characters in both."""
    found = [(max(a, c), min(b, d)) for a, b in one for c, d in other]
    return union((low, high) for low, high in found if low <= high)


def union(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """The characters in any, in order."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], high))
        else:
            merged.append((low, high))
    return tuple(merged)


def characters(ranges: Ranges) -> str | None:
    """What matches one of these characters inside a JSON string; None if JSON has no short way to
    write any of them.
    """
    return CHARACTER if ranges == ALL else _spelled(ranges)


def _spelled(ranges: Ranges) -> str | None:
    written = "".join(_span(low, high) for low, high in intersection(ranges, _WRITTEN))
    short = "".join(
        letter
        for point, letter in _SHORT.items()
        if any(low <= point <= high for low, high in ranges)
    )
    choices = ([f"[{written}]"] if written else []) + (
        [r"\\[" + quote(short) + "]"] if short else []
    )
    return either(choices) if choices else None


def spelled_out(expression: str) -> str:
    """An expression with CHARACTER as what it stands for."""
    return expression.replace(CHARACTER, _spelled(ALL) or "")


def text(fewest: int = 0, most: int | None = None) -> str:
    """A JSON string of so many characters."""
    return f'"{repeated(CHARACTER, fewest, most)}"'


def integers(low: int | None, high: int | None) -> str | None:
    """The integers of a range, an end of None being open; None for an empty range."""
    if low is None and high is None:
        return INTEGER
    choices = []
    if high is None or high >= 0:
        choices.append(_naturals(max(low or 0, 0), high))
    if low is None or low < 0:
        below = _naturals(1 if high is None or high >= 0 else -high, None if low is None else -low)
        choices.append(None if below is None else "-" + below)
    kept = [choice for choice in choices if choice is not None]
    return either(kept) if kept else None


def numbers(low: int | None, high: int | None, is_above: bool, is_below: bool) -> str | None:
    """Decimals in a range of integer ends, without exponent; ``is_above``, ``is_below`` leave an
    end out.
    """
    if low is None and high is None:
        return NUMBER
    if (
        low is not None
        and high is not None
        and (low > high or (low == high and (is_above or is_below)))
    ):
        return None
    choices: list[str | None] = []
    if high is None or high > 0 or (high == 0 and not is_below):
        has_low = low is not None and low >= 0
        choices.append(_decimals(max(low or 0, 0), high, has_low and is_above, is_below))
    if low is None or low < 0:
        has_high = high is not None and high < 0
        # Zero is among the others, so what begins here is above it.
        below = _decimals(
            max(-(high or 0), 0),
            None if low is None else -low,
            is_below if has_high else True,
            is_above,
        )
        choices.append(None if below is None else "-" + below)
    kept = [choice for choice in choices if choice is not None]
    return either(kept) if kept else None


def _naturals(low: int, high: int | None) -> str | None:
    """The integers from ``low`` >= 0 on, up to ``high``."""
    if high is not None and low > high:
        return None
    choices, length = [], len(str(low))
    while high is None or length <= len(str(high)):
        top = 10**length - 1
        choices.append(_same_length(str(low), str(top if high is None else min(high, top))))
        low, length = top + 1, length + 1
        if high is None:
            choices.append(f"[1-9][0-9]{{{length - 1},}}")
            break
    return either(choices)


def _same_length(low: str, high: str) -> str:
    """The digits from ``low`` to ``high``, which have one length."""
    if low[:1] == high[:1]:
        return low[:1] + _same_length(low[1:], high[1:]) if low else ""
    rest, choices = len(low) - 1, []
    first, last = int(low[0]), int(high[0])
    if low[1:].strip("0"):
        choices.append(low[0] + _same_length(low[1:], "9" * rest))
        first += 1
    if high[1:].strip("9"):
        choices.append(high[0] + _same_length("0" * rest, high[1:]))
        last -= 1
    if first <= last:
        digit = str(first) if first == last else f"[{first}-{last}]"
        choices.append(digit + (f"[0-9]{{{rest}}}" if rest else ""))
    return either(choices)


def _decimals(low: int, high: int | None, is_above: bool, is_below: bool) -> str | None:
    """Those from ``low`` >= 0 on, up to ``high``."""
    zeros, any_digits = rf"(?:\.0{{1,{FRACTION_DIGITS}}})?", rf"(?:\.[0-9]{{1,{FRACTION_DIGITS}}})?"
    some = either(
        rf"0{{{zero}}}[1-9][0-9]{{0,{FRACTION_DIGITS - 1 - zero}}}"
        for zero in range(FRACTION_DIGITS)
    )
    choices: list[str | None] = []
    if high is not None and low == high:
        return None if is_above or is_below else f"{low}{zeros}"
    if is_above:
        choices.append(rf"{low}\.{some}")
        low += 1
    inner = _naturals(low, None if high is None else high - 1)
    choices.append(None if inner is None else inner + any_digits)
    if high is not None and not is_below:
        choices.append(f"{high}{zeros}")
    kept = [choice for choice in choices if choice is not None]
    return either(kept) if kept else None


_YEAR = "[12][0-9]{3}"
_LEAP = "(?:[12][0-9](?:0[48]|[2468][048]|[13579][26])|(?:1[26]|2[048])00)"
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP}-02-29)"
)
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"


def _label(most: int) -> str:
    """A label of a host name, of up to ``most`` characters, without -- as its third and fourth:
    that marks Punycode.
    """
    end, any_ = "[a-z0-9]", "[a-z0-9-]"
    long = f"{end}(?:{any_}{{0,{most - 4}}}{end})?|-{end}(?:{any_}{{0,{most - 5}}}{end})?"
    return f"{end}(?:{end}|{any_}(?:{long}))?"


def _host(fewest: int) -> str:
    """A host name of at least ``fewest`` labels, and at most 253 characters (RFC 1123, RFC 5890).

    Counting the characters of all labels takes too many states. So it has up to four labels of 63,
    63, 63 and 61 characters, or up to eight of 30 each.
    """
    few = rf"(?:{_label(63)}\.){{{fewest - 1},3}}{_label(61)}"
    many = rf"(?:{_label(30)}\.){{{fewest - 1},7}}{_label(30)}"
    return f"(?:{few}|{many})"


_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"

# Each matches strings of its format, but not all of them: only dates of the years 1000 to 2999, and
# only plain addresses.
FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "email": rf"[a-z0-9]+(?:[._+-][a-z0-9]+)*@{_host(2)}",
    "hostname": _host(1),
    "ipv4": rf"{_BYTE}(?:\.{_BYTE}){{3}}",
    "uri": rf"https?://{_host(1)}(?:/[A-Za-z0-9._~-]+)*/?",
}
