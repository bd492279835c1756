"""Tests of the third demo: with more passes, more grids are right, and its data follows the
rules.
"""

from __future__ import annotations

import itertools
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import dlm_runtime
from dlm_export.build import BuildOptions, build
from dlm_export.judging.tuning.fit_bundle import EffortOptions, fit_bundle
from dlm_export.progress import Silent
from dlm_export.quantising.samples import CalibrationOptions
from dlm_runtime import Bundle

EXAMPLES = Path(__file__).parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES / "demo"))

import passes  # noqa: E402
import sudoku  # noqa: E402
import train_sudoku  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

PROMPTS = [
    json.loads(line)["prompt"]
    for line in (EXAMPLES / "demo" / "heldout-sudoku.jsonl").read_text().splitlines()
]
GRID = "1234341221434321"
PUZZLE = "1.../..1./..../...."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundles") / "sudoku"
    build(EXAMPLES / "demo-sudoku", folder, BuildOptions(precision="fp32"))
    return folder


@pytest.fixture(scope="module")
def grids(folder: Path) -> Iterator[Bundle]:
    with dlm_runtime.open(folder, threads=1) as bundle:
        yield bundle


def test_several_passes_give_right_grids_and_one_pass_does_not(grids: Bundle) -> None:
    one, few, every = (
        passes.measure(grids, PROMPTS[:100], preset="llada", steps=steps) for steps in (1, 4, 20)
    )
    assert [nfe for _, nfe in (one, few, every)] == [1, 4, 20]
    assert one[0] <= 5
    assert every[0] >= 90
    assert one[0] < few[0] < every[0]


def test_the_published_parallel_loop_gives_right_grids_in_fewer_passes(grids: Bundle) -> None:
    right, nfe = passes.measure(grids, PROMPTS[:100], preset="fast-dllm")
    assert right >= 90
    assert nfe < 15


def test_effort_levels_are_fitted_at_the_answer_length_of_the_bundle(
    folder: Path, tmp_path: Path
) -> None:
    """The presets have blocks of 32 tokens. This denoiser was trained with answers of 20 tokens."""
    shutil.copytree(folder, tmp_path / "fitted")
    data = CalibrationOptions(data=EXAMPLES / "demo-sudoku" / "calibration.jsonl")
    levels = fit_bundle(tmp_path / "fitted", EffortOptions(data, samples=8), Silent())
    assert levels.careful.nfe == train_sudoku.NEW_TOKENS
    assert levels.careful.quality == 1


def test_a_grid_is_right_by_its_rows_columns_quarters_and_clues() -> None:
    answer = sudoku.completion_of(GRID)
    assert sudoku.is_right("1.../..12/..../....", answer)
    assert not sudoku.is_right("2.../..../..../....", answer), "another clue"
    assert not sudoku.is_right(PUZZLE, answer.replace("\n", ""))
    assert not sudoku.is_right(PUZZLE, answer[:-1])
    assert not sudoku.is_right(PUZZLE, None)
    # In the first grid, only quarters contain a digit twice. In the second grid, only columns do,
    # and in the third grid, only rows do.
    for cells in ("1234234134124123", "1234341212343412", "1313424231312424"):
        assert not sudoku.is_grid(cells)
    assert len(sudoku.grids()) == len(set(sudoku.grids())) == 288
    assert all(map(sudoku.is_grid, sudoku.grids()))


def test_held_out_puzzles_are_not_trained_on_and_have_the_solutions_that_are_said() -> None:
    trained = {
        prompt
        for prompt, _ in itertools.islice(
            sudoku.puzzles(3, train_sudoku.CLUES, held_out=False), 2000
        )
    }
    many, one = (sudoku.held_out_puzzles(5, 50, one_solution=each) for each in (False, True))
    for prompt, completion in (*many, *one):
        assert prompt not in trained
        assert sudoku.is_held_out(prompt)
        assert sudoku.is_right(prompt, completion)
    assert {sudoku.solutions(prompt) for prompt, _ in many} <= {*range(3, 19)}
    assert {sudoku.solutions(prompt) for prompt, _ in one} == {1}
    assert len({prompt for prompt, _ in many}) == 50


def test_training_rows_are_the_canvases_of_decoding(grids: Bundle) -> None:
    tokenizer = Tokenizer.from_file(str(EXAMPLES / "demo-sudoku" / "tokenizer.json"))
    prompts, responses = next(train_sudoku.batches(tokenizer, 0, 4))
    drawn = list(itertools.islice(sudoku.puzzles(0, train_sudoku.CLUES, held_out=False), 4))
    assert grids.tokenizer is not None
    assert prompts.tolist() == [grids.tokenizer.encode(prompt) for prompt, _ in drawn]
    assert grids.max_new_tokens == responses.shape[1] == train_sudoku.NEW_TOKENS
    texts = [tokenizer.decode(row, skip_special_tokens=True) for row in responses.tolist()]
    assert texts == [completion for _, completion in drawn]


@pytest.mark.parametrize(
    ("right", "count", "wanted"), [(0, 300, (0.0, 0.01264)), (150, 300, (0.44378, 0.55622))]
)
def test_intervals_are_those_of_wilson(right: int, count: int, wanted: tuple[float, float]) -> None:
    assert passes.interval(right, count) == pytest.approx(wanted, abs=2e-5)
