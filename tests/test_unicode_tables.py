"""Tests that the Unicode tables of the native library equal the output of
``make_unicode_tables.py``.
"""

from __future__ import annotations

import os
from pathlib import Path

import make_unicode_tables
import pytest


def test_the_tables_are_those_of_rusts_regex_crate() -> None:
    folder = os.environ.get("DLM_REGEX_TESTDATA")
    if folder is None:
        pytest.skip("$DLM_REGEX_TESTDATA does not name the testdata of Rust's regex crate")
    tables = Path(folder).parent / "regex-syntax" / "src" / "unicode_tables"
    if not tables.is_dir():
        pytest.skip(f"{tables} is missing: a whole checkout of the crate has it")
    assert make_unicode_tables.source(tables) == make_unicode_tables.TARGET.read_text(
        encoding="utf-8"
    )


def test_sets_are_written_with_few_differences() -> None:
    """If a set is the union of earlier sets that have no common characters, no edges are stored for
    it.
    """
    low, high = tuple(range(1, 12, 2)), tuple(range(21, 32, 2))
    written = make_unicode_tables.written_sets([low, high, low + high])
    first, second = [0, 6, 1, 2, 2, 2, 2, 2], [0, 6, 21, 2, 2, 2, 2, 2]
    assert written == bytes([*first, *second, 2, 0, 1, 0])
    assert make_unicode_tables.number(300) == bytes([0xAC, 2])
