"""Measure the milliseconds that llama.cpp takes for one token of an autoregressive model.

    dlm-export bench BUNDLE --data FILE --peer-token-ms $(python -m benchmarks.speed.peer_token MODEL.gguf)

The script prints the median on stdout, and the quartiles on stderr. llama.cpp decodes the token on
the CPU, after 256 earlier tokens (--cached). Needs benchmarks/requirements.txt.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from benchmarks.speed.edge import CACHED, Theirs
from benchmarks.timing import cell, interleave


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=0, help="0: all cores")
    parser.add_argument("--cached", type=int, default=CACHED, help="tokens before the timed one")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    threads = arguments.threads or len(os.sched_getaffinity(0))
    model = Theirs(arguments.model, threads, arguments.cached + 1)
    (row,) = interleave(
        {"token": lambda: model.time(1, arguments.cached)}, arguments.rounds
    ).values()
    print(f"{arguments.model}: {cell(row)} ms a token, {threads} threads", file=sys.stderr)
    print(row["median_ms"])


if __name__ == "__main__":
    main()
