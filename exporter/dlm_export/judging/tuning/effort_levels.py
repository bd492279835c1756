"""Effort levels: variants of a preset's loop that trade quality for passes.

A variant changes the threshold at which a token commits, or the number of passes per block. If
finished blocks are stored in separate passes, variants may also store a block in the pass that
opens the next one (``store=open``). This gives the same text in fewer passes, some of which cover
two blocks. Passes of all other caches keep their size.

Every variant generates from the same samples. ``high`` has the best quality of all, and stores
blocks as the preset does. ``medium`` and ``low`` need the fewest passes within the quality losses
of ``LOSSES``; ``low`` also needs at most half of ``high``'s passes, if a variant does. ``instant``
needs the fewest passes of all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from dlm_calibration import metrics
from dlm_calibration.metrics import Decode, Run
from dlm_calibration.samples import Sample
from dlm_export.judging.sides.prompts import prompt_of
from dlm_export.judging.sides.side import Generator, JudgeError
from dlm_export.judging.tuning.default_loop import with_fitted
from dlm_export.judging.tuning.threshold import check_policy
from dlm_runtime import Policy

LEVELS = ("instant", "low", "medium", "high")
"""In ascending order of passes."""
LOSSES = {"medium": 0.02, "low": 0.1}
"""Allowed loss as a share of high's quality."""
THRESHOLDS = (0.3, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.97, 0.99, 0.995)
FEW_STEPS = (1, 2)  # passes per block, whatever the scores are
CAREFUL: dict[str, Any] = {"commit": "static", "steps_per_block": 0}
"""One token per pass: the reference for agreement if samples have no answers."""


@dataclass(frozen=True)
class LevelPoint:
    """One variant: the fields it changes, its quality in 0..1, and mean passes per prompt."""

    changes: dict[str, Any]
    quality: float
    nfe: float


@dataclass(frozen=True)
class Levels:
    """The effort levels of a preset, and all measured variants, fewest passes first.

    ``quality`` is ``task`` (share of right answers) or ``agreement`` (share of tokens equal to
    those with one token per pass), over ``samples``.
    """

    preset: str
    quality: str
    samples: int
    curve: list[LevelPoint]
    levels: dict[str, LevelPoint]

    @property
    def careful(self) -> LevelPoint:
        """The loop that commits one token a pass."""
        return next(point for point in self.curve if point.changes == CAREFUL)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for the manifest."""
        return asdict(self)

    def applied(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """A copy of the manifest with these levels, and the default loop that they support, instead
        of any others.
        """
        own = Policy(**manifest["loop"]["presets"][self.preset])
        loops = {
            name: own.with_fields(point.changes).as_dict() for name, point in self.levels.items()
        }
        loop = manifest["loop"] | {"effort": {"preset": self.preset, "levels": loops}}
        return with_fitted({**manifest, "loop": loop, "effort": self.as_dict()}, self)


def variants(policy: Policy, shift: int) -> list[dict[str, Any]]:
    """The variants to try, as changes of ``policy``: unchanged first, the most careful one last.

    A denoiser with ``shift`` 1 decides a block's first position in the pass that stores the rows
    before it, so that pass must stay separate.
    """
    opens = policy.cache == "block" and policy.store == "pass" and shift == 0
    saved: dict[str, Any] = {"store": "open"} if opens else {}
    own = [{}, saved] if opens else [{}]
    others = [{"threshold": each} | saved for each in THRESHOLDS if each != policy.threshold]
    fewer = [{"commit": "dynamic", "steps_per_block": steps} | saved for steps in FEW_STEPS]
    return [*own, *fewer, *others, CAREFUL]


def level_units(policy: Policy, shift: int) -> int:
    """Number of times that ``fit_levels`` calls ``on_done``."""
    return len(variants(policy, shift)) + 1


def fit_levels(
    side: Generator,
    samples: Sequence[Sample],
    policy: Policy,
    max_new_tokens: int,
    decode: Decode,
    *,
    preset: str,
    on_done: Callable[[], None] = lambda: None,
) -> Levels:
    """Measure all ``variants`` on the samples, then the best one with the preset's way of storing,
    and choose the levels.

    Quality is the task score if every sample has an answer and ``decode`` returns text, otherwise
    the share of tokens equal to the side's own at one token per pass. ``on_done``: see
    ``level_units``. Raises JudgeError without samples, and RequestError for a policy without a
    threshold.
    """
    check_policy(policy)
    if not samples:
        raise JudgeError("no samples to fit effort levels on: give data")
    is_task = all(sample.answer is not None for sample in samples) and decode([]) is not None
    asked = [prompt_of(sample, max_new_tokens, side.max_canvas_length) for sample in samples]

    def tried(changes: dict[str, Any]) -> list[Run]:
        varied = policy.with_fields(changes)
        made = [(prompt, *side.generate(prompt, room, varied)) for prompt, room in asked]
        on_done()
        return [
            metrics.as_run(tokens, prompt, nfe, side.eos_token_ids, decode)
            for prompt, tokens, nfe in made
        ]

    def point_of(changes: dict[str, Any], found: list[Run]) -> LevelPoint:
        quality = [
            _quality(*each, is_task=is_task) for each in zip(found, careful, samples, strict=True)
        ]
        return LevelPoint(
            changes, float(np.mean(quality)), float(np.mean([run.nfe for run in found]))
        )

    changed = variants(policy, side.shift)
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


def _quality(run: Run, careful: Run, sample: Sample, *, is_task: bool) -> float:
    if is_task:
        return float(metrics.same_answer(run.text, sample.answer or ""))
    same, count = metrics.token_agreement(run.tokens, careful.tokens)
    return same / max(1, count)


def choose_levels(curve: Sequence[LevelPoint], own: LevelPoint) -> dict[str, LevelPoint]:
    """Choose the point of each level, by the rules in the module docstring.

    ``own`` is the preset's point; among equal qualities, ``high`` needs at least as many passes as
    that.
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
    """Points that no other one beats, fewest passes first with rising quality, then ``high``; omits
    points of zero quality.
    """
    best = 0.0
    for point in sorted(points, key=lambda point: (point.nfe, -point.quality)):
        if point.quality > best and point.nfe < high.nfe:
            best = point.quality
            yield point
    yield high
