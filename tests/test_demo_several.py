"""Tests of the second demo: its data follows the rules, and its training uses states that occur in
decoding.
"""

from __future__ import annotations

import itertools
import json
import random
import re
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES / "demo"))

import data  # noqa: E402
import several  # noqa: E402
from functions import FUNCTIONS  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402
from values import Side, is_held_out  # noqa: E402

ARGUMENTS = {function.name: function.arguments for function in several.EVERY_FUNCTION}
TIME = re.compile(r"([01]\d|2[0-3]):[0-5]\d")
RELATIVE = re.compile(r"\$[1-5]([+-][1-9]\d*)?")


@pytest.fixture(scope="module")
def training() -> list[several.Request]:
    return list(itertools.islice(several.training_requests(3), 3000))


@pytest.fixture(scope="module")
def held_out() -> list[tuple[str, several.Request]]:
    return several.held_out_requests(3, 600)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(EXAMPLES / "demo-denoiser" / "tokenizer.json"))


class Fixed(random.Random):
    """A random generator that returns the numbers that the test sets."""

    def __init__(self, draws: list[float], choices: list[object]) -> None:
        super().__init__(0)
        self.draws, self.choices_left = draws, choices

    def random(self) -> float:
        return self.draws.pop(0)

    def choice(self, seq: object) -> object:  # type: ignore[override]
        return self.choices_left.pop(0)


def test_the_seed_decides_every_command(
    training: list[several.Request], held_out: list[tuple[str, several.Request]]
) -> None:
    assert training[:100] == list(itertools.islice(several.training_requests(3), 100))
    assert training[:100] != list(itertools.islice(several.training_requests(4), 100))
    assert held_out[:100] == several.held_out_requests(3, 600)[:100]


def test_a_list_has_as_many_calls_as_were_asked_for(training: list[several.Request]) -> None:
    for request in training:
        calls = json.loads(request.completion)
        assert [call["name"] for call in calls] == list(request.functions)
        for call in calls:
            assert list(call) == ["name", "arguments"]
            assert list(call["arguments"]) == [
                name for name in ARGUMENTS[call["name"]] if name in call["arguments"]
            ]
    assert {len(request.functions) for request in training} == set(range(1, several.MOST_CALLS + 1))
    assert {name for request in training for name in request.functions} == set(ARGUMENTS)


def test_held_out_templates_are_never_trained_on(
    training: list[several.Request], held_out: list[tuple[str, several.Request]]
) -> None:
    trained = {template for request in training for template in request.templates}
    for unseen, request in held_out:
        assert (unseen == "value") or not trained & {*request.templates}
    for functions in (FUNCTIONS, several.MORE_FUNCTIONS):
        assert all(not {*function.training} & {*function.held_out} for function in functions)
    for name, (known, unknown) in several.REFERENCES.items():
        assert not {*known} & {*unknown}, name
        assert {slot for template in known for slot in data.slots(template)} >= {
            slot
            for template in unknown
            for slot in data.slots(template)
            if slot[1] in several.MEANT_BY
        }, name


def test_held_out_values_are_never_trained_on(
    training: list[several.Request], held_out: list[tuple[str, several.Request]]
) -> None:
    trained = {value for request in training for value in request.values}
    unseen_values = {
        value for unseen, request in held_out if unseen != "template" for value in request.values
    }
    assert len(unseen_values) > 300
    assert not trained & unseen_values
    assert not any(map(is_held_out, trained))


def test_held_out_commands_take_turns_and_differ(
    held_out: list[tuple[str, several.Request]],
) -> None:
    cells = [(len(request.functions), unseen) for unseen, request in held_out]
    assert all(
        cells.count(cell) == 50
        for cell in itertools.product((3, 4, 5, 6), ("template", "value", "both"))
    )
    assert len({request.prompt for _, request in held_out}) == 600


def test_results_are_of_earlier_calls_that_have_one(training: list[several.Request]) -> None:
    references = 0
    for request in training:
        for number, call in enumerate(json.loads(request.completion), 1):
            for index in re.findall(r"\$(\d)", json.dumps(call["arguments"])):
                references += 1
                assert 1 <= int(index) < number
                giver = request.functions[int(index) - 1]
                if call["arguments"].get("time", "").startswith(f"${index}"):
                    assert "time" in json.loads(request.completion)[int(index) - 1]["arguments"]
                    continue
                # Every reference is the number of a call with a result. This is also true for a
                # place near a destination that a search found: its argument contains the number of
                # the search.
                assert giver in several.RESULTS, request
                assert call["name"] != "navigate" or giver == "find_place"
    assert references > 300


def test_times_are_of_a_day_or_of_an_earlier_call(training: list[several.Request]) -> None:
    relative = 0
    for request in training:
        for call, template in zip(json.loads(request.completion), request.templates, strict=True):
            if "time" in call["arguments"]:
                is_relative = "=later" in template or "=same_time" in template
                assert (RELATIVE if is_relative else TIME).fullmatch(call["arguments"]["time"])
                relative += is_relative
    assert relative > 300


@pytest.mark.parametrize(
    ("choices", "spoken", "wanted"),
    [
        ([(30, "half an hour"), ("later", "+")], "half an hour later", "$2+30"),
        (
            [(90, "an hour and a half"), ("after that", "+")],
            "an hour and a half after that",
            "$2+90",
        ),
        ([(60, "one hour"), ("before that", "-")], "one hour before that", "$2-60"),
    ],
)
def test_a_later_time_counts_minutes_from_the_call_that_is_meant(
    choices: list[object], spoken: str, wanted: str
) -> None:
    assert several._later("$2", Fixed([0.0], choices)) == (spoken, wanted)


def test_a_reference_means_the_latest_call_that_has_such_a_thing() -> None:
    speaker = several.Speaker(random.Random(5), Side.TRAINING, is_template_unseen=False)
    for number in range(400):
        speaker.say(is_referring=number % 2 == 1)
    latest: dict[str, object] = {}
    checked = 0
    for number, (call, template) in enumerate(
        zip(speaker.calls, speaker.templates, strict=True), 1
    ):
        for argument, kind in data.slots(template):
            if (
                argument in call["arguments"]
                and kind in several.SPOKEN
                and several.MEANT_BY[kind] in latest
            ):
                value = call["arguments"][argument]
                assert value == latest[several.MEANT_BY[kind]], (call, template)
                checked += 1
        latest |= call["arguments"] | (
            {"time": f"${number}"} if "time" in call["arguments"] else {}
        )
    assert checked > 50


def test_what_follows_free_text_or_a_list_is_never_joined_by_and_alone(
    training: list[several.Request],
) -> None:
    free = ("text", "query", "items", "points", "rooms", "stops", "label")
    for request in training:
        for call in json.loads(request.completion)[:-1]:
            for name in free:
                value = call["arguments"].get(name)
                if isinstance(value, str) and "$" not in value:
                    assert not re.search(
                        rf"that {re.escape(value)}( and| then) (turn|set|play|lock) ",
                        request.prompt,
                    ), request


def test_answers_take_several_blocks(
    tokenizer: Tokenizer, held_out: list[tuple[str, several.Request]]
) -> None:
    lengths = sorted(
        len(tokenizer.encode(request.completion, add_special_tokens=False).ids)
        for _, request in held_out
    )
    assert lengths[0] >= 32
    assert lengths[len(lengths) // 2] > 60
    assert lengths[-1] > 120
    assert (
        max(len(tokenizer.encode(request.prompt).ids) for _, request in held_out) + lengths[-1]
        < 400
    )


def test_the_committed_held_out_lines_are_the_generators() -> None:
    lines = [
        json.loads(line)
        for line in (EXAMPLES / "demo" / "heldout-several.jsonl").read_text().splitlines()
    ]
    drawn = several.held_out_requests(1, len(lines))
    assert lines == [
        {"prompt": request.prompt, "completion": request.completion, "unseen": unseen}
        for unseen, request in drawn
    ]


def test_the_models_describe_every_call_with_its_arguments_in_order(
    training: list[several.Request], held_out: list[tuple[str, several.Request]]
) -> None:
    from calls import Calls

    for request in (*training, *(request for _, request in held_out)):
        read = Calls.model_validate_json(request.completion).model_dump(exclude_none=True)
        wanted = json.loads(request.completion)
        assert read == wanted
        assert [[*call["arguments"]] for call in read] == [[*call["arguments"]] for call in wanted]
    names = {call["properties"]["name"]["const"] for call in _models()}
    assert names == set(ARGUMENTS)
    for call in _models():
        arguments = call["properties"]["arguments"]["$ref"].rsplit("/", 1)[-1]
        described = Calls.model_json_schema()["$defs"][arguments]["properties"]
        assert tuple(described) == ARGUMENTS[call["properties"]["name"]["const"]]


def _models() -> list[dict[str, Any]]:
    from calls import Calls

    models = Calls.model_json_schema()["$defs"].values()
    return [model for model in models if "name" in model["properties"]]
