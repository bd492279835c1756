"""Devices that bundles are built for, as one data structure, and the check of a precision against one."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dlm_calibration import recipes
from dlm_calibration.recipes import FORMATS, HIGH, Recipe
from dlm_runtime.errors import DlmError

FULL_PRECISIONS = ("fp32", "fp16")
AUTO = "auto"
STORED = "stored"  # as a pre-quantised checkpoint holds its weights


class TargetError(DlmError):
    """A target does not exist, or does not run what was asked of it."""

    exit_code = 2


@dataclass(frozen=True)
class Target:
    """A device profile. ``formats`` of quantised layers it takes, ``auto`` those that ``--precision auto`` tries.

    ``note`` says what a user of it should know.
    """

    name: str
    description: str
    engine: str
    full_precisions: tuple[str, ...]
    formats: tuple[str, ...]
    auto: tuple[str, ...]
    note: str

    @property
    def precisions(self) -> tuple[str, ...]:
        """Everything that ``--precision`` takes for it, recipe files apart."""
        fitting = [name for name, recipe in recipes.RECIPES.items() if not self._missing(recipe)]
        return (*self.full_precisions, *fitting, AUTO, STORED)

    def _missing(self, recipe: Recipe) -> list[str]:
        return sorted({name for _, name in recipe.layers if name not in (HIGH, *self.formats)})

    def recipe(self, precision: str) -> Recipe | None:
        """The recipe behind a precision; None for fp32, fp16, auto and stored. Raises TargetError, RecipeError."""
        if precision in (*self.full_precisions, AUTO, STORED):
            return None
        if precision not in recipes.RECIPES and not precision.endswith(".toml"):
            raise TargetError(
                f"target {self.name} does not run {precision!r}: one of {', '.join(self.precisions)}, or a recipe's .toml file"
            )
        recipe = recipes.find(precision)
        if missing := self._missing(recipe):
            raise TargetError(
                f"target {self.name} does not run {', '.join(missing)}, which {precision} asks for: "
                f"one of {', '.join(self.precisions)}"
            )
        return recipe

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"precisions": list(self.precisions)}


TARGETS = {
    "cpu": Target(
        "cpu",
        "any x86-64 or aarch64 processor under Linux",
        "onnxruntime",
        FULL_PRECISIONS,
        tuple(name for name in FORMATS if name != HIGH),
        ("int4-g32", "int8-dynamic"),
        "int8 is the fastest; int4 and fp16 save disk and memory; fp8 and nvfp4 are simulated: exact values, fp32 speed",
    ),
}


def find(name: str) -> Target:
    """The target of this name. Raises TargetError that lists the choices."""
    target = TARGETS.get(name)
    if target is None:
        raise TargetError(f"unknown target {name!r}: one of {', '.join(TARGETS)}")
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
