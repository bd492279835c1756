"""Vocabularies and constraints that tests share."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from dlm_runtime.constraints.automaton import Automaton, compile_automaton
from dlm_runtime.constraints.byte_automaton import ByteAutomaton, CompileLimits, byte_automaton
from dlm_runtime.constraints.vocabulary import Vocabulary

# What JSON is written with, pieces of these, and bytes that are no characters by themselves.
PIECES = ('{"', '":', '":"', '","', '"}', "ab", "ba", "aab", "12", "-0", "true", "null", '{"a":', "\\n", "é", "\u20ac")


class Longest(Vocabulary):
    """A vocabulary whose tokenizer takes the longest token that there is."""

    def first_tokens(self, texts: Sequence[str]) -> list[int]:
        fits = [
            [(len(spelled), token) for token, spelled in enumerate(self.tokens) if spelled and self._starts(token, text)]
            for text in texts
        ]
        return [max(found)[1] if found else -1 for found in fits]


def made_up_vocabulary(size: int, never: Sequence[int], kind: type[Vocabulary] = Vocabulary) -> Vocabulary:
    """Every printable byte, ``PIECES``, and parts of characters; in an order of its own, None for the ids of ``never``."""
    single = [bytes([byte]) for byte in range(0x20, 0x7F)]
    spelled = [*(piece.encode() for piece in PIECES), b"\xc3", b"\xa9", b"\xe2\x82", b"\xac", b"\xb6", b"\x9f", *single]
    order = np.random.default_rng(5).permutation(len(spelled))
    chosen = iter(spelled[index] for index in order)
    return kind(tuple(None if token in never else next(chosen, None) for token in range(size)))


def compiled(
    expression: str, vocabulary: Vocabulary, size: int, ends: Sequence[int] = (7,), is_of_json: bool = False
) -> Automaton:
    """An expression over a vocabulary."""
    return compile_automaton(byte_automaton(expression, CompileLimits(), is_of_json), vocabulary, size, ends, CompileLimits())


def following(automaton: Automaton, state: int, token: int) -> int:
    """The state behind a token, -1 for none; by the arrays as they are documented."""
    for edge in range(automaton.edge_starts[state], automaton.edge_starts[state + 1]):
        group = automaton.edge_groups[edge]
        members = automaton.group_classes[automaton.group_starts[group] : automaton.group_starts[group + 1]]
        if automaton.token_class[token] in members:
            return int(automaton.edge_states[edge])
    return -1


def drawn_texts(texts: ByteAutomaton, source: random.Random, count: int, is_ascii: bool = False) -> set[str]:
    """Random texts that an automaton accepts, its shortest among them; fewer than ``count`` where it has fewer."""
    table = texts.table[:, :128] if is_ascii else texts.table
    distance = np.where(texts.accepting, 0, len(table))
    while True:  # the fewest bytes to an accepting state
        near = np.where(table >= 0, distance[table], len(table)).min(axis=1) + 1
        if (near >= distance).all():
            break
        distance = np.minimum(distance, near)
    found = set[str]()
    for number in range(count if distance[0] < len(table) else 0):
        state, text, length = 0, bytearray(), source.choice((0, 1, 2, 4, 8, 20)) if number else 0
        while not (texts.accepting[state] and (len(text) >= length or (table[state] < 0).all())):
            steps = np.nonzero((table[state] >= 0) & (distance[table[state]] < len(table)))[0].tolist()
            if len(text) >= length:
                least = min(distance[table[state, step]] for step in steps) if steps else 0
                steps = [step for step in steps if distance[table[state, step]] == least]
            if not steps:
                break
            step = source.choice(steps)
            text.append(step)
            state = int(table[state, step])
        if texts.accepting[state]:
            found.add(text.decode())
    return found
