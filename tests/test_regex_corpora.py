"""Tests with regular expressions from the public test suites of two engines.

The engines are Python's ``re`` and Rust's ``regex``. A compiled automaton must accept the texts
that the engines match.

Python's suite is the module ``test.re_tests`` of the standard library. Rust's suite is the folder
``testdata`` of https://github.com/rust-lang/regex. Set $DLM_REGEX_TESTDATA to this folder.
"""

from __future__ import annotations

import importlib
import os
import random
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from constraints import ByteAutomaton, byte_automaton, drawn_texts

from dlm_runtime import RequestError
from dlm_runtime.constraints.compiled import CompileLimits

LIMITS = CompileLimits(seconds=5)
# Finds syntax that has different meanings in Python and Rust: nested sets and set operations, \Z,
# octal escapes, counts without a lower bound, braces that are not a count, and flags that only one
# of the two engines supports. Expressions with such syntax are not compared with Python.
OTHER_SYNTAX = re.compile(
    r"\[\^?\]?[^]]*\[|&&|--|~~|\\[ZzbBhHvKXQEpPRGCu<>0-9]|\{,|\{(?!\d+(,\d*)?\})|\(\?[a-zA-Z-]*[^imsx:)]|\$."
)
REASONS = (
    "look-around",
    "a back-reference",
    "no meaning",
    "nothing to repeat",
    "no text matches it",
    "a flag that is none of",
    "may be no UTF-8",
    "more than",
)
# Finds classes and flags whose meaning for non-ASCII characters depends on the engine. Engines use
# different versions of Unicode and different case folding.
BEYOND_ASCII = re.compile(r"\\[wWsSdD]|\(\?[a-z]*i")


@dataclass
class Report:
    """The result for one test suite.

    ``counts`` contains the numbers of tested expressions and texts. ``mismatches`` contains the
    texts for which the engine and the automaton disagree.
    """

    counts: Counter[str] = field(default_factory=Counter)
    mismatches: list[tuple[str, str, str]] = field(default_factory=list)

    def compiled(self, expression: str) -> ByteAutomaton | None:
        self.counts["patterns"] += 1
        try:
            made = byte_automaton(expression, LIMITS)
        except RequestError as err:
            reason = next((reason for reason in REASONS if reason in str(err)), str(err)[:60])
            self.counts[f"rejected: {reason}"] += 1
            return None
        self.counts["accepted"] += 1
        return made

    def check(self, expression: str, text: str, is_accepted: bool, is_right: bool) -> None:
        if is_accepted != is_right:
            self.mismatches.append((expression, text, "accepted" if is_accepted else "rejected"))

    def check_drawn(
        self, expression: str, made: ByteAutomaton, engine: re.Pattern[str], seed: int
    ) -> None:
        """Check that the engine matches random texts that the automaton accepts.

        Texts with the characters U+001C to U+001F are skipped if the expression contains ``\\S``,
        because only Python considers these characters white space.
        """
        is_ascii = BEYOND_ASCII.search(expression) is not None
        for text in drawn_texts(made, random.Random(seed), 40, is_ascii):
            if r"\S" in expression and re.search("[\x1c-\x1f]", text):
                continue
            self.counts["texts drawn"] += 1
            self.check(expression, text, True, engine.fullmatch(text) is not None)

    def show(self) -> None:
        for name, count in sorted(self.counts.items()):
            print(f"{count:6} {name}")
        print(f"{len(self.mismatches):6} mismatches", *self.mismatches[:20], sep="\n")


def python_pattern(expression: str) -> re.Pattern[str] | None:
    """Compile an expression with Python.

    Returns None if the expression is invalid in Python, or if its meaning in Rust differs.
    """
    if OTHER_SYNTAX.search(expression):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return re.compile(expression)
    except (re.error, Warning, OverflowError):
        return None


@pytest.mark.parametrize(
    ("every", "fewest"), [(20, 100), pytest.param(1, 3000, marks=pytest.mark.slow)]
)
def test_expressions_of_cpythons_suite(every: int, fewest: int) -> None:
    suite = pytest.importorskip("test.re_tests", reason="this Python comes without its tests")
    report, subjects = Report(), dict[str, set[str]]()
    for case in suite.tests:
        if isinstance(case[0], str) and isinstance(case[1], str):
            subjects.setdefault(case[0], set()).add(case[1])
    for number, (expression, texts) in enumerate(list(subjects.items())[::every]):
        made, engine = report.compiled(expression), python_pattern(expression)
        if made is None:
            continue
        if engine is None:
            report.counts["accepted, without an oracle"] += 1
            continue
        report.check_drawn(expression, made, engine, number)
        # Test the texts of the suite, and the parts of these texts that match.
        candidates = {
            part
            for text in texts
            for part in (text, *(found[0] for found in engine.finditer(text)))
        }
        for text in candidates | {"", "a", "ab", "abc", "abcd", "a\nb", "\n"}:
            if "\0" not in text and (text.isascii() or not BEYOND_ASCII.search(expression)):
                report.counts["texts of the suite"] += 1
                report.check(
                    expression,
                    text,
                    made.matches(text.encode()),
                    engine.fullmatch(text) is not None,
                )
    report.show()
    assert not report.mismatches
    assert report.counts["texts drawn"] >= fewest


@dataclass(frozen=True)
class RustCase:
    """One test case of Rust's suite.

    ``spans`` contains the start and end of matches, in bytes.
    """

    name: str
    expression: str
    haystack: bytes
    spans: tuple[tuple[int, int], ...]
    # If ``is_all`` is true, ``spans`` contains all matches. Otherwise, it contains the matches that
    # a search reports.
    is_all: bool

    @property
    def looks_around(self) -> bool:
        return re.search(r"[$^]|\\[AzbB]", self.expression) is not None


def rust_cases(folder: Path) -> Iterator[RustCase]:
    tomllib = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    never = {"bounds", "line-terminator", "anchored", "match-limit"}
    for path in sorted(folder.rglob("*.toml")):
        # regex-lite.toml is for another engine, whose character classes only contain ASCII.
        if path.stem == "regex-lite":
            continue
        for test in tomllib.loads(path.read_text(encoding="utf-8")).get("test", []):
            expression = test["regex"]
            if (
                not isinstance(expression, str)
                or never & test.keys()
                or not test.get("unicode", True)
            ):
                continue
            if not test.get("compiles", True) or test.get("search-kind") == "earliest":
                continue
            haystack = test["haystack"].encode()
            if test.get("unescape"):
                haystack = _unescaped(test["haystack"])
            spans = tuple(_span(found) for found in test["matches"])
            flag = "(?i)" if test.get("case-insensitive") else ""
            is_all = test.get("search-kind") == "overlapping" and test.get("match-kind") == "all"
            yield RustCase(
                f"{path.stem}/{test['name']}", flag + expression, haystack, spans, is_all
            )


def _unescaped(text: str) -> bytes:
    return re.sub(rb"\\(?:x([0-9A-Fa-f]{2})|(.))", _byte, text.encode(), flags=re.DOTALL)


def _byte(found: re.Match[bytes]) -> bytes:
    if found[1]:
        return bytes([int(found[1], 16)])
    return {b"n": b"\n", b"r": b"\r", b"t": b"\t", b"0": b"\0"}.get(found[2], found[2])


def _span(found: Any) -> tuple[int, int]:
    if isinstance(found, dict):
        found = found.get("span", found.get("spans"))
    first = found[0]
    start, end = found if isinstance(first, int) else first
    return int(start), int(end)


def _is_text(text: bytes) -> bool:
    try:
        return "\0" not in text.decode()
    except UnicodeDecodeError:
        return False


@pytest.mark.parametrize(
    ("every", "fewest"), [(20, 10), pytest.param(1, 300, marks=pytest.mark.slow)]
)
def test_expressions_of_rusts_suite(every: int, fewest: int) -> None:
    """The automaton must accept exactly the texts that match completely according to the suite.

    If an expression has the same meaning in Python and Rust, Python must also match random texts
    that the automaton accepts.
    """
    folder = os.environ.get("DLM_REGEX_TESTDATA")
    if folder is None:
        pytest.skip("$DLM_REGEX_TESTDATA does not name the testdata of Rust's regex crate")
    report, made_of = Report(), dict[str, ByteAutomaton | None]()
    for number, case in enumerate(list(rust_cases(Path(folder)))[::every]):
        if case.expression not in made_of:
            made = made_of[case.expression] = report.compiled(case.expression)
            engine = python_pattern(case.expression)
            if made is not None and engine is not None:
                report.check_drawn(case.expression, made, engine, number)
            elif made is not None:
                report.counts["accepted, by the suite's matches alone"] += 1
        made = made_of[case.expression]
        if made is None:
            continue
        known = dict[bytes, bool]()
        whole = (0, len(case.haystack))
        if whole in case.spans or case.is_all or not case.spans:
            known[case.haystack] = whole in case.spans
        if not case.looks_around:
            known |= {case.haystack[start:end]: True for start, end in case.spans}
        for text, is_match in known.items():
            if _is_text(text):
                report.counts["texts of the suite"] += 1
                report.check(case.expression, text.decode(), made.matches(text), is_match)
    report.show()
    assert not report.mismatches
    assert report.counts["texts of the suite"] >= fewest
