"""Constraints for JSON Lines and CSV: the schema of one line or row, and further options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class JsonLines:
    """A constraint for JSON Lines, which is a text with one JSON value per line.

    There is no line break after the last line.

    Args:
        schema: The JSON Schema of a line, or a class with a method ``model_json_schema``.
        min_lines: The smallest number of lines.
        max_lines: The largest number of lines. None means any number.
    """

    schema: Any
    min_lines: int = 1
    max_lines: int | None = None


@dataclass(frozen=True)
class Csv:
    """A constraint for a CSV table (RFC 4180), without a line break after the last row.

    Args:
        schema: The JSON Schema of a row, or a class with a method ``model_json_schema``. The schema
            must describe an object. Its properties are the columns. A null, or a property that is
            left out, becomes an empty field.
        header: If True, the first line contains the names of the columns.
        delimiter: The text between two fields: a comma, semicolon, vertical bar or tab.
        line_end: The text between two lines: ``"\\n"`` or ``"\\r\\n"``.
        min_rows: The smallest number of rows, without the header.
        max_rows: The largest number of rows. None means any number.
    """

    schema: Any
    header: bool = True
    delimiter: str = ","
    line_end: str = "\n"
    min_rows: int = 1
    max_rows: int | None = None
