"""Describes this machine: its processor, memory and GPU, and the engines that it can build."""

from __future__ import annotations

import ctypes
import os
import platform
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dlm_export.engines import RTX, TENSORRT
from dlm_export.targets import Target


@dataclass(frozen=True)
class Builders:
    """Which packages are installed that can build or run engines, and the SM of the GPU."""

    onnxruntime: bool
    rtx: bool
    tensorrt: bool
    sm: int | None


def builders_here() -> Builders:
    """Find the ``Builders`` of this machine, without importing the packages."""
    rtx, tensorrt = (any(map(find_spec, builder.modules)) for builder in (RTX, TENSORRT))
    return Builders(bool(find_spec("onnxruntime")), rtx, tensorrt, device_sm())


def engine_here(target: Target, here: Builders | None = None) -> tuple[bool, str]:
    """Check whether this machine can build the target's engine now.

    The text says how the engine is built here, or what to do instead. ``here`` describes another
    machine, or this one if it is ``None``. No builder is imported.
    """
    here = here or builders_here()
    if target.sm is None:
        if target.provider == "cuda":
            return (
                True,
                "nothing is built: onnxruntime-gpu runs the graph on the device (--provider cuda)",
            )
        if here.onnxruntime:
            return True, "ONNX Runtime runs the graph as it is, nothing is built"
        return False, "ONNX Runtime is missing: pip install onnxruntime"
    if RTX.kind in target.engine_kinds and here.rtx:
        return True, "ahead of time by TensorRT-RTX, without a GPU"
    if here.tensorrt and here.sm in reported_sms(target.sm):
        return True, "by TensorRT, for this machine's GPU"
    on_device = f"on the device: dlm-export engine BUNDLE --target {target.name}"
    if RTX.kind in target.engine_kinds:
        return False, f"pip install 'dlm-export[rtx]', or {on_device}"
    return False, on_device


def reported_sms(sm: int) -> tuple[int, ...]:
    """SMs that the driver of a device may report. CUDA before version 13 reports Thor as 10.1
    instead of 11.0.
    """
    return (110, 101) if sm == 110 else (sm,)


def device_sm() -> int | None:
    """SM of the first GPU according to libcuda, or ``None`` if there is no driver or no GPU."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    # 75 and 76 are the values of CUdevice_attribute for the major and minor compute capability. 0
    # is CUDA_SUCCESS, so these calls stop at the first error.
    failed = (
        cuda.cuInit(0)
        or cuda.cuDeviceGet(ctypes.byref(device), 0)
        or cuda.cuDeviceGetAttribute(ctypes.byref(major), 75, device)
        or cuda.cuDeviceGetAttribute(ctypes.byref(minor), 76, device)
    )
    return None if failed else 10 * major.value + minor.value


def _processor() -> str:
    """Linux's name of the first processor, or an empty string if it is unknown."""
    info = Path("/proc/cpuinfo")
    for line in info.read_text(errors="replace").splitlines() if info.is_file() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return ""


def this_machine() -> dict[str, Any]:
    """Describe this machine: its processor, memory, GPU, and ONNX Runtime.

    A value is ``None`` if the machine lacks the thing.
    """
    from importlib import metadata

    from dlm_runtime.abi.native import onnxruntime_library

    try:
        onnxruntime = metadata.version("onnxruntime")
    except metadata.PackageNotFoundError:
        onnxruntime = None
    return {
        "processor": _processor() or platform.processor() or platform.machine(),
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpu_sm": device_sm(),
        "onnxruntime": onnxruntime,
        "onnxruntime_library": onnxruntime_library(),
    }
