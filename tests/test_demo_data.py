"""Tests of the demo's data, without torch.

The data depends only on a seed. Training data and held-out data are disjoint. The calls in the data
can be parsed, and their values occur in the commands.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES / "demo"))

import data  # noqa: E402
import tokenizer as demo_tokenizer  # noqa: E402
from functions import FUNCTIONS  # noqa: E402
from paraphrases import PARAPHRASES  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402
from values import _spoken_words, is_held_out  # noqa: E402
from words import number_words  # noqa: E402

FREE_TEXT = (
    "text",
    "query",
    "label",
    "contact",
    "destination",
    "object",
    "from",
    "to",
    "items",
    "stops",
    "points",
)
ARGUMENTS = {function.name: function.arguments for function in FUNCTIONS}


@pytest.fixture(scope="module")
def training() -> list[data.Example]:
    return list(itertools.islice(data.training_examples(3), 5000))


@pytest.fixture(scope="module")
def held_out() -> list[tuple[str, data.Example]]:
    return data.held_out_examples(3, 1500)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(EXAMPLES / "demo-denoiser" / "tokenizer.json"))


def test_the_seed_decides_every_command(
    training: list[data.Example], held_out: list[tuple[str, data.Example]]
) -> None:
    assert training[:100] == list(itertools.islice(data.training_examples(3), 100))
    assert training[:100] != list(itertools.islice(data.training_examples(4), 100))
    assert held_out[:100] == data.held_out_examples(3, 100)


def test_there_are_at_least_fourteen_functions_and_all_are_drawn(
    training: list[data.Example],
) -> None:
    assert len(FUNCTIONS) >= 14
    assert {example.function for example in training} == set(ARGUMENTS)


def test_held_out_templates_are_never_trained_on(
    training: list[data.Example], held_out: list[tuple[str, data.Example]]
) -> None:
    for function in FUNCTIONS:
        assert not {*function.training, *PARAPHRASES[function.name]} & set(function.held_out)
        assert 0.1 <= len(function.held_out) / len(function.training + function.held_out) <= 0.25
    trained = {example.template for example in training}
    assert not trained & {example.template for unseen, example in held_out if unseen != "value"}


def test_words_that_only_commands_have_begin_values_too(training: list[data.Example]) -> None:
    words = {word for example in training for value in example.values for word in value.split()}
    begun = [spoken for spoken in _spoken_words() if any(word.startswith(spoken) for word in words)]
    assert "play" in begun  # so does "playground", a word that training does not contain
    assert len(begun) > 0.95 * len(_spoken_words())


def test_held_out_values_are_never_trained_on(
    training: list[data.Example], held_out: list[tuple[str, data.Example]]
) -> None:
    trained = {value for example in training for value in example.values}
    unseen_values = {
        value for unseen, example in held_out if unseen != "template" for value in example.values
    }
    assert len(unseen_values) > 500
    assert not trained & unseen_values
    assert not any(map(is_held_out, trained))


def test_held_out_commands_are_not_training_commands(
    training: list[data.Example], held_out: list[tuple[str, data.Example]]
) -> None:
    prompts = [example.prompt for _, example in held_out]
    assert len(set(prompts)) == len(prompts)
    assert not set(prompts) & {example.prompt for example in training}


def test_held_out_slots_are_all_trained_on() -> None:
    for function in FUNCTIONS:
        trained = {slot for template in function.training for slot in data.slots(template)}
        assert trained >= {
            slot for template in function.held_out for slot in data.slots(template)
        }, function.name


def test_every_completion_is_a_declared_call(
    training: list[data.Example], held_out: list[tuple[str, data.Example]]
) -> None:
    for example in [*training, *(example for _, example in held_out)]:
        call = json.loads(example.completion)
        assert list(call) == ["name", "arguments"]
        declared = ARGUMENTS[call["name"]]
        assert list(call["arguments"]) == [
            argument for argument in declared if argument in call["arguments"]
        ]


def test_free_text_is_copied_from_the_command(
    training: list[data.Example], held_out: list[tuple[str, data.Example]]
) -> None:
    for example in [*training, *(example for _, example in held_out)]:
        arguments = json.loads(example.completion)["arguments"]
        for name in FREE_TEXT:
            value = arguments.get(name, [])
            for text in value if isinstance(value, list) else [value]:
                assert text in example.prompt, example


@pytest.mark.parametrize(
    ("spoken", "number"),
    [("zero", 0), ("nineteen", 19), ("forty five", 45), ("three hundred sixty", 360)],
)
def test_numbers_are_said_in_words(spoken: str, number: int) -> None:
    assert number_words(number) == spoken


def test_the_tokenizer_gives_back_any_text(
    tokenizer: Tokenizer, training: list[data.Example]
) -> None:
    texts = [text for example in training[:500] for text in (example.prompt, example.completion)]
    for text in [*texts, "two  spaces\n", "Ünïcödé 😀 {x} <tag> 12:30"]:
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_a_word_has_the_same_pieces_in_command_and_call(
    tokenizer: Tokenizer, training: list[data.Example]
) -> None:
    def pieces(text: str) -> list[str]:
        return [
            token.removeprefix("Ġ")
            for token in tokenizer.encode(text, add_special_tokens=False).tokens
        ]

    for value in {value for example in training[:500] for value in example.values}:
        assert [piece for piece in pieces(" " + value) if piece] == [
            piece for piece in pieces(value) if piece
        ]


def test_the_post_processor_and_the_chat_template_agree(tokenizer: Tokenizer) -> None:
    jinja2 = pytest.importorskip("jinja2")
    config = json.loads((EXAMPLES / "demo-denoiser" / "tokenizer_config.json").read_text())
    assert config == demo_tokenizer.tokenizer_config()
    template = jinja2.Template(config["chat_template"])
    rendered = template.render(messages=[{"role": "user", "content": "lock the front door"}])
    assert (
        tokenizer.encode(rendered, add_special_tokens=False).ids
        == tokenizer.encode("lock the front door").ids
    )


def test_the_committed_held_out_lines_are_the_generators() -> None:
    lines = (EXAMPLES / "demo" / "heldout.jsonl").read_text().splitlines()
    drawn = data.held_out_examples(1, len(lines))
    assert [(json.loads(line)["prompt"], json.loads(line)["completion"]) for line in lines] == [
        (example.prompt, example.completion) for _, example in drawn
    ]


def test_calibration_and_held_out_data_have_no_command_in_common() -> None:
    files = (EXAMPLES / "demo-denoiser" / "calibration.jsonl", EXAMPLES / "demo" / "heldout.jsonl")
    calibration, held_out = (
        {json.loads(line)["prompt"] for line in path.read_text().splitlines()} for path in files
    )
    assert len(calibration) == 256
    assert not calibration & held_out
