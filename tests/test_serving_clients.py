"""Tests of ``dlm-export serve`` with the unchanged official clients of OpenAI and Mercury."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from serving_process import Served

from dlm_runtime import Policy

pytest.importorskip("uvicorn")

MESSAGES: Any = [{"role": "user", "content": "turn on the kitchen lights"}]
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "set_lights",
            "description": "Switch lights.",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"room": {"enum": ["kitchen", "hall"]}, "on": {"type": "boolean"}},
                "required": ["room", "on"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "stop", "description": "Stop everything."}},
]


def clients() -> list[Any]:
    """Return the clients that can request chat completions.

    An entry contains the client's package, its class, and the path in the base URL.
    """
    return [
        pytest.param(("openai", "OpenAI", "/v1"), id="openai"),
        pytest.param(("inceptionai", "Inception", ""), id="inceptionai"),
    ]


@pytest.fixture(params=clients())
def client(served: Served, request: pytest.FixtureRequest) -> Any:
    package, name, path = request.param
    module = pytest.importorskip(package)
    return getattr(module, name)(base_url=served.url + path, api_key="none", max_retries=0)


def test_chats_and_streams(client: Any, served: Served) -> None:
    whole = client.chat.completions.create(model=served.model, messages=MESSAGES)
    text = whole.choices[0].message.content
    assert text
    assert whole.usage.completion_tokens > 0
    chunks = list(
        client.chat.completions.create(model=served.model, messages=MESSAGES, stream=True)
    )
    deltas = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(deltas) == text
    assert chunks[-1].choices[0].finish_reason == "stop"


@pytest.mark.parametrize("is_streaming", [False, True])
@pytest.mark.parametrize(
    "choice", ["auto", "none", "required", {"type": "function", "function": {"name": "stop"}}]
)
def test_tools_with_each_choice(
    client: Any, served: Served, choice: Any, is_streaming: bool
) -> None:
    arguments = {"model": served.model, "messages": MESSAGES, "tools": TOOLS, "tool_choice": choice}
    if is_streaming:
        calls: dict[int, tuple[str, str]] = {}
        reason = None
        for chunk in client.chat.completions.create(**arguments, stream=True):
            for call in chunk.choices[0].delta.tool_calls or []:
                name, text = calls.get(call.index, ("", ""))
                calls[call.index] = (
                    name + (call.function.name or ""),
                    text + (call.function.arguments or ""),
                )
            reason = chunk.choices[0].finish_reason or reason
        found = list(calls.values())
    else:
        made = client.chat.completions.create(**arguments).choices[0]
        reason = made.finish_reason
        found = [
            (call.function.name, call.function.arguments) for call in made.message.tool_calls or []
        ]
    if choice == "none":
        assert not found
    elif choice == "required":
        assert found
    elif isinstance(choice, dict):
        assert {name for name, _ in found} == {"stop"}
    assert (reason == "tool_calls") == bool(found)
    for name, text in found:
        value = json.loads(text)
        if name == "set_lights":
            assert value["room"] in ("kitchen", "hall")
            assert isinstance(value["on"], bool)


def test_a_pydantic_class_is_parsed(client: Any, served: Served) -> None:
    from pydantic import BaseModel

    class Lights(BaseModel):
        room: str
        level: int

    made = client.chat.completions.parse(
        model=served.model, messages=MESSAGES, response_format=Lights
    )
    assert isinstance(made.choices[0].message.parsed, Lights)


def test_an_earlier_call_and_its_result_reach_the_chat_template(
    client: Any, served: Served
) -> None:
    """The demo's chat template only accepts a single message.

    The template's error shows that it received all messages.
    """
    call = {"id": "call_1", "type": "function", "function": {"name": "stop", "arguments": "{}"}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "done"},
    ]
    module = pytest.importorskip(type(client).__module__.split(".")[0])
    with pytest.raises(module.BadRequestError, match="trained on single commands"):
        client.chat.completions.create(model=served.model, messages=messages, tools=TOOLS)


def test_messages_have_the_form_of_chat_templates() -> None:
    from dlm_serve.field_arguments import message
    from dlm_serve.fields import Message

    given = {
        "role": "assistant",
        "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        "reasoning_content": "c",
        "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": '{"x": [1]}'}}],
    }
    function = {"name": "f", "arguments": {"x": [1]}}
    assert message(Message(**given), "messages[0]") == {
        "role": "assistant",
        "content": "ab",
        "reasoning_content": "c",
        "tool_calls": [{"id": "1", "type": "function", "function": function}],
    }
    assert message(Message(role="developer", content="x"), "")["role"] == "system"


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({}, {}),
        ({"reasoning_effort": "none"}, {"enable_thinking": False}),
        ({"chat_template_kwargs": {"style": "x"}}, {"style": "x"}),
        (
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
            {"enable_thinking": True},
        ),
    ],
)
def test_template_options_come_from_two_fields(
    fields: dict[str, Any], options: dict[str, Any]
) -> None:
    from dlm_serve.field_arguments import template_options
    from dlm_serve.fields import ChatBody

    assert template_options(ChatBody(model="m", messages=MESSAGES, **fields)) == options


def test_an_answer_can_be_sent_back_as_a_client_dumps_it() -> None:
    """The message of OpenAI's client, after ``parse`` has added its own fields."""
    chat = pytest.importorskip("openai.types.chat")
    from dlm_serve.field_arguments import message
    from dlm_serve.fields import ChatBody

    function = {"name": "f", "arguments": '{"x": 1}', "parsed_arguments": {"x": 1}}
    answer = chat.ParsedChatCompletionMessage[dict[str, Any]](
        role="assistant",
        content='{"on": true}',
        parsed={"on": True},
        annotations=[],
        tool_calls=[{"id": "1", "type": "function", "function": function}],
    )
    body = ChatBody(model="m", messages=[*MESSAGES, answer.model_dump()])
    assert message(body.messages[1], "") == {
        "role": "assistant",
        "content": '{"on": true}',
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
        ],
    }


def test_models_are_listed(client: Any, served: Served) -> None:
    assert [model.id for model in client.models.list().data] == [served.model]


def test_errors_have_the_clients_own_classes(client: Any, served: Served) -> None:
    module = pytest.importorskip(type(client).__module__.split(".")[0])
    with pytest.raises(module.NotFoundError):
        client.chat.completions.create(model="nobody", messages=MESSAGES)
    with pytest.raises(module.BadRequestError) as raised:
        client.chat.completions.create(
            model=served.model, messages=MESSAGES, extra_body={"colour": "red"}
        )
    assert "colour" in str(raised.value)


# ---- Features that only Mercury's client has ----


@pytest.fixture
def mercury(served: Served) -> Any:
    module = pytest.importorskip("inceptionai")
    return module.Inception(base_url=served.url, api_key="none", max_retries=0)


def test_mercurys_fields_are_known(mercury: Any, served: Served) -> None:
    stream = mercury.chat.completions.create(
        model=served.model, messages=MESSAGES, stream=True, diffusing=True, realtime=True
    )
    *_, last, end = stream
    assert last.diffusion_meta["diffusion_progress"] == 1
    assert last.choices[0].delta.content
    assert end.choices[0].finish_reason == "stop"


def test_mercurys_lists_of_models(mercury: Any, served: Served) -> None:
    for method in (mercury.models.list_chat, mercury.models.list_fim):
        assert [model.id for model in method().data] == [served.model]


def test_mercurys_fill_in_the_middle(mercury: Any, served: Served) -> None:
    arguments: dict[str, Any] = {
        "model": served.model,
        "prompt": "turn on ",
        "suffix": " lights",
        "max_tokens": 4,
        "top_k": -1,
    }
    made = mercury.fim.completions.create(**arguments)
    assert isinstance(made.choices[0].text, str)
    chunks = mercury.fim.completions.create(**arguments, stream=True)
    assert "".join(chunk.choices[0].text or "" for chunk in chunks) == made.choices[0].text


# ---- Features that only OpenAI's client has ----


def test_many_asynchronous_requests_and_a_cancelled_one(served: Served) -> None:
    openai = pytest.importorskip("openai")

    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=f"{served.url}/v1", api_key="none", max_retries=0
        ) as client:

            async def one() -> str:
                made = await client.chat.completions.create(model=served.model, messages=MESSAGES)
                return str(made.choices[0].message.content)

            tasks = [asyncio.create_task(one()) for _ in range(24)]
            await asyncio.sleep(0.01)
            tasks[0].cancel()
            found = await asyncio.gather(*tasks, return_exceptions=True)
            return [text for text in found if isinstance(text, str)]

    texts = asyncio.run(ask())
    assert len(texts) >= 23
    assert len(set(texts)) == 1


@pytest.mark.parametrize(
    ("effort", "level"),
    [("none", "instant"), ("minimal", "instant"), ("low", "low"), ("xhigh", "high")],
)
def test_openais_efforts_choose_the_nearest_level(effort: str, level: str) -> None:
    from types import SimpleNamespace

    from dlm_serve.field_arguments import _options
    from dlm_serve.fields import FimBody

    bundle = SimpleNamespace(policy=lambda _: Policy())
    model: Any = SimpleNamespace(efforts=["instant", "low", "medium", "high"], bundle=bundle)
    body = FimBody(model="x", prompt="", reasoning_effort=effort)
    assert _options(body, model, None)["effort"] == level
