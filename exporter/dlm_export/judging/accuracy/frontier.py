"""Compares the tokens that two denoisers would commit in each pass of a decoding run.

The frontier of a pass consists of the positions that the pass may commit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from dlm_calibration.metrics import Commitment
from dlm_calibration.samples import Sample
from dlm_export.judging.sides.prompts import asked_of
from dlm_export.judging.sides.side import (
    DraftPass,
    Side,
    View,
    finite_logits,
)
from dlm_export.network.commit_rules import choose_in
from dlm_export.network.loop_scores import scores
from dlm_export.network.loop_turns import Canvas, Turn, turns
from dlm_export.network.pass_plan import Looped
from dlm_runtime import Policy


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
            draft = DraftPass(span.draft_start, is_updated=span.is_updated)
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
        if looped.resizes:
            met.tokens, met.undecided = canvas.tokens.copy(), canvas.undecided.copy()
        else:
            met.tokens[:], met.undecided[:] = canvas.tokens, canvas.undecided
        yield FrontierState(canvas.tokens, next(ahead), float(canvas.undecided[origin:].mean()))


def predict_commitment(predictor: Side, state: FrontierState, policy: Policy) -> Commitment:
    """Predict which tokens a denoiser would commit in ``state``, with a full pass without a cache."""
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
    def deciding(self) -> list[FrontierState]:
        """The states of all passes that can commit tokens. All other passes only fill a cache."""
        return [state for state in self.states if len(state.turn.positions)]


def meet(
    predictor: Side,
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
    (canvases,) = predictor.courses([(prompt, room)], policy)
    return met(predictor, number, prompt, canvases, policy)


def met(
    looped: Looped, number: int, prompt: list[int], canvases: list[Canvas], policy: Policy
) -> Met:
    """Return the run whose canvases are known. ``looped`` is the denoiser that generated them."""
    states = list(frontier_states(canvases[:-1], policy, looped))
    room = len(canvases[0].tokens) - len(prompt)
    return Met(number, prompt, room, canvases, states)


def meet_within(
    predictor: Side,
    samples: Sequence[tuple[int, Sample]],
    policy: Policy,
    max_new_tokens: int,
    limit: int,
    *,
    passes: int,
) -> list[Met]:
    """Generate text for as many samples as fit into a budget of ``passes`` passes.

    The function expects the next run to need as many passes as the last run. It stops if the total
    would then exceed ``passes``. It always generates text for the first sample.
    """
    taken: list[Met] = []
    for number, sample in samples:
        if taken and sum(run.nfe for run in taken) + taken[-1].nfe > passes:
            break
        taken.append(meet(predictor, sample, number, policy, max_new_tokens, limit))
    return taken
