"""The commit threshold fitted again: quantisation shifts confidence, and a threshold chosen for the
reference misses it.

A preset's threshold is changed only where samples show that another is better, by paired bootstrap
intervals; what they cannot show leaves it as it was. Thresholds are tried by generations of both
sides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from dlm_calibration import metrics
from dlm_calibration.metrics import Decode, Run
from dlm_calibration.states import MASK_RATIOS, Sample
from dlm_export.judging.sides.prompts import prompt_of
from dlm_export.judging.sides.side import Generator, JudgeError, check_comparable
from dlm_runtime import Policy
from dlm_runtime.errors import RequestError

THRESHOLDS = (0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.925, 0.95, 0.97, 0.98, 0.99, 0.995)
# Quality that may be lost unseen where the reference's is said to be reached: a few dozen samples
# cannot show less.
MARGIN = 0.05

Verdict = Literal["kept", "raised", "lowered", "lost", "untold"]


@dataclass(frozen=True)
class Point:
    """One threshold: quality in 0..1, mean passes a prompt."""

    threshold: float
    quality: float
    nfe: float


@dataclass(frozen=True)
class Refit:
    """The threshold at which a candidate gives its reference's quality back, with the figures that
    this rests on.

    ``quality`` is ``task`` (right answers) or ``agreement`` (tokens equal to the reference's at one
    token a pass). ``difference`` is the quality at ``refitted`` less the reference's, ``interval``
    its 95% interval, paired over ``samples``. ``reached``: the interval leaves out a loss of more
    than ``MARGIN``. ``verdict`` says what became of the preset's threshold:

    ========= ===========================================================================================================
    kept      nothing shows that another is better
    raised    the preset's loses quality, this one loses less
    lowered   the preset's takes more passes than the reference, this one fewer, at no less quality
    lost      the preset's loses quality, and no higher one is better; ``refitted`` is the preset's
    untold    the reference itself has no quality on these samples, or there is but one: nothing was fitted
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
        """Plain values, as the manifest and accuracy.json have them."""
        return asdict(self) | {"interval": list(self.interval)}


def check_policy(policy: Policy) -> None:
    """Raise RequestError unless the policy has a threshold."""
    if policy.commit not in ("threshold", "dynamic"):
        raise RequestError(
            f"a policy that commits by {policy.commit!r} has no threshold to fit: take one that commits by 'threshold' or "
            "'dynamic', such as the preset fast-dllm"
        )


def refit_steps(samples: int, policy: Policy, grid: Sequence[float] = THRESHOLDS) -> int:
    """How many generations ``refit_threshold`` makes at most: both sides' own, one token a pass,
    and a bisection.
    """
    sides = [sum(t < policy.threshold for t in grid), sum(t > policy.threshold for t in grid)]
    return samples * (3 + math.ceil(math.log2(max(sides) + 1)))


@dataclass(frozen=True, eq=False)
class _Trial:
    """One side at one threshold: quality float64 ``[N]`` and passes ``[N]``, a sample each."""

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
    """Find out whether the candidate wants another threshold than the policy's own, and which of
    ``grid``.

    Quality is the task score if every sample carries an answer and ``decode`` gives text, else the
    share of tokens equal to the reference's own at one token a pass, on as many samples as take no
    more passes for that than judging takes for its masked positions. A candidate that is told to be
    worse than the reference gets the lowest threshold at which it no longer is, if that is told to
    be better than the policy's. One that is told to take more passes gets the lowest that costs no
    quality and makes no fewer passes than the reference: those would be quality spent where the
    samples cannot see it.

    ``on_done`` is called once a generation: see ``refit_steps``. Raises JudgeError for no samples,
    RequestError for a policy without threshold.
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

    # One token a pass without a cache: the best that these predictions give, whatever the
    # threshold.
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
    """The lowest of ascending thresholds for which something holds that holds for all above it;
    None: not for the highest.
    """
    low, high = 0, len(thresholds)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(thresholds[middle]) else (middle + 1, high)
    return thresholds[low] if low < len(thresholds) else None


def _is_above(ours: np.ndarray, theirs: np.ndarray, seed: int) -> bool:
    """Whether the samples tell that ``ours`` are more passes than ``theirs``, both ``[N]``."""
    interval = metrics.ratio_interval(ours, theirs, seed)
    return interval is not None and interval[0] > 1
