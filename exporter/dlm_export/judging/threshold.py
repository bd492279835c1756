"""The commit threshold fitted again: quantisation shifts confidence, and a threshold chosen for the reference misses it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dlm_calibration import metrics
from dlm_calibration.metrics import Decode, Run
from dlm_calibration.states import Sample
from dlm_export.judging.judge import prompt_of
from dlm_export.judging.predictors import JudgeError, Predictor, check_comparable
from dlm_runtime import Policy
from dlm_runtime.errors import RequestError

THRESHOLDS = (0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.925, 0.95, 0.97, 0.98, 0.99, 0.995)


@dataclass(frozen=True)
class Point:
    """One threshold: quality in 0..1, mean passes a prompt."""

    threshold: float
    quality: float
    nfe: float

    def as_dict(self) -> dict[str, float]:
        return {"threshold": self.threshold, "quality": self.quality, "nfe": self.nfe}


@dataclass(frozen=True)
class Refit:
    """The threshold at which a candidate gives its reference's quality back, with both figures.

    ``quality`` is ``task`` (right answers) or ``agreement`` (tokens equal to the reference's at one token a pass).
    ``reached`` is False if no threshold does: ``refitted`` is then the best there is.
    """

    preset: str | None
    original: Point
    reference: Point
    refitted: Point
    reached: bool
    quality: str
    curve: list[Point]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as the manifest and accuracy.json have them."""
        points = {name: getattr(self, name).as_dict() for name in ("original", "reference", "refitted")}
        rest = {"reached": self.reached, "quality": self.quality, "curve": [point.as_dict() for point in self.curve]}
        return {"preset": self.preset, **points, **rest}


def refit_steps(samples: int, policy: Policy, grid: Sequence[float] = THRESHOLDS, *, is_task: bool) -> int:
    """How many generations ``refit_threshold`` makes; ``is_task``: every sample carries an answer."""
    return samples * (len({*grid, policy.threshold}) + (1 if is_task else 2))


def refit_threshold(
    reference: Predictor,
    candidate: Predictor,
    samples: Sequence[Sample],
    policy: Policy,
    max_new_tokens: int,
    decode: Decode,
    grid: Sequence[float] = THRESHOLDS,
    *,
    preset: str | None = None,
    on_done: Callable[[], None] = lambda: None,
) -> Refit:
    """Find the fewest passes at which the candidate is as good as the reference at the policy's own threshold.

    Quality is the task score if every sample carries an answer and ``decode`` gives text, else the share of tokens equal to
    the reference's own at one token a pass. A threshold with which the candidate makes fewer passes than the reference at its
    own is never taken. Thresholds tried are ``grid`` and the policy's; of equals the higher is taken.
    ``on_done`` is called once a generation: see ``refit_steps``. Raises JudgeError for no samples, RequestError for a policy
    without threshold.
    """
    if policy.commit not in ("threshold", "dynamic"):
        raise RequestError(
            f"a policy that commits by {policy.commit!r} has no threshold to fit: take one that commits by 'threshold' or "
            "'dynamic', such as the preset fast-dllm"
        )
    if not samples:
        raise JudgeError("no samples to fit the threshold on: give held-out data")
    check_comparable(reference, candidate)
    limit = min(reference.max_canvas_length, candidate.max_canvas_length)
    asked = [prompt_of(sample, max_new_tokens, limit) for sample in samples]

    def run(predictor: Predictor, looped: Policy) -> list[Run]:
        found = []
        for prompt, room in asked:
            tokens, nfe = predictor.generate(prompt, room, looped)
            found.append(metrics.as_run(tokens, prompt, nfe, predictor.eos_token_ids, decode))
            on_done()
        return found

    theirs = run(reference, policy)
    is_task = all(sample.answer is not None for sample in samples) and all(one.text is not None for one in theirs)
    # One token a pass without a cache: the best that these predictions give, whatever the threshold.
    slowest = policy.with_fields({"commit": "static", "steps_per_block": 0, "cache": "none"})
    best = [] if is_task else run(reference, slowest)

    def point(threshold: float, runs: Sequence[Run]) -> Point:
        if is_task:
            right = [metrics.same_answer(one.text, sample.answer or "") for one, sample in zip(runs, samples, strict=True)]
            quality = sum(right) / len(right)
        else:
            agreed = [metrics.token_agreement(a.tokens, b.tokens) for a, b in zip(runs, best, strict=True)]
            quality = sum(same for same, _ in agreed) / max(1, sum(count for _, count in agreed))
        return Point(threshold, quality, sum(one.nfe for one in runs) / len(runs))

    goal = point(policy.threshold, theirs)
    thresholds = sorted({*grid, policy.threshold})
    curve = [point(t, run(candidate, policy.with_fields({"threshold": t}))) for t in thresholds]
    original = curve[thresholds.index(policy.threshold)]
    # Fewer passes than the reference makes are not quality given back but quality spent where the samples cannot see it: a
    # lower threshold is for a candidate that hesitates.
    lowest = 0.0 if original.nfe > goal.nfe else policy.threshold
    good = [p for p in curve if p.quality >= goal.quality and p.threshold >= lowest and p.nfe >= goal.nfe]
    refitted = (
        min(good, key=lambda p: (p.nfe, -p.threshold)) if good else max(curve, key=lambda p: (p.quality, -p.nfe, p.threshold))
    )
    return Refit(preset, original, goal, refitted, bool(good), "task" if is_task else "agreement", curve)
