"""A regular expression as a minimal automaton over bytes. outlines-core compiles it, in a process
with limits.
"""

from __future__ import annotations

import json
import os
import re
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dlm_runtime.constraints.anchors import without_start_anchors
from dlm_runtime.constraints.expressions import spelled_out
from dlm_runtime.errors import DlmError, RequestError

_WORKER = Path(__file__).with_name("_regex_worker.py")
# Messages of outlines-core: a state that no text leaves; a bracket that is open, look-around or a
# back-reference.
_NO_MATCH, _NOT_READ = "Found no transitions", "error building NFA"
_INNER_ANCHORS = re.compile(r"\$|\^|\\[zbB]")
_CHARACTER = 0  # the byte that expressions.CHARACTER is; texts never have it
_MANY_TIMES = 4  # states before minimisation, as a multiple of the limit of states
# A character of a JSON string: where bytes of a range lead to from its first on; 0 is behind the
# character, the others wait for what _INSIDE has of them, in order: one, two or three bytes more in
# UTF-8, those whose next byte is of a part, and an escape. From U+00A0 on, without surrogates.
_LEADS = (
    *((0x20, 0x21, 0), (0x23, 0x5B, 0), (0x5C, 0x5C, 9), (0x5D, 0x7E, 0)),
    *(
        (0xC2, 0xC2, 4),
        (0xC3, 0xDF, 1),
        (0xE0, 0xE0, 5),
        (0xE1, 0xEC, 2),
        (0xED, 0xED, 6),
        (0xEE, 0xEF, 2),
    ),
    *((0xF0, 0xF0, 7), (0xF1, 0xF3, 3), (0xF4, 0xF4, 8)),
)
_INSIDE = (
    *((range(0x80, 0xC0), 0), (range(0x80, 0xC0), 1), (range(0x80, 0xC0), 2)),
    *(
        (range(0xA0, 0xC0), 0),
        (range(0xA0, 0xC0), 1),
        (range(0x80, 0xA0), 1),
        (range(0x90, 0xC0), 2),
        (range(0x80, 0x90), 2),
    ),
    (b'"\\\\bfnrt', 0),
)
_IS_LEAD = np.zeros(256, bool)
for _low, _high, _ in _LEADS:
    _IS_LEAD[_low : _high + 1] = True


@dataclass(frozen=True)
class CompileLimits:
    """Limits of compiling one constraint.

    ``seconds``: processor time of all stages together. ``memory_bytes``: memory of each stage.
    ``states`` and ``edges``: size of the result.
    """

    seconds: int = 30
    memory_bytes: int = 2 << 30
    states: int = 1 << 15
    edges: int = 1 << 21


class Budget:
    """The processor time that is left for one constraint. Belongs to the thread that made it."""

    def __init__(self, limits: CompileLimits) -> None:
        self.limits = limits
        self.end = time.thread_time() + limits.seconds

    @property
    def seconds_left(self) -> float:
        return self.end - time.thread_time()

    def charge(self, seconds: float) -> None:
        """Subtract the time of another process. Raises RequestError like ``check``."""
        self.end -= seconds
        self.check()

    def check(self) -> None:
        """Raises RequestError when no time is left. Call it in each loop that grows with the
        constraint.
        """
        if self.seconds_left <= 0:
            raise _too_long(self.limits)

    def check_memory(self, needed_bytes: int) -> None:
        """Raises RequestError when the next step needs more memory than the limit."""
        if needed_bytes > self.limits.memory_bytes:
            raise _too_large(self.limits)


@dataclass(frozen=True)
class ByteAutomaton:
    """``table`` int32 ``[Q, 256]``: the next state of each state by byte, -1 where there is none.
    State 0 is the first.

    ``accepting`` bool ``[Q]``. It is minimal: a text is accepted from each state, and no two states
    accept the same texts.
    """

    table: np.ndarray
    accepting: np.ndarray

    @property
    def alphabet(self) -> tuple[np.ndarray, np.ndarray]:
        """The kind of each byte, and ``table`` by kind. Bytes of one kind lead to the same state
        everywhere.
        """
        kinds, first_bytes = _kinds(self.table)
        return kinds, self.table[:, first_bytes]

    def matches(self, text: bytes) -> bool:
        """Whether all of the text is accepted."""
        state = 0
        for byte in text:
            state = int(self.table[state, byte])
            if state < 0:
                return False
        return bool(self.accepting[state])


def between(
    texts: ByteAutomaton, before: str, behind: str, budget: Budget | None = None, hint: str = ""
) -> ByteAutomaton:
    """The texts that make a text of ``texts`` when ``before`` and ``behind`` are put around them.

    Raises RequestError when there is no such text, or ``budget`` is spent (None: the default
    limits). ``hint`` is added to the message when no text starts with ``before``.
    """
    budget = budget or Budget(CompileLimits())
    state, given = 0, before.encode()
    for number, byte in enumerate(given):
        state = int(texts.table[state, byte])
        if state < 0:
            good = given[:number].decode("utf-8", "ignore")
            raise RequestError(
                f"no text of the constraint starts with {before!r}, though some may with {good!r}{hint}"
            )
    ends = np.arange(len(texts.table))
    for byte in behind.encode():
        ends = np.where(ends >= 0, texts.table[ends, byte], -1)
    made = _minimised(texts.table, (ends >= 0) & texts.accepting[ends], state, budget)
    if made is None:
        raise RequestError(
            f"no text of the constraint starts with {before!r} and ends with {behind!r}"
        )
    return made


def byte_automaton(
    expression: str, limits: CompileLimits, is_of_json: bool = False, budget: Budget | None = None
) -> ByteAutomaton:
    """The texts that match ``expression`` as a whole, as UTF-8. Texts with a NUL are left out.

    ``is_of_json``: ``expressions.CHARACTER`` in it has its meaning; otherwise it is an expression
    of a user, with anchors. ``budget`` is the time left; the default is all of ``limits``. Raises
    RequestError for an expression that is not valid, that matches no text, or that reaches a limit;
    DlmError without outlines-core.
    """
    budget = budget or Budget(limits)
    try:
        expression.encode("utf-8")
    except UnicodeEncodeError as err:
        raise RequestError(
            f"regex: half a character at {err.start}: it cannot be written as UTF-8"
        ) from err
    table, accepting = _compile(
        expression if is_of_json else without_start_anchors(expression), budget
    )
    if not is_of_json:
        table[:, 0] = -1
    made = _minimised(table, accepting, 0, budget)
    if made is not None and is_of_json:
        has_character = made.table[:, _CHARACTER] >= 0
        if (has_character & (made.table[:, _IS_LEAD] >= 0).any(axis=1)).any():
            made = _minimised(*_compile(spelled_out(expression), budget), 0, budget)
        elif has_character.any():
            made = _minimised(*_with_characters(made, budget), 0, budget)
    if made is None:
        raise RequestError("regex: no text matches it")
    return made


def _too_many(limits: CompileLimits) -> RequestError:
    return RequestError(
        f"regex: its automaton has more than {limits.states} states: make counts smaller, or raise limits"
    )


def _too_long(limits: CompileLimits) -> RequestError:
    return RequestError(
        f"regex: compiling it takes more than {limits.seconds} s of processor time: make counts smaller, or raise limits"
    )


def _too_large(limits: CompileLimits) -> RequestError:
    return RequestError(
        f"regex: compiling it needs more than memory_bytes, {limits.memory_bytes >> 20} MiB: make counts smaller, or raise it"
    )


def _with_characters(texts: ByteAutomaton, budget: Budget) -> tuple[np.ndarray, np.ndarray]:
    """The table and the accepting states with each byte _CHARACTER replaced by how JSON writes
    characters.
    """
    states = len(texts.table)
    targets = np.unique(texts.table[texts.table[:, _CHARACTER] >= 0, _CHARACTER])
    total = states + len(targets) * len(_INSIDE)
    if total > _MANY_TIMES * budget.limits.states:
        raise _too_many(budget.limits)
    budget.check_memory(total * 1024)
    made = np.full((total, 256), -1, np.int32)
    made[:states] = texts.table
    made[:, _CHARACTER] = -1
    # The places of each target: itself, and the states inside a character that ends there.
    inside = np.arange(states, total, dtype=np.int32).reshape(len(targets), len(_INSIDE))
    places = np.column_stack((targets.astype(np.int32), inside))
    for number, (following, to) in enumerate(_INSIDE, 1):
        made[places[:, number, None], list(following)] = places[:, to, None]
    before = np.nonzero(texts.table[:, _CHARACTER] >= 0)[0]
    places = places[np.searchsorted(targets, texts.table[before, _CHARACTER])]
    for low, high, to in _LEADS:
        made[before, low : high + 1] = places[:, to, None]
    return made, np.append(texts.accepting, np.zeros(total - states, bool))


def _compile(expression: str, budget: Budget) -> tuple[np.ndarray, np.ndarray]:
    """The table and the accepting states of an automaton that may be larger than it has to be.
    State 0 is the first.
    """
    limits = budget.limits
    budget.check()
    options = json.dumps(
        {
            "path": [os.path.abspath(entry) for entry in sys.path],
            "memory_bytes": limits.memory_bytes,
            "seconds": budget.seconds_left,
            "states": _MANY_TIMES * limits.states,
        }
    )
    try:
        done = subprocess.run(
            [sys.executable or "", "-IS", str(_WORKER), options],
            input=expression.encode(),
            capture_output=True,
            check=False,
            start_new_session=True,
        )
    except OSError as err:
        raise DlmError(
            f"cannot start {sys.executable or 'Python'} for the expression ({err.strerror})"
        ) from err
    if done.returncode != 0 or len(done.stdout) < 24:
        raise _why(done.returncode, done.stderr, limits)
    reason_bytes, states, microseconds = struct.unpack_from("<QQQ", done.stdout)
    if reason_bytes:
        reason = str(json.loads(done.stdout[24:])["refused"])
        if reason.isdecimal():
            raise _too_many(limits)
        if _NO_MATCH in reason:
            inner = _INNER_ANCHORS.search(expression)
            doubt = (
                f", or it has an anchor ({inner[0]}) where some branch cannot match"
                if inner
                else ""
            )
            raise RequestError(f"regex: no text matches it{doubt}")
        doubt = (
            ": it has a syntax error, or look-around or a back-reference"
            if _NOT_READ in reason
            else ""
        )
        raise RequestError(
            f"regex: not one that can be compiled ({' '.join(reason.split())}{doubt})"
        )
    budget.charge(microseconds / 1e6)
    budget.check_memory(2 * len(done.stdout))
    table = np.frombuffer(done.stdout, np.int32, states * 256, 24).reshape(states, 256).copy()
    return table, np.frombuffer(done.stdout, np.uint8, states, 24 + states * 1024).astype(bool)


def _why(code: int, said: bytes, limits: CompileLimits) -> DlmError:
    if b"No module named 'outlines_core'" in said:
        return DlmError(
            "outlines-core is not installed, and constraints need it: pip install 'outlines-core>=0.2.14,<0.3'"
        )
    if code in (-signal.SIGPROF, -signal.SIGXCPU, -signal.SIGKILL):
        return _too_long(limits)
    return _too_large(limits)


def _kinds(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The kind of each byte, and the first byte of each kind, ascending. Bytes of a kind have equal
    columns.
    """
    found = dict[bytes, int]()
    kinds = np.array(
        [found.setdefault(table[:, byte].tobytes(), len(found)) for byte in range(table.shape[1])]
    )
    return kinds, np.unique(kinds, return_index=True)[1]


def _minimised(
    table: np.ndarray, accepting: np.ndarray, first: int, budget: Budget
) -> ByteAutomaton | None:
    """The smallest automaton of the same texts, its states in breadth-first order. Returns None if
    it accepts no text.
    """
    kinds, first_bytes = _kinds(table)
    budget.check_memory(64 * len(table) * len(first_bytes))
    columns = table[:, first_bytes]
    sources = np.repeat(np.arange(len(table)), columns.shape[1])[columns.ravel() >= 0]
    targets = columns[columns >= 0]
    is_alive = fewest_steps([first], sources, targets, len(table), budget) >= 0
    distances = fewest_steps(
        np.nonzero(accepting)[0].tolist(), targets, sources, len(table), budget
    )
    is_alive &= distances >= 0
    if not is_alive[first]:
        return None
    renamed = np.append(
        np.where(is_alive, np.cumsum(is_alive) - 1, -1), -1
    )  # the last one is that of -1
    columns = renamed[columns[is_alive]]
    # Equal states have the same distance, so the distances are a first partition. They end long
    # chains early.
    classes = _equivalent(columns, distances[is_alive], budget)
    _, representatives = np.unique(classes, return_index=True)
    columns = np.append(classes, -1)[columns[representatives]]
    order = [int(classes[renamed[first]])]
    numbers = {order[0]: 0, -1: -1}
    for each in order:
        budget.check()
        for target in columns[each].tolist():
            if target not in numbers:
                numbers[target] = len(order)
                order.append(target)
    names = np.array([numbers[number] for number in range(-1, len(order))], np.int32)
    columns = names[columns[order] + 1]
    return ByteAutomaton(columns[:, kinds], accepting[is_alive][representatives[order]])


def _equivalent(columns: np.ndarray, labels: np.ndarray, budget: Budget) -> np.ndarray:
    """The class of each state, numbered from 0: two states have one class if they accept the same
    texts.

    States with different ``labels`` must not be equivalent, and accepting states must have other
    labels than the rest. ``columns`` int ``[Q, K]``: next states, -1 for none. After Hopcroft
    (1971), for all letters at once: when a class splits, its largest part keeps the number, and
    only states before the other parts are looked at again. So each state is looked at O(log Q)
    times for each of its edges.
    """
    states, width = columns.shape
    _, label = np.unique(labels, return_inverse=True)
    label = np.append(label.reshape(-1), -1).astype(np.int32)
    members = list[set[int]]([set() for _ in range(int(label.max()) + 1)])
    for state, number in enumerate(label[:-1].tolist()):
        members[number].add(state)
    is_edge = columns >= 0
    sources, targets = np.repeat(np.arange(states), width)[is_edge.ravel()], columns[is_edge]
    sources = sources[np.argsort(targets, kind="stable")]
    begins = np.searchsorted(np.sort(targets), np.arange(states + 1)).tolist()
    changed = np.arange(states)
    while len(changed):
        budget.check()
        data, row_bytes = label[columns[changed]].tobytes(), 4 * width
        split: dict[int, dict[bytes, list[int]]] = {}
        for row, (state, number) in enumerate(
            zip(changed.tolist(), label[changed].tolist(), strict=True)
        ):
            parts = split.setdefault(number, {})
            parts.setdefault(data[row * row_bytes : (row + 1) * row_bytes], []).append(state)
        relabelled = list[int]()
        for number, found in split.items():
            parts_of = [set(part) for part in found.values()]
            unchanged = len(members[number]) - sum(map(len, parts_of))
            # States whose next states kept their numbers are still alike, and differ from those
            # whose next states did not.
            largest = max(parts_of, key=len)
            if unchanged >= len(largest):
                for part in parts_of:
                    members[number] -= part
            else:
                if unchanged:
                    parts_of.append(members[number].difference(*parts_of))
                parts_of.remove(largest)
                members[number] = largest
            for part in parts_of:
                relabelled += part
                label[list(part)] = len(members)
                members.append(part)
        if len(members) > budget.limits.states:  # classes are never merged again
            raise _too_many(budget.limits)
        pieces = [sources[begins[state] : begins[state + 1]] for state in relabelled]
        changed = np.unique(np.concatenate(pieces)) if pieces else np.zeros(0, np.int64)
    return label[:-1]


def fewest_steps(
    starts: Iterable[int], sources: np.ndarray, targets: np.ndarray, states: int, budget: Budget
) -> np.ndarray:
    """The fewest edges from one of ``starts`` to each state, int64 ``[states]``; -1 where there is
    no path.

    Edge ``i`` leads from ``sources[i]`` to ``targets[i]``; an edge may be listed twice.
    """
    edges = np.unique(sources.astype(np.int64) * states + targets)
    budget.check()
    budget.check_memory(48 * len(edges))
    following = (edges % states).tolist()
    begins = np.searchsorted(edges, np.arange(states + 1) * states).tolist()
    steps = [-1] * states
    order = list(starts)
    for state in order:
        steps[state] = 0
    for number, state in enumerate(order):
        if number % 1024 == 0:
            budget.check()
        for target in following[begins[state] : begins[state + 1]]:
            if steps[target] < 0:
                steps[target] = steps[state] + 1
                order.append(target)
    return np.array(steps, np.int64)
