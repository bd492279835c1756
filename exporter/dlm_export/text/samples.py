# ruff: noqa: RUF001
"""Generates texts, lists of token ids and chats, to compare two tokenizers.

The texts contain many scripts, white space, code, combining marks in any order, and tokens of the
vocabulary.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

_LINES = (
    "The quick brown fox doesn't jump; it's 12:45, they'll pay $3,000.00 (or 10%)!",
    "I'M SURE WE'LL SEE 'S AND 'ſ AND 'Re AND 'VE, they'D said. don'T can't Let's 'sit 'tis",
    "Grüße aus Köln, où l'été était ça; año señor, œuvre, naïve façade, Ångström, İstanbul ıIiİ ß ẞ",
    "Příliš žluťoučký kůň úpěl ďábelské ódy. Zażółć gęślą jaźń. Ő ű șț ąęįų",
    "Съешь же ещё этих мягких французских булок, да выпей чаю. Їжак ґанок ў ј љ",
    "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία· ΐ ΰ ς σ Σ ᾳ ῇ",
    "إنَّ اللُّغَةَ العَرَبِيَّةَ جَمِيلَةٌ ١٢٣ فارسی ۴۵۶ می‌خواهم",
    "שָׁלוֹם עוֹלָם! יִדִּישׁ ﬡ ﬀ ﬁ",
    "हिन्दी में लिखा हुआ वाक्य, १२३। বাংলা ভাষা তমিழ் தமிழ் తెలుగు ಕನ್ನಡ മലയാളം ਗੁਰਮੁਖੀ ગુજરાતી ଓଡ଼ିଆ සිංහල",
    "ภาษาไทยไม่มีช่องว่างระหว่างคำ ລາວ မြန်မာ ភាសាខ្មែរ བོད་སྐད།",
    "我能吞下玻璃而不伤身体。臺灣繁體字、（括號）「引號」２０２４年１２月 豈更車",
    "私はガラスを食べられます。ｶﾀｶﾅ カタカナ がぎぐ ひらがな 々〆〤 ㍿ ㋿",
    "한국어 문장은 띄어쓰기가 있다. 각 간갈 각 뷁 ㄱㄴㄷ ﾡ",
    "ქართული ენა հայերեն አማርኛ ᏣᎳᎩ ᐃᓄᒃᑎᑐᑦ ᚠᛇᚻ ⲁⲃⲅ ꙮ 𐌰𐌱 𝔘𝔫𝔦 𝟙𝟚 𠜎𠜱 𒀀𒁀",
    "Tiếng Việt: ộ ộ ô̩ Việt Việt Åffin A\u030a e\u0301 e\u0323\u0302 q\u0307\u0323 q\u0323\u0307 \u212b \u2126 \u0344 ｆｕｌｌ",
    "🙂 👍🏽 👨‍👩‍👧‍👦 🇩🇪🇫🇷 🏳️‍🌈 ❤️ 1️⃣ ☎︎ \U0001fae8 😀😀😀",
    "def f(x: int) -> dict[str, float]:\n    return {'a': x**2, \"b\": [1, 2.5e-3, 0xFF]}  # ok\n\n\n\tif x!=3:\n\t\tpass\r\n",
    'for (int i=0;i<n;++i){ a[i] += b["key"]*~c->d; } // http://x.org/a?b=c&d=%20#e \\n \\u00e9',
    '{"name":"set_alarm","arguments":{"time":"07:30","label":"gym  bag"}}',
    '<p class="x">a &amp; b</p>\n\n\n<!-- c -->\r\n\r\n  <br/>\n',
    "   leading, trailing   \n \n  \t \n\n   x\u00a0y\u2003z\u3000w\u200bv\u2028u\u2029t\u0085s\ufeffr \v\f\x1c\x1f ",
    "a\x00b\x01\x7f\x80\ufffd\ufffe\U0010ffff\ue000 ▁ ▁▁ x▁y ▁a Ġ Ċ ĠĠ",
    "1 22 333 4444 55555 123456789012345 ½ ² Ⅷ ٣٤ १२ 一二三 ①② 1.000,5 -7e+10",
    "!!!??? ... --- ___ *** ((())) [[]] {{}} <<>> :;,.'\"`~@#$%^&*+=|\\/ ¿¡ «» “” ‘’ — … € £ ¥ © ™",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa bbbbbbbbbbbbb abababababab ",
)
_SPACES = (
    " ",
    "  ",
    "   ",
    "\n",
    "\n\n",
    "\r\n",
    "\t",
    " \n",
    "\n ",
    "\u00a0",
    "\u3000",
    "",
    "",
    "",
)
# Ranges of characters: the first code point of a script, and the number of its code points.
_SCRIPTS = (
    (0x20, 95),
    (0xA0, 0x1B0),
    (0x250, 0x120),
    (0x370, 0x90),
    (0x400, 0x100),
    (0x530, 0x60),
    (0x590, 0x60),
    (0x600, 0x100),
    (0x900, 0x80),
    (0x980, 0x80),
    (0xA00, 0x80),
    (0xA80, 0x80),
    (0xB80, 0x80),
    (0xC00, 0x80),
    (0xD00, 0x80),
    (0xD80, 0x80),
    (0xE00, 0x60),
    (0xF00, 0x100),
    (0x1000, 0xA0),
    (0x10A0, 0x60),
    (0x1100, 0x100),
    (0x1200, 0x180),
    (0x13A0, 0x60),
    (0x1780, 0x80),
    (0x1E00, 0x200),
    (0x2000, 0x70),
    (0x2070, 0x120),
    (0x2190, 0x270),
    (0x2E80, 0x200),
    (0x3040, 0xC0),
    (0x3130, 0x60),
    (0x4E00, 0x5200),
    (0xA000, 0x400),
    (0xAC00, 0x2BA4),
    (0xF900, 0x200),
    (0xFB00, 0x2B0),
    (0xFE00, 0x200),
    (0x10000, 0x400),
    (0x12000, 0x400),
    (0x1D100, 0x500),
    (0x1F300, 0x500),
    (0x20000, 0x800),
    (0x2F800, 0x220),
    (0xE0100, 0xF0),
)
FEW_MESSAGES, MOST_MESSAGES = 12, 100  # sizes of conversations in ``counted``
MOST_LETTERS = 4096
MOST_NUMBERS = 8  # numbers of a template of which sums and products are tried too
_DIGITS_AND_MARKS = "0123456789.,:;'\"!?()[]{}<>/\\|@#$%&*-_=+~^`sStTmMdDlLvVrReE"
_MARKS = (0x300, 0x70)  # the first combining mark, and the number of them


def lines(
    count: int, vocabulary: Sequence[str] = (), added: Sequence[str] = (), seed: int = 0
) -> Iterator[str]:
    """Yield ``count`` texts: first fixed texts, then random texts.

    The random texts may contain strings from ``vocabulary`` and ``added``.
    """
    yield from _LINES[:count]
    source = random.Random(seed)
    words = [word for line in _LINES for word in line.split(" ")]
    for number in range(count - len(_LINES)):
        parts = []
        for _ in range(source.randrange(1, 14)):
            kind = source.randrange(10)
            if kind < 4:
                parts.append(source.choice(words))
            elif kind < 6 and vocabulary:
                parts.append("".join(source.choices(vocabulary, k=source.randrange(1, 4))))
            elif kind == 6 and added:
                parts.append(source.choice(added))
            elif kind == 7:
                parts += source.choices(_DIGITS_AND_MARKS, k=source.randrange(1, 8))
            else:
                parts.append(_of_a_script(source, number))
            parts.append(source.choice(_SPACES) * source.choice((1, 1, 1, 2, 7)))
        yield "".join(parts)


def rows(count: int, vocab_size: int, seed: int = 0) -> Iterator[list[int]]:
    """Yield ``count`` lists of random token ids.

    Two of every three lists use only a few distinct ids, so that ids repeat.
    """
    source = random.Random(seed)
    for number in range(count):
        few = min(vocab_size, (vocab_size, 400, 40)[number % 3])
        first = source.randrange(vocab_size - few + 1)
        yield [first + source.randrange(few) for _ in range(source.randrange(24))]


def chats(
    count: int, roles: Sequence[str], literals: Sequence[str], seed: int = 0
) -> Iterator[list[dict[str, str]]]:
    """Yield ``count`` random conversations of up to six messages.

    Messages may contain strings from ``literals``.
    """
    source = random.Random(seed)
    contents = [*lines(60, added=[*literals], seed=seed), "", " ", "\n", *literals]
    usual = [role for role in ("user", "assistant") if role in roles]
    for number in range(count):
        length = source.randrange(1, 7)
        if number % 2 or not usual:
            order = source.choices(roles, k=length)
        else:  # alternating roles, as in real chats
            order = ["system"] * ("system" in roles and source.random() < 0.5) + [
                usual[at % len(usual)] for at in range(length)
            ]
        yield [{"role": role, "content": source.choice(contents)} for role in order]


def counted(roles: Sequence[str], numbers: Sequence[int]) -> Iterator[list[dict[str, str]]]:
    """Yield conversations of every small size, and with sizes close to ``numbers``.

    A template may compare the number of messages, or the length of a message, with a constant.
    """
    pairs = [*itertools.combinations_with_replacement(numbers[:MOST_NUMBERS], 2)]
    near = {
        number + more
        for number in (*numbers, *(a * b for a, b in pairs), *(a + b for a, b in pairs))
        for more in (-1, 0, 1, 2)
    }
    letters = [number for number in sorted(near) if 0 < number <= MOST_LETTERS]
    counts = {*range(1, FEW_MESSAGES + 1), *near, *(2 * number for number in near)}
    counts = {number for number in counts if 0 < number <= MOST_MESSAGES}
    usual = [role for role in ("user", "assistant") if role in roles]
    orders = [usual, ["user"], ["user", "assistant", "tool", "assistant"], ["user", "tool"]]
    for order in (order for order in orders if order and {*order} <= {*roles}):
        first = ["system"] if "system" in roles else []
        for lead, count in itertools.product(([], first) if first else ([],), sorted(counts)):
            said = [*lead, *itertools.islice(itertools.cycle(order), count)]
            yield [{"role": role, "content": f"m{at}"} for at, role in enumerate(said)]
    order = [role for role in ("system", *usual, "user") if role in roles]
    for count, unit, at in itertools.product(
        sorted(letters), ("x", "x ", "x\n"), range(len(order))
    ):
        yield [
            {"role": role, "content": (unit * count).strip() if place == at else "x"}
            for place, role in enumerate(order)
        ]


def _of_a_script(source: random.Random, number: int) -> str:
    first, size = (
        _SCRIPTS[number % len(_SCRIPTS)] if source.random() < 0.8 else source.choice(_SCRIPTS)
    )
    letters = [chr(first + source.randrange(size)) for _ in range(source.randrange(1, 9))]
    for at in range(len(letters)):
        if source.random() < 0.1:
            letters[at] += "".join(
                chr(_MARKS[0] + source.randrange(_MARKS[1])) for _ in range(source.randrange(1, 4))
            )
    return "".join(letters)
