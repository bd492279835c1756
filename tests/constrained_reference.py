"""A reference implementation of constrained requests, with exact arithmetic.

The native loop computes the same result faster, because it groups tokens that have the same effect
on the automaton. The reference considers every text that the constraint's automaton accepts and
that agrees with the decided tokens. The reference returns the most likely text, or a random text.
A pass may score only a part of the canvas. The positions after this part do not affect the choice,
but the chosen text must have a valid continuation that fits into them.

Texts are compared by three numbers. The first is the number of tokens with the logit -inf; fewer is
better. The second is the number of tokens that ``top_p`` or ``top_k`` excludes ("cut" tokens);
fewer is better. The second number only matters when a random text is drawn. The third is the sum of
the logits; larger is better. The sums are exact, because every float32 is an integer multiple of
2^-149. If all three numbers are equal, the texts are compared at the first position where they
differ, and the text with the lower token id is chosen.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from constraints import Automaton
from torch import Tensor

from dlm_export.network.commit_rules import log_odds_of, score_of, score_of_log_odds, scored_by
from dlm_export.network.loop_random import gumbels, temperature_of
from dlm_export.network.loop_scores import log_odds, score_edits, scores
from dlm_export.network.loop_turns import Canvas, Turn
from dlm_export.network.proposers import Proposals, Proposer, kept_tokens, scores_of_draw
from dlm_runtime.policy import Policy

_UNIT = 2**149  # every finite float32 is a whole number of 1 / _UNIT


class Weight(NamedTuple):
    """The weight of a text, or the combined weight of several texts.

    Python compares tuples field by field, and larger is better in every field. ``max`` of several
    weights is therefore the weight of the best text.
    """

    kept: int  # -1 * (number of tokens with the logit -inf)
    within: int  # -1 * (number of tokens that top_p or top_k excludes)
    logits: (
        int  # sum over all other tokens of (logit - best logit of the row), in units of 1 / _UNIT
    )
    texts: float = 0.0  # logarithm of (total weight of all texts / weight of the best text)

    def __add__(self, other: Weight) -> Weight:  # type: ignore[override]
        return Weight(
            self[0] + other[0], self[1] + other[1], self[2] + other[2], self[3] + other[3]
        )

    def log_ratio(self, other: Weight, temperature: float) -> float:
        """Return ln(p / q).

        p is the probability of the texts with this weight. q is the probability of the texts with
        the weight ``other``.
        """
        if self[:2] != other[:2]:
            return math.inf if self[:2] > other[:2] else -math.inf
        gap = (self.logits - other.logits) / _UNIT
        with np.errstate(over="ignore"):  # at tiny temperatures the quotient may be infinite
            return float(np.divide(gap, temperature)) + self.texts - other.texts


NOTHING = Weight(0, 0, 0)


def weight_of(logit: float, best: float, is_cut: bool = False) -> Weight:
    """Return the weight of one token.

    ``logit`` is a finite float32 or -inf. ``best`` is the largest logit of the row. ``is_cut`` says
    whether ``top_p`` or ``top_k`` excludes the token.
    """
    if logit == -np.inf:
        return Weight(-1, 0, 0)
    (a, b), (c, d) = float(logit).as_integer_ratio(), float(best).as_integer_ratio()
    return Weight(0, -int(is_cut), a * (_UNIT // b) - c * (_UNIT // d))


def _weigh(row: np.ndarray, best: float, token: int) -> Weight:
    return weight_of(row[token], best)


def total(weights: list[Weight], temperature: float) -> Weight:
    """Return the combined weight of several texts. ``weights`` must not be empty."""
    most = max(weights)
    return most._replace(
        texts=most.texts
        + math.log(math.fsum(math.exp(w.log_ratio(most, temperature)) for w in weights))
    )


@dataclass(frozen=True, eq=False)
class _Tokens:
    """A constraint's automaton as a table over all states and tokens.

    ``following`` int64 ``[Q, V]`` is the next state for each state and token, or -1 if the token is
    not allowed. ``ends`` bool ``[Q]`` marks accepting states.
    """

    following: np.ndarray
    ends: np.ndarray


def by_tokens(automaton: Automaton) -> _Tokens:
    """Return the automaton as a table."""
    by_class = np.full((automaton.states, automaton.classes + 1), -1, np.int64)
    for state in range(automaton.states):
        for edge in range(automaton.edge_starts[state], automaton.edge_starts[state + 1]):
            group = automaton.edge_groups[edge]
            members = automaton.group_classes[
                automaton.group_starts[group] : automaton.group_starts[group + 1]
            ]
            by_class[state, members] = automaton.edge_states[edge]
    return _Tokens(by_class[:, automaton.token_class], automaton.distances == 0)


# One position of a canvas: the tokens that are allowed there, and a function that returns the
# weight of a token.
Position = tuple[np.ndarray, Callable[[int], Weight]]


class Texts:
    """All texts that an automaton accepts and that fill a given sequence of positions.

    The weight of a text is the sum of the weights of its tokens.

    To draw a text, sums of weights are computed from the last position to the first. Then tokens
    are drawn from the first position to the last. This is the algorithm "forward filtering,
    backward sampling" (Carter and Kohn, 1994), with forward and backward exchanged.
    """

    def __init__(
        self,
        following: np.ndarray,
        state: int,
        positions: list[Position],
        ends: np.ndarray,
        temperature: float,
    ) -> None:
        """Find all texts from the automaton's state ``state`` on.

        ``following`` int64 ``[Q, V]`` is the next state for each state and token, or -1 if the
        token is not allowed. ``ends`` bool ``[Q + 1]`` marks accepting states. With temperature 0,
        only the best text is computed.
        """
        self.following, self.state, self.temperature = following, state, temperature
        met = [{state}]
        self.steps: list[
            dict[int, list[tuple[int, int]]]
        ] = []  # per position: state -> (token, next state) pairs
        for tokens, _ in positions:
            self.steps.append(
                {
                    at: [(int(t), int(following[at, t])) for t in tokens if following[at, t] >= 0]
                    for at in met[-1]
                }
            )
            met.append({to for ways in self.steps[-1].values() for _, to in ways})
        self.weights: list[dict[int, Weight]] = []  # per position: token -> weight
        for (_, weigh), ways in zip(positions, self.steps, strict=True):
            self.weights.append(
                {
                    token: weigh(token)
                    for token in {token for way in ways.values() for token, _ in way}
                }
            )
        # For each position, maps a state to the combined weight of all texts that continue from
        # this state. With temperature 0, it is the weight of the best of these texts.
        self.ahead: list[dict[int, Weight]] = [{at: NOTHING for at in met[-1] if ends[at]}]
        for ways, weights in zip(reversed(self.steps), reversed(self.weights), strict=True):
            found = dict[int, Weight]()
            for at, way in ways.items():
                terms = [
                    weights[token] + self.ahead[0][to] for token, to in way if to in self.ahead[0]
                ]
                if terms:
                    found[at] = total(terms, temperature) if temperature else max(terms)
            self.ahead.insert(0, found)

    def _ways(self, position: int, state: int) -> Iterable[tuple[int, int, Weight]]:
        """Yield each allowed token, the state after it, and the weight of the texts that start with
        it.
        """
        for token, to in self.steps[position][state]:
            if to in self.ahead[position + 1]:
                yield token, to, self.weights[position][token] + self.ahead[position + 1][to]

    def best(self) -> np.ndarray:
        """The tokens int64 ``[N]`` of the best text."""
        state, found = self.state, list[int]()
        for position in range(len(self.steps)):
            _, token, state = max(
                (weight, -token, to) for token, to, weight in self._ways(position, state)
            )
            found.append(-token)
        return np.array(found, np.int64)

    def draw(self, seed: int, passes: int, first: int) -> np.ndarray:
        """Draw one text, int64 ``[N]``.

        ``first`` is the position of the first token. The random numbers depend on ``seed``, on
        ``passes`` (the number of earlier passes) and on the position of each token.
        """
        state, found = self.state, list[int]()
        for position in range(len(self.steps)):
            noise = gumbels(seed, passes, first + position, self.following.shape[1])
            here = self.ahead[position][state]
            _, token, state = max(
                (weight.log_ratio(here, self.temperature) + noise[token], -token, to)
                for token, to, weight in self._ways(position, state)
            )
            found.append(-token)
        return np.array(found, np.int64)

    def marginals(self) -> np.ndarray:
        """The probability of each token at each position, float64 ``[N, V]``."""
        mass = {self.state: 1.0}
        found = np.zeros((len(self.steps), self.following.shape[1]))
        for position in range(len(self.steps)):
            after = dict[int, float]()
            for state, share in mass.items():
                for token, to, weight in self._ways(position, state):
                    own = share * math.exp(
                        weight.log_ratio(self.ahead[position][state], self.temperature)
                    )
                    found[position, token] += own
                    after[to] = after.get(to, 0.0) + own
            mass = {state: share for state, share in after.items() if share > 0}
        return found


class Constrained(Proposer):
    """Proposes tokens for a request with a constraint, from the first to the last undecided
    position.
    """

    def __init__(
        self,
        mask_token_id: int,
        eos_token_id: int,
        policy: Policy,
        automaton: Automaton,
        canvas: Canvas,
    ) -> None:
        """If the denoiser has several end tokens, only ``eos_token_id`` is written to the canvas.

        Raises ValueError if no text of the constraint fits into the canvas.
        """
        super().__init__(mask_token_id, policy)
        self.eos_token_id, self.tokens = eos_token_id, by_tokens(automaton)
        wanted = np.flatnonzero(canvas.undecided)
        self.first, self.last = (int(wanted[0]), int(wanted[-1]) + 1) if len(wanted) else (0, 0)
        self.same_end = automaton.token_class == automaton.token_class[eos_token_id]
        if len(wanted) and not self._ahead(canvas)[self.first][0]:
            raise ValueError("no text that the constraint accepts fits the canvas")

    def _choices(self, canvas: Canvas, position: int) -> np.ndarray:
        """Return the tokens that the canvas allows at a position: the decided token, or all tokens
        if the position is undecided.
        """
        return (
            np.arange(self.tokens.following.shape[1])
            if canvas.undecided[position]
            else canvas.tokens[[position]]
        )

    def _ahead(self, canvas: Canvas) -> dict[int, np.ndarray]:
        """For each position, return the states from which some text fits into the rest of the
        canvas.

        The states are an array bool ``[Q + 1]``. Its last entry is always False: index -1 means
        that a token is not allowed.
        """
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
        wide = logits.double().cpu().numpy()
        best = wide.argmax(-1)
        best_odds = log_odds(wide, best)
        row_of = {int(position): row for row, position in enumerate(turn.positions)}
        undecided = np.flatnonzero(canvas.undecided[self.first : self.last])
        first = min(
            int(turn.positions[0]), self.first + int(undecided[0]) if len(undecided) else self.last
        )
        last = int(turn.positions[-1]) + 1
        choices = [self._choices(canvas, position) for position in range(first, last)]
        threshold = log_odds_of(self.policy.edit_threshold)
        edited = [
            (position - first, int(best[row]))
            for position, row in row_of.items()
            if not canvas.undecided[position] and best_odds[row] > threshold
        ]
        for at, token in edited:
            choices[at] = np.unique([*choices[at], token])
        state, ahead = self._state_before(canvas, first), self._ahead(canvas)
        ends = ahead[last]
        if turn.drafted is not None:
            return self._propose_causally(turn, wide, state, ahead)
        is_drawn, temperature = self.policy.select == "sample", self._temperature(turn)
        by, of = scored_by(self.policy), self.policy.score_of

        def texts(temperature: float, is_cut: np.ndarray) -> Texts:
            def position(at: int) -> Position:
                if (row := row_of.get(at)) is None or (
                    temperature and len(choices[at - first]) == 1
                ):
                    return choices[at - first], lambda _: NOTHING
                return choices[at - first], lambda token: weight_of(
                    wide[row, token], wide[row, best[row]], is_cut[row, token]
                )

            return Texts(
                self.tokens.following,
                state,
                [position(at) for at in range(first, last)],
                ends,
                temperature,
            )

        nothing = np.zeros(wide.shape, bool)
        if edited:
            pinned = texts(0, nothing).best()
            for at, _ in edited:
                choices[at] = pinned[[at]]
        if is_drawn:
            drawn = texts(temperature, self._is_cut(wide, best, temperature))
            text = drawn.draw(self.policy.seed, turn.passes, first)
        else:
            text = texts(0, nothing).best()
        tokens = text[turn.positions - first]
        if by == "random" or not (of == "marginal" or (is_drawn and of == "draw")):
            found = self._scores(turn, wide, tokens)
        else:
            marginals = (drawn if of == "draw" else texts(1, nothing)).marginals()[
                turn.positions - first
            ]
            found = scores_of_draw(by, marginals, tokens)
        confidences = score_of_log_odds(log_odds(wide, tokens))
        return Proposals(tokens, score_edits(turn, found, confidences))

    def _temperature(self, turn: Turn) -> float:
        return temperature_of(self.policy, turn.step, turn.steps)

    def _propose_causally(
        self, turn: Turn, wide: np.ndarray, state: int, ahead: dict[int, np.ndarray]
    ) -> Proposals:
        """Choose or draw a legal token for each position, from left to right."""
        found, is_drawn = list[int](), self.policy.select == "sample"
        temperature = self._temperature(turn)
        is_cut = self._is_cut(wide, wide.argmax(-1), temperature) if is_drawn else None
        for at, (position, row) in enumerate(zip(turn.positions.tolist(), wide, strict=True)):
            following, ends = self.tokens.following, ahead[position + 1]
            if is_cut is None:
                legal = np.flatnonzero(ends[following[state]])
                found.append(int(legal[row[legal].argmax()]))
            else:

                def weigh(
                    token: int, row: np.ndarray = row, cut: np.ndarray = is_cut[at]
                ) -> Weight:
                    return weight_of(row[token], row.max(), cut[token])

                place: Position = (np.arange(len(row)), weigh)
                one = Texts(following, state, [place], ends, temperature)
                found.append(int(one.draw(self.policy.seed, turn.passes, position)[0]))
            state = int(self.tokens.following[state, found[-1]])
        tokens = np.array(found, np.int64)
        return Proposals(tokens, score_of_log_odds(log_odds(wide, tokens)))

    def find_best(self, turn: Turn, canvas: Canvas, logits: Tensor) -> np.ndarray:
        wide = self.masked(logits).double().cpu().numpy()
        best, first, last = wide.argmax(-1), int(turn.positions[0]), int(turn.positions[-1]) + 1
        assert turn.positions.tolist() == list(range(first, last))
        positions: list[Position] = [
            (np.arange(len(row)), functools.partial(_weigh, row, float(row[top])))
            for row, top in zip(wide, best, strict=True)
        ]
        state, ends = self._state_before(canvas, first), self._ahead(canvas)[last]
        return Texts(self.tokens.following, state, positions, ends, 0).best()

    def _is_cut(self, wide: np.ndarray, best: np.ndarray, temperature: float) -> np.ndarray:
        """Return the tokens that ``top_p`` or ``top_k`` excludes, as an array bool ``[M, V]``."""
        behind = wide - wide[np.arange(len(best)), best][:, None]
        return ~kept_tokens(behind / temperature, behind, self.policy.top_p, self.policy.top_k)

    def complete(self, canvas: Canvas, guess: np.ndarray) -> np.ndarray:
        """Return the shortest text that contains the tokens ``guess``, which the last pass
        predicted. In ``guess``, -1 means that a position has no token.
        """
        pinned = Canvas(
            np.where(canvas.undecided & (guess >= 0), guess, canvas.tokens),
            canvas.undecided & (guess < 0),
        )
        choices = [self._choices(pinned, position) for position in range(self.first, self.last)]

        def weigh(token: int) -> Weight:
            return weight_of(0.0 if token == self.eos_token_id else -1.0, 0.0)

        found: np.ndarray = guess.copy()
        ends = np.append(self.tokens.ends, False)
        positions: list[Position] = [(tokens, weigh) for tokens in choices]
        found[self.first : self.last] = Texts(self.tokens.following, 0, positions, ends, 0).best()
        return found

    def _scores(self, turn: Turn, logits: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        by, best = scored_by(self.policy), logits.argmax(-1)
        odds = log_odds(logits, tokens)
        if by == "confidence":
            found: np.ndarray = score_of_log_odds(odds)
            return found
        found = scores(turn, logits, self.policy)
        if by == "margin":
            p, best_p = (1 / (1 + np.exp(-each)) for each in (odds, log_odds(logits, best)))
            found = np.where(tokens == best, found, score_of(p - best_p))
        return found

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
