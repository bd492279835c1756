"""Predicts the speed, memory and cost of denoisers on many targets and in many precisions.

A denoiser need not be built for the targets that the plan covers. For bundles, torch is not needed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dlm_export.planning.growth import Growth, growth_of
from dlm_export.planning.measured import Measured, interpolated_ratio
from dlm_export.planning.predict import (
    Prediction,
    Request,
    _work,
    generation_passes,
    pass_time,
    predict,
)
from dlm_export.planning.roofline import cache_bytes_by_type
from dlm_export.planning.shapes import Shape, precisions_of
from dlm_export.targets import TARGETS, Target, find, recipe_for
from dlm_runtime.errors import DlmError, ExitCode

ALL = "all"


class PlanError(DlmError):
    """Raised if the requested plan cannot be made."""

    exit_code = ExitCode.WRONG_INPUT


@dataclass(frozen=True)
class Plan:
    """A complete plan.

    - ``cache_bytes_per_token``: for each denoiser, maps each cache type of CPUs to the number of
      bytes that the keys and values of one token take.
    - ``left_out``: for each target, maps each precision that the target cannot run to the reason
      why.
    - ``growth``: describes how the first denoiser's time per token grows.
    - ``calibration``: the result of ``calibrate``, or ``None`` if there are no measurements.
    """

    request: Request
    predictions: tuple[Prediction, ...]
    cache_bytes_per_token: Mapping[str, Mapping[str, int]]
    left_out: Mapping[str, Mapping[str, str]]
    growth: tuple[Growth, ...]
    calibration: Mapping[str, Any] | None

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as values for ``--json``."""
        return asdict(self) | {"predictions": [each.as_dict() for each in self.predictions]}


def calibrate(
    measured: Measured, shapes: Sequence[Shape], predictions: Sequence[Prediction]
) -> dict[str, Any]:
    """Summarise measurements, and compute how well the measurements predict times.

    The function predicts each pass's time from all other passes. ``leave_one_out_errors`` contains
    the relative errors of the predictions. If ``shapes`` contains the measured denoiser,
    ``generation`` contains the measured and the predicted tokens/s of the measured request.
    """
    ratios = [each.ratio for each in measured.passes]
    asked = measured.generation
    predicted = next(filter(None, (_predict_generation(measured, shape) for shape in shapes)), None)
    generation = None
    if predicted is not None:
        generation = asdict(asked) | {
            "predicted_tokens_per_s": predicted,
            "error": predicted / asked.tokens_per_s - 1,
        }
    return {
        "file": measured.file,
        "precision": measured.precision,
        "is_used": any(each.is_calibrated for each in predictions),
        "passes": len(ratios),
        "ratios": [min(ratios), max(ratios)],
        "leave_one_out_errors": measured.leave_one_out(),
        "generation": generation,
    }


def _predict_generation(measured: Measured, shape: Shape) -> float | None:
    """Predict the tokens/s of the measured request.

    Returns ``None`` if ``shape`` is a different denoiser, or if ``shape`` lacks the preset or the
    precision.
    """
    asked = measured.generation
    preset = None if asked.changes else shape.presets.get(asked.preset)
    found = [
        each
        for each in precisions_of(shape, TARGETS["cpu"])[0]
        if measured.precision in (each.name, *each.same_as)
    ]
    is_same = shape.network.parameter_count() == measured.parameters
    if (
        not is_same
        or preset is None
        or preset["cache"] not in ("none", "dual", "block")
        or not found
        or not asked.nfe
    ):
        return None
    per_pass = max(1.0, asked.new_tokens / asked.nfe)
    passes = generation_passes(
        asked.prompt_tokens,
        asked.new_tokens,
        preset["block_length"] or asked.new_tokens,
        per_pass,
        has_cache=preset["cache"] != "none",
        visible_block=shape.network.visible_block,
    )
    times = [
        (
            pass_time(
                _work(shape, found[0], made, 1),
                measured.rates,
                made,
                interpolated_ratio(measured.passes, made),
            ).ms,
            count,
        )
        for made, count in passes.items()
    ]
    # Predict the average time of a pass, and multiply the average by the real number of passes,
    # because some blocks of the real generation took more passes than others.
    mean_ms = math.fsum(count * (ms or 0.0) for ms, count in times) / passes.total()
    return 1e3 * asked.new_tokens / (mean_ms * asked.nfe)


def find_targets(text: str) -> list[Target]:
    """Find the targets with the given names, which are separated by commas.

    The name ``all`` means all targets. Raises TargetError or PlanError.
    """
    names = [part.strip() for part in text.split(",") if part.strip()]
    if not names:
        raise PlanError(f"no target: name at least one of {', '.join(TARGETS)}, or {ALL}")
    known = [target for target in TARGETS.values() if target.provider == "cpu"]
    found = known if names == [ALL] else [find(name) for name in dict.fromkeys(names)]
    if any_gpu := [target.name for target in found if target not in known and target.sm is None]:
        raise PlanError(
            f"target {any_gpu[0]} means any GPU, whose figures are unknown: name the device"
        )
    return found


def make_plan(
    shapes: Sequence[Shape],
    targets: Sequence[Target],
    request: Request,
    names: Sequence[str] | None = None,
    measured: Measured | None = None,
) -> Plan:
    """Predict every denoiser on every target, with all block lengths and in several precisions.

    ``names`` contains the names of the precisions. If ``names`` is ``None``, all precisions that a
    target supports are predicted. Raises PlanError if the canvas is longer than a denoiser allows,
    or if no target supports a precision. Raises RecipeError if a precision names a recipe that does
    not exist.
    """
    for shape in shapes:
        if shape.max_canvas_length is not None and request.canvas > shape.max_canvas_length:
            raise PlanError(
                f"{request.prompt_tokens} + {request.new_tokens} tokens are more than the {shape.max_canvas_length} of "
                f"{shape.name}: ask for fewer, or pass --max-canvas-length if the checkpoint allows more"
            )
        visible = shape.network.visible_block
        uneven = next(
            (length for length in request.block_lengths if visible and length % visible), None
        )
        if uneven is not None:
            raise PlanError(
                f"blocks of {uneven} tokens do not suit {shape.name}, whose attention has blocks of {visible}: use a multiple"
            )
    predictions: list[Prediction] = []
    left_out: dict[str, dict[str, str]] = {}
    for shape in shapes:
        for target in targets:
            found, left_out[target.name] = precisions_of(shape, target, names)
            predictions += [
                predict(shape, target, precision, request, block_length, measured)
                for precision in found
                for block_length in request.block_lengths
            ]
    for name in names or ():
        if all(name in reasons for reasons in left_out.values()):
            recipe_for(
                targets[:1], name
            )  # raises an error that lists the choices, unless a CPU can simulate the precision
            raise PlanError(
                f"precision {name} on {targets[0].name}: {left_out[targets[0].name][name]}; choose another"
            )
    growth = growth_of(shapes[0], targets, request, names, measured)
    calibration = None if measured is None else calibrate(measured, shapes, predictions)
    caches = {shape.name: cache_bytes_by_type(shape.network) for shape in shapes}
    return Plan(request, tuple(predictions), caches, left_out, tuple(growth), calibration)
