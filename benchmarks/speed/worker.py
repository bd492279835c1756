"""Run one contestant in a separate process.

    python -m benchmarks.speed.worker SIZE NAME THREADS

The process reads requests from stdin and writes answers to stdout, as lines of JSON. All other
output goes to stderr. The member ``do`` of a request names an action, and the other members are the
action's arguments. The actions are ``generate`` (prompts, new, policy, passes), ``pass`` (B, T, S,
R), ``best_tokens`` (canvas) and ``about``. If the contestant does not support the action, the
answer contains ``not_offered`` with the reason.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

from benchmarks.speed.contestants import NATIVE, TORCH_NAMES, Contestant, Native, NotOffered, Torch
from dlm_export.memory import peak_rss_bytes


def make(name: str, size: str, threads: int) -> Contestant:
    """Return the contestant with this name. The module ``contestants`` lists the names."""
    engine, _, kind = name.partition("-")
    if engine == NATIVE:
        return Native(size, kind, threads)
    if name in TORCH_NAMES:
        return Torch(size, kind, threads)
    from benchmarks.speed.llama_contestant import LlamaCpp

    return LlamaCpp(size, kind, threads)


class Server:
    """Answers the requests to one contestant.

    Each size of a pass is prepared once, and then used in all rounds.
    """

    def __init__(self, contestant: Contestant) -> None:
        self.contestant = contestant
        self.passes: dict[tuple[int, ...], Callable[[], float]] = {}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Carry out a request.

        ``peak_rss_bytes`` in the answer is the peak memory of the process so far, including mapped
        files.
        """
        kind = request.pop("do")
        try:
            if kind == "generate":
                return self.contestant.generate(**request) | {"peak_rss_bytes": peak_rss_bytes()}
            if kind == "pass":
                shape = tuple(request.values())
                if shape not in self.passes:
                    self.passes[shape] = self.contestant.pass_of(**request)
                return {"seconds": self.passes[shape]()}
            if kind == "best_tokens":
                return {"tokens": self.contestant.best_tokens(**request)}
            return {
                "weights_bytes": self.contestant.weights_bytes,
                "facts": self.contestant.facts(),
            }
        except NotOffered as reason:
            return {"not_offered": str(reason)}


def main() -> None:
    size, name, threads = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries that write to stdout must not disturb the answers
    server = Server(make(name, size, int(threads)))
    for line in sys.stdin:
        print(json.dumps(server.answer(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
