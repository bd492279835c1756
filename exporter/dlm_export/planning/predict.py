"""Predicts the speed, memory and cost of one denoiser on one target.

All times are lower limits by the roofline model (Williams, Waterman and Patterson, CACM 52(4),
2009). A pass takes at least the time to read all weights and the cache at the memory bandwidth. A
pass also takes at least the time to do all multiply-adds at the rates of their number formats. The
predicted time is the longer of these two times. Real times are longer.

``roofline`` counts the bytes and the multiply-adds. ``targets`` lists the memory bandwidth and the
rates of devices. If the vendor does not publish one of these values, all times that depend on it
are unknown. For the CPU, ``dlm-export bench`` measures the bandwidth and the rates. The command
also measures how much longer real passes take than the limit.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from dlm_export.bundle.prompt_reuse import reused_tokens
from dlm_export.network.pass_plan import block_length_of
from dlm_export.network.spec import NetworkSpec
from dlm_export.planning.bench import PassSize
from dlm_export.planning.measured import Measured, interpolated_ratio
from dlm_export.planning.predicted_passes import Loop, list_passes
from dlm_export.planning.roofline import (
    FULL,
    Costs,
    Rates,
    Work,
    limit_s,
)
from dlm_export.planning.shapes import Precision, Shape, computes_all_experts, shape_on_gpus
from dlm_export.targets import Target
from dlm_export.tensorrt.estimate import DEVICE_OVERHEAD_BYTES, Limits, estimate
from dlm_runtime import Policy
from dlm_runtime.precision import NUMBER_FORMATS
from dlm_runtime.presets import PRESETS


@dataclass(frozen=True)
class Request:
    """The request to plan for.

    - ``block_lengths``: block lengths to compare. If empty, the block length of the policy is used.
    - ``prices``: maps target names to prices per hour, in any currency.
    - ``preset``: name of the preset that contains the policy. If ``None``, the policy is the result
      of ``default_policy``.
    - ``changes``: changed fields of the policy.
    - ``reused_tokens``: number of leading tokens of the prompt that an earlier request has computed.
    - ``max_tokens``: the largest number of tokens in a pass over a part of the prompt. ``None``
      means that the prompt is computed in one pass.
    """

    prompt_tokens: int = 128
    new_tokens: int = 128
    batch: int = 1
    block_lengths: tuple[int, ...] = ()
    tokens_per_pass: tuple[float, ...] = (1, 2, 4, 8)
    prices: Mapping[str, float] = field(default_factory=dict)
    preset: str | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)
    reused_tokens: int = 0
    max_tokens: int | None = None

    @property
    def canvas(self) -> int:
        return self.prompt_tokens + self.new_tokens


def default_policy(network: NetworkSpec) -> Policy:
    """Return the policy for plans that name no preset. The policy uses a cache."""
    if network.visible_block is None:
        return Policy(cache="dual")
    if network.has_causal_drafts:
        return PRESETS["self-speculation"]
    if network.has_shifted_drafts:
        return PRESETS["sdlm"]
    if network.blocks_after_prompt:
        return PRESETS["d2f"]
    if network.noise == "uniform":
        return PRESETS["diffusion-gemma"]
    return Policy(cache="block", block_length=network.draft_block or network.visible_block)


def block_length_for(policy: Policy, network: NetworkSpec, new_tokens: int) -> int:
    """Return how many tokens a generation decides in one block."""
    return block_length_of(policy, network.visible_block, network.draft_block) or new_tokens


def loop_for(policy: Policy, network: NetworkSpec, request: Request) -> Loop:
    """Describe the passes of a request. Only whole pages of a prompt's tokens are reused."""
    reused = 0
    if request.reused_tokens:
        reused = reused_tokens(request.reused_tokens, request.prompt_tokens, network, policy)
    return Loop(
        policy,
        network.visible_block,
        network.shift,
        reused,
        request.max_tokens,
        network.draft_block,
        network.prompt_pass_tokens,
        network.blocks_after_prompt,
    )


@dataclass(frozen=True)
class PassTime:
    """The predicted time of a pass in ms.

    - ``bytes_ms``: the time to read all bytes from memory.
    - ``arithmetic_ms``: the time to do all multiply-adds.
    - ``ratio``: the real time divided by ``bytes_ms`` or ``arithmetic_ms``, whichever is longer.
      Without measurements, the ratio is 1.

    If a time depends on an unknown bandwidth or rate of the target, the time is ``None``.
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
        """The name of the longer time: "bytes" or "arithmetic"."""
        if self.bytes_ms is None or self.arithmetic_ms is None:
            return None
        return "bytes" if self.bytes_ms >= self.arithmetic_ms else "arithmetic"

    def as_dict(self) -> dict[str, Any]:
        own = asdict(self)
        made: dict[str, Any] = own.pop("made")
        return made | {"ms": self.ms, "bound": self.bound} | own


@dataclass(frozen=True)
class Speed:
    """The predicted speed of a generation whose passes commit ``tokens_per_pass`` tokens each.

    If the user gave no price for the target, ``cost_per_million_tokens`` is ``None``.
    """

    tokens_per_pass: float
    nfe: int
    ms_per_token: float
    tokens_per_s: float
    cost_per_million_tokens: float | None


@dataclass(frozen=True)
class Prediction:
    """The prediction for one denoiser on one target, in one precision and with one block length.

    - ``file_bytes``: size of the weights on disk in bytes.
    - ``fits``: true if the target has enough memory. ``None`` if the target's memory size is
      unknown.
    - ``missing``: names of the target's bandwidth or rates that are needed but unknown. If a value
      is missing, all times are unknown.
    - ``all_experts``: true if the bundle computes all experts of a layer for every token.
    - ``full_pass``: a pass over the whole canvas.
    - ``block_pass``: a pass over one block that computes the logits of all positions in the block.
    - ``first_tokens_ms``: the time of all passes up to the first pass that commits tokens.
    - ``speeds``: the predicted speeds. If times are unknown, or if ``fits`` is false, ``speeds`` is
      empty and ``first_tokens_ms`` is ``None``.
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
    all_experts: bool
    full_pass: PassTime
    block_pass: PassTime
    first_tokens_ms: float | None
    speeds: tuple[Speed, ...]

    def as_dict(self) -> dict[str, Any]:
        passes = {"full_pass": self.full_pass.as_dict(), "block_pass": self.block_pass.as_dict()}
        return asdict(self) | passes


# Maps each kind of arithmetic to its key in ``Target.rates``.
NUMBERS = {FULL: "fp16", **{name: name for name in NUMBER_FORMATS}}


def rates_of(target: Target, measured: Measured | None = None) -> Rates:
    """Return a target's memory bandwidth, and its rates of multiply-adds, per second.

    The result does not contain unknown rates. An unknown bandwidth is NaN. If the target is the
    CPU, the function returns the measured rates.

    On GPUs, tensor cores do all multiplications. All unquantised parts, including attention, run at
    the rate of fp16. NVIDIA publishes the same rate for bf16. Vendors count a multiply-add as two
    operations.
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
    """List the unknown values of a target that are needed to predict the time of ``work``.

    These values are the memory bandwidth and the rates of multiply-adds.
    """
    lacking = [
        NUMBERS[arithmetic] for arithmetic in work.by_arithmetic() if arithmetic not in rates.macs
    ]
    bandwidth = ["bandwidth"] if math.isnan(rates.read_bytes) else []
    if target.sm is None and bandwidth:
        return ("this machine's bandwidth and rates: pass --measured",)
    return (*bandwidth, *(f"{number} rate" for number in lacking))


@functools.lru_cache(maxsize=1 << 10)
def costs_of(shape: Shape, precision: Precision) -> Costs:
    """Return the costs of a denoiser in one precision.

    An unquantised embedding table keeps the type of the checkpoint, if that type is smaller.
    """
    table_bytes = min(precision.element_bytes, shape.table_bytes)
    return Costs(shape.network, dict(precision.layers), precision.element_bytes, table_bytes)


def _all_experts(shape: Shape, precision: Precision, target: Target) -> bool:
    return computes_all_experts(
        shape.network, [target], dict(precision.layers), is_plain=target.needs_plain_graph
    )


@functools.lru_cache(maxsize=1 << 16)
def _work(
    shape: Shape, precision: Precision, made: PassSize, batch: int, all_experts: bool = False
) -> Work:
    costs = costs_of(shape, precision)
    return costs.work(made.tokens, made.cached, made.rows, batch, all_experts=all_experts)


def pass_time(work: Work, rates: Rates, made: PassSize, ratio: float = 1.0) -> PassTime:
    """Predict the time of a pass from the pass's ``work`` and from the target's rates."""
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
    """Estimate how many bytes of memory a denoiser needs on a target.

    The result includes the weights and, for each canvas, the cache and a pass's intermediate
    results. The function ``estimate`` assumes elements of 2 bytes, so elements of 4 bytes double
    the cache and the intermediate results. For a GPU, the result also includes the CUDA context and
    the kernels.
    """
    weights = costs_of(shape, precision).weight_bytes
    found = estimate(
        shape.network,
        weights,
        Limits(canvas, block_length),
        all_experts=_all_experts(shape, precision, target),
    )
    # The size of the logits does not depend on ``element_bytes``, because logits are always in
    # fp32.
    logits = estimate(shape.network, weights, Limits(0, block_length)).passes
    rows = batch * (precision.element_bytes // 2 * (found.cache + found.passes - logits) + logits)
    total: int = weights + rows
    return total + (0 if target.sm is None else DEVICE_OVERHEAD_BYTES)


def predict(
    shape: Shape,
    target: Target,
    precision: Precision,
    request: Request,
    policy: Policy,
    measured: Measured | None = None,
) -> Prediction:
    """Predict the speed, memory and cost of one denoiser on one target.

    The denoiser must support ``policy``. ``measured`` is used only if the target is the CPU. The
    measured rates apply to all precisions. The measured ratios of real times to limits apply only
    to the measured precision.
    """
    if target.is_gpu:
        shape = shape_on_gpus(shape)
    measured = measured if target.sm is None else None
    rates = rates_of(target, measured)
    is_calibrated = measured is not None and measured.precision in (
        precision.name,
        *precision.same_as,
    )

    loop = loop_for(policy, shape.network, request)
    canvases = request.batch * loop.canvases
    all_experts = _all_experts(shape, precision, target)
    block_length = block_length_for(policy, shape.network, request.new_tokens)

    def work_of(made: PassSize) -> Work:
        return _work(shape, precision, made, canvases, all_experts)

    def time_of(made: PassSize) -> PassTime:
        ratio = (
            interpolated_ratio(measured.passes, made)
            if measured is not None and is_calibrated
            else 1.0
        )
        return pass_time(work_of(made), rates, made, ratio)

    def time_of_all(passes: Iterable[PassSize]) -> float:
        counted = Counter(passes)
        return math.fsum(count * (time_of(made).ms or 0.0) for made, count in counted.items())

    canvas, block = request.canvas, min(block_length, request.new_tokens)
    full_pass = time_of(PassSize(canvas, 0, block))
    block_pass = time_of(PassSize(block, canvas - block, block))
    memory = memory_bytes(shape, precision, target, canvas, block, canvases)
    available = (
        (None if measured is None else measured.memory_bytes)
        if target.sm is None
        else target.memory_bytes
    )
    fits = None if available is None else memory <= available
    missing = missing_figures(target, rates, work_of(full_pass.made))
    speeds, first_ms = [], None
    for per_pass in request.tokens_per_pass if fits is not False and not missing else ():
        passes = list_passes(request.prompt_tokens, request.new_tokens, per_pass, loop)
        ms = time_of_all(each.size for each in passes)
        # The number of tokens per pass does not change which pass is the first that commits tokens.
        first = next(number for number, each in enumerate(passes, 1) if each.commits)
        first_ms = time_of_all(each.size for each in passes[:first])
        per_token = ms / (request.batch * request.new_tokens)
        price = request.prices.get(target.name)
        # One millisecond per token is 1e6 / 1e3 / 3600 hours per million tokens.
        cost = None if price is None else price * per_token / 3.6
        speeds.append(Speed(per_pass, len(passes), per_token, 1e3 / per_token, cost))
    return Prediction(
        shape.name,
        target.name,
        precision.name,
        precision.same_as,
        block_length,
        memory,
        costs_of(shape, precision).file_bytes,
        fits,
        missing,
        is_calibrated,
        all_experts and bool(shape.network.mixtures()),
        full_pass,
        block_pass,
        first_ms,
        tuple(speeds),
    )
