"""Tests of the trained second demo.

The second demo is block-causal, and turns a command with several requests into a list of calls.
"""

from __future__ import annotations

import itertools
import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from denoisers import load

import dlm_runtime
from dlm_export.network import reference
from dlm_runtime import Bundle

EXAMPLES = Path(__file__).parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES / "demo"))

CHECKPOINT = EXAMPLES / "demo-several"
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

    result = evaluate(lists, HELD_OUT[:60], preset="sdar")
    assert sum(result["right"]["all"]) / 60 >= MATCH_FLOOR
    assert max(result["nfe"]) <= ROOM


def test_answers_by_the_models_are_typed_and_right(
    lists: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from calls import Calls

    monkeypatch.setenv("DLM_CACHE_DIR", str(tmp_path))
    right = 0
    for row in HELD_OUT[:40]:
        out = lists.generate(prompt=row["prompt"], schema=Calls)
        answer = Calls.model_validate_json(out.text or "")
        right += answer.model_dump(exclude_none=True) == json.loads(row["completion"])
    assert right / 40 >= MATCH_FLOOR


def test_constrained_lists_are_valid_and_written_a_call_a_line(
    lists: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from constrained import answer_schema
    from jsonschema import Draft202012Validator
    from referencing import Registry

    monkeypatch.setenv("DLM_CACHE_DIR", str(tmp_path))
    schema = answer_schema([json.loads(row["completion"]) for row in HELD_OUT])
    constraint = lists.constraint(schema=schema)
    for row, limits in zip(
        HELD_OUT[:10],
        itertools.cycle(({}, {}, {"max_steps": 3}, {"temperature": 0.8})),
        strict=False,
    ):
        out = lists.generate(
            prompt=row["prompt"],
            max_new_tokens=ROOM,
            preset="sdar",
            constraint=constraint,
            **limits,
        )
        assert out.text is not None
        Draft202012Validator(schema, registry=Registry()).validate(json.loads(out.text))
        assert out.text.startswith('[\n{"name":"')
        assert out.text.endswith("}\n]")


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
        for row in HELD_OUT[:3]:
            out = bundle.generate(prompt=row["prompt"], schema=schema, json_layout="compact")
            assert out.constraint_log_prob_loss > out.completion_tokens
    assert [each.category for each in told] == [dlm_runtime.ConstraintWarning]
    assert "the bundle says 'lines'" in str(told[0].message)


def test_every_loop_equals_the_reference_on_real_predictions(lists: Bundle) -> None:
    denoiser = load(CHECKPOINT)
    assert lists.tokenizer is not None
    for line in HELD_OUT[:2]:
        tokens = lists.tokenizer.encode(line["prompt"])
        for preset, changes in (
            ("sdar", {}),
            ("sdar", {"store": "reuse"}),
            ("sdar", {"cache": "block-dual", "sub_block_length": 4}),
            ("sdar", {"sub_block_length": 8, "threshold": 0.99}),
            ("llada2.1", {}),
        ):
            policy = lists.policy(preset, **changes)
            wanted = reference.generate(denoiser, tokens, policy, 96)
            out = lists.generate(tokens=tokens, max_new_tokens=96, preset=preset, **changes)
            assert (out.tokens, out.nfe) == (wanted.tokens, wanted.nfe), (preset, changes)


def test_the_exact_cache_changes_no_list(lists: Bundle) -> None:
    for line in HELD_OUT[:8]:
        cached = lists.generate(prompt=line["prompt"], max_new_tokens=ROOM, preset="sdar")
        plain = lists.generate(
            prompt=line["prompt"], max_new_tokens=ROOM, preset="sdar", cache="none"
        )
        assert cached.tokens == plain.tokens
        assert cached.passes["denoise"] == plain.nfe
        assert cached.passes["store"] > 0
