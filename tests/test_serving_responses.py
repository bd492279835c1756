"""Tests of the server's endpoint ``/v1/responses``.

The tests send plain HTTP requests, send the same requests to ``/v1/chat/completions``, and use
OpenAI's official client.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from serving_process import Served

httpx = pytest.importorskip("httpx")
pytest.importorskip("uvicorn")

COMMAND = "turn on the kitchen lights"
PARAMETERS: Any = {
    "type": "object",
    "properties": {"room": {"enum": ["kitchen", "hall"]}, "on": {"type": "boolean"}},
    "required": ["room", "on"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "name": "set_lights", "parameters": PARAMETERS, "strict": True},
    {"type": "function", "name": "stop", "description": "Stop everything."},
]


@pytest.fixture
def openai(served: Served) -> Any:
    module = pytest.importorskip("openai")
    return module.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


def respond(served: Served, **fields: Any) -> Any:
    body = {"model": served.model, "input": COMMAND} | fields
    return served.client.post("/v1/responses", json=body)


def chat(served: Served, **fields: Any) -> Any:
    messages = [{"role": "user", "content": COMMAND}]
    body = {"model": served.model, "messages": messages} | fields
    return served.client.post("/v1/chat/completions", json=body).json()


def events(served: Served, **fields: Any) -> list[Any]:
    """Send a request with ``stream`` and return the events of the answer.

    The name of each event must equal its type.
    """
    body = {"model": served.model, "input": COMMAND, "stream": True} | fields
    with served.client.stream("POST", "/v1/responses", json=body) as response:
        assert response.status_code == 200, response.read()
        lines = [line for line in response.iter_lines() if line]
    found = [json.loads(line.removeprefix("data: ")) for line in lines[1::2]]
    assert [line.removeprefix("event: ") for line in lines[::2]] == [each["type"] for each in found]
    assert [each["sequence_number"] for each in found] == list(range(len(found)))
    return found


# ---- Parity with chat ----


def test_a_response_has_the_text_and_the_counts_of_the_chat(served: Served) -> None:
    expected = chat(served)
    found = respond(served, metadata={"a": "b"}).json()
    assert found["object"] == "response"
    assert found["status"] == "completed"
    assert found["metadata"] == {"a": "b"}
    assert found["store"] is False
    (item,) = found["output"]
    assert item["type"] == "message"
    assert item["content"][0]["text"] == expected["choices"][0]["message"]["content"]
    usage = expected["usage"]
    assert found["usage"]["input_tokens"] == usage["prompt_tokens"]
    assert found["usage"]["output_tokens"] == usage["completion_tokens"]
    assert found["usage"]["total_tokens"] == usage["total_tokens"]
    assert found["usage"]["denoising_passes"] == usage["denoising_passes"]


def test_log_probabilities_are_those_of_the_chat(served: Served) -> None:
    expected = chat(served, logprobs=True)["choices"][0]["logprobs"]["content"]
    include = ["message.output_text.logprobs"]
    part = respond(served, include=include).json()["output"][0]["content"][0]
    assert part["logprobs"] == expected
    others = chat(served, logprobs=True, top_logprobs=4)["choices"][0]["logprobs"]["content"]
    part = respond(served, include=include, top_logprobs=4).json()["output"][0]["content"][0]
    assert part["logprobs"] == others
    assert len(others[0]["top_logprobs"]) == 4
    assert respond(served).json()["output"][0]["content"][0]["logprobs"] == []
    done = [
        event
        for event in events(served, include=include)
        if event["type"] == "response.output_text.done"
    ]
    assert done[0]["logprobs"] == expected


def test_a_schema_holds(served: Served) -> None:
    wanted = {"type": "json_schema", "name": "x", "schema": PARAMETERS}
    found = respond(served, text={"format": wanted}).json()
    value = json.loads(found["output"][0]["content"][0]["text"])
    assert value["room"] in ("kitchen", "hall")
    assert isinstance(value["on"], bool)
    assert found["text"]["format"]["schema"] == PARAMETERS


def test_an_answer_that_is_cut_off_is_incomplete(served: Served) -> None:
    kind = {"type": "json_schema", "name": "x", "schema": PARAMETERS}
    found = respond(served, text={"format": kind}, dlm={"max_steps": 1, "steps": 64}).json()
    assert found["status"] == "incomplete"
    assert found["incomplete_details"] == {"reason": "max_output_tokens"}
    assert found["output"][0]["status"] == "incomplete"
    last = events(served, text={"format": kind}, dlm={"max_steps": 1, "steps": 64})[-1]
    assert last["type"] == "response.incomplete"


@pytest.mark.parametrize(
    "choice", ["auto", "none", "required", {"type": "function", "name": "stop"}]
)
def test_calls_are_those_of_the_chat(served: Served, choice: Any) -> None:
    tools = [
        {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}
        for tool in TOOLS
    ]
    named = choice
    if isinstance(choice, dict):
        named = {"type": "function", "function": {"name": choice["name"]}}
    message = chat(served, tools=tools, tool_choice=named)["choices"][0]["message"]
    expected = [call["function"] for call in message.get("tool_calls", [])]
    output = respond(served, tools=TOOLS, tool_choice=choice).json()["output"]
    calls = [item for item in output if item["type"] == "function_call"]
    assert [{"name": call["name"], "arguments": call["arguments"]} for call in calls] == expected
    assert all(call["call_id"] and call["id"] != call["call_id"] for call in calls)
    if not expected:
        assert output[0]["content"][0]["text"] == message["content"]


def test_items_become_the_messages_of_a_chat() -> None:
    from dlm_serve.response_fields import ResponsesBody, messages_of

    body = ResponsesBody(
        model="x",
        instructions="be brief",
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {
                "type": "message",
                "id": "msg_1",
                "status": "completed",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "b", "annotations": []}],
            },
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
            {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "c"},
            {"type": "function_call", "call_id": "3", "name": "h", "arguments": "{}"},
        ],
    )
    messages, places = messages_of(body.input, body.instructions)
    assert [message.role for message in messages] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert places == ["instructions", "input[0]", "input[1]", "input[4]", "input[5]"]
    assert [call.id for call in messages[2].tool_calls or []] == ["1", "2"]
    assert messages[3].tool_call_id == "1"
    assert [call.id for call in messages[4].tool_calls or []] == ["3"]


# ---- Streams ----


def test_a_stream_ends_with_the_response(served: Served) -> None:
    policy = {"policy": {"commit": "static", "steps_per_block": 8}}
    whole = respond(served, dlm=policy).json()
    found = events(served, dlm=policy)
    kinds = [event["type"].removeprefix("response.") for event in found]
    deltas = [event["delta"] for event in found if event["type"].endswith("text.delta")]
    assert len(deltas) > 1
    assert kinds == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        *["output_text.delta"] * len(deltas),
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    last = found[-1]["response"]
    text = whole["output"][0]["content"][0]["text"]
    assert "".join(deltas) == text == last["output"][0]["content"][0]["text"]
    assert found[-2]["item"] == last["output"][0]
    assert {event["item_id"] for event in found if "item_id" in event} == {last["output"][0]["id"]}
    same = ("status", "usage", "model", "tools", "text", "incomplete_details")
    assert {name: last[name] for name in same} == {name: whole[name] for name in same}
    assert found[0]["response"]["id"] == last["id"]


def test_calls_arrive_as_events(served: Served) -> None:
    choice = {"type": "function", "name": "set_lights"}
    found = events(served, tools=TOOLS, tool_choice=choice)
    output = found[-1]["response"]["output"]
    assert output
    for at, item in enumerate(output):
        own = [each for each in found if each.get("output_index") == at]
        kinds = [each["type"].removeprefix("response.") for each in own]
        call = "function_call_arguments"
        assert kinds == ["output_item.added", f"{call}.delta", f"{call}.done", "output_item.done"]
        assert own[0]["item"] == item | {"arguments": "", "status": "in_progress"}
        assert own[1]["delta"] == own[2]["arguments"] == item["arguments"]
        assert own[3]["item"] == item


# ---- Errors ----


@pytest.mark.parametrize(
    ("changes", "param", "said"),
    [
        ({"colour": "red"}, "colour", "does not know"),
        ({"input": [{"role": "king", "content": "x"}]}, "input[0].role", "'user'"),
        ({"input": [{"type": "reasoning"}]}, "input[0]", "function_call_output"),
        ({"input": []}, "input", "at least 1"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0]",
            "input[0].content[0]: a part of type 'input_image' is not text",
        ),
        ({"input": [{"role": "user", "content": "x", "a": 1}]}, "input[0].a", "does not know"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "stores no responses"),
        ({"conversation": "conv_1"}, "conversation", "stores no conversations"),
        ({"background": True}, "background", "stream"),
        ({"truncation": "auto"}, "truncation", "disabled"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "'function'"),
        ({"tool_choice": "required"}, "tool_choice", "give tools"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema", "missing"),
        (
            {"text": {"format": {"type": "json_schema", "schema": {"type": "nothing"}}}},
            "text.format",
            "nothing",
        ),
        (
            {"text": {"format": {"type": "json_object"}}, "dlm": {"regex": "a"}},
            "text.format",
            "give one of text.format",
        ),
        ({"reasoning": {"effort": "low"}}, "reasoning.effort", "reasoning.effort: this model"),
        ({"top_logprobs": 2}, "top_logprobs", "include"),
    ],
)
def test_what_is_wrong_is_named(
    served: Served, changes: dict[str, Any], param: str | None, said: str
) -> None:
    response = respond(served, **changes)
    error = response.json()["error"]
    assert response.status_code == 400, error
    assert error["param"] == param, error
    assert said in error["message"], error


# ---- OpenAI's client ----


def test_the_client_reads_responses_and_streams(openai: Any, served: Served) -> None:
    whole = openai.responses.create(model=served.model, input=COMMAND)
    assert whole.output_text
    assert whole.usage.output_tokens > 0
    with openai.responses.stream(model=served.model, input=COMMAND) as stream:
        text = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
        assert stream.get_final_response().output_text == text == whole.output_text
    kinds = [
        e.type for e in openai.responses.create(model=served.model, input=COMMAND, stream=True)
    ]
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"


def test_the_client_parses_a_pydantic_class(openai: Any, served: Served) -> None:
    from pydantic import BaseModel

    class Lights(BaseModel):
        room: str
        level: int

    made = openai.responses.parse(model=served.model, input=COMMAND, text_format=Lights)
    assert isinstance(made.output_parsed, Lights)
    with openai.responses.stream(model=served.model, input=COMMAND, text_format=Lights) as stream:
        assert stream.get_final_response().output_parsed == made.output_parsed


def test_the_client_reads_calls_and_sends_them_back(openai: Any, served: Served) -> None:
    """The demo's chat template only accepts a single message.

    The template's error shows that it received all messages.
    """
    module = pytest.importorskip("openai")
    arguments: Any = {"model": served.model, "tools": TOOLS, "tool_choice": "required"}
    made = openai.responses.create(input=COMMAND, **arguments)
    (call, *_) = made.output
    assert call.type == "function_call"
    with openai.responses.stream(input=COMMAND, **arguments) as stream:
        streamed = stream.get_final_response().output
    assert [(item.name, item.arguments) for item in streamed] == [
        (item.name, item.arguments) for item in made.output
    ]
    answer = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
    for output in (made.output, streamed):
        items = [{"role": "user", "content": COMMAND}, *output, answer]
        with pytest.raises(module.BadRequestError, match="trained on single commands"):
            openai.responses.create(input=items, model=served.model, tools=TOOLS)
