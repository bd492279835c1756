r"""Writes ``compile/generated/unicode_tables.cc`` from the tables of Rust's regex crate.

    python tests/make_unicode_tables.py regex/regex-syntax/src/unicode_tables

The folder comes from https://github.com/rust-lang/regex. The tables in this folder contain data of
    the Unicode Character Database. They define which characters ``\w`` and ``\p{Greek}`` match in
    this project's regular expressions. ``test_unicode_tables.py`` checks that this script would
    write the same file again.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

TARGET = Path(__file__).parents[1] / "runtime/native/src/compile/generated/unicode_tables.cc"
# The Unicode properties that have several values, such as scripts. Each entry contains the
# property's file, its name, and the prefix of its values in the generated index.
WITH_VALUES = (
    ("general_category", "General_Category", "gc"),
    ("script", "Script", "sc"),
    ("script_extension", "Script_Extensions", "scx"),
    ("grapheme_cluster_break", "Grapheme_Cluster_Break", "gcb"),
    ("word_break", "Word_Break", "wb"),
    ("sentence_break", "Sentence_Break", "sb"),
    ("age", "Age", "age"),
)
_NAMED = re.compile(r'\("([^"]+)",\s*([A-Z0-9_]+)\)')
_SET = re.compile(r"pub const ([A-Z0-9_]+): &'static \[\(char, char\)\] =\s*&\[(.*?)\];", re.DOTALL)
_CHARACTER = r"'(\\u\{[0-9a-f]+\}|\\.|[^\\])'"
_RANGE = re.compile(rf"\({_CHARACTER}, {_CHARACTER}\)")
_FOLD = re.compile(rf"\({_CHARACTER}, &\[([^]]*)\]\)")
_PAIR = re.compile(r'\("([^"]+)", "([^"]+)"\)')
_SIMPLE = {"n": 10, "r": 13, "t": 9, "0": 0, "\\": 92, "'": 39}


def point(written: str) -> int:
    """Return the code point of a Rust character literal whose quotes were removed."""
    if written.startswith("\\u"):
        return int(written[3:-1], 16)
    return _SIMPLE[written[1]] if written.startswith("\\") else ord(written)


def sets_of(text: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield each set of characters in a file: its name, and its ascending edges.

    A set consists of ranges of code points. Its edges are the first code point of each range and
    the first code point after each range.
    """
    bodies = {}
    for name, body in _SET.findall(text):
        bodies[name] = tuple(
            edge for low, high in _RANGE.findall(body) for edge in (point(low), point(high) + 1)
        )
    _, _, listed = text.partition("BY_NAME")
    for name, constant in _NAMED.findall(listed.partition("];")[0]):
        yield name, bodies[constant]
    if not listed:
        yield from bodies.items()


def number(value: int) -> bytes:
    """Encode a number with seven bits per byte, lowest bits first.

    The eighth bit is 1 in all bytes except the last.
    """
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def joined(edges: set[int]) -> bytes:
    """Encode ascending numbers: first their count, then the difference of each number from the
    previous one.
    """
    ordered = sorted(edges)
    gaps = [high - low for low, high in zip([0, *ordered], ordered, strict=False)]
    return number(len(gaps)) + b"".join(map(number, gaps))


def written_sets(sets: list[tuple[int, ...]]) -> bytes:
    """Encode each set as a list of earlier sets and some edges.

    The edges describe the characters that are in the set or in the union of the earlier sets, but
    not in both.

    An edge is stored if exactly one of the set and the union has this edge. For example, the
    category L is the union of Lu, Ll, Lt, Lm and Lo, so it needs no edges.
    """
    out = bytearray()
    for place, edges in enumerate(sets):
        left, bases = set(edges), list[int]()
        while True:
            sizes = [(len(left ^ set(sets[base])), base) for base in range(place)]
            if not sizes or min(sizes)[0] + 2 >= len(left):
                break
            left ^= set(sets[min(sizes)[1]])
            bases.append(min(sizes)[1])
        out += number(len(bases)) + b"".join(map(number, bases)) + joined(left)
    return bytes(out)


def literal(data: bytes) -> str:
    lines = []
    row = "   "
    for value in data:
        cell = f" {value},"
        if len(row) + len(cell) > 100:
            lines.append(row)
            row = "   "
        row += cell
    return "\n".join([*lines, row])


def source(folder: Path) -> str:
    """Return the text of the C++ file."""
    texts = {path.stem: path.read_text(encoding="utf-8") for path in folder.glob("*.rs")}
    found = re.search(r"Unicode version: ([0-9.]+)\.", texts["general_category"])
    assert found is not None
    values = {
        name: dict(_PAIR.findall(body))
        for name, body in re.findall(
            r'\(\s*"([A-Z][A-Za-z_]+)",\s*&\[(.*?)\],\s*\)', texts["property_values"], re.DOTALL
        )
    }
    properties: dict[str, list[str]] = {}
    for alias, name in _PAIR.findall(texts["property_names"]):
        properties.setdefault(name, []).append(alias)
    listed = [
        (f"{short}={alias}", edges)
        for file, name, short in WITH_VALUES
        for value, edges in sets_of(texts[file])
        for alias, target in values[name].items()
        if target == value
    ]
    listed += [
        (f"={alias}", edges)
        for name, edges in sets_of(texts["property_bool"])
        for alias in properties.get(name, [])  # Rust's regular expressions do not support InCB
    ]
    listed += [("perl_word", edges) for _, edges in sets_of(texts["perl_word"])]
    # Small sets come first, because larger sets are encoded as unions of smaller sets.
    unique = sorted({edges for _, edges in listed}, key=lambda each: (len(each), each))
    numbers = {edges: place for place, edges in enumerate(unique)}
    names = {key: numbers[edges] for key, edges in listed}
    groups = dict[int, frozenset[int]]()
    for first, others in _FOLD.findall(texts["case_folding_simple"]):
        group = frozenset({point(first), *map(point, re.findall(_CHARACTER, others))})
        groups.setdefault(min(group), group)
        assert groups[min(group)] == group
    folds, before = list[bytes](), 0
    for low in sorted(groups):
        rest = sorted(groups[low] - {low})
        folds.append(number(low - before) + joined({each - low for each in rest}))
        before = low
    keys = sorted(names)
    rows = "\n".join(f'    {{"{key}", {names[key]}}},' for key in keys)
    shorts = sorted((alias, short) for _, name, short in WITH_VALUES for alias in properties[name])
    aliases = "\n".join(f'    {{"{alias}", "{short}"}},' for alias, short in shorts)
    return f"""// Written by tests/make_unicode_tables.py from the tables of
// https://github.com/rust-lang/regex: do not edit. Data of the Unicode Character Database
// {found[1]} (https://www.unicode.org/license.txt).
#include "compile/regex/unicode_tables.h"

// clang-format off
namespace dlm::compile {{

const uint8_t kUnicodeSets[] = {{
{literal(written_sets(unique))}
}};
const size_t kUnicodeSetCount = {len(unique)};

const uint8_t kCaseFolds[] = {{
{literal(b"".join(folds))}
}};
const size_t kCaseFoldCount = {len(folds)};

const UnicodeName kUnicodeNames[] = {{
{rows}
}};
const size_t kUnicodeNameCount = {len(keys)};

const UnicodeAlias kUnicodeProperties[] = {{
{aliases}
}};
const size_t kUnicodePropertyCount = {len(shorts)};

}}  // namespace dlm::compile
"""


def main() -> None:
    TARGET.write_text(source(Path(sys.argv[1])), encoding="utf-8")
    print(f"{TARGET} ({TARGET.stat().st_size} bytes)")


if __name__ == "__main__":
    main()
