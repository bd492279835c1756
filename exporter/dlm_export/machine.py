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
    """The engine packages that are installed on a machine, and the machine's GPU.

    ``sm`` is the compute capability (SM version) of the GPU: 89 means 8.9. Without a GPU, ``sm`` is
    ``None``.
    """

    onnxruntime: bool
    rtx: bool
    tensorrt: bool
    sm: int | None


def builders_here() -> Builders:
    """Find out which engine packages are installed. The packages are not imported."""
    rtx, tensorrt = (any(map(find_spec, builder.modules)) for builder in (RTX, TENSORRT))
    return Builders(bool(find_spec("onnxruntime")), rtx, tensorrt, device_sm())


def engine_here(target: Target, here: Builders | None = None) -> tuple[bool, str]:
    """Find out whether this machine can build the engine of ``target``, and how.

    Returns a boolean and a text. The text says how this machine builds the engine, or what the user
    must do to get an engine. ``here`` describes the machine. If ``here`` is ``None``, the function
    examines this machine.
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
    """Return all SM versions that a driver may report for a device with SM version ``sm``.

    CUDA before version 13 reports Thor as 10.1 instead of 11.0.
    """
    return (110, 101) if sm == 110 else (sm,)


def device_sm() -> int | None:
    """Return the SM version of the first GPU that libcuda reports.

    Returns ``None`` without a driver or GPU.
    """
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    # In CUdevice_attribute, 75 is the major compute capability, and 76 is the minor compute
    # capability. Each function returns 0 (CUDA_SUCCESS) or an error code, so ``or`` stops at the
    # first error.
    failed = (
        cuda.cuInit(0)
        or cuda.cuDeviceGet(ctypes.byref(device), 0)
        or cuda.cuDeviceGetAttribute(ctypes.byref(major), 75, device)
        or cuda.cuDeviceGetAttribute(ctypes.byref(minor), 76, device)
    )
    return None if failed else 10 * major.value + minor.value


def this_machine() -> dict[str, Any]:
    """Describe this machine: its processor, memory, GPU, and ONNX Runtime.

    The values for the GPU and for ONNX Runtime are ``None`` if the machine does not have them.
    """
    from dlm_runtime.abi.native import onnxruntime_library
    from dlm_runtime.providers import installed_version

    info = Path("/proc/cpuinfo")
    lines = info.read_text(errors="replace").splitlines() if info.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return {
        "processor": next(names, "") or platform.processor() or platform.machine(),
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpu_sm": device_sm(),
        "onnxruntime": installed_version("onnxruntime"),
        "onnxruntime_library": onnxruntime_library(),
    }


def last_level_cache_bytes(folder: Path = Path("/sys/devices/system/cpu")) -> int:
    """Return the total size in bytes of all last-level caches, or 0 if Linux does not report it."""
    # Maps the level of a cache, and the list of the cores that share the cache, to its size in
    # bytes.
    found: dict[tuple[int, str], int] = {}
    for index in folder.glob("cpu[0-9]*/cache/index[0-9]*"):
        try:
            level, shared, size = (
                (index / name).read_text().strip() for name in ("level", "shared_cpu_list", "size")
            )
            found[int(level), shared] = int(size.removesuffix("K")) << 10
        except (OSError, ValueError):
            continue
    highest = max((level for level, _ in found), default=0)
    return sum(size for (level, _), size in found.items() if level == highest)
