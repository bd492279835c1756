"""Tests of ``build --ray`` and ``compare --ray``, with two workers on this machine."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

ray = pytest.importorskip("ray", reason="ray is not installed: pip install '.[ray]'")
from ray import cloudpickle  # noqa: E402

from dlm_export.build import BuildOptions, QuantiseOptions, build  # noqa: E402
from dlm_export.bundle.manifest import read_manifest  # noqa: E402
from dlm_export.cli import main  # noqa: E402
from dlm_export.distributed.ray_workers import LOCAL, RETRIES, RayWorkers, connected  # noqa: E402
from dlm_export.distributed.record import Record  # noqa: E402
from dlm_export.distributed.workers import Shared, WorkerError, WorkerInputError  # noqa: E402
from dlm_export.judging.accuracy.effort import Effort  # noqa: E402
from dlm_export.quantising import in_pieces, samples  # noqa: E402
from dlm_export.quantising.samples import CalibrationOptions  # noqa: E402
from dlm_export.sources import open_source  # noqa: E402
from dlm_runtime.errors import RequestError  # noqa: E402

register: Any = cloudpickle.register_pickle_by_value
register(sys.modules[__name__])  # workers cannot import the tests


@pytest.fixture(scope="module")
def workers() -> Iterator[RayWorkers]:
    with connected(LOCAL, cores=2) as found:
        assert found is not None
        yield found


def squared(folder: Path, number: int, kept: int | None) -> tuple[int, int]:
    """Return results for piece ``number``. The first call for piece 3 kills its own worker process.

    Each call creates a file in ``folder``, so that the test can count calls.
    """
    calls = folder / f"{number}-{time.monotonic_ns()}"
    calls.touch()
    if number == 3 and len(list(folder.glob("3-*"))) == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return number**2, number + (kept or 0)


def killed(folder: Path, number: int, _: None) -> tuple[None, None]:
    (folder / f"{number}-{time.monotonic_ns()}").touch()
    os.kill(os.getpid(), signal.SIGKILL)
    return None, None


def refusing(_: None, number: int, __: None) -> tuple[None, None]:
    if number:
        raise RequestError("this piece is wrong")
    raise ValueError("an unexpected error")


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_a_piece_is_repeated_after_its_worker_died(workers: RayWorkers, tmp_path: Path) -> None:
    found = list(workers.each("squares", squared, tmp_path, range(6), keep=True))
    assert [result for result, _ in found] == [0, 1, 4, 9, 16, 25]
    assert len(list(tmp_path.glob("3-*"))) == 2
    assert len(list(tmp_path.iterdir())) == 7
    kept = [handle for _, handle in found]
    again = list(workers.each("squares", squared, tmp_path, range(6), kept, keep=True))
    assert ray.get([handle for _, handle in again]) == [0, 2, 4, 6, 8, 10]


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_a_piece_that_always_kills_its_worker_is_an_error(
    workers: RayWorkers, tmp_path: Path
) -> None:
    with pytest.raises(WorkerError, match=rf"workers of the stage kills died {1 + RETRIES} times"):
        list(workers.each("kills", killed, tmp_path, [0]))
    assert len(list(tmp_path.iterdir())) == 1 + RETRIES


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_errors_of_pieces_are_reported(workers: RayWorkers) -> None:
    with pytest.raises(RequestError, match=r"^this piece is wrong"):
        list(workers.each("refuses", refusing, None, [1]))
    with pytest.raises(WorkerError, match=r"in the stage refuses .ValueError: an unexpected error"):
        list(workers.each("refuses", refusing, None, [0]))


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_finished_pieces_are_read_from_the_record(workers: RayWorkers, tmp_path: Path) -> None:
    calls, record = tmp_path / "calls", Record(tmp_path / "record")
    calls.mkdir()
    recording = RayWorkers(record)
    first = recording.each("squares", squared, calls, [1, 2, 4, 5], keep=True)
    assert [next(first)[0] for _ in range(2)] == [1, 4]
    first.close()
    done = [name for name in ("0", "1", "2", "3") if f"squares/{name}" in record]
    assert done == ["0", "1"]
    made = len(list(calls.glob("[12]-*")))
    found = list(recording.each("squares", squared, calls, [1, 2, 4, 5], keep=True))
    assert [result for result, _ in found] == [1, 4, 16, 25]
    assert ray.get([handle for _, handle in found]) == [1, 2, 4, 5]
    assert len(list(calls.glob("[12]-*"))) == made == 2


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
@pytest.mark.parametrize("precision", ["int8-static", "int4-awq"])
def test_a_bundle_built_with_ray_equals_one_built_without(
    workers: RayWorkers,
    llada_checkpoint: Path,
    tmp_path: Path,
    precision: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert workers is not None
    monkeypatch.setattr(in_pieces, "PART_TOKENS", (200, 200))
    monkeypatch.setattr(samples, "RANDOM_LENGTH", 24)
    made: list[dict[str, Any]] = []
    for name in (None, LOCAL):
        calibration = CalibrationOptions(samples=8, states_per_sample=4)
        quantise = QuantiseOptions(calibration, effort=Effort(judged=5))
        options = BuildOptions(precision=precision, quantise=quantise, ray=name)
        report = build(llada_checkpoint, tmp_path / str(name), options)
        manifest = read_manifest(report.output)
        assert report.judgement is not None
        made.append(
            {
                "files": {
                    file: entry["sha256"]
                    for file, entry in manifest["files"].items()
                    if file.startswith("denoiser")
                },
                "states": (manifest["precision"]["calibration"] or {}).get("states_sha256"),
                "positions": report.judgement.overall["positions"],
                "loss": pytest.approx(report.judgement.overall["candidate_ce"], rel=1e-5),
                "layers": [row["layer"] for row in report.judgement.layers],
            }
        )
    assert made[0]["files"]
    assert made[0] == made[1]


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_a_worker_that_cannot_read_the_checkpoint_says_so(
    workers: RayWorkers, llada_checkpoint: Path, tmp_path: Path
) -> None:
    source = open_source(llada_checkpoint)
    shared = replace(Shared.of(source, torch.device("cpu")), path=tmp_path / "nowhere")
    with pytest.raises(WorkerInputError, match=r"a Ray worker on .* cannot read"):
        list(workers.each("opens", opening, shared, [0]))


def opening(shared: Shared, _: int, __: None) -> tuple[None, None]:
    shared.parameters()
    return None, None


def test_an_address_without_ray_is_refused(llada_checkpoint: Path, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        arguments = ["build", str(llada_checkpoint), "-o", str(tmp_path / "out")]
        arguments += ["--precision", "int8-static", "--ray", address]
        done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 2
    assert f"--ray {address}: no answer" in done.output
    assert list(tmp_path.iterdir()) == []
