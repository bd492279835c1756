"""The program that compiles a regular expression to a byte automaton. ``byte_automaton`` starts it
as a process with limits.

Input: the expression, as UTF-8. Output: three sizes of 8 bytes each (bytes of the JSON that
follows, or 0; states; microseconds of processor time used). Then either that JSON, whose
``refused`` is the library's message or the number of states where there are too many, or two
arrays: the table int32 ``[states, 256]`` of next states, -1 where there is no next state, and one
byte per state, 1 if it accepts. State 0 is the first. The kernel ends this process at its limit of
memory or processor time.
"""

from __future__ import annotations

import array
import json
import os
import resource
import signal
import struct
import sys
import time
from typing import Any

REASON_LIMIT = 300  # characters of the library's message
# outlines-core compiles expressions for a search: it drops every match of lower priority than one
# already found ("ab" of "a|ab"), and it builds the automaton of the unanchored search as well,
# which can be far larger. Both are avoided here.
# - \z allows a match at the end of the text only, so no match is found earlier and nothing is dropped.
# - The empty alternative matches after the first byte of _START. A match ends the search for later starts, which have lower
#   priority, so the unanchored automaton stays as small as the anchored one.
# - outlines-core may drop the state that reports that empty match. The alternative \z after the second byte keeps it.
# - The last byte of _START is a newline. For (?m)^ and (?-u:\b) a newline before the text means the same as the start of it.
_START = b"\0\0\n"
_WRAPPED = r"\x00(?:\x00(?:\n(?:{})\z|\z)|)"


def automaton(expression: str) -> tuple[dict[int, dict[int, int]], set[int], int]:
    """The states by byte that follow each state, the accepting states, and the first state."""
    from outlines_core import Index, Vocabulary

    # With one token per byte, the index is the byte automaton.
    vocabulary = Vocabulary(256, {bytes([byte]): [byte] for byte in range(256)})
    # Check that the expression is whole: one that closes our group, or ends in a comment, would
    # change what is around it. \b of Unicode is never supported, so the library rejects this unless
    # a comment hides it.
    try:
        Index(expression + r"|(?u:\b)", vocabulary)
    except ValueError as err:
        if "word boundaries" not in str(err):
            raise
    else:
        raise ValueError("its end is hidden, perhaps by a comment")
    index = Index(_WRAPPED.format(expression), vocabulary)
    following: dict[int, dict[int, int]] = index.get_transitions()
    first = index.get_initial_state()
    for byte in _START:
        if byte not in following.get(first, {}):
            raise ValueError("Found no transitions")
        first = following[first][byte]
    return following, index.get_final_states(), first


def answer(expression: str, most_states: int) -> list[bytes]:
    """The parts of the output."""
    try:
        following, accepting, first = automaton(expression)
        numbers, order = {first: 0}, [first]  # the states that are reached from the first
        for state in order:
            for byte, target in following.get(state, {}).items():
                if byte < 256 and target not in numbers:
                    numbers[target] = len(order)
                    order.append(target)
        if len(order) > most_states:
            raise ValueError(str(len(order)))
    except (MemoryError, ImportError):
        raise
    except BaseException as err:  # a panic in Rust code is a BaseException
        reason = json.dumps({"refused": str(err)[:REASON_LIMIT]}).encode()
        return [_sizes(len(reason), 0), reason]
    table = array.array("i", [-1]) * (len(order) * 256)
    for number, state in enumerate(order):
        for byte, target in following.get(state, {}).items():
            if byte < 256:
                table[number * 256 + byte] = numbers[target]
    ends = bytes(state in accepting for state in order)
    return [_sizes(0, len(order)), table.tobytes(), ends]


def _sizes(reason_bytes: int, states: int) -> bytes:
    return struct.pack("<QQQ", reason_bytes, states, int(time.process_time() * 1e6))


def main(limits: dict[str, Any]) -> None:
    sys.path[:] = limits["path"]
    os.environ["RAYON_NUM_THREADS"] = "1"
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (limits["memory_bytes"],) * 2)
    # The timer takes fractions of a second. The limit of the kernel, in whole seconds, holds even
    # if the signal is blocked.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, limits["seconds"])
    resource.setrlimit(resource.RLIMIT_CPU, (int(limits["seconds"]) + 1,) * 2)
    for part in answer(sys.stdin.buffer.read().decode(), limits["states"]):
        sys.stdout.buffer.write(part)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
