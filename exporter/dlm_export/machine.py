"""This machine: processor, memory, GPU, and the engines that it can build."""

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
    """Installed packages that can build or run engines, and the SM of the GPU."""

    onnxruntime: bool
    rtx: bool
    tensorrt: bool
    sm: int | None


def builders_here() -> Builders:
    """Those of this machine. Imports none of the packages."""
    rtx, tensorrt = (any(map(find_spec, builder.modules)) for builder in (RTX, TENSORRT))
    return Builders(bool(find_spec("onnxruntime")), rtx, tensorrt, device_sm())


def engine_here(target: Target, here: Builders | None = None) -> tuple[bool, str]:
    """Check if this machine can build the target's engine now, and say how, or how else.

    Imports no builder. ``here`` replaces this machine.
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
    """SMs that the driver of such a device may report: CUDA before 13 reports Thor as 10.1."""
    return (110, 101) if sm == 110 else (sm,)


def device_sm() -> int | None:
    """SM of the first GPU, from libcuda, or ``None`` without driver or GPU."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    # CUdevice_attribute: 75 and 76 are the compute capability, major and minor. 0 is CUDA_SUCCESS.
    failed = (
        cuda.cuInit(0)
        or cuda.cuDeviceGet(ctypes.byref(device), 0)
        or cuda.cuDeviceGetAttribute(ctypes.byref(major), 75, device)
        or cuda.cuDeviceGetAttribute(ctypes.byref(minor), 76, device)
    )
    return None if failed else 10 * major.value + minor.value


def _processor() -> str:
    """The first processor's name in Linux; empty if unknown."""
    info = Path("/proc/cpuinfo")
    for line in info.read_text(errors="replace").splitlines() if info.is_file() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return ""


def this_machine() -> dict[str, Any]:
    """This machine: processor, cores, memory in bytes, SM of its GPU, ONNX Runtime's version and
    library; ``None`` if missing.
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
