"""Options of a build."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dlm_export.judging.accuracy.rounds import Effort
from dlm_export.judging.accuracy.verdict import Budgets
from dlm_export.judging.precision_search.search import AutoOptions
from dlm_export.quantising.samples import FEWEST_TOKENS, CalibrationOptions
from dlm_export.tensorrt.estimate import EngineOptions


@dataclass(frozen=True)
class QuantiseOptions:
    """How a quantised bundle is calibrated and judged.

    If ``budgets`` are missed, no bundle is written. ``min_tokens_per_expert``: calibration tokens
    that an expert needs for its weights to be solved.
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
        targets: One device, or several GPUs.
        precision: fp32 or fp16 on a CPU, fp16 or bf16 on GPUs; or the name or file of a recipe,
            ``auto`` or ``stored``.
        activations: fp16 or bf16, for quantised bundles for GPUs; ``None`` follows the source.
        cache_dtype: fp32, fp16 or int8 for stored keys and values on a CPU; ``None`` stores them
            unrounded.
        engine: How to build engines; ``None`` builds none here.
        plain_graph: Write elementary operators only, for TensorRT before 10.14.
        force: Replace an existing bundle.
        check_parity: False skips parity, and the judging of quantised bundles.
        quantise: How to calibrate and judge quantised bundles.
        device: Torch's device: auto, cpu, cuda, cuda:1.
        memory_bytes: Limit for torch; ``None`` uses the free memory.
        resume: Folder that keeps finished stages of a quantised build, to continue from.
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
