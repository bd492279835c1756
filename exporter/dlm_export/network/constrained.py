"""The proposer of a constrained request in numpy: what the native loop's finds by classes and edges, found here by tokens.

Of all texts that the automaton accepts, and that have the decided tokens, it proposes the most likely one of the scored
positions; behind these a text only has to be possible. A token's weight is its logit less that of the row's best one, in
float64, and sums are made from the last position on. Of equally likely texts the one whose tokens are lowest wins, the leftmost
first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from dlm_export.network.proposers import Proposals, Proposer, scores
from dlm_export.network.turns import Canvas, Turn, scored_by
from dlm_runtime.constraints.automaton import Automaton
from dlm_runtime.policy import Policy

_LEAST = -1e30  # of a token that the denoiser rules out


@dataclass(frozen=True, eq=False)
class _Tokens:
    """An automaton by tokens: ``following`` int64 ``[Q, V]``, the state behind each, -1 for none; ``ends`` bool ``[Q]``."""

    following: np.ndarray
    ends: np.ndarray


def _by_tokens(automaton: Automaton) -> _Tokens:
    by_class = np.full((automaton.states, automaton.classes + 1), -1, np.int64)
    for state in range(automaton.states):
        for edge in range(automaton.edge_starts[state], automaton.edge_starts[state + 1]):
            group = automaton.edge_groups[edge]
            members = automaton.group_classes[automaton.group_starts[group] : automaton.group_starts[group + 1]]
            by_class[state, members] = automaton.edge_states[edge]
    return _Tokens(by_class[:, automaton.token_class], automaton.distances == 0)


class Constrained(Proposer):
    """Keeps to an automaton from the first undecided position of a canvas to the last."""

    def __init__(self, mask_token_id: int, eos_token_id: int, policy: Policy, automaton: Automaton, canvas: Canvas) -> None:
        """``eos_token_id`` is written where any end token may stand, and no other. Raises ValueError where no text fits."""
        super().__init__(mask_token_id, policy)
        self.eos_token_id, self.tokens = eos_token_id, _by_tokens(automaton)
        wanted = np.flatnonzero(canvas.undecided)
        self.first, self.last = (int(wanted[0]), int(wanted[-1]) + 1) if len(wanted) else (0, 0)
        self.same_end = automaton.token_class == automaton.token_class[eos_token_id]
        if len(wanted) and not self._ahead(canvas)[self.first][0]:
            raise ValueError("no text of the constraint fits")

    def _choices(self, canvas: Canvas, position: int) -> np.ndarray:
        """The tokens that may stand at a position."""
        return np.arange(self.tokens.following.shape[1]) if canvas.undecided[position] else canvas.tokens[[position]]

    def _ahead(self, canvas: Canvas) -> dict[int, np.ndarray]:
        """By position: whether a text from each state on fits into what is left, bool ``[Q + 1]``, its last False."""
        found = {self.last: np.append(self.tokens.ends, False)}
        for position in range(self.last - 1, self.first - 1, -1):
            following = self.tokens.following[:, self._choices(canvas, position)]
            found[position] = np.append(found[position + 1][following].any(axis=1), False)
        return found

    def _state_before(self, canvas: Canvas, position: int) -> int:
        state = 0
        for token in canvas.tokens[self.first : position]:
            state = int(self.tokens.following[state, token])
        return state

    def propose(self, turn: Turn, canvas: Canvas, logits: Tensor) -> Proposals:
        if not len(turn.positions):
            return super().propose(turn, canvas, logits)
        logits = self.masked(logits)
        best = logits.argmax(-1).cpu().numpy()
        all_probs = logits.softmax(-1)
        rows, wide = np.arange(len(best)), logits.double().cpu().numpy()
        weights = np.maximum(wide - wide[rows, best][:, None], _LEAST)
        best_probs = all_probs.max(-1).values.double().cpu().numpy()
        row_of = {int(position): row for row, position in enumerate(turn.positions)}
        undecided = np.flatnonzero(canvas.undecided[self.first : self.last])
        first = min(int(turn.positions[0]), self.first + int(undecided[0]) if len(undecided) else self.last)
        last = int(turn.positions[-1]) + 1
        choices = {position: self._choices(canvas, position) for position in range(first, last)}
        if turn.standing is not None:
            for position, row in row_of.items():
                if best_probs[row] > self.policy.edit_threshold:
                    choices[position] = np.unique([int(canvas.tokens[position]), int(best[row])])
        ahead = {last: np.where(self._ahead(canvas)[last], 0.0, -np.inf)}
        for position in range(last - 1, first - 1, -1):
            ahead[position] = np.append(
                self._sums(position, choices, weights, row_of, ahead[position + 1]).max(axis=1), -np.inf
            )
        state, tokens = self._state_before(canvas, first), np.zeros(len(best), np.int64)
        for position in range(first, last):
            sums = self._sums(position, choices, weights, row_of, ahead[position + 1])[state]
            token = int(choices[position][sums.argmax()])
            state = int(self.tokens.following[state, token])
            if position in row_of:
                tokens[row_of[position]] = token
        probs = best_probs * np.exp(wide[rows, tokens] - wide[rows, best])
        return Proposals(tokens, self._scores(turn, logits, tokens, probs, best), probs)

    def _sums(
        self, position: int, choices: dict[int, np.ndarray], weights: np.ndarray, row_of: dict[int, int], ahead: np.ndarray
    ) -> np.ndarray:
        """The weight of the best way on from each state by each choice, float64 ``[Q, choices]``."""
        found: np.ndarray = ahead[self.tokens.following[:, choices[position]]]
        return found + weights[row_of[position], choices[position]] if position in row_of else found

    def _scores(self, turn: Turn, logits: Tensor, tokens: np.ndarray, probs: np.ndarray, best: np.ndarray) -> np.ndarray:
        by = scored_by(turn, self.policy)
        if by == "confidence":
            return probs
        if by == "margin":
            top = logits.softmax(-1).topk(2).values.double().cpu().numpy()
            found: np.ndarray = probs - np.where(tokens == best, top[:, 1], top[:, 0])
            return found
        return scores(turn, logits, self.policy)

    def scaffold(self, canvas: Canvas, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        first, last = max(first, self.first), min(last, self.last)
        wanted = first + np.flatnonzero(canvas.undecided[first:last])
        if not len(wanted):
            return wanted, wanted
        ahead, positions, found = self._ahead(canvas), list[int](), list[int]()
        met = np.zeros(len(self.tokens.ends), bool)
        met[0] = True
        for position in range(self.first, last):
            choices = self._choices(canvas, position)
            following = self.tokens.following[met][:, choices]
            possible = ahead[position + 1][following]
            allowed = choices[possible.any(axis=0)]
            if position in wanted and self.same_end[allowed].all():
                positions.append(position)
                found.append(self.eos_token_id)
            elif position in wanted and len(allowed) == 1:
                positions.append(position)
                found.append(int(allowed[0]))
            met = np.zeros(len(self.tokens.ends), bool)
            met[following[possible]] = True
        return np.array(positions, np.int64), np.array(found, np.int64)
