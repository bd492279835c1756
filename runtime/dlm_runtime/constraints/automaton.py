"""The arrays of a compiled constraint, which the native library makes and checks: the tokens that
lead from state to state.

A *class* holds the tokens that behave alike in every state. A *group* holds the classes that lead
from one state to another. So the work of a pass grows with classes and groups, and hardly with the
vocabulary.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

_HEADER = struct.Struct("<8s6i32s")  # magic, version and sizes, made_of; see automaton.h


@dataclass(frozen=True)
class Automaton:
    """All arrays are int32. State 0 is the start state. ``distances`` ``[Q]``: the fewest tokens
    from each state to the end of a text; 0 if a text may end there.

    ``token_class`` ``[V]`` is -1 for tokens that lead nowhere. Group ``g`` has the classes
    ``group_classes[group_starts[g] : group_starts[g + 1]]``, ascending. State ``s`` has the edges
    ``edge_starts[s] : edge_starts[s + 1]``: each leads to a state of ``edge_states`` by a group of
    ``edge_groups``, ascending by state. A state's groups share no class.
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
        """Parse the content of ``Constraint.data``."""
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
        """Tokens of the shortest text."""
        return int(self.distances[0])
