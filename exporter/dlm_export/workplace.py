"""Where torch works during a build: on which device and how many threads, in how much memory, and
in which folder what outgrows it lies.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from dlm_runtime.errors import DlmError, RequestError

SMALL_MATRIX = 1 << 19
"""Elements of a matrix up to which a block's product with it takes one thread about a millisecond:
too little to share.
"""


class DeviceError(DlmError):
    """A device that torch does not find here."""


@dataclass(frozen=True)
class Workplace:
    """``activation_bytes``: of canvases' states that stay in memory, None: all; the rest lies in a
    file of ``folder``.

    ``solved``: folder of weights that a solver has rounded; None: they stay in memory. ``states``:
    file of calibration states.
    """

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    activation_bytes: int | None = None
    folder: Path | None = None
    solved: Path | None = None
    states: Path | None = None


@contextmanager
def threads_for(elements: int) -> Iterator[None]:
    """One thread of torch's inside, where no matrix of a layer has more ``elements`` than
    ``SMALL_MATRIX``.

    Threads that share a small product wait for each other at its end, and on a busy core for a
    slice of its time.
    """
    before = torch.get_num_threads()
    if elements <= SMALL_MATRIX:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def find_device(name: str) -> torch.device:
    """``auto`` (a GPU where there is one), ``cpu``, ``cuda`` or ``cuda:1``. Raises DeviceError,
    RequestError.
    """
    kind, _, number = name.partition(":")
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if name not in ("auto", "cuda") and not (
        kind == "cuda" and number.isdecimal() and len(number) < 4
    ):
        raise RequestError(f"unknown device {name!r}: auto, cpu, cuda or cuda:0")
    if not torch.cuda.is_available():
        raise DeviceError(
            f"--device {name}: torch {torch.__version__} finds no CUDA device here. Install a build of torch for CUDA and its "
            "driver, or leave --device out: the CPU does the same."
        )
    if number and int(number) >= torch.cuda.device_count():
        raise DeviceError(
            f"--device {name}: there are {torch.cuda.device_count()} CUDA devices, counted from 0"
        )
    return torch.device("cuda", int(number) if number else 0)
