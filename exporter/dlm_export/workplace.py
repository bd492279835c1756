"""Where torch works during a build: its device, threads, memory limit, and folder for overflow."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from dlm_runtime.errors import DlmError, RequestError

SMALL_MATRIX = 1 << 19
"""Up to this many elements, a matrix product of a block takes one thread about a millisecond, too
short to share.
"""


class DeviceError(DlmError):
    """Torch does not find the requested device."""


@dataclass(frozen=True)
class Workplace:
    """Resources for a build.

    ``activation_bytes``: memory for the canvases' states (``None``: no limit); more goes to a file in
    ``folder``. ``solved``: folder for solved weights (``None``: memory). ``states``: file of
    calibration states.
    """

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    activation_bytes: int | None = None
    folder: Path | None = None
    solved: Path | None = None
    states: Path | None = None


@contextmanager
def threads_for(elements: int) -> Iterator[None]:
    """Use one torch thread within the block if ``elements``, the largest matrix of a layer, is at
    most ``SMALL_MATRIX``.

    Threads that share a small product wait for each other at its end, and on a busy core for a time
    slice.
    """
    before = torch.get_num_threads()
    if elements <= SMALL_MATRIX:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def find_device(name: str) -> torch.device:
    """Find ``auto`` (a GPU if available), ``cpu``, ``cuda`` or ``cuda:1``. Raises DeviceError,
    RequestError.
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
