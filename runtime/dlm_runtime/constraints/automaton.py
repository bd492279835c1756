"""A byte automaton over a vocabulary: which tokens lead from state to state. Compiled here, read by
the native loop.

Tokens that behave alike in every state are a *class*; the classes that lead from one state to
another are a *group*. So what the loop does a pass grows with classes and groups, and hardly with
the vocabulary. Where only one text can follow a state, its tokens are those that the tokenizer
makes of it: the texts stay what they are, and the loop can tell such tokens in advance.

The file is little-endian: the header of ``_HEADER``, the arrays of ``_ARRAYS`` in this order, and
the SHA-256 of all before it.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dlm_runtime.constraints.byte_automaton import (
    Budget,
    ByteAutomaton,
    CompileLimits,
    fewest_steps,
)
from dlm_runtime.constraints.vocabulary import Vocabulary
from dlm_runtime.errors import RequestError

MAGIC = b"DLMAUTO\x01"
# Behind the magic: vocabulary, states, classes, groups, members of all groups, edges; 32 bytes that
# say what it was made of.
_HEADER = struct.Struct("<8s6i32s")
MADE_OF = slice(_HEADER.size - 32, _HEADER.size)  # where the file says what it was made of
_ARRAYS = (
    "token_class",
    "group_starts",
    "group_classes",
    "edge_starts",
    "edge_states",
    "edge_groups",
    "distances",
)
# The walk over the tokens, and the groups, may have this many times as many rows as the limit of
# edges.
_ROWS_PER_EDGE = 16
_ROW_BYTES = 64  # Peak memory for one row of the walk.
_ENCODED_BYTES = 96  # of the text that can follow a state, the tokenizer is asked about so many


@dataclass(frozen=True)
class Automaton:
    """All arrays are int32. State 0 is the first; ``distances`` ``[Q]`` are the fewest tokens to
    where a text may end, 0 there.

    ``token_class`` ``[V]`` is -1 for tokens that lead nowhere. Group ``g`` has the classes
    ``group_classes[group_starts[g] : group_starts[g + 1]]``, ascending; state ``s`` has the edges
    ``edge_starts[s] : edge_starts[s + 1]``, each to a state of ``edge_states`` by a group of
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
        """What ``as_bytes`` made; the native library is who checks files."""
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
        """The tokens of the shortest text."""
        return int(self.distances[0])

    def as_bytes(self, made_of: bytes = bytes(32)) -> bytes:
        """The file. ``made_of``: 32 bytes that tell what it was made of."""
        sizes = (len(self.token_class), self.states, self.classes, len(self.group_starts) - 1)
        head = _HEADER.pack(MAGIC, *sizes, len(self.group_classes), len(self.edge_states), made_of)
        data = b"".join([head, *(getattr(self, name).astype("<i4").tobytes() for name in _ARRAYS)])
        return data + hashlib.sha256(data).digest()


def compile_automaton(
    texts: ByteAutomaton,
    vocabulary: Vocabulary,
    vocab_size: int,
    ends: Sequence[int],
    limits: CompileLimits,
    budget: Budget | None = None,
) -> Automaton:
    """The automaton of token ids below ``vocab_size`` whose texts ``texts`` accepts.

    Where a text may end, any number of ``ends`` may follow. ``budget`` is the time left; the
    default is all of ``limits``. Raises RequestError when no tokens make such a text, and when a
    limit is reached.
    """
    budget = budget or Budget(limits)
    kinds, _ = texts.alphabet
    states = len(texts.table)
    spelled = [
        (token, text)
        for token, text in enumerate(vocabulary.tokens[:vocab_size])
        if text and token not in ends
    ]
    # Tokens whose bytes are alike one by one behave alike; each such string is walked once.
    strings: dict[bytes, list[int]] = {}
    alike = kinds.astype(np.uint8).tobytes()
    for token, text in spelled:
        strings.setdefault(text.translate(alike), []).append(token)
    members = list(strings.values())
    walks = _walk(texts, kinds, list(strings), budget)
    walks = _as_encoded(
        texts,
        vocabulary,
        walks,
        members,
        np.array([len(each) for each in strings], np.int64),
        budget,
    )
    numbers, first_of = _alike(walks, len(members), budget)
    token_class = np.full(vocab_size, -1, np.int32)
    for number, tokens in zip(numbers, members, strict=True):
        token_class[tokens] = number
    classes = len(first_of)
    keep = first_of[numbers[walks[:, 0]]] == walks[:, 0] if classes else np.zeros(len(walks), bool)
    edges = walks[keep]
    edges[:, 0] = numbers[edges[:, 0]]
    token_class[list(ends)] = classes
    stops = [(classes, int(state), states) for state in (*np.nonzero(texts.accepting)[0], states)]
    edges = np.concatenate((edges, np.array(stops, np.int32)))
    return _assembled(token_class, edges, np.append(texts.accepting, True), budget)


def _walk(
    texts: ByteAutomaton, kinds: np.ndarray, strings: Sequence[bytes], budget: Budget
) -> np.ndarray:
    """The state that each string leads to from each state, int32 ``[N, 3]``: string, state, next
    state; by string and state.
    """
    columns = np.full((len(texts.table), int(kinds.max()) + 1), -1, np.int32)
    columns[:, kinds] = texts.table
    # A tree of the strings: each node is a beginning, with its children by one byte more.
    numbers = {text: number for number, text in enumerate(strings)}
    children: dict[bytes, list[bytes]] = {}
    known = {b""}
    for number, text in enumerate(strings):
        if number % 1024 == 0:
            budget.check()
        for length in range(1, len(text) + 1):
            if text[:length] not in known:
                known.add(text[:length])
                children.setdefault(text[: length - 1], []).append(text[:length])
    found, total = dict[int, np.ndarray](), 0
    every = np.arange(len(columns), dtype=np.int32)
    open_nodes = [
        (b"", every, every)
    ]  # with the states where they start and the states where they lead
    while open_nodes:
        text, starts, places = open_nodes.pop()
        for child in children.get(text, ()):
            budget.check()
            reached = columns[places, child[-1]]
            is_alive = reached >= 0
            if not is_alive.any():
                continue
            kept = (starts[is_alive], reached[is_alive])
            open_nodes.append((child, *kept))
            if child in numbers:
                found[numbers[child]] = np.column_stack(
                    (np.full_like(kept[0], numbers[child]), *kept)
                )
                total += len(kept[0])
                if total > _ROWS_PER_EDGE * budget.limits.edges:
                    raise _too_many(total, budget.limits)
                budget.check_memory(_ROW_BYTES * total)
    if not found:
        return np.zeros((0, 3), np.int32)
    return np.concatenate([found[number] for number in sorted(found)])


def _too_many(edges: int, limits: CompileLimits) -> RequestError:
    return RequestError(
        f"regex: its tokens make {edges} edges or more, and {limits.edges} are the limit: make counts smaller, or raise limits"
    )


def _as_encoded(
    texts: ByteAutomaton,
    vocabulary: Vocabulary,
    walks: np.ndarray,
    members: Sequence[list[int]],
    lengths: np.ndarray,
    budget: Budget,
) -> np.ndarray:
    """The walks, where a forced text keeps only the token that the tokenizer starts it with, and
    tokens that go beyond it.
    """
    is_alive = texts.table >= 0
    is_inside = (is_alive.sum(axis=1) == 1) & ~texts.accepting
    only_byte = is_alive.argmax(axis=1)
    target = texts.table[np.arange(len(texts.table)), only_byte]
    follows = dict[
        int, bytes
    ]()  # what has to follow a state, as far as the tokenizer is asked, and how much it is
    left = np.zeros(len(texts.table), np.int64)
    for state in np.nonzero(is_inside)[0].tolist():
        path, at = list[int](), state
        while is_inside[at] and not left[at]:
            path.append(at)
            at = int(target[at])
        for length, each in enumerate(reversed(path), int(left[at]) + 1):
            left[each] = length
    for state in np.nonzero(is_inside)[0].tolist():
        budget.check()
        text, at = bytearray(), state
        while is_inside[at] and len(text) < _ENCODED_BYTES:
            text.append(only_byte[at])
            at = int(target[at])
        follows[state] = _whole(bytes(text))
    asked = [state for state, text in follows.items() if text]
    wanted = np.full(len(texts.table), -1, np.int64)
    by_token = {token: number for number, tokens in enumerate(members) for token in tokens}
    for state, token in zip(
        asked, vocabulary.first_tokens([follows[state].decode() for state in asked]), strict=True
    ):
        wanted[state] = by_token.get(token, -1)
    string, state = walks[:, 0], walks[:, 1]
    keep = (wanted[state] < 0) | (wanted[state] == string) | (lengths[string] > left[state])
    kept: np.ndarray = walks[keep]
    return kept


def _whole(text: bytes) -> bytes:
    """The whole characters that UTF-8 starts with; nothing if it starts inside one."""
    return (
        text.decode("utf-8", "ignore").encode()
        if text[:1] < b"\x80" or text[:1] >= b"\xc0"
        else b""
    )


def _alike(walks: np.ndarray, strings: int, budget: Budget) -> tuple[np.ndarray, np.ndarray]:
    """The class of each string, -1 for those that lead nowhere, and the first string of each class."""
    numbers = np.full(strings, -1, np.int64)
    starts = np.searchsorted(walks[:, 0], np.arange(strings + 1))
    behaviours = dict[bytes, int]()
    first_of = list[int]()
    pairs = np.ascontiguousarray(walks[:, 1:])
    for string in np.nonzero(np.diff(starts))[0].tolist():
        budget.check()
        behaviour = pairs[starts[string] : starts[string + 1]].tobytes()
        if behaviour not in behaviours:
            behaviours[behaviour] = len(first_of)
            first_of.append(string)
        numbers[string] = behaviours[behaviour]
    return numbers, np.array(first_of, np.int64)


def _assembled(
    token_class: np.ndarray, edges: np.ndarray, accepting: np.ndarray, budget: Budget
) -> Automaton:
    """The automaton of edges int32 ``[N, 3]`` (class, state, next state), without states that are
    on no text's path.
    """
    distances = fewest_steps(
        np.nonzero(accepting)[0].tolist(), edges[:, 2], edges[:, 1], len(accepting), budget
    )
    if distances[0] < 0:
        raise RequestError("constraint: no tokens of this vocabulary make a text that it allows")
    edges = edges[(distances[edges[:, 1]] >= 0) & (distances[edges[:, 2]] >= 0)]
    is_met = fewest_steps([0], edges[:, 1], edges[:, 2], len(accepting), budget) >= 0
    edges = edges[is_met[edges[:, 1]]]
    renamed = np.cumsum(is_met) - 1
    states = int(is_met.sum())
    edges[:, 1:] = renamed[edges[:, 1:]]
    # Classes that only what was left out had lead nowhere.
    kept_classes, classes = np.unique(edges[:, 0], return_inverse=True)
    lookup = np.full(
        int(max(token_class.max(initial=-1), kept_classes.max(initial=-1))) + 2, -1, np.int32
    )
    lookup[kept_classes] = np.arange(len(kept_classes))
    edges[:, 0] = classes
    edges = edges[np.lexsort((edges[:, 0], edges[:, 2], edges[:, 1]))]
    budget.check()
    pairs, starts = np.unique(
        edges[:, 1].astype(np.int64) * states + edges[:, 2], return_index=True
    )
    if len(pairs) > budget.limits.edges:
        raise _too_many(len(pairs), budget.limits)
    groups, edge_groups = dict[bytes, int](), list[int]()
    column = np.ascontiguousarray(edges[:, 0])
    for first, last in zip(starts.tolist(), [*starts[1:].tolist(), len(edges)], strict=True):
        edge_groups.append(groups.setdefault(column[first:last].tobytes(), len(groups)))
    made = [np.frombuffer(each, np.int32) for each in groups]
    sizes = [len(each) for each in made]
    if sum(sizes) > _ROWS_PER_EDGE * budget.limits.edges:
        raise _too_many(sum(sizes), budget.limits)
    return Automaton(
        token_class=lookup[token_class],
        group_starts=np.cumsum([0, *sizes]).astype(np.int32),
        group_classes=np.concatenate(made).astype(np.int32) if made else np.zeros(0, np.int32),
        edge_starts=np.searchsorted(pairs, np.arange(states + 1) * states).astype(np.int32),
        edge_states=(pairs % states).astype(np.int32),
        edge_groups=np.array(edge_groups, np.int32),
        distances=distances[is_met].astype(np.int32),
    )
