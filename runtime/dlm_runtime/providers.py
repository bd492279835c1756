"""Finds the GPU providers of ONNX Runtime, and NVIDIA's libraries, in the installed wheels."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import re
from importlib import metadata
from pathlib import Path

from dlm_runtime.abi.native import package_folders
from dlm_runtime.errors import EngineError, RequestError

# The libraries that must be loaded before a provider of onnxruntime-gpu 1.31.1, in the order of
# their dependencies. The providers link to all of these libraries except cuDNN. A provider loads
# cuDNN only when it needs cuDNN. {} is replaced by the major version of CUDA.
_LIBRARIES = (
    "libcudart.so.{}",
    "libcublasLt.so.{}",
    "libcublas.so.{}",
    "libnvrtc.so.{}",
    "libcurand.so.10",
    "libcufft.so.*",
    "libcudnn.so.9",
)
# The package in NVIDIA's wheels onnxruntime-ep-nv-tensorrt-rtx-cu12 and -cu13.
_PLUGIN = "onnxruntime_ep_nv_tensorrt_rtx"


def parse(provider: str) -> tuple[str, int]:
    """Split ``cuda:1`` into the name and the device number (default 0).

    The native library checks the name.
    """
    match = re.fullmatch(r"(\w+)(?::(\d{1,4}))?", provider) if isinstance(provider, str) else None
    if match is None:
        raise RequestError(
            f"provider = {provider!r} is not a name such as cuda, or a name with a GPU's number such as cuda:1"
        )
    return match[1], int(match[2] or 0)


def check_wheels() -> None:
    """Raise EngineError if ``onnxruntime`` and ``onnxruntime-gpu`` are both installed.

    These two packages overwrite each other's files.
    """
    found = {
        name: version
        for name in ("onnxruntime", "onnxruntime-gpu")
        if (version := installed_version(name)) is not None
    }
    if len(found) > 1:
        raise EngineError(
            f"{' and '.join(f'{name} {version}' for name, version in found.items())} are both installed, but they "
            f"overwrite each other's files. Run `pip uninstall -y {' '.join(found)}`, then "
            f"`pip install onnxruntime-gpu=={found['onnxruntime-gpu']}`."
        )


def load_libraries() -> None:
    """Load NVIDIA's libraries from their installed wheels.

    A provider's library needs NVIDIA's libraries, and finds the libraries that are loaded.

    If no wheel contains one of NVIDIA's libraries, the system's loader must find this library. If a
    library is missing, the provider reports an error.
    """
    for paths in _in_wheels().values():
        for path in paths:
            ctypes.CDLL(str(path))


def load_compiler() -> None:
    """Load NVRTC from its installed wheel.

    The native library finds the loaded NVRTC, and uses it to compile the kernel that draws tokens
    on a GPU.
    """
    for path in _in_wheels()[f"libnvrtc.so.{_cuda_major()}"]:
        ctypes.CDLL(str(path))


def plugin_library() -> str | None:
    """Return the path of the TensorRT-RTX provider in NVIDIA's wheel, or None if it is missing.

    The import of NVIDIA's package loads the libraries of TensorRT-RTX.
    """
    if importlib.util.find_spec(_PLUGIN) is None:
        return None
    path = Path(importlib.import_module(_PLUGIN).get_library_path())
    # The import does not load CUDA's library, whose file name the system's loader does not know.
    for library in path.parent.glob("libcudart.so.*"):
        ctypes.CDLL(str(library))
    return str(path)


def cuda_libraries() -> list[str]:
    """Return the libraries that the CUDA provider needs.

    The result contains the path of each library in NVIDIA's wheels. If no wheel contains a library,
    the result contains only its name.
    """
    found: list[str] = []
    for name, paths in _in_wheels().items():
        found += map(str, paths)
        if not paths and "*" not in name:
            found.append(name)
    return found


def _in_wheels() -> dict[str, list[Path]]:
    """Map the file name of each library in ``_LIBRARIES`` to its paths in NVIDIA's wheels."""
    names = [name.format(_cuda_major()) for name in _LIBRARIES]
    folders = package_folders("nvidia")
    return {
        name: [path for folder in folders for path in sorted(folder.glob(f"*/lib/{name}"))]
        for name in names
    }


def _cuda_major() -> str:
    """Return the CUDA version that onnxruntime was built for, or ``*`` if it is unknown."""
    for folder in package_folders("onnxruntime"):
        about = folder / "capi" / "build_and_package_info.py"
        match = (
            re.search(r"cuda_version = '(\d+)", about.read_text(encoding="utf-8"))
            if about.is_file()
            else None
        )
        if match is not None:
            return match[1]
    return "*"


def installed_version(distribution: str) -> str | None:
    """Return the version of a Python distribution, or None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
