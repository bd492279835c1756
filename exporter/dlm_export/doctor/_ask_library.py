"""Loads a third-party library and collects facts about it. ``system`` runs this file as a process.

    python _ask_library.py KIND LIBRARY...

The process prints one JSON object. If the library does not load, the only key is ``failure``, and
the value of this key is the reason. The argument KIND selects the facts:

- ``cuda``: the newest CUDA version that the driver supports, and the GPUs.
- ``tensorrt`` and ``onnxruntime``: the version of the library. For TensorRT, also whether the
  library is the lean runtime, which has no builder.
- ``providers``: the execution providers of the installed ONNX Runtime.
- ``loads``: for each library, the reason why it does not load, or null if it loads.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Callable
from typing import Any

COMPUTE_CAPABILITY = (75, 76)  # values of CUdevice_attribute for the major and minor version
MOST_GPUS = 64


def cuda(name: str) -> dict[str, Any]:
    """Ask the driver for the newest CUDA version that it supports, and for the GPUs.

    The CUDA version is an integer: 13000 means 13.0. For each GPU, the result contains the name,
    the SM version and the memory.
    """
    driver = ctypes.CDLL(name)
    version, count = ctypes.c_int(), ctypes.c_int()
    told: dict[str, Any] = {
        "cuda": None if driver.cuDriverGetVersion(ctypes.byref(version)) else version.value,
        "gpus": [],
    }
    status = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    if status:
        return told | {"status": status}
    for index in range(min(count.value, MOST_GPUS)):
        device, memory, label = ctypes.c_int(), ctypes.c_size_t(), ctypes.create_string_buffer(256)
        capability = [ctypes.c_int(), ctypes.c_int()]
        failed = driver.cuDeviceGet(ctypes.byref(device), index) or driver.cuDeviceGetName(
            label, len(label), device
        )
        for value, attribute in zip(capability, COMPUTE_CAPABILITY, strict=True):
            failed = failed or driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        if failed or driver.cuDeviceTotalMem_v2(ctypes.byref(memory), device):
            continue
        sm = 10 * capability[0].value + capability[1].value
        told["gpus"].append(
            {"name": label.value.decode("utf-8", "replace"), "sm": sm, "memory_bytes": memory.value}
        )
    return told


def tensorrt(name: str) -> dict[str, Any]:
    library = ctypes.CDLL(name)
    parts = [
        getattr(library, f"getInferLib{part}Version")()
        for part in ("Major", "Minor", "Patch", "Build")
    ]
    is_lean = not hasattr(library, "createInferBuilder_INTERNAL")
    return {"version": ".".join(map(str, parts)), "is_lean": is_lean}


def onnxruntime(name: str) -> dict[str, Any]:
    base = ctypes.CDLL(name).OrtGetApiBase
    # OrtApiBase contains two function pointers: GetApi and GetVersionString.
    base.restype = ctypes.POINTER(ctypes.c_void_p)
    version = ctypes.CFUNCTYPE(ctypes.c_char_p)(base()[1])()
    return {"version": version.decode("utf-8", "replace")}


def providers() -> dict[str, Any]:
    import onnxruntime as installed

    return {"providers": list(installed.get_available_providers())}


def loads(*names: str) -> dict[str, Any]:
    failures: dict[str, str | None] = {}
    for name in names:
        try:
            ctypes.CDLL(name)
            failures[name] = None
        except OSError as err:
            failures[name] = str(err)
    return {"failures": failures}


KINDS: dict[str, Callable[..., dict[str, Any]]] = {
    "cuda": cuda,
    "tensorrt": tensorrt,
    "onnxruntime": onnxruntime,
    "providers": providers,
    "loads": loads,
}


def main() -> None:
    # Remove this file's folder from the path, so that modules in the folder cannot hide packages.
    sys.path.pop(0)
    told = os.dup(1)
    os.dup2(2, 1)  # Redirect everything that the library prints to stderr.
    try:
        answer = KINDS[sys.argv[1]](*sys.argv[2:])
    except (OSError, AttributeError, ImportError, ValueError) as err:
        answer = {"failure": str(err)[:600] or type(err).__name__}
    with os.fdopen(told, "w") as out:
        json.dump(answer, out)


if __name__ == "__main__":
    main()
