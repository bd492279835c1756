"""The seam between a pass and the choice of what commits: which token each scored row's position would take, and how surely.

Each request of a loop has a proposer, which lives as long as it does; ``turns`` ranks what it says, and ``proposer.h`` is the
same seam in the native loop, with the same names. Here every proposer sees whole rows of logits.

Rules that the papers leave open: the mask token is never proposed; of equal predictions the lowest id is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dlm_export.network.turns import Canvas, Turn, random_scores, scored_by
from dlm_runtime.policy import Policy


@dataclass(frozen=True, eq=False)
class Proposals:
    """What is proposed for a turn's positions, by row: tokens int64, their scores and their probabilities float64, all ``[M]``.

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
        """For the turn's positions, from the canvas that its pass saw and their raw logits fp32 ``[M, V]``."""
        logits = self.masked(logits)
        tokens = logits.argmax(-1)
        probs = logits.softmax(-1).gather(-1, tokens[:, None])[:, 0]
        return Proposals(tokens.cpu().numpy(), scores(turn, logits, self.policy), probs.double().cpu().numpy())

    def limit(self, turn: Turn, proposals: Proposals, chosen: np.ndarray) -> np.ndarray:
        """Which of the rows that the policy would commit, bool ``[M]``, may commit together; one at least, unless it edits."""
        return chosen

    def note(self, positions: np.ndarray, tokens: np.ndarray) -> None:
        """Told of what was committed, or changed by an edit: int64 both."""

    def masked(self, logits: Tensor) -> Tensor:
        """The logits without the mask token's."""
        logits = logits.clone()
        logits[:, self.mask_token_id] = -torch.inf
        return logits


def make_proposer(mask_token_id: int, policy: Policy) -> Proposer:
    """The proposer that a policy asks for."""
    return Proposer(mask_token_id, policy)


def scores(turn: Turn, logits: Tensor, policy: Policy) -> np.ndarray:
    """How sure the policy is of the best tokens of a turn's positions, float64 ``[M]``, from their logits fp32 ``[M, V]``
    without the mask token's; higher is surer."""
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
