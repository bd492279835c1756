"""Generates commands that ask for several calls, and the ordered list of these calls.

A command consists of one to six *clauses*, which are joined by ``, then``, ``and`` and similar
words. Each clause asks for one call. A clause is made from a template of ``functions.py`` or of
four further functions. Some clauses refer to an earlier clause, with words such as ``ten minutes
later``, ``there``, ``her`` or ``it``. As in ``data.py``, some templates and values are held out of
training. If a held-out command tests held-out templates, all of its clauses have held-out
templates.

The label rules of ``data.py`` and the following rules ensure that every command has exactly one
right list:

- A reference such as ``there`` means the room of the latest earlier call that has a room. In the
  list of calls, the room's name is written in place of the reference. References to contacts,
  objects, lists and destinations follow the same rule.
- The time of an earlier call is written as ``$n``, where ``n`` is the number of the call. The first
  call has number 1. A time some minutes later or earlier is written as ``$2+10`` or ``$2-90``.
- A reference to the result of an earlier call is also written as ``$n``, because the result is not
  known yet.
- If a clause ends in free text or a list, the word before the next clause is never just ``and`` or
  a comma, so that the end of the text is clear.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import words
from data import call_of, compact, fill, slots, with_carrier, with_manners, write_lines
from functions import FUNCTIONS, Function
from paraphrases import PARAPHRASES
from values import KINDS, OPEN_KINDS, Side

MOST_CALLS = 6

MORE_FUNCTIONS = (
    Function(
        "set_alarm",
        ("time", "day"),
        (
            "wake me[ up] at {time}[ {day}]",
            "set (an|the) alarm for {time}[ {day}]",
            "{day} wake me[ up] at {time}",
            "get me (up|out of bed) at {time}[ {day}]",
            "i (want|need) an alarm at {time}[ {day}]",
            "alarm at {time}[ {day}]",
            "my alarm should ring at {time}[ {day}]",
        ),
        (
            "set (an|the) alarm {day} for {time}",
            "wake me[ up] {day} at {time}",
        ),
    ),
    Function(
        "start_appliance",
        ("appliance", "time"),
        (
            "(start|run) the {appliance}[ at {time}]",
            "switch the {appliance} on[ at {time}]",
            "have the {appliance} (running|started) at {time}",
            "at {time} (start|run) the {appliance}",
            "let the {appliance} run[ at {time}]",
            "i want the {appliance} to start at {time}",
        ),
        (
            "at {time} switch the {appliance} on",
            "have the {appliance} start[ at {time}]",
        ),
    ),
    Function(
        "read_calendar",
        ("entry", "day"),
        (
            "read me the {entry} of the day",
            "(read|tell) me my {entry}[ {day}]",
            "what is my {entry}[ {day}]",
            "(look up|check) my {entry}[ {day}]",
            "read [out ]the {entry} from my calendar",
            "when is my {entry}[ {day}]",
        ),
        (
            "tell me the {entry} of the day",
            "read [out ]my {entry}[ {day}] from my calendar",
        ),
    ),
    Function(
        "find_place",
        ("query", "near"),
        (
            "find (a|the nearest) {query=shop}[ near {near=place}]",
            "where is (a|the nearest) {query=shop}",
            "is there a {query=shop} near {near=place}",
            "look for a {query=shop}[ near {near=place}]",
            "search for the nearest {query=shop}",
            "show me a {query=shop}[ close to {near=place}]",
        ),
        (
            "find (a|the nearest) {query=shop} close to {near=place}",
            "where is a {query=shop} near {near=place}",
        ),
    ),
)

# For each function: templates that refer to an earlier call. The templates in the first tuple are
# for training. The templates in the second tuple are held out.
REFERENCES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "set_alarm": (
        (
            "wake me[ up] again {time=later}",
            "(set|add) (another|a second) alarm {time=later}",
            "{time=later} wake me[ up] again",
            "another alarm {time=later}",
        ),
        ("{time=later} (set|add) another alarm",),
    ),
    "start_appliance": (
        (
            "(start|run) the {appliance} {time=later}",
            "{time=later} (start|run) the {appliance}",
            "switch the {appliance} on {time=later}",
            "have the {appliance} (running|started) {time=later}",
            "(start|run) the {appliance} {time=same_time}",
            "let the {appliance} run {time=later}",
        ),
        ("{time=later} switch the {appliance} on", "let the {appliance} run {time=same_time}"),
    ),
    "add_reminder": (
        (
            "remind me {time=later} to {text=task}",
            "{time=later} remind me to {text=task}",
            "(set|add) a reminder {time=later} to {text=task}",
            "remind me {time=same_time} to {text=task}",
            "remind me of {text=finding} at {time}[ {day}]",
            "at {time} remind me of {text=finding}",
            "remind me of {text=finding} {time=later}",
        ),
        (
            "{time=later} don't let me forget to {text=task}",
            "{time=later} remind me of {text=finding}",
        ),
    ),
    "set_light": (
        (
            "(turn|switch) {state=on_off} the (light|lights) {room=there}",
            "(turn|switch) the (light|lights|lamp) {room=there} {state=on_off}",
            "(dim|set) the (light|lights) {room=there} to {brightness=percent} percent",
            "make the (light|lights) {room=there} {color}",
        ),
        (
            "(turn|switch) {state=on_off} the lamp {room=there}",
            "set the (light|lights) {room=there} to {color}",
        ),
    ),
    "set_thermostat": (
        (
            "set the (thermostat|heating) {room=there} to {temperature}[ degrees]",
            "make it {temperature} degrees {room=there}",
            "i'd like {temperature} degrees {room=there}",
            "(turn|put) the heating {room=there} to {temperature}[ degrees]",
        ),
        ("set the temperature {room=there} to {temperature}[ degrees]",),
    ),
    "set_blinds": (
        (
            "{position=open_close} the (blinds|shutters|curtains) {room=there}",
            "(pull|put) the (blinds|shutters|curtains) {room=there} {position=up_down}",
            "(move|set) the (blinds|shutters) {room=there} to {position=percent} percent",
        ),
        ("(blinds|shutters|curtains) {position=up_down} {room=there}",),
    ),
    "play_music": (
        (
            "play {query=music} {room=there}",
            "put on {query=music} {room=there}",
            "i (want|would like) to hear {query=music} {room=there}",
            "let's (listen to|hear) {query=music} {room=there}",
        ),
        ("start {query=music} {room=there}",),
    ),
    "send_message": (
        (
            "(tell|text|message) {contact=them} that {text=message}",
            "let {contact=them} know that {text=message}",
            "send {contact=them} a (message|text) saying {text=message}",
            "(send|forward) {text=finding} to {contact}",
            "(tell|text) {contact} {text=finding}",
            "let {contact} know {text=finding}",
            "(send|forward) {text=finding} to {contact=them}",
            "(tell|text) {contact=them} {text=finding}",
        ),
        (
            "write {contact=them} that {text=message}",
            "message {contact} {text=finding}",
            "let {contact=them} know {text=finding}",
        ),
    ),
    "call_contact": (
        (
            "(call|ring|phone) {contact=them}",
            "(call|ring) {contact=them} on the {phone} (phone|number)",
            "get {contact=them} on the line",
            "make a call to {contact=them}",
        ),
        ("start a call with {contact=them}", "phone {contact=them} on the {phone} number"),
    ),
    "pick_and_place": (
        (
            "(put|place) {object=thing} on the {to=surface}",
            "(bring|carry) {object=thing} to the {to=surface}",
            "(take|move) {object=thing} to the {to=surface}",
            "pick {object=thing} up again and put it on the {to=surface}",
            "(move|carry) {object=thing} from {from=that_surface} to the {to=surface}",
        ),
        (
            "move {object=thing} on to the {to=surface}",
            "(take|bring) {object=thing} from {from=that_surface} to the {to=surface}",
        ),
    ),
    "add_to_list": (
        (
            "put {items} on {list=same_list}( too|)",
            "add {items} to {list=same_list}( too|)",
            "write {items} on {list=same_list}( as well|)",
            "add {items=finding_item} to (my|the|our) {list} list",
            "put {items=finding_item} on (my|the) {list} list",
        ),
        (
            "on {list=same_list} put {items}( too|)",
            "write {items=finding_item} on (my|the|our) {list} list",
        ),
    ),
    "navigate": (
        (
            "(take|drive|bring) (me|us) {destination=found_place}",
            "(go|drive|navigate) {destination=found_place}[ avoiding {avoid}]",
            "(drive|go) {destination=found_place}[ via {stops}]",
            "show me the way {destination=found_place}",
        ),
        (
            "(take|drive) (me|us) {destination=found_place} avoiding {avoid}",
            "i want to go {destination=found_place}",
        ),
    ),
    "find_place": (
        (
            "find (a|the nearest) {query=shop} near {near=there_place}",
            "look for a {query=shop} close to {near=there_place}",
            "is there a {query=shop} near {near=there_place}",
        ),
        ("show me a {query=shop} near {near=there_place}",),
    ),
}

JOINTS = (", and ", ", then ", ", and then ", ", also ", ", and also ")
LOOSE_JOINTS = (" and ", ", ", " then ", " and then ")
"""Further words that may join two clauses. They only follow a clause that does not end in free text
or a list.
"""
LISTS_AND_FREE_TEXT = OPEN_KINDS | {"rooms"}
OFFSETS = (
    (60, "an hour"),
    (60, "one hour"),
    (90, "an hour and a half"),
    (120, "two hours"),
    (30, "half an hour"),
)
SPOKEN = {
    "there": ("there", "there", "in there", "in that room", "in the same room"),
    "them": ("him", "her", "them"),
    "thing": ("it", "it", "that"),
    "that_surface": ("there",),
    "same_list": ("it", "that list", "the same list"),
    "same_time": ("at the same time",),
    "finding": ("it", "it", "that", "the answer", "the result", "what you find"),
    "finding_item": ("it", "that", "the result"),
    "found_place": ("there", "there", "to it", "to that place"),
    "there_place": ("there", "it", "that place"),
}
"""The words for each kind of reference. The words for the kind ``later`` come from ``_later``."""
MEANT_BY = {
    "later": "time",
    "same_time": "time",
    "there": "room",
    "them": "contact",
    "thing": "object",
    "that_surface": "to",
    "same_list": "list",
    "there_place": "destination",
    "finding": "finding",
    "finding_item": "finding",
    "found_place": "found place",
}
"""What each kind of reference stands for. An argument name, such as ``room``, means the latest earlier
call with this argument. The other names mean the latest result of such a kind (see ``RESULTS``).
"""
RESULTS = {
    "search_web": ("finding",),
    "read_calendar": ("finding",),
    "find_place": ("finding", "found place"),
}


@dataclass(frozen=True)
class Request:
    """One command, its list of calls as JSON, and the templates and values from which the command
    was made.
    """

    prompt: str
    completion: str
    functions: tuple[str, ...]
    templates: tuple[str, ...]
    values: tuple[str, ...]
    """The open values in the command. The items of a list are separate entries."""


def _later(call: str, rng: random.Random) -> tuple[str, str]:
    """Choose a random time that is relative to the time of an earlier call.

    ``call`` is the written form of the earlier call, such as ``$2``. Returns the spoken and the
    written form of the time.
    """
    if rng.random() < 0.35:
        minutes, spoken = rng.choice(OFFSETS)
    else:
        minutes = rng.randrange(5, 60, 5)
        spoken = f"{words.number_words(minutes) if rng.random() < 0.7 else minutes} minutes"
    tail, sign = rng.choice(
        (("later", "+"), ("later", "+"), ("after that", "+"), ("before that", "-"))
    )
    return f"{spoken} {tail}", f"{call}{sign}{minutes}"


def _refer(kind: str, meant: Any, rng: random.Random) -> tuple[str, Any]:
    """Return a reference in two forms: as spoken in the command, and as written in the call."""
    if kind == "later":
        return _later(meant, rng)
    return rng.choice(SPOKEN[kind]), [meant] if kind == "finding_item" else meant


class Speaker:
    """Builds a command clause by clause, and remembers what later clauses can refer to."""

    def __init__(self, rng: random.Random, side: Side, is_template_unseen: bool) -> None:
        self.rng, self.side, self.is_template_unseen = rng, side, is_template_unseen
        self.calls: list[dict[str, Any]] = []
        self.templates: list[str] = []
        self.values: list[str] = []
        self.text = ""
        self._meant: dict[str, Any] = {}
        self._joints = JOINTS

    def say(self, is_referring: bool) -> None:
        """Add a clause. If ``is_referring`` is True, the clause refers to an earlier call if
        possible.
        """
        choices = self._references() if is_referring else {}
        if not choices:
            choices = {function: self._plain(function) for function in EVERY_FUNCTION}
        function = self.rng.choice([f for f in choices for _ in range(SHARES.get(f.name, 1))])
        template = self.rng.choice(choices[function])
        last = ("", "")

        def sample(kind: str) -> tuple[str, Any]:
            nonlocal last
            meaning = MEANT_BY.get(kind)
            spoken, value = (
                KINDS[kind](self.rng, self.side)
                if meaning is None
                else _refer(kind, self._meant[meaning], self.rng)
            )
            last = (kind, spoken)
            return spoken, value

        text, arguments, values = fill(template, self.rng, sample)
        if self.side is Side.TRAINING:
            text = with_carrier(text, function, self.rng)
        self.text += (self.rng.choice(self._joints) if self.calls else "") + text
        is_open = last[0] in LISTS_AND_FREE_TEXT and text.endswith(last[1])
        self._joints = JOINTS if is_open else JOINTS + LOOSE_JOINTS
        self.calls.append(call_of(function, arguments))
        self.templates.append(template)
        self.values += values
        this = f"${len(self.calls)}"
        self._meant |= arguments | dict.fromkeys(RESULTS.get(function.name, ()), this)
        if "time" in arguments:
            self._meant["time"] = this

    def _plain(self, function: Function) -> Sequence[str]:
        if self.is_template_unseen:
            return function.held_out
        # The paraphrases are for training only, as in data.py.
        return function.training + (
            PARAPHRASES.get(function.name, ()) if self.side is Side.TRAINING else ()
        )

    def _references(self) -> dict[Function, Sequence[str]]:
        """Return the templates in which every reference can refer to an earlier call."""
        found = {}
        for name, (training, held_out) in REFERENCES.items():
            templates = held_out if self.is_template_unseen else training
            possible = [
                template
                for template in templates
                if all(
                    MEANT_BY[kind] in self._meant for _, kind in slots(template) if kind in MEANT_BY
                )
            ]
            if possible:
                found[BY_NAME[name]] = possible
        return found


EVERY_FUNCTION = FUNCTIONS + MORE_FUNCTIONS
BY_NAME = {function.name: function for function in EVERY_FUNCTION}
SHARES = {
    "set_alarm": 2,
    "start_appliance": 2,
    "add_reminder": 2,
    "read_calendar": 2,
    "find_place": 2,
}
"""Functions that are chosen more often than the others, because later clauses can refer to them."""
REFERENCE_SHARE = 0.5


def make_request(rng: random.Random, side: Side, is_template_unseen: bool, calls: int) -> Request:
    """Make a command that asks for this number of calls.

    ``side`` says whether open values are training values or held-out values.
    """
    speaker = Speaker(rng, side, is_template_unseen)
    for _ in range(calls):
        speaker.say(is_referring=rng.random() < REFERENCE_SHARE)
    return Request(
        with_manners(speaker.text, rng),
        "[\n" + ",\n".join(map(compact, speaker.calls)) + "\n]",
        tuple(call["name"] for call in speaker.calls),
        tuple(speaker.templates),
        tuple(speaker.values),
    )


EVENLY = (1.0,) * MOST_CALLS


def training_requests(
    seed: int, weights: Callable[[], Sequence[float]] = lambda: EVENLY
) -> Iterator[Request]:
    """Yield an endless sequence of training commands.

    ``weights`` returns the relative frequencies of commands with one call, two calls, and so on.
    """
    rng = random.Random(seed)
    while True:
        (calls,) = rng.choices(range(1, MOST_CALLS + 1), weights())
        yield make_request(rng, Side.TRAINING, False, calls)


def held_out_requests(seed: int, count: int, fewest: int = 3) -> list[tuple[str, Request]]:
    """Generate ``count`` different held-out commands.

    The label of a command says which part of the command is held out: ``template``, ``value`` or
    ``both``.

    The labels alternate, and so do the numbers of calls from ``fewest`` to six. A command can only
    have the label ``value`` or ``both`` if it contains an open value.
    """
    rng = random.Random(seed)
    cells = itertools.cycle(
        itertools.product(range(fewest, MOST_CALLS + 1), ("template", "value", "both"))
    )
    found: dict[str, tuple[str, Request]] = {}
    while len(found) < count:
        calls, unseen = next(cells)
        request = None
        while (
            request is None
            or request.prompt in found
            or not (unseen == "template" or request.values)
        ):
            request = make_request(
                rng, Side.KNOWN if unseen == "template" else Side.UNSEEN, unseen != "value", calls
            )
        found[request.prompt] = (unseen, request)
    return list(found.values())


@click.command()
@click.option(
    "--count", type=click.IntRange(1), default=300, show_default=True, help="Commands to write."
)
@click.option("--seed", type=int, default=1, show_default=True, help="Seed of the generator.")
@click.option(
    "--out", type=click.Path(path_type=Path), required=True, help="The .jsonl file to write."
)
def main(count: int, seed: int, out: Path) -> None:
    """Write held-out commands and their lists of calls, one JSON object per line.

    Example: python several.py --count 300 --out heldout-several.jsonl
    """
    drawn = held_out_requests(seed, count)
    write_lines(out, [(request.prompt, request.completion, unseen) for unseen, request in drawn])


if __name__ == "__main__":
    main()
