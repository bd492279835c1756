"""Tests of builds and comparisons that are divided into pieces, without Ray.

``InProcess`` runs the pieces in this process. As with Ray, all arguments and results are pickled.
"""

from __future__ import annotations

import importlib.util
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import llada_config, write_checkpoint

from dlm_calibration.errors import CalibrationError
from dlm_calibration.recipes import HIGH, RECIPES, Recipe
from dlm_calibration.states import State
from dlm_export import families
from dlm_export.distributed import ray_workers
from dlm_export.distributed.record import Record
from dlm_export.distributed.workers import Kept, Shared, WorkerInputError
from dlm_export.judging.accuracy import run as judging
from dlm_export.judging.accuracy.effort import Effort
from dlm_export.judging.precision_search import search, sensitivity
from dlm_export.progress import Silent
from dlm_export.quantising import calibrate, gptq, in_pieces, samples
from dlm_export.quantising.numbers import Quantisation
from dlm_export.sources import Source, open_source
from dlm_export.workplace import Remote, Workplace


class Stopped(Exception):
    """Raised by ``InProcess`` to stop a build in the middle."""


class InProcess:
    """Implements ``Workers``. After ``most`` pieces, the next piece raises ``Stopped``."""

    def __init__(self, record: Record | None = None, most: int | None = None) -> None:
        self.record, self.most = record, most
        self.ran: list[str] = []

    def each(
        self,
        stage: str,
        work: Any,
        shared: Any,
        pieces: Sequence[Any],
        kept: Sequence[Kept] | None = None,
        *,
        keep: bool = False,
    ) -> Iterator[tuple[Any, Kept]]:
        for number, piece in enumerate(pieces):
            name = f"{stage}/{number}"
            if self.record is not None and name in self.record:
                yield self.record[name], self.record[f"{name}-kept"] if keep else None
                continue
            if len(self.ran) == self.most:
                raise Stopped
            self.ran.append(name)
            given = (shared, piece, None if kept is None else kept[number])
            result, value = pickle.loads(pickle.dumps(work(*pickle.loads(pickle.dumps(given)))))
            if self.record is not None:
                if keep:
                    self.record[f"{name}-kept"] = value
                self.record[name] = result
            yield result, value

    def held(self, stage: str, count: int) -> list[Kept] | None:
        assert self.record is not None
        names = [f"{stage}/{number}-kept" for number in range(count)]
        found = all(name in self.record for name in names)
        return [self.record[name] for name in names] if found else None


@pytest.fixture
def source(llada_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Source:
    monkeypatch.setattr(in_pieces, "PART_TOKENS", (60, 60))
    monkeypatch.setattr(samples, "RANDOM_LENGTH", 24)
    return open_source(llada_checkpoint)


def make_states(source: Source) -> list[State]:
    """States of four lengths, in an order that is not the order of their batches."""
    c, rng, found = source.network, np.random.default_rng(5), []
    for number in range(11):
        canvas = rng.integers(0, c.mask_token_id, 20 + 4 * (number % 4))
        canvas[rng.random(len(canvas)) < 0.5] = canvas[-1] = c.mask_token_id
        found.append(State(canvas, "masked", 0.5, 4))
    return found


def calibrated(
    source: Source, recipe: Recipe, workers: InProcess | None, solved: Path | None = None
) -> Quantisation:
    cpu = torch.device("cpu")
    remote = None if workers is None else Remote(workers, Shared.of(source, cpu), "")
    place = Workplace(remote=remote, solved=solved)
    formats = recipe.formats(list(source.network.quantisable()))
    return calibrate.calibrate(
        source.parameters,
        source.network,
        recipe,
        formats,
        make_states(source),
        lambda: None,
        workplace=place,
    )


def assert_equal(ours: Quantisation, theirs: Quantisation, *, exact: bool) -> None:
    assert ours.amax == pytest.approx(theirs.amax, rel=0 if exact else 1e-5)
    assert ours.observers is not None
    assert theirs.observers is not None
    assert list(ours.observers) == list(theirs.observers)
    for name, observer in ours.observers.items():
        found, expected = observer.summary(), theirs.observers[name].summary()
        for key, value in expected.items():
            # Kurtosis is computed from sums of powers, which pieces add in a different order.
            assert found[key] == (
                value if exact and key != "kurtosis" else pytest.approx(value, rel=1e-4)
            ), (name, key)
    for layer, name in ours.formats.items():
        if name == HIGH:
            continue
        a, b = ours.weight(layer), theirs.weight(layer)
        if exact:
            assert np.array_equal(a.codes, b.codes)
            assert np.array_equal(a.scales, b.scales)
        assert np.abs(a.dequantise() - b.dequantise()).mean() < 1e-3


# ---- Calibration ----


@pytest.mark.parametrize("solver", ["nearest", "awq", "gptq"])
def test_calibration_in_pieces_equals_calibration_in_one_piece(source: Source, solver: str) -> None:
    recipe = replace(RECIPES["int8-static"], solver=solver)
    workers = InProcess()
    # Each piece of calibration has its own Gram matrix, and a different order of sums can change
    # a rounded weight.
    assert_equal(
        calibrated(source, recipe, workers),
        calibrated(source, recipe, None),
        exact=solver != "gptq",
    )
    layers = len(source.network.layers)
    numbers = [int(name.rpartition("/")[2]) for name in workers.ran]
    assert max(numbers) >= 3
    assert len(numbers) >= 4 * layers


@pytest.mark.parametrize("most", [1, 4, 5, 7])
@pytest.mark.parametrize("solver", ["nearest", "awq", "gptq"])
def test_a_stopped_calibration_continues_with_the_pieces_that_are_done(
    source: Source, tmp_path: Path, solver: str, most: int
) -> None:
    recipe = replace(RECIPES["int8-static"], solver=solver)
    whole = InProcess()
    expected = calibrated(source, recipe, whole)
    record = Record(tmp_path / "pieces")
    stopped = InProcess(record, most)
    with pytest.raises(Stopped):
        calibrated(source, recipe, stopped, tmp_path / "solved")
    resumed = InProcess(record)
    assert_equal(calibrated(source, recipe, resumed, tmp_path / "solved"), expected, exact=True)
    assert [*stopped.ran, *resumed.ran] == whole.ran
    again = InProcess(record)
    assert_equal(calibrated(source, recipe, again, tmp_path / "solved"), expected, exact=True)
    assert again.ran == []


@pytest.mark.parametrize("solves", [0, 3, 6])
def test_a_calibration_that_stopped_in_a_solver_repeats_no_piece(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, solves: int
) -> None:
    recipe = replace(RECIPES["int8-static"], solver="gptq")
    whole, stopped = InProcess(), InProcess(Record(tmp_path / "pieces"))
    expected = calibrated(source, recipe, whole)
    solve, left = gptq.inverse_factor, [None] * solves

    def failing(matrix: torch.Tensor) -> torch.Tensor:
        if not left:
            raise Stopped
        left.pop()
        return solve(matrix)

    monkeypatch.setattr(gptq, "inverse_factor", failing)
    with pytest.raises(Stopped):
        calibrated(source, recipe, stopped, tmp_path / "solved")
    monkeypatch.setattr(gptq, "inverse_factor", solve)
    resumed = InProcess(stopped.record)
    assert_equal(calibrated(source, recipe, resumed, tmp_path / "solved"), expected, exact=True)
    assert [*stopped.ran, *resumed.ran] == whole.ran


def test_results_of_other_states_are_not_reused(source: Source, tmp_path: Path) -> None:
    record, recipe = Record(tmp_path), RECIPES["int8-static"]
    calibrated(source, recipe, InProcess(record))
    again = InProcess(record)
    calibrated(source, replace(recipe, smoothing=0.5), again)
    assert again.ran


def test_states_in_pieces_equal_states_in_one_piece(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_pieces, "SAMPLES", 2)
    options = samples.CalibrationOptions(samples=5, states_per_sample=4)
    data = samples.load_data(source.network, source.path, None, options)
    _, policy = samples.threshold_preset(source.network, source.presets, None)
    layered = families.layered(source.parameters, source.network)
    here = samples.trajectories(layered, policy, None, lambda: None)
    told: list[None] = []
    there = in_pieces.trajectories(
        InProcess(),
        Shared.of(source, torch.device("cpu")),
        torch.float32,
        policy,
        "states",
        lambda: told.append(None),
    )
    ours, theirs = (
        [state.sha256 for state in samples.calibration_states(source, data, options, runs)]
        for runs in (there, here)
    )
    assert ours == theirs
    assert told


# ---- The record ----


def test_damaged_and_foreign_results_are_refused(tmp_path: Path) -> None:
    record = Record(tmp_path)
    record["a/0"] = {"x": np.arange(3), "y": (1, "b", None)}
    assert record["a/0"]["x"].tolist() == [0, 1, 2]
    (path,) = tmp_path.rglob("*.piece")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CalibrationError, match=r"0\.piece: not a result .* SHA-256 is wrong"):
        record["a/0"]
    record["a/1"] = print
    with pytest.raises(CalibrationError, match=r"it contains builtins\.print"):
        record["a/1"]


# ---- Workers ----


def test_a_worker_that_cannot_read_the_checkpoint_says_so(source: Source, tmp_path: Path) -> None:
    shared = Shared.of(source, torch.device("cpu"))
    with pytest.raises(WorkerInputError, match=r"cannot read .*nowhere .*that all machines share"):
        replace(shared, path=tmp_path / "nowhere").parameters()
    other = write_checkpoint(tmp_path / "other", llada_config(rope_theta=20000.0), seed=2)
    with pytest.raises(WorkerInputError, match="a different checkpoint"):
        replace(shared, path=other).parameters()


@pytest.mark.parametrize("address", ["", "nowhere", "host:", ":6379", "host:0", "host:65536"])
def test_wrong_addresses_are_refused(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    with (
        pytest.raises(WorkerInputError, match="write local, or HOST:PORT"),
        ray_workers.connected(address),
    ):
        pass


def test_a_missing_ray_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with (
        pytest.raises(WorkerInputError, match=r"Ray is not installed\. Run: pip install"),
        ray_workers.connected("local"),
    ):
        pass


# ---- Judging ----


@pytest.mark.parametrize("name", ["default", "full"])
def test_a_comparison_in_pieces_equals_one_in_this_process(
    llada_bundle: Path, name: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(samples, "RANDOM_LENGTH", 24)
    options = judging.JudgingOptions(effort=Effort(name, judged=6))
    changes = {"threshold": 0.01, "commit": "threshold"}
    here = judging.compare_bundles(llada_bundle, llada_bundle, options, Silent(), print, changes)
    record = Record(tmp_path)
    workers = [InProcess(record), InProcess(record)]
    left = list(workers)

    @contextmanager
    def connected(_: str | None) -> Iterator[InProcess]:
        yield left.pop(0)

    monkeypatch.setattr(ray_workers, "connected", connected)
    compared = [here]
    for _ in workers:
        compared.append(
            judging.compare_bundles(
                llada_bundle, llada_bundle, options, Silent(), print, changes, "local"
            )
        )
    assert len(workers[0].ran) == 2  # two pieces, of four samples and of two
    assert workers[1].ran == []  # all results come from the record
    told = [asdict(each) for each in compared]
    for each in told:
        del each["speed"]["ms_per_pass"], each["speed"]["ms_per_prompt"]
    assert told[0] == told[1] == told[2]


# ---- Sweeps ----


@pytest.mark.parametrize("exact", [False, True])
def test_the_losses_of_layers_in_pieces_equal_those_in_one_piece(
    source: Source, exact: bool, tmp_path: Path
) -> None:
    recipe = RECIPES["int4-rtn"]
    formats = recipe.formats(list(source.network.quantisable()))
    done = calibrate.calibrate(source.parameters, source.network, recipe, formats, [], lambda: None)
    workers = InProcess(Record(tmp_path))
    remote = Remote(workers, Shared.of(source, torch.device("cpu")), "")
    (ours,), (theirs,) = (
        sensitivity.losses(
            source.parameters,
            source.network,
            [done],
            make_states(source),
            lambda: None,
            exact=exact,
            workplace=place,
        )
        for place in (Workplace(remote=remote), Workplace())
    )
    assert len(workers.ran) >= 3
    assert all(name in workers.record for name in workers.ran)
    assert ours
    assert ours.keys() == theirs.keys()
    for layer, losses in ours.items():
        assert losses == pytest.approx(theirs[layer], rel=1e-3), layer


def test_a_search_in_pieces_finds_the_recipe_of_a_search_in_this_process(source: Source) -> None:
    options = samples.CalibrationOptions(samples=6)
    data = samples.load_data(source.network, source.path, None, options)
    _, policy = samples.threshold_preset(source.network, source.presets, None)
    workers = InProcess()
    remote = Remote(workers, Shared.of(source, torch.device("cpu")), "")
    ours, theirs = (
        search.search(
            source,
            make_states(source),
            data.calibration,
            ["int8-dynamic", "int4-g32-dynamic"],
            policy,
            0.05,
            0,
            lambda: None,
            workplace=place,
        )
        for place in (Workplace(remote=remote), Workplace())
    )
    assert ours.recipe == theirs.recipe
    assert len(ours.curve) == len(theirs.curve)
    for point, other in zip(ours.curve, theirs.curve, strict=True):
        assert point.ce_increase == pytest.approx(other.ce_increase, abs=1e-5)
    assert any(name.startswith("search-") for name in workers.ran)
