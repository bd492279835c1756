"""Finds the TensorRT on this machine that can build engines for a device.

TensorRT-RTX builds ahead of time for chosen compute capabilities, and needs no GPU. Standard
TensorRT builds an engine on the device, and only for this device.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from dlm_export.engines import RTX, TENSORRT
from dlm_export.machine import device_sm, reported_sms
from dlm_export.targets import Target, sm_text
from dlm_export.tensorrt.estimate import BuilderError, EngineError, EngineOptions


@dataclass(frozen=True)
class Builder:
    """An installed TensorRT that can build engines for a target on this machine.

    ``sms`` are compute capabilities times 10: 89 means 8.9.
    """

    kind: str
    module: ModuleType
    sms: tuple[int, ...]


def deferred_command(folder: Path, target: Target, options: EngineOptions | None = None) -> str:
    """Return the command that builds the engine on the device, with the same options."""
    given = options or EngineOptions()
    workspace = given.workspace_bytes and given.workspace_bytes >> 20
    values: dict[str, Any] = {"canvas": given.canvas, "block": given.block, "workspace": workspace}
    values |= {"builder": given.builder, "timing-cache": given.timing_cache}
    command = f"dlm-export engine {folder} --target {target.name}"
    command += "".join(f" --{name} {value}" for name, value in values.items() if value is not None)
    flags = {"version-compatible": given.version_compatible, "allow-fallback": given.allow_fallback}
    return command + "".join(f" --{name}" for name, is_given in flags.items() if is_given)


def find_builder(target: Target, options: EngineOptions) -> Builder | None:
    """Find the TensorRT on this machine that can build for ``target``.

    Returns ``None`` if the engine must be built on the device. Raises BuilderError if TensorRT-RTX
    could build the engine but is not installed, or if the GPU of this machine does not match the
    target. Raises EngineError for an option that the builder does not support.
    """
    wanted = options.builder
    assert target.sm is not None, target.name
    kinds = [known.name for known in (RTX, TENSORRT) if known.kind in target.engine_kinds]
    if wanted is not None and wanted not in kinds:
        raise EngineError(
            f"{wanted} does not build for {target.name} (SM {sm_text(target.sm)}): use {' or '.join(kinds)}"
        )
    if RTX.name in kinds and wanted != TENSORRT.name:
        module = _rtx_module()
        if module is not None:
            if options.timing_cache is not None:
                # Since version 1.2, TensorRT-RTX writes only empty timing caches, and it cannot
                # create a timing cache without a GPU.
                raise EngineError(
                    "TensorRT-RTX does not support timing caches: omit --timing-cache"
                )
            if options.version_compatible:
                raise EngineError(
                    "TensorRT-RTX does not build version-compatible engines: omit "
                    "--version-compatible, or pass --builder tensorrt on the device"
                )
            return Builder(RTX.name, module, (target.sm,))
        if wanted == RTX.name or importlib.util.find_spec("tensorrt") is None:
            raise BuilderError(
                f"building for {target.name} here needs TensorRT-RTX, which is not installed: "
                "pip install 'dlm-export[rtx]'. Or build it on the device (`dlm-export build --no-engine` skips it here)."
            )
    found = device_sm()
    if found in reported_sms(target.sm) and importlib.util.find_spec("tensorrt") is None:
        raise BuilderError(
            f"this is a device of SM {sm_text(target.sm)}, and TensorRT {target.tensorrt} is not installed for this Python: "
            "pip install tensorrt; on a Jetson apt-get install python3-libnvinfer, and a venv made with --system-site-packages."
        )
    if found is None or importlib.util.find_spec("tensorrt") is None:
        return None
    if found not in reported_sms(target.sm):
        raise BuilderError(
            f"TensorRT builds for the GPU that it runs on: this one is SM {sm_text(found)}, {target.name} is SM "
            f"{sm_text(target.sm)}. Run `dlm-export engine` there (`dlm-export build --no-engine` skips it here)."
        )
    return Builder(TENSORRT.name, importlib.import_module("tensorrt"), (found,))


def _rtx_module() -> ModuleType | None:
    for name in RTX.modules:
        if importlib.util.find_spec(name) is not None:
            if importlib.util.find_spec("tensorrt_rtx_libs") is not None:
                # Load the shared libraries that the bindings need.
                importlib.import_module("tensorrt_rtx_libs")
            try:
                return importlib.import_module(name)
            except ImportError as err:
                raise BuilderError(
                    f"{name} is installed but does not load ({err}): pip uninstall -y tensorrt-rtx-cu13-bindings "
                    "tensorrt-rtx-cu13-libs, then pip install 'dlm-export[rtx]'"
                ) from err
    return None
