"""Manages the resources of a build: torch's device and threads, memory, and temporary files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from dlm_runtime.errors import DlmError, RequestError

SMALL_MATRIX = 1 << 19
"""Matrices of at most this many elements are multiplied on one thread.

Such a product takes about a millisecond, so dividing it between threads takes more time than it
saves.
"""


class DeviceError(DlmError):
    """Raised if torch does not find the requested device."""


@dataclass(frozen=True)
class Workplace:
    """The resources that a build may use.

    - ``activation_bytes``: memory limit in bytes for the hidden states of canvases. If the hidden
      states need more, they are stored in a file in ``folder``. ``None`` means no limit.
    - ``solved``: folder for the weights that a solver has rounded. ``None`` keeps these weights in
      memory.
    - ``states``: file for the calibration states, which are canvases on which the build observes
      the inputs of layers. ``None`` keeps the states in memory only.
    """

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    activation_bytes: int | None = None
    folder: Path | None = None
    solved: Path | None = None
    states: Path | None = None


@contextmanager
def threads_for(elements: int) -> Iterator[None]:
    """Let torch use a single thread in the ``with`` block, if all matrices are small.

    ``elements`` is the number of elements of the largest matrix. A matrix of up to ``SMALL_MATRIX``
    elements is small. If several threads compute a small product, they wait for each other at the
    end. If other programs use the same cores, this wait can be as long as a time slice of the
    scheduler.
    """
    before = torch.get_num_threads()
    if elements <= SMALL_MATRIX:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def find_device(name: str) -> torch.device:
    """Find a device by its name: ``auto`` (a GPU if there is one), ``cpu``, ``cuda`` or ``cuda:1``.

    Raises RequestError for an unknown name, and DeviceError if the machine lacks the device.
    """
    kind, _, number = name.partition(":")
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if name not in ("auto", "cuda") and not (
        kind == "cuda" and number.isdecimal() and len(number) < 4
    ):
        raise RequestError(f"unknown device {name!r}: use auto, cpu, cuda or cuda:0")
    if not torch.cuda.is_available():
        raise DeviceError(
            f"--device {name}: torch {torch.__version__} finds no CUDA device here. Install a CUDA build of torch and the "
            "driver, or omit --device: the CPU gives the same results."
        )
    if number and int(number) >= torch.cuda.device_count():
        raise DeviceError(
            f"--device {name}: there are {torch.cuda.device_count()} CUDA devices, counted from 0"
        )
    return torch.device("cuda", int(number) if number else 0)
