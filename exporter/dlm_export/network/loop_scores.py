"""Scores of the unmasking loop, which say how sure a denoiser is of a token."""

from __future__ import annotations

import numpy as np

from dlm_export.network.commit_rules import score_of, score_of_log_odds, scored_by
from dlm_export.network.loop_random import random_score
from dlm_export.network.loop_turns import Turn
from dlm_runtime.policy import Policy

LEAST_ENTROPY = 1e-30
"""Entropies nearer to 0 than this count as 0, because fp32 cannot hold much smaller numbers."""


def log_odds(logits: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Return ln(p / (1 - p)) for the probabilities p of tokens, float64 ``[M]``.

    ``logits`` is ``[M, V]``, and ``tokens`` contains one token of each row. The odds are computed
    from the sum of the other tokens' exponentials, without a subtraction from 1.
    """
    rows, wide = np.arange(len(tokens)), logits.astype(np.float64)
    own = wide[rows, tokens]
    wide[rows, tokens] = -np.inf
    most = wide.max(-1)
    most[np.isneginf(most)] = 0
    with np.errstate(divide="ignore"):
        found: np.ndarray = own - most - np.log(np.exp(wide - most[:, None]).sum(-1))
    return found


def scores(turn: Turn, logits: np.ndarray, policy: Policy) -> np.ndarray:
    """Return the scores, float64 ``[M]``, of the most likely tokens at a turn's positions.

    A higher score means a surer token. A score is an entropy, or comes from ``score_of``. ``logits``
    ``[M, V]`` exclude the mask token.
    """
    by, odds = scored_by(policy), log_odds(logits, logits.argmax(-1))
    confidences = score_of_log_odds(odds)
    if by == "random":
        positions = turn.positions.tolist()
        found = score_of(np.array([random_score(policy.seed, turn.passes, at) for at in positions]))
    elif by == "confidence":
        found = confidences
    elif by == "margin":
        second, best = np.sort(np.partition(logits, -2, axis=-1)[:, -2:], -1).astype(np.float64).T
        behind = second - best
        with np.errstate(divide="ignore"):
            margin = np.log(-np.expm1(behind)) - np.logaddexp(-odds, behind)
        found = score_of_log_odds(margin)
    else:
        behind = logits.astype(np.float64) - logits.max(-1, keepdims=True)
        weights = np.exp(behind)
        weights[np.arange(len(weights)), logits.argmax(-1)] = 0
        others = weights.sum(-1)
        mean = (weights * np.where(weights > 0, behind, 0)).sum(-1) / (1 + others)
        found = mean - np.log1p(others)
        found[found > -LEAST_ENTROPY] = 0
    return score_edits(turn, found, confidences)


def score_edits(turn: Turn, found: np.ndarray, confidences: np.ndarray) -> np.ndarray:
    """Replace the scores ``found`` of decided positions by the scores of the confidences.

    Edits compare probabilities, whatever the policy's score is. All arrays are float64 ``[M]``.
    """
    return found if turn.standing is None else np.where(turn.standing >= 0, confidences, found)
