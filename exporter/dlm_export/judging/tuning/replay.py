"""A loop simulated from what a denoiser predicts on canvases that were met under one threshold, to
see what others would do.

For every undecided position of a block the prediction is that of the recorded canvas, among those
on which it was still undecided, whose count of decided positions in that block is nearest. At the
recorded threshold these are the run's own canvases. At another one the loop would have met other
canvases: how its own commits change later predictions is not seen, nor what a cache would have
kept. A block that the recorded run did not reach takes what stands there when it ended, in one
pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dlm_calibration.states import MASK_RATIOS, Sample
from dlm_export.judging.accuracy.frontier import Met, meet_within
from dlm_export.judging.sides.side import Predictor, Scorer, finite_logits
from dlm_export.network.turns import Turn, choose_in, start_canvas, turns
from dlm_runtime import Policy


@dataclass(frozen=True, eq=False)
class Recorded:
    """What a side predicts on a canvas, at its block's undecided positions ``[M]``: tokens and
    scores, ascending.
    """

    turn: Turn
    guess: np.ndarray
    score: np.ndarray


class Replayed:
    """A side whose loop is simulated on the canvases of recorded runs; it answers for their prompts
    alone.
    """

    def __init__(self, side: Scorer, runs: Sequence[Met], policy: Policy) -> None:
        """``policy``: of the runs; its threshold and its rule of commits may differ in what is
        replayed.
        """
        self.name, self.vocab_size = side.name, side.vocab_size
        self.shift, self.visible_block = side.shift, side.visible_block
        self.mask_token_id, self.eos_token_ids = side.mask_token_id, side.eos_token_ids
        self.max_canvas_length = side.max_canvas_length
        self._finished = {(*run.prompt, run.room): run.canvases[-1].tokens for run in runs}
        self._recorded: dict[tuple[int, ...], dict[int, list[Recorded]]] = {}
        for run in runs:
            blocks = self._recorded.setdefault((*run.prompt, run.room), {})
            for state in run.deciding:
                logits = finite_logits(side, state.canvas, state.turn.positions)
                found = Recorded(
                    state.turn, logits.argmax(-1), side.scores(state.turn, logits, policy)
                )
                blocks.setdefault(state.turn.start, []).append(found)

    def generate(
        self, tokens: Sequence[int], max_new_tokens: int, policy: Policy
    ) -> tuple[list[int], int]:
        """See ``Predictor``; the run that this side's predictions give."""
        canvas, nfe = start_canvas(tokens, max_new_tokens, self.mask_token_id), 0
        key = (*tokens, max_new_tokens)
        for turn in turns(canvas, policy, self):
            recorded = self._recorded[key].get(turn.start)
            if recorded is None:
                chosen, guess = (
                    np.ones(len(turn.positions), bool),
                    self._finished[key][turn.positions],
                )
            else:
                guess, score = _nearest(recorded, turn.positions)
                chosen = choose_in(turn, guess, score, policy)
            committed = turn.positions[chosen]
            canvas.tokens[committed], canvas.undecided[committed] = guess[chosen], False
            nfe += 1
        return canvas.tokens.tolist(), nfe


@dataclass(frozen=True, eq=False)
class Recording:
    """A side's runs under a policy, from the prompts of ``samples``, and the side as it is replayed
    from them.
    """

    policy: Policy
    samples: list[Sample]
    runs: list[Met]
    side: Replayed


def record(
    side: Predictor,
    samples: Sequence[Sample],
    policy: Policy,
    max_new_tokens: int,
    limit: int,
    on_done: Callable[[], None] = lambda: None,
) -> Recording:
    """Run a side's loop from as many of the samples as make no more passes in all than judging
    makes for its masked positions.

    ``limit``: tokens of the longest canvas. ``on_done`` is called once a run. Raises JudgeError.
    """
    passes = len(samples) * len(MASK_RATIOS)
    runs = meet_within(
        side,
        list(enumerate(samples)),
        policy,
        max_new_tokens,
        limit,
        passes=passes,
        on_done=on_done,
    )
    return Recording(policy, list(samples[: len(runs)]), runs, Replayed(side, runs, policy))


def _nearest(recorded: Sequence[Recorded], positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and scores of ``positions`` ``[M]``, each of the canvas with the nearest count of
    undecided positions.
    """
    guess, score = np.zeros(len(positions), np.int64), np.zeros(len(positions))
    nearest = np.full(len(positions), np.iinfo(np.int64).max)
    for one in recorded:
        distance = abs(len(one.turn.positions) - len(positions))
        places = np.searchsorted(one.turn.positions, positions).clip(
            max=len(one.turn.positions) - 1
        )
        is_nearer = (one.turn.positions[places] == positions) & (distance < nearest)
        guess[is_nearer], score[is_nearer] = (
            one.guess[places[is_nearer]],
            one.score[places[is_nearer]],
        )
        nearest[is_nearer] = distance
    return guess, score
