"""Where torch works during a build: on which device, in how much memory, and in which folder what outgrows it lies."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

from dlm_export.targets import processor_flags
from dlm_runtime.errors import DlmError, RequestError


class DeviceError(DlmError):
    """A device that torch does not find here."""


@dataclass(frozen=True)
class Workplace:
    """``activation_bytes``: of canvases' states that stay in memory, None: all; the rest lies in a file of ``folder``.

    ``solved``: folder of weights that a solver has rounded; None: they stay in memory. ``states``: file of calibration states.
    """

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    activation_bytes: int | None = None
    folder: Path | None = None
    solved: Path | None = None
    states: Path | None = None


def multiplies_bf16(device: torch.device) -> bool:
    """Whether a device has instructions for products of bf16. Elsewhere torch takes a hundred times as long for them."""
    return device.type == "cuda" or not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(processor_flags())


def find_device(name: str) -> torch.device:
    """``auto`` (a GPU where there is one), ``cpu``, ``cuda`` or ``cuda:1``. Raises DeviceError, RequestError."""
    kind, _, number = name.partition(":")
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if name not in ("auto", "cuda") and not (kind == "cuda" and number.isdecimal() and len(number) < 4):
        raise RequestError(f"unknown device {name!r}: auto, cpu, cuda or cuda:0")
    if not torch.cuda.is_available():
        raise DeviceError(
            f"--device {name}: torch {torch.__version__} finds no CUDA device here. Install a build of torch for CUDA and its "
            "driver, or leave --device out: the CPU does the same."
        )
    if number and int(number) >= torch.cuda.device_count():
        raise DeviceError(f"--device {name}: there are {torch.cuda.device_count()} CUDA devices, counted from 0")
    return torch.device("cuda", int(number) if number else 0)
