"""Defines the command ``decide``, which answers multiple-choice questions about a situation."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from dlm_export.cli.conversing import chat_option, conversation_options, take_conversation
from dlm_export.cli.options import (
    CHECKPOINT,
    command,
    group,
    json_option,
    number,
    opening_group,
    option,
    options,
    special_tokens_option,
    text,
)
from dlm_export.cli.printing import print_json, print_table
from dlm_export.cli.values import opening, text_or_stdin
from dlm_export.signals import cancelling
from dlm_runtime import Choice, Score, YesNo
from dlm_runtime.generation.deciding import Question


@command()
@click.argument("bundle", type=CHECKPOINT)
@options(
    group(
        "Questions",
        option(
            "--choice",
            "choices",
            multiple=True,
            metavar="NAME=OPTIONS",
            help="Question and its options, separated by commas; repeatable.",
        ),
        option(
            "--yes-no",
            "yes_no",
            multiple=True,
            metavar="NAME",
            help="Question whose options are true and false; repeatable.",
        ),
        option(
            "--score",
            "scores",
            multiple=True,
            metavar="NAME=LEVELS",
            help="Question and its levels from low to high, separated by commas; repeatable.",
        ),
    ),
    group(
        "Common options",
        text("--prompt", "State as plain text before the answer; - reads stdin.", "TEXT"),
        chat_option,
        *conversation_options,
        number("--passes", "Predictions; each one answers the most certain questions.", default=1),
        text("--answer", "Answer text with <mask:NAME> slots.  [default: a JSON object]", "TEXT"),
        number(
            "--rest", "Mask tokens after the answer; if above 0, text may follow.", 0, default=0
        ),
        special_tokens_option,
        json_option,
    ),
    opening_group,
)
def decide(
    bundle: Path,
    choices: tuple[str, ...],
    yes_no: tuple[str, ...],
    scores: tuple[str, ...],
    prompt: str | None,
    passes: int,
    answer: str | None,
    rest: int,
    special_tokens: bool,
    as_json: bool,
    **values: Any,
) -> None:
    """Use BUNDLE to answer multiple-choice questions, and print each option's probability.

    \b
    Example: dlm-export decide build/demo --chat "turn on the kitchen lights" --rest 32 \\
               --choice do=set_light,play_music --answer '{"name":"<mask:do>",'
    """
    conversation = take_conversation(values)
    if (prompt is None) == (conversation is None):
        raise click.UsageError("give one of --prompt, --chat and --messages")
    questions = _questions(choices, yes_no, scores)
    state: dict[str, Any] = {"chat": conversation}
    if prompt is not None:
        state = {"prompt": text_or_stdin(prompt)}
    cancel = threading.Event()
    with opening(values).open(bundle) as opened, cancelling(cancel):
        made = opened.decide(
            questions,
            **state,
            passes=passes,
            answer=answer,
            rest=rest,
            special_tokens=special_tokens,
            cancel=cancel,
        )
    if as_json:
        answers = {
            name: asdict(each) | {"best": each.best, "confidence": each.confidence}
            for name, each in made.answers.items()
        }
        print_json({"answers": answers, "text": made.text, "nfe": made.nfe})
        return
    rows = [
        [name, label, f"{prob:.4f}"]
        for name, each in made.answers.items()
        for label, prob in sorted(each.probabilities.items(), key=lambda pair: -pair[1])
    ]
    print_table(made.text, ["question", "option", "probability"], rows)
    for name, each in made.answers.items():
        if each.score is not None:
            click.echo(f"{name}: expected level {each.score:.3f}")


def _questions(
    choices: Iterable[str], yes_no: Iterable[str], scores: Iterable[str]
) -> dict[str, Question]:
    """Map the name of each question to the question. Raises click.UsageError."""
    found: list[tuple[str, Question]] = []
    for given in choices:
        name, listed = _split("--choice", given)
        found.append((name, Choice(listed)))
    found += [(name, YesNo()) for name in yes_no]
    for given in scores:
        name, listed = _split("--score", given)
        found.append((name, Score(listed)))
    names = [name for name, _ in found]
    if not names:
        raise click.UsageError("give at least one of --choice, --yes-no and --score")
    for name in names:
        if names.count(name) > 1:
            raise click.UsageError(f"the question {name!r} is given twice")
    return dict(found)


def _split(flag: str, given: str) -> tuple[str, list[str]]:
    name, mark, listed = given.partition("=")
    if not mark or not name:
        raise click.UsageError(f"{flag} {given!r}: write NAME=OPTION,OPTION")
    return name, listed.split(",")
