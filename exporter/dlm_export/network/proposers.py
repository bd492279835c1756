"""Defines proposers, which choose a token and its score for each position that may commit.

Every request has its own proposer. The unmasking loop then commits the tokens that the module
``commit_rules`` chooses by score. A turn is one pass and the commit after it. ``decode/proposer.h``
defines the same interface for the native loop, with the same names. The proposers in this module
get the logits of the whole vocabulary.

The papers of the decoding algorithms do not define two rules: the mask token is never proposed, and
if several tokens have equal logits, the token with the lowest id is proposed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dlm_export.network.commit_rules import score_of, score_of_log_odds, scored_by
from dlm_export.network.loop_random import gumbels, temperature_of
from dlm_export.network.loop_scores import log_odds, score_edits, scores
from dlm_export.network.loop_turns import Canvas, Turn
from dlm_runtime.policy import Policy


@dataclass(frozen=True, eq=False)
class Proposals:
    """The proposed tokens for a turn's positions, int64 ``[M]``, and their scores, float64 ``[M]``.

    ``turns.scores`` explains scores.
    """

    tokens: np.ndarray
    scores: np.ndarray


class Proposer:
    """Chooses the tokens that a request may commit.

    This base class proposes the most likely token of each position.
    """

    def __init__(self, mask_token_id: int, policy: Policy) -> None:
        self.mask_token_id, self.policy = mask_token_id, policy

    def propose(self, turn: Turn, canvas: Canvas, logits: Tensor) -> Proposals:
        """Propose tokens for the turn's positions.

        ``canvas`` is the canvas that the pass computed, and ``logits`` are the raw logits of the
        positions, fp32 ``[M, V]``.
        """
        found = self.masked(logits).cpu().numpy()
        return Proposals(found.argmax(-1), scores(turn, found, self.policy))

    def find_best(self, turn: Turn, canvas: Canvas, logits: Tensor) -> np.ndarray:
        """Return the most likely text of the turn's positions, int64 ``[M]``.

        The loop uses it with ``remask`` "noise". ``propose`` explains the arguments.
        """
        found: np.ndarray = self.masked(logits).argmax(-1).cpu().numpy()
        return found

    def scaffold(self, canvas: Canvas, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the positions in ``[first, last)`` with only one possible token, and the tokens.

        Both arrays are int64.
        """
        return np.zeros(0, np.int64), np.zeros(0, np.int64)

    def complete(self, canvas: Canvas, guess: np.ndarray) -> np.ndarray:
        """Return tokens, int64 ``[L]``, for the undecided positions of a request that stops early.

        ``guess`` int64 ``[L]`` contains the tokens that the last pass proposed, and -1 for all
        other positions. Positions that are still -1 in the result are filled with an end token.
        """
        return guess

    def note(self, positions: np.ndarray, tokens: np.ndarray) -> None:
        """The loop calls this method after it wrote ``tokens`` to ``positions`` of the canvas.

        Both arrays are int64.
        """

    def masked(self, logits: Tensor) -> Tensor:
        """Return a copy of the logits in which the mask token has the logit minus infinity."""
        logits = logits.clone()
        logits[:, self.mask_token_id : self.mask_token_id + 1] = -torch.inf
        return logits


class Sampled(Proposer):
    """Samples tokens as LLaDA's loop does (arXiv:2502.09992).

    The proposed token has the largest sum of logit / T and Gumbel noise, where T is the
    temperature. Edits write the proposed tokens too, as in LLaDA2.1's code.
    """

    def propose(self, turn: Turn, canvas: Canvas, logits: Tensor) -> Proposals:
        if not len(turn.positions):
            return super().propose(turn, canvas, logits)
        policy, wide = self.policy, self.masked(logits).double().cpu().numpy()
        temperature = temperature_of(policy, turn.step, turn.steps)
        behind = (wide - wide.max(-1, keepdims=True)) / temperature
        drawn = cut(behind, policy.top_p, policy.top_k)
        at = turn.positions.tolist()
        noise = np.stack(
            [gumbels(policy.seed, turn.passes, position, logits.shape[1]) for position in at]
        )
        tokens = np.where(drawn > 0, behind + noise, -np.inf).argmax(-1)
        by, confidences = scored_by(policy), score_of_log_odds(log_odds(wide, tokens))
        if policy.score_of == "draw" and by != "random":
            found = scores_of_draw(by, drawn, tokens)
            confidences = score_of(drawn[np.arange(len(tokens)), tokens])
        elif by == "confidence":
            found = confidences
        else:
            found = scores(turn, wide, policy)
        return Proposals(tokens, score_edits(turn, found, confidences))


def cut(behind: np.ndarray, top_p: float, top_k: int) -> np.ndarray:
    """Return the probabilities to sample from, float64 ``[M, V]``.

    ``behind`` contains the logits divided by the temperature, minus the largest such quotient in
    the same row. First, the function selects the ``top_k`` most likely tokens (0 means all tokens).
    From these tokens, the function then selects the most likely tokens until their probabilities
    add up to more than ``top_p``. All other tokens get probability 0.
    """
    kept = np.where(kept_tokens(behind, behind, top_p, top_k), np.exp(behind), 0)
    found: np.ndarray = kept / kept.sum(-1, keepdims=True)
    return found


def kept_tokens(behind: np.ndarray, ranked_by: np.ndarray, top_p: float, top_k: int) -> np.ndarray:
    """Return the tokens that ``cut`` selects, as bool ``[M, V]``.

    Tokens are ranked by ``ranked_by`` ``[M, V]``, highest first. Tokens with equal values are
    ranked by id, lowest first.
    """
    order = np.argsort(-ranked_by, axis=-1, kind="stable")
    ranked = np.take_along_axis(np.exp(behind), order, -1)
    before = np.cumsum(ranked, -1) - ranked
    is_kept = (
        np.ones_like(ranked, bool)
        if top_p >= 1
        else before <= top_p * ranked.sum(-1, keepdims=True)
    )
    is_kept[:, 0] = True
    if top_k:
        is_kept[:, top_k:] = False
    kept = np.zeros_like(is_kept)
    np.put_along_axis(kept, order, is_kept, -1)
    return kept


def scores_of_draw(by: str, drawn: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Return the scores, float64 ``[M]``, of tokens that were sampled from ``drawn`` ``[M, V]``."""
    if by == "entropy":
        found: np.ndarray = (drawn * np.log(np.where(drawn > 0, drawn, 1))).sum(-1)
    elif by == "margin":
        best = np.sort(drawn, -1)[:, -2:]
        found = score_of(best[:, 1] - best[:, 0])
    else:
        found = score_of(drawn[np.arange(len(tokens)), tokens])
    return found


def make_proposer(mask_token_id: int, policy: Policy) -> Proposer:
    return (Sampled if policy.select == "sample" else Proposer)(mask_token_id, policy)
