"""Tests of a table in docs/guides/developing.md.

The table says in how many files names of a kind occur, for example names of layer formats. The
tests count these files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from dlm_export.engines import ENGINE_BUILDERS
from dlm_runtime import Policy
from dlm_runtime.precision import FORMATS, HIGH, NUMBER_FORMATS

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "guides" / "developing.md").read_text()
HEADER = ROOT / "runtime" / "native" / "include" / "dlm_runtime.h"
SOURCES = {
    path: path.read_text()
    for folder in (
        "exporter",
        "calibration",
        "runtime/dlm_runtime",
        "runtime/native/include",
        "runtime/native/src",
    )
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".py", ".h", ".cc", ".json", ".jinja")
}


def _files(pattern: str) -> int:
    return sum(re.search(pattern, text) is not None for text in SOURCES.values())


def _quoted(names: Iterable[str]) -> dict[str, int]:
    return {name: _files(rf"[\"'`]{re.escape(name)}[\"'`]") for name in names}


def _check(kind: str, found: dict[str, int]) -> None:
    """Check the table row that begins with ``kind``.

    The row must contain the smallest and the largest number of files in ``found``.
    """
    fewest, most = min(found.values()), max(found.values())
    said = re.search(rf"^\| {re.escape(kind)} \| (\d+) to (\d+) \|", PAGE, re.MULTILINE)
    assert said is not None, kind
    assert (int(said[1]), int(said[2])) == (fewest, most), f"{kind}: {found}"


def test_a_layer_format_stands_in_as_many_files_as_the_page_says() -> None:
    own = {name for name in FORMATS if name not in {HIGH, *NUMBER_FORMATS}}
    _check("a layer format", _quoted(own))


def test_a_number_format_stands_in_as_many_files_as_the_page_says() -> None:
    """int8 is left out, because it is also an element type of numpy and of caches."""
    _check("a number format", _quoted({*NUMBER_FORMATS} - {"int8"}))


def test_an_engine_builder_stands_in_as_many_files_as_the_page_says() -> None:
    """tensorrt is left out, because it is also an engine of the runtime and a provider of ONNX
    Runtime.
    """
    _check("an engine's builder", _quoted({*ENGINE_BUILDERS} - {"tensorrt"}))


def test_a_policy_field_stands_in_as_many_files_as_the_page_says() -> None:
    """Only fields whose names have no other meaning are counted."""
    own = ("edit_passes", "edit_threshold", "timestep_eps", "sub_block_length", "score_of")
    assert all(hasattr(Policy(), name) for name in own)
    _check("a policy field", {name: _files(rf"\b{name}\b") for name in own})


def test_a_c_function_stands_in_as_many_files_as_the_page_says() -> None:
    declared = re.findall(r"^DLM_API [^;()]*?\b(dlm_\w+)\(", HEADER.read_text(), re.MULTILINE)
    assert len(declared) > 40
    _check("a C function", {name: _files(rf"\b{name}\b") for name in declared})
