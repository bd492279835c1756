"""Commit rules of the unmasking loop, which choose the positions that a turn commits.

The papers of the decoding algorithms do not define two rules: every step commits at least one
token, and positions with equal scores commit from left to right. The native file
``decode/commit_rules.cc`` implements the same rules.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dlm_runtime.policy import Policy

if TYPE_CHECKING:
    from dlm_export.network.loop_turns import Turn


FRACTION_RULES = ("threshold", "dynamic", "factor", "longest_prefix")
"""The rules that compare scores with fractions."""


def scored_by(policy: Policy) -> str:
    """Return the kind of score that a policy's rule compares.

    The result is ``policy.score``, except that the rules entropy_bound and entropy_threshold always
    use entropies.
    """
    is_entropy = policy.commit in ("entropy_bound", "entropy_threshold")
    return "entropy" if is_entropy else policy.score


def timestep_count(masked: int, step: int, steps: int, eps: float) -> int:
    """Return how many positions Dream's schedule commits in pass ``step`` of ``steps`` passes.

    ``masked`` is the number of undecided positions before the pass. The last pass commits all
    undecided positions.
    """
    if step >= steps - 1:
        return masked
    # Compute the same numbers as torch.linspace(1, eps, steps + 1) in fp32. Like torch, compute the
    # first half of the numbers from the start, and the second half from the end. The increment is
    # rounded to fp32, and each number is rounded once.
    end, places = np.float32(eps), np.arange(steps + 1)
    increment = float((end - np.float32(1)) / np.float32(steps))
    from_end = float(end) - increment * (steps - places)
    t = np.where(places < (steps + 1) // 2, 1.0 + increment * places, from_end).astype(np.float32)
    return max(1, int(np.float32(masked) * (np.float32(1) - t[step + 1] / t[step])))


def floor_count(masked: int, left: int, steps: int) -> int:
    """Return how many positions RND1's schedule commits in the next pass.

    The block started with ``masked`` undecided positions, of which ``left`` are undecided now.

    After pass k of N, the schedule leaves floor(masked * (N - k) / N) positions masked, computed in
    fp32. In the published code, some passes commit no position. This module skips such passes.
    """
    kept = (np.float32(masked) * (np.arange(steps) / steps).astype(np.float32)).astype(int)
    return left - int(kept[kept < left].max(initial=0))


def log_odds_of(fraction: Any) -> Any:
    """Return ln(c / (1 - c)) of the fractions c, float64. Fractions above 1 count as 1."""
    with np.errstate(divide="ignore"):
        return np.log(fraction) - np.log1p(-np.minimum(fraction, 1.0))


def score_of_log_odds(log_odds: Any) -> Any:
    """Return the scores of fractions with these log odds."""
    # atanh(c) is ln((1 + c) / (1 - c)) / 2, and (1 + c) / (1 - c) is 1 + 2 c / (1 - c). Above 40,
    # the 1 does not change the sum.
    small = np.log1p(2 * np.exp(np.minimum(log_odds, 40.0))) / 2
    return np.where(log_odds > 40, (log_odds + np.log(2)) / 2, small)


def score_of(fraction: Any) -> Any:
    """Return the scores of confidences, margins or random numbers.

    A float64 cannot tell 1 - 1e-17 from 1. So the loop keeps a fraction c as the score atanh(c),
    computed from the odds c / (1 - c), and compares it with the score of the threshold. Negative
    margins have negative scores.
    """
    return np.copysign(score_of_log_odds(log_odds_of(np.abs(fraction))), fraction)


def choose(score: np.ndarray, policy: Policy, count: int) -> np.ndarray:
    """Choose which undecided positions to commit, bool ``[M]``.

    ``score``, float64 ``[M]``, contains the scores of the positions. Positions are in ascending
    order. ``count`` is the number of positions that the schedule plans for this step. The rules
    static, dynamic, timestep and sequential use ``count``. At least one position is chosen.
    """
    order = np.argsort(-score, kind="stable")
    ranked = score[order]
    count = max(1, min(count, len(score)))
    above = _reach(ranked, policy)
    if policy.commit in ("static", "timestep"):
        taken = count
    elif policy.commit == "sequential":
        order, taken = np.arange(len(score)), count
    elif policy.commit == "longest_prefix":
        order, within = np.arange(len(score)), _reach(score, policy)
        taken = max(1, len(score) if within.all() else int(within.argmin()))
    elif policy.commit in ("threshold", "entropy_threshold"):
        taken = max(1, int(above.sum()))
    elif policy.commit == "dynamic":
        taken = max(int(above.sum()), count)
    elif policy.commit == "factor":
        taken = 1
        while taken < len(ranked) and ranked[taken] >= score_of(1 - policy.factor / (taken + 2)):
            taken += 1
    elif policy.commit == "entropy_bound":
        taken, before = 1, -ranked[0]
        while taken < len(ranked) and before <= policy.entropy_bound:
            taken, before = taken + 1, before - ranked[taken]
    else:
        raise ValueError(f"unknown commit rule {policy.commit!r}")
    if _finishes(score, policy):
        taken = len(score)
    chosen = np.zeros(len(score), bool)
    chosen[order[:taken]] = True
    return chosen


def _reach(score: np.ndarray, policy: Policy) -> np.ndarray:
    """Return the positions whose scores reach the threshold, bool ``[M]``."""
    is_entropy = policy.commit == "entropy_threshold"
    limit = -policy.entropy_bound if is_entropy else score_of(policy.threshold)
    found: np.ndarray = score > limit if policy.compare == ">" else score >= limit
    return found


def _finishes(score: np.ndarray, policy: Policy) -> bool:
    """Return True if a pass commits all undecided positions of a block, which have these scores."""
    limit = score_of(policy.finish_threshold)
    return policy.commit in FRACTION_RULES and bool(score.min() >= limit)


def _choose_ahead(turn: Turn, score: np.ndarray, policy: Policy) -> np.ndarray:
    """Choose positions of several blocks, at least one in each forced block of ``turn.started``.

    With ``compare`` ">=", the position with the highest score always commits, as in d3LLM's code
    for LLaDA. With ``compare`` ">", a position whose score does not reach the threshold commits
    only if it is the best one of a forced block, as in the code of D2F, and in d3LLM's code for
    Dream, or if it finishes its block.
    """
    is_low = policy.compare == ">" and not _reach(score, policy).any()
    chosen = np.zeros(len(score), bool) if is_low else choose(score, policy, 1)
    for first, last, is_forced in turn.started:
        is_inside = (first <= turn.positions) & (turn.positions < last)
        if _finishes(score[is_inside], policy):
            chosen |= is_inside
        elif is_forced and not (chosen & is_inside).any():
            chosen[np.argmax(np.where(is_inside, score, -np.inf))] = True
    return chosen


def choose_in(turn: Turn, guess: np.ndarray, score: np.ndarray, policy: Policy) -> np.ndarray:
    """Choose which positions of a turn to commit. Returns bool ``[M]``.

    ``guess`` int64 ``[M]`` contains the token proposed for each position, and ``score`` float64
    ``[M]`` contains the score of this token.
    """
    if policy.commit == "verify":
        chosen = np.zeros(len(guess), bool)
        if turn.drafted is not None:  # otherwise, a draft pass, which chooses no position
            chosen[: int((guess != turn.drafted).argmax()) + 1] = True
        return chosen
    if turn.standing is not None:
        is_edit = turn.standing >= 0
        is_surer = score > score_of(policy.edit_threshold)
        changed: np.ndarray = is_edit & (guess != turn.standing) & is_surer
        if not is_edit.all():
            changed[~is_edit] = choose(score[~is_edit], policy, turn.planned)
        return changed
    if not len(score):
        return np.zeros(0, bool)
    if turn.started:
        return _choose_ahead(turn, score, policy)
    if turn.is_forced:
        score = score.copy()
        # Give the first position the score of a prediction with probability 1.
        score[0] = 0.0 if scored_by(policy) == "entropy" else np.inf
    return choose(score, policy, turn.planned)
