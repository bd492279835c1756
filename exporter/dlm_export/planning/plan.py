"""What a denoiser would cost on each target, before anything is built: milliseconds a pass, tokens
a second, memory, money.

Every time is the roofline's limit (Williams, Waterman and Patterson, CACM 52(4), 2009): the larger
of bytes over bandwidth and of multiply-adds over the rate of their number format, of the work that
``roofline`` counts, with the figures of ``targets``. No target comes closer than that; how close
one comes is measured, never assumed, and a figure that no source gives is missing, not guessed. For
the cpu the figures, and the distance from them, come from what ``dlm-export bench`` measured. Needs
no torch for a bundle.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from dlm_export import outputs
from dlm_export.planning.bench import PassSize
from dlm_export.planning.measured import Measured, interpolated_ratio
from dlm_export.planning.roofline import (
    FULL,
    MatrixKind,
    Rates,
    Work,
    cache_bytes_by_type,
    count_work,
    file_bytes,
    kinds_of,
    limit_s,
    weights_bytes,
)
from dlm_export.planning.shapes import Precision, Shape, precisions_of, scaled_shape
from dlm_export.targets import TARGETS, Target, find, recipe_for
from dlm_export.tensorrt.estimate import DEVICE_OVERHEAD_BYTES, Limits, estimate
from dlm_runtime.errors import DlmError, ExitCode

ALL = "all"
PLOT_SUFFIXES = (".png", ".svg")
GROWTH_BATCHES = (1, 2, 4, 8, 16, 32, 64)
GROWTH_SIZES = ("1B", "3B", "8B", "30B", "100B")
GROWTH_CANVASES = tuple(1 << power for power in range(8, 16))


class PlanError(DlmError):
    """A plan was asked for that cannot be made as asked."""

    exit_code = ExitCode.WRONG_INPUT


def generation_passes(
    prompt_tokens: int,
    new_tokens: int,
    block_length: int,
    tokens_per_pass: float,
    *,
    has_cache: bool = True,
    visible_block: int | None = None,
) -> Counter[PassSize]:
    """The passes that a generation takes which commits ``tokens_per_pass`` (at least 1) in each;
    NFE is their total.

    With the dual cache each block begins with a full pass, which commits too, and goes on with
    passes over the block alone, every other position cached; without it every pass is full. Only
    what is still masked in the block is scored. Of a block-causal network (``visible_block``) it is
    the cache of finished blocks: one pass stores the prompt's, passes over a block read what is
    before it, and one more stores the block, unless it is the last.
    """
    canvas = prompt_tokens + new_tokens
    origin = (
        prompt_tokens if visible_block is None else prompt_tokens - prompt_tokens % block_length
    )
    made: Counter[PassSize] = Counter()
    if visible_block is not None and has_cache and origin:
        made[PassSize(origin, 0, 1)] += 1
    for start in range(origin, canvas, block_length):
        end = min(start + block_length, canvas)
        block, step = end - max(start, prompt_tokens), 0
        while (masked := block - math.floor(step * tokens_per_pass)) > 0:
            if visible_block is not None and has_cache:
                made[PassSize(end - start, start, masked)] += 1
            else:
                tokens = block if has_cache and step else canvas
                made[PassSize(tokens, canvas - tokens, masked)] += 1
            step += 1
        if visible_block is not None and has_cache and end < canvas:
            made[PassSize(end - start, start, 1)] += 1
    return made


@dataclass(frozen=True)
class Request:
    """What is asked of a denoiser. ``prices``: target -> price an hour, in whatever currency."""

    prompt_tokens: int = 128
    new_tokens: int = 128
    batch: int = 1
    block_lengths: tuple[int, ...] = (32,)
    tokens_per_pass: tuple[float, ...] = (1, 2, 4, 8)
    prices: Mapping[str, float] = field(default_factory=dict)

    @property
    def canvas(self) -> int:
        return self.prompt_tokens + self.new_tokens


# ---- Predictions ----


@dataclass(frozen=True)
class PassTime:
    """The least milliseconds of a pass by its bytes and by its arithmetic, None where a figure of
    the target is missing.

    ``ratio``: how many times its limit it takes, 1 where nothing was measured.
    """

    made: PassSize
    bytes_ms: float | None
    arithmetic_ms: float | None
    ratio: float = 1.0

    @property
    def ms(self) -> float | None:
        if self.bytes_ms is None or self.arithmetic_ms is None:
            return None
        return self.ratio * max(self.bytes_ms, self.arithmetic_ms)

    @property
    def bound(self) -> str | None:
        """Which of the two is the limit: bytes or arithmetic."""
        if self.bytes_ms is None or self.arithmetic_ms is None:
            return None
        return "bytes" if self.bytes_ms >= self.arithmetic_ms else "arithmetic"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self.made) | {
            "ms": self.ms,
            "bound": self.bound,
            "bytes_ms": self.bytes_ms,
            "arithmetic_ms": self.arithmetic_ms,
            "ratio": self.ratio,
        }


@dataclass(frozen=True)
class Speed:
    """A generation that commits ``tokens_per_pass``. ``cost_per_million_tokens`` None: no price was
    given.
    """

    tokens_per_pass: float
    nfe: int
    ms_per_token: float
    tokens_per_s: float
    cost_per_million_tokens: float | None


@dataclass(frozen=True)
class Prediction:
    """One denoiser on one target in one precision and block length.

    ``file_bytes``: of the bundle's weights on disk.
    ``fits`` None: the target's memory is unknown. ``missing``: the figures without which times are
    unknown. ``speeds`` are there where times are known and the memory, as far as known, suffices.
    ``block_pass`` scores its whole block.
    """

    denoiser: str
    target: str
    precision: str
    same_as: tuple[str, ...]
    block_length: int
    memory_bytes: int
    file_bytes: int
    fits: bool | None
    missing: tuple[str, ...]
    is_calibrated: bool
    full_pass: PassTime
    block_pass: PassTime
    speeds: tuple[Speed, ...]

    def as_dict(self) -> dict[str, Any]:
        passes = {"full_pass": self.full_pass.as_dict(), "block_pass": self.block_pass.as_dict()}
        return asdict(self) | passes


NUMBERS = {
    FULL: "fp16",
    "int8": "int8",
    "fp8": "fp8",
    "nvfp4": "nvfp4",
}  # arithmetic -> key of a GPU's rates


def rates_of(target: Target, measured: Measured | None = None) -> Rates:
    """What the target does a second; NaN bandwidth and absent rates where nothing says.

    A GPU multiplies by its tensor cores: full precision, attention included, at the rate of fp16,
    which NVIDIA prints for bf16 as well. A multiply-add is two of a vendor's operations. The cpu
    has the figures that were measured.
    """
    if target.sm is None:
        return Rates(math.nan, {}) if measured is None else measured.rates
    macs = {
        arithmetic: target.rates[number] / 2
        for arithmetic, number in NUMBERS.items()
        if number in target.rates
    }
    return Rates(target.bandwidth_bytes_per_s or math.nan, macs)


def missing_figures(target: Target, rates: Rates, work: Work) -> tuple[str, ...]:
    """Names of the figures without which the time of ``work`` is unknown."""
    lacking = [
        NUMBERS[arithmetic] for arithmetic in work.by_arithmetic() if arithmetic not in rates.macs
    ]
    bandwidth = ["bandwidth"] if math.isnan(rates.read_bytes) else []
    if target.sm is None and bandwidth:
        return ("this machine's bandwidth and rates: pass --measured",)
    return (*bandwidth, *(f"{number} rate" for number in lacking))


@functools.lru_cache(maxsize=1 << 10)
def _kinds(shape: Shape, precision: Precision) -> tuple[MatrixKind, ...]:
    return kinds_of(
        shape.network,
        dict(precision.layers),
        precision.element_bytes,
        _table_bytes(shape, precision),
    )


def _table_bytes(shape: Shape, precision: Precision) -> int:
    """Of an element of the embedding table where it is not quantised."""
    return min(precision.element_bytes, shape.table_bytes)


def stored_bytes(shape: Shape, precision: Precision) -> int:
    """Bytes of the weights, a table that is also the head's weight once."""
    return weights_bytes(
        shape.network,
        _kinds(shape, precision),
        precision.element_bytes,
        _table_bytes(shape, precision),
    )


@functools.lru_cache(maxsize=1 << 16)
def _work(shape: Shape, precision: Precision, made: PassSize, batch: int) -> Work:
    kinds, element_bytes = _kinds(shape, precision), precision.element_bytes
    return count_work(
        shape.network,
        kinds,
        made.tokens,
        made.cached,
        made.rows,
        batch,
        element_bytes=element_bytes,
        table_bytes=_table_bytes(shape, precision),
    )


def pass_time(work: Work, rates: Rates, made: PassSize, ratio: float = 1.0) -> PassTime:
    """The limit of ``work`` by bytes alone and by arithmetic alone, at ``rates`` as ``rates_of``
    gives them.
    """
    kinds = work.by_arithmetic()
    free = dict.fromkeys(kinds, math.inf)
    bytes_ms = (
        None if math.isnan(rates.read_bytes) else 1e3 * limit_s(work, Rates(rates.read_bytes, free))
    )
    arithmetic_ms = (
        1e3 * limit_s(work, Rates(math.inf, rates.macs))
        if kinds.keys() <= rates.macs.keys()
        else None
    )
    return PassTime(made, bytes_ms, arithmetic_ms, ratio)


def memory_bytes(
    shape: Shape, precision: Precision, target: Target, canvas: int, block_length: int, batch: int
) -> int:
    """What a process holds, or a GPU: weights, and for each row of the batch its cache and passes;
    formula of ``engines``.

    A GPU's context and kernels come on top. Where elements have four bytes, cache and activations
    are twice what an engine has.
    """
    weights = stored_bytes(shape, precision)
    found = estimate(shape.network, weights, Limits(canvas, block_length))
    logits = estimate(shape.network, weights, Limits(0, block_length)).passes  # in fp32 everywhere
    rows = batch * (precision.element_bytes // 2 * (found.cache + found.passes - logits) + logits)
    total: int = weights + rows
    return total + (0 if target.sm is None else DEVICE_OVERHEAD_BYTES)


def predict(
    shape: Shape,
    target: Target,
    precision: Precision,
    request: Request,
    block_length: int,
    measured: Measured | None = None,
) -> Prediction:
    """One denoiser on one target. ``measured`` counts on the cpu alone: its rates always, its
    ratios for its precision.
    """
    measured = measured if target.sm is None else None
    rates = rates_of(target, measured)
    is_calibrated = measured is not None and measured.precision in (
        precision.name,
        *precision.same_as,
    )

    def time_of(made: PassSize) -> PassTime:
        ratio = (
            interpolated_ratio(measured.passes, made)
            if measured is not None and is_calibrated
            else 1.0
        )
        return pass_time(_work(shape, precision, made, request.batch), rates, made, ratio)

    canvas, block = request.canvas, min(block_length, request.new_tokens)
    full_pass, block_pass = (
        time_of(PassSize(canvas, 0, block)),
        time_of(PassSize(block, canvas - block, block)),
    )
    memory = memory_bytes(shape, precision, target, canvas, block, request.batch)
    available = (
        (None if measured is None else measured.memory_bytes)
        if target.sm is None
        else target.memory_bytes
    )
    fits = None if available is None else memory <= available
    missing = missing_figures(target, rates, _work(shape, precision, full_pass.made, request.batch))
    speeds = []
    for per_pass in request.tokens_per_pass if fits is not False and not missing else ():
        passes = generation_passes(
            request.prompt_tokens,
            request.new_tokens,
            block_length,
            per_pass,
            visible_block=shape.network.visible_block,
        )
        ms = math.fsum(count * (time_of(made).ms or 0.0) for made, count in passes.items())
        per_token = ms / (request.batch * request.new_tokens)
        price = request.prices.get(target.name)
        # Milliseconds a token are 1e6 / 1e3 / 3600 hours a million tokens.
        cost = None if price is None else price * per_token / 3.6
        speeds.append(Speed(per_pass, passes.total(), per_token, 1e3 / per_token, cost))
    return Prediction(
        shape.name,
        target.name,
        precision.name,
        precision.same_as,
        block_length,
        memory,
        file_bytes(shape.network, stored_bytes(shape, precision), precision.element_bytes),
        fits,
        missing,
        is_calibrated,
        full_pass,
        block_pass,
        tuple(speeds),
    )


# ---- Growth ----


@dataclass(frozen=True)
class Point:
    """A precision, and what it makes of a token."""

    precision: str
    ms_per_token: float
    cost_per_million_tokens: float | None


@dataclass(frozen=True)
class Growth:
    """What a token takes along one axis: canvas, batch or size. ``lines``: target -> a point a
    value, None: none known fits.
    """

    axis: str
    denoiser: str
    values: tuple[Any, ...]
    lines: Mapping[str, tuple[Point | None, ...]]


def growth_of(
    shape: Shape,
    targets: Sequence[Target],
    request: Request,
    names: Sequence[str] | None,
    measured: Measured | None,
) -> list[Growth]:
    """How a token's time and cost grow with canvas and batch of ``shape``, and with the size of a
    LLaDA.

    At the first block length and the first of ``tokens_per_pass``; each point at the fastest
    precision that fits, or that is calibrated where any is: a limit would always win against a
    measurement.
    """
    request = replace(request, tokens_per_pass=request.tokens_per_pass[:1])
    longest = shape.max_canvas_length or GROWTH_CANVASES[-1]
    canvases = [canvas for canvas in GROWTH_CANVASES if request.new_tokens < canvas <= longest]

    def best(shape: Shape, target: Target, request: Request) -> Point | None:
        found = [
            predict(shape, target, precision, request, request.block_lengths[0], measured)
            for precision in precisions_of(shape, target, names)[0]
        ]
        chosen = [each for each in found if each.is_calibrated] or found
        points = [
            Point(each.precision, speed.ms_per_token, speed.cost_per_million_tokens)
            for each in chosen
            for speed in each.speeds
        ]
        return min(points, key=lambda point: point.ms_per_token, default=None)

    def along(axis: str, name: str, cases: Mapping[Any, tuple[Shape, Request]]) -> Growth:
        lines = {
            target.name: tuple(best(of, target, asked) for of, asked in cases.values())
            for target in targets
        }
        return Growth(axis, name, tuple(cases), lines)

    of_canvas = {
        canvas: (shape, replace(request, prompt_tokens=canvas - request.new_tokens))
        for canvas in canvases
    }
    of_batch = {batch: (shape, replace(request, batch=batch)) for batch in GROWTH_BATCHES}
    of_size = {size: (scaled_shape(size), request) for size in GROWTH_SIZES}
    return [
        along("canvas", shape.name, of_canvas),
        along("batch", shape.name, of_batch),
        along("size", "LLaDA", of_size),
    ]


# ---- The whole plan ----


@dataclass(frozen=True)
class Plan:
    """``left_out``: target -> precision -> why it is not there. ``growth`` is of the first
    denoiser.

    ``cache_bytes_per_token``: denoiser -> type of a cache on a CPU -> bytes of one token's keys and
    values.
    """

    request: Request
    predictions: tuple[Prediction, ...]
    cache_bytes_per_token: Mapping[str, Mapping[str, int]]
    left_out: Mapping[str, Mapping[str, str]]
    growth: tuple[Growth, ...]
    calibration: Mapping[str, Any] | None

    def as_dict(self) -> dict[str, Any]:
        """Plain values: what ``--json`` prints."""
        return asdict(self) | {"predictions": [each.as_dict() for each in self.predictions]}


def calibrate(
    measured: Measured, shapes: Sequence[Shape], predictions: Sequence[Prediction]
) -> dict[str, Any]:
    """What was measured and how well it predicts, as plain values.

    ``leave_one_out_errors``: each pass predicted from the ratios of the others; ``generation``: the
    tokens a second of the measured request against what its NFE and the ratios predict, if one of
    ``shapes`` is the denoiser that was measured.
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
    """Tokens a second of the measured request; None where ``shape`` is another denoiser, or has not
    its loop or precision.
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
    # The blocks share the passes unevenly: what a pass takes on average holds for as many as were
    # made.
    mean_ms = math.fsum(count * (ms or 0.0) for ms, count in times) / passes.total()
    return 1e3 * asked.new_tokens / (mean_ms * asked.nfe)


def find_targets(text: str) -> list[Target]:
    """Targets by names with commas, cpu beside GPUs; ``all`` is the whole table. Raises
    TargetError, PlanError.
    """
    names = [part.strip() for part in text.split(",") if part.strip()]
    if not names:
        raise PlanError(f"no target: name at least one of {', '.join(TARGETS)}, or {ALL}")
    known = [target for target in TARGETS.values() if target.provider == "cpu"]
    found = known if names == [ALL] else [find(name) for name in dict.fromkeys(names)]
    if any_gpu := [target.name for target in found if target not in known and target.sm is None]:
        raise PlanError(
            f"target {any_gpu[0]} is any GPU, of which nothing is known: name the device"
        )
    return found


def make_plan(
    shapes: Sequence[Shape],
    targets: Sequence[Target],
    request: Request,
    names: Sequence[str] | None = None,
    measured: Measured | None = None,
) -> Plan:
    """Predict every denoiser on every target, in all of ``names`` (precisions; None: all that it
    runs) and block lengths.

    Raises PlanError for a canvas longer than a denoiser's, and for a precision that no target runs;
    RecipeError.
    """
    for shape in shapes:
        if shape.max_canvas_length is not None and request.canvas > shape.max_canvas_length:
            raise PlanError(
                f"{request.prompt_tokens} + {request.new_tokens} tokens are more than the {shape.max_canvas_length} of "
                f"{shape.name}: ask for fewer, or pass --max-canvas-length where the checkpoint takes more"
            )
        visible = shape.network.visible_block
        uneven = next(
            (length for length in request.block_lengths if visible and length % visible), None
        )
        if uneven is not None:
            raise PlanError(
                f"blocks of {uneven} tokens do not suit {shape.name}, which sees blocks of {visible}: ask for a multiple"
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
            recipe_for(targets[:1], name)  # raises, with the choices, but for what a CPU simulates
            raise PlanError(
                f"precision {name} on {targets[0].name}: {left_out[targets[0].name][name]}; choose another"
            )
    growth = growth_of(shapes[0], targets, request, names, measured)
    calibration = None if measured is None else calibrate(measured, shapes, predictions)
    caches = {shape.name: cache_bytes_by_type(shape.network) for shape in shapes}
    return Plan(request, tuple(predictions), caches, left_out, tuple(growth), calibration)


# ---- The plot ----


def claimed_plot(path: Path, *, force: bool) -> AbstractContextManager[Path]:
    """Where to ``save_plot`` what is to become ``path``: see ``outputs.claimed``.

    Raises PlanError for a name that says no kind of picture.
    """
    if path.suffix not in PLOT_SUFFIXES:
        raise PlanError(f"--plot {path}: end its name in {' or '.join(PLOT_SUFFIXES)}")
    return outputs.claimed_file(path, force=force)


def save_plot(path: Path, plan: Plan) -> None:
    """Draw the growth, to a path of ``claimed_plot``: cost of a million tokens if every target has
    a price, else milliseconds a token.

    Raises PlanError if there is nothing to draw, OSError.
    """
    from dlm_export.judging.figures import save_growth

    growth = [asdict(each) for each in plan.growth if each.values]
    if not any(any(points) for each in growth for points in each["lines"].values()):
        raise PlanError(
            f"--plot {path.name}: no target here has known times, so there is nothing to draw: leave it out"
        )
    is_priced = all(target in plan.request.prices for target in growth[0]["lines"])
    quantity, what = (
        ("cost_per_million_tokens", "Cost of a million tokens")
        if is_priced
        else ("ms_per_token", "Milliseconds a token")
    )
    is_calibrated = plan.calibration is not None and plan.calibration["is_used"]
    title = (
        f"{what}, by the targets' limits{' (cpu: as measured)' if is_calibrated else ''}, in the fastest precision that fits; "
        f"block {plan.request.block_lengths[0]}, tokens a pass {plan.request.tokens_per_pass[0]:g}"
    )
    save_growth(path, growth, quantity, title)
