"""Tests of the server's endpoint ``/v1/edit/completions``.

The tests check how a message is parsed, the text with mask tokens that is made from it, and the
answer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from serving_process import Served

import dlm_runtime

httpx = pytest.importorskip("httpx")
pytest.importorskip("uvicorn")

MESSAGE = """<|recently_viewed_code_snippets|>

<|/recently_viewed_code_snippets|>

<|current_file_content|>
current_file_path: home.txt
open the door
<|code_to_edit|>
turn on the <|cursor|>lights
<|/code_to_edit|>
close the window
<|/current_file_content|>

<|edit_diff_history|>
--- home.txt
+++ home.txt
@@ -1,1 +1,1 @@
-door
+open the door
<|/edit_diff_history|>
"""
BEFORE = """<|recently_viewed_code_snippets|>

<|/recently_viewed_code_snippets|>

<|edit_diff_history|>
--- home.txt
+++ home.txt
@@ -1,1 +1,1 @@
-door
+open the door
<|/edit_diff_history|>

<|code_to_edit|>
turn on the <|cursor|>lights
<|/code_to_edit|>

<|current_file_content|>
current_file_path: home.txt
open the door
"""
AFTER = "\nclose the window\n<|/current_file_content|>"
REGION = "turn on the lights"


def edit(served: Served, content: Any = MESSAGE, **fields: Any) -> Any:
    messages = [{"role": "user", "content": content}]
    body = {"model": served.model, "messages": messages} | fields
    return served.client.post("/v1/edit/completions", json=body)


def test_an_edit_is_an_infill_of_the_region(served: Served, demo_bundle: Path) -> None:
    found = edit(served).json()
    assert found["object"] == "edit.completion"
    (choice,) = found["choices"]
    with dlm_runtime.open(demo_bundle) as bundle:
        assert bundle.tokenizer is not None
        tokens = len(bundle.tokenizer.encode_plain(REGION))
        length = tokens + tokens // 2 + 16
        expected = bundle.infill(f"{BEFORE}<mask>{AFTER}", lengths=length)
    assert choice["message"] == {
        "role": "assistant",
        "content": f"```\n{expected.holes[0]}\n```",
        "refusal": None,
    }
    assert found["usage"]["prompt_tokens"] == len(expected.generation.tokens) - length
    assert found["usage"]["denoising_passes"] == expected.generation.nfe
    parts = edit(served, [{"type": "text", "text": MESSAGE}]).json()
    assert parts["choices"] == found["choices"]


def test_max_tokens_limits_the_region(served: Served) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        small = edit(served, **{name: 3}).json()["usage"]
        assert small["completion_tokens"] <= 3
        large = edit(served, **{name: 8192}).json()["usage"]
        assert large == edit(served).json()["usage"]
        assert small["prompt_tokens"] == large["prompt_tokens"]


# Texts do not contain "\r", because "\r\n" is a line ending.
TEXT = st.text(st.characters(exclude_characters="|\r", exclude_categories=["Cs"]), max_size=20)


@given(TEXT, TEXT, TEXT, TEXT, TEXT)
def test_no_text_of_a_message_is_lost(
    head: str, above: str, left: str, right: str, end: str
) -> None:
    from dlm_serve.edits import _read

    content = (
        f"{head}<|current_file_content|>\n{above}\n<|code_to_edit|>\n{left}<|cursor|>{right}\n"
        f"<|/code_to_edit|>\n{end}\n<|/current_file_content|>"
    )
    before, region, after = _read(content)
    assert region == left + right
    assert before.startswith(head.strip())
    assert f"{left}<|cursor|>{right}" in before
    assert before.endswith(f"<|current_file_content|>\n{above}\n")
    assert after == f"\n{end}\n<|/current_file_content|>"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("fix this", "<|current_file_content|>"),
        (MESSAGE.replace("<|/current_file_content|>", ""), "<|/current_file_content|>"),
        (MESSAGE.replace("<|code_to_edit|>", ""), "<|code_to_edit|>"),
        (MESSAGE.replace("<|/code_to_edit|>", "<|code_to_edit|>"), "<|/code_to_edit|>"),
        (MESSAGE.replace("<|cursor|>", ""), "<|cursor|>"),
        (MESSAGE.replace("<|cursor|>", "<|cursor|><|cursor|>"), "<|cursor|>"),
        (MESSAGE + MESSAGE, "<|current_file_content|>"),
    ],
)
def test_a_message_without_its_tags_is_refused(served: Served, content: str, said: str) -> None:
    response = edit(served, content)
    error = response.json()["error"]
    assert response.status_code == 400
    assert error["param"] == "messages"
    assert said in error["message"]
    assert "once" in error["message"]


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"presence_penalty": 1.5}, "presence_penalty"),
        ({"messages": [{"role": "system", "content": MESSAGE}]}, "messages"),
        ({"messages": [{"role": "assistant", "content": MESSAGE}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": MESSAGE}] * 2}, "messages"),
    ],
)
def test_what_is_wrong_is_named(served: Served, changes: dict[str, Any], param: str) -> None:
    response = edit(served, **changes)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_mercurys_client_edits_and_lists_the_models(served: Served) -> None:
    inceptionai = pytest.importorskip("inceptionai")
    client = inceptionai.Inception(base_url=served.url, api_key="none", max_retries=0)
    made = client.edit.completions.create(
        model=served.model, messages=[{"role": "user", "content": MESSAGE}], max_tokens=8
    )
    assert made.object == "edit.completion"
    assert made.choices[0].message.content.startswith("```\n")
    assert made.choices[0].message.content.endswith("\n```")
    assert 0 < made.usage.completion_tokens <= 8
    assert [model.id for model in client.models.list_edit().data] == [served.model]
