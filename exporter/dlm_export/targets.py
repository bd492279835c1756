"""Devices that bundles are built for, as one data structure, and the check of a precision against one."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dlm_runtime.errors import DlmError


class TargetError(DlmError):
    """A target does not exist, or does not run what was asked of it."""

    exit_code = 2


@dataclass(frozen=True)
class Target:
    """A device profile. ``note`` says what a user of it should know."""

    name: str
    description: str
    engine: str
    precisions: tuple[str, ...]
    note: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


TARGETS = {
    "cpu": Target(
        "cpu",
        "any x86-64 or aarch64 processor under Linux",
        "onnxruntime",
        ("fp32", "fp16"),
        "fp16 halves the file and the memory; ONNX Runtime computes it no faster than fp32 on most processors",
    ),
}


def find(name: str, precision: str) -> Target:
    """The target, if it runs ``precision``. Raises TargetError that lists the choices."""
    target = TARGETS.get(name)
    if target is None:
        raise TargetError(f"unknown target {name!r}: one of {', '.join(TARGETS)}")
    if precision not in target.precisions:
        raise TargetError(f"target {name} does not run {precision!r}: one of {', '.join(target.precisions)}")
    return target


def this_machine() -> dict[str, Any]:
    """The processor at hand: model, cores, memory in bytes, ONNX Runtime's version and library (None: not installed)."""
    from importlib import metadata

    from dlm_runtime._native import onnxruntime_library

    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    try:
        onnxruntime = metadata.version("onnxruntime")
    except metadata.PackageNotFoundError:
        onnxruntime = None
    return {
        "processor": model,
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "onnxruntime": onnxruntime,
        "onnxruntime_library": onnxruntime_library(),
    }


def available_memory_bytes() -> int | None:
    """Memory that a new program may take without swapping, as Linux estimates it; None where it does not say."""
    info = Path("/proc/meminfo")
    for line in info.read_text().splitlines() if info.is_file() else []:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None
