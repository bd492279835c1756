"""Tables of decoding loops, with one loop in each line."""

from __future__ import annotations

import json
from typing import Any


def loops(table: str) -> dict[str, dict[str, Any]]:
    """Read lines of the form ``NAME: FIELD=VALUE ...``. A value is JSON, or a word."""
    found: dict[str, dict[str, Any]] = {}
    for line in table.strip().splitlines():
        name, _, fields = line.partition(": ")
        pairs = (field.split("=", 1) for field in fields.split())
        found[name] = {field: _value(text) for field, text in pairs}
    return found


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
