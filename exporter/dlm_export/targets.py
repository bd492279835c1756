"""Targets: what each device runs, and the check of a precision against it.

What a GPU runs follows from its SM, by NVIDIA's support matrices of TensorRT and TensorRT-RTX; its
figures come from ``devices``. Rates are in operations a second.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from dlm_calibration import recipes
from dlm_calibration.recipes import FORMATS, HIGH, Recipe
from dlm_export.devices import DEVICES, Device
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


def _gpu(device: Device) -> Target:
    def runs(name: str) -> bool:
        return device.sm >= LEAST_SM[_number(name)]

    sm = device.sm
    return Target(
        name=device.name,
        description=device.description,
        engine="tensorrt",
        full_precisions=tuple(filter(runs, GPU_FULL_PRECISIONS)),
        formats=tuple(filter(runs, GPU_FORMATS)),
        auto=tuple(filter(runs, GPU_AUTO)),
        note=device.note,
        aliases=GPU_ALIASES,
        sm=sm,
        memory_bytes=None if device.gb is None else device.gb * 10**9,
        memory_is_shared=device.is_shared,
        bandwidth_bytes_per_s=None if device.gb_per_s is None else device.gb_per_s * 1e9,
        rates={key: value * 1e12 for key, value in device.tera.items()},
        derived=device.derived,
        sources=device.sources,
        engine_kinds=("rtx", "tensorrt") if sm in RTX_SM else ("tensorrt",),
        tensorrt=TENSORRT_BY_SM[sm],
        jetpack=JETPACK_BY_SM.get(sm),
    )


_CPU = Target(
    "cpu",
    "any x86-64 or aarch64 processor under Linux",
    "onnxruntime",
    FULL_PRECISIONS,
    tuple(name for name in FORMATS if name != HIGH),
    ("int4-g32-dynamic", "int8-dynamic"),
    "int8 and int4 are fastest, int4 smallest; fp16 saves disk; fp8 and nvfp4 are simulated: exact values, fp32 speed",
    aliases=CPU_ALIASES,
)
_CUDA = Target(
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
)
TARGETS = {target.name: target for target in (_CPU, _CUDA, *map(_gpu, DEVICES))}
GENERIC = {f"sm{sm}": sm for sm in TENSORRT_BY_SM}


def find(name: str) -> Target:
    """The target of this name, or of any GPU of an SM (``sm89``). Raises TargetError that lists the
    choices.
    """
    if name in GENERIC:
        sm = GENERIC[name]
        return _gpu(Device(name, sm, f"any GPU of SM {sm_text(sm)}"))
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
