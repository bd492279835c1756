"""A regular expression as an automaton over bytes: made by outlines-core in a process with limits, then minimised."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dlm_runtime.constraints.expressions import spelled_out
from dlm_runtime.errors import DlmError, RequestError

_WORKER = Path(__file__).with_name("_regex_worker.py")
# What outlines-core says: where a state is reached that nothing leaves; where a text may only begin at ^; and of a bracket that
# is open, look-around or a back-reference.
_NO_MATCH, _ANCHORED, _NOT_READ = "Found no transitions", "anchored universal start state", "error building NFA"
_CHARACTER = 1  # the byte that expressions.CHARACTER is
# A character of a JSON string: where bytes of a range lead to from its first on; 0 is behind the character, the others wait for
# what _INSIDE has of them, in order: one, two or three bytes more in UTF-8, those whose next byte is of a part, and an escape.
# From U+00A0 on, without surrogates.
_LEADS = (
    *((0x20, 0x21, 0), (0x23, 0x5B, 0), (0x5C, 0x5C, 9), (0x5D, 0x7E, 0)),
    *((0xC2, 0xC2, 4), (0xC3, 0xDF, 1), (0xE0, 0xE0, 5), (0xE1, 0xEC, 2), (0xED, 0xED, 6), (0xEE, 0xEF, 2)),
    *((0xF0, 0xF0, 7), (0xF1, 0xF3, 3), (0xF4, 0xF4, 8)),
)
_INSIDE = (
    *((range(0x80, 0xC0), 0), (range(0x80, 0xC0), 1), (range(0x80, 0xC0), 2)),
    *((range(0xA0, 0xC0), 0), (range(0xA0, 0xC0), 1), (range(0x80, 0xA0), 1), (range(0x90, 0xC0), 2), (range(0x80, 0x90), 2)),
    (b'"\\\\bfnrt', 0),
)
_IS_LEAD = np.zeros(256, bool)
for _low, _high, _ in _LEADS:
    _IS_LEAD[_low : _high + 1] = True


@dataclass(frozen=True)
class CompileLimits:
    """What compiling may take: ``seconds`` of processor time, ``memory_bytes``, ``states`` and ``edges`` of the result."""

    seconds: int = 30
    memory_bytes: int = 2 << 30
    states: int = 1 << 15
    edges: int = 1 << 21


@dataclass(frozen=True)
class ByteAutomaton:
    """``table`` int32 ``[Q, 256]``: the state behind each state by a byte, -1: none. State 0 is the first.

    ``accepting`` bool ``[Q]``. It is minimal: from each state a text is accepted, and no two accept the same ones.
    """

    table: np.ndarray
    accepting: np.ndarray

    @property
    def alphabet(self) -> tuple[np.ndarray, np.ndarray]:
        """Which bytes are alike in every state: the kind of each byte, and ``table`` by kind."""
        columns, kinds = np.unique(self.table, axis=1, return_inverse=True)
        return kinds.reshape(-1), columns

    def matches(self, text: bytes) -> bool:
        """Whether all of the text is accepted."""
        state = 0
        for byte in text:
            state = int(self.table[state, byte])
            if state < 0:
                return False
        return bool(self.accepting[state])


def between(texts: ByteAutomaton, before: str, behind: str) -> ByteAutomaton:
    """What stands between two given texts where all three together are one of ``texts``.

    Raises RequestError for givens that no text has.
    """
    state, given = 0, before.encode()
    for number, byte in enumerate(given):
        state = int(texts.table[state, byte])
        if state < 0:
            good = given[:number].decode("utf-8", "ignore")
            raise RequestError(
                f"no text of the constraint starts with {before!r}, though some may with {good!r}: JSON is compact there, "
                "and has its properties in the schema's order"
            )
    ends = np.arange(len(texts.table))
    for byte in behind.encode():
        ends = np.where(ends >= 0, texts.table[ends, byte], -1)
    made = _minimised(texts.table, (ends >= 0) & texts.accepting[ends], state)
    if made is None:
        raise RequestError(f"no text of the constraint starts with {before!r} and ends with {behind!r}")
    return made


def byte_automaton(expression: str, limits: CompileLimits, is_of_json: bool = False) -> ByteAutomaton:
    """The texts that match ``expression`` as a whole, as UTF-8; those with a NUL are left out.

    ``is_of_json``: ``expressions.CHARACTER`` in it stands for what it does there. Raises RequestError for an expression that is
    none, that matches nothing, or that meets one of ``limits``; DlmError without outlines-core.
    """
    try:
        given = expression.encode("utf-8")
    except UnicodeEncodeError as err:
        raise RequestError(f"regex: half a character at {err.start}: it cannot be written as UTF-8") from err
    table, accepting, first = _compile(given, limits)
    if is_of_json:
        if ((table[:, _CHARACTER] >= 0) & (table[:, _IS_LEAD] >= 0).any(axis=1)).any():
            table, accepting, first = _compile(spelled_out(expression).encode(), limits)
        else:
            table, accepting = _with_characters(table, accepting)
    made = _minimised(table, accepting, first)
    if made is None:
        raise RequestError("regex: no text matches it")
    if len(made.table) > limits.states:
        raise _too_many(len(made.table), limits)
    return made


def _too_many(states: int, limits: CompileLimits) -> RequestError:
    return RequestError(
        f"regex: its automaton has {states} states, more than {limits.states}: make counts smaller, or raise states"
    )


def _with_characters(table: np.ndarray, accepting: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The automaton with how JSON writes characters where the byte stands for any."""
    states = len(table)
    targets = np.unique(table[table[:, _CHARACTER] >= 0, _CHARACTER])
    made = np.full((states + len(targets) * len(_INSIDE), 256), -1, np.int32)
    made[:states] = table
    for number, target in enumerate(targets):
        first = states + number * len(_INSIDE)
        places = [int(target), *range(first, first + len(_INSIDE))]
        for place, (following, to) in zip(places[1:], _INSIDE, strict=True):
            made[place, list(following)] = places[to]
        before = np.nonzero(table[:, _CHARACTER] == target)[0]
        for low, high, to in _LEADS:
            made[before, low : high + 1] = places[to]
    made[:, _CHARACTER] = -1
    return made, np.append(accepting, np.zeros(len(made) - states, bool))


def _compile(expression: bytes, limits: CompileLimits) -> tuple[np.ndarray, np.ndarray, int]:
    path = [os.path.abspath(entry) for entry in sys.path]
    options = json.dumps(
        {"path": path, "memory_bytes": limits.memory_bytes, "seconds": limits.seconds, "states": 4 * limits.states}
    )
    try:
        done = subprocess.run(
            [sys.executable or "", "-IS", str(_WORKER), options],
            input=expression,
            capture_output=True,
            check=False,
            start_new_session=True,
        )
    except OSError as err:
        raise DlmError(f"cannot start {sys.executable or 'Python'} for the expression ({err.strerror})") from err
    if done.returncode != 0 or len(done.stdout) < 24:
        raise _why(done.returncode, done.stderr, limits)
    reason_bytes, states, first = struct.unpack_from("<QQQ", done.stdout)
    if reason_bytes:
        reason = str(json.loads(done.stdout[24:])["refused"])
        if reason.isdecimal():
            raise _too_many(int(reason), limits)
        if _NO_MATCH in reason:
            raise RequestError("regex: no text matches it")
        if _ANCHORED in reason:
            raise RequestError("regex: it has an anchor, ^, $ or the like: leave it out, texts match as a whole")
        doubt = ": a bracket that is not closed, look-around or a back-reference" if _NOT_READ in reason else ""
        raise RequestError(f"regex: not one that can be compiled ({' '.join(reason.split())}{doubt})")
    table = np.frombuffer(done.stdout, np.int32, states * 256, 24).reshape(states, 256)
    return table, np.frombuffer(done.stdout, np.uint8, states, 24 + states * 1024).astype(bool), first


def _why(code: int, said: bytes, limits: CompileLimits) -> DlmError:
    if b"No module named 'outlines_core'" in said:
        return DlmError("outlines-core is not installed, and constraints need it: pip install 'outlines-core>=0.2.14,<0.3'")
    if code in (-signal.SIGXCPU, -signal.SIGKILL):
        return RequestError(
            f"regex: compiling it takes more than {limits.seconds} s of processor time: make counts smaller, or raise seconds"
        )
    return RequestError(
        f"regex: compiling it needs more than memory_bytes, {limits.memory_bytes >> 20} MiB: make counts smaller, or raise it"
    )


def _minimised(table: np.ndarray, accepting: np.ndarray, first: int) -> ByteAutomaton | None:
    """The smallest automaton of the same texts, its states by their distance from the first; None: there is no text."""
    states = len(table)
    distance = _distances(table, accepting)
    if distance[first] < 0:
        return None
    # Column -1 of what is dead: a state that no text is accepted from is as good as none.
    columns = np.unique(np.where((table >= 0) & (distance[table] >= 0), table, -1), axis=1)
    # Texts of a length are accepted or not from equal states alike, so these start apart by the length of their shortest.
    label = np.append(distance, -1)
    count = len(np.unique(label))
    while True:
        rows = np.column_stack((label[:states], label[columns]))
        _, found = np.unique(rows, axis=0, return_inverse=True)
        found = found.reshape(-1)
        before, count = count, len(np.unique(found[distance >= 0])) + 1
        label = np.append(np.where(distance >= 0, found, -1), -1)
        if count == before:
            break
    full = np.where((table >= 0) & (distance[table] >= 0), table, -1)
    representative = dict[int, int]()
    for state in range(states):
        representative.setdefault(int(label[state]), state)
    order, numbers = [int(label[first])], {int(label[first]): 0}
    for each in order:
        for target in dict.fromkeys(label[full[representative[each]]].tolist()):
            if target >= 0 and target not in numbers:
                numbers[target] = len(order)
                order.append(target)
    renamed = np.full(int(label.max()) + 2, -1, np.int32)
    for each, number in numbers.items():
        renamed[each] = number
    kept = np.array([representative[each] for each in order])
    return ByteAutomaton(renamed[label[full[kept]]], accepting[kept])


def _distances(table: np.ndarray, accepting: np.ndarray) -> np.ndarray:
    """Fewest bytes to an accepting state, int64 ``[Q]``; -1: none is reached."""
    distance = np.where(accepting, 0, -1).astype(np.int64)
    sources, targets = np.nonzero(table >= 0)[0], table[table >= 0]
    pairs = np.unique(np.column_stack((targets, sources)), axis=0)
    starts = np.searchsorted(pairs[:, 0], np.arange(len(table) + 1))
    front, length = np.nonzero(accepting)[0], 0
    while len(front):
        length += 1
        found = np.unique(np.concatenate([pairs[starts[state] : starts[state + 1], 1] for state in front]))
        front = found[distance[found] < 0]
        distance[front] = length
    return distance
