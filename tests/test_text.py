"""Tests of compiled text files, which contain a tokenizer and a chat template for C programs.

A compiled text file must give the same results as the libraries tokenizers and Jinja. The compiler
must reject tokenizers and templates that it does not support, and give the reason.
"""

from __future__ import annotations

import contextlib
import ctypes as C
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizer_files
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from slow_cases import slow_except
from test_native import SANITIZE, check_tally, compile_c, sanitized, succeed  # noqa: F401  (a fixture)
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

import dlm_runtime
from dlm_export.text import samples
from dlm_export.text.compiled import compile_text
from dlm_export.text.native import CompiledText
from dlm_export.text.refusal import NotCompiled
from dlm_export.text.splits import Split, Splits, compile_splits
from dlm_runtime import Bundle, BundleError, RequestError
from dlm_runtime.abi import native as _native
from dlm_runtime.text.tokenizer import Tokenizer as Oracle

NAMES = ["demo-denoiser", *tokenizer_files.MADE]
CHATML = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}<|system|>Be kind.\n{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# A chat template that only accepts pairs of messages.
PAIRS = (
    "{% if messages[0].role == 'system' %}{% set first = '[S]' + messages[0].content | trim + '[/S]' %}"
    "{% set rest = messages[1:] %}"
    "{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}{% for m in rest %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('in turns') }}{% endif %}"
    "{% if m.role == 'user' %}{{ bos_token }}[I]{{ first if loop.first else '' }}{{ m.content | trim }}[/I]"
    "{% else %} {{ m.content | trim }} {{ eos_token }}{% endif %}{% endfor %}"
)


class Pair:
    """The same tokenizer in two forms.

    ``oracle`` uses the library ``tokenizers``. ``native`` is the compiled text file.
    """

    def __init__(self, data: str, template: str | None = None) -> None:
        self.oracle = Oracle(data.encode(), template, {"bos_token": "<s>", "eos_token": "</s>"})
        self.made = compile_text(self.oracle, template)
        assert self.made.data is not None, self.made.entry
        self.native = CompiledText(self.made.data)


@pytest.fixture(scope="module")
def pairs() -> Iterator[Callable[[str], Pair]]:
    found: dict[str, Pair] = {}

    def get(name: str) -> Pair:
        if name not in found:
            found[name] = Pair(tokenizer_files.made(name))
        return found[name]

    yield get
    for pair in found.values():
        pair.oracle.close()


@pytest.fixture(scope="module")
def chats() -> Iterator[Callable[[str | None], Pair]]:
    """Return a function that compiles a small tokenizer with a chat template, once for each."""
    found: dict[str | None, Pair] = {}

    def get(template: str | None) -> Pair:
        if template not in found:
            found[template] = Pair(tokenizer_files.made("residues"), template)
        return found[template]

    yield get
    for pair in found.values():
        pair.oracle.close()


# ---- Tokens ----


@pytest.mark.parametrize("name", NAMES)
def test_text_is_encoded_as_the_library_encodes_it(pairs: Callable[[str], Pair], name: str) -> None:
    pair = pairs(name)
    texts = [
        *samples.lines(
            600,
            ["the", "ing", " a", LETTER, "EVQL", "VESGG"],
            ["[MASK]", "[UNK]", "<|end|>", "<pad>", "<sep>", "e\u0301a", "éa", "<tool>s"],
            seed=11,
        )
    ]
    expected = pair.oracle.encode_each(texts)
    assert [pair.native.encode(text) for text in texts] == expected
    assert len({*map(tuple, expected)}) > 400
    assert [pair.native.encode(text, is_prompt=True) for text in texts[:9]] == [
        pair.oracle.encode(text) for text in texts[:9]
    ]


LETTER = tokenizer_files.LETTER
PIECES = st.sampled_from(
    [
        "<|end|>",
        "<pad>",
        "<sep>",
        "éa",
        "e\u0301a",
        "  ",
        LETTER,
        "'\u017f",
        "\u0323\u0307",
        "\u1100\u1161\u11a8",
        "\r\n",
        "[MASK]",
        "\u302e\U0001d165",  # NFD sorts these combining marks, and they are not removed as accents
        "\u0301",
        "\u0488",  # NFD does not move this mark, and it is not removed as an accent
        "##",
    ]
)


@given(st.lists(st.one_of(st.text(max_size=12), PIECES), max_size=8).map("".join))
@settings(max_examples=25)
def test_any_text_is_encoded_and_decoded_alike(pairs: Callable[[str], Pair], text: str) -> None:
    for name in ("Qwen", "Llama 2", "demo-denoiser", "BERT", "cased BERT", "residues"):
        pair = pairs(name)
        ids = pair.oracle.encode_plain(text)
        assert pair.native.encode(text) == ids
        assert pair.native.decode(ids) == pair.oracle.decode(ids)


@pytest.mark.parametrize("name", slow_except(["BERT"], ["BERT", "cased BERT"]))
def test_every_character_is_normalised_and_split_alike(
    pairs: Callable[[str], Pair], name: str
) -> None:
    pair = pairs(name)
    letters = [chr(point) for point in range(0x30000) if not 0xD800 <= point < 0xE000]
    texts = [
        "".join(f"{letter}a\u302e{letter}\U0001d165 " for letter in letters[first : first + 64])
        for first in range(0, len(letters), 64)
    ]
    for first in range(0, len(texts), 500):
        some = texts[first : first + 500]
        assert [pair.native.encode(text) for text in some] == pair.oracle.encode_each(some)


@pytest.mark.parametrize("name", NAMES)
def test_ids_are_decoded_as_the_library_decodes_them(
    pairs: Callable[[str], Pair], name: str
) -> None:
    pair = pairs(name)
    rows = [*samples.rows(400, pair.oracle.size + 20, seed=5)]
    assert [pair.native.decode(row) for row in rows] == pair.oracle.decode_each(rows)


def test_text_that_is_no_utf8_is_refused_by_its_place(pairs: Callable[[str], Pair]) -> None:
    with pytest.raises(
        RequestError, match=r"the text is not UTF-8: byte 3 starts no whole character"
    ):
        pairs("GPT-2").native.encode(b"abc\xff")


# ---- Splits ----


def cut(splits: Splits, text: str) -> list[str]:
    """Split a text like the first step of the native tokenizer, but in Python."""
    table, pieces, at, done = splits.tables[0], [], 0, 0
    columns = [*(int(splits.classes[ord(letter)]) for letter in text), splits.count]
    while at < len(text):
        state, end = 0, at
        for place in range(at, len(columns)):
            entry = int(table[state, columns[place]])
            if entry & 1:
                end = place
            if entry < 2:
                break
            state = entry // 2 - 1
        if end > at:
            pieces += [text[done:at], text[at:end]]
            done = end
        at = max(end, at + 1)
    return [piece for piece in [*pieces, text[done:]] if piece]


ATOMS = st.sampled_from(
    [
        "a",
        "b",
        r"\s",
        r"\S",
        "[ab]",
        "[^a]",
        r"\p{L}",
        r"[^\s\p{L}]",
        ".",
        r"\n",
        "(?i:k)",
        r"[\r\n]",
        "-",
        r"\d",
    ]
)
REPEATS = st.sampled_from(["", "", "", "?", "*", "+", "{2}", "{1,3}", "{2,}"])
LOOKS = st.sampled_from(["", "", "", r"(?!\S)", r"(?=\s)", "(?!a)"])


@st.composite
def patterns(draw: st.DrawFn, depth: int = 1) -> str:
    def part() -> str:
        inner = (
            draw(ATOMS) if depth == 0 or draw(st.booleans()) else f"(?:{draw(patterns(depth - 1))})"
        )
        return inner + draw(REPEATS)

    choices = [
        "".join(part() for _ in range(draw(st.integers(1, 3)))) + draw(LOOKS)
        for _ in range(draw(st.integers(1, 3)))
    ]
    return "|".join(choices)


@given(
    patterns(), st.lists(st.text("ab kK\u212a\n\r\t-1é\u00a0", max_size=12), min_size=1, max_size=4)
)
@settings(max_examples=50)
def test_patterns_cut_text_where_the_librarys_expressions_do(
    pattern: str, texts: list[str]
) -> None:
    try:
        splits = compile_splits([Split(pattern)])
    except NotCompiled as err:
        assume("empty text" not in str(err) and "states" not in str(err))
        raise
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    for text in texts:
        assert cut(splits, text) == [piece for piece, _ in split.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        (r"a*", "matches an empty text"),
        (r"(?<=a)b", "a group of that kind at character 0"),
        (r"(?!ab)c", "unsupported syntax before the ) of a group at character 4"),
        (r"a+?b", "a lazy or possessive repeat at character 2"),
        (r"a++b", "a lazy or possessive repeat at character 2"),
        (r"\bword", "\\b at character 0"),
        (r"^a", "'^' at character 0"),
        (r"[a[b]]", "a class of that kind at character 2"),
        (r"[a&&b]", "a class of that kind at character 2"),
        (r"\p{Nonsense}", r"names \p{Nonsense}, which is unknown"),
        (r"a)", "an unmatched )"),
        (r"(?:a?b*)+c", "a repeat of a part that can match an empty text"),
        (r"(?:a|\s?|\S){2}\s", "a repeat of a part that can match an empty text"),
        (r"a{99}", "such counts"),
        (r"(?:[ab]{60}){60}", "more than 2048 places"),
        (r"(?:a|b)+a(?:a|b){12}", "more than 1024 states"),
    ],
)
def test_a_pattern_that_is_not_compiled_says_where_and_why(pattern: str, reason: str) -> None:
    with pytest.raises(NotCompiled, match=re.escape(reason)):
        compile_splits([Split(pattern)])


# ---- Errors ----


def changed(name: str, *path: Any, value: Any) -> str:
    found = json.loads(tokenizer_files.made(name))
    at = found
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return json.dumps(found)


REFUSED = {
    "continues words with '@@'": lambda: changed(
        "BERT", "model", "continuing_subword_prefix", value="@@"
    ),
    "words have at most 50 characters": lambda: changed(
        "BERT", "model", "max_input_chars_per_word", value=50
    ),
    r"lacks the unknown token '\[NO\]'": lambda: changed(
        "BERT", "model", "unk_token", value="[NO]"
    ),
    "Unigram": lambda: Tokenizer(models.Unigram([("a", -1.0)])).to_str(),
    "add_prefix_space": lambda: changed("GPT-2", "pre_tokenizer", "add_prefix_space", value=True),
    "single_word": lambda: changed("GPT-2", "added_tokens", 0, "single_word", value=True),
    "normalises by Lowercase": lambda: changed("GPT-2", "normalizer", value={"type": "Lowercase"}),
    "does not decode by ByteLevel": lambda: changed("GPT-2", "decoder", value=None),
    "no tokens for the bytes": lambda: changed("Gemma", "model", "byte_fallback", value=False),
    "'dropout'|has dropout": lambda: changed("GPT-2", "model", "dropout", value=0.5),
    "splits text by .*Metaspace": lambda: changed(
        "Gemma", "pre_tokenizer", value=json.loads(pre_tokenizers.Metaspace().__getstate__())
    ),
    "tokens around text by BertProcessing": lambda: changed(
        "GPT-2",
        "post_processor",
        value={
            "type": "Sequence",
            "processors": [{"type": "BertProcessing", "sep": ["a", 1], "cls": ["b", 2]}] * 2,
        },
    ),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_is_not_compiled_is_told_by_name(reason: str) -> None:
    oracle = Oracle(REFUSED[reason]().encode(), None, {})
    made = compile_text(oracle, None)
    oracle.close()
    assert made.data is None
    assert re.search(reason, made.entry["refused"])


def test_a_form_that_is_not_equal_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test removes one merge from the compiled tokenizer, which makes its results wrong.

    The compiler must detect the wrong results and must not write a file.
    """
    from dlm_export.text import compiled

    read = compiled.read_tables
    monkeypatch.setattr(
        compiled,
        "read_tables",
        lambda *given: (t := read(*given)).__class__(
            **{**vars(t), "merges": np.delete(t.merges, 1, 0)}
        ),
    )
    oracle = Oracle(tokenizer_files.made("GPT-2").encode(), None, {})
    made = compile_text(oracle, None)
    oracle.close()
    assert made.data is None
    assert re.match(
        r"the compiled form encodes '.*' with special tokens to \[.*\], and tokenizers to \[",
        made.entry["refused"],
    )


# ---- Chats ----


@pytest.mark.parametrize(("template", "fewest"), [(CHATML, 200), (PAIRS, 50)])
def test_chats_are_rendered_as_jinja_renders_them(
    chats: Callable[[str], Pair], template: str, fewest: int
) -> None:
    """The compiled template renders each chat like Jinja, or rejects the chat.

    At least ``fewest`` chats must not be rejected.
    """
    pair = chats(template)
    roles = ("system", "user", "assistant", "tool")
    drawn = [*samples.chats(200, roles, ["</think>", "<tool_response>"], seed=9)]
    equal = 0
    for messages, expected in zip(drawn, pair.oracle.render_each(drawn), strict=True):
        with contextlib.suppress(RequestError):
            assert pair.native.render(messages) == expected
            equal += 1
    assert equal >= fewest


def _said(*roles: str, content: str = "x") -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role in roles]


@pytest.mark.parametrize(
    ("template", "messages", "reason"),
    [
        (
            PAIRS,
            _said("user", "user"),
            "message 1: the chat template does not allow this order of roles",
        ),
        (
            PAIRS,
            _said("assistant"),
            "message 0: the chat template does not allow this order of roles",
        ),
        (
            CHATML,
            _said("critic"),
            'message 0: role "critic" is not one of: system, user, assistant, tool',
        ),
        (CHATML, [], "the chat has no messages"),
        (
            CHATML + "{% if 'magic' in messages[0].content %}!{% endif %}",
            _said("user", content="a magic b"),
            '"magic"',
        ),
        (
            CHATML.replace("m.content", "(m.content or 'nothing')"),
            _said("user", content=""),
            "empty content",
        ),
        (
            CHATML.replace("m.content", "(m.content | escape if m.role == 'tool' else m.content)"),
            _said("tool"),
            "changes the content",
        ),
        (
            "{{ messages | length }}{{ messages[0].content }}",
            _said("user", "user"),
            "no compiled chat|does not allow this order",
        ),
    ],
)
def test_a_chat_that_is_more_than_segments_is_refused(
    chats: Callable[[str], Pair], template: str, messages: list[dict[str, str]], reason: str
) -> None:
    with pytest.raises(RequestError, match=reason.replace("(", r"\(")):
        chats(template).native.render(messages)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (None, "it has no chat template"),
        ("{{ messages | tojson }}", "its compiled chat template rejects all test conversations"),
        (
            "{% for m in messages %}{{ m.content | upper }}{% endfor %}",
            "does not insert the content of a user message|changes the content",
        ),
        (
            "{{ messages[0].content }}{{ now() }}",
            r"rejects every conversation \(UndefinedError: 'now' is undefined\)",
        ),
        ("{% for %}", r"rejects every conversation \(TemplateSyntaxError: Expected an expression"),
        ("{{ messages[0].contents }}", "does not write the messages into the prompt"),
        (CHATML + "{{ strftime_now('%Y') }}", r"changes from run to run \(strftime_now\)"),
        (
            CHATML + "{% if messages | length > 3 %}{{ raise_exception('long') }}{% endif %}",
            "although it accepts each two of these roles",
        ),
    ],
)
def test_a_template_without_segments_is_left_out_with_the_reason(
    chats: Callable[[str | None], Pair], template: str | None, reason: str
) -> None:
    pair = chats(template)
    with pytest.raises(
        RequestError, match=f"this bundle has no compiled chat: .*{reason}|{reason}"
    ):
        pair.native.render(_said("user"))
    assert pair.made.entry.get("chat_refused") is None or re.search(
        reason, pair.made.entry["chat_refused"]
    )


# ---- Files ----


def test_damaged_files_are_refused_or_harmless_under_sanitizers(
    pairs: Callable[[str], Pair],
    sanitized: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    files = []
    for name in ("Qwen", "Llama 2"):
        files.append(tmp_path / name)
        data = pairs(name).made.data
        assert data is not None
        files[-1].write_bytes(data)
    check_tally(succeed(sanitized / "native_tests", "text_test", *files))


def test_every_call_for_text_is_clean_down_its_error_paths(
    sanitized: Path,  # noqa: F811
    demo_bundle: Path,
    tmp_path: Path,
) -> None:
    driver = compile_c(
        tmp_path / "text_driver", Path(__file__).parent / "text_driver.c", sanitized, *SANITIZE
    )
    check_tally(succeed(driver, demo_bundle, ASAN_OPTIONS="detect_leaks=1"))


def test_a_file_of_another_version_is_refused() -> None:
    with pytest.raises(
        RequestError,
        match=r"it has version 9, but this library reads version 1: build the bundle again",
    ):
        CompiledText(b"DLMTEXT\x09" + bytes(200))
    with pytest.raises(BundleError, match="not a compiled text file, or truncated"):
        CompiledText(b"DLMTEXT\x01")


# ---- Bundles ----


def _text(bundle: Bundle) -> C.c_void_p:
    text, message = C.c_void_p(), C.create_string_buffer(_native.MESSAGE_BYTES)
    status = _native.library().dlm_bundle_text(
        bundle._handle.pointer, message, len(message), C.byref(text)
    )
    if status:
        raise _native.error(status, message.value)
    return text


def test_a_bundle_says_what_is_compiled_and_names_a_damaged_file(
    demo_bundle: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(demo_bundle, tmp_path / "bundle"))
    manifest = json.loads((copy / "manifest.json").read_text())
    assert manifest["text"] == {"file": "text.bin"}
    (copy / "text.bin").write_bytes(b"x" * manifest["files"]["text.bin"]["bytes"])
    with pytest.raises(BundleError, match=r"text\.bin: its SHA-256 differs from the manifest's"):
        dlm_runtime.open(copy, engine="none")
    with (
        dlm_runtime.open(copy, engine="none", check_hashes=False) as bundle,
        pytest.raises(
            BundleError, match=r"bundle/text\.bin: not a compiled text file, or truncated"
        ),
    ):
        _text(bundle)


# ---- Released tokenizers ----


@pytest.mark.slow
@pytest.mark.parametrize("name", tokenizer_files.RELEASED)
def test_released_tokenizers_are_compiled_and_equal(name: str) -> None:
    folder = tokenizer_files.released(name)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    special = {
        key: config[key] for key in ("bos_token", "eos_token") if isinstance(config.get(key), str)
    }
    template = config.get("chat_template")
    oracle = Oracle((folder / "tokenizer.json").read_bytes(), template, special)
    with contextlib.closing(oracle):
        made = compile_text(oracle, template)
        assert made.entry == {"file": "text.bin"}
        assert made.data is not None
        native = CompiledText(made.data)
        texts = [*samples.lines(20_000, seed=77)]
        for first in range(0, len(texts), 250):
            part = texts[first : first + 250]
            assert [native.encode(text) for text in part] == oracle.encode_each(part)
        if template is None:
            return
        rendered = 0
        chats = [
            *samples.chats(
                600,
                ("system", "user", "assistant", "tool"),
                ["</think>", "<think>", "<tool_response>"],
                seed=4,
            )
        ]
        for messages, expected in zip(
            chats,
            [
                text
                for at in range(0, 600, 200)
                for text in oracle.render_each(chats[at : at + 200])
            ],
            strict=True,
        ):
            with contextlib.suppress(RequestError):
                assert native.render(messages) == expected
                rendered += 1
        assert rendered > 100
