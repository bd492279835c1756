"""Generates spoken commands, and the JSON call that each command asks for.

The commands depend only on a seed.

A command is made from a template of ``functions.py``. The template has slots, which are filled with
random values from ``values.py``. Some templates and values are held out: they are not used in
training.

- Templates. The templates in a function's list ``held_out`` are held out.
- Values. An open value is a name, an item or a phrase. Open values for which ``is_held_out`` is
  true are held out.

The label of a command is the call that belongs to the command. The following rules for labels
ensure that every
    command has exactly one right call:

- Free text is copied verbatim. Names of places, items, objects and points are copied without a
  leading ``the``.
- ``seven`` becomes 07:00. ``pm``, ``in the afternoon`` and ``in the evening`` add twelve hours.
  ``twelve`` alone and ``noon`` become 12:00, and ``midnight`` becomes 00:00.
- Arguments that a command does not mention are left out. Keys have the order of ``FUNCTIONS``.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import words
from functions import FUNCTIONS, Function
from paraphrases import PARAPHRASES
from values import KINDS, OPEN_KINDS, Side

_GROUP = re.compile(r"\[([^][()]*)\]|\(([^][()]*)\)")
_SLOT = re.compile(r"\{(\w+)(?:=(\w+))?\}")


@dataclass(frozen=True)
class Example:
    """One command, its call as compact JSON, and the function, template and values from which it
    was made.
    """

    prompt: str
    completion: str
    function: str
    template: str
    values: tuple[str, ...]
    """The open values in the command. The items of a list are separate entries."""


def slots(template: str) -> list[tuple[str, str]]:
    """Return ``(argument, kind)`` of every slot of a template, in order."""
    return [(match[1], match[2] or match[1]) for match in _SLOT.finditer(template)]


IMPERATIVE = re.compile(
    "(turn|switch|dim|set|make|heat|warm|put|change|open|close|shut|half open|move|pull|start|wait|add|create|get|buy|clean|"
    "vacuum|mop|dust|lock|unlock|send|tell|text|message|let|write|drive|roll|rotate|pick|take|grab|place|patrol|watch|check|"
    "guard|do|run|slow|speed up|limit|search|look|google|find) "
)
# "i need to" is put before this share of the training commands that start with a verb.
CARRIER_SHARE = 0.2


def has_carrier_held_out(function: Function) -> bool:
    """Return True if a held-out template of the function starts with ``i need to ...``.

    If the result is True, ``i need to`` is never added to training commands for the function.
    """
    return any(re.match(r"i \(.*?\) to ", template) for template in function.held_out)


def _resolve(template: str, rng: random.Random) -> str:
    """Choose one alternative of each group in a template, and keep each optional part with
    probability 1/2.

    If a part contains another part, the inner part is resolved first.
    """

    def decide(match: re.Match[str]) -> str:
        if match[1] is not None:
            return match[1] if rng.random() < 0.5 else ""
        return rng.choice(match[2].split("|"))

    while (resolved := _GROUP.sub(decide, template)) != template:
        template = resolved
    return template


def _say(literal: str, rng: random.Random) -> str:
    """Insert filler words at random places of a template's literal text."""
    return re.sub(
        r"(?<= )(?=\w)",
        lambda _: f"{rng.choice(words.FILLERS)} " if rng.random() < 0.015 else "",
        literal,
    )


def fill(
    template: str, rng: random.Random, sample: Callable[[str], tuple[str, Any]]
) -> tuple[str, dict[str, Any], list[str]]:
    """Resolve a template and fill its slots. ``sample`` returns a value for a kind of slot.

    Returns the words of the command, the value of every argument, and the list of the open values.
    The items of a list are separate open values.
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
    """Sometimes put ``i need to`` before a training command that begins with a verb.

    The command does not change if a held-out template of the function starts with ``i need to``.
    """
    if (
        not has_carrier_held_out(function)
        and IMPERATIVE.match(text)
        and rng.random() < CARRIER_SHARE
    ):
        return f"i {rng.choice(('need', 'want', 'have'))} to {text}"
    return text


def with_manners(text: str, rng: random.Random) -> str:
    """Sometimes add polite words before a command, and sometimes after the command."""
    if rng.random() < 0.35:
        text = f"{rng.choice(words.OPENINGS)}{rng.choice((',', '', ''))} {text}"
    if rng.random() < 0.2:
        text = f"{text}{rng.choice((',', '', ''))} {rng.choice(words.CLOSINGS)}"
    return text


def call_of(function: Function, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the call of a function, with its arguments in the declared order."""
    return {
        "name": function.name,
        "arguments": {key: arguments[key] for key in function.arguments if key in arguments},
    }


def compact(value: Any) -> str:
    """Return a value as JSON without spaces."""
    return json.dumps(value, separators=(",", ":"))


def make_example(function: Function, template: str, rng: random.Random, side: Side) -> Example:
    """Fill one template. ``side`` selects training values or held-out values."""
    text, arguments, values = fill(template, rng, lambda kind: KINDS[kind](rng, side))
    if side is Side.TRAINING:
        text = with_carrier(text, function, rng)
    text = with_manners(text, rng)
    return Example(
        text, compact(call_of(function, arguments)), function.name, template, tuple(values)
    )


def training_examples(seed: int) -> Iterator[Example]:
    """Yield an endless sequence of training commands, without held-out templates and values."""
    rng = random.Random(seed)
    while True:
        function = rng.choice(FUNCTIONS)
        template = rng.choice((*function.training, *PARAPHRASES[function.name]))
        yield make_example(function, template, rng, Side.TRAINING)


def held_out_examples(seed: int, count: int) -> list[tuple[str, Example]]:
    """Generate ``count`` different held-out commands.

    The label of a command says which part of the command is held out: ``template``, ``value`` or
    ``both``.

    The labels alternate. A command can only have the label ``value`` or ``both`` if it contains an
    open value.
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


def write_lines(path: Path, drawn: Iterable[tuple[str, ...]]) -> None:
    """Write prompts, their answers and, if present, their labels, one JSON object per line."""
    keys = ("prompt", "completion", "unseen")
    path.write_text(
        "".join(json.dumps(dict(zip(keys, line, strict=False))) + "\n" for line in drawn)
    )
    click.echo(f"{path} {path.stat().st_size} bytes")


@click.command()
@click.option(
    "--split",
    type=click.Choice(["training", "heldout"]),
    required=True,
    help="Training or held-out commands.",
)
@click.option(
    "--count", type=click.IntRange(1), default=500, show_default=True, help="Commands to write."
)
@click.option("--seed", type=int, default=1, show_default=True, help="Seed of the generator.")
@click.option(
    "--out", type=click.Path(path_type=Path), required=True, help="The .jsonl file to write."
)
def main(split: str, count: int, seed: int, out: Path) -> None:
    """Write commands and their calls, one JSON object per line.

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
