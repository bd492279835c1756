"""Follows a loop pass by pass, and predicts what each side would commit at every pass.

The positions that a pass may commit are the frontier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from dlm_calibration.metrics import Commitment
from dlm_calibration.samples import Sample
from dlm_export.judging.sides.prompts import asked_of
from dlm_export.judging.sides.side import (
    Predictor,
    Scorer,
    Seer,
    View,
    finite,
    finite_logits,
    rows_of,
)
from dlm_export.network.passes import Looped
from dlm_export.network.turns import Canvas, Step, Turn, Walk, choose_in, turns
from dlm_runtime import Policy

Scores = Callable[[Turn, np.ndarray, Policy], np.ndarray]
"""The type of ``Scorer.scores``."""


@dataclass(frozen=True, eq=False)
class FrontierState:
    """A canvas before one pass of a loop, int64 ``[L]``, and what the loop may commit there
    (``turn``).

    ``mask_ratio`` is the share of undecided positions, counted from the first position that the
    prompt leaves open.
    """

    canvas: np.ndarray
    turn: Turn
    mask_ratio: float


def frontier_states(
    canvases: Sequence[Canvas], policy: Policy, looped: Looped
) -> Iterator[FrontierState]:
    """Yield the canvas and the turn of every pass of a loop, in order.

    ``canvases`` are the canvases that the passes saw.
    """
    if not canvases:
        return
    met = Canvas(canvases[0].tokens.copy(), canvases[0].undecided.copy())
    origin = int(met.undecided.argmax())
    ahead = turns(met, policy, looped)
    for canvas in canvases:
        met.tokens[:], met.undecided[:] = canvas.tokens, canvas.undecided
        yield FrontierState(canvas.tokens, next(ahead), float(canvas.undecided[origin:].mean()))


def predict_commitment(
    predictor: Scorer, state: FrontierState, policy: Policy, scores: Scores
) -> Commitment:
    """Predict what a denoiser would commit here, from a full pass without a cache.

    ``scores`` is the function of one side, and is used for both sides. Otherwise thresholds would
    compare values that are computed differently.
    """
    logits = finite_logits(predictor, state.canvas, state.turn.positions)
    guess = logits.argmax(-1)
    return Commitment(
        logits, guess, choose_in(state.turn, guess, scores(state.turn, logits, policy), policy)
    )


@dataclass(frozen=True, eq=False)
class Met:
    """The run of one side: prompt, canvas of each pass, finished canvas, and the loop's turns."""

    number: int
    prompt: list[int]
    room: int
    canvases: list[Canvas]
    states: list[FrontierState] = field(repr=False)

    @property
    def nfe(self) -> int:
        return len(self.states)

    @property
    def tokens(self) -> list[int]:
        """The finished canvas."""
        found: list[int] = self.canvases[-1].tokens.tolist()
        return found

    @property
    def views(self) -> list[View]:
        """The canvases and positions to predict at the frontier of this run."""
        return [(state.canvas, state.turn.positions) for state in self.deciding]

    @property
    def deciding(self) -> list[FrontierState]:
        """The states of passes that predict something. Other passes only fill a cache."""
        return [state for state in self.states if len(state.turn.positions)]

    def walk(self, shift: int) -> Walk:
        """Return the passes of this run in a form that a ``Seer`` can repeat."""
        return [
            Step(state.canvas, state.turn.span, rows_of(state.turn.positions, shift))
            for state in self.states
        ]


def meet(
    predictor: Predictor,
    sample: Sample,
    number: int,
    policy: Policy,
    max_new_tokens: int,
    limit: int,
) -> Met:
    """Run the loop of one side on the prompt of a sample.

    Raises JudgeError if the prompt fills the canvas.
    """
    prompt, room = asked_of(sample, number, max_new_tokens, limit)
    canvases = predictor.states(prompt, room, policy)
    return Met(
        number, prompt, room, canvases, list(frontier_states(canvases[:-1], policy, predictor))
    )


def meet_within(
    predictor: Predictor,
    samples: Sequence[tuple[int, Sample]],
    policy: Policy,
    max_new_tokens: int,
    limit: int,
    *,
    passes: int,
    least: int = 1,
) -> list[Met]:
    """Run the loop on one sample after another, within a limit on the total number of passes.

    Stops before a run that would probably exceed ``passes``, but makes at least ``least`` runs.
    """
    runs: list[Met] = []
    for number, sample in samples:
        if len(runs) >= least and sum(run.nfe for run in runs) + runs[-1].nfe > passes:
            break
        runs.append(meet(predictor, sample, number, policy, max_new_tokens, limit))
    return runs


@dataclass(frozen=True)
class Followed:
    """A run of one side, as another side predicts it pass by pass.

    ``is_equal`` is true if the other side would have committed the same at every pass. By
    induction, its own run would then be the same. ``nfe`` is the number of passes that its own run
    would need. If the sides differ, it is estimated from how many positions the other side commits
    per pass.
    """

    is_equal: bool
    nfe: float


def follow(seer: Seer, walk: int, run: Met, policy: Policy) -> Followed:
    """Predict what a side commits at each pass of a run, using the rows that it cached itself."""
    is_equal, nfe = True, 0.0
    for step, (state, before, after) in enumerate(
        zip(run.states, run.canvases, run.canvases[1:], strict=False)
    ):
        turn, logits = state.turn, finite(seer, seer.walked(walk, step))
        guess = logits.argmax(-1)
        chosen = choose_in(turn, guess, seer.scores(turn, logits, policy), policy)
        tokens = after.tokens[turn.positions]
        changed = (before.undecided & ~after.undecided)[turn.positions] | (
            before.tokens[turn.positions] != tokens
        )
        is_equal &= np.array_equal(chosen, changed) and np.array_equal(
            guess[chosen], tokens[chosen]
        )
        is_count = len(turn.positions) and turn.standing is None
        nfe += int((~after.undecided[turn.positions]).sum()) / int(chosen.sum()) if is_count else 1
    return Followed(is_equal, float(run.nfe) if is_equal else nfe)
