"""Decides whether rounding explains that a bundle and torch generate different canvases.

A decision of a loop is a tie if the order of additions can change it, because two logits or two
scores are almost equal, or a score almost equals a threshold. After a tie the two canvases may differ
everywhere. So only the first pass that decides differently is examined.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dlm_export.network.commit_rules import choose_in, scored_by
from dlm_export.network.loop_random import gumbels, temperature_of
from dlm_export.network.loop_turns import Canvas, Turn
from dlm_export.network.proposers import Proposals
from dlm_runtime import Policy

# The search for the smallest difference of the logits that explains a decision ends at this number.
_MOST = 1e6


@dataclass(frozen=True, eq=False)
class Decided:
    """A pass of the reference: its turn, what it proposed, and the logits, fp32 ``[M, V]``."""

    turn: Turn
    proposals: Proposals
    logits: np.ndarray


@dataclass(frozen=True)
class Divergence:
    """The first pass of a run that decides differently from the reference.

    ``needed`` is the smallest error of every logit that explains the bundle's decision, or infinity
    if no error explains it.
    """

    number: int
    positions: list[int]
    needed: float

    def __str__(self) -> str:
        by = (
            f"no error of the logits below {_MOST:.0e} explains"
            if self.needed > _MOST
            else f"only an error of {self.needed:.2e} in the logits explains"
        )
        return f"pass {self.number} decides positions {self.positions} differently, which {by}"


def find_divergence(
    passes: Sequence[Decided],
    after: Sequence[Canvas],
    policy: Policy,
    resizing: tuple[int | None, int | None] = (None, None),
) -> Divergence | None:
    """Find the first pass that decides differently.

    ``passes`` are those of the reference, and ``after`` contains the bundle's canvas after each of
    its passes. ``resizing`` contains the network's expand token and delete token. Returns ``None`` if
    no pass of the reference decides differently.
    """
    for number, (each, canvas) in enumerate(zip(passes, after, strict=False), start=1):
        at, tokens = each.turn.positions, each.proposals.tokens
        theirs = choose_in(each.turn, tokens, each.proposals.scores, policy)
        if len(canvas.tokens) != each.turn.span.last and None not in resizing:
            ours, found = _resized(each, canvas, resizing)
        else:
            ours, found = ~canvas.undecided[at], canvas.tokens[at]
        standing = each.turn.standing
        if standing is not None:  # the pass may also edit decided tokens
            ours = np.where(standing >= 0, found != standing, ours)
        differs = (ours != theirs) | (ours & theirs & (found != tokens))
        if differs.any():
            needed = _needed(each, ours, found, policy)
            return Divergence(number, at[differs].tolist(), needed)
    return None


def _resized(
    each: Decided, canvas: Canvas, resizing: tuple[int | None, int | None]
) -> tuple[np.ndarray, np.ndarray]:
    """Return which positions a pass committed, and their tokens, if it changed the canvas's length.

    If several positions explain the canvas after the pass, the result contains the surest one. If
    the pass committed several tokens, no position explains the canvas, and the result is empty.
    """
    at, (expand, delete) = each.turn.positions, resizing
    before = np.isin(np.arange(each.turn.span.last), at)
    ours, found = np.zeros(len(at), bool), np.full(len(at), -1)
    is_longer = len(canvas.tokens) > len(before)
    for row in np.argsort(-each.proposals.scores, kind="stable"):
        after = np.insert(before, at[row], True) if is_longer else np.delete(before, at[row])
        if np.array_equal(after, canvas.undecided):
            ours[row], found[row] = True, expand if is_longer else delete
            break
    return ours, found


def _needed(each: Decided, ours: np.ndarray, found: np.ndarray, policy: Policy) -> float:
    """Return the smallest error of the logits with which the reference decides as the bundle."""
    if policy.commit == "verify" or policy.remask == "noise":
        return np.inf
    turn, rows = each.turn, np.arange(len(ours))
    values, scale = each.logits.astype(np.float64), 1.0
    if policy.select == "sample":
        scale = temperature_of(policy, turn.step, turn.steps)
        noise = [
            gumbels(policy.seed, turn.passes, int(at), values.shape[1]) for at in turn.positions
        ]
        values = values + scale * np.stack(noise)
    # Two logits that move by e each change their order if their difference is at most 2 e.
    best_two = np.sort(np.partition(values, -2, -1)[:, -2:], -1)
    runner_up = (best_two[:, 1] - best_two[:, 0]) / 2
    by_token = (values[rows, each.proposals.tokens] - values[rows, found]) / 2
    least = float(by_token[ours].max(initial=0.0))
    guess = np.where(ours, found, each.proposals.tokens)

    def explains(error: float) -> bool:
        # A log odds moves by at most twice the error, and a score by at most the same.
        slack = 2 * error
        is_entropy = scored_by(policy) == "entropy"
        if is_entropy:
            slack = slack * np.abs(each.proposals.scores)
        scores = each.proposals.scores + np.where(ours, slack, -slack)
        if policy.select == "sample" and not is_entropy:  # another token has another score
            scores[(runner_up <= error) & ours] = np.inf
            scores[(runner_up <= error) & ~ours] = -np.inf
        return bool((choose_in(turn, guess, scores, policy) == ours).all())

    low, high = least, max(2 * least, 1e-12)
    while not explains(high):
        high *= 4
        if high > _MOST:
            return np.inf
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if explains(middle) else (middle, high)
    return high
