"""JSON Lines and CSV: what they are made of, beside the schema of one record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class JsonLines:
    """JSON values, each on its own line, without a line break after the last.

    Args:
        schema: JSON Schema of a line, or a class with a method ``model_json_schema``.
        min_lines: Fewest lines.
        max_lines: Most lines. None: any number.
    """

    schema: Any
    min_lines: int = 1
    max_lines: int | None = None


@dataclass(frozen=True)
class Csv:
    """A table by RFC 4180, without a line break after the last row.

    Args:
        schema: JSON Schema of a row, an object whose properties are the columns; or a class with a method
            ``model_json_schema``. A null, or a property that is left out, is an empty field.
        header: Whether the first line has the names of the columns.
        delimiter: Text between two fields: a comma, semicolon, vertical bar or tab.
        line_end: Text between two lines: ``"\\n"`` or ``"\\r\\n"``.
        min_rows: Fewest rows, without the header.
        max_rows: Most rows. None: any number.
    """

    schema: Any
    header: bool = True
    delimiter: str = ","
    line_end: str = "\n"
    min_rows: int = 1
    max_rows: int | None = None
