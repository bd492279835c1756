"""Reads the automaton of a compiled constraint.

The automaton defines which tokens lead from one state to another state. The native library builds
the automaton, and checks its arrays.

Two tokens are in the same *class* if, from every state, both lead to the same next state. For a
pair of states, the classes that lead from the first state to the second form a *group*. The time
that a constraint adds to a pass depends on the number of classes and groups. The size of the
vocabulary has almost no effect.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

_HEADER = struct.Struct("<8s6i32s")  # as in automaton.h: magic, version and sizes, made_of


@dataclass(frozen=True)
class Automaton:
    """The arrays of an automaton with Q states.

    All arrays are int32, and state 0 is the start state.

    ``distances`` ``[Q]`` contains the smallest number of tokens from each state to the end of a
    text. The distance is 0 for a state in which a text may end. ``token_class`` ``[V]`` contains
    the class of each token of the vocabulary, or -1 for a token that no state accepts. Group ``g``
    consists of the classes ``group_classes[group_starts[g] : group_starts[g + 1]]``, in ascending
    order.

    State ``s`` has the edges ``edge_starts[s] : edge_starts[s + 1]``. Edge ``e`` leads to the state
    ``edge_states[e]`` with the tokens of the group ``edge_groups[e]``. The edges of a state are
    ordered by the state to which they lead. A class is in the group of at most one of these edges.
    """

    token_class: np.ndarray
    group_starts: np.ndarray
    group_classes: np.ndarray
    edge_starts: np.ndarray
    edge_states: np.ndarray
    edge_groups: np.ndarray
    distances: np.ndarray

    @classmethod
    def from_bytes(cls, data: bytes) -> Automaton:
        """Parse the bytes of ``Constraint.data``."""
        _, vocab_size, states, _, groups, members, edges, _ = _HEADER.unpack_from(data)
        numbers = np.frombuffer(data[_HEADER.size : -32], "<i4").astype(np.int32)
        sizes = (vocab_size, groups + 1, members, states + 1, edges, edges, states)
        return cls(*np.split(numbers, np.cumsum(sizes)[:-1]))

    @property
    def states(self) -> int:
        return len(self.distances)

    @property
    def classes(self) -> int:
        return int(self.token_class.max(initial=-1)) + 1

    @property
    def shortest(self) -> int:
        """The number of tokens of the shortest text that the automaton accepts."""
        return int(self.distances[0])
