"""Compares the tokens that two denoisers would commit in each pass of a decoding run.

The frontier of a pass consists of the positions that the pass may commit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from dlm_calibration.metrics import Commitment
from dlm_calibration.samples import Sample
from dlm_export.judging.sides.prompts import asked_of
from dlm_export.judging.sides.side import (
    DraftPass,
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
"""The type of the method ``Scorer.scores``, which computes the confidence of positions."""


@dataclass(frozen=True, eq=False)
class FrontierState:
    """The state of a decoding loop before one of its passes.

    ``canvas`` contains the token IDs, int64 ``[L]``. ``turn`` describes the pass, and lists the
    positions that it may commit. ``mask_ratio`` is the share of undecided positions among the
    positions after the prompt.
    """

    canvas: np.ndarray
    turn: Turn
    mask_ratio: float

    @property
    def view(self) -> View:
        """The pass before the commit, computed without the cache of earlier passes."""
        span, positions = self.turn.span, self.turn.positions
        if span.is_draft:
            draft = DraftPass(span.first, is_updated=span.is_updated)
            return View(self.canvas[: span.last], positions, draft)
        return View(self.canvas, positions)


def frontier_states(
    canvases: Sequence[Canvas], policy: Policy, looped: Looped
) -> Iterator[FrontierState]:
    """Yield the state before each pass of a decoding loop, in order.

    ``canvases`` contains the canvas before each pass.
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
    """Predict which tokens a denoiser would commit in ``state``, with a full pass without a cache.

    ``scores`` computes the confidence of each position. To compare two denoisers, pass the same
    function for both denoisers, because both use the same threshold for the confidences.
    """
    logits = finite_logits(predictor, *state.view)
    guess = logits.argmax(-1)
    return Commitment(
        logits, guess, choose_in(state.turn, guess, scores(state.turn, logits, policy), policy)
    )


@dataclass(frozen=True, eq=False)
class Met:
    """A decoding run: the prompt, the canvas before each pass, and the finished canvas.

    ``number`` is the index of the sample. ``room`` is the number of generated tokens.
    """

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
        """The canvas and the positions that may be committed, for each pass that commits tokens."""
        return [state.view for state in self.deciding]

    @property
    def deciding(self) -> list[FrontierState]:
        """The states of all passes that can commit tokens. All other passes only fill a cache."""
        return [state for state in self.states if len(state.turn.positions)]

    def walk(self, looped: Looped) -> Walk:
        """Return the passes of this run in the format that ``Seer.see`` expects."""
        spans = [(state, state.turn.span) for state in self.states]
        return [
            Step(
                state.canvas,
                span,
                rows_of(looped, state.turn.positions, is_draft=span.is_draft),
            )
            for state, span in spans
        ]


def meet(
    predictor: Predictor,
    sample: Sample,
    number: int,
    policy: Policy,
    max_new_tokens: int,
    limit: int,
) -> Met:
    """Generate text after the prompt of a sample, and record every canvas.

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
    """Generate text for as many samples as fit into a budget of ``passes`` passes.

    ``within`` explains ``passes`` and ``least``.
    """
    made = (
        meet(predictor, sample, number, policy, max_new_tokens, limit) for number, sample in samples
    )
    return within(made, passes=passes, least=least)


def within(runs: Iterator[Met], *, passes: int, least: int = 1) -> list[Met]:
    """Take as many runs from an iterator as fit into a budget of ``passes`` passes.

    The function expects the next run to need as many passes as the last run. It stops if the total
    would then exceed ``passes``. It always takes the first ``least`` runs.
    """
    taken: list[Met] = []
    while len(taken) < least or sum(run.nfe for run in taken) + taken[-1].nfe <= passes:
        run = next(runs, None)
        if run is None:
            break
        taken.append(run)
    return taken


@dataclass(frozen=True)
class Followed:
    """Compares a decoding run of one denoiser with the tokens that a ``Seer`` would commit.

    ``is_equal`` is true if the ``Seer`` would commit the same tokens in every pass. ``nfe`` is the
    number of passes that the ``Seer`` would need to generate text itself. If ``is_equal`` is false,
    ``nfe`` is estimated from the number of positions that the ``Seer`` would commit in each pass.
    """

    is_equal: bool
    nfe: float


def follow(seer: Seer, walk: int, run: Met, policy: Policy) -> Followed:
    """Predict which tokens ``seer`` would commit at each pass of a different denoiser's run.

    The caller must have passed the run to ``seer.see``. ``walk`` is the index of the run in the
    list that ``seer.see`` received.
    """
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
        is_open = before.undecided[turn.positions]
        decided = int((is_open & ~after.undecided[turn.positions]).sum())
        nfe += decided / int(chosen[is_open].sum()) if is_open.any() else 1
    return Followed(is_equal, float(run.nfe) if is_equal else nfe)
