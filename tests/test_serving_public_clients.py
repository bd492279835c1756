"""Tests of ``dlm-export serve`` with unchanged public clients of OpenAI's API: LiteLLM, LangChain
and instructor. tests/requirements.txt lists them.
"""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel
from serving_process import Served

pytest.importorskip("uvicorn")

COMMAND = "turn on the kitchen lights"
MESSAGES: Any = [{"role": "user", "content": COMMAND}]


class SetLights(BaseModel):
    """A tool call that switches lights."""

    room: str
    level: int


TOOL: Any = {
    "type": "function",
    "function": {"name": "SetLights", "parameters": SetLights.model_json_schema()},
}


@pytest.fixture
def text(served: Served) -> str:
    """The server's answer to MESSAGES, requested without a client library."""
    body = {"model": served.model, "messages": MESSAGES}
    found = served.client.post("/v1/chat/completions", json=body).json()
    return str(found["choices"][0]["message"]["content"])


# ---- LiteLLM ----


@pytest.fixture
def litellm(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # LiteLLM must not download anything
    return pytest.importorskip("litellm")


@pytest.fixture(params=["openai", "inception"])
def lite(litellm: Any, served: Served, request: pytest.FixtureRequest) -> dict[str, Any]:
    """Arguments of ``litellm.completion`` for requests to the server.

    The test runs once for each of several providers of LiteLLM.
    """
    if request.param not in litellm.provider_list:
        pytest.skip(f"this LiteLLM has no provider {request.param}")
    return {
        "model": f"{request.param}/{served.model}",
        "api_base": f"{served.url}/v1",
        "api_key": "none",
        "messages": MESSAGES,
        "num_retries": 0,
    }


def test_litellm_chats_and_streams(litellm: Any, lite: Any, text: str) -> None:
    assert litellm.completion(**lite).choices[0].message.content == text
    chunks = litellm.completion(**lite, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text


def test_litellm_calls_tools(litellm: Any, lite: Any) -> None:
    found = litellm.completion(**lite, tools=[TOOL], tool_choice="required").choices[0]
    assert found.finish_reason == "tool_calls"
    SetLights.model_validate_json(found.message.tool_calls[0].function.arguments)


def test_litellm_raises_its_own_classes(litellm: Any, lite: Any) -> None:
    with pytest.raises(litellm.BadRequestError, match="tokens"):
        litellm.completion(**lite, max_tokens=0)
    provider = lite["model"].split("/")[0]
    with pytest.raises(litellm.NotFoundError, match="does not exist"):
        litellm.completion(**(lite | {"model": f"{provider}/nobody"}))


# ---- LangChain ----


@pytest.fixture
def langchain(served: Served) -> Any:
    module = pytest.importorskip("langchain_openai")
    return module.ChatOpenAI(
        model=served.model, base_url=f"{served.url}/v1", api_key="none", max_retries=0
    )


def test_langchain_chats_and_streams(langchain: Any, text: str) -> None:
    assert langchain.invoke(COMMAND).content == text
    assert "".join(str(chunk.content) for chunk in langchain.stream(COMMAND)) == text


def test_langchain_calls_tools_and_parses_classes(langchain: Any) -> None:
    found = langchain.bind_tools([SetLights], tool_choice="required").invoke(COMMAND)
    SetLights.model_validate(found.tool_calls[0]["args"])
    for method in ("json_schema", "function_calling"):
        parsed = langchain.with_structured_output(SetLights, method=method).invoke(COMMAND)
        assert isinstance(parsed, SetLights)


# ---- instructor ----


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_instructor_returns_a_class(served: Served, mode: str) -> None:
    instructor = pytest.importorskip("instructor")
    openai = pytest.importorskip("openai")
    plain = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
    client = instructor.from_openai(plain, mode=instructor.Mode[mode])
    found = client.chat.completions.create(
        model=served.model, messages=MESSAGES, response_model=SetLights, max_retries=1
    )
    assert isinstance(found, SetLights)
