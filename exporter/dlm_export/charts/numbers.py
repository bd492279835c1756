"""Formats numbers for the HTML pages, and replaces unsafe characters in text."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence

MISSING, MINUS, TIMES = "\N{EN DASH}", "\N{MINUS SIGN}", "\N{MULTIPLICATION SIGN}"


def printable(text: str) -> str:
    """Replace unsafe characters in a text that a page shows.

    ASCII control characters become the Unicode symbols for control characters. Other unsafe
    characters become U+FFFD.
    """
    text = re.sub(r"[\x00-\x08\x0b-\x1f]", lambda match: chr(0x2400 + ord(match[0])), text)
    # The three groups are C1 control characters, bidirectional overrides (which reorder the text
    # around them), and lone surrogates (which are invalid in UTF-8).
    return re.sub(r"[\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]", "\ufffd", text)


def finite(value: float | None, otherwise: float) -> float:
    return float(value) if value is not None and math.isfinite(value) else otherwise


def formatted(value: float | None, form: Callable[[float], str]) -> str:
    if value is None:
        return MISSING
    return form(value).replace("-", MINUS) if math.isfinite(value) else "not finite"


def as_number(value: float | None, digits: int = 4) -> str:
    """Format a number with ``digits`` significant digits. An integer keeps all digits.

    Very large and very small numbers are written with an exponent.
    """

    def form(number: float) -> str:
        if isinstance(number, int):
            return f"{number:,}"
        if number and not 1e-4 <= abs(number) < 1e6:
            return f"{number:.{digits - 1}e}"
        decimals = digits - 1 - math.floor(math.log10(abs(number))) if number else digits - 1
        return f"{number:,.{max(0, decimals)}f}"

    return formatted(value, form)


def as_percent(value: float | None, decimals: int = 1) -> str:
    """Format a share as a percentage.

    A share that would be rounded to 0% becomes, for example, "<0.1%". A share that would be rounded
    to 100% becomes ">99.9%".
    """

    def form(share: float) -> str:
        text, least = f"{share:.{decimals}%}", 10.0**-decimals
        if share > 0 and float(text[:-1]) == 0:
            return f"<{least:.{decimals}f}%"
        if share < 1 and float(text[:-1]) == 100:
            return f">{100 - least:.{decimals}f}%"
        return text

    return formatted(value, form)


def as_change(value: float | None) -> str:
    """Format a relative change as a signed percentage."""
    return formatted(value, lambda change: f"{change:+.2%}")


def as_points(value: float | None) -> str:
    """Format the difference of two shares in percentage points, with a sign."""
    return formatted(value, lambda difference: f"{100 * difference:+.1f}")


def as_bytes(count: int) -> str:
    """Format ``count`` bytes with the unit B, KiB, MiB or GiB."""
    power = min(3, max(0, (int(count).bit_length() - 1) // 10))
    return (
        f"{count:,} B"
        if power == 0
        else f"{count / 1024**power:.4g} {('', 'KiB', 'MiB', 'GiB')[power]}"
    )


def as_ratio(value: float | None) -> str:
    """Format a ratio with three decimals."""
    return formatted(value, lambda ratio: f"{ratio:.3f}")


FORMS: dict[str, Callable[..., str]] = {
    form.__name__: form
    for form in (as_bytes, as_change, as_number, as_percent, as_points, as_ratio)
}


def as_interval(pair: Sequence[float | None] | None, form: str) -> str:
    """Format an interval, such as "1.0% to 2.0%".

    ``form`` names the function that formats the two bounds. For example, "percent" means
    ``as_percent``. The bootstrap gives an interval without width if all samples are alike, which
    says nothing about other samples. Such an interval is named, not printed as if it were exact.
    """
    if pair and pair[0] == pair[1]:
        return "the same in every sample"
    return " to ".join(FORMS[f"as_{form}"](value) for value in pair) if pair else MISSING
