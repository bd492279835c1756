"""Tests of chat templates like those of released families, against transformers and Jinja."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizer_files
from checkpoints import llada_config, write_checkpoint
from click.testing import CliRunner
from slow_cases import slow_except
from template_shapes import SHAPES

from dlm_export.building.writing import write_text
from dlm_export.checkpoints.tokenizer import EMPTY, TEMPLATE_FILES
from dlm_export.cli import main
from dlm_export.sources import open_source
from dlm_export.text import compiled
from dlm_export.text.layout import TextTables, as_bytes
from dlm_export.text.native import CompiledText
from dlm_export.text.refusal import NotCompiled
from dlm_runtime.errors import RequestError
from dlm_runtime.text import _chat_template_worker
from dlm_runtime.text.tokenizer import Tokenizer

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "image_token": "<img>"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather, e.g. <é> & 'now'.",
            "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
        },
    },
    {"type": "function", "function": {"name": "stop", "description": "Ends <all>."}},
    {
        "type": "function",
        "function": {
            "name": "plan",
            "description": "",
            "parameters": {
                "type": "object",
                "properties": {
                    "days": {"type": "array", "items": {"enum": ["mon", "Ünd", 3]}},
                    "by": {"type": "object", "properties": {"car": {"type": "boolean"}}},
                },
                "required": ["days"],
            },
        },
    },
]
USER = {"role": "user", "content": " How is it in Ulm? "}
SYSTEM = {"role": "system", "content": "Be brief.\n"}
ANSWER = {"role": "assistant", "content": "<think>\nwell\n</think>\n\nFine."}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"type": "function", "function": {"name": "weather", "arguments": {"place": "Ülm"}}}
    ],
}
CALLS = CALL | {
    "content": "Both:",
    "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "stop", "arguments": {}}},
        {
            "id": "2",
            "type": "function",
            "function": {"name": "plan", "arguments": {"days": ["mon"], "by": None, "x": 1.5}},
        },
    ],
}
RESULT = {"role": "tool", "name": "weather", "content": '{"sun": true}'}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one message": [USER],
    "a system message": [SYSTEM, USER],
    "several turns": [SYSTEM, USER, ANSWER, USER, ANSWER, USER],
    "a call": [USER, CALL, RESULT],
    "two results": [SYSTEM, USER, CALL, RESULT, RESULT],
    "reasoning": [USER, ANSWER | {"reasoning": "hm"}, USER, ANSWER | {"thinking": "so"}, USER],
    "null members": [
        USER | {"name": None, "tool_calls": None},
        ANSWER | {"tool_calls": None},
        USER,
    ],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}],
    "wrong order": [USER, USER, ANSWER],
    "two calls": [SYSTEM, USER, CALLS, RESULT, RESULT | {"content": "é"}, ANSWER, USER],
    "empty texts": [SYSTEM | {"content": ""}, USER | {"content": ""}, ANSWER | {"content": ""}],
    "another role": [{"role": "developer", "content": "Be brief."}, USER],
    "late system message": [USER, SYSTEM, ANSWER, USER | {"content": "/no_think"}],
}
# Templates with the features of released families: ChatML with reasoning and calls, dates, pairs,
# parts, macros, documents, generation blocks, loop controls, namespaces and arguments of tojson.
TEMPLATES = {
    path.stem: path.read_text()
    for path in sorted(Path(__file__).parent.glob("chat_templates/*.jinja"))
}


@pytest.fixture(scope="module")
def theirs() -> Any:
    transformers = pytest.importorskip("transformers", "5")
    import tokenizers

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, **SPECIAL, clean_up_tokenization_spaces=False
    )


def rendered_by(theirs: Any, template: Any, chat: Any, tools: Any, **options: Any) -> str | None:
    """Return the text that transformers renders, or None if the template raises an error."""
    theirs.chat_template = template
    try:
        text = theirs.apply_chat_template(
            chat, tools=tools, tokenize=False, add_generation_prompt=True, **options
        )
    except Exception:  # any error of a template
        return None
    return str(text)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_is_rendered_as_transformers_renders_it(theirs: Any, name: str) -> None:
    ours = Tokenizer(EMPTY, TEMPLATES[name], SPECIAL)
    count = 0
    with contextlib.closing(ours):
        for chat, tools in itertools.product(CHATS.values(), (None, TOOLS, [])):
            # The date may change between two renderings.
            before = rendered_by(theirs, TEMPLATES[name], chat, tools)
            try:
                text = ours.render(chat, tools)
            except RequestError:
                text = None
            assert text in (before, rendered_by(theirs, TEMPLATES[name], chat, tools))
            count += text is not None
    assert count >= 9, "the template rejects most conversations"


REFUSING = {"appended", "undefined member"}
"""The shapes that reject every conversation."""


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_is_rendered_as_transformers_renders_it(theirs: Any, name: str) -> None:
    """The program of the separate process runs in this process: to start one takes long."""
    ours, count = _chat_template_worker.Text(), 0
    ours.load(EMPTY, SHAPES[name], SPECIAL, [])
    switches = {"enable_thinking": False, "date_string": "1 May 2025"}
    for chat, tools, options in itertools.product(
        CHATS.values(), (None, TOOLS, []), ({}, switches)
    ):
        before = rendered_by(theirs, SHAPES[name], chat, tools, **options)
        try:
            text = ours.render(chat, tools, options)
        except Exception:  # any error of a template
            text = None
        # The date may change between two renderings.
        if text != before:
            assert text == rendered_by(theirs, SHAPES[name], chat, tools, **options)
        count += text is not None
    assert count == 0 if name in REFUSING else count >= 18


DATED = "changes from run to run"
ONCE = "does not insert the content of a user message once and unchanged"
ALWAYS = "rejects every conversation"
NOT_COMPILED = dict.fromkeys(("Llama 3.1", "Granite", "gpt-oss", "SmolLM3"), DATED) | {
    "set block": ONCE,
    "tojson of messages": ONCE,
    "appended": ALWAYS,
    "undefined member": ALWAYS,
    "Solar": "the compiled chat renders",
    "formats": "rejects all test conversations",
}


@pytest.mark.parametrize("name", slow_except(["Llama 2", "GLM", "Mistral v3", "Solar"], [*SHAPES]))
def test_a_shape_is_compiled_or_refused_with_a_reason(tables: TextTables, name: str) -> None:
    """A compiled template renders each conversation of texts like Jinja, or rejects it."""
    ours = Tokenizer(tokenizer_files.made("residues").encode(), SHAPES[name], SPECIAL)
    with contextlib.closing(ours):
        try:
            chat = compiled._chat(SHAPES[name], tables, ours)
        except NotCompiled as err:
            refused = str(err)
        else:
            refused = ""
        assert NOT_COMPILED.get(name, "") in refused
        assert (name in NOT_COMPILED) == bool(refused)
        if refused:
            return
        native = CompiledText(as_bytes(replace(tables, chat=chat)))
        chats = [
            said
            for said in CHATS.values()
            if all(each.keys() == USER.keys() and isinstance(each["content"], str) for each in said)
        ]
        for said, expected in zip(chats, ours.render_each(chats), strict=True):
            with contextlib.suppress(RequestError):
                assert native.render(said) == expected


SWITCHED = (
    "{% for m in messages %}{{ m.content }}{% endfor %}{{ style }}"
    "{% if enable_thinking is defined and enable_thinking is false %}{{ 'off' }}{% endif %}"
)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"enable_thinking": False},
        {"enable_thinking": True, "style": {"a": [1]}},
        {"style": "x" * 50},
    ],
)
def test_options_reach_the_template(theirs: Any, options: dict[str, Any]) -> None:
    theirs.chat_template = SWITCHED
    wanted = theirs.apply_chat_template([USER], tokenize=False, **options)
    with contextlib.closing(Tokenizer(EMPTY, SWITCHED, SPECIAL)) as ours:
        assert ours.render([USER], None, options) == wanted


def test_options_cannot_replace_messages_or_write_special_tokens() -> None:
    template = "{{ messages[0].content }}{{ style }}{{ '<|mask|>' }}"
    file = json.dumps(
        {
            "version": "1.0",
            "added_tokens": [
                {"id": 2, "content": "<|mask|>", "special": True}
                | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            ],
            "model": {
                "type": "WordLevel",
                "vocab": {"a": 0, "?": 1, "<|mask|>": 2},
                "unk_token": "?",
            },
        }
    )
    with contextlib.closing(Tokenizer(file.encode(), template, {})) as ours:
        chat = [{"role": "user", "content": "a"}]
        assert ours.encode_chat(chat, options={"messages": [], "tools": 3})[-1:] == [2]
        made = ours.encode_chat(chat, options={"style": "<|mask|>"})
        assert made.count(2) == 1  # the template's own


CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{{ '<|im_start|>assistant\n' }}"
)
# Endings of ChatML, and a change of it, that depend on the lengths and counts of a conversation.
COUNTING = {
    "messages": "{% if messages | length > 9 %}long{% endif %}",
    "exactly": "{% if messages | length == 30 %}thirty{% endif %}",
    "a product": "{% if messages | length > 4 * 5 %}long{% endif %}",
    "users": "{% if messages | selectattr('role', 'equalto', 'user') | list | count >= 8 %}many{% endif %}",
    "tool results": (
        "{% set ns = namespace(n=0) %}{% for m in messages if m.role == 'tool' %}{% set ns.n = ns.n + 1 %}{% endfor %}"
        "{% if ns.n > 6 %}many{% endif %}"
    ),
    "index": "{% for m in messages %}{% if loop.index == 11 %}{{ 'x' }}{% endif %}{% endfor %}",
    "slice": "{% for m in messages[13:] %}{{ '.' }}{% endfor %}",
    "even": "{% if messages | length > 7 and messages | length % 2 == 0 %}even{% endif %}",
    "letters": "{% for m in messages %}{% if m.content | length > 700 %}{{ 'long' }}{% endif %}{% endfor %}",
    "letters of the first": "{% if messages[0].content | length >= 1500 %}long{% endif %}",
    "words": "{% for m in messages %}{% if m.content.split() | length > 90 %}{{ 'wordy' }}{% endif %}{% endfor %}",
    "lines": "{% if messages[-1].content.split('\n') | length > 50 %}lines{% endif %}",
    "all letters": "{% if messages | map(attribute='content') | join | length > 3000 %}long{% endif %}",
    "a large number": "{% if messages[0].content | length > 100000 %}long{% endif %}",
}


def conversations() -> Iterator[list[dict[str, str]]]:
    """Yield conversations of many lengths, with short and long messages."""
    orders = (["user", "assistant"], ["user"], ["user", "assistant", "tool"], ["user", "tool"])
    for order, lead, count in itertools.product(
        orders, ([], ["system"]), (1, 7, 8, 9, 10, 13, 15, 21, 30)
    ):
        roles = [*lead, *itertools.islice(itertools.cycle(order), count)]
        yield [{"role": role, "content": f"m{at}"} for at, role in enumerate(roles)]
    for unit, count in itertools.product(
        ("x", "x ", "x\n"), (45, 60, 95, 300, 699, 701, 1600, 3100)
    ):
        for order in (["user"], ["system", "user"], ["user", "assistant", "user"]):
            for long in range(len(order)):
                said = [(unit * count).strip() if at == long else "x" for at in range(len(order))]
                yield [{"role": r, "content": c} for r, c in zip(order, said, strict=True)]
    yield [{"role": "user", "content": "x" * 100_001}]


@pytest.fixture(scope="module")
def tables() -> TextTables:
    ours = Tokenizer(tokenizer_files.made("residues").encode(), None, {})
    with contextlib.closing(ours):
        return compiled._tables(json.loads(ours.as_json()), ours)


@pytest.mark.parametrize("name", COUNTING)
def test_a_template_that_counts_is_compiled_only_if_the_counts_agree(
    tables: TextTables, name: str
) -> None:
    template = CHATML + COUNTING[name]
    ours = Tokenizer(tokenizer_files.made("residues").encode(), template, SPECIAL)
    with contextlib.closing(ours):
        try:
            chat = compiled._chat(template, tables, ours)
        except NotCompiled as err:
            refused = str(err)
        else:
            refused = ""
        if refused:
            assert re.search("in another way than Jinja|has the number", refused)
            return
        native, chats = CompiledText(as_bytes(replace(tables, chat=chat))), [*conversations()]
        for said, expected in zip(chats, ours.render_each(chats), strict=True):
            with contextlib.suppress(RequestError):
                assert native.render(said) == expected


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    base = json.loads(tokenizer_files.made("residues"))
    size = len(base["model"]["vocab"])
    path = write_checkpoint(
        tmp_path / "checkpoint",
        llada_config(
            vocab_size=size, embedding_size=size, mask_token_id=4, eos_token_id=3, pad_token_id=0
        ),
    )
    (path / "tokenizer.json").write_text(json.dumps(base))
    return path


@pytest.mark.parametrize("form", ["list", "files", "only tool_use"])
def test_a_template_for_tools_is_used_for_tools_as_in_transformers(
    theirs: Any, checkpoint: Path, form: str
) -> None:
    named = {
        "default": "\n  {% macro said(m) %}{{ m.content }}{% endmacro %}{{ said(messages[0]) }}\n\n",
        "tool_use": "\n{% set n = 1 %}{{ tools | tojson }}{{ n }} {% if tools %}\n {% endif %}\n \n",
        "rag": "never used",
    }
    if form == "only tool_use":
        del named["default"]
    if form == "files":
        (checkpoint / "additional_chat_templates").mkdir()
        (checkpoint / "chat_template.jinja").write_text(named["default"])
        (checkpoint / TEMPLATE_FILES["tool_use"]).write_text(named["tool_use"])
    else:
        listed = [{"name": name, "template": template} for name, template in named.items()]
        (checkpoint / "tokenizer_config.json").write_text(json.dumps({"chat_template": listed}))
    template = open_source(checkpoint).text.chat_template
    ours = Tokenizer(EMPTY, template, {})
    with contextlib.closing(ours):
        for tools in (None, TOOLS, []):
            expected = rendered_by(theirs, named, [USER], tools)
            if expected is None:
                with pytest.raises(RequestError, match="has a chat template for tools only"):
                    ours.render([USER], tools)
            else:
                assert ours.render([USER], tools) == expected


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ nothing() }}", "rejects every conversation (UndefinedError: 'nothing' is undefined)"),
        ("{{ bos_token }}", "does not write the messages into the prompt"),
    ],
)
def test_inspect_build_and_manifest_give_one_reason_for_a_template_that_fails(
    checkpoint: Path, tmp_path: Path, template: str, reason: str
) -> None:
    (checkpoint / "chat_template.jinja").write_text(template)
    done = CliRunner().invoke(main, ["inspect", str(checkpoint), "--json"])
    told = json.loads(done.stdout)
    assert told["chat_template"] is False
    assert told["notes"] == [f"the chat template {reason}"]
    source = open_source(checkpoint)
    assert list(source.notes) == told["notes"], "a build prints these notes"
    written = write_text(source.text, tmp_path)
    assert written.compiled is not None
    assert written.compiled["chat_refused"] == f"its chat template {reason}"


@pytest.mark.parametrize(("ending", "notes"), [("", 1), ("{{ tools }}", 0)])
def test_a_template_that_ignores_tools_is_named(checkpoint: Path, ending: str, notes: int) -> None:
    (checkpoint / "chat_template.jinja").write_text(CHATML + ending)
    found = open_source(checkpoint).notes
    assert len(found) == notes
    assert all("ignores tools" in note for note in found)
