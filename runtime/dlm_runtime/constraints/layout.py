"""Layouts of JSON text. A layout says which white space a JSON text contains."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Layout:
    """The white space of a JSON text.

    Empty arrays and objects are always written as ``[]`` and ``{}``.

    Args:
        item_separator: Text between two items of an array, and between two properties of an object,
            as in ``json.dumps``.
        key_separator: Text between a property's name and its value, as in ``json.dumps``.
        indent: Number of spaces per level, 0..64. If ``indent`` is a number, each item and property
            is on a separate line, as in ``json.dumps(indent=...)``. None means no line breaks.
        has_lines: If True and the whole text is an array, each item of this array is on a separate
            line, without indentation.
    """

    item_separator: str = ","
    key_separator: str = ":"
    indent: int | None = None
    has_lines: bool = False

    def around(self, level: int, is_array: bool) -> tuple[str, str, str]:
        """Return the texts after an opening bracket, between items, and before a closing bracket.

        ``level`` is the number of arrays and objects that enclose this array or object. Empty
        arrays and objects have no such texts.
        """
        if self.indent is not None:
            inner, outer = (
                "\n" + " " * (self.indent * (level + 1)),
                "\n" + " " * (self.indent * level),
            )
            return inner, self.item_separator + inner, outer
        if self.has_lines and is_array and level == 0:
            return "\n", self.item_separator + "\n", "\n"
        return "", self.item_separator, ""

    def dumps(self, value: Any, level: int = 0) -> str:
        """Write a JSON value as text. Characters are escaped only where JSON requires it.

        ``level`` is the number of arrays and objects that enclose the value. Raises ValueError for
        NaN, infinities and unpaired surrogates.
        """
        if not isinstance(value, (dict, list, tuple)) or not value:
            text = json.dumps(value, ensure_ascii=False, allow_nan=False)
            text.encode("utf-8")
            return text
        is_array = not isinstance(value, dict)
        start, between, end = self.around(level, is_array)
        if isinstance(value, dict):
            items = [
                self.dumps(name) + self.key_separator + self.dumps(each, level + 1)
                for name, each in value.items()
            ]
        else:
            items = [self.dumps(each, level + 1) for each in value]
        opening, closing = "[]" if is_array else "{}"
        return opening + start + between.join(items) + end + closing


COMPACT = Layout()
LAYOUTS = {
    "compact": COMPACT,  # {"a":1,"b":[1,2]}
    "spaced": Layout(", ", ": "),  # {"a": 1, "b": [1, 2]}, as json.dumps writes
    "indented": Layout(",", ": ", indent=2),  # as json.dumps(indent=2) writes
    "lines": Layout(has_lines=True),  # a top-level array with one compact item per line
}
