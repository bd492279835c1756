"""Tests of patterns of JSON Schema as constraints.

The regular expression engines of node and Python are the references. If the engines disagree about
a string, the constraint must not allow this string.
"""

from __future__ import annotations

import itertools
import json
import random
import re
import shutil
import subprocess
import unicodedata
import warnings
from functools import lru_cache

import pytest
from constraints import ByteAutomaton, byte_automaton, schema_content

from dlm_runtime import RequestError

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
    *(
        r"\cJ",
        r"\u{1F600}",
        r"\uD83D\uDE00",
        r"\p{Lu}",
        r"\P{L}",
        r"\p{Script=Greek}",
        "(?i:[k-s])",
    ),
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
ATOMS = (
    *("a", "b", "-", "_", "[ab]", "[^a]", ".", r"\d", r"\w", r"\W", r"\s", r"\S", "é", '"', r"\\"),
    *(r"\n", r"\u00e9", "[^]", "[]", r"\-", r"[\w-]", r"[\w-.]", "{", "}", "]", "{1", "x{,", r"\/"),
)
LOOKS = (
    *(r"\b", r"\B", "^", "$", "(?=a)", "(?!a)", "(?<=a)", "(?<!b)", "(?=-|$)", "(?!^)", "(?!$)"),
    *("(?<=^|-)", "(?!ab)", "(?=.*b)", "(?!.*-$)", "(?=a*b)", r"(?<=\w)", "(?=a|bb)"),
)
ENGINE = """
const [patterns, texts] = JSON.parse(require('fs').readFileSync(0));
function engine(pattern) {
  for (const flag of ['u', '']) try { return new RegExp(pattern, flag); } catch (_) {}
}
console.log(JSON.stringify(patterns.map(pattern => {
  const found = engine(pattern);
  return found ? texts.map(text => found.test(text)) : null;
})));
"""


def of_node(patterns: list[str], texts: list[str]) -> list[list[bool] | None]:
    """For each pattern, return a list that says in which texts node finds the pattern.

    If node rejects a pattern, its result is None.
    """
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    done = subprocess.run(
        [node, "-e", ENGINE],
        input=json.dumps([patterns, texts]),
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def compiled(pattern: str) -> ByteAutomaton | None:
    """Compile the constraint for strings with a pattern.

    Returns None if no string contains the pattern.
    """
    try:
        return byte_automaton(schema_content({"type": "string", "pattern": pattern}))
    except RequestError as err:
        if "no text" in str(err) or "no value" in str(err):
            return None
        raise


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


@lru_cache
def classes_of_node() -> list[list[bool] | None]:
    return of_node([f"^(?:{each})$" for each in CLASSES], [chr(point) for point in POINTS])


@pytest.mark.parametrize("number", range(len(CLASSES)), ids=CLASSES)
def test_classes_of_patterns_are_those_of_ecmascript(number: int) -> None:
    expected = classes_of_node()[number]
    if expected is None:
        pytest.skip("this node does not read it")
    made, engine = compiled(f"^(?:{CLASSES[number]})$"), of_python(f"^(?:{CLASSES[number]})$")
    for point, is_in in zip(POINTS, expected, strict=True):
        letter = chr(point)
        is_accepted = made is not None and made.matches(quoted(letter))
        is_right = is_in and (engine is None or engine.search(letter) is not None)
        # Engines disagree about \w for combining marks and some other characters, and about \d for
        # digits of other scripts.
        is_unclear = unicodedata.category(letter) in ("Mn", "Mc", "Me", "Pc", "Cf", "Nd")
        assert is_accepted == is_right or (is_right and is_unclear), f"U+{point:04X}"


def of_python(pattern: str) -> re.Pattern[str] | None:
    """Compile a pattern with Python. Returns None if Python rejects the pattern.

    Also returns None for patterns with half of a surrogate pair, because Python's texts never
    contain half of a pair.
    """
    if r"\uD83D" in pattern:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return re.compile(pattern)
    except (re.error, FutureWarning):
        return None


def random_pattern(source: random.Random, depth: int) -> str:
    kind = source.random()
    if depth == 0 or kind < 0.4:
        quantifier = source.choice(("", "", "", "*", "+", "?", "{2}", "{0,2}", "{1,}", "*?"))
        atom = source.choice(ATOMS)
        return atom + ("" if atom in ("{", "{1", "x{,") else quantifier)
    if kind < 0.55:
        return source.choice(LOOKS)
    if kind < 0.8:
        return "".join(random_pattern(source, depth - 1) for _ in range(source.randint(1, 4)))
    inner = "|".join(random_pattern(source, depth - 1) for _ in range(source.randint(1, 2)))
    return source.choice(("(?:", "(")) + inner + ")" + source.choice(("", "", "*", "+", "?", "{2}"))


def test_random_patterns_are_found_where_node_finds_them() -> None:
    source = random.Random(4)
    patterns = [
        source.choice(("", "", "^")) + random_pattern(source, 3) + source.choice(("", "", "$"))
        for _ in range(300)
    ]
    texts = ["".join(each) for size in range(4) for each in itertools.product("ab-", repeat=size)]
    letters = 'ab-_é\n"\\ 1'
    texts += ["".join(source.choices(letters, k=source.randint(1, 7))) for _ in range(200)]
    compared = 0
    for pattern, expected in zip(patterns, of_node(patterns, texts), strict=True):
        if expected is None:
            continue
        made, message = None, ""
        try:
            made = compiled(pattern)
        except RequestError as err:
            message = str(err)
        if message:
            assert "inside a repetition without end" in message or "differently" in message
            continue
        compared += 1
        engine = of_python(pattern)
        for text, is_found in zip(texts, expected, strict=True):
            is_accepted = made is not None and made.matches(quoted(text))
            if text.isascii() and "\n" not in text and text:
                assert is_accepted == is_found, (pattern, text)
            else:
                assert is_found or not is_accepted, (pattern, text)
            if is_accepted and engine is not None:
                assert engine.search(text), (pattern, text)
    assert compared > 200


@pytest.mark.parametrize(
    ("pattern", "accepted", "rejected"),
    [
        (r"^[a-z\d](?:[a-z\d]|-(?=[a-z\d])){0,38}$", ["a", "a-b-c"], ["-a", "a-", "a--b"]),
        (r"^(?!.*\.\.)(?!\.)[\w.]+(?<!\.)$", ["a.b"], ["a..b", ".a", "a."]),
        ("(^|,)x(,|$)", ["x", "a,x"], ["ax"]),
        ("(?i)^ab$", ["aB"], ["abc"]),
        ("^(?P<name>a)$", ["a"], ["b"]),
        (r"^\_\-\@\:\#$", ["_-@:#"], ["_"]),
    ],
)
def test_patterns_of_real_schemas(pattern: str, accepted: list[str], rejected: list[str]) -> None:
    made = compiled(pattern)
    assert made is not None
    assert all(made.matches(quoted(text)) for text in accepted)
    assert not any(made.matches(quoted(text)) for text in rejected)


@pytest.mark.parametrize(
    ("pattern", "what"),
    [
        ("(a", r"a group without its \) at character 0"),
        (r"(a)\1", "a back-reference, which is not regular, at character 5"),
        ("(?<=ab)c", "look-behind of more than one character, which is not supported,"),
        ("(?:(?=ab)a)*", "look-ahead of more than one character inside a repetition"),
        (r"a\Z", r"an anchor that is not of ECMA-262 \(write \^ or \$\)"),
        ("a{,3}", r"\{, without a lower count"),
        ("^[^]]+$", r"\] at the start of a class, which engines read differently: write \\\]"),
        ("a{,}", r"\{, without a lower count"),
        (r"\p{Klingon}", "a property that Unicode does not have"),
        ("^*", "an anchor or look-around that is repeated"),
    ],
)
def test_what_is_wrong_is_said_with_the_path(pattern: str, what: str) -> None:
    with pytest.raises(RequestError, match=rf'^schema: #.*: pattern ".*{what}'):
        byte_automaton(schema_content({"type": "string", "pattern": pattern}))
