"""The program that makes a byte automaton of a regular expression: a process of its own, started by ``byte_automaton``.

The expression comes on its input. Out come three sizes (8 bytes each: of the JSON ``refused``, or 0; states; the first
state), then that JSON, with the library's reason or how many states are too many, or the table int32 ``[states, 256]`` of what
follows a state by a byte, -1 for nothing, and a byte a state, 1 for those that accept. The kernel ends it at a limit of memory
or processor time.
"""

from __future__ import annotations

import array
import json
import os
import resource
import struct
import sys
from typing import Any

REASON_LIMIT = 300  # characters of the library's message


def transitions(expression: str) -> tuple[dict[int, dict[int, int]], int]:
    """What follows each state by bytes, and the first state, of texts that match as a whole and have a NUL behind them.

    Without that end, outlines-core drops what a search would not go on for: all but "a" of "a|ab", as "a" is found first.
    """
    from outlines_core import Index, Vocabulary

    # Of a vocabulary of single bytes the index is the automaton of the expression over UTF-8 itself.
    vocabulary = Vocabulary(256, {bytes([byte]): [byte] for byte in range(256)})
    try:  # what closes a group of ours, or hides its end, is found by an end that no automaton has
        Index(expression + r"|\b", vocabulary)
    except ValueError as err:
        if "word boundaries" not in str(err):
            raise
    else:
        raise ValueError("its end is hidden, perhaps by a comment")
    index = Index(rf"(?:{expression})\x00", vocabulary)
    return index.get_transitions(), index.get_initial_state()


def answer(expression: str, most_states: int) -> list[bytes]:
    """The parts of the output."""
    try:
        following, first = transitions(expression)
        if len(following) > most_states:
            raise ValueError(str(len(following)))
    except (MemoryError, ImportError):
        raise
    except BaseException as err:  # a panic of Rust's derives from nothing else
        reason = json.dumps({"refused": str(err)[:REASON_LIMIT]}).encode()
        return [struct.pack("<QQQ", len(reason), 0, 0), reason]
    numbers = {state: number for number, state in enumerate(following)}
    table = array.array("i", [-1]) * (len(numbers) * 256)
    for state, steps in following.items():
        row = numbers[state] * 256
        for byte, target in steps.items():
            if 0 < byte < 256:
                table[row + byte] = numbers[target]
    ends = bytes(0 in steps for steps in following.values())
    return [struct.pack("<QQQ", 0, len(numbers), numbers[first]), table.tobytes(), ends]


def main(limits: dict[str, Any]) -> None:
    sys.path[:] = limits["path"]
    os.environ["RAYON_NUM_THREADS"] = "1"
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (limits["memory_bytes"],) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, (limits["seconds"],) * 2)
    for part in answer(sys.stdin.buffer.read().decode(), limits["states"]):
        sys.stdout.buffer.write(part)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
