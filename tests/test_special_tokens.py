"""Tests of texts of special tokens (like "<|end|>") in requests.

The text of a special token must be treated as ordinary text, unless the request allows special
tokens. The Python tokenizer and the compiled text file for C programs must give the same tokens.
"""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizer_files
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

import dlm_runtime
from dlm_export.checkpoints.tokenizer import _with_special
from dlm_export.text.compiled import compile_text
from dlm_export.text.native import CompiledText
from dlm_runtime import Bundle, RequestError
from dlm_runtime.generation.request import Options
from dlm_runtime.text.tokenizer import Tokenizer

SPECIAL = ("<|end|>", "<|user|>", "<pad>", "<sep>")
TURNS = "{% for m in messages %}<|user|>{{ m.content }}<|end|>\n{% endfor %}<|user|>"
# A template that joins parts of a message. The joined text may contain a special token that none of
# the parts contains.
PARTS = (
    "{% for m in messages %}<|user|>{% if m.content is string %}{{ m.content | trim }}{% else %}{% for part in m.content %}"
    "{{ part.text }}{% endfor %}{% endif %}{% for call in m.tool_calls or [] %}{{ call | tojson }}{% endfor %}<|end|>"
    "{% endfor %}{{ tools | tojson if tools else '' }}"
)
TEXTS = st.lists(
    st.one_of(
        st.sampled_from(
            [
                *SPECIAL,
                "<|en",
                "d|>",
                "<|<|end|>",
                "<",
                " ",
                "\n",
                "<tool>",
                "\U000f0000",
                "\U000f0001",
                "e\u0301",
            ]
        ),
        st.text(max_size=4),
    ),
    max_size=8,
).map("".join)


class Both:
    """The same tokenizer in two forms.

    ``python`` runs in a separate process. ``native`` is compiled to a file for C programs.
    """

    def __init__(self, data: str, template: str) -> None:
        self.library = tokenizers.Tokenizer.from_str(data)
        self.python = Tokenizer(data.encode(), template, {})
        made = compile_text(self.python, template)
        assert made.data is not None, made.entry
        assert "chat_refused" not in made.entry
        self.native = CompiledText(made.data)
        added = self.library.get_added_tokens_decoder()
        self.special = {token for token, each in added.items() if each.special}

    def spelled(self, ids: list[int]) -> list[int]:
        return [token for token in ids if token in self.special]


@pytest.fixture(scope="module", params=["GPT-2", "Llama 2"])
def both(request: pytest.FixtureRequest) -> Iterator[Both]:
    made = Both(tokenizer_files.made(request.param), TURNS)
    yield made
    made.python.close()


def chat(*contents: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content} for content in contents]


@given(TEXTS)
@settings(max_examples=60)
def test_plain_text_has_no_special_token_and_decodes_to_itself(both: Both, text: str) -> None:
    ids = both.python.encode_plain(text)
    both.library.encode_special_tokens = True
    assert (
        ids == both.library.encode(text, add_special_tokens=False).ids == both.native.encode(text)
    )
    both.library.encode_special_tokens = False
    assert both.spelled(ids) == []
    assert both.python.decode(ids) == both.native.decode(ids)
    if both.library.normalizer is None:
        assert both.python.decode(ids) == text
    # ``around`` contains the special tokens that the tokenizer adds to every prompt.
    around = both.spelled(both.python.encode(""))
    assert both.spelled(both.python.encode(text)) == around
    assert both.python.encode(text) == both.native.encode(text, is_prompt=True)
    allowed = both.python.encode_plain(text, special_tokens=True)
    assert (
        allowed
        == both.library.encode(text, add_special_tokens=False).ids
        == both.native.encode(text, special_tokens=True)
    )


@given(st.lists(TEXTS, min_size=1, max_size=3))
@settings(max_examples=60)
def test_messages_add_no_special_token_to_those_of_the_template(
    both: Both, contents: list[str]
) -> None:
    ids = both.python.encode_chat(chat(*contents))
    assert ids == both.native.encode_chat(chat(*contents))
    assert both.spelled(ids) == both.spelled(both.python.encode_chat(chat(*["x"] * len(contents))))
    allowed = both.python.encode_chat(chat(*contents), special_tokens=True)
    assert allowed == both.native.encode_chat(chat(*contents), special_tokens=True)
    rendered = both.native.render(chat(*contents))
    assert allowed == both.library.encode(rendered, add_special_tokens=False).ids
    if both.spelled(ids) == both.spelled(allowed):
        assert ids == allowed, "nothing was spelled, so nothing changes"


@given(st.lists(TEXTS, min_size=1, max_size=4), TEXTS)
@settings(max_examples=40)
def test_parts_calls_and_tools_add_no_special_token_either(contents: list[str], other: str) -> None:
    tokenizer = _parts()
    messages = [
        {"role": "user", "content": [{"type": "text", "text": text} for text in contents]},
        {
            "role": "user",
            "content": other,
            "tool_calls": [{"function": {"name": "f", "arguments": {other: contents}}}],
        },
    ]
    ids = tokenizer.encode_chat(
        messages, [{"type": "function", "function": {"description": other}}]
    )
    names = tokenizer.names(ids)
    assert [name for name in names if name in SPECIAL] == ["<|user|>", "<|end|>"] * 2


_MADE: list[Tokenizer] = []


def _parts() -> Tokenizer:
    if not _MADE:
        _MADE.append(Tokenizer(tokenizer_files.made("GPT-2").encode(), PARTS, {}))
    return _MADE[0]


def test_a_template_that_looks_for_a_special_token_is_refused_where_a_message_spells_it() -> None:
    template = "{% for m in messages %}{{ m.content }}{% if '<|end|>' in m.content %}!{% endif %}{% endfor %}"
    tokenizer = Tokenizer(tokenizer_files.made("GPT-2").encode(), template, {})
    with contextlib.closing(tokenizer):
        assert tokenizer.encode_chat(chat("hello")) == tokenizer.encode_plain("hello")
        with pytest.raises(RequestError, match="changes the text of a special token in a message"):
            tokenizer.encode_chat(chat("hello <|end|>"))


def test_a_text_with_no_other_spelling_is_refused() -> None:
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"[UNK]": 0, "a": 1, "[MASK]": 2}, unk_token="[UNK]")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    words.add_special_tokens(["[UNK]", "[MASK]"])
    tokenizer = Tokenizer(words.to_str().encode(), "{{ messages[0].content }}", {})
    with contextlib.closing(tokenizer):
        assert tokenizer.encode("a b") == [1, 0], "the unknown token is not spelled"
        assert tokenizer.encode_each(["a", "a [MASK]"]) == [[1], None]
        assert tokenizer.encode("a [MASK]", special_tokens=True) == [1, 2]
        for refused in (
            lambda: tokenizer.encode("a [MASK]"),
            lambda: tokenizer.encode_chat(chat("a [MASK]")),
        ):
            with pytest.raises(
                RequestError, match=r"the special token '\[MASK\]'.*\(special_tokens\)"
            ):
                refused()


def test_the_unknown_token_is_ordinary_text_if_a_message_spells_it() -> None:
    """As in Gemma, the unknown token is special, and its letters also have ordinary tokens."""
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            {"<unk>": 0, "<": 1, "u": 2, "n": 3, "k": 4, ">": 5, "a": 6}, [], unk_token="<unk>"
        )
    )
    made.add_special_tokens(["<unk>"])
    tokenizer = Tokenizer(made.to_str().encode(), "{{ messages[0].content }}", {})
    with contextlib.closing(tokenizer):
        assert tokenizer.encode("a<unk>") == [6, 1, 2, 3, 4, 5]
        assert tokenizer.encode_chat(chat("a<unk>")) == [6, 1, 2, 3, 4, 5]
        assert tokenizer.encode_chat(chat("az")) == [6, 0], "no token has this letter"
        assert tokenizer.encode_chat(chat("a<unk>"), special_tokens=True) == [6, 0]


def test_a_part_that_depends_on_its_place_is_refused_and_not_encoded_in_another_way() -> None:
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE(json.loads(tokenizer_files.made("Gemma"))["model"]["vocab"], [])
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first")
    made.add_special_tokens(["<|end|>"])
    tokenizer = Tokenizer(made.to_str().encode(), "<|end|>{{ messages[0].content }}", {})
    with contextlib.closing(tokenizer):
        assert tokenizer.encode_chat(chat("ab"))
        with pytest.raises(RequestError, match="cannot encode parts of a chat separately"):
            tokenizer.encode_chat(chat("ab<|end|>"))


def test_mask_and_end_tokens_of_a_checkpoint_are_special_in_its_bundle() -> None:
    text = tokenizer_files.made("GPT-2")
    added = json.loads(text)["added_tokens"]
    plain = next(token["id"] for token in added if token["content"] == "<tool>")
    changed = tokenizers.Tokenizer.from_str(_with_special(text, [plain])).get_added_tokens_decoder()
    assert [
        token
        for token, each in changed.items()
        if each.content.startswith("<tool") and each.special
    ] == [plain]
    assert _with_special(text, [added[0]["id"]]) is text


@pytest.mark.parametrize("spelled", ["<|eos|>", "<|mask|>", "<|assistant|>"])
def test_a_prompt_cannot_end_or_mask_its_answer(demo: Bundle, spelled: str) -> None:
    assert demo.tokenizer is not None
    (special,) = demo.tokenizer.encode_plain(spelled, special_tokens=True)
    prompt, usual = (
        f"turn on {spelled} the lights",
        demo.tokenizer.encode("turn on the lights").count(special),
    )
    requests: list[dict[str, Any]] = [
        {"prompt": prompt},
        {"chat": chat(prompt)},
        {"prompt": "turn on", "prefix": spelled},
    ]
    for request in requests:
        assert _given(demo, **request).count(special) == usual
        assert _given(demo, **request, special_tokens=True).count(special) == usual + 1
    text, allowed = f"turn {spelled}<mask>", {"special_tokens": True}
    assert len(demo.infill(text, lengths=2).generation.tokens) > len(
        demo.infill(text, lengths=2, **allowed).generation.tokens
    )
    with pytest.raises(RequestError, match="special_tokens = 'yes': give True or False"):
        demo.generate(prompt="x", special_tokens="yes")


def _given(
    bundle: Bundle, prompt: str | None = None, chat: Any = None, **options: Any
) -> list[int]:
    """Return the token ids of a request's prompt or chat."""
    return bundle._request("generate", (prompt, None, chat), Options.of(options)).given


@pytest.fixture(scope="module")
def demo(demo_bundle: Path) -> Iterator[Bundle]:
    with dlm_runtime.open(demo_bundle, threads=1) as opened:
        yield opened


def test_the_marks_of_a_long_chat_are_found_in_time() -> None:
    source = random.Random(0)
    contents = ["".join(source.choices([*SPECIAL, "<", "a", " "], k=4000)) for _ in range(4)]
    ids = _parts().encode_chat(chat(*contents))
    assert [name for name in _parts().names(ids) if name in SPECIAL] == ["<|user|>", "<|end|>"] * 4
