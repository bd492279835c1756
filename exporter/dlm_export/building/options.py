"""What a build may be asked for."""

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
    """How a quantised bundle is calibrated and judged. ``budgets`` missed: no bundle is written.

    ``min_tokens_per_expert``: calibration tokens that an expert has to meet for its weights to be
    solved by them.
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
    """What is made of a source.

    ``targets`` names one device or several GPUs; ``precision`` is a full one (fp32 and fp16 on a
    CPU, fp16 and bf16 on GPUs), the name or file of a recipe, ``auto`` or ``stored``.
    ``activations`` (fp16, bf16) are of quantised bundles for GPUs, None: as the source is stored.
    ``cache_dtype`` (fp32, fp16, int8) is of keys and values between passes on a CPU, None: as
    attention computes them. ``engine`` says how engines are built, None: not here. ``plain_graph``
    writes elementary operators only, for TensorRT before 10.14. ``force`` replaces the bundle that
    is there. ``check_parity=False`` skips parity, and the judging of a quantised bundle, which
    ``quantise`` describes. ``device`` is torch's: auto, cpu, cuda, cuda:1. ``memory_bytes`` bounds
    what torch holds, None: by what is free. ``resume``: folder where finished stages of a quantised
    build are kept, and taken up.
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
