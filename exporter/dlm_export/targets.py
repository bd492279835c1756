"""Targets: what each device can run, and checks of a precision against it.

A GPU's features follow from its SM, by NVIDIA's support matrices of TensorRT and TensorRT-RTX; its
figures come from ``devices``. Rates are operations per second.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from dlm_calibration import recipes
from dlm_calibration.recipes import FORMATS, HIGH, Recipe
from dlm_export.devices import DEVICES, Device
from dlm_export.engines import RTX, TENSORRT
from dlm_runtime.errors import DlmError, ExitCode

FULL_PRECISIONS = ("fp32", "fp16")
AUTO = "auto"
STORED = "stored"  # keep a pre-quantised checkpoint's formats

LEAST_SM = {"fp16": 75, "bf16": 80}
"""Oldest SM per full precision (89 is 8.9). TensorRT-RTX 1.7 does not compile bf16 for 7.5."""
GPU_ALIASES = {"int8": "int8-weight", "int4": "int4-g64"}
CPU_ALIASES = {"int4-g64": "int4-g64-dynamic", "int4-g128": "int4-g128-dynamic"}

# The CUDA provider's kernels (LayerFormat.on_cuda), by docs/OperatorKernels.md of ONNX Runtime and
# libonnxruntime_providers_cuda.so of onnxruntime-gpu 1.31.1. It has all operators of fp16 and bf16
# graphs at opset 23 (graph/cuda.py), and MatMulNBits, since 1.24.4. DequantizeLinear and
# QuantizeLinear are listed at opset 21 without bf16 scales, BitShift is missing, and MatMulInteger
# supports signed bytes only.
NOT_ON_CUDA = "ONNX Runtime's CUDA provider has no kernel for operators of its graph"

# SMs that TensorRT-RTX 1.7 builds for without a GPU: its ComputeCapability enumeration.
RTX_SM = (75, 80, 86, 89, 120, 121)
# SMs with a generic name (sm89), and the standard TensorRT that supports them. Blackwell and FP4
# came with 10.8, GB300, DGX B300 and DGX Spark with 10.14
# (https://docs.nvidia.com/deeplearning/tensorrt/10.14.1/index.html and the release notes of
# 10.8.0), Thor with JetPack 7; JetPack 7.2 for Orin has 10.16.
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
    """A target does not exist, or does not support the request."""

    exit_code = ExitCode.WRONG_INPUT


@dataclass(frozen=True)
class Target:
    """A device profile; ``None`` and missing keys mean that no source gives the figure.

    Attributes:
        formats: Supported formats of quantised layers.
        auto: Formats that ``--precision auto`` tries, cheapest first.
        aliases: Name of ``--precision`` -> recipe it means here, if different.
        note: Advice for users.
        sm: Compute capability (89 is 8.9), ``None`` for a CPU.
        memory_is_shared: The host's programs use the same ``memory_bytes``.
        rates: Peak operations per second of the tensor cores by number format, with fp32
            accumulation where the vendor distinguishes it.
        derived: How rates that no source gives were derived.
        provider: ONNX Runtime's provider if ``engine`` is "onnxruntime".
        engine_kinds: "rtx" is TensorRT-RTX, which builds ahead of time without a GPU; "tensorrt" is
            standard TensorRT on the device.
        tensorrt, jetpack: Supported versions.
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
        """Everything that ``--precision`` accepts for it, except recipe files."""
        meant = {name: recipes.RECIPES[self.aliases.get(name, name)] for name in recipes.RECIPES}
        names = [name for name, recipe in meant.items() if not self.missing(_formats(recipe))]
        return (*self.full_precisions, *names, *((AUTO, STORED) if self.formats else ()))

    @property
    def is_gpu(self) -> bool:
        """True if its bundles contain a form of the graph for GPUs."""
        return self.sm is not None or self.provider != "cpu"

    @property
    def needs_plain_graph(self) -> bool:
        """True if its TensorRT may be JetPack 6's 10.3, whose parser lacks opset 23's operators."""
        return self.sm == 87

    def missing(self, formats: Iterable[str]) -> list[str]:
        """Those of ``formats`` that the target does not support, each once."""
        return sorted(set(formats) - {HIGH, *self.formats})

    def check_layers(self, layers: Mapping[str, str]) -> None:
        """Raises TargetError if ``layers`` (layer -> format) of a bundle use an unsupported format."""
        check([self], layers.values(), "the bundle")

    def recipe(self, precision: str) -> Recipe | None:
        """``recipe_for`` this target only."""
        return recipe_for([self], precision)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"precisions": list(self.precisions)}

    def why_not(self, name: str) -> str | None:
        """The reason why a format or full precision does not run here, or ``None`` if no rule excludes
        it.
        """
        if self.sm is None:
            return NOT_ON_CUDA if self.provider == "cuda" and name != "fp32" else None
        if name == "fp32":
            return "engines compute in fp16 or bf16"
        if self.sm < (least := _least_sm(name)):
            number = FORMATS[name].weights if name in FORMATS else name
            return f"{str(number).upper()} needs SM {sm_text(least)} or later; {self.name} is SM {sm_text(self.sm)}"
        return FORMATS[name].not_in_tensorrt if name in FORMATS else None


def _formats(recipe: Recipe) -> set[str]:
    """Formats of a recipe's layers; an FP8 embedding table has the requirements of FP8 layers."""
    return {name for _, name in recipe.layers} | ({"fp8"} if recipe.embedding == "fp8" else set())


def _least_sm(name: str) -> int:
    """The oldest SM that supports a full precision or a layer's format."""
    return FORMATS[name].least_sm if name in FORMATS else LEAST_SM.get(name, 0)


def _formats_for(kind: str) -> tuple[str, ...]:
    """Formats that ``--precision auto`` tries on targets of a kind: cpu, cuda or tensorrt."""
    return tuple(name for name, known in FORMATS.items() if kind in known.auto)


def sm_text(sm: int) -> str:
    """Format an SM: 89 as 8.9, 121 as 12.1."""
    return f"{sm // 10}.{sm % 10}"


_ENGINE_FORMATS = [
    name for name, known in FORMATS.items() if name != HIGH and known.not_in_tensorrt is None
]


def _gpu(device: Device) -> Target:
    def runs(name: str) -> bool:
        return device.sm >= _least_sm(name)

    sm = device.sm
    return Target(
        name=device.name,
        description=device.description,
        engine="tensorrt",
        full_precisions=tuple(filter(runs, LEAST_SM)),
        formats=tuple(filter(runs, _ENGINE_FORMATS)),
        auto=tuple(filter(runs, _formats_for("tensorrt"))),
        note=device.note,
        aliases=GPU_ALIASES,
        sm=sm,
        memory_bytes=None if device.gb is None else device.gb * 10**9,
        memory_is_shared=device.is_shared,
        bandwidth_bytes_per_s=None if device.gb_per_s is None else device.gb_per_s * 1e9,
        rates={key: value * 1e12 for key, value in device.tera.items()},
        derived=device.derived,
        sources=device.sources,
        engine_kinds=(RTX.kind, TENSORRT.kind) if sm in RTX_SM else (TENSORRT.kind,),
        tensorrt=TENSORRT_BY_SM[sm],
        jetpack=JETPACK_BY_SM.get(sm),
    )


_CPU = Target(
    "cpu",
    "any x86-64 or aarch64 processor under Linux",
    "onnxruntime",
    FULL_PRECISIONS,
    tuple(name for name in FORMATS if name != HIGH),
    _formats_for("cpu"),
    "int8 and int4 are fastest, int4 smallest; fp16 saves disk; fp8 and nvfp4 are simulated: exact values, fp32 speed",
    aliases=CPU_ALIASES,
)
_CUDA = Target(
    "cuda",
    "any NVIDIA GPU, through ONNX Runtime's CUDA provider",
    "onnxruntime",
    tuple(LEAST_SM),
    tuple(name for name, known in FORMATS.items() if known.on_cuda),
    _formats_for("cuda"),
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
            f"unknown target {name!r}: use one of {', '.join(TARGETS)}, or a compute capability: {', '.join(GENERIC)}"
        )
    return TARGETS[name]


def find_all(names: Sequence[str]) -> list[Target]:
    """The targets of one bundle, in the given order. Raises TargetError for no target, duplicates,
    and a mix of cpu and GPUs.
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
            f"targets {', '.join(names)}: Orin's TensorRT needs a graph of elementary operators, the others use a faster one; "
            "build two bundles"
        )
    return found


def recipe_for(targets: Sequence[Target], precision: str) -> Recipe | None:
    """The recipe of a precision for all of ``targets`` (from ``find_all``); ``None`` for full
    precisions, auto and stored.

    Raises TargetError that says which target does not support it, why, and what all of them
    support; RecipeError.
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
    """Raises TargetError if a target does not support one of ``formats``, which ``asker`` needs."""
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
