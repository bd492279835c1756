"""Vocabularies and constraints that tests share."""

from __future__ import annotations

import hashlib
import json
import random
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dlm_runtime.constraints.compiled import CompileLimits, Constraint, Content, compile_content
from dlm_runtime.constraints.vocabulary import Vocabulary

# Strings of several characters, which mostly occur in JSON texts, and characters of several bytes.
PIECES = (
    '{"',
    '":',
    '":"',
    '","',
    '"}',
    "ab",
    "ba",
    "aab",
    "12",
    "-0",
    "true",
    "null",
    '{"a":',
    "\\n",
    "é",
    "\u20ac",
)


class Longest(Vocabulary):
    """A vocabulary whose tokenizer always chooses the longest possible token."""

    def first_tokens(self, texts: Sequence[str]) -> list[int]:
        fits = [
            [
                (len(spelled), token)
                for token, spelled in enumerate(self.tokens)
                if spelled and text.encode().startswith(spelled)
            ]
            for text in texts
        ]
        return [max(found)[1] if found else -1 for found in fits]


def made_up_vocabulary(
    size: int, never: Sequence[int], kind: type[Vocabulary] = Vocabulary
) -> Vocabulary:
    """A vocabulary of every printable ASCII character, ``PIECES``, and parts of UTF-8 characters,
    in arbitrary order. Entries whose ids are in ``never`` are None.
    """
    single = [bytes([byte]) for byte in range(0x20, 0x7F)]
    spelled = [
        *(piece.encode() for piece in PIECES),
        b"\xc3",
        b"\xa9",
        b"\xe2\x82",
        b"\xac",
        b"\xb6",
        b"\x9f",
        *single,
    ]
    order = np.random.default_rng(5).permutation(len(spelled))
    chosen = iter(spelled[index] for index in order)
    return kind(tuple(None if token in never else next(chosen, None) for token in range(size)))


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


@dataclass(frozen=True)
class Compiled(Automaton):
    """A constraint and its arrays."""

    constraint: Constraint


def compiled(
    content: Content | str, vocabulary: Vocabulary, size: int, ends: Sequence[int] = (7,)
) -> Compiled:
    """Compile a constraint for a vocabulary. A string is a regular expression."""
    wanted = Content("regex", content) if isinstance(content, str) else content
    made = compile_content(wanted, vocabulary=vocabulary, vocab_size=size, ends=ends)
    return Compiled(**vars(Automaton.from_bytes(made.data)), constraint=made)


def schema_content(schema: Any, **others: Any) -> Content:
    """The content of a JSON Schema that is passed as a Python value."""
    return Content("schema", json.dumps(schema), **others)


@dataclass(frozen=True)
class ByteAutomaton:
    """An automaton over bytes. State 0 is the start state.

    ``table`` int32 ``[Q, 256]`` is the next state for each state and byte, or -1 if there is none.
    ``accepting`` bool ``[Q]`` marks accepting states. ``distances`` int32 ``[Q]`` is the smallest
    number of bytes from each state to an accepting state.
    """

    table: np.ndarray
    accepting: np.ndarray
    distances: np.ndarray

    def matches(self, text: bytes | str) -> bool:
        """Whether the automaton accepts the whole text."""
        state = 0
        for byte in text.encode() if isinstance(text, str) else text:
            state = int(self.table[state, byte])
            if state < 0:
                return False
        return bool(self.accepting[state])


_BYTES = Vocabulary((*(bytes([byte]) for byte in range(256)), None))
_END = 256


def byte_automaton(content: Content | str, limits: CompileLimits | None = None) -> ByteAutomaton:
    """Compile a constraint for a vocabulary of single bytes, and return its automaton."""
    wanted = Content("regex", content) if isinstance(content, str) else content
    made = compile_content(
        wanted, limits, vocabulary=_BYTES, vocab_size=len(_BYTES.tokens), ends=(_END,)
    )
    found = Automaton.from_bytes(made.data)
    table = np.full((found.states, len(_BYTES.tokens)), -1, np.int32)
    for state in range(found.states):
        for edge in range(found.edge_starts[state], found.edge_starts[state + 1]):
            group = found.edge_groups[edge]
            classes = found.group_classes[found.group_starts[group] : found.group_starts[group + 1]]
            table[state, np.isin(found.token_class, classes)] = found.edge_states[edge]
    # The last state, which only an end token reaches, is left out.
    distances = np.asarray(found.distances[:-1], np.int32)
    return ByteAutomaton(table[:-1, :256], table[:-1, _END] >= 0, distances)


def following(automaton: Automaton, state: int, token: int) -> int:
    """Return the state after a token, or -1 if the token is not allowed."""
    for edge in range(automaton.edge_starts[state], automaton.edge_starts[state + 1]):
        group = automaton.edge_groups[edge]
        members = automaton.group_classes[
            automaton.group_starts[group] : automaton.group_starts[group + 1]
        ]
        if automaton.token_class[token] in members:
            return int(automaton.edge_states[edge])
    return -1


def drawn_text(
    texts: ByteAutomaton, source: random.Random, length: int, is_ascii: bool = False
) -> str:
    """Return a random text that an automaton accepts.

    The text consists of about ``length`` random bytes and the shortest possible ending. For half of
    the random bytes, the next state is chosen first and then the byte, so that the text also
    reaches rare states.
    """
    table = texts.table[:, :128] if is_ascii else texts.table
    distances = shortest_ends(texts, is_ascii)
    state, drawn = 0, bytearray()
    while True:
        choices = np.nonzero((table[state] >= 0) & (distances[table[state]] < len(table)))[0]
        if len(drawn) >= length:
            if distances[state] == 0:
                return drawn.decode()
            choices = choices[distances[table[state, choices]] < distances[state]]
        elif texts.accepting[state] and (not len(choices) or source.random() < 0.2):
            return drawn.decode()
        if source.random() < 0.5:
            states = np.unique(table[state, choices])
            choices = choices[table[state, choices] == states[source.randrange(len(states))]]
        byte = int(choices[source.randrange(len(choices))])
        drawn.append(byte)
        state = int(table[state, byte])


def drawn_texts(
    texts: ByteAutomaton, source: random.Random, count: int, is_ascii: bool = False
) -> set[str]:
    """Return ``count`` random texts that an automaton accepts, including a shortest text.

    If the automaton accepts fewer texts, the result has fewer texts.
    """
    if shortest_ends(texts, is_ascii)[0] == len(texts.table):
        return set()
    lengths = [0, *(source.choice((0, 1, 2, 4, 8, 20)) for _ in range(count - 1))]
    return {drawn_text(texts, source, length, is_ascii) for length in lengths}


def shortest_ends(texts: ByteAutomaton, is_ascii: bool = False) -> np.ndarray:
    """Return the smallest number of bytes from each state to an accepting state.

    With ``is_ascii``, only ASCII texts count. If no text leads to an accepting state, the result is
    the number of states.
    """
    if not is_ascii:
        return texts.distances
    table = texts.table[:, :128]
    distances = np.where(texts.accepting, 0, len(table))
    while True:
        following = np.where(table >= 0, distances[table], len(table)).min(axis=1)
        closer = np.minimum(distances, following + 1)
        if np.array_equal(closer, distances):
            return distances
        distances = closer


def one_class(
    vocab_size: int,
    tokens: Sequence[int],
    edges: Sequence[tuple[int, int]],
    distances: Sequence[int],
) -> Constraint:
    """Make a constraint that allows only ``tokens`` and treats them all alike.

    ``edges`` is a sorted list of pairs (state before a token, state after the token).
    """
    classes = [0 if token in tokens else -1 for token in range(vocab_size)]
    starts = [
        sum(1 for source, _ in edges if source < state) for state in range(len(distances) + 1)
    ]
    made_of = [0] * 8
    numbers = [
        vocab_size,
        len(distances),
        1,
        1,
        1,
        len(edges),
        *made_of,
        *classes,
        0,
        1,
        0,
        *starts,
    ]
    numbers += [to for _, to in edges] + [0] * len(edges) + list(distances)
    data = b"DLMAUTO\x01" + struct.pack(f"<{len(numbers)}i", *numbers)
    return Constraint(data + hashlib.sha256(data).digest())
