"""Tests of benchmarks/generation.py.

Instead of real engines, fake contestants answer from a list, or exit early.
"""

from __future__ import annotations

import contextlib
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import generation

ANSWERS = """#!{python}
import json, os, signal, sys
name, lasts = sys.argv[3], {lasts}
for number, line in enumerate(sys.stdin):
    if number == lasts.get(name, 1000):
        os.kill(os.getpid(), signal.SIGILL)
    do = json.loads(line)["do"]
    told = {{"about": {{"weights_bytes": 1, "facts": ""}}, "pass": {{"seconds": 0.5}}, "best_tokens": {{"tokens": [1] * 256}}}}
    told["generate"] = {{"seconds": 0.25, "nfe": 4, "timed_passes": 2, "peak_rss_bytes": 1}}
    print(json.dumps(told[do]), flush=True)
"""


@contextlib.contextmanager
def _workers(
    folder: Path, monkeypatch: pytest.MonkeyPatch, lasts: dict[str, int]
) -> Iterator[list[generation.Worker]]:
    """Make fake worker processes. Some workers exit after a number of requests.

    This number of requests includes ``about``, which asks a worker to describe itself.
    """
    program = folder / "python"
    program.write_text(ANSWERS.format(python=sys.executable, lasts=lasts))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    (folder / "build" / "benchmarks").mkdir(parents=True)
    monkeypatch.setattr(generation, "ROOT", folder)
    monkeypatch.setattr(sys, "executable", str(program))
    with contextlib.ExitStack() as stack:
        settings = generation.Settings(1, "passive")
        yield [
            stack.enter_context(contextlib.closing(generation.Worker(name, "134M", settings)))
            for name in ("native-int8", "torch-fp32")
        ]


@pytest.mark.parametrize("lasts", [0, 1, 2, 3])
def test_a_contestant_that_dies_is_named_and_the_others_go_on(
    lasts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    says = {"not_offered": "its process ended, SIGILL"}
    with _workers(tmp_path, monkeypatch, {"torch-fp32": lasts}) as workers:
        whole = generation.generations(workers, generation.Scenario(4, 4, 1), rounds=2, sampled=2)
        assert whole["torch-fp32"] == says
        assert whole["native-int8"]["median_ms"] == 500
        assert whole["native-int8"]["ratio"] == 1
        passes = generation.passes(workers, 1, 32, 0, 32, rounds=2)
        assert passes["torch-fp32"] == says
        assert passes["native-int8"]["median_ms"] == 500


@pytest.mark.parametrize("lasts", [4, 5, 6, 7])
def test_one_that_dies_between_passes_keeps_what_was_measured_before(
    lasts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _workers(tmp_path, monkeypatch, {"torch-fp32": lasts}) as workers:
        whole = generation.generations(workers, generation.Scenario(4, 4, 1), rounds=2, sampled=2)
        assert whole["torch-fp32"]["median_ms"] == 500
        passes = generation.passes(workers, 1, 32, 0, 32, rounds=2)
        assert passes["torch-fp32"] == {"not_offered": "its process ended, SIGILL"}


def test_settings_that_end_a_contestant_are_not_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _workers(tmp_path, monkeypatch, {"torch-fp32": 1}):
        _, tried = generation.settle("torch-fp32", "134M", 2)
        assert tried == dict.fromkeys(
            map(str, (generation.Settings(n, w) for n in (2, 1) for w in generation.WAIT_POLICIES))
        )
        _, tried = generation.settle("native-int8", "134M", 2)
        assert tried == {"2 threads, passive": 500, "1 threads, passive": 500}


def test_no_contestant_at_all_is_an_agreement_of_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(generation, "checkpoint", lambda size: _config(tmp_path))
    with _workers(tmp_path, monkeypatch, {"native-int8": 1, "torch-fp32": 0}) as workers:
        assert generation.agreement(workers, "134M") == {}


def _config(folder: Path) -> Path:
    (folder / "config.json").write_text('{"mask_token_id": 7}')
    return folder
