"""Tests of the options of requests.

The tests cover wrong values, type annotations, stored constraints, and tool calls in incomplete
texts.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from constraints import compiled, made_up_vocabulary
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dlm_runtime
from dlm_runtime import (
    Bundle,
    CallbackPass,
    CallFormat,
    Csv,
    DenoiserInfo,
    DlmError,
    JsonLines,
    Layout,
    Policy,
    RequestError,
)
from dlm_runtime.abi import native as _native
from dlm_runtime.constraints import compiled as compiling
from dlm_runtime.constraints.compiled import CompileLimits
from dlm_runtime.generation.request import OPTION_NAMES, RequestOptions

HALF = "\ud800"
# HUGE is larger than the largest double. LONGER has more digits than Python converts to a string.
HUGE, LONGER = 10**400, 10**5000
LOCK = {
    "type": "object",
    "properties": {"door": {"type": "string"}, "locked": {"type": "boolean"}},
    "required": ["door", "locked"],
}
CALLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("open", "shut")
]
SCHEMA = {
    "type": "object",
    "properties": {"day": {"enum": ["monday", "friday"]}},
    "required": ["day"],
}


@pytest.fixture(scope="module")
def unrun(demo_bundle: Path) -> Iterator[Bundle]:
    """The demo, opened without an engine.

    Without an engine, a request with valid options fails before its first pass.
    """
    with dlm_runtime.open(demo_bundle, engine="none") as bundle:
        yield bundle


@pytest.fixture(scope="module")
def demo(demo_bundle: Path) -> Iterator[Bundle]:
    with dlm_runtime.open(demo_bundle, threads=1) as bundle:
        yield bundle


# ---- Wrong values ----

WRONG: dict[str, list[Any]] = {
    "max_new_tokens": [-1, 1.5, "x", [1], HUGE, LONGER, object()],
    "new_tokens": [-1, 1.5, "x", [1], HUGE, LONGER, object()],
    "preset": [5, b"llada", [], "lla\0da", "llada\0", HALF],
    "effort": [5, b"low", [], "low\0", HALF],
    "steps": [-1, 1.5, "x", None, HUGE, LONGER],
    "max_steps": [-1, 1.5, "x", None, HUGE],
    "prefix_group": [-1, 1.5, "x", None, HUGE],
    "top_log_probs": [-1, 21, 1.5, "x", None, True, HUGE],
    "deadline_ms": [HUGE, -HUGE, "soon", None, [], -1, float("nan"), float("inf"), b"1"],
    "stop_strings": [5, None, "ab", b"ab", [""], [5], {"a": 1}, object()],
    "prefix": [5, None, b"a", HALF, "a" + HALF, ["a"]],
    "constraint": [5, "x", object(), {"a": 1}],
    "schema": [
        5,
        "x",
        HALF,
        [1],
        object(),
        {1j: 2},
        {"enum": [HALF]},
        {"enum": [float("nan")]},
        {"enum": [LONGER]},
        b"{}",
    ],
    "regex": [5, b"a", HALF, ["a"], {"a": 1}],
    "grammar": [5, b"a", HALF, ["a"], "root ::=(", "root ::= root", {"a": 1}],
    "json_lines": [
        5,
        HALF,
        [1],
        object(),
        b"{}",
        JsonLines(5),
        JsonLines({}, -1),
        JsonLines({}, 2, 1),
    ],
    "csv": [
        5,
        HALF,
        {},
        Csv(SCHEMA, delimiter="x"),
        Csv(SCHEMA, header=5),
        Csv(SCHEMA, max_rows="x"),
    ],  # type: ignore[arg-type]
    "xml": [5, HALF, [1], object(), SCHEMA, SCHEMA | {"xml": {"name": "a b"}}, SCHEMA | {"xml": 5}],
    "enum": [5, "ab", [], [""], [5], [HALF], {"a": 1}, b"ab", object(), np.zeros((2, 2))],
    "special_tokens": [1, "yes", None, []],
    "json_object": [1, "yes", [], HUGE],
    "json_layout": [
        "compact",
        "wide",
        5,
        [],
        Layout(";"),
        Layout(",", "="),
        Layout(indent=-1),
        Layout(indent="a"),
        Layout(5),
    ],  # type: ignore[arg-type]
    "tools": [
        5,
        "x",
        [],
        [5],
        [{}],
        {"a": 1},
        [{"type": "function", "function": {"name": 5}}],
        object(),
    ],
    "tool_choice": [5, "nobody", [], None, LONGER],
    "parallel_tool_calls": [1, "yes", []],
    "max_depth": [-1, HUGE, 1.5, "x", object()],
    "any_order": [1, "yes", []],
    "more_properties": [1, "yes", []],
    "call_format": [5, "odd", [], {}, object()],
    # A text of the prompt is not a chat, so the template's variables are refused.
    "template_options": [5, "x", None, [("a", 1)], {"enable_thinking": False}],
    "seed": [-1, HUGE, 1.5, "x", None, object()],
    "threshold": ["x", None, HUGE, [], object()],
    "temperature": ["x", None, HUGE, [], np.zeros(3), -1.0],
    "score": [5, None, "x", "confidence\0", HALF, []],
    "block_length": [1 << 40, HUGE, "x", 1.5],
    "cancel": [5, "now", object(), [threading.Event()]],
    "prompt": [5, b"a", ["a"], HALF, LONGER],
    "tokens": [5, "ab", [None], ["a"], [1.5], [HUGE], [LONGER], {"a": 1}, object()],
    "chat": [
        5,
        "hello",
        [],
        [5],
        [{"role": "user"}],
        {"role": "user", "content": "a"},
        [{"role": "user", "content": HALF}],
    ],
}
NEEDS: dict[str, dict[str, Any]] = {
    name: {"tools": CALLS} for name in ("tool_choice", "parallel_tool_calls", "call_format")
} | {name: {"json_object": True} for name in ("max_depth", "any_order", "more_properties")}


def request_with(name: str, value: Any) -> dict[str, Any]:
    given = {} if name in ("prompt", "tokens", "chat") else {"prompt": "hi"}
    return given | NEEDS.get(name, {}) | {name: value}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_value_of_an_option_is_refused_in_a_sentence(demo: Bundle, name: str) -> None:
    for value in WRONG[name]:
        for generate in (demo.generate, lambda **request: list(demo.stream(**request))):
            with pytest.raises(RequestError) as raised:
                generate(**request_with(name, value))
            assert name.removesuffix("s") in str(raised.value)


def test_every_option_is_in_the_table() -> None:
    assert set(OPTION_NAMES) <= set(WRONG)


@pytest.mark.parametrize(
    ("call", "sentence"),
    {
        "text": (lambda b: b.infill(5), "text = 5 is not a text"),
        "lengths": (lambda b: b.infill("a<mask>b", lengths=LONGER), "not a length of a hole"),
        "constrain_from": (
            lambda b: b.infill("a<mask>b", constrain_from="x", regex="a"),
            "constrain_from = 'x' is not",
        ),
        "constrain_from, a float": (
            lambda b: b.infill("a<mask>b", constrain_from=1.5, regex="a"),
            "constrain_from = 1.5",
        ),
        "prompts": (lambda b: b.generate_batch(prompts=5), "prompts? = 5: give a list"),
        "policies": (
            lambda b: b.generate_batch(prompts=["a"], policies=5),
            "policies = 5: give a list",
        ),
        "policies of no fields": (
            lambda b: b.generate_batch(prompts=["a"], policies=[5]),
            "policies: 5 is not a dict",
        ),
        "policies by number": (
            lambda b: b.generate_batch(prompts=["a"], policies=[{5: 6}]),
            "unknown policy field 5",
        ),
        "cancels": (
            lambda b: b.generate_batch(prompts=["a"], cancel=[5]),
            "cancel = 5: give a threading.Event",
        ),
        "cancels that are none": (
            lambda b: b.generate_batch(prompts=["a"], cancel=5),
            "cancel = 5: give a list",
        ),
        "max_batch": (lambda b: b.generate_batch(prompts=["a"], max_batch="x"), "max_batch = 'x'"),
        "max_depth": (
            lambda b: b.constraint(json_object=True, max_depth="x"),
            "max_depth = 'x' is not an integer",
        ),
        "a deep one": (
            lambda b: b.constraint(json_object=True, max_depth=HUGE),
            "max_depth = .* is not an integer",
        ),
        "before": (
            lambda b: b.constraint(regex="a", before=HALF),
            "before = .* half of a surrogate pair",
        ),
        "behind": (lambda b: b.constraint(regex="a", behind=5), "behind = 5 is not a text"),
        "limits": (lambda b: b.constraint(regex="a", limits=5), "limits = 5: give CompileLimits"),
        "cache_dir": (
            lambda b: b.constraint(regex="a", cache_dir=5),
            "cache_dir = 5 is not the path",
        ),
        "cache_dir with a NUL": (
            lambda b: b.constraint(regex="a", cache_dir="a\0b"),
            "cache_dir = .* is not the path",
        ),
        "tools": (lambda b: b.constraint(tools=CALLS), "or the result of Bundle.tools"),
        "a layout of a regex": (
            lambda b: b.constraint(regex="a", json_layout="lines"),
            "not for regex: leave it out",
        ),
        "a layout of none": (
            lambda b: b.constraint(json_object=True, json_layout="wide"),
            "not one of compact, spaced",
        ),
        "CallFormat": (lambda _: CallFormat(before=5), "call_format: before = 5 is not a text"),  # type: ignore[arg-type]
        "cache_bytes": (
            lambda b: b.scheduler(cache_bytes="x"),
            "cache_bytes = 'x' is not an integer",
        ),
        "cache_bytes, negative": (
            lambda b: b.scheduler(cache_bytes=-1),
            "cache_bytes = -1 is not an integer",
        ),
        "max_pass_ms": (
            lambda b: b.scheduler(max_pass_ms=HUGE),
            "max_pass_ms = .* is not a number of milliseconds",
        ),
        "cost": (lambda b: b.scheduler(cost=5), "cost = 5: give a PassCost"),
    }.values(),
)
def test_a_wrong_argument_of_other_calls_is_refused(
    unrun: Bundle, call: Callable[[Any], Any], sentence: str
) -> None:
    with pytest.raises(RequestError, match=sentence):
        call(unrun)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.binary(max_size=3) | st.complex_numbers()
    | st.sampled_from([HALF, HUGE, -HUGE, object(), int, lambda: 5, np.zeros((2, 2)), CompileLimits(), CallFormat()]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3),
    max_leaves=5,
)  # fmt: skip


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from([*WRONG, *(each.name for each in fields(Policy))]), value=VALUES)
def test_no_value_of_an_option_raises_another_error_than_ours(
    unrun: Bundle, name: str, value: Any
) -> None:
    """A value that allows only one text, such as an enum of one string, needs no pass and no error."""
    with contextlib.suppress(DlmError):
        unrun.generate(
            **request_with(name, value), **({"max_steps": 1} if name != "max_steps" else {})
        )


def test_a_runtime_library_that_is_none_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "library.so"
    path.write_text("no library")
    monkeypatch.setenv("DLM_RUNTIME_LIBRARY", str(path))
    with pytest.raises(
        dlm_runtime.EngineError, match=r"library.so cannot be loaded .*set DLM_RUNTIME_LIBRARY"
    ):
        _native.library.__wrapped__()


# ---- Depth ----

NESTED = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"n": {"anyOf": [{"$ref": "#/$defs/node"}, {"const": 1}]}},
            "required": ["n"],
            "additionalProperties": False,
        }
    },
}


def test_max_depth_of_a_request_limits_a_recursive_schema(demo: Bundle) -> None:
    request: dict[str, Any] = {"prompt": "kitchen", "schema": NESTED, "prefix": '{"n":{'}
    assert demo.generate(**request, max_depth=1).text == '{"n":{"n":1}}'
    with pytest.raises(RequestError, match="no text of the constraint starts with"):
        demo.generate(**request, max_depth=0)
    with pytest.raises(RequestError, match="max_depth is for schema, grammar, json_object"):
        demo.generate(prompt="kitchen", max_depth=1)


# ---- Type checkers ----


def test_type_checkers_know_every_option() -> None:
    assert set(RequestOptions.__annotations__) == {
        *OPTION_NAMES,
        *(each.name for each in fields(Policy)),
    }


@pytest.mark.slow
def test_a_type_checker_finds_a_misspelled_option(tmp_path: Path) -> None:
    file = tmp_path / "use.py"
    file.write_text(
        "import dlm_runtime\n"
        "bundle = dlm_runtime.open('x')\n"
        "bundle.generate(prompt='a', max_new_tokens=4, threshold=0.5, schema={}, tools=bundle.tools([]))\n"
        "bundle.generate(prompt='a', max_new_token=4)\n"
        "bundle.stream(prompt='a', treshold=0.5)\n"
        "bundle.infill('a', lengths=4, seed='x')\n"
        "bundle.generate_batch(prompts=['a'], stop_string=['x'])\n"
        "bundle.scheduler().submit(prompt='a', max_step=4)\n"
    )
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--config-file=",
        f"--cache-dir={tmp_path}",
        "--follow-imports=silent",
        str(file),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line.split(":")[1] for line in done.stdout.splitlines() if " error: " in line]
    assert lines == ["4", "5", "6", "7", "8"], done.stdout + done.stderr


# ---- Cached constraints ----


class Day:
    """A class with the methods of a Pydantic model."""

    @classmethod
    def model_json_schema(cls) -> dict[str, Any]:
        return SCHEMA


class Broken:
    @classmethod
    def model_json_schema(cls) -> dict[str, Any]:
        raise RuntimeError("no schema")


def test_equal_content_is_compiled_once(
    unrun: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DLM_CACHE_DIR", str(tmp_path))
    made = unrun.constraint(schema=SCHEMA)
    tools = unrun.constraint(tools=unrun.tools(CALLS))
    spaced = unrun.constraint(schema=SCHEMA, json_layout="spaced")

    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("compiled again")

    with monkeypatch.context() as patched:
        patched.setattr(compiling, "compile_content", never)
        for same in (SCHEMA, json.loads(json.dumps(SCHEMA)), Day, json.dumps(SCHEMA)):
            assert unrun.constraint(schema=same) is made
        assert unrun.constraint(tools=unrun.tools(json.loads(json.dumps(CALLS)))) is tools
        assert unrun.constraint(schema=SCHEMA, json_layout=Layout(", ", ": ")) is spaced
    turned = {
        "type": "object",
        "properties": {"b": {"const": 1}, "a": {"const": 2}},
        "required": ["a", "b"],
    }
    other = turned | {"properties": {"a": {"const": 2}, "b": {"const": 1}}}
    assert unrun.constraint(schema=turned).data != unrun.constraint(schema=other).data, (
        "the order of properties counts"
    )
    with pytest.raises(
        RequestError, match=r"schema: .*Broken.*model_json_schema\(\) failed \(no schema\)"
    ):
        unrun.constraint(schema=Broken)
    for name in ("schema", "json_lines", "csv"):
        with pytest.raises(RequestError, match=f"{name}: .*not JSON"):
            unrun.constraint(**{name: '{"type": '})  # type: ignore[arg-type]
    rows = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}})
    of_text, of_value = (unrun.constraint(csv=each) for each in (rows, json.loads(rows)))
    assert of_text is of_value


def test_text_before_the_answer_is_refused_with_the_layout_in_force(unrun: Bundle) -> None:
    for layout, shape in (
        ("compact", '[{"a":1,"b":2},{}]'),
        ("spaced", '[{"a": 1, "b": 2}, {}]'),
    ):
        written = re.escape(shape.replace('"', '\\"'))
        with pytest.raises(RequestError, match=f'the JSON layout writes "{written}", and '):
            unrun.constraint(schema=SCHEMA, before="{ ", json_layout=layout)
    with pytest.raises(RequestError, match=r'though some may with "a"$'):
        unrun.constraint(regex="ab", before="ac")


# ---- Tools ----


def test_tools_that_were_made_before_are_taken(demo: Bundle) -> None:
    made = demo.tools(CALLS)
    out = demo.generate(prompt="open it", max_new_tokens=48, preset="fast-dllm", tools=made)
    again = demo.generate(prompt="open it", max_new_tokens=48, preset="fast-dllm", tools=made)
    assert [call.name for call in out.tool_calls] in (["open"], ["shut"])
    assert out.tool_calls == again.tool_calls
    ids = [call.id for call in (*out.tool_calls, *again.tool_calls)]
    assert len(set(ids)) == len(ids)
    assert all(len(each) == 29 and each.startswith("call_") for each in ids)
    with pytest.raises(
        RequestError,
        match=r"tool_choice: these tools were made with Bundle.tools: give tool_choice there",
    ):
        demo.generate(prompt="a", tools=made, tool_choice="open")


def test_a_list_of_calls_may_have_several_unless_one_is_asked_for(unrun: Bundle) -> None:
    assert [unrun.tools(CALLS, call_format=form).is_parallel for form in ("object", "list", "lines", "tool_call")] == [
        False, True, True, False,
    ]  # fmt: skip
    assert not unrun.tools(CALLS, call_format="list", parallel_tool_calls=False).is_parallel


@pytest.mark.parametrize("limit", [{"deadline_ms": 0.001}, {"max_steps": 1, "preset": "llada"}])
def test_a_text_that_is_not_decided_has_no_tool_calls(demo: Bundle, limit: dict[str, Any]) -> None:
    lock = [{"type": "function", "function": {"name": "lock_door", "parameters": LOCK}}]
    request = {
        "prompt": "lock the front door",
        "max_new_tokens": 48,
        "tools": lock,
        "tool_choice": "lock_door",
    }
    *_, event = demo.stream(**request, **limit)
    with demo.scheduler() as scheduler:
        scheduled = scheduler.submit(**request, **limit).result()
    batched = {name: value for name, value in request.items() if name != "prompt"}
    outs = [
        demo.generate(**request, **limit),
        *demo.generate_batch(prompts=[request["prompt"]], **batched, **limit),
    ]
    for out in (*outs, event.result, scheduled):
        assert out is not None
        assert out.finish in ("deadline", "steps")
        assert json.loads(out.text or "")["name"] == "lock_door", "the text is completed to a call"
        assert out.tool_calls == []
    assert demo.generate(**request).tool_calls, "the whole text is decided"


# ---- The loss of a constraint ----

LETTERS = made_up_vocabulary(160, (7, 39))


def uneven(p: CallbackPass) -> None:
    """A denoiser whose predictions only depend on the position."""
    for i, row in enumerate(p.score_rows):
        logits = logits_of(int(p.position_ids[row]))
        order = np.argsort(-logits, kind="stable")[:2]
        probs = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
        p.top_tokens[i], p.top_probs[i] = order, probs[order]
        if p.entropy is not None:
            p.entropy[i] = 0
        if p.logits is not None:
            p.logits[i] = logits


def logits_of(position: int) -> np.ndarray:
    logits: np.ndarray = np.random.default_rng(position).normal(0, 3, 160).astype(np.float32)
    logits[39] = -50  # the logit of the mask token
    return logits


@pytest.mark.parametrize("select", [{}, {"temperature": 1.0}])
def test_the_log_probability_that_a_constraint_loses_is_that_of_its_tokens(
    select: dict[str, Any],
) -> None:
    automaton = compiled("[ab]{6}", LETTERS, 160)
    constraint = automaton.constraint
    info = DenoiserInfo(160, 39, 512, eos_token_ids=(7,), has_cache=False)
    request: dict[str, Any] = {"max_new_tokens": 8, "block_length": 8, "stop": "none", **select}
    with (
        warnings.catch_warnings(record=True) as told,
        dlm_runtime.from_callback(info, uneven) as bundle,
    ):
        warnings.simplefilter("always")
        outs = [bundle.generate(tokens=[1, 2], constraint=constraint, **request)]
        outs += bundle.generate_batch(tokens=[[1, 2], [1, 2]], constraint=constraint, **request)
        *_, event = bundle.stream(tokens=[1, 2], constraint=constraint, **request)
        with bundle.scheduler() as scheduler:
            outs.append(scheduler.submit(tokens=[1, 2], constraint=constraint, **request).result())
        free = bundle.generate(tokens=[1, 2], **request)
        tokens = bundle._constraints.tokens
    assert [each.category for each in told] == [dlm_runtime.ConstraintWarning], "once per bundle"
    assert re.match(
        r"the constraint lost \d+\.\d nats of log probability over \d+ tokens: ",
        str(told[0].message),
    )
    assert event.result is not None
    assert tokens == sum(out.completion_tokens for out in (*outs, event.result)), (
        "of constrained requests alone"
    )
    for out in (*outs, event.result):
        # The longest text of the constraint does not reach the last two positions of the canvas.
        # These positions are filled before the first pass, so they do not count for the loss.
        rows = [logits_of(at) for at in range(2, 8)]
        wanted = sum(
            float(row.max()) - float(row[token])
            for row, token in zip(rows, out.tokens[2:8], strict=True)
        )
        assert wanted > 1
        assert out.constraint_log_prob_loss == pytest.approx(wanted, rel=1e-4)
    assert free.constraint_log_prob_loss == 0
