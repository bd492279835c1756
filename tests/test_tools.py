"""Tests of tool calls.

The tests check what the chat template receives, which texts the constraint allows, and which calls
are parsed from a text.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from conftest import DEMO_CHECKPOINT
from constraints import byte_automaton
from jsonschema import Draft202012Validator
from referencing import Registry

import dlm_runtime
from dlm_export.cli import main
from dlm_runtime import Bundle, RequestError, ToolCall
from dlm_runtime.constraints.compiled import Content
from dlm_runtime.text.tokenizer import Tokenizer
from dlm_runtime.tools import FORMATS, CallFormat, Tools, format_of

sys.path.insert(0, str(DEMO_CHECKPOINT.parent / "demo"))

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": 'How it will be, "honestly" & <soon>',
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string", "maxLength": 3}, "days": {"enum": [1, 2]}},
            "required": ["place"],
        },
    },
}
STOP = {"type": "function", "function": {"name": "stop"}}
# A chat template like those of Hermes and Qwen. The system message contains the tools. Calls are
# written between tags, and results are separate messages.
TEMPLATE = """{%- if tools %}
{{- '<|user|>' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{% endif %}
{{- "# Tools\n<tools>" }}
{%- for tool in tools %}
    {{- "\n" }}
    {{- tool | tojson }}
{%- endfor %}
{{- "\n</tools> within <tool_call></tool_call>" }}
{%- elif messages[0].role == 'system' %}
{{- messages[0].content }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'system' %}{% continue %}{% endif %}
    {%- if message.tool_calls %}
        {%- for call in message.tool_calls %}<tool_call>{{ call.function | tojson(indent=2) }}</tool_call>{% endfor %}
    {%- else %}{{ message.role }}: {{ message.content }}
    {% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Say é, not e."},
    {"role": "user", "content": "will it rain?"},
    {
        "role": "assistant",
        "tool_calls": [
            {"type": "function", "function": {"name": "stop", "arguments": {"b": 1, "a": "ü"}}}
        ],
    },
    {"role": "tool", "content": "no"},
]


def tools(choice: str = "required", form: str = "object", *, is_parallel: bool = False) -> Tools:
    return Tools.checked([WEATHER, STOP], choice, FORMATS[form], is_parallel)


def _accepts(given: Tools, text: str) -> bool:
    """Return whether the constraint for calls of ``given`` allows a text."""
    return byte_automaton(Content("tree", json.dumps(given.tree(lambda text: [text])))).matches(
        text
    )


# ---- Inputs of the chat template ----


@pytest.fixture(scope="module")
def tokenizer() -> Iterator[Tokenizer]:
    made = Tokenizer((DEMO_CHECKPOINT / "tokenizer.json").read_bytes(), TEMPLATE, {})
    yield made
    made.close()


@pytest.mark.parametrize("told", [None, [WEATHER], [WEATHER, STOP]])
@pytest.mark.parametrize("chat", [CHAT, CHAT[1:], CHAT[:2]], ids=["all", "no system", "no call"])
def test_a_template_gets_what_transformers_gives_it(
    tokenizer: Tokenizer, chat: list[dict[str, Any]], told: list[dict[str, Any]] | None
) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    (text,), _ = render_jinja_template(
        [chat], tools=told, chat_template=TEMPLATE, add_generation_prompt=True
    )
    assert tokenizer.encode_chat(chat, told) == tokenizer.encode_plain(text, special_tokens=True)
    assert ("weather" in text) == (told is not None)


def test_a_system_message_that_the_template_leaves_out_is_refused() -> None:
    loud = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    for template, why in (
        (loud, "omits the system message"),
        ("{{ raise_exception('no system role') }}", "no system role"),
    ):
        made = Tokenizer((DEMO_CHECKPOINT / "tokenizer.json").read_bytes(), template, {})
        with pytest.raises(RequestError, match=f"template rejects these messages .*{why}"):
            made.encode_chat(CHAT[:2])
        made.close()


# ---- Allowed texts ----

ONE, OTHER = (
    '{"name":"weather","arguments":{"place":"ulm","days":2}}',
    '{"name":"stop","arguments":{}}',
)
WRITTEN = {
    "object": f"{ONE}\n{OTHER}",
    "list": f"[{ONE},{OTHER}]",
    "lines": f"[\n{ONE},\n{OTHER}\n]",
    "tool_call": f"<tool_call>\n{ONE}\n</tool_call>\n<tool_call>\n{OTHER}\n</tool_call>",
}
BOTH = [ToolCall("weather", {"place": "ulm", "days": 2}), ToolCall("stop", {})]


@pytest.mark.parametrize("form", WRITTEN)
def test_calls_are_written_and_read_in_every_format(form: str) -> None:
    several, one = tools(form=form, is_parallel=True), tools(form=form)
    assert _accepts(several, WRITTEN[form])
    assert not _accepts(one, WRITTEN[form])
    assert several.calls(WRITTEN[form]) == BOTH
    f = FORMATS[form]
    single = f"{f.start}{f.before}{OTHER}{f.after}{f.end}"
    assert _accepts(several, single)
    assert _accepts(one, single)
    assert not _accepts(tools("weather", form), single), "the other one was asked for"
    assert one.calls(single) == BOTH[1:]


@pytest.mark.parametrize(
    "text",
    [
        '{"name":"weather","arguments":{}}',
        '{"name":"weather","arguments":{"place":"ulm","days":3}}',
        '{"name":"weather","arguments":{"place":"berlin"}}',
        '{"name":"weather","arguments":{"place":"ulm","more":1}}',
        '{"name":"stop","arguments":{"a":1}}',
        '{"name":"start","arguments":{}}',
        '{"arguments":{},"name":"stop"}',
        "",
        "It will be fine.",
    ],
)
def test_a_text_that_is_no_valid_call_is_not_of_the_constraint(text: str) -> None:
    assert not _accepts(tools(), text)


def test_a_format_may_be_of_ones_own() -> None:
    own = CallFormat(before="CALL ", after=";", between="\n", name="tool", arguments="parameters")
    given = Tools.checked([STOP], "stop", own, True)
    text = 'CALL {"tool":"stop","parameters":{}};'
    assert _accepts(given, f"{text}\n{text}")
    assert given.calls(f"Well. {text} and {text}") == [ToolCall("stop", {})] * 2


def test_the_format_is_the_templates_where_that_says_it() -> None:
    assert format_of(None, TEMPLATE) is FORMATS["tool_call"]
    assert format_of(None, "{{ '<|tool_call>call:' }}") is FORMATS["gemma"]
    assert format_of(None, "{{ messages }}") is format_of(None, None) is FORMATS["object"]
    assert format_of("list", TEMPLATE) is FORMATS["list"]
    with pytest.raises(
        RequestError,
        match="call_format = 'xml' is not one of object, list, lines, tool_call, gemma",
    ):
        format_of("xml", None)


# ---- Calls in a text ----


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (None, 0),
        ("", 0),
        ("It will be fine.", 0),
        (f"  {OTHER}  ", 1),
        (f"{OTHER} that is all", 0),
        (f"[{OTHER}, {ONE}]\n{OTHER}", 3),
        (f"[[{OTHER}]]", 0),
        ('{"name": "stop", "arguments": {}}', 1),
        ('{"name":"start","arguments":{}}', 0),
        ('{"name":"stop","arguments":[]}', 0),
        ('{"name":["stop"],"arguments":{}}', 0),
        ('{"name":"stop"}', 0),
        ('{"name":"stop","arguments":{},"id":1}', 0),
        ('{"name":"stop","arguments":{"a":NaN}}', 0),
        ('{"name":"stop","arguments":{', 0),
        ('{"name":"stop","arguments":' + '{"a":' * 100_000, 0),
        ("17", 0),
    ],
)
def test_a_text_is_calls_or_it_is_none(text: str | None, found: int) -> None:
    assert len(tools("auto").calls(text)) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (f"I look.\n<tool_call>\n{OTHER}\n</tool_call>", 1),
        (f"<tool_call>{OTHER}", 1),
        (f"<tool_call>[{OTHER}, {ONE}]</tool_call>", 2),
        (f"<tool_call>{OTHER}\n{ONE}</tool_call>", 2),
        (f"<tool_call>{ONE.replace('ulm', '</tool_call>')}</tool_call>", 1),
        (
            f"<tool_call>{ONE.replace('ulm', 'a<tool_call>b')}</tool_call><tool_call>{OTHER}</tool_call>",
            2,
        ),
        (f"<tool_call>{OTHER} x</tool_call>", 0),
        (
            f"<tool_call>{OTHER}</tool_call> then <tool_call>nothing</tool_call> and <tool_call>{ONE}</tool_call>",
            2,
        ),
        (OTHER, 0),
    ],
)
def test_marked_calls_are_found_beside_other_text(text: str, found: int) -> None:
    assert len(tools("auto", "tool_call").calls(text)) == found
    assert tools("none", "tool_call").calls(text) == []


# ---- Requests ----

NO_NAME = [{"type": "function", "function": {"description": "x"}}]
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no list": ({"tools": WEATHER}, "tools: give a list of functions"),
    "a text": ({"tools": "weather"}, "tools: give a list of functions"),
    "empty": ({"tools": []}, "tools: give a list of functions"),
    "no function": ({"tools": [WEATHER, {"name": "f"}]}, r"tools\[1\]: not of the form"),
    "no type": ({"tools": [{"function": {"name": "f"}}]}, r"tools\[0\]: not of the form"),
    "no name": ({"tools": NO_NAME}, r"tools\[0\]: its function has no name"),
    "twice": ({"tools": [STOP, STOP]}, r"tools\[1\]: the name 'stop' is used twice"),
    "auto": (
        {"tools": [{"type": "function", "function": {"name": "auto"}}]},
        "cannot have the name 'auto'",
    ),
    "no schema": (
        {
            "tools": [
                {"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}
            ]
        },
        r"tools\[0\], f: parameters are not a JSON Schema of an object",
    ),
    "a keyword": (
        {
            "tools": [
                {
                    "type": "function",
                    "function": {"name": "f", "parameters": {"minProperties": 2}},
                }
            ],
            "tool_choice": "required",
        },
        "tools: f: schema: #: keyword 'minProperties'",
    ),
    "choice": (
        {"tools": [STOP], "tool_choice": "any"},
        "tool_choice = 'any' is not one of auto, required, none, stop",
    ),
    "choice object": (
        {"tools": [STOP], "tool_choice": {"name": "stop"}},
        "is not one of auto, required, none, stop",
    ),
    "format": ({"tools": [STOP], "call_format": "xml"}, "call_format = 'xml' is not one of"),
    "choice alone": ({"tool_choice": "required"}, "tool_choice is for tools"),
    "two ways": ({"tools": [STOP], "schema": {}}, "give tools or schema, not both"),
}


@pytest.fixture(scope="module")
def demo(demo_bundle: Path) -> Iterator[Bundle]:
    with dlm_runtime.open(demo_bundle, threads=1) as bundle:
        yield bundle


@pytest.mark.parametrize("name", WRONG)
def test_wrong_tools_are_refused_with_their_place(demo: Bundle, name: str) -> None:
    options, sentence = WRONG[name]
    for call in (demo.generate, demo.stream):
        with pytest.raises(RequestError, match=sentence):
            call(prompt="stop", max_new_tokens=16, **options)


def test_a_bundle_without_text_takes_no_tools(llada_bundle: Path) -> None:
    with (
        dlm_runtime.open(llada_bundle, threads=1) as bundle,
        pytest.raises(RequestError, match="tools need a tokenizer"),
    ):
        bundle.generate(tokens=[1, 2], max_new_tokens=4, tools=[STOP])


def test_calls_of_the_demo_are_valid_and_the_ones_asked_for(demo: Bundle) -> None:
    from tools import tools as demo_tools

    listed = demo_tools()
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in listed}
    assert len(schemas) == 21
    lines = (DEMO_CHECKPOINT.parent / "demo" / "heldout.jsonl").read_text().splitlines()[:40]
    right = 0
    for line in map(json.loads, lines):
        chat = [{"role": "user", "content": line["prompt"]}]
        out = demo.generate(
            chat=chat, max_new_tokens=64, preset="fast-dllm", tools=listed, tool_choice="required"
        )
        (call,) = out.tool_calls
        assert Draft202012Validator(schemas[call.name], registry=Registry()).is_valid(
            call.arguments
        )
        right += {"name": call.name, "arguments": call.arguments} == json.loads(line["completion"])
    assert right >= 36
    say = {
        "prompt": lines and json.loads(lines[0])["prompt"],
        "max_new_tokens": 64,
        "preset": "fast-dllm",
        "tools": listed,
    }
    free = demo.generate(**say)
    assert [call.name for call in free.tool_calls] == [
        json.loads(json.loads(lines[0])["completion"])["name"]
    ]
    assert demo.generate(**say, tool_choice="none").tool_calls == []
    forced = demo.generate(**say, tool_choice="set_timer").tool_calls
    assert [call.name for call in forced] == ["set_timer"]
    *_, last = demo.stream(**say)
    assert last.result is not None
    assert last.result.tool_calls == free.tool_calls
    (batched,) = demo.generate_batch(prompts=[say.pop("prompt")], **say)
    assert batched.tool_calls == free.tool_calls


def test_a_denoiser_that_never_saw_a_format_keeps_to_it(demo: Bundle) -> None:
    how = {"tools": [WEATHER, STOP], "tool_choice": "required", "parallel_tool_calls": True}
    for form in WRITTEN:
        out = demo.generate(
            prompt="stop", max_new_tokens=96, preset="fast-dllm", call_format=form, **how
        )
        assert out.finish in ("constraint", "stop"), (
            "with an end token behind it, or up to the last position"
        )
        assert out.tool_calls
        assert all(call.name in ("weather", "stop") for call in out.tool_calls)
    recursive = {
        "$defs": {"t": {"type": "object", "properties": {"t": {"$ref": "#/$defs/t"}}}},
        "properties": {"t": {"$ref": "#/$defs/t"}},
    }
    deep = [{"type": "function", "function": {"name": "tree", "parameters": recursive}}]
    constraint = demo.constraint(tools=demo.tools(deep), max_depth=1)
    out = demo.generate(
        prompt="stop", max_new_tokens=48, preset="fast-dllm", tools=deep, constraint=constraint
    )
    assert [call.name for call in out.tool_calls] == ["tree"]


def test_the_command_line_takes_tools_and_conversations(demo_bundle: Path, tmp_path: Path) -> None:
    def invoke(*arguments: object) -> Any:
        return CliRunner().invoke(
            main, ["run", str(demo_bundle), "--threads", "1", *map(str, arguments)]
        )

    listed, chat = tmp_path / "tools.json", tmp_path / "chat.json"
    listed.write_text(json.dumps([WEATHER, STOP]))
    chat.write_text(json.dumps([{"role": "user", "content": "stop it"}]))
    short = ("--max-new-tokens", 48, "--preset", "fast-dllm", "--json")
    named = invoke("--messages", chat, "--tools", listed, "--tool-choice", "stop", *short)
    assert named.exit_code == 0, named.output
    (call,) = json.loads(named.stdout)["tool_calls"]
    assert re.fullmatch("call_[0-9a-f]{24}", call.pop("id"))
    assert call == {"name": "stop", "arguments": {}}
    for arguments, sentence in (
        (("--messages", chat, "--chat", "a"), "give one of --chat and --messages"),
        (("--prompt", "a", "--system", "b"), "--system needs --chat"),
        (("--chat", "stop it", "--system", "Be brief."), "trained on single commands"),
        (("--messages", listed), "is not a message with role and content"),
        (("--chat", "a", "--tool-choice", "stop"), "tool_choice is for tools"),
        (("--chat", "a", "--tools", tmp_path / "none.json"), "does not exist"),
    ):
        refused = invoke(*arguments, "--max-new-tokens", 4)
        assert refused.exit_code == 2, arguments
        assert sentence in refused.stderr
    listed.write_text("[")
    assert "tools.json: not readable as JSON" in invoke("--chat", "a", "--tools", listed).stderr
