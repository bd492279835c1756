"""Generates random values for the slots of templates, and decides which values are held out.

There is a sampler for each kind of slot. A sampler returns a value in two forms: as spoken in the
command, and as written in the call. ``data.py`` lists the rules for the written form.
"""

from __future__ import annotations

import enum
import functools
import itertools
import random
import re
import zlib
from collections.abc import Callable
from typing import Any

import words
from functions import FUNCTIONS


class Side(enum.Enum):
    """Says which open values (names, items and phrases) a sampler returns: training values mixed
    with unrelated phrases, only training values, or held-out values.
    """

    TRAINING = enum.auto()
    KNOWN = enum.auto()
    UNSEEN = enum.auto()


Sampler = Callable[[random.Random, Side], tuple[str, Any]]
"""``(rng, side) -> (spoken form, value in the call)``."""


def is_held_out(value: str) -> bool:
    """Return True for open values that training does not use.

    The CRC-32 of a value decides. It selects about one in eight values.
    """
    return zlib.crc32(value.encode()) % 8 == 0


WORD_POOLS = (words.NOUNS, words.VERBS, words.ADJECTIVES, words.FOODS, words.OBJECTS, words.NAMES)
ANY_WORDS = tuple(
    sorted(
        {*itertools.chain(*WORD_POOLS, words.PLACES, words.POINTS, words.SURFACES, words.GENRES)}
    )
)
ANY_PHRASE_SHARE = 0.35  # share of unrelated phrases among the open values in training


def _open(compose: Callable[[random.Random], str], article: float = 0.0) -> Sampler:
    """Make a sampler of open values.

    With probability ``article``, the command says ``the`` before the value. The value in the call
    has no ``the``.
    """

    def sample(rng: random.Random, side: Side) -> tuple[str, str]:
        # If a word never began a value in training, the denoiser would learn that no value begins
        # with this word. In training, a value can therefore begin with any word.
        source = (
            _any_phrase if side is Side.TRAINING and rng.random() < ANY_PHRASE_SHARE else compose
        )
        value = source(rng)
        while is_held_out(value) != (side is Side.UNSEEN):
            value = source(rng)
        return ("the " + value if rng.random() < article else value), value

    return sample


def _closed(*pairs: tuple[str, Any] | str) -> Sampler:
    """Make a sampler of values from a short list.

    Training commands and held-out commands use the same list of values.
    """
    choices = [(pair, pair) if isinstance(pair, str) else pair for pair in pairs]
    return lambda rng, side: rng.choice(choices)


def _number(low: int, high: int, step: int = 1, digits: float = 0.4) -> Sampler:
    """Make a sampler of whole numbers.

    A number is spoken as digits with probability ``digits``, and otherwise as words.
    """

    def sample(rng: random.Random, side: Side) -> tuple[str, int]:
        number = rng.randrange(low, high + 1, step)
        return (str(number) if rng.random() < digits else words.number_words(number)), number

    return sample


def _list(item: Sampler, most: int = 3) -> Sampler:
    """Make a sampler of one to ``most`` different values: ``a``, ``a and b``, ``a, b and c`` or ``a
    and b and c``.
    """

    def sample(rng: random.Random, side: Side) -> tuple[str, list[Any]]:
        spoken: list[str] = []
        values: list[Any] = []
        for _ in range(rng.randint(1, most)):
            form, value = item(rng, side)
            if value not in values:
                spoken.append(form)
                values.append(value)
        glue = ", " if rng.random() < 0.6 else " and "
        head = glue.join(spoken[:-1])
        return (f"{head} and {spoken[-1]}" if head else spoken[-1]), values

    return sample


def _word(rng: random.Random, choices: tuple[str, ...], made_up: float = 0.03) -> str:
    return words.made_up_word(rng) if rng.random() < made_up else rng.choice(choices)


def _any_words(rng: random.Random, most: int) -> str:
    """Return one to ``most`` unrelated words.

    The denoiser can predict the returned words only by copying them.
    """
    return " ".join(_word(rng, rng.choice(WORD_POOLS)) for _ in range(rng.randint(1, most)))


@functools.cache
def _spoken_words() -> tuple[str, ...]:
    """Return the words of training templates that are never the first word of a value."""
    templates = (
        re.sub(r"\{.*?\}", " ", template)
        for function in FUNCTIONS
        for template in function.training
    )
    return tuple(
        sorted(
            {word for template in templates for word in re.findall("[a-z]{3,}", template)}
            - set(ANY_WORDS)
        )
    )


def _any_word(rng: random.Random) -> str:
    """Return a random word.

    One in four words is a compound such as ``playfence``: a word from commands, followed by any
    other word. Some words are made up.
    """
    if rng.random() < 0.25:
        return rng.choice(_spoken_words()) + rng.choice(ANY_WORDS)
    return _word(rng, ANY_WORDS, 1 / 6)


def _any_phrase(rng: random.Random) -> str:
    """Return one to three unrelated words. Every listed word has the same probability."""
    return " ".join(_any_word(rng) for _ in range(rng.choice((1, 2, 2, 3))))


def _noun_phrase(rng: random.Random) -> str:
    article = rng.choice(("the", "the", "my", "a", "our", "some", "his"))
    adjective = f" {_word(rng, words.ADJECTIVES)}" if rng.random() < 0.4 else ""
    return f"{article}{adjective} {_word(rng, words.NOUNS)}"


def _contact(rng: random.Random) -> str:
    last = f" {rng.choice(words.NAMES)}" if rng.random() < 0.1 else ""
    return _word(rng, words.NAMES) + last


def _task(rng: random.Random) -> str:
    shape = rng.random()
    if shape < 0.15:
        return _any_words(rng, 3)
    if shape < 0.35:
        return f"{rng.choice(('call', 'email', 'visit', 'ask', 'thank'))} {_contact(rng)} about {_noun_phrase(rng)}"
    tail = (
        f" {rng.choice(('for', 'with', 'from', 'near'))} {_contact(rng)}"
        if rng.random() < 0.3
        else ""
    )
    return f"{rng.choice(words.VERBS)} {_noun_phrase(rng)}{tail}"


def _message(rng: random.Random) -> str:
    shape = rng.random()
    if shape < 0.2:
        return _any_words(rng, 4)
    clauses = (
        f"{rng.choice(words.STATEMENTS)} {_noun_phrase(rng)}",
        f"{rng.choice(words.STATEMENTS)} {_contact(rng)}",
    )
    if shape < 0.3:
        return " and ".join(clauses)
    return clauses[0] if shape < 0.75 else clauses[1]


def _music(rng: random.Random) -> str:
    shape = rng.random()
    if shape < 0.3:
        return rng.choice(words.GENRES)
    title = _any_words(rng, 3)
    return f"{title} by {_contact(rng)}" if shape < 0.6 else title


def _query(rng: random.Random) -> str:
    return (
        _any_words(rng, 3)
        if rng.random() < 0.3
        else f"{rng.choice(words.QUESTIONS)} {_noun_phrase(rng)}"
    )


def _item(rng: random.Random) -> str:
    amount = (
        rng.choice(("two ", "six ", "a dozen ", "more ", "fresh ", ""))
        if rng.random() < 0.3
        else ""
    )
    return amount + _word(rng, words.FOODS)


def _place(rng: random.Random) -> str:
    suffix = f" {rng.choice(('street', 'road', 'square', 'park', 'hotel', 'bridge'))}"
    return _word(rng, words.NAMES) + suffix if rng.random() < 0.4 else _word(rng, words.PLACES)


def _thing(choices: tuple[str, ...]) -> Callable[[random.Random], str]:
    def compose(rng: random.Random) -> str:
        adjective = f"{_word(rng, words.ADJECTIVES)} " if rng.random() < 0.5 else ""
        return adjective + _word(rng, choices)

    return compose


def _time(rng: random.Random, side: Side) -> tuple[str, str]:
    """Return a time of day in two forms: as spoken, and as ``HH:MM``."""
    shape = rng.random()
    if shape < 0.06:
        return rng.choice((("noon", "12:00"), ("midnight", "00:00")))
    if shape < 0.2:
        hour, minute = rng.randrange(24), rng.randrange(0, 60, 5)
        return f"{hour}:{minute:02d}", f"{hour:02d}:{minute:02d}"
    hour = rng.randint(1, 12)
    minute = rng.choice((0, 0, 0, 15, 30, 45, rng.randrange(10, 60, 5)))
    name = words.ONES[hour]
    if minute == 0:
        spoken = rng.choice((name, name, f"{name} o'clock", str(hour)))
    elif minute == 15 and rng.random() < 0.5:
        spoken = f"quarter past {name}"
    elif minute == 30 and rng.random() < 0.5:
        spoken = f"half past {name}"
    elif minute == 45 and rng.random() < 0.5:
        spoken = f"quarter to {words.ONES[hour % 12 + 1]}"
    else:
        spoken = f"{name} {words.number_words(minute)}"
    half = rng.random()
    if half < 0.4 and hour < 12 and not (hour == 11 and spoken.startswith("quarter to")):
        if half < 0.2:
            return f"{spoken} {rng.choice(('am', 'in the morning'))}", f"{hour:02d}:{minute:02d}"
        return (
            f"{spoken} {rng.choice(('pm', 'in the afternoon', 'in the evening'))}",
            f"{hour + 12:02d}:{minute:02d}",
        )
    return spoken, f"{hour:02d}:{minute:02d}"


def _degrees(rng: random.Random, side: Side) -> tuple[str, float]:
    """Return a temperature from 15 to 29 degrees, in steps of half a degree."""
    spoken, number = _number(15, 29)(rng, side)
    if rng.random() < 0.2:
        return (f"{number}.5" if spoken.isdigit() else f"{spoken} and a half"), number + 0.5
    return spoken, number


def _metres(rng: random.Random, side: Side) -> tuple[str, float]:
    """Return a distance from 1 to 20 metres, in steps of half a metre.

    The spoken form contains the unit.
    """
    spoken, number = _number(1, 20)(rng, side)
    if rng.random() < 0.25:
        return (
            f"{number}.5" if spoken.isdigit() else f"{spoken} and a half"
        ) + " metres", number + 0.5
    return f"{spoken} metre{'s' if number > 1 else ''}", number


KINDS: dict[str, Sampler] = {
    "room": _closed(*words.ROOMS),
    "color": _closed(*words.COLORS),
    "on_off": _closed("on", "off"),
    "percent": _number(5, 100, 5),
    "temperature": _degrees,
    "open_close": _closed(("open", 100), ("close", 0), ("half open", 50), ("shut", 0)),
    "up_down": _closed(("up", 100), ("down", 0), ("halfway", 50)),
    "amount": _number(1, 59),
    "unit": _closed("seconds", "minutes", "hours"),
    "label": _open(lambda rng: _word(rng, words.FOODS + words.NOUNS, 0.4), article=0.5),
    "task": _open(_task),
    "time": _time,
    "day": _closed(
        "today",
        "tomorrow",
        "tomorrow",
        *((f"on {d}", d) for d in words.WEEKDAYS),
        *(f"next {d}" for d in words.WEEKDAYS),
    ),
    "items": _list(_open(_item), most=4),
    "list": _closed(*words.LISTS),
    "music": _open(_music),
    "rooms": _list(_closed(*((f"the {room}", room) for room in words.ROOMS))),
    "clean_mode": _closed("vacuum", "mop", "dust"),
    "door": _closed(*words.DOORS),
    "locking": _closed(("lock", True), ("unlock", False)),
    "locked": _closed(("locked", True), ("unlocked", False)),
    "place": _open(_place, article=0.4),
    "stops": _list(_open(_place, article=0.4), most=2),
    "avoid": _closed(
        ("tolls", "tolls"),
        ("toll roads", "tolls"),
        ("motorways", "motorways"),
        ("ferries", "ferries"),
    ),
    "seat": _closed(*words.SEATS),
    "fan": _number(1, 7),
    "level": _number(1, 5),
    "contact": _open(_contact),
    "phone": _closed("mobile", "home", "work"),
    "message": _open(_message),
    "direction": _closed(*words.DIRECTIONS),
    "side": _closed("left", "right"),
    "metres": _metres,
    "angle": _number(10, 360, 5),
    "object": _open(_thing(words.OBJECTS)),
    "surface": _open(_thing(words.SURFACES)),
    "points": _list(_open(_thing(words.POINTS), article=0.4)),
    "rounds": _number(2, 12),
    "query": _open(_query),
    "appliance": _closed(*words.APPLIANCES),
    "entry": _closed(*(f"{which} {what}" for which in words.WHICH for what in words.ENTRIES)),
    "shop": _open(lambda rng: _word(rng, words.SHOPS)),
}
OPEN_KINDS = frozenset(
    (
        "label",
        "task",
        "items",
        "music",
        "place",
        "stops",
        "contact",
        "message",
        "object",
        "surface",
        "points",
        "query",
        "shop",
    )
)
