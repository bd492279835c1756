"""Reads how much energy the processor or a GPU has used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

RAPL = Path("/sys/class/powercap")
"""The folder in which Linux shows the energy counters of processors, if the user may read them."""


@dataclass(frozen=True)
class Meter:
    """An energy counter.

    ``source`` is the name of the interface, NVML or RAPL. ``joules`` returns the energy since the
    meter was made, in joules. RAPL's counters overflow after about an hour at full load, so call
    ``joules`` more often than that.
    """

    source: str
    joules: Callable[[], float]


def meter_of(device: int | None) -> Meter | None:
    """Return the energy counter of a GPU, or of all processors if ``device`` is ``None``.

    ``device`` is the index of the GPU in CUDA. With several GPUs of different kinds, set
    CUDA_DEVICE_ORDER to PCI_BUS_ID, which is the order of NVML. Returns ``None`` if this machine
    has no counter, if the user may not read it, or if ``nvidia-ml-py`` is not installed.
    """
    return _processors() if device is None else _gpu(device)


def _gpu(device: int) -> Meter | None:
    try:
        import pynvml
    except ModuleNotFoundError:
        return None
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(device)
        first = pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)  # in millijoules
    except pynvml.NVMLError:
        return None
    return Meter("NVML", lambda: (pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) - first) / 1e3)


def _processors() -> Meter | None:
    """Add the counters of all processor packages. Each counter counts microjoules."""
    try:
        packages = [
            folder
            for folder in sorted(RAPL.glob("intel-rapl:*"))
            if (folder / "name").read_text().startswith("package")
        ]
        sizes = [int((folder / "max_energy_range_uj").read_text()) + 1 for folder in packages]
        last = [int((folder / "energy_uj").read_text()) for folder in packages]
    except OSError:
        return None
    used = 0

    def joules() -> float:
        nonlocal used
        for i, folder in enumerate(packages):
            now = int((folder / "energy_uj").read_text())
            used += (now - last[i]) % sizes[i]
            last[i] = now
        return used / 1e6

    return Meter("RAPL", joules) if packages else None
