"""Tests of ``dlm-export serve`` with unchanged public clients of OpenAI's and Codestral's APIs:
LiteLLM, LangChain, instructor, Pydantic AI, OpenAI's Agents SDK and Vercel's AI SDK.
tests/requirements.txt lists the Python packages. Bodies of editors are posted as these send them.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from serving_process import Served, change_template, serving

pytest.importorskip("uvicorn")

COMMAND = "turn on the kitchen lights"
RESULT = "lock the front door"
"""A function's result. The demo answers it with a call of a function that no test offers."""
MESSAGES: Any = [{"role": "user", "content": COMMAND}]
SYSTEM = "Be brief."
TEMPLATE = (
    "{% for m in messages if m.role == 'system' %}{{ m.content }}\n{% endfor %}"
    "<|user|>{{ messages[-1].content }}<|assistant|>"
)


class SetLights(BaseModel):
    """A tool call that switches lights."""

    room: str
    level: int


class Call(BaseModel):
    """The object that the demo writes for COMMAND, even if it does not get a schema."""

    name: str
    arguments: dict[str, Any]


SCHEMA = SetLights.model_json_schema()
TOOL: Any = {"type": "function", "function": {"name": "SetLights", "parameters": SCHEMA}}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "lights", "schema": SCHEMA}}


@pytest.fixture(scope="module")
def served(demo_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server of the demo, whose chat template writes only system messages and the last message."""
    folder = Path(shutil.copytree(demo_bundle, tmp_path_factory.mktemp("clients") / "demo"))
    change_template(folder, TEMPLATE)
    with serving(folder) as process:
        yield process


@pytest.fixture(scope="module")
def answer(served: Served) -> Callable[..., str]:
    """Return a function that requests an answer without a client library."""

    def to(content: str, **fields: Any) -> str:
        messages = [{"role": "user", "content": content}]
        body = {"model": served.model, "messages": messages} | fields
        found = served.client.post("/v1/chat/completions", json=body).json()
        return str(found["choices"][0]["message"]["content"])

    return to


@pytest.fixture
def text(answer: Callable[..., str]) -> str:
    return answer(COMMAND)


@pytest.fixture
def last(answer: Callable[..., str]) -> str:
    """The answer after a function has returned RESULT."""
    return answer(RESULT)


# ---- Tools with a response format ----


@pytest.mark.parametrize("form", [FORMAT, {"type": "json_object"}])
def test_a_response_format_holds_for_answers_without_calls(
    served: Served, answer: Callable[..., str], form: Any
) -> None:
    """Agents send both. Their model may call a function, or answer in the format."""
    other = {"type": "function", "function": {"name": "other"}}
    for choice in ("auto", "none"):
        found = answer(COMMAND, tools=[other], tool_choice=choice, response_format=form)
        value = json.loads(found)
        assert isinstance(value, dict)
        if form is FORMAT:
            SetLights.model_validate(value)
    body = {"model": served.model, "messages": MESSAGES, "response_format": form}
    for tool, choice in ((TOOL, "auto"), (other, "required")):
        fields = {"tools": [tool], "tool_choice": choice, "temperature": 0}
        made = served.client.post("/v1/chat/completions", json=body | fields)
        assert made.status_code == 200
        called = made.json()["choices"][0]["message"].get("tool_calls", [])
        assert called or choice == "auto"


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


def test_litellm_calls_tools_and_sends_its_message_back(litellm: Any, lite: Any, last: str) -> None:
    found = litellm.completion(**lite, tools=[TOOL], tool_choice="required").choices[0]
    assert found.finish_reason == "tool_calls"
    (call,) = found.message.tool_calls
    SetLights.model_validate_json(call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": RESULT}
    for message in (found.message, found.message.model_dump()):
        lite["messages"] = [*MESSAGES, message, result]
        assert litellm.completion(**lite, tools=[TOOL]).choices[0].message.content == last


def test_litellm_raises_its_own_classes(litellm: Any, lite: Any) -> None:
    with pytest.raises(litellm.BadRequestError, match="tokens"):
        litellm.completion(**lite, max_tokens=0)
    provider = lite["model"].split("/")[0]
    with pytest.raises(litellm.NotFoundError, match="does not exist"):
        litellm.completion(**(lite | {"model": f"{provider}/nobody"}))


def test_litellm_fills_a_gap_as_with_codestral(litellm: Any, served: Served) -> None:
    gap = {"prompt": "turn on ", "suffix": " lights", "max_tokens": 4}
    found = litellm.text_completion(
        model=f"text-completion-codestral/{served.model}",
        api_base=f"{served.url}/v1/fim/completions",
        api_key="none",
        **gap,
    )
    body = {"model": served.model} | gap
    expected = served.client.post("/v1/fim/completions", json=body).json()["choices"][0]["text"]
    assert found.choices[0].text == expected


# ---- LangChain ----


@pytest.fixture(params=[False, True], ids=["chat", "responses"])
def langchain(served: Served, request: pytest.FixtureRequest) -> Any:
    module = pytest.importorskip("langchain_openai")
    return module.ChatOpenAI(
        model=served.model,
        base_url=f"{served.url}/v1",
        api_key="none",
        max_retries=0,
        use_responses_api=request.param,
    )


def test_langchain_chats_and_streams(langchain: Any, text: str) -> None:
    assert langchain.invoke(COMMAND).text == text
    assert "".join(chunk.text for chunk in langchain.stream(COMMAND)) == text


def test_langchain_calls_tools_and_reads_results(langchain: Any, last: str) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage

    found = langchain.bind_tools([SetLights], tool_choice="required").invoke(COMMAND)
    (call,) = found.tool_calls
    SetLights.model_validate(call["args"])
    history = [HumanMessage(COMMAND), found, ToolMessage(RESULT, tool_call_id=call["id"])]
    assert langchain.bind_tools([SetLights]).invoke(history).text == last


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_langchain_parses_classes(langchain: Any, method: str) -> None:
    wanted = Call if method == "json_mode" else SetLights
    assert isinstance(
        langchain.with_structured_output(wanted, method=method).invoke(COMMAND), wanted
    )


# ---- instructor ----


@pytest.mark.parametrize(
    "mode", ["TOOLS", "TOOLS_STRICT", "JSON", "JSON_SCHEMA", "RESPONSES_TOOLS"]
)
def test_instructor_returns_a_class(served: Served, mode: str) -> None:
    instructor = pytest.importorskip("instructor")
    openai = pytest.importorskip("openai")
    plain = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
    client = instructor.from_openai(plain, mode=instructor.Mode[mode])
    wanted = Call if mode == "JSON" else SetLights
    arguments = {"model": served.model, "messages": MESSAGES, "max_retries": 1}
    found = client.chat.completions.create(response_model=wanted, **arguments)
    assert isinstance(found, wanted)
    if mode != "RESPONSES_TOOLS":  # instructor cannot stream this mode
        *_, last = client.chat.completions.create_partial(response_model=wanted, **arguments)
        wanted.model_validate(last.model_dump())


# ---- Pydantic AI ----


@pytest.fixture(params=["OpenAIChatModel", "OpenAIResponsesModel"])
def pydantic_model(served: Served, request: pytest.FixtureRequest) -> Any:
    models = pytest.importorskip("pydantic_ai.models.openai")
    providers = pytest.importorskip("pydantic_ai.providers.openai")
    provider = providers.OpenAIProvider(base_url=f"{served.url}/v1", api_key="none")
    return getattr(models, request.param)(served.model, provider=provider)


def test_pydantic_ai_chats_and_streams(pydantic_model: Any, text: str) -> None:
    from pydantic_ai import Agent

    agent = Agent(pydantic_model)
    assert agent.run_sync(COMMAND).output == text
    assert agent.run_stream_sync(COMMAND).get_output() == text


def test_pydantic_ai_calls_a_function_and_sends_its_result(pydantic_model: Any, last: str) -> None:
    from pydantic_ai import Agent

    calls = []

    def set_light(room: str, state: str) -> str:
        calls.append((room, state))
        return RESULT

    made = Agent(pydantic_model, tools=[set_light]).run_sync(COMMAND)
    assert calls == [("kitchen", "on")]
    assert made.output == last


def test_pydantic_ai_returns_classes(pydantic_model: Any) -> None:
    from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput

    def other() -> str:
        return "unused"

    for kind in (SetLights, ToolOutput(SetLights), NativeOutput(SetLights)):
        made = Agent(pydantic_model, output_type=kind, system_prompt=SYSTEM).run_sync(COMMAND)
        assert isinstance(made.output, SetLights)
    agent = Agent(pydantic_model, output_type=NativeOutput(SetLights), tools=[other])
    assert isinstance(agent.run_sync(COMMAND).output, SetLights)
    agent = Agent(pydantic_model, output_type=PromptedOutput(Call))
    assert isinstance(agent.run_sync(COMMAND).output, Call)


# ---- OpenAI's Agents SDK ----


@pytest.fixture(params=["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
def run(served: Served, request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Return a function that runs an agent, whose arguments it gets, on COMMAND."""
    agents = pytest.importorskip("agents")
    openai = pytest.importorskip("openai")
    config = agents.RunConfig(tracing_disabled=True)

    def runs(is_streaming: bool = False, **arguments: Any) -> Any:
        # Each run has its own event loop, so it needs a client of its own.
        client = openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
        model = getattr(agents, request.param)(model=served.model, openai_client=client)
        agent = agents.Agent(name="home", model=model, **arguments)
        if not is_streaming:
            return agents.Runner.run_sync(agent, COMMAND, run_config=config).final_output

        async def stream() -> Any:
            made = agents.Runner.run_streamed(agent, COMMAND, run_config=config)
            kinds = {event.type async for event in made.stream_events()}
            assert "raw_response_event" in kinds
            return made.final_output

        return asyncio.run(stream())

    return runs


@pytest.mark.parametrize("is_streaming", [False, True])
def test_agents_chat(
    run: Callable[..., Any], answer: Callable[..., str], text: str, is_streaming: bool
) -> None:
    assert run(is_streaming) == text
    system = {"role": "system", "content": SYSTEM}
    assert run(is_streaming, instructions=SYSTEM) == answer("", messages=[system, *MESSAGES])


@pytest.mark.parametrize("is_streaming", [False, True])
def test_agents_call_a_function_and_send_its_result(
    run: Callable[..., Any], last: str, is_streaming: bool
) -> None:
    import agents

    calls = []

    @agents.function_tool
    def set_light(room: str, state: str) -> str:
        calls.append((room, state))
        return RESULT

    assert run(is_streaming, tools=[set_light]) == last
    assert calls == [("kitchen", "on")]


def test_agents_return_classes(run: Callable[..., Any]) -> None:
    import agents

    @agents.function_tool
    def other() -> str:
        return "unused"

    assert isinstance(run(output_type=SetLights), SetLights)
    assert isinstance(run(output_type=SetLights, tools=[other]), SetLights)


# ---- Vercel's AI SDK ----

PROGRAM = """
import {createOpenAICompatible} from '@ai-sdk/openai-compatible';
import {createOpenAI} from '@ai-sdk/openai';
import {generateText, jsonSchema, Output, stepCountIs, streamText, tool} from 'ai';
const [url, name, prompt, result, schema] = process.argv.slice(2);
const given = {baseURL: url + '/v1', apiKey: 'none'};
const compatible = createOpenAICompatible(
  {...given, name: 'dlm', includeUsage: true, supportsStructuredOutputs: true});
const openai = createOpenAI(given);
const object = jsonSchema(JSON.parse(schema));
const call = jsonSchema({type: 'object', properties: {room: {type: 'string'}, state: {type: 'string'}}});
const found = {};
for (const model of [compatible(name), openai.chat(name), openai.responses(name)]) {
  const common = {model, prompt, maxRetries: 0};
  const set_light = tool({inputSchema: call, execute: async () => result});
  found[model.provider] = {
    text: (await generateText(common)).text,
    stream: await streamText(common).text,
    object: (await generateText({...common, output: Output.object({schema: object})})).output,
    last: (await generateText({...common, tools: {set_light}, stopWhen: stepCountIs(3)})).text,
  };
}
console.log(JSON.stringify(found));
"""


@pytest.mark.slow
def test_vercels_ai_sdk(served: Served, text: str, last: str, tmp_path: Path) -> None:
    packages = ["ai@6", "@ai-sdk/openai@3", "@ai-sdk/openai-compatible@2"]
    install = ["npm", "install", "--no-audit", "--no-fund", *packages]
    try:
        subprocess.run(install, cwd=tmp_path, check=True, capture_output=True, timeout=120)
    except (OSError, subprocess.SubprocessError) as err:
        pytest.skip(f"npm cannot install {', '.join(packages)} ({type(err).__name__})")
    (tmp_path / "run.mjs").write_text(PROGRAM)
    arguments = [served.url, served.model, COMMAND, RESULT, json.dumps(SCHEMA)]
    done = subprocess.run(
        ["node", "run.mjs", *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {*found} == {"dlm.chat", "openai.chat", "openai.responses"}
    for each in found.values():
        SetLights.model_validate(each.pop("object"))
        assert each == {"text": text, "stream": text, "last": last}


# ---- Editors ----

GAP = {"prompt": "turn on ", "suffix": " lights"}
REGION = (
    "<|recently_viewed_code_snippets|>\n\n<|/recently_viewed_code_snippets|>\n\n"
    "<|current_file_content|>\ncurrent_file_path: home.txt\n<|code_to_edit|>\nturn on <|cursor|>\n"
    "<|/code_to_edit|>\n<|/current_file_content|>\n\n<|edit_diff_history|>\n\n<|/edit_diff_history|>\n"
)
EDIT = {"messages": [{"role": "user", "content": REGION}]}
INSTRUCTED = {"messages": [{"role": "system", "content": SYSTEM}, *EDIT["messages"]]}
EDITORS = {
    # Continue, core/llm/llms/Inception.ts: _streamFim, streamSpecialEndpoint and modifyChatBody
    "Continue's Inception": (
        "completions",
        GAP | {"max_tokens": 150, "stop": ["<|endoftext|>", "\n\n", "\n \n"], "stream": True},
        ("text",),
    ),
    "Continue's next edit": (
        "edit/completions",
        INSTRUCTED | {"max_tokens": 64, "temperature": 0, "stop": ["<|end|>"], "stream": True},
        ("delta", "content"),
    ),
    "Continue's chat with Inception": (
        "chat/completions",
        {"messages": MESSAGES, "max_tokens": 64, "nextEdit": False, "stream": True},
        ("delta", "content"),
    ),
    # Continue, core/llm/llms/OpenAI.ts: _streamFim
    "Continue's OpenAI": (
        "fim/completions",
        GAP | {"max_tokens": 64, "temperature": 0.01, "stop": ["\n"], "stream": True},
        ("delta", "content"),
    ),
    # Zed, crates/codestral/src/codestral.rs: fetch_completion
    "Zed's Codestral": (
        "fim/completions",
        GAP | {"max_tokens": 350, "temperature": 0.2, "top_p": 1.0, "stream": False},
        ("message", "content"),
    ),
    # Zed, crates/edit_prediction/src/open_ai_compatible.rs and fim.rs
    "Zed's OpenAI-compatible API": (
        "completions",
        {
            "prompt": "<|fim_prefix|>turn on <|fim_suffix|> lights<|fim_middle|>",
            "max_tokens": 64,
            "stop": ["<|endoftext|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"],
        },
        ("text",),
    ),
    # Zed, crates/edit_prediction/src/mercury.rs
    "Zed's Mercury": ("edit/completions", EDIT | {"stream": False}, ("message", "content")),
}


@pytest.mark.parametrize("name", EDITORS)
def test_editors_read_the_answer(served: Served, name: str) -> None:
    """Each body has the fields that the editor's source sends. ``at`` is where it reads a text."""
    path, body, at = EDITORS[name]
    body = {"model": served.model} | body
    made = served.client.post(f"/v1/{path}", json=body)
    assert made.status_code == 200, made.text
    bodies = [made.text]
    if body.get("stream"):
        *lines, done = (line for line in made.text.split("\n\n") if line)
        assert done == "data: [DONE]"
        bodies = [line.removeprefix("data: ") for line in lines]
    found = ""
    for each in bodies:
        (choice,) = json.loads(each)["choices"]
        for key in at:
            is_optional = key == "content" and body.get("stream")
            choice = choice.get(key, "") if is_optional else choice[key]
        found += choice
    if path == "edit/completions":
        assert found.startswith("```\n")
        assert found.endswith("\n```")


def test_a_system_message_of_an_edit_reaches_the_denoiser(served: Served) -> None:
    counts = []
    for body in (EDIT, INSTRUCTED):
        made = served.client.post("/v1/edit/completions", json={"model": served.model} | body)
        counts.append(made.json()["usage"]["prompt_tokens"])
    assert counts[0] < counts[1]
