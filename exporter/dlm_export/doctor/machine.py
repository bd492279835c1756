"""Collects facts about this machine in a ``Machine``. Tests create a ``Machine`` by hand."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dlm_export.doctor.board import Board, find_board
from dlm_export.doctor.system import System
from dlm_export.engines import ENGINE_BUILDERS, RTX, TENSORRT
from dlm_runtime.abi import native as _native
from dlm_runtime.errors import DlmError
from dlm_runtime.providers import cuda_libraries

NVIDIA_VENDOR, DISPLAY_CLASS = "0x10de", "0x03"
# The ABI has no function that says how the native library was compiled. This module therefore
# searches the library's file for two texts. A library without TensorRT contains the first text,
# from no_tensorrt.cc. A library for TensorRT-RTX contains the second text, from
# tensorrt_library.cc.
NO_TENSORRT = b"this build of libdlm_runtime has no TensorRT"
FOR_RTX = b"(pip: tensorrt-rtx-cu13-libs)"
HEADER_FOLDERS = ("usr/include/{}-linux-gnu", "usr/include", "usr/local/include")


@dataclass(frozen=True)
class Gpu:
    name: str
    sm: int
    memory_bytes: int


@dataclass(frozen=True)
class Driver:
    """Facts about NVIDIA's driver.

    ``cuda`` is the newest CUDA version that the driver supports. If the driver reports no GPU,
    ``failure`` is the reason.
    """

    cuda: str | None = None
    gpus: tuple[Gpu, ...] = ()
    failure: str | None = None


@dataclass(frozen=True)
class Native:
    """Facts about libdlm_runtime, the native library.

    - ``tensorrt``: the TensorRT variant that the library was compiled for, or ``None``.
    - ``kernels``: maps each kernel set of this architecture to the reason why this processor cannot
      run it, or to ``None`` if the processor can run it. The first key is the fastest kernel set.
    - ``failure``: the reason why the library does not load, or ``None`` if the library loads.
    """

    path: str | None = None
    version: str | None = None
    tensorrt: str | None = None
    kernels: Mapping[str, str | None] = field(default_factory=dict)
    failure: str | None = None


@dataclass(frozen=True)
class Library:
    """A third-party library that runs bundles, or the reason why none was found (``failure``).

    ``is_lean`` is true for TensorRT's lean runtime, which only runs version-compatible engines.
    """

    path: str | None = None
    version: str | None = None
    failure: str | None = None
    is_lean: bool = False


@dataclass(frozen=True)
class Machine:
    """All facts about a machine.

    - ``packages``: maps each required Python package to its version, or to ``None`` if the package
      is missing.
    - ``extras``: maps each extra to its packages and their versions.
    - ``cuda_libraries``: maps each library of ONNX Runtime's CUDA provider to the reason why it
      does not load, or to ``None`` if it loads. The mapping is empty if loading was not tried.
    - ``tensorrt``: maps each TensorRT variant to the library that runs engines of this variant.
    - ``builders``: maps each TensorRT variant to the version of the Python module that builds
      engines of this variant. The version is ``None`` if the module is missing.
    - ``memory_limit_bytes``: the number of bytes that the container may still allocate.
    - ``has_nvidia_hardware``: true if an NVIDIA GPU is on the PCI bus, even if no driver is
      installed.
    """

    python: tuple[int, int]
    executable: str
    architecture: str
    version: str | None
    packages: Mapping[str, str | None]
    extras: Mapping[str, Mapping[str, str | None]]
    native: Native
    onnxruntime: Library
    onnxruntime_wheels: Mapping[str, str]
    providers: Sequence[str]
    telemetry: str | None
    driver: Driver
    has_nvidia_hardware: bool
    cuda_libraries: Mapping[str, str | None]
    tensorrt: Mapping[str, Library]
    builders: Mapping[str, str | None]
    board: Board | None
    memory_bytes: int | None
    available_bytes: int | None
    swap_bytes: int | None
    memory_limit_bytes: int | None
    free_disk_bytes: int | None
    compiler: str | None
    tensorrt_headers: str | None

    @property
    def sm(self) -> int | None:
        """The SM version of the first GPU that the driver reports, or ``None`` without a GPU."""
        return self.driver.gpus[0].sm if self.driver.gpus else None

    @property
    def usable_bytes(self) -> int | None:
        """The number of bytes of memory that a new program can use.

        The result is Linux's estimate of the available memory. If a container limits memory and has
        less left, the result is the memory that the container has left.
        """
        known = (self.available_bytes, self.memory_limit_bytes)
        return min((size for size in known if size is not None), default=None)


def look(system: System, folder: Path) -> Machine:
    """Collect all facts about a machine, and the free space on the disk of ``folder``."""
    memory = _memory(system)
    wheels = {
        name: version
        for name in ("onnxruntime", "onnxruntime-gpu")
        if (version := system.version(name))
    }
    driver = _driver(system)
    packages, extras = _requirements(system)
    wants_cuda = "onnxruntime-gpu" in wheels
    headers = [folder.format(system.architecture) for folder in HEADER_FOLDERS]
    return Machine(
        python=(int(system.python[0]), int(system.python[1])),
        executable=system.executable,
        architecture=system.architecture,
        version=system.version("dlm-export"),
        packages=packages,
        extras=extras,
        native=_native_library(),
        onnxruntime=_library(
            system,
            "onnxruntime",
            _candidates(system, "DLM_ONNXRUNTIME", _native.onnxruntime_library()),
        ),
        onnxruntime_wheels=wheels,
        providers=system.library("providers").get("providers", []) if wheels else [],
        telemetry=system.variables.get("ORT_DISABLE_TELEMETRY"),
        driver=driver,
        has_nvidia_hardware=_has_nvidia_hardware(system),
        cuda_libraries=system.library("loads", *cuda_libraries()).get("failures", {})
        if wants_cuda
        else {},
        tensorrt=_tensorrt(system),
        builders={
            name: _module_version(system, builder.modules)
            for name, builder in ENGINE_BUILDERS.items()
        },
        board=find_board(system),
        memory_bytes=memory.get("MemTotal"),
        available_bytes=memory.get("MemAvailable"),
        swap_bytes=memory.get("SwapTotal"),
        memory_limit_bytes=_container_limit(system),
        free_disk_bytes=system.free_disk_bytes(folder),
        compiler=next(iter((system.program("c++", "--version") or "").splitlines()), None),
        tensorrt_headers=next(
            (f"/{each}" for each in headers if system.paths(f"{each}/NvInferRuntime.h")), None
        ),
    )


def _requirements(system: System) -> tuple[dict[str, str | None], dict[str, dict[str, str | None]]]:
    """Return the versions of the required packages: of the base install, and by extra."""
    base: dict[str, str | None] = {}
    extras: dict[str, dict[str, str | None]] = {}
    for text in system.requirements():
        name = re.match(r"[\w.-]+", text)
        if name is None or _is_for_another(text, system) or name[0] == "dlm-export":
            continue
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", text)
        (base if extra is None else extras.setdefault(extra[1], {}))[name[0]] = system.version(
            name[0]
        )
    return base, extras


def _is_for_another(text: str, system: System) -> bool:
    """Return True if a requirement is for a different processor or a different version of Python.

    This function understands only the two kinds of environment markers that pyproject.toml uses.
    """
    machine = re.search(r"platform_machine == ['\"](\w+)['\"]", text)
    older = re.search(r"python_version < ['\"](\d+)\.(\d+)['\"]", text)
    here = (int(system.python[0]), int(system.python[1]))
    return (machine is not None and machine[1] != system.architecture) or (
        older is not None and here >= (int(older[1]), int(older[2]))
    )


def _native_library() -> Native:
    """Describe the native library. It is trusted, so it is loaded into this process."""
    try:
        library = _native.library()
        kernels = _native.kernel_sets()
    except (DlmError, OSError) as err:
        return Native(failure=str(err))
    path = library._name
    data = Path(path).read_bytes()
    kind = None if NO_TENSORRT in data else (RTX if FOR_RTX in data else TENSORRT).name
    return Native(path, library.dlm_version().decode(), kind, kernels)


def _candidates(system: System, variable: str, packaged: str | None, *names: str) -> list[str]:
    """List the paths where the native library looks for a third-party library, in order."""
    if chosen := system.variables.get(variable):
        return [chosen]
    usual = names or ("libonnxruntime.so.1", "libonnxruntime.so")
    return [packaged, *usual] if packaged else list(usual)


def _library(system: System, kind: str, candidates: Sequence[str]) -> Library:
    """Describe the first library in ``candidates`` that loads and reports its version."""
    failure = None
    for path in candidates:
        told = system.library(kind, path)
        if "version" in told:
            is_lean = bool(told.get("is_lean"))
            return Library(path, str(told["version"])[:40], is_lean=is_lean)
        failure = failure or str(told.get("failure"))
    return Library(failure=failure)


def _tensorrt(system: System) -> dict[str, Library]:
    chosen, packaged = system.variables.get("DLM_TENSORRT"), _native.tensorrt_libraries()
    found = {}
    for kind, builder in ENGINE_BUILDERS.items():
        candidates = _candidates(system, "DLM_TENSORRT", packaged.get(kind), *builder.libraries)
        if chosen and ("rtx" in Path(chosen).name) != (builder is RTX):
            candidates = []  # $DLM_TENSORRT names a library of the other TensorRT variant
        found[kind] = _library(system, "tensorrt", candidates)
    return found


def _module_version(system: System, names: Sequence[str]) -> str | None:
    """Return the version of the first installed module, or "?" if its version is unknown."""
    distributions = {"tensorrt_rtx_bindings": "tensorrt-rtx-cu13-bindings"}
    found = next(filter(system.has_module, names), None)
    return None if found is None else system.version(distributions.get(found, found)) or "?"


def _driver(system: System) -> Driver:
    told = system.library("cuda", system.variables.get("DLM_CUDA_LIBRARY") or "libcuda.so.1")
    if "failure" in told:
        return Driver(failure=str(told["failure"]))
    coded = told.get("cuda")
    cuda = f"{coded // 1000}.{coded % 1000 // 10}" if isinstance(coded, int) else None
    gpus = tuple(Gpu(gpu["name"], gpu["sm"], gpu["memory_bytes"]) for gpu in told.get("gpus", []))
    if "status" in told:
        return Driver(cuda, failure=f"it shows no GPU (CUresult {told['status']})")
    return Driver(cuda, gpus, None if gpus else "it shows no GPU: CUDA_VISIBLE_DEVICES may hide it")


def _has_nvidia_hardware(system: System) -> bool:
    for vendor in system.paths("/sys/bus/pci/devices/*/vendor"):
        said = [(vendor.parent / name) for name in ("vendor", "class")]
        texts = [system.text(str(path.relative_to(system.root))) or "" for path in said]
        if texts[0].strip() == NVIDIA_VENDOR and texts[1].startswith(DISPLAY_CLASS):
            return True
    return False


def _memory(system: System) -> dict[str, int]:
    """Read /proc/meminfo. All values are in bytes."""
    found = re.findall(r"^(\w+): +(\d{1,15}) kB$", system.text("/proc/meminfo") or "", re.MULTILINE)
    return {name: 1024 * int(kib) for name, kib in found}


def _container_limit(system: System) -> int | None:
    """Return how many bytes the container may still allocate, or ``None`` if there is no limit."""
    # In a container with control groups version 2, these files contain the limit and the usage.
    limit, used = (
        (system.text(f"/sys/fs/cgroup/{name}") or "").strip()
        for name in ("memory.max", "memory.current")
    )
    return max(0, int(limit) - int(used)) if limit.isdecimal() and used.isdecimal() else None
