"""The proposer of a constrained request in numpy: what the native loop's finds by classes and edges, found here by tokens.

Of all texts that the automaton accepts, and that have the decided tokens, it proposes the most likely one of the scored
positions, or a draw of theirs; behind these a text only has to be possible. A token's weight is its logit less that of the
row's best one, in float64, and sums are made from the last position on. Of equally likely texts the one whose tokens are lowest
wins, the leftmost first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from dlm_export.network.proposers import Proposals, Proposer, cut, scores, scores_of_draw
from dlm_export.network.turns import Canvas, Turn, gumbels, scored_by
from dlm_runtime.constraints.automaton import Automaton
from dlm_runtime.policy import Policy

_LEAST = -1e30  # of a token that the denoiser rules out
_CUT_OFF = -1e6  # added to what top_p and top_k cut


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


class Texts:
    """All texts of an automaton over some positions, each as likely as its tokens are together.

    A draw goes forward over sums that were made from the last position on (forward filtering and backward sampling, Carter and
    Kohn, 1994, the other way around).
    """

    def __init__(
        self, following: np.ndarray, state: int, choices: list[np.ndarray], weights: list[np.ndarray], ends: np.ndarray
    ) -> None:
        """From ``state`` on, one of each ``choices`` a position; ``weights`` float64 ``[V]`` by position are logarithms.

        ``following`` int64 ``[Q, V]``: see ``_Tokens``; ``ends`` bool ``[Q + 1]``: where a text may lead to.
        """
        self.following, self.state, self.choices, self.weights = following, state, choices, weights
        self.ahead: list[np.ndarray] = [
            np.where(ends, 0.0, -np.inf)
        ]  # by position, the sum over all ways on, logarithms [Q + 1]
        for tokens, weight in zip(reversed(choices), reversed(weights), strict=True):
            terms = weight[tokens] + self.ahead[0][following[:, tokens]]
            self.ahead.insert(0, np.append(np.logaddexp.reduce(terms, axis=1), -np.inf))

    def draw(self, seed: int, passes: int, first: int) -> np.ndarray:
        """The tokens int64 ``[N]`` of one text, by the noise that positions from ``first`` on have in this pass."""
        state, found = self.state, list[int]()
        for position, (tokens, weight) in enumerate(zip(self.choices, self.weights, strict=True)):
            noise = gumbels(seed, passes, first + position, self.following.shape[1])
            values = weight[tokens] + self.ahead[position + 1][self.following[state, tokens]] + noise[tokens]
            found.append(int(tokens[values.argmax()]))
            state = int(self.following[state, found[-1]])
        return np.array(found, np.int64)

    def marginals(self) -> np.ndarray:
        """How likely each token is at each position, float64 ``[N, V]``."""
        mass = np.zeros(len(self.following))
        mass[self.state] = 1
        found = np.zeros((len(self.choices), self.following.shape[1]))
        for position, (tokens, weight) in enumerate(zip(self.choices, self.weights, strict=True)):
            states = np.flatnonzero(mass)
            behind = self.following[states][:, tokens]
            ways = weight[tokens] + self.ahead[position + 1][behind] - self.ahead[position][states][:, None]
            shares = mass[states][:, None] * np.exp(ways)
            found[position, tokens] = shares.sum(axis=0)
            mass[:] = np.bincount(behind[shares > 0], shares[shares > 0], len(mass))
        return found


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
        choices = [self._choices(canvas, position) for position in range(first, last)]
        if turn.standing is not None:
            for position, row in row_of.items():
                if best_probs[row] > self.policy.edit_threshold:
                    choices[position - first] = np.unique([int(canvas.tokens[position]), int(best[row])])
        free = np.zeros(weights.shape[1])
        state, ends = self._state_before(canvas, first), self._ahead(canvas)[last]

        def by_position(rowed: np.ndarray) -> list[np.ndarray]:
            return [rowed[row_of[position]] if position in row_of else free for position in range(first, last)]

        def texts(rowed: np.ndarray) -> Texts:
            return Texts(self.tokens.following, state, choices, by_position(rowed), ends)

        is_drawn = self.policy.select == "sample" and turn.standing is None
        if is_drawn:
            drawn = texts(self._drawn(weights))
            text = drawn.draw(self.policy.seed, turn.passes, first)
        else:
            text = self._most_likely(state, choices, by_position(weights), ends)
        tokens = text[turn.positions - first]
        probs = best_probs * np.exp(wide[rows, tokens] - wide[rows, best])
        by, of = scored_by(turn, self.policy), self.policy.score_of
        if by == "random" or turn.standing is not None or not (of == "marginal" or (is_drawn and of == "draw")):
            return Proposals(tokens, self._scores(turn, logits, tokens, probs, best), probs)
        marginals = (drawn if of == "draw" else texts(weights)).marginals()[turn.positions - first]
        return Proposals(tokens, scores_of_draw(by, marginals, tokens), probs)

    def _drawn(self, weights: np.ndarray) -> np.ndarray:
        """The weights that draws have, float64 ``[M, V]``. What is cut is taken only where no text has less of it."""
        behind = weights / self.policy.temperature
        is_cut = self.policy.top_p < 1 or self.policy.top_k > 0
        kept = cut(behind, self.policy.top_p, self.policy.top_k)
        found: np.ndarray = behind + np.where((kept == 0) & is_cut, _CUT_OFF, 0)
        return found

    def _most_likely(self, state: int, choices: list[np.ndarray], weights: list[np.ndarray], ends: np.ndarray) -> np.ndarray:
        """The tokens int64 ``[N]`` of the heaviest text from a state on, one of each ``choices`` a position.

        ``weights`` float64 ``[V]`` by position; ``ends`` bool ``[Q + 1]``: where the text may lead to.
        """
        ahead = np.where(ends, 0.0, -np.inf)
        sums = list[np.ndarray]()  # by position, of the best way on from each state by each choice
        for tokens, weight in zip(reversed(choices), reversed(weights), strict=True):
            sums.append(ahead[self.tokens.following[:, tokens]] + weight[tokens])
            ahead = np.append(sums[-1].max(axis=1), -np.inf)
        found = list[int]()
        for tokens, sum_ in zip(choices, reversed(sums), strict=True):
            found.append(int(tokens[sum_[state].argmax()]))
            state = int(self.tokens.following[state, found[-1]])
        return np.array(found, np.int64)

    def complete(self, canvas: Canvas, guess: np.ndarray) -> np.ndarray:
        """The text with the fewest tokens that has what was proposed."""
        pinned = Canvas(np.where(canvas.undecided & (guess >= 0), guess, canvas.tokens), canvas.undecided & (guess < 0))
        choices = [self._choices(pinned, position) for position in range(self.first, self.last)]
        weights = np.full(self.tokens.following.shape[1], -1.0)
        weights[self.eos_token_id] = 0
        found: np.ndarray = guess.copy()
        ends = np.append(self.tokens.ends, False)
        found[self.first : self.last] = self._most_likely(0, choices, [weights] * len(choices), ends)
        return found

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
