"""Fits the commit threshold again, because quantisation shifts confidence.

A preset's threshold changes only if paired bootstrap intervals over samples show that another
threshold is better. The reference generates at the preset's threshold. The candidate also generates
at other thresholds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from dlm_calibration import metrics
from dlm_calibration.metrics import Decode, Run
from dlm_calibration.samples import Sample
from dlm_calibration.states import MASK_RATIOS
from dlm_export.judging.sides.prompts import prompt_of
from dlm_export.judging.sides.side import Generator, JudgeError, check_comparable
from dlm_runtime import Policy
from dlm_runtime.errors import RequestError

THRESHOLDS = (0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.925, 0.95, 0.97, 0.98, 0.99, 0.995)
# Largest quality loss that still counts as reaching the reference's quality; a few dozen samples
# cannot show less.
MARGIN = 0.05

Verdict = Literal["kept", "raised", "lowered", "lost", "untold"]


@dataclass(frozen=True)
class Point:
    """One threshold: quality in 0..1, and mean passes per prompt."""

    threshold: float
    quality: float
    nfe: float


@dataclass(frozen=True)
class Refit:
    """The threshold at which a candidate reaches its reference's quality, with the figures that
    support it.

    ``quality`` is ``task`` (share of right answers) or ``agreement`` (share of tokens equal to the
    reference's with one token per pass). ``difference`` is the quality at ``refitted`` minus the
    reference's, and ``interval`` its 95% interval, paired over ``samples``. ``reached``: the
    interval excludes a loss of more than ``MARGIN``. ``verdict`` is the outcome for the preset's
    threshold:

    ========= ===========================================================================================================
    kept      the samples do not show that another threshold is better
    raised    the preset's threshold loses quality, and this one loses less
    lowered   the preset's takes more passes than the reference; this one takes fewer, without losing quality
    lost      the preset's loses quality, and no higher one is better; ``refitted`` is the preset's
    untold    not fitted: the reference has no quality on these samples, or there is only one sample
    ========= ===========================================================================================================
    """

    preset: str | None
    original: Point
    reference: Point
    refitted: Point
    reached: bool
    quality: str
    curve: list[Point]
    verdict: Verdict
    samples: int
    difference: float
    interval: tuple[float, float]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for the manifest and accuracy.json."""
        return asdict(self) | {"interval": list(self.interval)}


def check_policy(policy: Policy) -> None:
    """Raises RequestError unless the policy has a threshold."""
    if policy.commit not in ("threshold", "dynamic"):
        raise RequestError(
            f"a policy that commits by {policy.commit!r} has no threshold to fit: choose one that commits by 'threshold' or "
            "'dynamic', such as the preset fast-dllm"
        )


def refit_steps(samples: int, policy: Policy, grid: Sequence[float] = THRESHOLDS) -> int:
    """Return the maximum number of generations that ``refit_threshold`` runs.

    For each sample, the reference and the candidate run at the policy's threshold, the reference
    runs at one token per pass, and the candidate runs at each threshold of a bisection.
    """
    sides = [sum(t < policy.threshold for t in grid), sum(t > policy.threshold for t in grid)]
    return samples * (3 + math.ceil(math.log2(max(sides) + 1)))


@dataclass(frozen=True, eq=False)
class _Trial:
    """One side at one threshold: quality float64 ``[N]`` and passes ``[N]``, per sample."""

    threshold: float
    quality: np.ndarray
    nfe: np.ndarray

    @property
    def point(self) -> Point:
        return Point(self.threshold, float(self.quality.mean()), float(self.nfe.mean()))


def refit_threshold(
    reference: Generator,
    candidate: Generator,
    samples: Sequence[Sample],
    policy: Policy,
    max_new_tokens: int,
    decode: Decode,
    grid: Sequence[float] = THRESHOLDS,
    *,
    preset: str | None = None,
    seed: int = 0,
    on_done: Callable[[], None] = lambda: None,
) -> Refit:
    """Find the threshold for the candidate: the policy's own, or a better one from ``grid``.

    Quality is the task score if every sample has an answer and ``decode`` returns text. Otherwise
    it is the share of tokens equal to the reference's own at one token per pass, on only as many
    samples as need no more passes for that than judging needs for masked positions.

    If the candidate is significantly worse than the reference, it gets the lowest threshold at
    which it no longer is, provided that this is significantly better than the policy's. If it needs
    significantly more passes, it gets the lowest threshold that loses no quality and needs no fewer
    passes than the reference. Still fewer passes might lose quality that the samples cannot show.

    ``on_done`` is called once per generation: see ``refit_steps``. Raises JudgeError without
    samples, and RequestError for a policy without a threshold.
    """
    check_policy(policy)
    if not samples:
        raise JudgeError("no samples to fit the threshold on: give held-out data")
    check_comparable(reference, candidate)
    is_task = all(sample.answer is not None for sample in samples) and decode([]) is not None
    used = (
        samples if is_task else samples[: max(1, len(samples) * len(MASK_RATIOS) // max_new_tokens)]
    )
    limit = min(reference.max_canvas_length, candidate.max_canvas_length)
    asked = [prompt_of(sample, max_new_tokens, limit) for sample in used]

    def run(predictor: Generator, looped: Policy) -> list[Run]:
        found = []
        for prompt, room in asked:
            tokens, nfe = predictor.generate(prompt, room, looped)
            found.append(metrics.as_run(tokens, prompt, nfe, predictor.eos_token_ids, decode))
            on_done()
        return found

    # One token per pass without a cache: the best result that this denoiser gives at any threshold.
    slowest = policy.with_fields({"commit": "static", "steps_per_block": 0, "cache": "none"})
    best = [] if is_task else run(reference, slowest)

    def trial(predictor: Generator, threshold: float) -> _Trial:
        runs = run(predictor, policy.with_fields({"threshold": threshold}))
        if is_task:
            quality = [
                float(metrics.same_answer(one.text, sample.answer or ""))
                for one, sample in zip(runs, used, strict=True)
            ]
        else:
            agreed = [
                metrics.token_agreement(a.tokens, b.tokens) for a, b in zip(runs, best, strict=True)
            ]
            quality = [same / max(1, count) for same, count in agreed]
        return _Trial(threshold, np.array(quality, np.float64), np.array([one.nfe for one in runs]))

    goal, original = trial(reference, policy.threshold), trial(candidate, policy.threshold)
    tried = {policy.threshold: original}

    def at(threshold: float) -> _Trial:
        if threshold not in tried:
            tried[threshold] = trial(candidate, threshold)
        return tried[threshold]

    def difference(one: _Trial, other: _Trial) -> tuple[float, float]:
        return metrics.difference_interval(one.quality - other.quality, seed)

    def is_worse(one: _Trial) -> bool:
        return difference(one, goal)[1] < 0

    def saves(threshold: float) -> bool:
        one = at(threshold)
        return (
            not is_worse(one)
            and one.quality.mean() >= original.quality.mean()
            and one.nfe.sum() >= goal.nfe.sum()
        )

    chosen = original
    verdict: Verdict = "kept"
    if not goal.quality.any() or len(used) < 2:
        verdict = "untold"
    elif is_worse(original):
        higher = [t for t in sorted(grid) if t > policy.threshold]
        found = _lowest(higher, lambda t: not is_worse(at(t)))
        verdict = "lost"
        if found is not None and difference(at(found), original)[0] > 0:
            chosen, verdict = at(found), "raised"
    elif _is_above(original.nfe, goal.nfe, seed):
        found = _lowest([t for t in sorted(grid) if t < policy.threshold], saves)
        if found is not None and _is_above(original.nfe, at(found).nfe, seed):
            chosen, verdict = at(found), "lowered"
    interval = difference(chosen, goal)
    return Refit(
        preset=preset,
        original=original.point,
        reference=goal.point,
        refitted=chosen.point,
        reached=verdict != "untold" and interval[0] >= -MARGIN,
        quality="task" if is_task else "agreement",
        curve=[tried[threshold].point for threshold in sorted(tried)],
        verdict=verdict,
        samples=len(used),
        difference=float((chosen.quality - goal.quality).mean()),
        interval=interval,
    )


def _lowest(thresholds: Sequence[float], holds: Callable[[float], bool]) -> float | None:
    """The lowest of ascending thresholds that satisfies the monotonic ``holds``, or ``None``."""
    low, high = 0, len(thresholds)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(thresholds[middle]) else (middle + 1, high)
    return thresholds[low] if low < len(thresholds) else None


def _is_above(ours: np.ndarray, theirs: np.ndarray, seed: int) -> bool:
    """True if ``ours`` ``[N]`` are significantly more passes than ``theirs`` ``[N]``."""
    interval = metrics.ratio_interval(ours, theirs, seed)
    return interval is not None and interval[0] > 1
