"""Regular expressions as constraints: exactly their texts, within the limits, whatever characters
are in them.
"""

from __future__ import annotations

import itertools
import json
import random
import re
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from constraints import compiled, drawn_texts, following, made_up_vocabulary
from hypothesis import given, settings
from hypothesis import strategies as st

from dlm_runtime import RequestError
from dlm_runtime.constraints import byte_automaton as module
from dlm_runtime.constraints import expressions, schema
from dlm_runtime.constraints.automaton import compile_automaton
from dlm_runtime.constraints.byte_automaton import (
    Budget,
    ByteAutomaton,
    CompileLimits,
    byte_automaton,
)
from dlm_runtime.constraints.patterns import inside_text
from dlm_runtime.constraints.vocabulary import Vocabulary
from dlm_runtime.tools import CallFormat, Tools

LIMITS = CompileLimits()


def texts_over(letters: str, longest: int) -> list[str]:
    return [
        "".join(each)
        for length in range(longest + 1)
        for each in itertools.product(letters, repeat=length)
    ]


# ---- Texts match as a whole ----


@pytest.mark.parametrize(
    "expression",
    [
        *(
            ".*d",
            "[^a]*",
            r"\D+d?",
            r"\W|d.",
            r"(?s:.)",
            r"\S+@\S+\.com",
            "a|ab",
            "(?:a|ab)(?:c|bcd)",
            "a|[^b]*b",
        ),
        *(
            "a$",
            "^a",
            "(abc|a)$",
            "a(b*(X|$))?",
            "^(a|^b)|c$",
            "(?:^|a)b",
            "(^a)?b?",
            r"\Aa\z",
            "^^a$$",
            "(?i)^A|^(?:^b)",
        ),
        *(
            "[]a]|[^]a]",
            "[[ab]&&[^b]]",
            r"\^\$",
            "[$^]",
            "(?P<x>^a)b|(?:)",
            "^",
            "$",
            "^$",
            "(?x) a [b # ^[\n ] # ^(\n b",
        ),
        *("(?m)^a$\n^b$", "(?m:^)a|(?m)^b", r"(?-u:\b)a(?-u:\B)b", "(?m)(?:^a\n?)*"),
    ],
)
def test_a_text_is_accepted_if_all_of_it_matches(expression: str) -> None:
    made = byte_automaton(expression, LIMITS)
    python = (
        expression.replace("(?-u:", "(?:")
        .replace(r"\z", r"\Z")
        .replace("[[ab]&&[^b]]", "a")
        .replace("[b # ^[\n ]", "b")
    )
    pattern = re.compile(re.sub(r"(.*)(\(\?[mix]\))", r"\2\1", python, flags=re.DOTALL))
    for text in [
        *texts_over("abcdX\n@", 4),
        "a@b.com",
        "@.com",
        "a^$b",
        "^",
        "$",
        "^$",
        "é",
        "dé",
        "a#b",
    ]:
        is_right = bool(pattern.fullmatch(text)) and not (
            text.endswith("\n") and "$" in expression and "(?m)" not in expression
        )
        assert made.matches(text.encode()) == is_right, text
    for text in ("\0", "a\0b", "d\0", "\0d"):
        assert not made.matches(text.encode()), "texts with a NUL are left out"


@pytest.mark.parametrize(
    "expression",
    [
        "a^b",
        "(^a)*",
        "(?:^a|b)+",
        "(^a)?{2}",
        "(?x)^a",
        "a(b|^)",
        r"(?m)b\A",
        "(?m:a)^",
        "(?x)[a#[\n]|^b",
    ],
)
def test_a_start_anchor_elsewhere_is_rejected_by_name(expression: str) -> None:
    with pytest.raises(
        RequestError,
        match=r"^regex: the anchor (\^|\\A) at character [0-9]+ is not supported there: ",
    ):
        byte_automaton(expression, LIMITS)


@st.composite
def anchored_expressions(draw: st.DrawFn, depth: int = 3) -> str:
    kinds = ("letter", "letter", "anchor", "either", "both", "both", "many", "maybe", "twice")
    kind = draw(st.sampled_from(kinds)) if depth else "letter"
    if kind == "letter":
        return draw(st.sampled_from(("a", "b", "[ab]", ".", "[^a]", r"\W", r"\D", r"\S", "é", "")))
    if kind == "anchor":
        return draw(st.sampled_from("^$"))
    first = draw(anchored_expressions(depth - 1))
    if kind in ("either", "both"):
        second = draw(anchored_expressions(depth - 1))
        return f"(?:{first}|{second})" if kind == "either" else first + second
    return f"(?:{first})" + {"many": "*", "maybe": "?", "twice": "{1,2}"}[kind]


@settings(max_examples=30, deadline=None)
@given(expression=anchored_expressions())
def test_random_expressions_accept_what_python_matches_or_are_rejected(expression: str) -> None:
    texts = texts_over("abé ", 4)
    pattern, made, message = re.compile(expression), None, ""
    try:
        made = byte_automaton(expression, LIMITS)
    except RequestError as err:
        message = str(err)
    if made is None:
        is_none = message == "regex: no text matches it" and not any(
            pattern.fullmatch(text) for text in texts
        )
        assert is_none or ("anchor" in message and re.search(r"[$^](?!a\])", expression)), message
        return
    for text in texts:
        assert made.matches(text.encode()) == bool(pattern.fullmatch(text)), text


# ---- Control characters ----


def test_texts_with_control_characters_are_generated_as_they_are() -> None:
    listed = ["a\x01b", "a\x02b", "\x7f", "\x1f", "x\x01"]
    made = byte_automaton(schema.choices(listed), LIMITS, True)
    assert drawn_texts(made, random.Random(0), 200) == set(listed)
    every = {f"a{chr(control)}b" for control in range(1, 32)}
    assert (
        drawn_texts(
            byte_automaton(schema.choices(sorted(every)), LIMITS, True), random.Random(0), 2000
        )
        == every
    )


def test_control_characters_of_call_formats_stay_what_they_are() -> None:
    written = CallFormat(
        before="\x01<", after="\x02>", between="\x01", start="\x01\x01", end="\x03"
    )
    tool = {
        "type": "function",
        "function": {"name": "f\x01\x00g", "parameters": {"properties": {"x": {"type": "string"}}}},
    }
    made = byte_automaton(
        Tools.checked([tool], "required", written, True).expression(), LIMITS, True
    )
    call = '\x01<{"name":"f\\u0001\\u0000g","arguments":{"x":"é"}}\x02>'
    assert made.matches(f"\x01\x01{call}\x01{call}\x03".encode())
    assert not made.matches(f"\x01\x01{call}o{call}\x03".encode())
    assert not made.matches(f"\x01\x01{call}\0{call}\x03".encode())
    assert module.between(made, "\x01\x01\x01<", "\x03").matches(call[2:].encode())


def test_control_characters_of_expressions_and_patterns_stay_what_they_are() -> None:
    for expression in ("a\x01b", r"a\x01b", r"a[\x01-\x02]b"):
        made = byte_automaton(expression, LIMITS)
        assert made.matches(b"a\x01b")
        assert not made.matches(b"aob")
    for pattern in ("^a\x01?b$", r"^a\u0001?b$", r"^a\x01?b$"):
        made = byte_automaton(
            schema.expression({"type": "string", "pattern": pattern}), LIMITS, True
        )
        assert made.matches(b'"ab"')
        assert not made.matches(b'"aob"')


@pytest.mark.parametrize("make", [schema.choices, lambda texts: expressions.quote(texts[0])])
def test_texts_with_a_nul_are_refused(make: Callable[[Sequence[str]], str]) -> None:
    with pytest.raises(
        RequestError, match=r"^a constraint cannot have a text with a NUL character: 'a\\x00b'"
    ):
        make(["a\0b", "zz"])


# ---- Limits ----


def processor_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


@pytest.mark.parametrize(
    ("expression", "is_of_json", "states"),
    [
        ("a{0,10000}", False, 10_001),
        ("[^a]{0,200}", False, 1601),
        (schema.expression({"type": "string", "maxLength": 1600}), True, 16_003),
        (schema.expression({"type": "string", "maxLength": 10_000}), True, None),
        pytest.param(
            *(schema.expression({"type": "array", "items": {}, "maxItems": 10_000}), True, None),
            marks=pytest.mark.slow,
        ),
        pytest.param(r"(?:\w|é){0,900}", False, None, marks=pytest.mark.slow),
        ("(?:a|b)*a(?:a|b){10}", False, 2048),
    ],
    ids=["optional", "negated", "maxLength", "long maxLength", "maxItems", "words", "exponential"],
)
def test_all_stages_together_stay_within_the_seconds(
    expression: str, is_of_json: bool, states: int | None
) -> None:
    limits, start = CompileLimits(seconds=1), processor_seconds()
    budget, message = Budget(limits), ""
    try:
        texts = byte_automaton(expression, limits, is_of_json, budget)
        assert len(texts.table) == states
        compile_automaton(texts, made_up_vocabulary(128, (7,)), 128, (7,), limits, budget)
    except RequestError as err:
        message = str(err)
    assert (states is None) == (message != "")
    assert re.match(
        "(regex: (its automaton has more than 32768 states|compiling it takes more than 1 s|its tokens)|$)",
        message,
    )
    assert processor_seconds() - start < 2


def test_a_spent_budget_stops_every_stage() -> None:
    texts, vocabulary = byte_automaton("[ab]{0,50}", LIMITS), made_up_vocabulary(128, (7,))
    spent = Budget(LIMITS)
    with pytest.raises(RequestError, match="takes more than 30 s of processor time"):
        spent.charge(30)
    stages: list[Callable[[Budget], Any]] = [
        lambda budget: byte_automaton("a", LIMITS, False, budget),
        lambda budget: module.between(texts, "a", "b", budget),
        lambda budget: compile_automaton(texts, vocabulary, 128, (7,), LIMITS, budget),
    ]
    for stage in stages:
        stage(Budget(LIMITS))
        with pytest.raises(RequestError, match="takes more than 30 s of processor time"):
            stage(spent)


def test_memory_counts_for_what_is_placed_and_walked() -> None:
    limits = CompileLimits(memory_bytes=1 << 20)
    texts = byte_automaton("[ab]{0,9000}", LIMITS)
    for stage in (
        lambda: module.between(texts, "a", "", Budget(limits)),
        lambda: compile_automaton(texts, made_up_vocabulary(128, (7,)), 128, (7,), limits),
    ):
        with pytest.raises(RequestError, match="needs more than memory_bytes, 1 MiB"):
            stage()


def test_compiling_can_be_interrupted() -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before, start = signal.signal(signal.SIGALRM, interrupt), time.monotonic()
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(KeyboardInterrupt):
            byte_automaton("(?:a|b)*a(?:a|b){40}", LIMITS)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - start < 15, "the process that compiles is ended with it"


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32), states=st.integers(1, 12), letters=st.integers(1, 3))
def test_minimising_finds_the_fewest_states(seed: int, states: int, letters: int) -> None:
    """Against Moore's refinement, of which each round looks at every pair of states."""
    source = np.random.default_rng(seed)
    table = np.full((states, 256), -1, np.int32)
    table[:, 97 : 97 + letters] = source.integers(-1, states, (states, letters))
    accepting = source.random(states) < 0.4
    made = module._minimised(table, accepting, 0, Budget(LIMITS))
    rows = np.column_stack(
        (np.append(table[:, 97 : 97 + letters] % (states + 1), [[states] * letters], axis=0),)
    )
    differ = np.not_equal.outer(np.append(accepting, False), np.append(accepting, False))
    for _ in range(states + 1):
        differ = differ | differ[rows[:, None, :], rows[None, :, :]].any(axis=2)
    reached = {0}
    for _ in range(states):
        reached |= {int(target) for state in reached for target in rows[state]}
    useful = [state for state in reached if differ[state, states]]
    if made is None:
        assert not differ[0, states]
        return
    assert len(made.table) == len({tuple(differ[state].tolist()) for state in useful})
    whole = ByteAutomaton(table, accepting)
    for text in texts_over("abc"[:letters], 5):
        assert made.matches(text.encode()) == whole.matches(text.encode())


@pytest.mark.parametrize(
    ("low", "high"),
    [
        (-(2**53), 2**53),
        (-(2**63), 2**63 - 1),
        (0, 2**64 - 1),
        (-(2**63), None),
        (None, 2**64 - 1),
        (10**18, 10**19 + 7),
    ],
)
def test_large_bounds_of_integers_are_exact(low: int | None, high: int | None) -> None:
    expression = expressions.integers(low, high)
    assert expression is not None
    made = byte_automaton(expression, CompileLimits(seconds=1), True)
    source = random.Random(1)
    near = [end + step for end in (low or 0, high or 0, 0) for step in range(-30, 31)]
    numbers = {
        *near,
        *(
            source.choice((1, -1)) * source.randrange(10 ** source.randint(1, 22))
            for _ in range(2000)
        ),
    }
    for number in numbers:
        is_in = (low is None or number >= low) and (high is None or number <= high)
        assert made.matches(str(number).encode()) == is_in, number
    for text in ("-0", "00", "01", "1.0", "+1", "1e3", ""):
        assert not made.matches(text.encode())


# ---- Patterns of ECMA-262 ----

CLASSES = [
    *(
        r"\d",
        r"\D",
        r"\w",
        r"\W",
        r"\s",
        r"\S",
        ".",
        "[^]",
        r"[\b]",
        r"[^\b]",
        "[a-fé]",
        "[^a-fé]",
        "[-a]",
        "[a-]",
        "[$^.]",
    ),
    *(
        r"[\d_]",
        r"[^\d_]",
        r"[\D]",
        r"[^\D]",
        r"[^\W\d]",
        r"[\W\d]",
        r"[^\w]",
        r"[^\W]",
        r"[\s\S]",
        r"[^\S]",
        r"[^\s]",
    ),
    *(
        r"[\W\s]",
        r"[^\W\s]",
        r"[^\S\n]",
        r"[^\D5]",
        r"[\u00e9-\u{1f600}]",
        r"[^\u0020-\u{10ffff}]",
        r"\xe9",
        r"\t|\n|\f",
        r"\.",
    ),
    *(r"(?:[^\W\d]|-)", r"[^\W\d_]+", r"[^ -~]", r"[\x20-\x7e\n]", r"[^\x00-\x1f]", r"[^\0]"),
]
POINTS = [
    *(
        8,
        9,
        10,
        12,
        13,
        *range(0x20, 0x7F),
        *range(0xA0, 0x180),
        0x2B0,
        0x345,
        0x3B4,
        0x661,
        0x967,
        0xE01,
        0xE50,
        0xE33,
    ),
    *(
        0x1000,
        0x1010,
        0x1680,
        0x17F,
        0x180E,
        *range(0x2000, 0x2030),
        0x205F,
        0x2060,
        0x212A,
        0x3000,
        0x4E00,
        0x6F22,
    ),
    *(0xAC00, 0xD7FF, 0xE000, 0xFEFF, 0xFF11, 0xFFFD, 0x10000, 0x1D7CE, 0x1F600, 0x10FFFF),
]


@pytest.fixture(scope="module")
def of_node() -> list[list[bool]]:
    """Whether each class matches each character, by the engine of node."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    program = (
        "const [c, p] = JSON.parse(require('fs').readFileSync(0));"
        "console.log(JSON.stringify(c.map(x => p.map(y => new RegExp(`^(?:${x})$`, 'u').test(String.fromCodePoint(y))))))"
    )
    done = subprocess.run(
        [node, "-e", program],
        input=json.dumps([CLASSES, POINTS]),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return json.loads(done.stdout)  # type: ignore[no-any-return]


@pytest.mark.parametrize("number", range(len(CLASSES)), ids=CLASSES)
def test_classes_of_patterns_are_those_of_ecmascript(
    number: int, of_node: list[list[bool]]
) -> None:
    inside = inside_text(f"^(?:{CLASSES[number]})$", "here")
    made = None if inside is None else byte_automaton(f'"{inside}"', LIMITS, True)
    for point, is_in in zip(POINTS, of_node[number], strict=True):
        text = json.dumps(chr(point), ensure_ascii=False).encode()
        assert (made is not None and made.matches(text)) == is_in, f"U+{point:04X}"


# ---- Host names ----


def is_host_name(text: str) -> bool:
    """RFC 1123 and RFC 5890, without Punycode: a label with -- in its third and fourth place is
    none.
    """
    labels = text.split(".")
    return len(text) <= 253 and all(
        0 < len(label) < 64 and label.isascii() and label.replace("-", "").isalnum() and "-" not in (label[0], label[-1])
        and label[2:4] != "--"
        for label in labels
    )  # fmt: skip


def test_host_names_are_valid() -> None:
    made = byte_automaton(expressions.FORMATS["hostname"], LIMITS, True)
    texts = drawn_texts(made, random.Random(3), 300)
    longest = {
        ".".join(label * 63 for label in "abc") + "." + "d" * 61,
        ".".join("a" * 30 for _ in range(8)),
    }
    assert all(is_host_name(text) for text in texts)
    for text in {*longest, "a", "a-b", "a--b", "1.2", "xn-a", "a.b.c.d.e.f", "ab-c"}:
        assert made.matches(text.encode()) == is_host_name(text), text
    assert made.matches(b"a.b.c.d.e.f.g.h")
    wrong = [
        "",
        ".",
        "a.",
        ".a",
        "-a",
        "a-",
        "a..b",
        "a_b",
        "ab--c",
        "xn--a",
        "xn--X",
        "a.ab--c",
        "a" * 64,
        "A",
        "é",
    ]
    for text in (
        *wrong,
        ".".join(["a" * 63] * 4),
        "a." + ".".join(["b" * 63] * 4),
        ".".join(["a" * 50] * 5),
    ):
        assert not made.matches(text.encode()), text
    for length in range(1, 8):
        for letters in itertools.product("a-", repeat=length):
            assert made.matches("".join(letters).encode()) == is_host_name("".join(letters)), (
                letters
            )


@pytest.mark.parametrize("name", ["email", "uri"])
def test_host_names_in_other_formats_are_valid(name: str) -> None:
    made = byte_automaton(expressions.FORMATS[name], LIMITS, True)
    for text in drawn_texts(made, random.Random(4), 100):
        assert is_host_name(re.split("[/?#]", text.split("://")[-1].split("@")[-1])[0]), text
    assert not made.matches(f"a@{'b' * 63}.{'c' * 63}.{'d' * 63}.{'e' * 63}".encode())


# ---- Tokens ----


def test_long_chains_of_tokens_keep_their_distances() -> None:
    automaton = compiled("a{0,3000}b", Vocabulary((b"a", b"b", b"aa", None)), 4, (3,))
    assert automaton.shortest == 1
    state, tokens = 0, 0
    while (state := following(automaton, state, 2)) >= 0 and tokens < 2000:
        tokens += 1
    assert tokens == 1500
