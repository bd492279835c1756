"""One contestant in a process of its own: requests as JSON lines on stdin, answers on stdout,
everything else on stderr.

    python benchmarks/worker.py SIZE NAME THREADS

A request says what to ``do`` and its arguments: ``generate`` (prompts, new, policy, passes),
``pass`` (B, T, S, R), ``best_tokens`` (canvas), ``about``. What is not offered is answered with the
reason.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

from contestants import NATIVE, TORCH_NAMES, Contestant, Native, NotOffered, Torch

from dlm_export.planning.bench import peak_rss_bytes


def make(name: str, size: str, threads: int) -> Contestant:
    """The contestant of a name, which ``contestants`` lists."""
    engine, _, kind = name.partition("-")
    if engine == NATIVE:
        return Native(size, kind, threads)
    if name in TORCH_NAMES:
        return Torch(size, kind, threads)
    from llama_contestant import LlamaCpp

    return LlamaCpp(size, kind, threads)


class Server:
    """Answers requests to one contestant; passes are kept ready between rounds."""

    def __init__(self, contestant: Contestant) -> None:
        self.contestant = contestant
        self.passes: dict[tuple[int, ...], Callable[[], float]] = {}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """What ``request`` asks for; ``peak_rss_bytes`` is the process's so far, mapped files
        included.
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
    os.dup2(2, 1)  # what libraries print must not reach the answers
    server = Server(make(name, size, int(threads)))
    for line in sys.stdin:
        print(json.dumps(server.answer(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
