"""Judges the answers of the task ``simple_answers``."""

from __future__ import annotations

from typing import Any


def process_results(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Return 1 if the answer contains the right choice, in upper or lower case."""
    right = doc["choices"][doc["answer"]]
    return {"acc": float(right.casefold() in results[0].casefold())}
