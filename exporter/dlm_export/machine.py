"""The machine at hand: processor, memory, GPU, and which engines it can build now."""

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
    """What could build or run an engine on a machine: packages that Python finds, and the SM of its
    GPU.
    """

    onnxruntime: bool
    rtx: bool
    tensorrt: bool
    sm: int | None


def builders_here() -> Builders:
    """This machine's. Imports none of them."""
    rtx, tensorrt = (any(map(find_spec, builder.modules)) for builder in (RTX, TENSORRT))
    return Builders(bool(find_spec("onnxruntime")), rtx, tensorrt, device_sm())


def engine_here(target: Target, here: Builders | None = None) -> tuple[bool, str]:
    """Whether this machine can build the target's engine now, and in a sentence by what, or how
    else. Imports neither.

    ``here``: another machine than this one.
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
    """What the driver of a device of this SM may say it is: CUDA before 13 calls Thor 10.1."""
    return (110, 101) if sm == 110 else (sm,)


def device_sm() -> int | None:
    """SM of the first GPU, as libcuda tells it; None without driver or GPU."""
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
    """What Linux calls the first processor; empty where it says nothing."""
    info = Path("/proc/cpuinfo")
    for line in info.read_text(errors="replace").splitlines() if info.is_file() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return ""


def this_machine() -> dict[str, Any]:
    """The machine at hand: processor, cores, memory in bytes, its GPU's SM, ONNX Runtime's version
    and library. None: none.
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
