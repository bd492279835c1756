"""Tests of the third demo: with more passes, more grids are right."""

from __future__ import annotations

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
import train_sudoku  # noqa: E402

PROMPTS = [
    json.loads(line)["prompt"]
    for line in (EXAMPLES / "demo" / "heldout-sudoku.jsonl").read_text().splitlines()
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundles") / "sudoku"
    build(EXAMPLES / "demo-sudoku", folder, BuildOptions(check_parity=False))
    return folder


@pytest.fixture(scope="module")
def grids(folder: Path) -> Iterator[Bundle]:
    with dlm_runtime.open(folder, threads=1) as bundle:
        yield bundle


def test_several_passes_give_right_grids_and_one_pass_does_not(grids: Bundle) -> None:
    one, few, every = (
        passes.measure(grids, PROMPTS[:40], preset="llada", steps=steps) for steps in (1, 4, 20)
    )
    assert [nfe for _, nfe in (one, few, every)] == [1, 4, 20]
    assert one[0] <= 2
    assert every[0] >= 36
    assert one[0] < few[0] < every[0]


def test_the_published_parallel_loop_gives_right_grids_in_fewer_passes(grids: Bundle) -> None:
    right, nfe = passes.measure(grids, PROMPTS[:40], preset="fast-dllm")
    assert right >= 36
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
