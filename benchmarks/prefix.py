"""Measure how much time a prefix cache saves for requests that start with the same tokens.

    python benchmarks/prefix.py [--requests 64] [--shared 2000] [--own 50] [--turns 10] [--rounds 3]
        [--precision int8] [--cache-dtype fp32] [--threads 2] [--json FILE]

A prefix cache stores the keys and values of prompts. A later request reuses them if its prompt
starts with the same tokens. For example, all requests with the same system prompt start with the
same tokens, and so do the turns of a conversation. The script uses the random block-causal denoiser
of benchmarks/blocks.py (12 layers, hidden size 768, grouped queries, blocks of 32 tokens). Each
request generates 32 tokens. Each round measures a scheduler with a prefix cache, and then a
scheduler without one. The script prints medians over the rounds, with the smallest and the largest
value:

- `first tokens`: milliseconds from submitting a request until its first tokens are decided. The
  requests run one after another.
- `tokens/s`: generated tokens per second when all requests are submitted at once.
- `turns`: milliseconds of each turn of a conversation. In each turn, the user adds a message, and
  the denoiser answers.

The script also prints how many canvases differ between the two schedulers.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from blocks import VOCABULARY, bundle_of
from shapes import machine

import dlm_runtime
from dlm_export.planning.prefix import measure_side
from dlm_runtime import Bundle, Scheduler

ASKED: dict[str, Any] = {
    "preset": "sdar",
    "new_tokens": 32,
    "stop": "none",
    "steps_per_block": 8,
    "commit": "static",
}


def tokens_of(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(10, VOCABULARY - 10) for _ in range(count)]


def conversation(
    scheduler: Scheduler, system: list[int], said: Sequence[list[int]]
) -> tuple[list[float], list[int]]:
    """Run a conversation. Returns the milliseconds of each turn, and the last canvas."""
    history, found = list(system), []
    for words in said:
        began = time.perf_counter()
        history = list(scheduler.submit(tokens=history + words, **ASKED).result(600).tokens)
        found.append(1e3 * (time.perf_counter() - began))
    return found, history


def measure(bundle: Bundle, prefix_cache_bytes: int | None, wanted: argparse.Namespace) -> Any:
    rng = random.Random(1)
    shared = tokens_of(rng, wanted.shared)
    prompts = [shared + tokens_of(rng, wanted.own) for _ in range(wanted.requests)]
    said = [tokens_of(rng, wanted.own) for _ in range(wanted.turns)]
    side = measure_side(bundle, prompts, wanted.requests, ASKED, prefix_cache_bytes)
    with bundle.scheduler(prefix_cache_bytes=prefix_cache_bytes) as scheduler:
        turns, last = conversation(scheduler, shared, said)
    return {
        "first_tokens_ms": side.first_tokens_ms,
        "tokens_per_s": side.tokens_per_s,
        "turns_ms": turns,
        "cached_tokens": side.cached_tokens,
        "cache_mib": side.cache_bytes / 2**20,
        "canvases": [*side.canvases, last],
    }


def spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):9.1f} ({min(values):.1f}-{max(values):.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--shared", type=int, default=2000)
    parser.add_argument("--own", type=int, default=50)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--precision", default="int8")
    parser.add_argument("--cache-dtype", default="fp32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    wanted = parser.parse_args()
    sides: dict[str, list[Any]] = {"with": [], "without": []}
    path = bundle_of(wanted.precision, wanted.cache_dtype)
    with dlm_runtime.open(path, threads=wanted.threads) as bundle:
        for _ in range(wanted.rounds):
            sides["with"].append(measure(bundle, None, wanted))
            sides["without"].append(measure(bundle, 0, wanted))
    pairs = list(zip(sides["with"], sides["without"], strict=True))
    differing = sum(
        one != other
        for fast, slow in pairs
        for one, other in zip(fast.pop("canvases"), slow.pop("canvases"), strict=True)
    )
    for side, rounds in sides.items():
        print(f"prefix cache: {side}")
        print(f"  first tokens, ms {spread([each['first_tokens_ms'] for each in rounds])}")
        print(f"  tokens/s         {spread([each['tokens_per_s'] for each in rounds])}")
        print(f"  tokens reused    {rounds[0]['cached_tokens']}")
        print(f"  cache, MiB       {rounds[0]['cache_mib']:.1f}")
        turns = [
            statistics.median(each) for each in zip(*(r["turns_ms"] for r in rounds), strict=True)
        ]
        print("  turns, ms        " + " ".join(f"{each:.0f}" for each in turns))
    print(f"canvases that differ: {differing}")
    if wanted.json:
        found = {"machine": machine(), "differing": differing, **sides}
        wanted.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
