"""Tests of constraints, decisions and tool calls with DiffusionGemma.

The bundle has random weights and a SentencePiece tokenizer like Gemma's, but few tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizer_files
import tokenizers
from checkpoints import diffusion_gemma_config, write_checkpoint
from jsonschema import Draft202012Validator
from serving_process import serving

import dlm_runtime as dlm
from dlm_export.build import BuildOptions, build
from dlm_runtime import Bundle

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "n", "ok"],
}
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"place": {"enum": ["ulm", "bonn"]}},
                "required": ["place"],
            },
        },
    }
]
TEMPLATE = (
    "{% for m in messages %}<|user|>{{ m.content }}\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }}<|tool_call>{% endif %}<|end|>"
)
CANVAS = 32


def gemma_bundle(folder: Path) -> Path:
    """Build a small DiffusionGemma with random weights, which has a tokenizer and tokens for calls."""
    made = tokenizers.Tokenizer.from_str(tokenizer_files.made("Gemma"))
    made.add_special_tokens(["<eos>", "<|tool_call>", "<tool_call|>", '<|"|>'])
    size, end = made.get_vocab_size(), made.token_to_id("<eos>")
    config = diffusion_gemma_config(
        vocab_size=size, eos_token_id=end, pad_token_id=end, canvas_length=CANVAS
    )
    checkpoint = write_checkpoint(folder / "checkpoint", config)
    (checkpoint / "tokenizer.json").write_text(made.to_str())
    (checkpoint / "chat_template.jinja").write_text(TEMPLATE)
    build(checkpoint, folder / "bundle", BuildOptions(check_parity=False))
    return folder / "bundle"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gemma_bundle(tmp_path_factory.mktemp("gemma"))


@pytest.fixture(scope="module")
def bundle(path: Path) -> Iterator[Bundle]:
    with dlm.open(path, threads=1) as opened:
        yield opened


@pytest.mark.filterwarnings("ignore::dlm_runtime.ConstraintWarning")
def test_answers_follow_a_schema_without_more_passes(bundle: Bundle) -> None:
    checked, free, constrained = Draft202012Validator(SCHEMA), 0, 0
    for seed in range(5):
        asked: dict[str, Any] = {"prompt": f"the fox {seed}", "max_new_tokens": 64, "seed": seed}
        free += bundle.generate(**asked).passes["denoise"]
        out = bundle.generate(**asked, schema=SCHEMA)
        checked.validate(json.loads(out.text))
        constrained += out.passes["denoise"]
        cut = bundle.generate(**asked, schema=SCHEMA, max_steps=2)
        checked.validate(json.loads(cut.text))
    assert constrained <= 1.2 * free


def test_a_decision_needs_one_pass_over_random_tokens(bundle: Bundle) -> None:
    made = bundle.decide(
        {"team": dlm.Choice(["billing", "sales"]), "urgent": dlm.YesNo()}, prompt="my invoice"
    )
    assert set(made.answers["team"].probabilities) == {"billing", "sales"}
    assert sum(made.answers["urgent"].probabilities.values()) == pytest.approx(1)
    (request,) = made.generations
    assert request.passes["denoise"] == 1


@pytest.mark.filterwarnings("ignore::dlm_runtime.ConstraintWarning")
def test_forced_tools_are_called(bundle: Bundle) -> None:
    chat = [{"role": "user", "content": "will it rain in ulm?"}]
    out = bundle.generate(chat=chat, tools=TOOLS, tool_choice="required", max_new_tokens=96)
    (call,) = out.tool_calls
    assert call.name == "weather"
    assert list(call.arguments) == ["place"]
    place = call.arguments["place"]
    assert bundle.tokenizer is not None
    pieces = bundle.tokenizer.pieces(out.tokens[out.prompt_tokens :])
    quoted = ["call:weather{place:", '<|"|>', place, '<|"|>', "}", "<tool_call|>"]
    assert pieces[:7] == ["<|tool_call>", *quoted]


def test_clients_get_structured_answers(path: Path) -> None:
    openai = pytest.importorskip("openai")
    pydantic = pytest.importorskip("pydantic")
    pytest.importorskip("uvicorn")

    class Contact(pydantic.BaseModel):  # type: ignore[misc,name-defined]
        name: str = pydantic.Field(max_length=8)
        n: int = pydantic.Field(ge=0, le=99)

    messages: Any = [{"role": "user", "content": "call mum"}]
    with serving(path, "--threads", "1") as served:
        client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
        asked: dict[str, Any] = {
            "model": served.model,
            "messages": messages,
            "max_completion_tokens": 64,
        }
        parsed = client.chat.completions.parse(**asked, response_format=Contact)
        assert isinstance(parsed.choices[0].message.parsed, Contact)
        called = client.chat.completions.create(**asked, tools=TOOLS, tool_choice="required")
        (call,) = called.choices[0].message.tool_calls
        assert call.function.name == "weather"
        assert list(json.loads(call.function.arguments)) == ["place"]
        assert client.chat.completions.create(**asked, tools=TOOLS).choices[0].message
        body = {"model": served.model, "state": "Now!", "questions": {"urgent": {"type": "noul"}}}
        decided = served.client.post("/v1/decisions", json=body).raise_for_status().json()
        assert 0 < decided["answers"]["urgent"]["noul"] < 1
