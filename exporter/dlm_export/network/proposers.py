"""The seam between a pass and the choice of what commits: which token each scored row's position
would take, and how surely.

Each request of a loop has a proposer, which lives as long as it does; ``turns`` ranks what it says,
and ``decode/proposer.h`` is the same seam in the native loop, with the same names. Here every
proposer sees whole rows of logits.

Rules that the papers leave open: the mask token is never proposed; of equal predictions the lowest
id is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dlm_export.network.turns import Canvas, Turn, gumbels, random_scores, scored_by
from dlm_runtime.policy import Policy


@dataclass(frozen=True, eq=False)
class Proposals:
    """What is proposed for a turn's positions, by row: tokens int64, their scores and their
    probabilities float64, all ``[M]``.

    A higher score is surer. Probabilities are of the softmax of what the denoiser said.
    """

    tokens: np.ndarray
    scores: np.ndarray
    probs: np.ndarray


class Proposer:
    """What a request takes of its passes; this one the best token of each row."""

    def __init__(self, mask_token_id: int, policy: Policy) -> None:
        self.mask_token_id, self.policy = mask_token_id, policy

    def propose(self, turn: Turn, canvas: Canvas, logits: Tensor) -> Proposals:
        """For the turn's positions, from the canvas that its pass saw and their raw logits fp32
        ``[M, V]``.
        """
        logits = self.masked(logits)
        tokens = logits.argmax(-1)
        probs = logits.softmax(-1).gather(-1, tokens[:, None])[:, 0]
        return Proposals(
            tokens.cpu().numpy(), scores(turn, logits, self.policy), probs.double().cpu().numpy()
        )

    def limit(self, turn: Turn, proposals: Proposals, chosen: np.ndarray) -> np.ndarray:
        """Which of the rows that the policy would commit, bool ``[M]``, may commit together; one at
        least, unless it edits.
        """
        return chosen

    def scaffold(self, canvas: Canvas, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        """What is certain of the undecided positions from ``first`` to before ``last``: these and
        their tokens, int64 both.
        """
        return np.zeros(0, np.int64), np.zeros(0, np.int64)

    def complete(self, canvas: Canvas, guess: np.ndarray) -> np.ndarray:
        """What undecided positions take where the request ends before all is decided, int64
        ``[L]``.

        ``guess`` int64 ``[L]`` is what the last pass proposed for them, -1 elsewhere. Where -1
        stays, an end token is taken.
        """
        return guess

    def note(self, positions: np.ndarray, tokens: np.ndarray) -> None:
        """Told of what was certain, committed, or changed by an edit: int64 both."""

    def masked(self, logits: Tensor) -> Tensor:
        """The logits without the mask token's."""
        logits = logits.clone()
        logits[:, self.mask_token_id] = -torch.inf
        return logits


class Sampled(Proposer):
    """A draw, in the log form of LLaDA's loop (arXiv:2502.09992): the largest of l/T and noise.

    An edit looks for better tokens, and so proposes the best one.
    """

    def propose(self, turn: Turn, canvas: Canvas, logits: Tensor) -> Proposals:
        if turn.standing is not None or not len(turn.positions):
            return super().propose(turn, canvas, logits)
        policy, logits = self.policy, self.masked(logits)
        best = logits.argmax(-1).cpu().numpy()
        best_probs = (
            logits.softmax(-1)
            .gather(-1, torch.from_numpy(best).to(logits.device)[:, None])
            .double()
            .cpu()
            .numpy()
        )
        rows = np.arange(len(best))
        wide = logits.double().cpu().numpy()
        behind = (wide - wide[rows, best][:, None]) / policy.temperature
        drawn = cut(behind, policy.top_p, policy.top_k)
        at = turn.positions.tolist()
        noise = np.stack(
            [gumbels(policy.seed, turn.passes, position, logits.shape[1]) for position in at]
        )
        tokens = np.where(drawn > 0, behind + noise, -np.inf).argmax(-1)
        probs = best_probs[:, 0] * np.exp(wide[rows, tokens] - wide[rows, best])
        by = scored_by(turn, policy)
        if by == "random":
            found = random_scores(turn, policy)
        elif policy.score_of == "draw":
            found = scores_of_draw(by, drawn, tokens)
        else:
            found = probs if by == "confidence" else scores(turn, logits, policy)
        return Proposals(tokens, found, probs)


def cut(behind: np.ndarray, top_p: float, top_k: int) -> np.ndarray:
    """The distributions that are drawn from, float64 ``[M, V]``, from tempered logits counted from
    the best.

    Of the ``top_k`` best tokens (0: all) as few as have a probability of more than ``top_p``
    together.
    """
    kept = np.where(kept_tokens(behind, behind, top_p, top_k), np.exp(behind), 0)
    found: np.ndarray = kept / kept.sum(-1, keepdims=True)
    return found


def kept_tokens(behind: np.ndarray, ranked_by: np.ndarray, top_p: float, top_k: int) -> np.ndarray:
    """The tokens that ``cut`` keeps, bool ``[M, V]``; higher ``ranked_by`` ``[M, V]`` are better,
    then lower ids.
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
    """Scores float64 ``[M]`` of tokens drawn from distributions ``[M, V]``."""
    if by == "entropy":
        found: np.ndarray = (drawn * np.log(np.where(drawn > 0, drawn, 1))).sum(-1)
    elif by == "margin":
        best = np.sort(drawn, -1)[:, -2:]
        found = best[:, 1] - best[:, 0]
    else:
        found = drawn[np.arange(len(tokens)), tokens]
    return found


def make_proposer(mask_token_id: int, policy: Policy) -> Proposer:
    """The proposer that a policy asks for."""
    return (Sampled if policy.select == "sample" else Proposer)(mask_token_id, policy)


def scores(turn: Turn, logits: Tensor, policy: Policy) -> np.ndarray:
    """How sure the policy is of the best tokens of a turn's positions, float64 ``[M]``, from their
    logits fp32 ``[M, V]`` without the mask token's; higher is surer.
    """
    by = scored_by(turn, policy)
    if by == "random":
        return random_scores(turn, policy)
    probs = logits.softmax(-1)
    if by == "entropy":
        found = (probs * (probs + 1e-10).log()).sum(-1)
    else:
        best = probs.topk(2).values
        found = best[:, 0] - best[:, 1] if by == "margin" else best[:, 0]
    return found.double().cpu().numpy()
