"""Computes how the time per token grows with the canvas length, batch size and model size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dlm_export.planning.measured import Measured
from dlm_export.planning.predict import Request, block_length_for, default_policy, predict
from dlm_export.planning.shapes import Shape, precisions_of, scaled_shape
from dlm_export.targets import Target
from dlm_runtime import Policy

GROWTH_BATCHES = (1, 2, 4, 8, 16, 32, 64)
GROWTH_SIZES = ("1B", "3B", "8B", "30B", "100B")
GROWTH_CANVASES = tuple(1 << power for power in range(8, 16))


@dataclass(frozen=True)
class Point:
    """The predicted time and cost per token of one denoiser on one target."""

    precision: str
    ms_per_token: float
    cost_per_million_tokens: float | None


@dataclass(frozen=True)
class Growth:
    """The time and cost per token as a function of one variable.

    ``axis`` is the variable: "canvas", "batch" or "size".
    For each target, ``lines`` contains one point per element of ``values``. A point is ``None`` if
    no precision fits into the target's memory, or if the time is unknown.
    """

    axis: str
    denoiser: str
    block_length: int
    values: tuple[Any, ...]
    lines: Mapping[str, tuple[Point | None, ...]]


def growth_of(
    shape: Shape,
    targets: Sequence[Target],
    request: Request,
    policy: Policy,
    names: Sequence[str] | None,
    measured: Measured | None,
) -> list[Growth]:
    """Compute how the time per token grows with the canvas length, batch size and parameter count.

    For canvas length and batch size, the function uses the denoiser ``shape``. For the parameter
    count, it uses denoisers with the proportions of LLaDA, which have full attention. If ``shape``
    is block-causal, the policy for ``shape`` does not suit full attention, so these denoisers run
    the default policy. The function uses only the first element of ``tokens_per_pass``.

    Each ``Point`` describes the fastest precision that fits into memory. If measurements correct
    the times of some precisions, the function ignores all other precisions, because their
    uncorrected times are lower limits and would look too fast.
    """
    request = replace(request, tokens_per_pass=request.tokens_per_pass[:1])
    longest = shape.max_canvas_length or GROWTH_CANVASES[-1]
    least = request.new_tokens + max(1, request.reused_tokens)
    canvases = [canvas for canvas in GROWTH_CANVASES if least <= canvas <= longest]

    def best(shape: Shape, target: Target, request: Request, policy: Policy) -> Point | None:
        found = [
            predict(shape, target, precision, request, policy, measured)
            for precision in precisions_of(shape, target, names)[0]
        ]
        chosen = [each for each in found if each.is_calibrated] or found
        points = [
            Point(each.precision, speed.ms_per_token, speed.cost_per_million_tokens)
            for each in chosen
            for speed in each.speeds
        ]
        return min(points, key=lambda point: point.ms_per_token, default=None)

    def along(
        axis: str, name: str, cases: Mapping[Any, tuple[Shape, Request]], policy: Policy
    ) -> Growth:
        lines = {
            target.name: tuple(best(of, target, asked, policy) for of, asked in cases.values())
            for target in targets
        }
        block_length = block_length_for(policy, shape.network, request.new_tokens)
        return Growth(axis, name, block_length, tuple(cases), lines)

    of_canvas = {
        canvas: (shape, replace(request, prompt_tokens=canvas - request.new_tokens))
        for canvas in canvases
    }
    of_batch = {batch: (shape, replace(request, batch=batch)) for batch in GROWTH_BATCHES}
    scaled = {size: scaled_shape(size) for size in GROWTH_SIZES}
    plain, plain_policy = request, policy
    if shape.network.visible_block is not None:
        plain = replace(request, reused_tokens=0, max_tokens=None)
        plain_policy = default_policy(scaled[GROWTH_SIZES[0]].network)
    of_size = {size: (each, plain) for size, each in scaled.items()}
    return [
        along("canvas", shape.name, of_canvas, policy),
        along("batch", shape.name, of_batch, policy),
        along("size", "LLaDA", of_size, plain_policy),
    ]
