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

    A bundle that exceeds ``budgets`` is not written. ``min_tokens_per_expert`` is the number of
    calibration tokens that an expert must get before a solver rounds its weights.
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
        targets: Names of targets: one, or several GPUs.
        precision: On a CPU fp32 or fp16, on GPUs fp16 or bf16. Or the name or file of a recipe,
            ``auto``, or ``stored``.
        activations: Type of activations in quantised bundles for GPUs: fp16 or bf16. ``None``
            follows the source.
        cache_dtype: Type of stored keys and values on a CPU: fp32, fp16 or int8. ``None`` stores
            them in the type they are computed in.
        engine: How to build engines; ``None`` builds none on this machine.
        plain_graph: Write a graph of elementary operators only, for TensorRT before 10.14.
        force: Replace an existing bundle.
        check_parity: Check parity with torch, and judge quantised bundles. False skips both.
        quantise: How to calibrate and judge quantised bundles.
        device: Torch's device: auto, cpu, cuda, cuda:1.
        memory_bytes: Limit of memory for torch; ``None`` uses the memory that is available.
        resume: Folder for finished stages of a quantised build. A later build continues from them.
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
