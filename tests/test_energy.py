"""Tests of energy counters, with a fake of NVML and a fake folder of RAPL."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner

from dlm_export.cli import main
from dlm_export.planning import energy


def counter(folder: Path, name: str, joules: float, size: float = 1000) -> Path:
    """Write the files of one counter of RAPL."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "name").write_text(f"{name}\n")
    (folder / "energy_uj").write_text(f"{joules * 1e6:.0f}\n")
    (folder / "max_energy_range_uj").write_text(f"{size * 1e6 - 1:.0f}\n")
    return folder


def test_packages_are_added_and_counters_may_overflow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(energy, "RAPL", tmp_path)
    counter(tmp_path / "intel-rapl:0", "package-0", 990)
    counter(tmp_path / "intel-rapl:1", "package-1", 10)
    counter(tmp_path / "intel-rapl:0:0", "dram", 5)
    meter = energy.meter_of(None)
    assert meter is not None
    assert (meter.source, meter.joules()) == ("RAPL", 0)
    counter(tmp_path / "intel-rapl:0", "package-0", 15)
    counter(tmp_path / "intel-rapl:1", "package-1", 12)
    counter(tmp_path / "intel-rapl:0:0", "dram", 500)
    assert meter.joules() == 27
    counter(tmp_path / "intel-rapl:0", "package-0", 14)
    assert meter.joules() == 27 + 999


def test_a_counter_that_is_missing_or_closed_measures_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(energy, "RAPL", tmp_path)
    assert energy.meter_of(None) is None
    (counter(tmp_path / "intel-rapl:0", "package-0", 1) / "energy_uj").unlink()
    assert energy.meter_of(None) is None


class NVMLError(Exception):
    pass


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """The millijoules of the GPUs that a fake NVML lists."""
    used = {1: 5000}

    def handle_of(index: int) -> int:
        if index not in used:
            raise NVMLError
        return index

    fake: Any = ModuleType("pynvml")
    fake.NVMLError, fake.nvmlInit = NVMLError, lambda: None
    fake.nvmlDeviceGetHandleByIndex = handle_of
    fake.nvmlDeviceGetTotalEnergyConsumption = used.__getitem__
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return used


def test_a_gpu_counts_millijoules(nvml: dict[int, int]) -> None:
    meter = energy.meter_of(1)
    assert meter is not None
    nvml[1] += 2500
    assert (meter.source, meter.joules()) == ("NVML", 2.5)
    assert energy.meter_of(0) is None


def test_bench_tells_the_energy_of_a_token(
    llada_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["bench", str(llada_bundle), "--rounds", "5", "--prompt-tokens", "8"]
    command += ["--new-tokens", "8", "--passes", "8,8,8", "--batch", "2"]
    monkeypatch.setattr(energy, "RAPL", tmp_path)
    assert "Energy" not in CliRunner().invoke(main, command).output
    folder = counter(tmp_path / "intel-rapl:0", "package-0", 1)
    read = Path.read_text

    def one_joule_more(path: Path, *given: Any, **named: Any) -> str:
        text = read(path, *given, **named)
        if path == folder / "energy_uj":
            path.write_text(str(int(text) + 1_000_000))
        return text

    monkeypatch.setattr(Path, "read_text", one_joule_more)
    output = CliRunner().invoke(main, command).output
    # Three runs of eight tokens use one joule, and so do three runs of two requests.
    assert (
        "Energy (RAPL): 0.0417 J per token with batch 1, 0.0208 J per token with batch 2" in output
    )
