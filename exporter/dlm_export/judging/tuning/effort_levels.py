"""Measures variants of a preset, and chooses some variants as the bundle's effort levels.

A variant changes the preset's commit threshold or its number of passes per block. Some presets use
a separate pass to store a finished block in the cache. A variant of such a preset may instead store
the finished block in the first pass of the next block (``store=open``). ``store=open`` does not
change the text. With ``store=open``, there are fewer passes, but some passes compute two blocks.

Every variant generates text for the same samples. The levels are chosen as follows:

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
from dataclasses import dataclass
from typing import Any

import numpy as np

from dlm_calibration.metrics import Decode, Run
from dlm_calibration.samples import Sample
from dlm_export.judging.sides.prompts import prompt_of, runs_of
from dlm_export.judging.sides.side import JudgeError, Side
from dlm_export.judging.tuning.threshold import (
    CAREFUL,
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


@dataclass(frozen=True)
class LevelPoint:
    """One measured variant.

    ``changes`` contains the fields that differ from the preset's fields. ``quality`` is from 0 to
    1. ``nfe`` is the mean number of passes per prompt.
    """

    changes: dict[str, Any]
    quality: float
    nfe: float


@dataclass(frozen=True)
class Levels:
    """The effort levels of a preset, and the measurements from which the levels were chosen.

    - ``quality``: the kind of quality that was measured. ``task`` means the share of right answers.
      ``agreement`` means the share of tokens that are equal to the tokens of the variant
      ``careful``, which commits one token per pass.
    - ``samples``: the number of samples.
    - ``curve``: all measured variants, sorted by their number of passes.
    - ``levels``: maps each level's name to the level's variant.
    """

    preset: str
    quality: str
    samples: int
    curve: list[LevelPoint]
    levels: dict[str, LevelPoint]

    @property
    def careful(self) -> LevelPoint:
        """The variant that commits one token per pass."""
        return next(point for point in self.curve if point.changes in (CAREFUL, CAREFUL_PREFIX))


def variants(policy: Policy, looped: Looped) -> list[dict[str, Any]]:
    """List the variants to measure, as changes to ``policy``.

    The first variant contains no changes. The last variant commits one token per pass.

    If the pass that stores a block also predicts the first position of the next block, no variant
    uses ``store=open``, because these denoisers need the separate pass.
    """
    is_predicting = shift_of(looped, is_draft=False) == 1
    opens = policy.cache == "block" and policy.store == "pass" and not is_predicting
    saved: dict[str, Any] = {"store": "open"} if opens else {}
    own = [{}, saved] if opens else [{}]
    others = [{"threshold": each} | saved for each in THRESHOLDS if each != policy.threshold]
    fewer = [{"commit": "dynamic", "steps_per_block": steps} | saved for steps in FEW_STEPS]
    if policy.commit == "longest_prefix":  # its passes follow no schedule
        fewer = []
    return [*own, *fewer, *others, careful_changes(policy)]


def level_units(policy: Policy, looped: Looped) -> int:
    """Return the number of times that ``fit_levels`` calls ``on_done``."""
    return len(variants(policy, looped)) + 1


def fit_levels(
    side: Side,
    samples: Sequence[Sample],
    policy: Policy,
    max_new_tokens: int,
    decode: Decode,
    *,
    preset: str,
    on_done: Callable[[], None] = lambda: None,
) -> Levels:
    """Measure all ``variants`` on the samples, and choose the effort levels.

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
    is_task = all(sample.answer is not None for sample in samples) and decode([]) is not None
    asked = [prompt_of(sample, max_new_tokens, side.max_canvas_length) for sample in samples]

    def tried(changes: dict[str, Any]) -> list[Run]:
        found = runs_of(side, asked, policy.with_fields(changes), decode)
        on_done()
        return found

    def point_of(changes: dict[str, Any], found: list[Run]) -> LevelPoint:
        quality = qualities(found, None if is_task else careful, samples)
        return LevelPoint(
            changes, float(np.mean(quality)), float(np.mean([run.nfe for run in found]))
        )

    changed = variants(policy, side)
    runs = [tried(changes) for changes in changed]
    careful = runs[-1]
    curve = [point_of(changes, found) for changes, found in zip(changed, runs, strict=True)]
    quick = [point for point in curve if "store" in point.changes]
    best = _best(quick, quick[0]).changes if quick else {}
    as_preset = {field: value for field, value in best.items() if field != "store"}
    if as_preset not in changed:
        curve.append(point_of(as_preset, tried(as_preset)))
    else:
        on_done()
    kind = "task" if is_task else "agreement"
    ascending = sorted(curve, key=lambda point: (point.nfe, -point.quality))
    return Levels(preset, kind, len(samples), ascending, choose_levels(curve, curve[0]))


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
