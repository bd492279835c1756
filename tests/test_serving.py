"""Tests of ``dlm-export serve`` with plain HTTP requests to a real process.

tests/test_serving_clients.py tests the server with the official clients.
"""

from __future__ import annotations

import json
import re
import shlex
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving_process import Served, serving

import dlm_runtime

httpx = pytest.importorskip("httpx")
pytest.importorskip("uvicorn")

COMMAND = "turn on the kitchen lights"
MESSAGES = [{"role": "user", "content": COMMAND}]
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def served(demo_bundle: Path) -> Iterator[Served]:
    with serving(demo_bundle, "--name", f"other={demo_bundle}") as process:
        yield process


@pytest.fixture(scope="module")
def closed(demo_bundle: Path) -> Iterator[Served]:
    options = ("--allow-host", "own.example", "--cors-origin", "https://app.example", "--no-log")
    with serving(demo_bundle, *options) as process:
        yield process


@pytest.fixture(scope="module")
def bundle(demo_bundle: Path) -> Iterator[dlm_runtime.Bundle]:
    with dlm_runtime.open(demo_bundle) as opened:
        yield opened


def chat(served: Served, **fields: Any) -> Any:
    body = {"model": served.model, "messages": MESSAGES} | fields
    return served.client.post("/v1/chat/completions", json=body)


def events(served: Served, path: str, **fields: Any) -> list[Any]:
    """Send a request with ``stream`` and return the events of the answer.

    The last event must be ``[DONE]``. The result does not include this event.
    """
    body = {"model": served.model, "stream": True} | fields
    with served.client.stream("POST", path, json=body) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


def schema_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def contents(found: list[Any]) -> list[str]:
    return [
        choice["delta"]["content"]
        for event in found
        for choice in event["choices"]
        if choice["delta"].get("content")
    ]


# ---- Answers ----


def test_a_chat_has_the_text_tokens_and_passes_of_the_runtime(
    served: Served, bundle: dlm_runtime.Bundle
) -> None:
    expected = bundle.generate(chat=MESSAGES)
    found = chat(served).json()
    assert found["object"] == "chat.completion"
    assert found["choices"][0]["message"]["content"] == expected.text
    assert found["choices"][0]["finish_reason"] == "stop"
    usage = found["usage"]
    assert usage["prompt_tokens"] == expected.prompt_tokens
    assert usage["completion_tokens"] == expected.completion_tokens
    assert usage["total_tokens"] == expected.prompt_tokens + expected.completion_tokens
    assert usage["denoising_passes"] == expected.nfe


def test_the_deltas_of_a_stream_are_the_text(served: Served) -> None:
    whole = chat(served).json()["choices"][0]["message"]["content"]
    found = events(
        served,
        "/v1/chat/completions",
        messages=MESSAGES,
        stream_options={"include_usage": True},
        dlm={"policy": {"commit": "static", "steps_per_block": 8}},
    )
    assert found[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(contents(found)) == whole
    assert found[-1]["choices"] == []
    assert found[-1]["usage"]["denoising_passes"] > 1
    assert all(event["usage"] is None for event in found[:-1])
    reasons = [event["choices"][0]["finish_reason"] for event in found[:-1]]
    assert reasons == [None] * (len(reasons) - 1) + ["stop"]


@pytest.mark.parametrize("diffusing", [False, True])
def test_each_chunk_can_contain_the_counts_so_far(served: Served, diffusing: bool) -> None:
    found = events(
        served,
        "/v1/chat/completions",
        messages=MESSAGES,
        n=2,
        diffusing=diffusing,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
        dlm={"policy": {"commit": "static", "steps_per_block": 8}},
    )
    counts = [event["usage"] for event in found]
    for name in ("completion_tokens", "denoising_passes"):
        so_far = [each[name] for each in counts]
        assert so_far[0] == 0
        assert so_far == sorted(so_far)
        assert len(set(so_far)) > 2
    assert {each["prompt_tokens"] for each in counts} == {counts[-1]["prompt_tokens"]}
    assert found[-1]["choices"] == []
    assert counts[-2] == counts[-1]


def test_a_denoising_stream_replaces_its_text_until_all_is_decided(served: Served) -> None:
    whole = chat(served).json()["choices"][0]["message"]["content"]
    found = events(
        served,
        "/v1/chat/completions",
        messages=MESSAGES,
        diffusing=True,
        dlm={"policy": {"commit": "static", "steps_per_block": 8}},
    )
    snapshots = [event for event in found if "diffusion_meta" in event]
    progress = [event["diffusion_meta"]["diffusion_progress"] for event in snapshots]
    assert len(snapshots) > 2
    assert progress == sorted(progress)
    assert progress[-1] == 1
    assert "░" in snapshots[0]["choices"][0]["delta"]["content"]
    assert snapshots[-1]["choices"][0]["delta"]["content"] == whole
    assert snapshots[-1]["diffusion_meta"]["diffusion_content"] == whole
    assert found[-1]["choices"][0]["delta"] == {}


def test_several_answers_differ_in_their_seeds_only(served: Served) -> None:
    # The demo's probabilities are close to 1, so a temperature of 2 would not change its answers.
    sampling = {"dlm": {"policy": {"temperature": 30.0}}, "seed": 5, "max_tokens": 16}
    first = chat(served, n=3, **sampling).json()["choices"]
    again = chat(served, n=3, **sampling).json()["choices"]
    assert [choice["index"] for choice in first] == [0, 1, 2]
    assert first == again
    assert len({choice["message"]["content"] for choice in first}) > 1
    alone = chat(served, **(sampling | {"seed": 6})).json()["choices"][0]
    assert alone["message"] == first[1]["message"]


def test_log_probabilities_are_those_of_the_runtime(
    served: Served, bundle: dlm_runtime.Bundle
) -> None:
    expected = bundle.generate(chat=MESSAGES)
    found = chat(served, logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert len(found) == expected.completion_tokens
    values = expected.log_probs[expected.prompt_tokens :]
    assert [each["logprob"] for each in found] == pytest.approx(values[: len(found)], abs=1e-5)
    assert "".join(each["token"] for each in found) == expected.text
    chunks = events(served, "/v1/chat/completions", messages=MESSAGES, logprobs=True)
    streamed = [choice["logprobs"] for chunk in chunks for choice in chunk["choices"]]
    assert streamed[:-1] == [None] * (len(streamed) - 1)
    assert streamed[-1]["content"] == found


@pytest.mark.parametrize("count", [0, 1, 20])
def test_alternatives_are_those_of_the_runtime(
    served: Served, bundle: dlm_runtime.Bundle, count: int
) -> None:
    expected = bundle.generate(chat=MESSAGES, top_log_probs=count)
    assert bundle.tokenizer is not None
    response = chat(served, logprobs=True, top_logprobs=count)
    found = response.json()["choices"][0]["logprobs"]["content"]
    for at, each in enumerate(found, start=expected.prompt_tokens):
        wanted = expected.top_log_probs[at] if count else []
        texts = [bundle.tokenizer.token_text(token) for token, _ in wanted]
        assert [other["token"] for other in each["top_logprobs"]] == texts
        values = [other["logprob"] for other in each["top_logprobs"]]
        assert values == pytest.approx([value for _, value in wanted], abs=1e-4)
        assert all(bytes(o["bytes"]).decode() == o["token"] for o in each["top_logprobs"])


def test_a_completion_has_the_alternatives_of_each_token(
    served: Served, bundle: dlm_runtime.Bundle
) -> None:
    body = {"model": served.model, "prompt": COMMAND, "max_tokens": 8}
    found = served.client.post("/v1/completions", json=body | {"logprobs": 0}).json()
    assert found["choices"][0]["logprobs"]["top_logprobs"] is None
    found = served.client.post("/v1/completions", json=body | {"logprobs": 3}).json()
    (choice,) = found["choices"]
    said = choice["logprobs"]
    assert "".join(said["tokens"]) == choice["text"]
    assert len(said["tokens"]) == found["usage"]["completion_tokens"] > 0
    for token, value, offset, others in zip(
        said["tokens"],
        said["token_logprobs"],
        said["text_offset"],
        said["top_logprobs"],
        strict=True,
    ):
        assert choice["text"].startswith(token, offset)
        assert others[token] == value
        assert 3 <= len(others) <= 4


def test_the_log_probabilities_of_a_hole_are_those_of_its_tokens(
    served: Served, bundle: dlm_runtime.Bundle
) -> None:
    expected = bundle.infill("x <mask> y", lengths=12)
    assert expected.holes[0]
    body = {"model": served.model, "prompt": "x ", "suffix": " y", "max_tokens": 12}
    found = served.client.post("/v1/completions", json=body | {"logprobs": 1}).json()
    said = found["choices"][0]["logprobs"]
    assert "".join(said["tokens"]) == found["choices"][0]["text"] == expected.holes[0]
    assert found["usage"]["completion_tokens"] == len(said["tokens"]) < 12


def test_a_limit_only_shortens_an_answer(served: Served, bundle: dlm_runtime.Bundle) -> None:
    usual = chat(served).json()["choices"][0]
    for limit in (64, 128, 256, 4096):
        assert chat(served, max_tokens=limit).json()["choices"][0] == usual
    assert usual["finish_reason"] == "stop"
    cut = chat(served, max_tokens=4).json()
    assert cut["choices"][0]["finish_reason"] == "length"
    assert cut["usage"]["completion_tokens"] == 4
    expected = bundle.generate(chat=MESSAGES, new_tokens=256)
    exact = chat(served, dlm={"new_tokens": 256}).json()["choices"][0]
    assert exact["message"]["content"] == expected.text != usual["message"]["content"]
    # A hole is no longer than the answers in training.
    hole = {"model": served.model, "prompt": "x ", "suffix": " y"}
    usual, high = (
        served.client.post("/v1/completions", json=hole | limit).json()["choices"][0]
        for limit in ({}, {"max_tokens": 4096})
    )
    assert usual == high


def test_a_stop_string_ends_the_text(served: Served) -> None:
    whole = chat(served).json()["choices"][0]["message"]["content"]
    stop = whole[len(whole) // 2 :][:3]
    found = chat(served, stop=[stop]).json()["choices"][0]
    assert found["message"]["content"] == whole[: whole.index(stop)]
    assert found["finish_reason"] == "stop"


def test_a_schema_holds(served: Served) -> None:
    schema = {
        "type": "object",
        "properties": {"room": {"enum": ["kitchen", "hall"]}, "level": {"type": "integer"}},
        "required": ["room", "level"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    found = chat(served, response_format=wanted).json()["choices"][0]["message"]["content"]
    value = json.loads(found)
    assert value["room"] in ("kitchen", "hall")
    assert isinstance(value["level"], int)


def test_a_prompt_may_be_text_or_token_ids_and_one_of_several(served: Served) -> None:
    tokens = served.client.post("/tokenize", json={"prompt": "lights", "model": "other"}).json()
    single = {"model": "other", "prompt": "lights", "max_tokens": 8}
    first = served.client.post("/v1/completions", json=single).json()
    by_id = served.client.post("/v1/completions", json=single | {"prompt": tokens["tokens"]}).json()
    both = served.client.post(
        "/v1/completions", json=single | {"prompt": ["lights", "lights"], "n": 2}
    ).json()
    assert by_id["choices"] == first["choices"]
    assert [choice["index"] for choice in both["choices"]] == [0, 1, 2, 3]
    assert {choice["text"] for choice in both["choices"]} == {first["choices"][0]["text"]}
    assert both["usage"]["prompt_tokens"] == 2 * first["usage"]["prompt_tokens"]


def test_a_hole_is_filled_as_infill_fills_it(served: Served, bundle: dlm_runtime.Bundle) -> None:
    expected = bundle.infill("turn <mask> the kitchen lights", lengths=4)
    assert expected.holes[0]
    body = {
        "model": served.model,
        "prompt": "turn ",
        "suffix": " the kitchen lights",
        "max_tokens": 4,
        "seed": 0,
    }
    for path in ("/v1/fim/completions", "/v1/completions"):
        found = served.client.post(path, json=body).json()
        assert found["object"] == "text_completion"
        assert found["choices"][0]["text"] == expected.holes[0]
        assert found["usage"]["completion_tokens"] == expected.generation.completion_tokens
        assert found["usage"]["prompt_tokens"] == expected.generation.prompt_tokens
    streamed = events(
        served, "/v1/fim/completions", **{k: v for k, v in body.items() if k != "model"}
    )
    assert "".join(e["choices"][0]["text"] for e in streamed) == expected.holes[0]


def test_special_tokens_in_a_prompt_are_ordinary_text(
    served: Served, bundle: dlm_runtime.Bundle
) -> None:
    assert bundle.tokenizer is not None
    mask = bundle.tokenizer.token_text(bundle.mask_token_id)
    body = {"model": served.model, "prompt": f"a {mask} b"}
    plain = served.client.post("/tokenize", json=body).json()["tokens"]
    special = served.client.post("/tokenize", json=body | {"special_tokens": True}).json()["tokens"]
    assert bundle.mask_token_id not in plain
    assert bundle.mask_token_id in special
    detokenized = served.client.post(
        "/detokenize", json={"model": served.model, "tokens": plain}
    ).json()
    assert detokenized["prompt"] == bundle.tokenizer.decode(plain)


# ---- Errors ----


@pytest.mark.parametrize(
    ("changes", "status", "param", "said"),
    [
        ({"model": "nobody"}, 404, "model", "does not exist"),
        ({"max_tokns": 3}, 400, "max_tokns", "does not know"),
        ({"messages": []}, 400, "messages", "at least 1"),
        ({"messages": [{"role": "king", "content": "x"}]}, 400, "messages[0].role", "input"),
        ({"messages": [{"role": "user"}]}, 400, "messages[0].content", "no text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "text": "x"}]}]},
            400,
            "messages[0].content[0]",
            "not text",
        ),
        ({"temperature": 3}, 400, "temperature", "less than or equal to 2"),
        ({"top_logprobs": 3}, 400, "top_logprobs", "logprobs: true"),
        ({"top_logprobs": 21, "logprobs": True}, 400, "top_logprobs", "20"),
        ({"frequency_penalty": 0.5}, 400, "frequency_penalty", "0"),
        ({"logit_bias": {"3": 1}}, 400, "logit_bias", "single tokens"),
        ({"diffusing": True}, 400, "diffusing", "stream: true"),
        ({"reasoning_effort": "most"}, 400, "reasoning_effort", "instant"),
        ({"tool_choice": "required"}, 400, "tool_choice", "give tools"),
        ({"stop": [""]}, 400, "stop", "not empty"),
        (
            {"max_tokens": 4, "response_format": schema_format({"const": "x" * 40})},
            400,
            None,
            "raise max_tokens",
        ),
        (
            {"max_completion_tokens": 4, "response_format": schema_format({"const": "x" * 40})},
            400,
            None,
            "raise max_completion_tokens",
        ),
        ({"dlm": {"new_tokens": 1 << 20}}, 400, None, "longer than the denoiser's 512"),
        ({"dlm": {"new_tokens": 8}, "max_tokens": 8}, 400, None, "not both"),
        (
            {"response_format": schema_format({"type": "nothing"})},
            400,
            "response_format",
            "nothing",
        ),
        ({"dlm": {"regex": "("}}, 400, "dlm", "without its )"),
        ({"dlm": {"policy": {"tempo": 1}}}, 400, "dlm.policy", "tempo"),
        # The names of other options of the runtime are not names of policy fields.
        ({"dlm": {"policy": {"schema": {}}}}, 400, "dlm.policy", "schema"),
        ({"dlm": {"policy": {"tools": []}}}, 400, "dlm.policy", "tools"),
        ({"dlm": {"policy": {"events": True}}}, 400, "dlm.policy", "events"),
        ({"dlm": {"policy": {"chat": []}}}, 400, "dlm.policy", "chat"),
        ({"n": 1000}, 400, "n", "16"),
    ],
)
def test_what_is_wrong_is_named(
    served: Served, changes: dict[str, Any], status: int, param: str | None, said: str
) -> None:
    response = chat(served, **changes)
    error = response.json()["error"]
    assert response.status_code == status, error
    assert error["param"] == param, error
    assert said in error["message"], error
    assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"\xff\xfe", 400),
        (b'{"model": "\xc3("}', 400),
        (b"[" * 100_000, 400),
        (b'{"model": "x", "messages": ' + b'[{"a":' * 5000, 400),
        (b"x" * ((4 << 20) + 1), 413),
    ],
    ids=["empty", "cut", "bytes", "utf8", "deep", "deep-fields", "large"],
)
def test_hostile_bodies_get_an_error_object(served: Served, body: bytes, status: int) -> None:
    response = served.client.post("/v1/chat/completions", content=body, headers=JSON)
    assert response.status_code == status
    assert response.json()["error"]["message"]
    assert chat(served).status_code == 200


def test_unknown_paths_and_methods_get_an_error_object(served: Served) -> None:
    assert served.client.get("/v1/none").json()["error"]["type"] == "not_found_error"
    wrong = served.client.get("/v1/chat/completions")
    assert wrong.status_code == 405
    assert "GET" in wrong.json()["error"]["message"]
    assert served.client.get("/v1/models/../../etc/passwd").status_code == 404


def test_a_request_id_is_kept_or_made(served: Served) -> None:
    assert (
        served.client.get("/health", headers={"x-request-id": "mine"}).headers["x-request-id"]
        == "mine"
    )
    assert served.client.get("/health").headers["x-request-id"].startswith("req_")


def test_the_samples_of_the_page_run(
    served: Served, demo_bundle: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("openai")
    page = (Path(__file__).parent.parent / "docs" / "guides" / "serving.md").read_text()
    blocks = re.findall(r"^```(\w+)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / "demo").symlink_to(demo_bundle)
    (tmp_path / "examples").symlink_to(Path(__file__).parent.parent / "examples")
    monkeypatch.chdir(tmp_path)
    # Replace sys.path by a copy, because a code sample of the documentation adds a folder to it.
    monkeypatch.setattr(sys, "path", [*sys.path])
    shell = next(text for kind, text in blocks if kind == "sh" and "curl" in text)
    words = shlex.split(shell.replace("\\\n", " "))
    body = json.loads(words[words.index("-d") + 1])
    assert served.client.post("/v1/chat/completions", json=body).status_code == 200
    names: dict[str, Any] = {}
    programs = [text for kind, text in blocks if kind == "python"]
    assert len(programs) == 5
    for text in programs:
        there = text.replace("http://127.0.0.1:8000", served.url)
        exec(compile(there, "serving.md", "exec", dont_inherit=True), names)
    assert names["call"].name == "set_light"
    assert names["answer"].output_text


# ---- Information about the server ----


def test_models_have_the_fields_of_both_apis(served: Served, bundle: dlm_runtime.Bundle) -> None:
    found = served.client.get("/v1/models").json()["data"]
    assert [each["id"] for each in found] == [served.model, "other"]
    assert found[0]["context_length"] == bundle.max_canvas_length
    assert "decisions" in found[0]["supported_endpoints"]
    one = served.client.get(f"/v1/models/{served.model}").json()
    assert one["id"] == served.model
    lists = {
        kind: served.client.get(f"/v1/{kind}/completions/models").json()["data"]
        for kind in ("chat", "fim", "edit")
    }
    assert [len(each) for each in lists.values()] == [2, 2, 2]


def test_metrics_count_requests_tokens_and_passes(served: Served) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    def sample(name: str, **labels: str) -> float:
        text = served.client.get("/metrics").text
        return sum(
            each.value
            for family in text_string_to_metric_families(text)
            for each in family.samples
            if each.name == name and labels.items() <= each.labels.items()
        )

    edited = "<|current_file_content|><|code_to_edit|>a<|cursor|><|/code_to_edit|><|/current_file_content|>"
    bodies = {
        "/v1/chat/completions": {"messages": MESSAGES},
        "/v1/responses": {"input": COMMAND},
        "/v1/edit/completions": {"messages": [{"role": "user", "content": edited}]},
        "/v1/decisions": {"state": COMMAND, "questions": {"is_light": {"type": "noul"}}},
    }
    for path, body in bodies.items():
        labels = {"path": path, "model": served.model}
        names = ("dlm_requests_total", "dlm_request_seconds_count", "dlm_completion_tokens_total")
        before = [sample(name, **labels) for name in names]
        found = served.client.post(path, json={"model": served.model} | body).json()
        usage = found["usage"]
        tokens = usage.get("completion_tokens", usage.get("output_tokens"))
        assert [sample(name, **labels) for name in names] == [
            each + more for each, more in zip(before, (1, 1, tokens), strict=True)
        ]
    for path in ("/v1/chat/completions", "/v1/responses"):
        labels = {"path": path, "model": served.model}
        before = sample("dlm_first_text_seconds_count", **labels)
        with served.client.stream(
            "POST", path, json={"model": served.model, "stream": True} | bodies[path]
        ) as response:
            response.read()
        assert sample("dlm_first_text_seconds_count", **labels) == before + 1
    assert sample("dlm_scheduler_running") == 0
    # Clients cannot make new time series.
    served.client.post("/v1/new", json={"model": "new"})
    served.client.post("/v1/chat/completions", json={"model": "new", "messages": MESSAGES})
    assert "new" not in served.client.get("/metrics").text


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning_effort": "none"},
        {"reasoning_effort": "minimal"},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"verbosity": "low", "store": True, "service_tier": "flex", "modalities": ["text"]},
        {"prompt_cache_retention": "24h", "prompt_cache_key": "a", "safety_identifier": "b"},
        {"audio": None, "functions": None, "web_search_options": None},
        {"dlm": None, "n": None, "stream_options": None, "tools": None, "response_format": None},
        {"dlm": {"policy": None, "steps": None, "prefix": None}, "metadata": None},
    ],
)
def test_fields_that_clients_send_are_accepted(served: Served, fields: dict[str, Any]) -> None:
    assert chat(served, **fields).status_code == 200
    answer = chat(served, **fields).json()["choices"][0]["message"]
    # A client may send an answer back with all fields of the client's type.
    history = [*MESSAGES, {**answer, "audio": None, "annotations": None, "function_call": None}]
    body = {"model": served.model, "messages": [*history, *MESSAGES]}
    response = served.client.post("/v1/chat/completions", json=body)
    assert "annotations" not in response.text


def test_hints_about_caching_are_accepted(served: Served) -> None:
    """The parts, messages and tools of a request may have them. The prompt does not change."""
    hint = {"cache_control": {"type": "ephemeral"}}
    parts = [{"type": "text", "text": "play jazz", **hint}]
    tool = {"type": "function", "function": {"name": "stop"}, **hint}
    made = [
        chat(served, messages=[{"role": "user", "content": content, **more}], tools=[with_hint])
        for content, more, with_hint in (
            ("play jazz", {}, {name: tool[name] for name in ("type", "function")}),
            (parts, hint, tool),
        )
    ]
    assert [each.status_code for each in made] == [200, 200]
    assert made[0].json()["choices"] == made[1].json()["choices"]
    assert made[0].json()["usage"] == made[1].json()["usage"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "localhost:1234"}, 200),
        ({"host": "[::1]"}, 200),
        ({"host": "evil.example"}, 403),  # DNS rebinding
        ({"host": "localhost.evil.example:8000"}, 403),
        ({"host": "own.example"}, 200),  # allowed with --allow-host
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),  # a file, or a frame in a sandbox
        ({"host": "localhost:8000", "origin": "http://localhost:8000"}, 200),  # the server's page
        ({"host": "localhost:8000", "origin": "http://localhost:9000"}, 403),
        ({"origin": "https://app.example"}, 200),  # allowed with --cors-origin
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/x-www-form-urlencoded"}, 415),
        ({"content-type": ""}, 415),
        ({"content-type": "application/json; charset=utf-8"}, 200),
    ],
)
def test_web_pages_of_others_cannot_use_the_server(
    closed: Served, headers: dict[str, str], status: int
) -> None:
    body = json.dumps({"model": closed.model, "messages": MESSAGES})
    path, headers = "/v1/chat/completions", JSON | headers
    response = closed.client.post(path, content=body, headers=headers)
    assert response.status_code == status, response.text
    if status != 200:
        assert response.json()["error"]["message"]
    is_listed = headers.get("origin") == "https://app.example"
    allowed = response.headers.get("access-control-allow-origin")
    assert allowed == ("https://app.example" if is_listed else None)


def test_a_listed_page_may_send_json_after_a_preflight_request(closed: Served) -> None:
    asked = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-stainless-lang",
    }
    for origin, status in (("https://app.example", 200), ("https://evil.example", 400)):
        headers = asked | {"origin": origin}
        assert closed.client.options("/v1/models", headers=headers).status_code == status


def test_the_description_has_every_path(served: Served) -> None:
    found = served.client.get("/openapi.json").json()
    assert {"/v1/chat/completions", "/v1/fim/completions", "/v1/models"} <= found["paths"].keys()
    assert "ChatBody" in found["components"]["schemas"]
    page = served.client.get("/docs").text
    assert "/v1/chat/completions" in page
    assert "http://" not in page
    assert "https://" not in page


# ---- Operation ----


def slow(**fields: Any) -> dict[str, Any]:
    """Return the body of a request that takes hundreds of passes."""
    policy = {"commit": "static", "steps_per_block": 4096, "cache": "none"}
    dlm = {"policy": policy, "new_tokens": 400}
    return {"messages": MESSAGES, "dlm": dlm} | fields


@pytest.mark.parametrize("is_streaming", [False, True])
def test_a_request_ends_when_its_client_leaves(served: Served, is_streaming: bool) -> None:
    def running() -> int:
        lines = served.client.get("/metrics").text.splitlines()
        line = next(
            each
            for each in lines
            if each.startswith(f'dlm_scheduler_running{{model="{served.model}"')
        )
        return int(float(line.split()[-1]))

    body = json.dumps({"model": served.model, "stream": is_streaming, **slow()}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    with socket.create_connection((served.host, served.port)) as client:
        client.sendall(head.encode() + body)
        end = time.monotonic() + 30
        while running() == 0 and time.monotonic() < end:
            pass
        assert running() == 1
    end = time.monotonic() + 30
    while running() and time.monotonic() < end:
        time.sleep(0.01)
    assert running() == 0


def test_a_key_is_needed_where_there_are_keys_and_the_log_has_no_text_of_a_prompt(
    demo_bundle: Path, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# one a line\nfirst\n\nsecond\n")
    with serving(demo_bundle, "--api-key-file", str(keys)) as served:
        assert served.client.get("/health").status_code == 200
        for header in ({}, {"authorization": "Bearer third"}, {"authorization": "first"}):
            response = served.client.get("/v1/models", headers=header)
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"
        for key in ("first", "second"):
            served.client.headers["authorization"] = f"Bearer {key}"
            assert served.client.get("/v1/models").status_code == 200
        chat(served)
        served.stop()
        said = served.said()
    lines = [json.loads(each) for each in said.splitlines() if each.startswith("{")]
    assert {"id", "path", "status", "ms", "model", "completion_tokens"} <= lines[-1].keys()
    assert COMMAND not in said
    assert "kitchen" not in said
    assert "second" not in said
