"""Tests of the trained second demo.

The second demo is block-causal, and turns a command with several requests into a list of calls.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

import dlm_runtime
from dlm_runtime import Bundle

EXAMPLES = Path(__file__).parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES / "demo"))

HELD_OUT = [
    json.loads(line)
    for line in (EXAMPLES / "demo" / "heldout-several.jsonl").read_text().splitlines()
]
ROOM = 192  # in tokens; the longest list takes 129
MATCH_FLOOR = 0.75  # examples/README.md states the share for 300 commands


@pytest.fixture(scope="module")
def lists(several_bundle: Path) -> Iterator[Bundle]:
    with dlm_runtime.open(several_bundle, threads=1) as bundle:
        yield bundle


def test_held_out_commands_become_the_right_lists(lists: Bundle) -> None:
    from evaluate import evaluate

    result = evaluate(lists, HELD_OUT[:30], preset="sdar")
    assert sum(result["right"]["all"]) / 30 >= MATCH_FLOOR
    assert max(result["nfe"]) <= ROOM


def test_answers_by_the_models_are_typed_and_right(
    lists: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from calls import Calls

    monkeypatch.setenv("DLM_CACHE_DIR", str(tmp_path))
    right = 0
    for row in HELD_OUT[:20]:
        out = lists.generate(prompt=row["prompt"], schema=Calls)
        answer = Calls.model_validate_json(out.text or "")
        right += answer.model_dump(exclude_none=True) == json.loads(row["completion"])
    assert right / 20 >= MATCH_FLOOR


def test_a_schema_and_tools_follow_what_the_denoiser_was_trained_on(
    lists: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from constrained import answer_schema, is_answer, tools_of
    from evaluate import same_call

    monkeypatch.setenv("DLM_CACHE_DIR", str(tmp_path))
    assert (lists.json_layout, lists.call_format) == ("lines", "lines")
    schema = answer_schema([json.loads(row["completion"]) for row in HELD_OUT])
    tools, rows = tools_of(schema), HELD_OUT[:10]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        listed = [lists.generate(prompt=row["prompt"], schema=schema) for row in rows]
        called = [
            lists.generate(prompt=row["prompt"], tools=tools, tool_choice="required")
            for row in rows
        ]
    assert (
        sum(same_call(out.text, row["completion"]) for out, row in zip(listed, rows, strict=True))
        >= 8
    )
    assert (
        sum(is_answer(out, row["completion"]) for out, row in zip(called, rows, strict=True)) >= 8
    )
    assert all((out.text or "").startswith('[\n{"name":"') for out in listed)
    assert all((out.text or "").endswith("}\n]") for out in listed)
    loss = sum(out.constraint_log_prob_loss for out in (*listed, *called))
    assert loss / sum(out.completion_tokens for out in (*listed, *called)) < 0.1


def test_a_constraint_in_another_layout_warns_once(
    several_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from constrained import answer_schema

    monkeypatch.setenv("DLM_CACHE_DIR", str(tmp_path))
    schema = answer_schema([json.loads(row["completion"]) for row in HELD_OUT])
    with (
        dlm_runtime.open(several_bundle, threads=1) as bundle,
        warnings.catch_warnings(record=True) as told,
    ):
        warnings.simplefilter("always")
        for row in HELD_OUT[:2]:
            out = bundle.generate(prompt=row["prompt"], schema=schema, json_layout="compact")
            assert out.constraint_log_prob_loss > out.completion_tokens
    assert [each.category for each in told] == [dlm_runtime.ConstraintWarning]
    assert "the bundle says 'lines'" in str(told[0].message)
