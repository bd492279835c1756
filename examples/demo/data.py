"""Seeded generator of spoken-style commands and the JSON calls they ask for.

A command is drawn from a *template*: literal words, ``[optional]`` parts, ``(one|of|these)`` and
slots ``{argument}`` or ``{argument=kind}``, where a kind is a sampler in ``KINDS``. Two things are
held out of training:

- templates: each function lists some that only ``unseen_template=True`` draws;
- values: an open value (a name, an item, a phrase) belongs to the held-out side if
  ``is_held_out(value)``.

Label rules, so that every command has exactly one right call:

- free text is copied verbatim; places, items, objects and points drop a leading ``the``;
- ``seven`` is 07:00; ``seven pm``, ``in the afternoon`` and ``in the evening`` add twelve hours,
  ``twelve`` alone is
  12:00, ``noon`` 12:00, ``midnight`` 00:00; what is not said is left out; keys follow the order in ``FUNCTIONS``.
"""

from __future__ import annotations

import enum
import functools
import itertools
import json
import random
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import words
from paraphrases import PARAPHRASES


class Side(enum.Enum):
    """Where open values come from: training with unrelated phrases among them, training as said, or
    held out.
    """

    TRAINING = enum.auto()
    KNOWN = enum.auto()
    UNSEEN = enum.auto()


Sampler = Callable[[random.Random, Side], tuple[str, Any]]
"""``(rng, side) -> (spoken form, value in the call)``."""


def is_held_out(value: str) -> bool:
    """Whether an open value is kept out of training: one in eight, by its CRC-32."""
    return zlib.crc32(value.encode()) % 8 == 0


WORD_POOLS = (words.NOUNS, words.VERBS, words.ADJECTIVES, words.FOODS, words.OBJECTS, words.NAMES)
ANY_WORDS = tuple(
    sorted(
        {*itertools.chain(*WORD_POOLS, words.PLACES, words.POINTS, words.SURFACES, words.GENRES)}
    )
)
ANY_PHRASE_SHARE = 0.35  # of the open values trained on


def _open(compose: Callable[[random.Random], str], article: float = 0.0) -> Sampler:
    """A sampler of open values; with probability ``article`` a spoken ``the`` that the value drops."""

    def sample(rng: random.Random, side: Side) -> tuple[str, str]:
        # A word that no training value starts with would never be predicted there, so any word may
        # start one.
        source = (
            _any_phrase if side is Side.TRAINING and rng.random() < ANY_PHRASE_SHARE else compose
        )
        value = source(rng)
        while is_held_out(value) != (side is Side.UNSEEN):
            value = source(rng)
        return ("the " + value if rng.random() < article else value), value

    return sample


def _closed(*pairs: tuple[str, Any] | str) -> Sampler:
    """A sampler of a small known set, the same in training and held-out."""
    choices = [(pair, pair) if isinstance(pair, str) else pair for pair in pairs]
    return lambda rng, side: rng.choice(choices)


def _number(low: int, high: int, step: int = 1, digits: float = 0.4) -> Sampler:
    """A sampler of whole numbers, spoken as digits with probability ``digits`` and in words
    otherwise.
    """

    def sample(rng: random.Random, side: Side) -> tuple[str, int]:
        number = rng.randrange(low, high + 1, step)
        return (str(number) if rng.random() < digits else words.number_words(number)), number

    return sample


def _list(item: Sampler, most: int = 3) -> Sampler:
    """A sampler of one to ``most`` different values: ``a``, ``a and b``, ``a, b and c`` or ``a and
    b and c``.
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
    """One to ``most`` unrelated words: nothing but copying predicts them."""
    return " ".join(_word(rng, rng.choice(WORD_POOLS)) for _ in range(rng.randint(1, most)))


@functools.cache
def _spoken_words() -> tuple[str, ...]:
    """Words that training templates have, and no value: a value that began with one would be the
    first to.
    """
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
    """One in four a compound such as ``playfence``, of a word that only commands have and any
    other; some others made up.
    """
    if rng.random() < 0.25:
        return rng.choice(_spoken_words()) + rng.choice(ANY_WORDS)
    return _word(rng, ANY_WORDS, 1 / 6)


def _any_phrase(rng: random.Random) -> str:
    """One to three unrelated words, every word of the lists as likely as any other."""
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
    """A spoken time of day and ``HH:MM``."""
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
    """A temperature from 15 to 29, in halves."""
    spoken, number = _number(15, 29)(rng, side)
    if rng.random() < 0.2:
        return (f"{number}.5" if spoken.isdigit() else f"{spoken} and a half"), number + 0.5
    return spoken, number


def _metres(rng: random.Random, side: Side) -> tuple[str, float]:
    """A distance from 1 to 20 metres, in halves, with its unit."""
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


@dataclass(frozen=True)
class Function:
    """A call the demo knows: its arguments in the order they are written, and its templates."""

    name: str
    arguments: tuple[str, ...]
    training: tuple[str, ...]
    held_out: tuple[str, ...]


FUNCTIONS = (
    Function(
        "set_light",
        ("room", "state", "brightness", "color"),
        (
            "(turn|switch) {state=on_off} the {room} (light|lights|lamp)",
            "(turn|switch) the {room} (light|lights|lamp) {state=on_off}",
            "{room} (light|lights) {state=on_off}",
            "(dim|set) the {room} (light|lights) to {brightness=percent} percent",
            "(make|turn|set) the {room} (light|lights) {color}",
            "[i want] the {room} (light|lights) in {color} at {brightness=percent} percent",
            "set the (light|lights|lamp) in the {room} to {color}[ and {brightness=percent} percent]",
            "(turn|switch) {state=on_off} the (light|lights) in the {room}",
        ),
        (
            "(turn|switch) the (light|lights|lamp) in the {room} {state=on_off}",
            "(dim|set) the (light|lights) in the {room} to {brightness=percent} percent",
        ),
    ),
    Function(
        "set_thermostat",
        ("temperature", "room"),
        (
            "set the (thermostat|heating) to {temperature}[ degrees][ in the {room}]",
            "(heat|warm) the {room} to {temperature} degrees",
            "make it {temperature} degrees[ in the {room}]",
            "(turn|put) the (thermostat|heating) in the {room} to {temperature}[ degrees]",
            "i'd like {temperature} degrees in the {room}",
            "change the {room} (thermostat|temperature) to {temperature}[ degrees]",
        ),
        ("set the {room} (heating|temperature) to {temperature}[ degrees]",),
    ),
    Function(
        "set_blinds",
        ("room", "position"),
        (
            "{position=open_close} the (blinds|shutters|curtains) in the {room}",
            "{position=open_close} the {room} (blinds|shutters|curtains)",
            "(blinds|shutters|curtains) {position=up_down} in the {room}",
            "(move|set) the {room} (blinds|shutters|curtains) to {position=percent} percent",
            "(pull|put) the (blinds|shutters|curtains) in the {room} {position=up_down}",
            "put the (blinds|shutters) in the {room} at {position=percent} percent",
        ),
        ("(pull|put) the {room} (blinds|shutters|curtains) {position=up_down}",),
    ),
    Function(
        "set_timer",
        ("duration", "unit", "label"),
        (
            "set a timer for {duration=amount} {unit}[ for {label}]",
            "set a timer[ for {label}] for {duration=amount} {unit}",
            "start a {duration=amount} {unit} timer[ for {label}]",
            "(count down|wait) {duration=amount} {unit}[ for {label}]",
            "timer {duration=amount} {unit}[ for {label}]",
            "give me {duration=amount} {unit}[ for {label}]",
            "i need a timer called {label} for {duration=amount} {unit}",
        ),
        (
            "start a timer for {duration=amount} {unit}[ called {label}]",
            "i need a {duration=amount} {unit} timer[ for {label}]",
        ),
    ),
    Function(
        "add_reminder",
        ("text", "time", "day"),
        (
            "remind me to {text=task}[ at {time}][ {day}]",
            "remind me [{day} ]to {text=task}[ at {time}]",
            "remind me {day} at {time} to {text=task}",
            "(set|add|create) a reminder to {text=task}[ {day}][ at {time}]",
            "(set|add|create) a reminder for {day}[ at {time}] to {text=task}",
            "don't let me forget to {text=task}[ {day}][ at {time}]",
            "i (need|have) to {text=task} {day}[ at {time}], remind me",
            "at {time} remind me to {text=task}",
            "make sure i {text=task} {day}[ at {time}]",
        ),
        (
            "remind me at {time}[ {day}] to {text=task}",
            "don't let me forget to {text=task} at {time}[ {day}]",
        ),
    ),
    Function(
        "add_to_list",
        ("items", "list"),
        (
            "add {items} to (my|the|our) {list} list",
            "add {items} to (my|the) list",
            "put {items} on (my|the|our) {list} list",
            "put {items} on (my|the|our) list",
            "write {items} on the {list} list",
            "(we need|we're out of|i need to buy) {items}",
            "on the {list} list put {items}",
            "my {list} list needs {items}",
        ),
        (
            "to (my|the|our) {list} list add {items}",
            "write {items} on (my|the) list",
        ),
    ),
    Function(
        "play_music",
        ("query", "room"),
        (
            "play {query=music}[ in the {room}]",
            "(put on|start) {query=music}[ in the {room}]",
            "i (want|would like) to hear {query=music}[ in the {room}]",
            "in the {room} play {query=music}",
            "let's (listen to|hear) {query=music}[ in the {room}]",
            "play me {query=music} on the {room} speaker",
        ),
        (
            "i (want|would like) to listen to {query=music}[ in the {room}]",
            "start {query=music} on the {room} speaker",
        ),
    ),
    Function(
        "clean_rooms",
        ("rooms", "mode"),
        (
            "clean {rooms}",
            "{mode=clean_mode} {rooms}",
            "(send|start) the vacuum robot to {mode=clean_mode} {rooms}",
            "have the robot clean {rooms}",
            "{rooms} (needs|need) cleaning",
            "it's time to {mode=clean_mode} {rooms}",
            "let the robot {mode=clean_mode} {rooms}",
        ),
        (
            "have the robot {mode=clean_mode} {rooms}",
            "it's time to clean {rooms}",
        ),
    ),
    Function(
        "lock_door",
        ("door", "locked"),
        (
            "{locked=locking} the {door} door",
            "(make sure|check that) the {door} door is {locked}",
            "i want the {door} door {locked}",
            "the {door} door should be {locked}",
            "keep the {door} door {locked}",
            "{locked=locking} the door called {door}",
        ),
        ("(leave|keep) the door called {door} {locked}",),
    ),
    Function(
        "navigate",
        ("destination", "stops", "avoid"),
        (
            "(navigate|drive|go) to {destination=place}[ with a stop at {stops}]",
            "take me to {destination=place}[ via {stops}]",
            "(find|show) (the|a) way to {destination=place}[ avoiding {avoid}]",
            "drive (us|me) to {destination=place}[ via {stops}][ avoiding {avoid}]",
            "i (need|have) to get to {destination=place}[ without {avoid}]",
            "go via {stops} to {destination=place}",
            "(navigate|drive) to {destination=place} and avoid {avoid}",
            "set the destination to {destination=place}[ with a stop at {stops}]",
        ),
        (
            "take (us|me) to {destination=place}[ with a stop at {stops}]",
            "i (need|have) to go to {destination=place}[ avoiding {avoid}]",
        ),
    ),
    Function(
        "set_climate",
        ("temperature", "fan", "zone"),
        (
            "set the (car|cabin|air conditioning) to {temperature}[ degrees]",
            "set the {zone=seat} (zone|side) to {temperature}[ degrees]",
            "(turn|set) the fan to {fan}",
            "(car|cabin) temperature {temperature}[ degrees][ with the fan at {fan}]",
            "(cool|heat) the (car|cabin) to {temperature}[ degrees][ on the {zone=seat} side]",
            "air conditioning to {temperature} degrees[ and fan to {fan}]",
            "fan (level|speed) {fan}[ on the {zone=seat} side]",
        ),
        (
            "(turn|put) the air conditioning to {temperature}[ degrees][ with the fan at {fan}]",
            "(turn|set) the fan on the {zone=seat} side to {fan}",
        ),
    ),
    Function(
        "set_window",
        ("window", "position"),
        (
            "{position=open_close} the {window=seat} window",
            "roll the {window=seat} window {position=up_down}",
            "(set|move) the {window=seat} window to {position=percent} percent",
            "(open|lower) the {window=seat} window to {position=percent} percent",
            "i want the {window=seat} window at {position=percent} percent",
            "{position=open_close} the window on the {window=seat} side",
        ),
        ("(set|move) the window on the {window=seat} side to {position=percent} percent",),
    ),
    Function(
        "heat_seat",
        ("seat", "level"),
        (
            "(set|turn) the {seat} seat (heating|heater) to[ level] {level}",
            "(heat|warm) the {seat} seat",
            "(heat|warm) the {seat} seat at level {level}",
            "seat heating {level} for the {seat} seat",
            "{seat} seat heating (at|to) {level}",
            "(turn on|start) the {seat} seat (heating|heater)",
        ),
        ("(turn on|start) the {seat} seat (heating|heater) at level {level}",),
    ),
    Function(
        "call_contact",
        ("contact", "phone"),
        (
            "(call|ring|phone|dial) {contact}",
            "(call|ring) {contact} on (his|her|the) {phone} (phone|number)",
            "make a call to {contact}",
            "get {contact} on the line",
            "i (want|need) to (talk|speak) to {contact}",
            "(call|dial) the {phone} number of {contact}",
            "start a call with {contact}",
        ),
        (
            "i (want|need) to (call|ring) {contact}[ on the {phone} number]",
            "(ring|phone) the {phone} number of {contact}",
        ),
    ),
    Function(
        "send_message",
        ("contact", "text"),
        (
            "(tell|text|message) {contact} that {text=message}",
            "send a (message|text) to {contact} saying {text=message}",
            "send {contact} a (message|text) saying {text=message}",
            "(text|write) to {contact}, {text=message}",
            "let {contact} know that {text=message}",
            "write {contact} a message that says {text=message}",
            "message to {contact}, {text=message}",
        ),
        (
            "send a (message|text) to {contact} that says {text=message}",
            "(text|message) {contact} saying {text=message}",
        ),
    ),
    Function(
        "move",
        ("direction", "distance"),
        (
            "(move|go|drive|roll) {direction} {distance=metres}",
            "(move|go|drive) {distance=metres} {direction}",
            "(move|go) {direction}",
            "robot {direction} {distance=metres}",
            "{distance=metres} {direction} please",
            "(take|make) a step {direction}",
        ),
        ("robot, (roll|drive) {distance=metres} {direction}",),
    ),
    Function(
        "turn",
        ("direction", "degrees"),
        (
            "turn {direction=side} {degrees=angle} degrees",
            "turn {degrees=angle} degrees[ to the] {direction=side}",
            "(rotate|spin) {direction=side} by {degrees=angle} degrees",
            "turn[ to the] {direction=side}",
            "(rotate|spin) {degrees=angle} degrees to the {direction=side}",
        ),
        ("turn to the {direction=side} by {degrees=angle} degrees",),
    ),
    Function(
        "pick_and_place",
        ("object", "from", "to"),
        (
            "pick up the {object}[ from the {from=surface}] and put it on the {to=surface}",
            "(take|grab) the {object}[ from the {from=surface}] and (put|place) it on the {to=surface}",
            "(put|place) the {object} on the {to=surface}",
            "move the {object} from the {from=surface} to the {to=surface}",
            "(bring|carry) the {object} to the {to=surface}",
            "the {object} on the {from=surface} goes to the {to=surface}",
            "take the {object} off the {from=surface} and put it on the {to=surface}",
        ),
        (
            "(bring|carry) the {object} from the {from=surface} to the {to=surface}",
            "pick up the {object} and place it on the {to=surface}",
        ),
    ),
    Function(
        "patrol",
        ("points", "rounds"),
        (
            "patrol {points}[ {rounds} times]",
            "(start|run) a patrol of {points}[ with {rounds} rounds]",
            "(watch|check|guard) {points} on your patrol",
            "do {rounds} rounds (of|past) {points}",
            "go on patrol to {points}",
            "patrol[ {rounds} rounds] between {points}",
        ),
        (
            "(do|run) a patrol of {points}[ {rounds} times]",
            "go on patrol between {points}",
        ),
    ),
    Function(
        "set_speed",
        ("percent",),
        (
            "set (your|the) speed to {percent} percent",
            "(drive|go|move) at {percent} percent speed",
            "(slow down|speed up) to {percent} percent",
            "limit your speed to {percent} percent",
            "speed {percent} percent",
            "no faster than {percent} percent",
        ),
        ("(slow down|speed up) to {percent} percent speed",),
    ),
    Function(
        "search_web",
        ("query",),
        (
            "(search|look) for {query} (online|on the web)",
            "(look up|google) {query}",
            "search the web for {query}",
            "find out {query}",
            "what does the internet say about {query}",
            "do a web search for {query}",
        ),
        (
            "search online for {query}",
            "look up {query} on the web",
        ),
    ),
)

_GROUP = re.compile(r"\[([^][()]*)\]|\(([^][()]*)\)")
_SLOT = re.compile(r"\{(\w+)(?:=(\w+))?\}")


@dataclass(frozen=True)
class Example:
    """One command, its call as compact JSON, and where it came from."""

    prompt: str
    completion: str
    function: str
    template: str
    values: tuple[str, ...]
    """The open values said, lists taken apart."""


def slots(template: str) -> list[tuple[str, str]]:
    """``(argument, kind)`` of every slot of a template, in order."""
    return [(match[1], match[2] or match[1]) for match in _SLOT.finditer(template)]


def has_open_value(template: str) -> bool:
    """Whether the template always or sometimes says a value that can be held out."""
    return any(kind in OPEN_KINDS for _, kind in slots(template))


IMPERATIVE = re.compile(
    "(turn|switch|dim|set|make|heat|warm|put|change|open|close|shut|half open|move|pull|start|wait|add|create|get|buy|clean|"
    "vacuum|mop|dust|lock|unlock|send|tell|text|message|let|write|drive|roll|rotate|pick|take|grab|place|patrol|watch|check|"
    "guard|do|run|slow|speed up|limit|search|look|google|find) "
)
CARRIER_SHARE = 0.2  # of the training commands that begin with a verb: "i need to set a timer"


def has_carrier_held_out(function: Function) -> bool:
    """Whether a held-out template asks with ``i need to ...``: such a function is never trained on
    with these words.
    """
    return any(re.match(r"i \(.*?\) to ", template) for template in function.held_out)


def _resolve(template: str, rng: random.Random) -> str:
    """Decide every optional part (kept half the time) and alternative, innermost first."""

    def decide(match: re.Match[str]) -> str:
        if match[1] is not None:
            return match[1] if rng.random() < 0.5 else ""
        return rng.choice(match[2].split("|"))

    while (resolved := _GROUP.sub(decide, template)) != template:
        template = resolved
    return template


def _say(literal: str, rng: random.Random) -> str:
    """Now and then put a filler before a word of a template's own text."""
    return re.sub(
        r"(?<= )(?=\w)",
        lambda _: f"{rng.choice(words.FILLERS)} " if rng.random() < 0.015 else "",
        literal,
    )


def fill(
    template: str, rng: random.Random, sample: Callable[[str], tuple[str, Any]]
) -> tuple[str, dict[str, Any], list[str]]:
    """Decide a template's parts and fill its slots by ``sample``, which gets a slot's kind.

    Returns the words, the value of every argument, and the open values among them, lists taken
    apart.
    """
    text, arguments, values = "", {}, []
    resolved, end = _resolve(template, rng), 0
    for match in _SLOT.finditer(resolved):
        kind = match[2] or match[1]
        spoken, value = sample(kind)
        text += _say(resolved[end : match.start()], rng) + spoken
        arguments[match[1]] = value
        if kind in OPEN_KINDS:
            values += value if isinstance(value, list) else [value]
        end = match.end()
    return text + _say(resolved[end:], rng), arguments, values


def with_carrier(text: str, function: Function, rng: random.Random) -> str:
    """Now and then ``i need to`` before a training command that begins with a verb, where no
    held-out template says so.
    """
    if (
        not has_carrier_held_out(function)
        and IMPERATIVE.match(text)
        and rng.random() < CARRIER_SHARE
    ):
        return f"i {rng.choice(('need', 'want', 'have'))} to {text}"
    return text


def with_manners(text: str, rng: random.Random) -> str:
    """Sometimes an opening before a command, sometimes a closing behind it."""
    if rng.random() < 0.35:
        text = f"{rng.choice(words.OPENINGS)}{rng.choice((',', '', ''))} {text}"
    if rng.random() < 0.2:
        text = f"{text}{rng.choice((',', '', ''))} {rng.choice(words.CLOSINGS)}"
    return text


def call_of(function: Function, arguments: dict[str, Any]) -> dict[str, Any]:
    """The call of a function, its arguments in the order that it declares."""
    return {
        "name": function.name,
        "arguments": {key: arguments[key] for key in function.arguments if key in arguments},
    }


def compact(value: Any) -> str:
    """JSON without spaces."""
    return json.dumps(value, separators=(",", ":"))


def make_example(function: Function, template: str, rng: random.Random, side: Side) -> Example:
    """Fill one template; ``side`` says where open values come from."""
    text, arguments, values = fill(template, rng, lambda kind: KINDS[kind](rng, side))
    if side is Side.TRAINING:
        text = with_carrier(text, function, rng)
    text = with_manners(text, rng)
    return Example(
        text, compact(call_of(function, arguments)), function.name, template, tuple(values)
    )


def training_examples(seed: int) -> Iterator[Example]:
    """An endless stream of training commands: training templates and training values only."""
    rng = random.Random(seed)
    while True:
        function = rng.choice(FUNCTIONS)
        template = rng.choice((*function.training, *PARAPHRASES[function.name]))
        yield make_example(function, template, rng, Side.TRAINING)


def held_out_examples(seed: int, count: int) -> list[tuple[str, Example]]:
    """``count`` different held-out commands with what is unseen in each: ``template``, ``value`` or
    ``both``.

    The three kinds take turns. A command counts as ``value`` or ``both`` only if it says an open
    value.
    """
    rng = random.Random(seed)
    examples: list[tuple[str, Example]] = []
    prompts: set[str] = set()
    while len(examples) < count:
        unseen = ("template", "value", "both")[len(examples) % 3]
        function = rng.choice(FUNCTIONS)
        template = rng.choice(function.training if unseen == "value" else function.held_out)
        example = make_example(
            function, template, rng, Side.KNOWN if unseen == "template" else Side.UNSEEN
        )
        if example.prompt not in prompts and (unseen == "template" or example.values):
            prompts.add(example.prompt)
            examples.append((unseen, example))
    return examples


def write_lines(path: Path, drawn: Iterable[tuple[str, str, str]]) -> None:
    """Write commands, what they ask for and what is unseen in them, one JSON object a line."""
    keys = ("prompt", "completion", "unseen")
    path.write_text(
        "".join(json.dumps(dict(zip(keys, line, strict=True))) + "\n" for line in drawn)
    )
    click.echo(f"{path} {path.stat().st_size} bytes")


@click.command()
@click.option(
    "--split",
    type=click.Choice(["training", "heldout"]),
    required=True,
    help="Which side to draw from.",
)
@click.option(
    "--count", type=click.IntRange(1), default=500, show_default=True, help="Commands to write."
)
@click.option("--seed", type=int, default=1, show_default=True, help="Seed of the generator.")
@click.option(
    "--out", type=click.Path(path_type=Path), required=True, help="The .jsonl file to write."
)
def main(split: str, count: int, seed: int, out: Path) -> None:
    """Write commands and their calls, one JSON object a line.

    Example: python data.py --split heldout --count 510 --out heldout.jsonl
    """
    if split == "heldout":
        drawn = held_out_examples(seed, count)
    else:
        drawn = [
            ("none", example)
            for example, _ in zip(training_examples(seed), range(count), strict=False)
        ]
    write_lines(out, [(example.prompt, example.completion, unseen) for unseen, example in drawn])


if __name__ == "__main__":
    main()
