"""Measures variants of a preset, and chooses some variants as the bundle's effort levels.

A variant changes the preset's commit rule, the parameters of this rule, or its number of passes per
block. Some presets use a separate pass to store a finished block in the cache. A variant of such a
preset may instead store the finished block in the first pass of the next block (``store=open``).
``store=open`` does not change the text. With ``store=open``, there are fewer passes, but some passes
compute two blocks.

All variants are compared on the same samples. The default loop must be as good as one token per pass.
So a variant with another rule than a threshold is dropped if it has lost more than ``SLACK`` answers.
With many samples, this is checked after a quarter and after half of the samples too. A fifth of the
samples then takes no part in the search. The chosen default loop is measured on these held-out
samples.

The levels are chosen as follows:

- ``high`` gives the best quality of all variants, and stores blocks as the preset does.
- ``medium`` needs the fewest passes of all variants whose loss of quality is at most
  ``LOSSES["medium"]``.
- ``low`` needs the fewest passes of all variants whose loss of quality is at most
  ``LOSSES["low"]``. If this variant needs more than half of the passes of ``high``, the rule is
  different: ``low`` is the best variant that needs at most half of the passes of ``high``, if there
  is such a variant.
- ``instant`` needs the fewest passes of all variants.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dlm_calibration.metrics import Decode, Run, share_interval
from dlm_calibration.samples import Sample
from dlm_export.bundle.default_loop import FEWEST_SAMPLES
from dlm_export.judging.sides.prompts import prompt_of, runs_of
from dlm_export.judging.sides.side import JudgeError, Side
from dlm_export.judging.tuning.threshold import (
    CAREFUL,
    CAREFUL_AHEAD,
    CAREFUL_PREFIX,
    careful_changes,
    check_policy,
    qualities,
)
from dlm_export.network.pass_plan import Looped, shift_of
from dlm_runtime import Policy

LEVELS = ("instant", "low", "medium", "high")
"""The names of the effort levels, in ascending order of passes."""
LOSSES = {"medium": 0.02, "low": 0.1}
"""The maximum loss of quality for each level, as a share of the quality of ``high``."""
THRESHOLDS = (0.3, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.97, 0.99, 0.995)
FEW_STEPS = (1, 2)  # numbers of passes per block; each number gives one variant
FINISHES = (0.8, 0.9, 0.95)
FINISHING_FROM = 0.95
"""Each threshold from this number on is also tried with each ``finish_threshold`` below it."""
SHARES, SURE_THRESHOLDS = (0.7, 0.8, 0.9), (0.99, 0.995)
"""Values of ``next_block`` for denoisers with block-causal attention, and thresholds for them."""
FACTORS = (0.05, 0.1, 0.2, 0.4)
ENTROPY_BOUNDS = (0.01, 0.03, 0.1, 0.3)
MANY_SAMPLES = 128
"""From this number of samples on, the search drops variants early, and holds out samples."""
SLACK = 2
"""A variant with an additional rule is dropped if it gives more than this number of right answers
fewer than one token per pass.
"""
LEAST_SAVING = 0.1
"""A faster loop replaces the preset's own loop only if it saves at least this share of the passes, or
of the time.

A few dozen samples cannot show a small loss of quality, and a smaller saving might not be worth
such a loss.
"""


@dataclass(frozen=True)
class LevelPoint:
    """One measured variant.

    ``changes`` contains the fields that differ from the preset's fields. ``quality`` is from 0 to
    1. ``nfe`` is the mean number of passes per prompt, and ``ms`` is the median time in milliseconds.
    """

    changes: dict[str, Any]
    quality: float
    nfe: float
    ms: float = 0.0


@dataclass(frozen=True)
class HeldOut:
    """Results on samples that took no part in the search.

    ``quality`` is that of the chosen default loop, with its 95% interval. ``careful`` is the quality
    of one token per pass.
    """

    samples: int
    quality: float
    interval: tuple[float, float]
    nfe: float
    careful: float


@dataclass(frozen=True)
class Levels:
    """The effort levels of a preset, and the measurements from which the levels were chosen.

    - ``quality``: the kind of quality that was measured. ``task`` means the share of right answers.
      ``agreement`` means the share of tokens that are equal to the tokens of the variant
      ``careful``, which commits one token per pass.
    - ``samples``: the number of samples.
    - ``curve``: the variants that were measured on all samples, sorted by their number of passes.
    - ``levels``: maps each level's name to the level's variant.
    - ``held_out``: ``None`` if there are too few samples to hold some out.
    - ``by``: ``passes`` or ``time``, which decides the default loop among loops that are as good.
    """

    preset: str
    quality: str
    samples: int
    curve: list[LevelPoint]
    levels: dict[str, LevelPoint]
    held_out: HeldOut | None = None
    by: str = "passes"

    @property
    def careful(self) -> LevelPoint:
        """The variant that commits one token per pass."""
        changes = (CAREFUL, CAREFUL_AHEAD, CAREFUL_PREFIX)
        return next(point for point in self.curve if point.changes in changes)


def variants(policy: Policy, looped: Looped) -> list[dict[str, Any]]:
    """List the variants to measure, as changes to ``policy``.

    The first variant contains no changes. The last variant commits one token per pass.

    If the pass that stores a block also predicts the first position of the next block, no variant
    uses ``store=open``, because these denoisers need the separate pass.
    """
    is_predicting = shift_of(looped, is_draft=False) == 1
    is_ahead = policy.next_block < 1  # such policies store blocks in their own way
    is_stored = policy.cache == "block" and policy.store == "pass"
    opens = is_stored and not is_predicting and not is_ahead
    saved: dict[str, Any] = {"store": "open"} if opens else {}
    own = [{}, saved] if opens else [{}]
    others: list[dict[str, Any]] = [
        {"threshold": each} for each in THRESHOLDS if each != policy.threshold
    ]
    if not is_ahead:
        others += [
            {"threshold": each, "finish_threshold": finish}
            for each in THRESHOLDS
            for finish in FINISHES
            if finish < each and each >= FINISHING_FROM
        ]
        if policy.commit != "longest_prefix":  # its passes follow no schedule
            others += [{"commit": "dynamic", "steps_per_block": steps} for steps in FEW_STEPS]
            others += [{"commit": "factor", "factor": each} for each in FACTORS]
            others += [{"commit": "entropy_bound", "entropy_bound": g} for g in ENTROPY_BOUNDS]
    several: list[dict[str, Any]] = []
    if opens and (looped.visible_block or 0) > 1 and policy.remask == "none":
        several = [
            {"commit": "threshold", "compare": ">", "next_block": share, "threshold": each}
            | {"finish_threshold": FINISHES[-1]}
            for share in SHARES
            for each in SURE_THRESHOLDS
        ]
    return [*own, *(each | saved for each in others), *several, careful_changes(policy)]


def level_units(policy: Policy, looped: Looped, samples: int) -> int:
    """Return the number of times that ``fit_levels`` calls ``on_done``, including skipped texts."""
    held = _held_out(samples)
    return (len(variants(policy, looped)) + 1) * (samples - held) + 2 * held


def _is_always_kept(changes: dict[str, Any]) -> bool:
    """Return True for the variants that run on all samples, because the levels need them."""
    return not {"finish_threshold", "factor", "entropy_bound"} & changes.keys()


def _held_out(samples: int) -> int:
    return samples // 5 if samples >= MANY_SAMPLES else 0


def fit_levels(
    side: Side,
    samples: Sequence[Sample],
    policy: Policy,
    max_new_tokens: int,
    decode: Decode,
    *,
    preset: str,
    by: str = "passes",
    on_done: Callable[[], None] = lambda: None,
) -> Levels:
    """Search the best of all ``variants`` on the samples, and choose the effort levels.

    The best variant with ``store=open`` is also measured without ``store=open``.

    If every sample has an answer and ``decode`` returns text, quality is the share of right
    answers. Otherwise, quality is the share of tokens that are equal to the tokens of the loop with
    one token per pass.

    ``on_done`` is called ``level_units`` times. Raises JudgeError if there are no samples. Raises
    RequestError if the policy has no threshold.
    """
    check_policy(policy)
    if not samples:
        raise JudgeError("no samples to fit effort levels on: give data")
    trials = _Trials(side, samples, policy, max_new_tokens, decode, on_done)
    changed = variants(policy, side)
    careful = changed[-1]
    last = len(samples) - _held_out(len(samples))
    kept = changed
    for seen in (last // 4, last // 2, last) if last < len(samples) else (last,):
        for changes in (careful, *kept[:-1]):
            trials.run(changes, seen)
        dropped = [each for each in kept if not _is_always_kept(each) and trials.lost(each) > SLACK]
        trials.skip((last - seen) * len(dropped))
        kept = [each for each in kept if each not in dropped]
    curve = [trials.point(changes) for changes in kept]
    quick = [point for point in curve if "store" in point.changes]
    best_quick = _best(quick, quick[0]).changes if quick else {}
    as_preset = {field: value for field, value in best_quick.items() if field != "store"}
    if as_preset not in kept:
        trials.run(as_preset, last)
        curve.append(trials.point(as_preset))
    else:
        trials.skip(last)
    ascending = sorted(curve, key=lambda point: (point.nfe, -point.quality))
    chosen = choose_levels(curve, curve[0])
    levels = Levels(preset, trials.quality, last, ascending, chosen, by=by)
    if last == len(samples):
        return levels
    loop = (fastest(levels) or curve[0]).changes
    for changes in (careful, loop):
        trials.run(changes, len(samples))
    if loop == careful:
        trials.skip(len(samples) - last)
    return replace(levels, held_out=trials.held_out(loop, last))


class _Trials:
    """Runs variants on samples, and keeps the results. A variant's results are in sample order."""

    def __init__(
        self,
        side: Side,
        samples: Sequence[Sample],
        policy: Policy,
        max_new_tokens: int,
        decode: Decode,
        on_done: Callable[[], None],
    ) -> None:
        self._side, self._samples, self._policy = side, samples, policy
        self._decode, self._on_done = decode, on_done
        self._asked = [
            prompt_of(sample, max_new_tokens, side.max_canvas_length) for sample in samples
        ]
        is_task = all(sample.answer is not None for sample in samples) and decode([]) is not None
        self.quality = "task" if is_task else "agreement"
        self._careful = careful_changes(policy)
        self._runs: dict[str, list[Run]] = {}
        self._seconds: dict[str, list[float]] = {}

    def run(self, changes: dict[str, Any], last: int) -> None:
        """Run a variant on all samples before ``last`` on which it has not run."""
        runs = self._runs.setdefault(str(changes), [])
        policy, before = self._policy.with_fields(changes), len(self._side.seconds())
        asked = self._asked[len(runs) : last]
        runs += runs_of(self._side, asked, policy, self._decode, self._on_done)
        self._seconds.setdefault(str(changes), []).extend(self._side.seconds()[before:])

    def skip(self, count: int) -> None:
        """Report texts as done that need not be generated."""
        for _ in range(count):
            self._on_done()

    def _qualities(self, changes: dict[str, Any], first: int = 0) -> list[float]:
        runs = self._runs[str(changes)]
        best = None if self.quality == "task" else self._runs[str(self._careful)][: len(runs)]
        return qualities(runs, best, self._samples[: len(runs)])[first:]

    def point(self, changes: dict[str, Any]) -> LevelPoint:
        runs, spent = self._runs[str(changes)], self._seconds[str(changes)]
        nfe = float(np.mean([run.nfe for run in runs]))
        ms = 1e3 * float(np.median(spent)) if spent else 0.0
        return LevelPoint(changes, float(np.mean(self._qualities(changes))), nfe, ms)

    def lost(self, changes: dict[str, Any]) -> float:
        """Return how many right answers fewer a variant gives than one token per pass."""
        return sum(self._qualities(self._careful)) - sum(self._qualities(changes))

    def held_out(self, changes: dict[str, Any], first: int) -> HeldOut:
        """Return the results of a variant on the samples from ``first`` on."""
        found = self._qualities(changes, first)
        nfe = float(np.mean([run.nfe for run in self._runs[str(changes)][first:]]))
        interval = share_interval(np.array(found), np.ones(len(found)))
        careful = float(np.mean(self._qualities(self._careful, first)))
        return HeldOut(len(found), float(np.mean(found)), interval, nfe, careful)


def fastest(levels: Levels) -> LevelPoint | None:
    """Choose the fastest loop whose quality is at least the quality of one token per pass.

    ``levels.by`` says how fast a loop is. The function prefers the preset's own loop: it chooses
    another loop only if this loop saves at least the share ``LEAST_SAVING``, or if the quality of
    the preset's own loop is too low.

    Returns ``None`` if there are too few samples, if the loop with one token per pass gives no
    right answer, or if no faster loop has the required quality.
    """
    careful = levels.careful
    if levels.samples < FEWEST_SAMPLES or careful.quality == 0:
        return None

    def cost(point: LevelPoint) -> float:
        return point.ms if levels.by == "time" else point.nfe

    as_good = [point for point in levels.curve if point.quality >= careful.quality]
    found = min(as_good, key=lambda point: (cost(point), -point.quality))
    own = next((point for point in as_good if not point.changes), None)
    if own is not None and cost(found) > (1 - LEAST_SAVING) * cost(own):
        found = own
    return None if cost(found) >= cost(careful) else found


def choose_levels(curve: Sequence[LevelPoint], own: LevelPoint) -> dict[str, LevelPoint]:
    """Choose the variant of each level. The docstring of this module explains the rules.

    ``own`` is the preset without changes. If several variants have the best quality, ``high`` is
    the fastest of them that needs at least as many passes as ``own``. If there is none, ``high`` is
    the slowest of them.
    """
    high = _best(curve, own)
    front = list(_front(curve, high))
    kept = {
        name: next(point for point in front if point.quality >= (1 - loss) * high.quality)
        for name, loss in LOSSES.items()
    }
    half = [point for point in front if point.nfe <= high.nfe / 2]
    if kept["low"].nfe > high.nfe / 2 and half:
        kept["low"] = half[-1]
    return {"instant": front[0], "low": kept["low"], "medium": kept["medium"], "high": high}


def _best(points: Sequence[LevelPoint], own: LevelPoint) -> LevelPoint:
    best = max(point.quality for point in points)
    bests = [point for point in points if point.quality == best]
    bests.sort(key=lambda point: point.nfe)
    return next((point for point in bests if point.nfe >= own.nfe), bests[-1])


def _front(points: Sequence[LevelPoint], high: LevelPoint) -> Iterator[LevelPoint]:
    """Yield each variant whose quality is better than the quality of all faster variants.

    The variants are yielded in ascending order of passes. The last variant is ``high``. Variants
    with quality 0 are left out.
    """
    best = 0.0
    for point in sorted(points, key=lambda point: (point.nfe, -point.quality)):
        if point.quality > best and point.nfe < high.nfe:
            best = point.quality
            yield point
    yield high
