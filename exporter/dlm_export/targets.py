"""Devices that bundles are built for, as one data structure, and the check of a precision against
them.

What a GPU runs follows from its SM, by NVIDIA's support matrices of TensorRT and TensorRT-RTX; its
figures are those of the pages in its ``sources``. A vendor's GB counts as 10**9 bytes, which is no
more than drivers report. Rates are dense, without sparsity, in operations a second; one that is
printed sparse only is halved, and a comment beside it says so. One that follows from others and is
printed nowhere is in ``derived`` as well.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dlm_calibration import recipes
from dlm_calibration.recipes import FORMATS, HIGH, Recipe
from dlm_runtime.errors import DlmError, ExitCode

FULL_PRECISIONS = ("fp32", "fp16")
AUTO = "auto"
STORED = "stored"  # as a pre-quantised checkpoint holds its weights

# Oldest SM by number format, 89 being 8.9. TensorRT-RTX 1.7 refuses to compile INT4 and bf16 for
# 7.5; INT8 weights compile, although its support matrix has them from 8.6 on.
LEAST_SM = {"fp16": 75, "int8": 75, "bf16": 80, "int4": 80, "fp8": 89, "nvfp4": 100}
GPU_FULL_PRECISIONS = ("fp16", "bf16")
GPU_FORMATS = (
    "int8-weight",
    "int8-static",
    "int4-g64",
    "int4-g128",
    "fp8",
    "nvfp4",
    "nvfp4-weight",
)
GPU_AUTO = ("nvfp4", "fp8", "int4-g64", "int8-weight")  # cheapest first
GPU_ALIASES = {"int8": "int8-weight", "int4": "int4-g64"}
CPU_ALIASES = {"int4-g64": "int4-g64-dynamic", "int4-g128": "int4-g128-dynamic"}
NOT_IN_TENSORRT = {
    "fp32": "engines compute in fp16 or bf16",
    **{
        name: "TensorRT has no MatMulInteger, which quantises activations in each pass"
        for name, chosen in FORMATS.items()
        if chosen.is_dynamic
    },
    "int4-g32": "groups of 32 weights are untried in TensorRT",
}

# What the CUDA provider has kernels for, by docs/OperatorKernels.md of ONNX Runtime and by
# libonnxruntime_providers_cuda.so of onnxruntime-gpu 1.31.1: all that a graph in fp16 or bf16 is
# written in, at opset 23 (graph/cuda.py), and MatMulNBits, which 1.24.4's has too. DequantizeLinear
# and QuantizeLinear are listed at opset 21 and take no bf16 scale, BitShift is missing,
# MatMulInteger takes signed bytes alone.
CUDA_FORMATS = ("int8-weight", "int4-g32", "int4-g64", "int4-g128")
NOT_ON_CUDA = "ONNX Runtime's CUDA provider has no kernel for what its graph is written in"

# What TensorRT-RTX builds for without a GPU: its ComputeCapability enumeration, 1.7.
RTX_SM = (75, 80, 86, 89, 120, 121)
RTX_MODULES = (
    "tensorrt_rtx",
    "tensorrt_rtx_bindings",
)  # NVIDIA's whole package, or its bindings alone
# Every SM that a generic name (sm89) stands for, with the standard TensorRT that knows it.
# Blackwell and FP4 came with 10.8, GB300, DGX B300 and DGX Spark with 10.14
# (https://docs.nvidia.com/deeplearning/tensorrt/10.14.1/index.html and the release notes of
# 10.8.0), Thor with JetPack 7; JetPack 7.2 for Orin holds 10.16.
TENSORRT_BY_SM = {
    75: "10.14 or later",
    80: "10.14 or later",
    86: "10.14 or later",
    87: "10.3 (JetPack 6), 10.16 (JetPack 7.2)",
    89: "10.14 or later",
    90: "10.14 or later",
    100: "10.14 or later",
    103: "10.14 or later",
    110: "10.14 or later (with 10.13 of JetPack 7.0, a bundle built with --plain-graph)",
    120: "10.14 or later",
    121: "10.14 or later",
}
JETPACK_BY_SM = {87: "6, or 7.2 and later", 110: "7"}


class TargetError(DlmError):
    """A target does not exist, or does not run what was asked of it."""

    exit_code = ExitCode.WRONG_INPUT


@dataclass(frozen=True)
class Target:
    """A device profile. None and missing keys: no source gives the figure.

    ``formats`` of quantised layers it takes, ``auto`` those that ``--precision auto`` tries,
    cheapest first. ``aliases``: the recipe that a name of ``--precision`` means here, where that is
    not the recipe so called. ``note``: what a user should know. ``sm`` is the compute capability
    (89 is 8.9), None for a CPU. ``memory_is_shared``: the host's programs take their part of
    ``memory_bytes``. ``rates`` are peak operations a second of the tensor cores, by fp16, int8,
    int4, fp8, nvfp4, with fp32 accumulation where the vendor tells them apart; ``derived``: how
    those of them follow that no source prints. ``provider``: who runs the graph where ``engine`` is
    "onnxruntime". ``engine_kinds``: "rtx" is TensorRT-RTX, ahead of time and without a GPU;
    "tensorrt" is standard TensorRT on the device. ``tensorrt`` and ``jetpack`` say which versions.
    """

    name: str
    description: str
    engine: str
    full_precisions: tuple[str, ...]
    formats: tuple[str, ...]
    auto: tuple[str, ...]
    note: str
    aliases: Mapping[str, str] = field(default_factory=dict)
    sm: int | None = None
    memory_bytes: int | None = None
    memory_is_shared: bool = False
    bandwidth_bytes_per_s: float | None = None
    rates: Mapping[str, float] = field(default_factory=dict)
    derived: Mapping[str, str] = field(default_factory=dict)
    sources: tuple[str, ...] = ()
    engine_kinds: tuple[str, ...] = ()
    provider: str = "cpu"
    tensorrt: str | None = None
    jetpack: str | None = None

    @property
    def precisions(self) -> tuple[str, ...]:
        """Everything that ``--precision`` takes for it, recipe files apart."""
        meant = {name: recipes.RECIPES[self.aliases.get(name, name)] for name in recipes.RECIPES}
        names = [name for name, recipe in meant.items() if not self.missing(_formats(recipe))]
        return (*self.full_precisions, *names, *((AUTO, STORED) if self.formats else ()))

    @property
    def is_gpu(self) -> bool:
        """Whether its bundles hold a form of the graph for GPUs."""
        return self.sm is not None or self.provider != "cpu"

    @property
    def needs_plain_graph(self) -> bool:
        """Whether its TensorRT may be JetPack 6's 10.3: before 10.14 no parser knows the operators
        of opset 23.
        """
        return self.sm == 87

    def missing(self, formats: Iterable[str]) -> list[str]:
        """Those of ``formats`` of layers that the target does not take, each once."""
        return sorted(set(formats) - {HIGH, *self.formats})

    def check_layers(self, layers: Mapping[str, str]) -> None:
        """TargetError where a layer of a bundle (layer -> format) is in a format that the target
        does not take.
        """
        check([self], layers.values(), "the bundle")

    def recipe(self, precision: str) -> Recipe | None:
        """``recipe_for`` this target alone."""
        return recipe_for([self], precision)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"precisions": list(self.precisions)}

    def why_not(self, name: str) -> str | None:
        """The rule that keeps a format or full precision from running here; None where no rule
        does.
        """
        if self.sm is None:
            return NOT_ON_CUDA if self.provider == "cuda" and name != "fp32" else None
        number = _number(name)
        if self.sm < LEAST_SM.get(number, 0):
            return f"{number.upper()} needs SM {sm_text(LEAST_SM[number])} or later; {self.name} is SM {sm_text(self.sm)}"
        return NOT_IN_TENSORRT.get(name)


def _formats(recipe: Recipe) -> set[str]:
    """Formats of the layers that a recipe names; an FP8 embedding table needs what FP8 layers need."""
    return {name for _, name in recipe.layers} | ({"fp8"} if recipe.embedding == "fp8" else set())


def _number(name: str) -> str:
    """The number format that the name of a quantised layer's format, or of a full precision, begins
    with.
    """
    return name.partition("-")[0]


def sm_text(sm: int) -> str:
    """89 as 8.9, 121 as 12.1."""
    return f"{sm // 10}.{sm % 10}"


def _gpu(
    name: str,
    sm: int,
    description: str,
    *sources: str,
    gb: int | None = None,
    gb_per_s: float | None = None,
    is_shared: bool = False,
    tera: Mapping[str, float] | None = None,
    derived: Mapping[str, str] | None = None,
    note: str = "",
) -> Target:
    """A GPU; ``tera`` are its rates in 10**12 operations a second."""

    def runs(name: str) -> bool:
        return sm >= LEAST_SM[_number(name)]

    return Target(
        name=name,
        description=description,
        engine="tensorrt",
        full_precisions=tuple(filter(runs, GPU_FULL_PRECISIONS)),
        formats=tuple(filter(runs, GPU_FORMATS)),
        auto=tuple(filter(runs, GPU_AUTO)),
        note=note,
        aliases=GPU_ALIASES,
        sm=sm,
        memory_bytes=None if gb is None else gb * 10**9,
        memory_is_shared=is_shared,
        bandwidth_bytes_per_s=None if gb_per_s is None else gb_per_s * 1e9,
        rates={key: value * 1e12 for key, value in (tera or {}).items()},
        derived=derived or {},
        sources=sources,
        engine_kinds=("rtx", "tensorrt") if sm in RTX_SM else ("tensorrt",),
        tensorrt=TENSORRT_BY_SM[sm],
        jetpack=JETPACK_BY_SM.get(sm),
    )


_BLOG = "https://developer.nvidia.com/blog"
_PRODUCTS = "https://www.nvidia.com/en-us"
_JETSON_ORIN = f"{_PRODUCTS}/autonomous-machines/embedded-systems/jetson-orin/"
_NANO_SUPER = f"{_BLOG}/nvidia-jetson-orin-nano-developer-kit-gets-a-super-boost/"
_NX_SUPER = f"{_BLOG}/nvidia-jetpack-6-2-brings-super-mode-to-nvidia-jetson-orin-nano-and-jetson-orin-nx-modules/"
_ORIN_BRIEF = "https://www.nvidia.com/content/dam/en-zz/Solutions/gtcf21/jetson-orin/nvidia-jetson-agx-orin-technical-brief.pdf"
_ORIN_DLA = "https://github.com/NVIDIA/Deep-Learning-Accelerator-SW"
_ADA = "https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf"
_HOPPER = "https://resources.nvidia.com/en-us-tensor-core/gtc22-whitepaper-hopper"
_HGX = f"{_PRODUCTS}/data-center/hgx/"
_HGX_PARTS = "https://docs.nvidia.com/enterprise-reference-architectures/hgx-ai-factory/latest/components.html"
_THOR = f"{_BLOG}/introducing-nvidia-jetson-thor-the-ultimate-platform-for-physical-ai/"
_BLACKWELL = "https://images.nvidia.com/aem-dam/Solutions/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf"
_BLACKWELL_PRO = (
    "https://www.nvidia.com/content/dam/en-zz/Solutions/design-visualization/quadro-product-literature/"
    "NVIDIA-RTX-Blackwell-PRO-GPU-Architecture-v1.0.pdf"
)

_TARGETS = (
    Target(
        "cpu",
        "any x86-64 or aarch64 processor under Linux",
        "onnxruntime",
        FULL_PRECISIONS,
        tuple(name for name in FORMATS if name != HIGH),
        ("int4-g32-dynamic", "int8-dynamic"),
        "int8 and int4 are fastest, int4 smallest; fp16 saves disk; fp8 and nvfp4 are simulated: exact values, fp32 speed",
        aliases=CPU_ALIASES,
    ),
    Target(
        "cuda",
        "any NVIDIA GPU, through ONNX Runtime's CUDA provider",
        "onnxruntime",
        GPU_FULL_PRECISIONS,
        CUDA_FORMATS,
        ("int4-g64", "int8-weight"),
        "runs with --provider cuda (onnxruntime-gpu), no engine is built; bf16 needs SM 8.0 or later",
        aliases=GPU_ALIASES,
        provider="cuda",
        sources=("https://github.com/microsoft/onnxruntime/blob/main/docs/OperatorKernels.md",),
    ),
    _gpu(
        "orin-nano",
        87,
        "Jetson Orin Nano 8 GB, MAXN_SUPER",
        _NANO_SUPER,
        gb=8,
        gb_per_s=102,
        is_shared=True,
        tera={"fp16": 17, "int8": 33},
    ),
    # Its 157 sparse TOPS count the two DLAs, which engines here leave idle; no page gives the GPU's
    # part.
    _gpu(
        "orin-nx",
        87,
        "Jetson Orin NX 16 GB",
        _JETSON_ORIN,
        _NX_SUPER,
        gb=16,
        gb_per_s=102.4,
        is_shared=True,
    ),
    # int8: the GPU's part of 275 TOPS at MAXN, printed sparse (170 in the brief, which rounds).
    # fp16: by the brief a tensor core makes 16 of its products where it makes 32 of int8, and Orin
    # Nano's two printed rates stand so too.
    _gpu(
        "agx-orin",
        87,
        "Jetson AGX Orin 64 GB, MAXN",
        _JETSON_ORIN,
        _ORIN_BRIEF,
        _ORIN_DLA,
        gb=64,
        gb_per_s=204.8,
        is_shared=True,
        tera={"fp16": 171 / 4, "int8": 171 / 2},
        derived={"fp16": "half of int8's: an Ampere tensor core makes half as many products of it"},
    ),
    _gpu(
        "rtx4090",
        89,
        "GeForce RTX 4090",
        _ADA,
        gb=24,
        gb_per_s=1008,
        tera={"fp16": 165.2, "int8": 660.6, "int4": 1321.2, "fp8": 330.3},
    ),
    # Printed sparse.
    _gpu(
        "l4",
        89,
        "L4",
        f"{_PRODUCTS}/data-center/l4/",
        gb=24,
        gb_per_s=300,
        tera={"fp16": 242 / 2, "int8": 485 / 2, "fp8": 485 / 2},
    ),
    _gpu(
        "l40s",
        89,
        "L40S",
        f"{_PRODUCTS}/data-center/l40s/",
        gb=48,
        gb_per_s=864,
        tera={"fp16": 362.05, "int8": 733, "fp8": 733},
    ),
    _gpu(
        "h100",
        90,
        "H100 SXM 80 GB",
        _HOPPER,
        f"{_PRODUCTS}/data-center/h100/",
        gb=80,
        gb_per_s=3350,
        tera={"fp16": 989.4, "int8": 1978.9, "fp8": 1978.9},
    ),
    # Printed sparse.
    _gpu(
        "h200",
        90,
        "H200 SXM 141 GB",
        f"{_PRODUCTS}/data-center/h200/",
        gb=141,
        gb_per_s=4800,
        tera={"fp16": 1979 / 2, "int8": 3958 / 2, "fp8": 3958 / 2},
    ),
    # Printed for eight, of which nvfp4 is dense and the others are sparse.
    _gpu(
        "b200",
        100,
        "B200 SXM 180 GB",
        f"{_PRODUCTS}/data-center/dgx-b200/",
        _HGX,
        gb=180,
        gb_per_s=64000 / 8,
        tera={"fp16": 36000 / 16, "int8": 72000 / 16, "fp8": 72000 / 16, "nvfp4": 72000 / 8},
    ),
    # Likewise; the memory is 2.1 TB of eight, although 288 GB are fitted.
    _gpu(
        "b300",
        103,
        "B300 SXM",
        _HGX,
        _HGX_PARTS,
        gb=262,
        gb_per_s=8000,
        tera={"fp16": 36000 / 16, "int8": 3000 / 16, "fp8": 72000 / 16, "nvfp4": 108000 / 8},
        note="hardly any INT8 arithmetic: int8-static is slow, int8 (weights only) is not",
    ),
    # fp16 and int8 are printed sparse.
    _gpu(
        "thor",
        110,
        "Jetson AGX Thor, T5000 128 GB",
        _THOR,
        gb=128,
        gb_per_s=273,
        is_shared=True,
        tera={"fp16": 517 / 2, "int8": 1035 / 2, "fp8": 517, "nvfp4": 1035},
    ),
    _gpu(
        "rtx5090",
        120,
        "GeForce RTX 5090",
        _BLACKWELL,
        gb=32,
        gb_per_s=1792,
        tera={"fp16": 209.5, "int8": 838, "fp8": 419, "nvfp4": 1676},
    ),
    _gpu(
        "rtx-pro-6000",
        120,
        "RTX PRO 6000 Blackwell, Workstation Edition",
        _BLACKWELL_PRO,
        gb=96,
        gb_per_s=1792,
        tera={"fp16": 503.8, "int8": 1007.6, "fp8": 1007.6, "nvfp4": 2015.2},
    ),
    # Printed sparse; no page gives the other rates.
    _gpu(
        "gb10",
        121,
        "GB10, DGX Spark",
        f"{_PRODUCTS}/products/workstations/dgx-spark/",
        gb=128,
        gb_per_s=273,
        is_shared=True,
        tera={"nvfp4": 1000 / 2},
    ),
)
TARGETS = {target.name: target for target in _TARGETS}
GENERIC = {f"sm{sm}": sm for sm in TENSORRT_BY_SM}


def find(name: str) -> Target:
    """The target of this name, or of any GPU of an SM (``sm89``). Raises TargetError that lists the
    choices.
    """
    if name in GENERIC:
        return _gpu(name, GENERIC[name], f"any GPU of SM {sm_text(GENERIC[name])}")
    if name not in TARGETS:
        raise TargetError(
            f"unknown target {name!r}: one of {', '.join(TARGETS)}, or by compute capability {', '.join(GENERIC)}"
        )
    return TARGETS[name]


def find_all(names: Sequence[str]) -> list[Target]:
    """The targets of one bundle, in the order given. Raises TargetError for none, one given twice,
    and cpu beside GPUs.
    """
    if not names:
        raise TargetError(
            f"no target: name at least one of {', '.join(TARGETS)}, {', '.join(GENERIC)}"
        )
    found = [find(name) for name in names]
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise TargetError(f"target {', '.join(twice)} is given more than once: name each once")
    if len({(target.engine, target.provider) for target in found}) > 1:
        raise TargetError(
            f"targets {', '.join(names)}: a bundle is for cpu, for cuda, or for GPUs by name; build two"
        )
    if len({target.needs_plain_graph for target in found}) > 1:
        raise TargetError(
            f"targets {', '.join(names)}: Orin's TensorRT takes a graph of elementary operators, the others a faster one; "
            "build two bundles"
        )
    return found


def recipe_for(targets: Sequence[Target], precision: str) -> Recipe | None:
    """The recipe behind a precision for all of ``targets`` (of ``find_all``); None for full
    precisions, auto and stored.

    Raises TargetError: which target does not run it, why, and what all of them do; RecipeError.
    """
    if precision in (AUTO, STORED):
        for target in targets:
            if not target.formats:
                raise _refusal(targets, target, repr(precision), [precision])
        return None
    if precision not in recipes.RECIPES and not precision.endswith(".toml"):
        for target in targets:
            if precision not in target.full_precisions:
                raise _refusal(targets, target, repr(precision), [precision])
        return None
    recipe = recipes.find(targets[0].aliases.get(precision, precision))
    check(targets, _formats(recipe), precision)
    return recipe


def check(targets: Sequence[Target], formats: Iterable[str], asker: str) -> None:
    """TargetError where a target does not take one of ``formats`` of layers, which ``asker`` asks
    for.
    """
    formats = list(formats)
    for target in targets:
        if missing := target.missing(formats):
            asked = "" if missing == [asker] else f", which {asker} asks for"
            raise _refusal(targets, target, ", ".join(missing) + asked, missing)


def _refusal(
    targets: Sequence[Target], target: Target, what: str, lacking: Sequence[str]
) -> TargetError:
    why = "; ".join(dict.fromkeys(filter(None, map(target.why_not, lacking))))
    shared = [
        name for name in target.precisions if all(name in other.precisions for other in targets)
    ]
    who = (
        "it runs" if len(targets) == 1 else f"{', '.join(other.name for other in targets)} all run"
    )
    return TargetError(
        f"target {target.name} does not run {what}{f' ({why})' if why else ''}: {who} {', '.join(shared)} and recipes "
        "(.toml files) of the same formats"
    )


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
    rtx = any(map(find_spec, RTX_MODULES))
    return Builders(bool(find_spec("onnxruntime")), rtx, bool(find_spec("tensorrt")), device_sm())


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
    if "rtx" in target.engine_kinds and here.rtx:
        return True, "ahead of time by TensorRT-RTX, without a GPU"
    if here.tensorrt and here.sm in reported_sms(target.sm):
        return True, "by TensorRT, for this machine's GPU"
    on_device = f"on the device: dlm-export engine BUNDLE --target {target.name}"
    if "rtx" in target.engine_kinds:
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


def available_memory_bytes() -> int | None:
    """Memory that a new program may take without swapping, as Linux estimates it; None where it
    does not say.
    """
    info = Path("/proc/meminfo")
    for line in info.read_text().splitlines() if info.is_file() else []:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None
