"""Fits the commit threshold of a preset to a quantised bundle.

Quantisation shifts confidences, so a different threshold may be better for the bundle than for the
source. The source (the reference) generates text with the preset's threshold. The bundle (the
candidate) generates text with several thresholds. The bundle gets a different threshold only if
paired 95% intervals over samples show that the different threshold is better.
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
from dlm_export.judging.sides.prompts import prompt_of, runs_of
from dlm_export.judging.sides.side import JudgeError, Side, check_comparable
from dlm_runtime import Policy
from dlm_runtime.errors import RequestError

THRESHOLDS = (0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.925, 0.95, 0.97, 0.98, 0.99, 0.995)
# A loss of quality is ignored if it is at most ``MARGIN``, because a few dozen samples cannot show
# such a small loss.
MARGIN = 0.05
CAREFUL: dict[str, Any] = {"commit": "static", "steps_per_block": 0}
"""The changes that make a policy commit one token per pass."""
CAREFUL_PREFIX: dict[str, Any] = {"threshold": 1.0}
"""The same for the commit rule "longest_prefix", because no score reaches the threshold 1."""
CAREFUL_AHEAD: dict[str, Any] = {"threshold": 1.0, "force_next": 1.0}
"""The same for policies that decide several blocks at once, which need a commit rule with a
threshold.
"""

Verdict = Literal["kept", "raised", "lowered", "lost", "untold"]


@dataclass(frozen=True)
class Point:
    """The results of one threshold: the quality from 0 to 1, and the mean passes per prompt."""

    threshold: float
    quality: float
    nfe: float


@dataclass(frozen=True)
class Refit:
    """A chosen threshold, and the measurements by which it was chosen.

    - ``original``: the candidate's results with the preset's threshold.
    - ``reference``: the reference's results with the preset's threshold.
    - ``refitted``: the candidate's results with the chosen threshold.
    - ``quality``: the kind of quality that was measured. ``task`` means the share of right answers.
      ``agreement`` means the share of tokens that are equal to the tokens of the reference with one
      token per pass.
    - ``difference``: the quality of ``refitted`` minus the quality of ``reference``.
    - ``interval``: the 95% interval of ``difference``, paired by samples (see ``metrics``).
    - ``reached``: true if ``interval`` excludes a loss of more than ``MARGIN``.
    - ``verdict``: the outcome for the preset's threshold. The values are:

    ========= ====================================================================================
    kept      The threshold stays. The samples do not show that a different threshold is better.
    raised    The threshold loses quality. The chosen threshold is higher and loses less.
    lowered   The threshold takes more passes than the reference. The chosen threshold is lower,
              takes fewer passes, and loses no quality.
    lost      The threshold loses quality but stays, because no higher threshold is better.
    untold    The threshold was not tested, because there is only one sample, or because the
              reference has quality 0.
    ========= ====================================================================================
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
        """Return the results as plain Python objects, for the manifest and accuracy.json."""
        return asdict(self) | {"interval": list(self.interval)}


def check_policy(policy: Policy) -> None:
    """Raise RequestError if the policy has no threshold."""
    if policy.commit == "verify":
        raise RequestError(
            "a preset that verifies drafts has no threshold and no effort levels: its text is always that of greedy decoding. "
            "Change block_length to change its speed; in Nemotron-Labs-Diffusion, the preset nemotron-diffusion has levels"
        )
    if policy.commit not in ("threshold", "dynamic", "longest_prefix"):
        raise RequestError(
            f"a policy that commits by {policy.commit!r} has no threshold to fit: choose one that commits by 'threshold', "
            "'dynamic' or 'longest_prefix', such as the preset fast-dllm"
        )


def careful_changes(policy: Policy) -> dict[str, Any]:
    """Return the changes that make a policy with a threshold commit one token per pass."""
    if policy.commit == "longest_prefix":
        return CAREFUL_PREFIX
    return CAREFUL_AHEAD if policy.next_block < 1 else CAREFUL


def refit_steps(samples: int, policy: Policy, grid: Sequence[float] = THRESHOLDS) -> int:
    """Return the maximum number of texts that ``refit_threshold`` generates.

    For each sample, the reference generates two texts: one with the policy's threshold, and one
    with one token per pass. The candidate generates one text with the policy's threshold, and one
    text for each threshold that a bisection tries.
    """
    sides = [sum(t < policy.threshold for t in grid), sum(t > policy.threshold for t in grid)]
    return samples * (3 + math.ceil(math.log2(max(sides) + 1)))


def qualities(
    runs: Sequence[Run], best: Sequence[Run] | None, samples: Sequence[Sample]
) -> list[float]:
    """Return the quality of each text, from 0 to 1.

    If ``best`` is ``None``, the quality is 1 for a right answer. Otherwise, it is the share of
    tokens that are equal to the tokens of ``best``.
    """
    if best is None:
        return [
            float(metrics.same_answer(run.text, sample.answer or ""))
            for run, sample in zip(runs, samples, strict=True)
        ]
    agreed = [metrics.token_agreement(a.tokens, b.tokens) for a, b in zip(runs, best, strict=True)]
    return [same / max(1, count) for same, count in agreed]


@dataclass(frozen=True, eq=False)
class _Trial:
    """The results of one denoiser with one threshold, for each of N samples.

    ``quality`` is float64 ``[N]``. ``nfe`` contains the number of passes of each sample, ``[N]``.
    """

    threshold: float
    quality: np.ndarray
    nfe: np.ndarray

    @property
    def point(self) -> Point:
        return Point(self.threshold, float(self.quality.mean()), float(self.nfe.mean()))


def refit_threshold(
    reference: Side,
    candidate: Side,
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
    """Choose the candidate's commit threshold: the policy's, or a better threshold in ``grid``.

    If every sample has an answer and ``decode`` returns text, quality is the share of right
    answers. Otherwise, quality is the share of tokens that are equal to the tokens of the reference
    with one token per pass. This loop is slow. If quality is the share of equal tokens, the
    function therefore uses only some of the samples, so that the loop makes at most as many passes
    as the comparison of masked canvases.

    There are two reasons to change the threshold:

    - The candidate's quality is significantly worse than the reference's quality. In this case, the
      function finds the lowest threshold for which the quality is not significantly worse. The
      function chooses this threshold if it is significantly better than the policy's threshold.
    - The candidate needs significantly more passes than the reference. In this case, the function
      chooses the lowest threshold that loses no quality and needs at least as many passes as the
      reference. With fewer passes than the reference, the candidate might lose quality that a few
      samples do not show.

    ``on_done`` is called once per generated text (see ``refit_steps``). Raises JudgeError if there
    are no samples. Raises RequestError if the policy has no threshold.
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

    def run(side: Side, looped: Policy) -> list[Run]:
        return runs_of(side, asked, looped, decode, on_done)

    # A policy that commits one token per pass and uses no cache gives the best text that the
    # reference can generate. Denoisers with draft passes need their cache, which is exact.
    cache = "none" if reference.draft_block is None else policy.cache
    slowest = policy.with_fields(careful_changes(policy) | {"cache": cache})
    best = [] if is_task else run(reference, slowest)

    def trial(side: Side, threshold: float) -> _Trial:
        runs = run(side, policy.with_fields({"threshold": threshold}))
        quality = qualities(runs, None if is_task else best, used)
        return _Trial(threshold, np.array(quality, np.float64), np.array([one.nfe for one in runs]))

    goal, original = trial(reference, policy.threshold), trial(candidate, policy.threshold)
    tried = {policy.threshold: original}

    def at(threshold: float) -> _Trial:
        if threshold not in tried:
            tried[threshold] = trial(candidate, threshold)
        return tried[threshold]

    def difference(one: _Trial, other: _Trial) -> tuple[float, float]:
        if is_task:
            return metrics.paired_interval(other.quality, one.quality)
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
    """Find the lowest threshold for which ``holds`` returns true, by bisection.

    ``thresholds`` must be in ascending order. If ``holds`` returns true for a threshold, ``holds``
    must also return true for all higher thresholds. If ``holds`` returns false for all thresholds,
    the function returns ``None``.
    """
    low, high = 0, len(thresholds)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(thresholds[middle]) else (middle + 1, high)
    return thresholds[low] if low < len(thresholds) else None


def _is_above(ours: np.ndarray, theirs: np.ndarray, seed: int) -> bool:
    """Return True if ``ours`` needs significantly more denoiser passes per sample than ``theirs``.

    Both arrays have the shape ``[N]``.
    """
    interval = metrics.ratio_interval(ours, theirs, seed)
    return interval is not None and interval[0] > 1
