"""Defines the options of a build."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dlm_export.judging.accuracy.effort import Effort
from dlm_export.judging.accuracy.verdict import Budgets
from dlm_export.judging.precision_search.search import AutoOptions
from dlm_export.quantising.samples import FEWEST_TOKENS, CalibrationOptions
from dlm_export.tensorrt.estimate import EngineOptions


@dataclass(frozen=True)
class QuantiseOptions:
    """Options for calibrating a quantised bundle, and for measuring its accuracy.

    If the bundle's loss of accuracy exceeds ``budgets``, the build fails. A solver (an algorithm
    such as GPTQ that rounds weights) is used for an expert only if calibration routes at least
    ``min_tokens_per_expert`` tokens to the expert.
    """

    calibration: CalibrationOptions = field(default_factory=CalibrationOptions)
    budgets: Budgets = field(default_factory=Budgets)
    effort: Effort = field(default_factory=Effort)
    recipe_changes: Mapping[str, Any] = field(default_factory=dict)
    calibrator: str = "own"
    min_tokens_per_expert: int = FEWEST_TOKENS
    auto: AutoOptions = field(default_factory=AutoOptions)


@dataclass(frozen=True)
class BuildOptions:
    """Options of a build.

    Attributes:
        targets: Names of the targets. Several names are allowed only if all targets are GPUs.
        precision: A full precision (fp32 or fp16 for a CPU, fp16 or bf16 for GPUs), the name or
            file of a recipe, ``auto`` (search for a recipe), or ``stored`` (the formats of a
            pre-quantised checkpoint).
        activations: Type of activations in quantised bundles for GPUs: fp16 or bf16. ``None``
            chooses bf16 if the source has bf16 weights and all targets support bf16. Otherwise,
            ``None`` chooses fp16.
        cache_dtype: Type of stored keys and values on a CPU: fp32, fp16 or int8. ``None`` stores
            keys and values in the type in which they are computed.
        engine: Options for building engines. ``None`` builds no engine on this machine.
        plain_graph: Write a graph of elementary operators only, for TensorRT before 10.14.
        force: Replace an existing bundle.
        check_parity: Compare the bundle with torch, and measure the accuracy of quantised bundles.
            False skips all these checks.
        quantise: Options that only quantised bundles need.
        device: The device that torch uses: auto, cpu, cuda, or one GPU such as cuda:1.
        memory_bytes: Memory limit for torch. ``None`` allows all available memory.
        resume: Folder that keeps the results of finished stages of a quantised build. A later build
            with the same folder continues from these results.
    """

    targets: tuple[str, ...] = ("cpu",)
    precision: str = "fp32"
    activations: str | None = None
    cache_dtype: str | None = None
    engine: EngineOptions | None = None
    plain_graph: bool = False
    force: bool = False
    check_parity: bool = True
    quantise: QuantiseOptions = field(default_factory=QuantiseOptions)
    device: str = "auto"
    memory_bytes: int | None = None
    resume: Path | None = None
