"""Tests of constraints without decoding: accepted texts, rejected constraints, and the cache of
compiled constraints.
"""

from __future__ import annotations

import itertools
import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from constraints import (
    ByteAutomaton,
    Longest,
    byte_automaton,
    compiled,
    following,
    made_up_vocabulary,
    schema_content,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import dlm_runtime
from dlm_runtime import BundleError, RequestError
from dlm_runtime.constraints import compiled as compile_module
from dlm_runtime.constraints.compiled import (
    CompileLimits,
    Constraint,
    Content,
    compile_content,
    keep_compiled,
)
from dlm_runtime.constraints.vocabulary import Vocabulary
from dlm_runtime.generation import constraining

VOCAB, END, MASK = 128, 7, 127
WORDS = made_up_vocabulary(VOCAB, (END, MASK), Longest)


def accepts(texts: ByteAutomaton, value: Any) -> bool:
    return texts.matches(json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode())


def texts_of(found: Any, max_depth: int | None = None) -> ByteAutomaton:
    return byte_automaton(schema_content(found, max_depth=max_depth))


# ---- Expressions and bytes ----


@st.composite
def small_expressions(draw: st.DrawFn, depth: int = 4) -> str:
    kind = (
        draw(st.sampled_from(("letter", "letter", "either", "both", "many", "maybe", "twice")))
        if depth
        else "letter"
    )
    if kind == "letter":
        return draw(st.sampled_from(("a", "b", "c", "[ab]", "é")))
    first = draw(small_expressions(depth - 1))
    if kind in ("either", "both"):
        second = draw(small_expressions(depth - 1))
        return f"(?:{first}|{second})" if kind == "either" else first + second
    return f"(?:{first})" + {"many": "*", "maybe": "?", "twice": "{1,2}"}[kind]


@settings(max_examples=25)
@given(
    expression=small_expressions(),
    before=st.text("abcé", max_size=2),
    behind=st.text("abcé", max_size=2),
)
def test_what_stands_between_given_texts_is_what_makes_a_whole_one(
    expression: str, before: str, behind: str
) -> None:
    texts = byte_automaton(expression)
    middles = [
        "".join(letters)
        for length in range(4)
        for letters in itertools.product("abcé", repeat=length)
    ]
    try:
        inside = byte_automaton(Content("regex", expression, before=before, behind=behind))
    except RequestError:
        assert not any(texts.matches((before + middle + behind).encode()) for middle in middles)
        return
    for middle in middles:
        assert inside.matches(middle.encode()) == texts.matches((before + middle + behind).encode())


def test_given_text_that_no_valid_one_has_is_refused_with_how_far_it_goes() -> None:
    wanted = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    with pytest.raises(
        RequestError,
        match=r"""starts with "\{\\"name\\": \\"", though some may with "\{\\"name\\":": the JSON layout writes "\[\{""",
    ):
        byte_automaton(schema_content(wanted, before='{"name": "'))
    with pytest.raises(
        RequestError, match=r"""starts with "\{\\"name\\":\\"" and ends with "\]"$"""
    ):
        byte_automaton(schema_content(wanted, before='{"name":"', behind="]"))
    inside = byte_automaton(schema_content(wanted, before='{"na', behind="}"))
    assert inside.matches(b'me":"x"')
    assert not inside.matches(b'me":"x"}')


def test_automata_are_minimal() -> None:
    """The expression depends on the last 6 letters (a or b), so every automaton for it needs at
    least 2^6 states.
    """
    assert len(byte_automaton("(?:a|b)*a(?:a|b){5}").table) == 64
    assert len(byte_automaton("x{300}").table) == 301


def test_characters_of_strings_are_what_json_writes() -> None:
    texts = texts_of({"type": "string", "minLength": 1, "maxLength": 1})
    points = [
        *range(0x20, 0x7F),
        *range(0xA0, 0x2100),
        0xD7FF,
        0xE000,
        0xFFFD,
        0x10000,
        0x10FFFF,
        8,
        9,
        10,
        12,
        13,
    ]
    assert all(accepts(texts, chr(point)) for point in points)
    assert not texts.matches(b'"\xed\xa0\x80"'), "a surrogate is no character"
    assert not texts.matches(b'"\xc3"')
    assert not texts.matches(b'"\xc0\xaf"'), "nor is what is longer than it need be"


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("a^b", "^regex: no text matches it$"),
        ("(a", r"^regex: a group without its \) at character 0$"),
        ("a)|(b", r"^regex: an unmatched \) at character 1$"),
        ("(?=a)a", "^regex: look-around, which this syntax does not have, at character 1$"),
        ("a\ud800", "^regex: character 1 is half of a surrogate pair"),
        (
            "(?:a|b)*a(?:a|b){9}",
            "^regex: its automaton has more than 500 states: make counts smaller, or raise limits$",
        ),
        ("(?:a|b)*a(?:a|b){14}", "^regex: its automaton has more than 500 states: "),
    ],
)
def test_expressions_that_cannot_be_compiled_say_why(expression: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        byte_automaton(expression, CompileLimits(states=500))


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (CompileLimits(seconds=0.2, states=1 << 40), "takes more than 0.2 s of processor time"),
        (
            CompileLimits(memory_bytes=4 << 20, states=1 << 40),
            "needs more than memory_bytes, 4 MiB",
        ),
        (CompileLimits(), "its automaton has more than 131072 states"),
    ],
)
def test_expressions_that_blow_up_meet_a_limit(limits: CompileLimits, message: str) -> None:
    with pytest.raises(RequestError, match=f"^regex: (compiling it )?{message}"):
        byte_automaton("(?:a|b)*a(?:a|b){40}", limits)


# ---- Schemas ----


def test_any_object_is_json_of_bounded_depth() -> None:
    texts = byte_automaton(Content("json_object", "", max_depth=2))
    assert accepts(texts, {"a": [1, "x"], "b": {"c": None}, "d": -1.5e-7})
    assert not accepts(texts, {"a": [[1]]})
    assert not accepts(texts, [1])


# ---- Tokens ----


PARTS = {
    *(b"a", b"b", b"ab", b"ba", b"aab", b"12", b"1", b"-0", b"true", b"x"),
    *("é".encode(), "€".encode(), b"\xc3", b"\xa9", b"\xe2\x82", b"\xac"),
}


@pytest.mark.parametrize(
    "expression", ["(?:ab|ba)*", "[ab12]{1,3}", "(?:é)*a?€", "aab|ab", "(?:12|-0)+true"]
)
def test_token_strings_are_accepted_as_their_texts_are(expression: str) -> None:
    """Compare the automaton with Python's ``re`` on token sequences."""
    # This vocabulary has no tokenizer, so a constraint allows every way to split a text into
    # tokens.
    vocabulary = Vocabulary(WORDS.tokens)
    automaton = compiled(expression, vocabulary, VOCAB, (END,))
    pieces = [token for token, spelled in enumerate(vocabulary.tokens) if spelled in PARTS]
    pattern, lengths = re.compile(expression.encode()), {}
    for length in range(4):
        for tokens in itertools.product(pieces, repeat=length):
            state = 0
            for token in tokens:
                state = following(automaton, state, token) if state >= 0 else -1
            is_whole = state >= 0 and automaton.distances[state] == 0
            text = b"".join(vocabulary.tokens[token] or b"" for token in tokens)
            assert is_whole == bool(pattern.fullmatch(text)), text
            if is_whole:
                lengths.setdefault(length, text)
                assert following(automaton, following(automaton, state, END), END) >= 0
    assert automaton.shortest == min(lengths)
    assert following(automaton, 0, MASK) == -1


def test_forced_texts_are_spelled_as_the_tokenizer_does() -> None:
    free, forced = (
        compiled("abab12[ab]+", kind(WORDS.tokens), VOCAB, (END,)) for kind in (Vocabulary, Longest)
    )
    ways = [token for token in range(VOCAB) if following(free, 0, token) >= 0]
    assert [WORDS.tokens[token] for token in ways if following(forced, 0, token) >= 0] == [b"ab"]
    assert len(ways) > 1
    state = 0
    for spelled in (b"ab", b"ab", b"12", b"b"):
        state = following(forced, state, WORDS.tokens.index(spelled))
    assert forced.distances[state] == 0


def test_automata_survive_a_round_trip() -> None:
    made = compiled("(?:ab|ba)*x", WORDS, VOCAB, (END,))
    again = Constraint(made.constraint.data)
    assert again.data == made.constraint.data
    assert again.shortest == made.constraint.shortest == made.shortest


def test_a_constraint_without_a_token_string_is_refused() -> None:
    only = Vocabulary(tuple(text if text == b"ab" else None for text in WORDS.tokens))
    with pytest.raises(
        RequestError, match=r"^constraint: no tokens of this vocabulary make a text that it allows$"
    ):
        compiled("a", only, VOCAB, (END,))


# ---- The cache of compiled constraints ----


def test_compiled_constraints_are_kept_by_what_they_were_made_of(tmp_path: Path) -> None:
    asked = []

    def make(expression: str = "a|ab", ends: tuple[int, ...] = (END,), **others: Any) -> Constraint:
        wanted = Content("regex", expression, **others)

        def compile_now(made_of: bytes) -> Constraint:
            asked.append(wanted)
            return compile_content(
                wanted, vocabulary=WORDS, vocab_size=VOCAB, ends=ends, made_of=made_of
            )

        return keep_compiled(wanted, CompileLimits(), ["00", VOCAB, ends], tmp_path, compile_now)

    first = make()
    assert make().data == first.data
    assert len(asked) == 1
    make("a|b"), make(before="a"), make(ends=(END, 3))
    assert len(asked) == 4
    files = sorted(tmp_path.iterdir())
    assert len(files) == 4
    for file in files:
        data = bytearray(file.read_bytes())
        data[-40] ^= 1
        file.write_bytes(data)
    assert make().data == first.data, "what is damaged is made again"
    assert len(asked) == 5
    files[0].write_bytes(files[1].read_bytes())
    make(), make("a|b"), make(before="a"), make(ends=(END, 3))
    assert len(asked) in (8, 9), "a file under another's name is not taken"
    with pytest.raises(
        BundleError, match=r"^the constraint: the file is damaged: its SHA-256 does not match"
    ):
        Constraint(bytes(data))


def test_a_cache_folder_keeps_the_files_that_were_used_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_module, "MOST_FILES", 2)
    made: list[str] = []

    def make(text: str) -> None:
        def compile_now(made_of: bytes) -> Constraint:
            made.append(text)
            how: dict[str, Any] = {"vocab_size": VOCAB, "ends": (END,), "made_of": made_of}
            return compile_content(wanted, vocabulary=WORDS, **how)

        wanted = Content("regex", text)
        keep_compiled(wanted, CompileLimits(), [], tmp_path, compile_now)
        time.sleep(0.01)  # the times of two files must differ

    for text in ("a", "b", "a", "ab", "a", "b"):
        make(text)
    assert made == ["a", "b", "ab", "b"]
    assert len(list(tmp_path.iterdir())) == 2


def counted_compiler(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which each compilation adds the text of its constraint."""
    made: list[str] = []
    compile_one = compile_module.compile_content

    def counted(content: Content, *given: Any, **how: Any) -> Constraint:
        made.append(content.text)
        time.sleep(0.05)  # other threads run in the meantime
        return compile_one(content, *given, **how)

    monkeypatch.setattr(compile_module, "compile_content", counted)
    return made


def test_a_bundle_forgets_the_constraint_that_was_not_used_for_longest(demo_bundle: Path) -> None:
    how: dict[str, Any] = {"cache_dir": None}
    with dlm_runtime.open(demo_bundle) as bundle:
        steady = bundle.constraint(regex="steady", **how)
        for number in range(constraining.KEPT):
            bundle.constraint(regex=f"a{number}", **how)
            assert bundle.stored_constraint(regex="steady", **how) is steady
        assert bundle.stored_constraint(regex="a0", **how) is None
        assert bundle.stored_constraint(regex="a1", **how) is not None


def test_threads_that_want_the_same_constraint_compile_it_once(
    demo_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = counted_compiler(monkeypatch)
    with dlm_runtime.open(demo_bundle) as bundle, ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: bundle.constraint(regex="a+", cache_dir=None), range(8)))
    assert made == ["a+"]
    assert len(set(found)) == 1


def test_a_bundle_remembers_for_a_while_that_a_constraint_is_invalid(
    demo_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = counted_compiler(monkeypatch)
    with dlm_runtime.open(demo_bundle) as bundle:

        def refusal(regex: str) -> str:
            with pytest.raises(RequestError) as raised:
                bundle.constraint(regex=regex, cache_dir=None)
            return str(raised.value)

        assert refusal("(") == refusal("(") != refusal("[")
        assert made == ["(", "["]
        with pytest.raises(RequestError, match=r"without its \)"):
            bundle.stored_constraint(regex="(", cache_dir=None)
        monkeypatch.setattr(constraining, "FAILURE_S", 0.0)
        assert refusal("(")
        assert made == ["(", "[", "("]


# ---- Worst cases: random predictions ----
