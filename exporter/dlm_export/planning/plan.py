"""Predicts the speed, memory and cost of denoisers on many targets and in many precisions.

A plan can cover targets for which the denoiser was not built. To plan for a bundle, torch is not
needed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from dlm_export.bundle.prompt_reuse import (
    FULL_ATTENTION,
    SEEN_PROMPT,
    page_tokens,
    whole_pages,
)
from dlm_export.planning.bench import PassSize
from dlm_export.planning.growth import Growth, growth_of
from dlm_export.planning.measured import Measured, interpolated_ratio
from dlm_export.planning.predict import (
    Prediction,
    Request,
    _work,
    block_length_for,
    default_policy,
    loop_for,
    pass_time,
    predict,
)
from dlm_export.planning.predicted_passes import check_policy, list_passes
from dlm_export.planning.roofline import cache_bytes_by_type
from dlm_export.planning.shapes import Shape, precisions_of, shape_on_gpus
from dlm_export.targets import TARGETS, Target, find, recipe_for
from dlm_runtime import Policy
from dlm_runtime.cache_dtypes import CACHE_DTYPES, CACHE_ROWS
from dlm_runtime.errors import DlmError, ExitCode

ALL = "all"


class PlanError(DlmError):
    """Raised if the requested plan cannot be made."""

    exit_code = ExitCode.WRONG_INPUT


@dataclass(frozen=True)
class Passes:
    """The passes of a generation. ``counts`` maps each size of a pass to the number of passes."""

    denoiser: str
    block_length: int
    tokens_per_pass: float
    counts: Mapping[PassSize, int]

    def as_dict(self) -> dict[str, Any]:
        return {
            "denoiser": self.denoiser,
            "block_length": self.block_length,
            "tokens_per_pass": self.tokens_per_pass,
            "nfe": sum(self.counts.values()),
            "passes": [asdict(size) | {"count": count} for size, count in self.counts.items()],
        }


@dataclass(frozen=True)
class Cache:
    """The memory that a scheduler on a CPU reserves for the keys and values of a batch.

    - ``page_tokens``: number of tokens in a page. A scheduler reserves whole pages.
    - ``reused_tokens``: number of leading tokens that all canvases share. The scheduler stores the
      keys and values of these tokens only once.
    - ``tokens``: number of tokens in all pages of the batch.
    - ``bytes_by_type``: maps each cache type to the number of bytes of these pages.
    """

    page_tokens: int
    reused_tokens: int
    tokens: int
    bytes_by_type: Mapping[str, int]


@dataclass(frozen=True)
class Plan:
    """A complete plan.

    - ``policies``: for each denoiser, the policy with the first of the planned block lengths.
    - ``passes``: the predicted passes of each denoiser, block length and number of tokens per pass.
    - ``caches``: for each denoiser, the memory that the cache takes on a CPU. A denoiser is missing
      if its policy has no cache.
    - ``cache_bytes_per_token``: for each denoiser, maps each cache type of CPUs to the number of
      bytes that the keys and values of one token take.
    - ``left_out``: for each target, maps each unsupported precision to the reason.
    - ``growth``: describes how the first denoiser's time per token grows.
    - ``calibration``: the result of ``calibrate``, or ``None`` if there are no measurements.
    - ``measured_denoisers``: the names of the denoisers that have as many parameters as the measured
      denoiser.
    """

    request: Request
    predictions: tuple[Prediction, ...]
    policies: Mapping[str, Policy]
    passes: tuple[Passes, ...]
    caches: Mapping[str, Cache]
    cache_bytes_per_token: Mapping[str, Mapping[str, int]]
    left_out: Mapping[str, Mapping[str, str]]
    growth: tuple[Growth, ...]
    calibration: Mapping[str, Any] | None
    measured_denoisers: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as values for ``--json``."""
        shallow = {each.name: getattr(self, each.name) for each in fields(self)}
        return shallow | {
            "request": asdict(self.request),
            "predictions": [each.as_dict() for each in self.predictions],
            "policies": {name: policy.as_dict() for name, policy in self.policies.items()},
            "passes": [each.as_dict() for each in self.passes],
            "caches": {name: asdict(cache) for name, cache in self.caches.items()},
            "growth": [asdict(each) for each in self.growth],
        }


def calibrate(
    measured: Measured, shapes: Sequence[Shape], predictions: Sequence[Prediction]
) -> dict[str, Any]:
    """Summarise measurements, and compute how well the measurements predict times.

    The function predicts the time of each measured pass from all other measured passes.
    ``leave_one_out_errors`` contains the relative errors of the predictions. If ``shapes`` contains
    the measured denoiser, ``generation`` contains the measured and the predicted tokens/s of the
    measured request.
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


def _is_measured(shape: Shape, measured: Measured) -> bool:
    """Return True if the denoiser has as many parameters as the measured denoiser."""
    return shape.network.parameter_count() == measured.parameters


def _predict_generation(measured: Measured, shape: Shape) -> float | None:
    """Predict the tokens/s of the measured request, if ``shape`` can run it."""
    asked = measured.generation
    preset = None if asked.changes else shape.presets.get(asked.preset)
    policy = None if preset is None else Policy(**preset)
    found = [
        each
        for each in precisions_of(shape, TARGETS["cpu"])[0]
        if measured.precision in (each.name, *each.same_as)
    ]
    if not _is_measured(shape, measured) or policy is None or not found or not asked.nfe:
        return None
    per_pass = max(1.0, asked.new_tokens / asked.nfe)
    request = Request(prompt_tokens=asked.prompt_tokens, new_tokens=asked.new_tokens)
    loop = loop_for(policy, shape.network, request)
    passes = Counter(
        each.size for each in list_passes(asked.prompt_tokens, asked.new_tokens, per_pass, loop)
    )
    times = [
        (
            pass_time(
                _work(shape, found[0], made, loop.canvases),
                measured.rates,
                made,
                interpolated_ratio(measured.passes, made),
            ).ms,
            count,
        )
        for made, count in passes.items()
    ]
    # Blocks of a real generation take different numbers of passes. Therefore predict the average
    # time of a pass, and multiply it by the real number of passes.
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
    if a request cannot run as planned, or if no target supports a precision. Raises RequestError if
    a denoiser does not support the policy. Raises RecipeError if a precision names a recipe that
    does not exist.
    """
    if all(target.is_gpu for target in targets):
        shapes = [shape_on_gpus(shape) for shape in shapes]
    policies = {shape.name: _policies(shape, request) for shape in shapes}
    for shape in shapes:
        _check_request(shape, targets, request, policies[shape.name])
    predictions: list[Prediction] = []
    left_out: dict[str, dict[str, str]] = {}
    for shape in shapes:
        for target in targets:
            found, left_out[target.name] = precisions_of(shape, target, names)
            predictions += [
                predict(shape, target, precision, request, policy, measured)
                for precision in found
                for policy in policies[shape.name]
            ]
    for name in names or ():
        if all(name in reasons for reasons in left_out.values()):
            recipe_for(
                targets[:1],
                name,
                # This call usually raises an error that lists the valid names. It raises no error
                # for a precision that a CPU can simulate.
            )
            raise PlanError(
                f"precision {name} on {targets[0].name}: {left_out[targets[0].name][name]}; choose another"
            )
    first = {name: found[0] for name, found in policies.items()}
    growth = growth_of(shapes[0], targets, request, first[shapes[0].name], names, measured)
    calibration = None if measured is None else calibrate(measured, shapes, predictions)
    return Plan(
        request,
        tuple(predictions),
        first,
        tuple(
            _passes(shape, policy, request, per_pass)
            for shape in shapes
            for policy in policies[shape.name]
            for per_pass in request.tokens_per_pass
        ),
        {
            shape.name: _cache(shape, first[shape.name], request)
            for shape in shapes
            if first[shape.name].cache != "none"
        },
        {shape.name: cache_bytes_by_type(shape.network) for shape in shapes},
        left_out,
        tuple(growth),
        calibration,
        tuple(
            shape.name for shape in shapes if measured is not None and _is_measured(shape, measured)
        ),
    )


def _policies(shape: Shape, request: Request) -> list[Policy]:
    """Return the policy of each block length. Raises PlanError or RequestError."""
    policy = default_policy(shape.network)
    if request.preset is not None:
        if request.preset not in shape.presets:
            raise PlanError(
                f"preset {request.preset!r} is not one of {', '.join(shape.presets)}, which {shape.name} can run"
            )
        policy = Policy(**shape.presets[request.preset])
    policy = policy.with_fields(dict(request.changes))
    return [
        replace(policy, block_length=length)
        for length in request.block_lengths or (policy.block_length,)
    ]


def _check_request(
    shape: Shape, targets: Sequence[Target], request: Request, policies: Sequence[Policy]
) -> None:
    """Raise PlanError or RequestError if a request cannot run as planned."""
    if shape.max_canvas_length is not None and request.canvas > shape.max_canvas_length:
        raise PlanError(
            f"{request.prompt_tokens} + {request.new_tokens} tokens are more than the {shape.max_canvas_length} of "
            f"{shape.name}: ask for fewer, or pass --max-canvas-length if the checkpoint allows more"
        )
    for policy in policies:
        check_policy(shape.network, policy)
    asked = {
        "--reused": bool(request.reused_tokens),
        "--max-tokens": request.max_tokens is not None,
    }
    for option in (name for name, is_given in asked.items() if is_given):
        why = (
            FULL_ATTENTION
            if shape.network.visible_block is None
            else SEEN_PROMPT
            if shape.network.blocks_after_prompt
            else None
        )
        if why is not None:
            raise PlanError(f"{option} does not suit {shape.name}: {why}; remove {option}")
        if policies[0].cache == "none":
            raise PlanError(f"{option} needs a cache, but the policy has cache=none")
        gpus = [target.name for target in targets if target.sm is not None]
        if gpus:
            raise PlanError(
                f"{option} is for the target cpu: engines on GPUs ({', '.join(gpus)}) cannot reuse prompts or split them"
            )
    if request.max_tokens is not None and request.batch > 1:
        raise PlanError("--max-tokens plans the passes of one request: remove --batch")
    if request.reused_tokens > request.prompt_tokens:
        raise PlanError(
            f"--reused {request.reused_tokens} is more than the {request.prompt_tokens} tokens of the prompt"
        )
    if request.reused_tokens and not loop_for(policies[0], shape.network, request).reused:
        page = page_tokens(shape.network.visible_block)
        raise PlanError(
            f"--reused {request.reused_tokens} reuses nothing: only whole pages of {page} tokens before the "
            "block in which the prompt ends are reused"
        )


def _passes(shape: Shape, policy: Policy, request: Request, per_pass: float) -> Passes:
    passes = list_passes(
        request.prompt_tokens,
        request.new_tokens,
        per_pass,
        loop_for(policy, shape.network, request),
    )
    return Passes(
        shape.name,
        block_length_for(policy, shape.network, request.new_tokens),
        per_pass,
        Counter(each.size for each in passes),
    )


def _cache(shape: Shape, policy: Policy, request: Request) -> Cache:
    loop = loop_for(policy, shape.network, request)
    page = page_tokens(shape.network.visible_block)
    own = whole_pages(request.canvas, page) - loop.reused
    # A request with guidance has a second canvas, which starts with mask tokens instead of the
    # prompt. All requests share the keys and values of these mask tokens, too.
    tokens = loop.canvases * (request.batch * own + loop.reused)
    network = shape.network
    all_tokens = window_tokens = tokens
    if network.cache_window is not None:
        # In layers with a window, each canvas needs the pages of the window and of one block. A
        # scheduler makes room for blocks of ``draft_block`` tokens first, then for the longest
        # canvas, and then for longer blocks.
        block_length = block_length_for(policy, network, request.new_tokens)
        draft_block = network.draft_block or 0
        if block_length > draft_block:
            all_tokens = max(tokens, whole_pages(network.max_canvas_length, page))
        kept = network.cache_window + max(block_length, draft_block)
        most = whole_pages(kept, page) + page
        window_tokens = loop.canvases * request.batch * min(whole_pages(request.canvas, page), most)
    sizes = {
        name: network.cache_bytes_of(all_tokens, window_tokens, *CACHE_ROWS[CACHE_DTYPES[name]])
        for name in cache_bytes_by_type(network)
    }
    return Cache(page, loop.reused, tokens, sizes)
