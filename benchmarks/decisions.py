"""Measure decisions of the second demo: their accuracy, their calibration and their speed.

    python benchmarks/decisions.py BUNDLE [--commands 3000] [--timed 100] [--seed 7]

A decision answers questions and gives a probability for each option. The script makes decisions
about random commands that are not in the training data. As in
``examples/demo/heldout-several.jsonl``, the training data does not contain the template of a
command, its values, or both. Each command asks for one to six function calls. There are two tasks:

- "function": The question is which of the demo's 25 functions must be called first.
- "arguments": The function of the first call is given. The questions ask for its arguments, such as
  room and state. This task uses the commands whose first call has one of the forms in ``FORMS``. A
  decision asks for all arguments of a call. Each decision runs twice: with one prediction for all
  questions, and with one prediction per question.

Both tasks also have harder variants. "half" leaves out each word of the command with probability
0.5, so that some questions cannot be answered. "object" asks for the function in a JSON object. The
denoiser was not trained on this form.

An answer is right if the command asks for the option with the highest probability. The expected
calibration error (ECE) is the mean difference between the confidence and the share of right answers
in ten bins of equal width, weighted with the number of answers in each bin.

The time of a decision is compared with the time to generate the same answer. The generation uses
the same canvas, the same constraint, and the bundle's default loop. All times are processor times
of this process with one thread.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tables import table

import dlm_runtime
from dlm_runtime import Choice, Decision

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples" / "demo"))

FORMS = {
    "set_light": ("room", "state"),
    "set_blinds": ("room", "position"),
    "lock_door": ("door", "locked"),
    "set_window": ("window", "position"),
    "heat_seat": ("seat", "level"),
    "set_climate": ("fan", "zone"),
    "turn": ("direction", "degrees"),
}
"""For each function, the arguments of a call. Each argument has a fixed set of values."""
BINS = 10
ROWS = (
    ("function", 1),
    ("function, half", 1),
    ("function, object", 1),
    ("arguments", 1),
    ("arguments", 2),
    ("arguments, half", 1),
    ("arguments, half", 2),
)
"""Tasks, and the number of times that the answer is predicted."""


@dataclass(frozen=True)
class Case:
    """A command, the questions about it, and the right options.

    Args:
        prompt: The command.
        questions: The questions by name.
        answer: The template of the answer. None means a JSON object.
        right: The right option of each question.
    """

    prompt: str
    questions: dict[str, Choice]
    answer: str | None
    right: dict[str, str]

    def arguments(self) -> dict[str, Any]:
        chat = [{"role": "user", "content": self.prompt}]
        rest = 0 if self.answer is None else 1
        return {"questions": self.questions, "chat": chat, "answer": self.answer, "rest": rest}


def cases(count: int, seed: int) -> dict[str, list[Case]]:
    """Return the cases of both tasks."""
    from several import EVERY_FUNCTION, held_out_requests

    names = Choice([function.name for function in EVERY_FUNCTION])
    found: dict[str, list[Case]] = {"function": [], "arguments": []}
    rng = random.Random(seed)
    drawn = [request for _, request in held_out_requests(seed, count, fewest=1)]
    calls = [json.loads(request.completion)[0] for request in drawn]
    values: dict[tuple[str, str], set[str]] = defaultdict(set)
    for call in calls:
        for argument, value in call["arguments"].items():
            values[call["name"], argument].add(json.dumps(value))
    for request, call in zip(drawn, calls, strict=True):
        name = call["name"]
        case = Case(request.prompt, {"name": names}, '[\n{"name":"<mask:name>",', {"name": name})
        found["function"].append(case)
        arguments = call["arguments"]
        if FORMS.get(name) == tuple(arguments):
            slots = ",".join(f'"{each}":<mask:{each}>' for each in arguments)
            found["arguments"].append(
                Case(
                    request.prompt,
                    {each: Choice(sorted(values[name, each])) for each in arguments},
                    f'[\n{{"name":"{name}","arguments":{{{slots}}}}}',
                    {each: json.dumps(value) for each, value in arguments.items()},
                )
            )
    for task in ("function", "arguments"):
        found[f"{task}, half"] = [
            replace(
                case, prompt=" ".join(word for word in case.prompt.split() if rng.random() < 0.5)
            )
            for case in found[task]
        ]
    found["function, object"] = [replace(case, answer=None) for case in found["function"]]
    return found


def quality(made: Sequence[tuple[Case, Decision]]) -> list[str]:
    """Return the cells of a table row about the quality of decisions.

    The cells are the number of answers, the accuracy, the mean confidence, the ECE, and the passes
    per decision.
    """
    said = [
        (decision.answers[name].confidence, decision.answers[name].best == right)
        for case, decision in made
        for name, right in case.right.items()
    ]
    bins: dict[int, list[tuple[float, bool]]] = defaultdict(list)
    for confidence, is_right in said:
        bins[min(int(confidence * BINS), BINS - 1)].append((confidence, is_right))
    error = sum(
        abs(sum(confidence for confidence, _ in each) - sum(is_right for _, is_right in each))
        for each in bins.values()
    )
    whole = statistics.mean(
        all(decision.answers[name].best == right for name, right in case.right.items())
        for case, decision in made
    )
    return [
        str(len(made)),
        str(len(said)),
        f"{100 * statistics.mean(is_right for _, is_right in said):.1f}%",
        f"{100 * whole:.1f}%",
        f"{statistics.mean(confidence for confidence, _ in said):.3f}",
        f"{error / len(said):.3f}",
        f"{statistics.mean(decision.nfe for _, decision in made):.2f}",
    ]


def processor_ms(run: Callable[[], Any]) -> float:
    began = time.process_time()
    run()
    return 1e3 * (time.process_time() - began)


def timed(bundle: dlm_runtime.Bundle, chosen: Sequence[Case]) -> list[list[str]]:
    """Return two rows: one for decisions, and one for generating the same answers.

    Each row contains the median processor time and the mean number of passes.
    """
    from dlm_runtime.generation.deciding import POLICY

    rows: dict[str, list[tuple[float, int]]] = {"decision": [], "generated answer": []}
    for case in chosen:
        deciding = bundle.deciding(**case.arguments())
        decided = deciding.arguments()
        generated = {name: value for name, value in decided.items() if name not in POLICY}
        for name, arguments in (("decision", decided), ("generated answer", generated)):
            nfe = bundle.generate(**arguments).nfe
            rows[name].append((processor_ms(lambda a=arguments: bundle.generate(**a)), nfe))
    return [
        [
            name,
            f"{statistics.median(ms for ms, _ in each):.2f}",
            f"{statistics.mean(nfe for _, nfe in each):.2f}",
        ]
        for name, each in rows.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--commands", type=int, default=3000)
    parser.add_argument("--timed", type=int, default=100)
    parser.add_argument("--seed", type=int, default=7)
    given = parser.parse_args()
    found = cases(given.commands, given.seed)
    with dlm_runtime.open(given.bundle, threads=1) as bundle:
        rows, times = [], []
        for task, predictions in ROWS:
            made = [
                (case, bundle.decide(**case.arguments(), passes=predictions))
                for case in found[task]
            ]
            rows.append([task, str(predictions), *quality(made)])
        for task in ("function", "arguments"):
            times += [[task, *row] for row in timed(bundle, found[task][: given.timed])]
    head = ["task", "predictions", "commands", "answers", "right", "all right", "confidence"]
    print(table([*head, "ECE", "passes"], rows))
    print(table(["task", "", "processor time, ms", "passes"], times))


if __name__ == "__main__":
    main()
