"""Loads ``libdlm_runtime`` with the types from ``dlm_runtime.h``.

Also converts the library's status codes to exceptions.
"""

from __future__ import annotations

import ctypes as C
import functools
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dlm_runtime.abi.header import read_header
from dlm_runtime.errors import (
    BundleError,
    BusyError,
    CancelledError,
    DlmError,
    EngineError,
    RequestError,
)

MESSAGE_BYTES = 2048
i32p, i64p, f32p = C.POINTER(C.c_int32), C.POINTER(C.c_int64), C.POINTER(C.c_float)


def package_folders(package: str = "dlm_runtime") -> list[Path]:
    """Return the folders of an installed package, or [] if it is missing. It is not imported.

    An editable install has two folders: one contains the sources, and one contains the built files.
    """
    spec = importlib.util.find_spec(package)
    return [
        Path(folder)
        for folder in (spec.submodule_search_locations or [] if spec is not None else [])
    ]


def prefix() -> Path:
    """Return the folder that contains ``include/dlm_runtime.h`` and ``lib/``.

    Raises EngineError if the package was installed without the header and the libraries.
    """
    folders = package_folders()
    for folder in folders:
        if (folder / "include" / "dlm_runtime.h").is_file():
            return folder
    raise EngineError(
        f"include/dlm_runtime.h is not in {', '.join(map(str, folders))}: reinstall dlm-export"
    )


HEADER = read_header((prefix() / "include" / "dlm_runtime.h").read_text())
ABI_VERSION = HEADER.constants["DLM_ABI_VERSION"]
Denoiser, Pass, Policy = (HEADER.structs[f"dlm_{name}"] for name in ("denoiser", "pass", "policy"))
OpenOptions, Request = HEADER.structs["dlm_open_options"], HEADER.structs["dlm_request"]
Step, Result, Stats = (HEADER.structs[f"dlm_{name}"] for name in ("step", "result", "stats"))
PassCost, Message = HEADER.structs["dlm_pass_cost"], HEADER.structs["dlm_message"]
Constraint = HEADER.structs["dlm_constraint"]
SchedulerOptions = HEADER.structs["dlm_scheduler_options"]
SchedulerStats = HEADER.structs["dlm_scheduler_stats"]
PassFn, StepFn = HEADER.callbacks["dlm_pass_fn"], HEADER.callbacks["dlm_step_fn"]
BeforePassFn, DecodeFn = HEADER.callbacks["dlm_before_pass_fn"], HEADER.callbacks["dlm_decode_fn"]
FirstTokenFn = HEADER.callbacks["dlm_first_token_fn"]
TEXT_RESULT, TEXT_STEPS = (HEADER.constants[f"DLM_TEXT_{name}"] for name in ("RESULT", "STEPS"))

_FINISHES = {
    number: name.removeprefix("DLM_FINISH_").lower()
    for name, number in HEADER.constants.items()
    if name.startswith("DLM_FINISH_")
}


def finish_name(number: int) -> str:
    """Return the name of the DLM_FINISH_... constant whose value is N.

    If only a newer library defines this value, the result is ``unknown (N)``.
    """
    return _FINISHES.get(number, f"unknown ({number})")


_ERRORS: dict[int, type[DlmError]] = {
    1: RequestError,
    2: BundleError,
    3: BundleError,
    4: RequestError,
    5: EngineError,
    7: CancelledError,
    9: EngineError,
    10: BusyError,
}


def error(status: int, message: bytes) -> DlmError:
    """Return the exception for a status other than DLM_OK."""
    text = message.decode("utf-8", "replace") or library().dlm_status_name(status).decode()
    return _ERRORS.get(status, DlmError)(text)


def check(call: Callable[..., int], before: tuple[Any, ...], *after: Any) -> None:
    """Call a function of the library that writes an error message, and raise its error.

    The function's arguments are ``before``, the buffer for the message, its size, and ``after``.
    """
    message = C.create_string_buffer(MESSAGE_BYTES)
    status = call(*before, message, len(message), *after)
    if status:
        raise error(status, message.value)


@functools.cache
def library() -> C.CDLL:
    """Load ``libdlm_runtime`` at the first call, and return it at every call.

    The variable $DLM_RUNTIME_LIBRARY names the library. If the variable is not set, the library
    that was built with this package is loaded.
    """
    chosen = os.environ.get("DLM_RUNTIME_LIBRARY")
    name = f"libdlm_runtime.so.{ABI_VERSION}"
    candidates = (
        [Path(chosen)] if chosen else [folder / "lib" / name for folder in package_folders()]
    )
    for path in candidates:
        if path.is_file():
            try:
                loaded = C.CDLL(str(path))
            except OSError as err:
                raise EngineError(
                    f"{path} cannot be loaded ({err}): reinstall dlm-export, or set "
                    "DLM_RUNTIME_LIBRARY to the path of its library"
                ) from err
            break
    else:
        raise EngineError(
            f"{name} is not in {', '.join(str(path) for path in candidates)}: reinstall dlm-export, or set "
            "DLM_RUNTIME_LIBRARY to its path"
        )
    for name, (result, arguments) in HEADER.functions.items():
        function = getattr(loaded, name, None)
        if function is None:
            raise EngineError(
                f"{path} has no function {name}: it is older than this package. Install the matching version"
            )
        function.restype, function.argtypes = result, arguments
        # The version is checked first, because the library of another version may lack functions.
        if name == "dlm_abi_version" and function() != ABI_VERSION:
            raise EngineError(
                f"{path} has ABI version {function()}, this package needs {ABI_VERSION}"
            )
    return loaded


def initialised(kind: Any) -> Any:
    """Return a new struct of the ctypes class ``kind``.

    The library sets ``struct_size``, and sets all other fields to their defaults.
    """
    struct = kind()
    getattr(library(), f"{kind.__name__}_init")(C.byref(struct), C.sizeof(struct))
    return struct


def policy_fields() -> list[Any]:
    """Return the library's description of each policy field, in the order of ``dlm_policy``."""
    found: list[Any] = []
    while field := library().dlm_policy_field_at(len(found)):
        found.append(field.contents)
    return found


def kernel_sets() -> dict[str, str | None]:
    """Return the sets of CPU kernels for this processor architecture. The fastest set comes first.

    The key is the name of a kernel set. The value is None if this processor can run the set.

    If this processor cannot run a kernel set, the value is the reason.
    """
    found: dict[str, str | None] = {}
    while there := library().dlm_kernel_set_at(len(found)):
        refusal = there.contents.refusal
        found[there.contents.name.decode()] = None if refusal is None else refusal.decode()
    return found


def onnxruntime_library() -> str | None:
    """Return the path of libonnxruntime in the installed onnxruntime package, or None if it is
    missing.

    The package onnxruntime is not imported.
    """
    return _packaged("onnxruntime", "capi/libonnxruntime.so*")


def tensorrt_libraries() -> dict[str, str]:
    """Return the paths of the libraries of TensorRT and TensorRT-RTX in their installed wheels.

    The keys are "tensorrt" and "tensorrt_rtx". If a wheel is not installed, its key is missing.
    TensorRT's lean runtime is returned only if the complete TensorRT is not installed.

    The Python packages in the wheels are not imported.
    """
    found = {
        "tensorrt": _packaged("tensorrt_libs", "libnvinfer.so.*")
        or _packaged("tensorrt_lean_libs", "libnvinfer_lean.so.*"),
        "tensorrt_rtx": _packaged("tensorrt_rtx_libs", "libtensorrt_rtx.so.*"),
    }
    return {kind: path for kind, path in found.items() if path is not None}


def _packaged(package: str, pattern: str) -> str | None:
    found = (path for folder in package_folders(package) for path in sorted(folder.glob(pattern)))
    return next(map(str, found), None)
