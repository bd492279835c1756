"""Describes what each target device can run, and rejects precisions that a target cannot run.

The SM (compute capability) of a GPU determines the GPU's number formats. The rules come from
NVIDIA's support matrices for TensorRT and TensorRT-RTX. Memory sizes and rates come from
``devices``. All rates are in operations per second.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from dlm_calibration import precisions
from dlm_calibration.precisions import FORMATS, HIGH, RECIPES, Recipe
from dlm_export.devices import DEVICES, JETPACK_BY_SM, RTX_SM, TENSORRT_BY_SM, Device
from dlm_export.engines import RTX, TENSORRT
from dlm_runtime.errors import DlmError, ExitCode

FULL_PRECISIONS = ("fp32", "fp16")
AUTO = "auto"
# The value of ``--precision`` that uses the formats of a checkpoint that is already quantised.
STORED = "stored"

LEAST_SM = {"fp16": 75, "bf16": 80}
"""The lowest SM that supports each full precision. 75 means SM 7.5.

TensorRT-RTX 1.7 does not compile bf16 for SM 7.5.
"""
MOE_SM = (100, 103, 110)
"""The SMs on which IMoELayer runs. NVIDIA's documentation of TensorRT 11 lists them."""
TENSORRT_ALIASES = {"int8": "int8-weight", "int4": "int4-g64"}
# The CUDA provider has fast kernels for INT4 in groups of 32 only.
CUDA_ALIASES = {"int8": "int8-weight", "int4": "int4-g32"}
CPU_ALIASES = {"int4-g32": "int4", "int4-g64": "int4-g64-dynamic", "int4-g128": "int4-g128-dynamic"}

# ``LayerFormat.on_cuda`` says which formats ONNX Runtime's CUDA provider can run. The sources are
# docs/OperatorKernels.md of ONNX Runtime and libonnxruntime_providers_cuda.so of onnxruntime-gpu
# 1.31.1. The provider supports all operators of fp16 and bf16 graphs at opset 23 (graph/cuda.py).
# The provider supports MatMulNBits since 1.24.4. It supports DequantizeLinear and QuantizeLinear at
# opset 21, but without bf16 scales. It does not support BitShift. It supports MatMulInteger for
# signed bytes only.
NOT_ON_CUDA = "ONNX Runtime's CUDA provider has no kernel for operators of its graph"


class TargetError(DlmError):
    """Raised if a target does not exist, or does not support the requested options."""

    exit_code = ExitCode.WRONG_INPUT


@dataclass(frozen=True)
class Target:
    """Describes what a device can run.

    If no source states a value, the value is ``None``, or is missing from its mapping.

    Attributes:
        formats: Formats of quantised layers that the device supports.
        auto: Formats that ``--precision auto`` tries, cheapest first.
        aliases: Maps a name that ``--precision`` accepts to the recipe that this name means on this
            target.
        note: Advice for users.
        sm: Compute capability (89 means 8.9). ``None`` for the targets ``cpu`` and ``cuda``.
        memory_is_shared: True if CPU and GPU use the same memory.
        rates: Peak operations per second of the tensor cores, by number format. If the vendor gives
            a rate for accumulation in fp32, this rate is used.
        derived: Explains, for each rate that no source states directly, how it was derived.
        provider: The execution provider that ONNX Runtime uses, if ``engine`` is "onnxruntime".
        engine_kinds: The TensorRT variants that can build engines for this target. "rtx" is
            TensorRT-RTX, which needs no GPU to build an engine. "tensorrt" is standard TensorRT,
            which builds an engine on the device itself.
        tensorrt, jetpack: Versions of TensorRT and JetPack that support the device, as text.
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
        """All values that ``--precision`` accepts for this target, except recipe files."""
        meant = {name: RECIPES[self.aliases.get(name, name)] for name in RECIPES}
        names = [name for name, recipe in meant.items() if not self.missing(_formats(recipe))]
        return (*self.full_precisions, *names, *((AUTO, STORED) if self.formats else ()))

    @property
    def is_gpu(self) -> bool:
        """True if bundles for this target contain a graph for GPUs."""
        return self.sm is not None or self.provider != "cpu"

    @property
    def needs_plain_graph(self) -> bool:
        """True if graphs for this target must avoid the operators of opset 23.

        A board with JetPack 6.1 or 6.2 has TensorRT 10.3, whose parser does not know these operators.
        """
        return self.sm == 87

    @property
    def has_moe_layer(self) -> bool:
        """True if TensorRT's MoE layer runs on this device."""
        return self.sm in MOE_SM

    def missing(self, formats: Iterable[str]) -> list[str]:
        """Return the formats that the target does not support, sorted and without duplicates."""
        return sorted(set(formats) - {HIGH, *self.formats})

    def as_dict(self) -> dict[str, Any]:
        more = {"precisions": list(self.precisions), "has_moe_layer": self.has_moe_layer}
        return asdict(self) | more

    def why_not(self, name: str) -> str | None:
        """Return the reason why a format or a full precision does not run on this target.

        Returns ``None`` if no known rule excludes it.
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
    """Return the formats that a target must support to run a recipe.

    An FP8 embedding table needs the same support as an FP8 layer.
    """
    return {name for _, name in recipe.layers} | ({"fp8"} if recipe.embedding == "fp8" else set())


def _least_sm(name: str) -> int:
    """Return the lowest SM that supports a full precision or a layer's format."""
    return FORMATS[name].least_sm if name in FORMATS else LEAST_SM.get(name, 0)


def _formats_for(kind: str) -> tuple[str, ...]:
    """Return the formats that ``--precision auto`` tries on cpu, cuda or tensorrt."""
    return tuple(name for name, known in FORMATS.items() if kind in known.auto)


def sm_text(sm: int) -> str:
    """Format an SM for users: 89 becomes 8.9, 121 becomes 12.1."""
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
        aliases=TENSORRT_ALIASES,
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
    aliases=CUDA_ALIASES,
    provider="cuda",
    sources=("https://github.com/microsoft/onnxruntime/blob/main/docs/OperatorKernels.md",),
)
TARGETS = {target.name: target for target in (_CPU, _CUDA, *map(_gpu, DEVICES))}
GENERIC = {f"sm{sm}": sm for sm in TENSORRT_BY_SM}


def find(name: str) -> Target:
    """Find a target by its name. A name such as ``sm89`` stands for any GPU with SM 8.9.

    For an unknown name, raises TargetError. The message lists the known names.
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
    """Find the targets of one bundle, in the order of ``names``.

    Raises TargetError if ``names`` is empty or contains a name twice, or if one bundle cannot serve
    all these targets.
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
    """Return the recipe that ``--precision`` selects on ``targets`` if its value is ``precision``.

    ``targets`` must come from ``find_all``.

    Returns ``None`` if ``precision`` is not a recipe: a full precision, "auto" or "stored". Raises
    RecipeError if the recipe is invalid. Raises TargetError if a target does not support
    ``precision``. The message gives the reason, and lists the precisions that all targets support.
    """
    if precision in (AUTO, STORED):
        for target in targets:
            if not target.formats:
                raise _refusal(targets, target, repr(precision), [precision])
        return None
    if precision not in RECIPES and not precision.endswith(".toml"):
        for target in targets:
            if precision not in target.full_precisions:
                raise _refusal(targets, target, repr(precision), [precision])
        return None
    recipe = precisions.find(targets[0].aliases.get(precision, precision))
    check(targets, _formats(recipe), precision)
    return recipe


def check(targets: Sequence[Target], formats: Iterable[str], asker: str) -> None:
    """Raise TargetError if a target does not support one of ``formats``.

    ``asker`` describes what needs the formats, for the error message.
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
