"""Tests of ``dlm-export serve`` with unchanged public clients of OpenAI's API.

The clients are LiteLLM, LangChain, instructor, OpenAI's package for Node, and the load generator
GuideLLM. tests/requirements.txt lists the Python packages except GuideLLM. For Node, set
DLM_NODE_MODULES to a folder ``node_modules`` with the package openai. GuideLLM has many
dependencies, so install it in a separate environment, and set DLM_GUIDELLM to the path of its
program.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
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


# ---- OpenAI's package for Node ----

PROGRAM = """
import OpenAI from "openai";
const [baseURL, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const asked = { model, messages: [{ role: "user", content: "turn on the kitchen lights" }] };
const found = {};
found.text = (await client.chat.completions.create(asked)).choices[0].message.content;
found.streamed = "";
for await (const chunk of await client.chat.completions.create({ ...asked, stream: true }))
  found.streamed += chunk.choices[0].delta.content ?? "";
const tool = { type: "function", function: { name: "stop", parameters: { type: "object" } } };
const called = await client.chat.completions.create(
  { ...asked, tools: [tool], tool_choice: "required" });
found.call = called.choices[0].message.tool_calls[0].function.name;
try { await client.chat.completions.create({ ...asked, n: 99 }); }
catch (error) { found.error = [error.constructor.name, error.status, error.param]; }
const slow = { ...asked, stream: true,
  dlm: { new_tokens: 400, policy: { commit: "static", steps_per_block: 4096, cache: "none" } } };
const control = new AbortController();
setTimeout(() => control.abort(), 100);
try { for await (const _ of await client.chat.completions.create(slow, control)); }
catch (error) { found.aborted = error.constructor.name; }
found.aborted ??= String(control.signal.aborted);
try { await client.chat.completions.create({ ...slow, stream: false }, { timeout: 100 }); }
catch (error) { found.timeout = error.constructor.name; }
console.log(JSON.stringify(found));
"""


def test_the_client_for_node(served: Served, text: str, tmp_path: Path) -> None:
    modules, node = os.environ.get("DLM_NODE_MODULES"), shutil.which("node")
    if node is None or not modules:
        pytest.skip("node or DLM_NODE_MODULES with the package openai is missing")
    (tmp_path / "node_modules").symlink_to(Path(modules).resolve())
    (tmp_path / "client.mjs").write_text(PROGRAM)
    done = subprocess.run(
        [node, tmp_path / "client.mjs", f"{served.url}/v1", served.model],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["text"] == found["streamed"] == text
    assert found["call"] == "stop"
    assert found["error"] == ["BadRequestError", 400, "n"]
    assert found["aborted"] in ("APIUserAbortError", "true")
    assert found["timeout"] == "APIConnectionTimeoutError"


def test_a_public_load_generator(served: Served, demo_bundle: Path, tmp_path: Path) -> None:
    program = os.environ.get("DLM_GUIDELLM")
    if not program:
        pytest.skip("DLM_GUIDELLM does not name the program of GuideLLM")
    prompts = [json.dumps({"prompt": f"{COMMAND} {at}"}) for at in range(12)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(prompts) + "\n")
    options = {
        "--backend": f"kind=openai_http,target={served.url}",
        "--profile": "kind=concurrent,streams=4",
        "--constraint": f"kind=max_requests,count={len(prompts)}",
        "--data": f"kind=json_file,path={tmp_path / 'prompts.jsonl'}",
        "--tokenizer": f"kind=hf_auto,model={demo_bundle}",
        "--output": f"kind=json,path={tmp_path / 'report.json'}",
    }
    command = [
        program,
        "run",
        "--disable-console",
        *(part for each in options.items() for part in each),
    ]
    done = subprocess.run(
        command,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (measured,) = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    totals = measured["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (len(prompts), 0)
    for request in measured["requests"]["successful"]:
        assert request["output_metrics"]["text_tokens"] > 0
