"""Compare three ways to serve requests that arrive at random times.

    python -m benchmarks.serving.scheduler BUNDLE --data FILE.jsonl [--requests 64] [--loads 0.8,1.5,inf]
        [--rounds 5] [--json FILE]
    python -m benchmarks.serving.scheduler BUNDLE --data FILE.jsonl --cost BENCH.json --pass-ms 10,20

Each line of the file has a `prompt`. A load is the number of requests that arrive per second,
divided by the number of requests that `alone` answers per second. With "inf", all requests arrive
at once. All three ways get the requests at the same times:

- `alone` runs one request after another.
- `batches` starts up to eight waiting requests together. When all of them are done, it starts the
  next batch.
- `scheduler` starts a request as soon as fewer than eight requests are running.

The latency of a request is measured from its arrival. In each round, the three ways take turns. The
script prints medians over the rounds, and how many canvases differ from those of `alone`.

`--cost` takes the JSON of `dlm-export bench BUNDLE --cost --json`, which contains the measured cost
of passes. The script then also measures schedulers that use this cost to predict the time of a
pass. `--pass-ms` limits the predicted milliseconds. For these schedulers, the script also prints
the mean milliseconds of a pass, the mean number of requests in a pass, and the measured time
divided by the predicted time.
"""

from __future__ import annotations

import argparse
import json
import math
import queue
import random
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import dlm_runtime
from benchmarks.shapes import machine
from dlm_runtime import Bundle, Generation, PassCost

Done = dict[int, tuple[float, Generation]]
"""For each request, by number: the seconds from the start of the run until it was done, and its
result.
"""


def arrivals(moments: Sequence[float], hand_in: Callable[[int], None]) -> threading.Thread:
    """Start a thread that calls ``hand_in`` with each request's number when the request arrives."""

    def run() -> None:
        began = time.perf_counter()
        for number, moment in enumerate(moments):
            time.sleep(max(0.0, began + moment - time.perf_counter()))
            hand_in(number)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def in_batches(
    bundle: Bundle, wishes: list[dict[str, Any]], moments: Sequence[float], most: int
) -> Done:
    """Start up to ``most`` waiting requests together.

    When all requests of a batch are done, start the next batch.
    """
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    done: Done = {}
    began = time.perf_counter()
    thread = arrivals(moments, waiting.put)
    while len(done) < len(wishes):
        numbers = [waiting.get()]
        while len(numbers) < most and not waiting.empty():
            numbers.append(waiting.get())
        same = {name: value for name, value in wishes[numbers[0]].items() if name != "prompt"}
        if most == 1:
            outs = [bundle.generate(**wishes[numbers[0]])]
        else:
            outs = bundle.generate_batch(
                prompts=[wishes[number]["prompt"] for number in numbers], max_batch=most, **same
            )
        now = time.perf_counter() - began
        done |= {number: (now, out) for number, out in zip(numbers, outs, strict=True)}
    thread.join()
    return done


class Scheduled:
    """Start a request as soon as fewer than eight requests are running."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.told: list[dict[str, float]] = []
        """Measurements of the passes of each round, if the scheduler knows the cost."""

    def __call__(
        self, bundle: Bundle, wishes: list[dict[str, Any]], moments: Sequence[float]
    ) -> Done:
        done: Done = {}
        began = time.perf_counter()

        def wait(number: int, job: Any) -> None:
            out = job.result()
            done[number] = time.perf_counter() - began, out

        threads = []
        with bundle.scheduler(max_running=8, **self.options) as scheduler:

            def hand_in(number: int) -> None:
                threads.append(
                    threading.Thread(target=wait, args=(number, scheduler.submit(**wishes[number])))
                )
                threads[-1].start()

            arrivals(moments, hand_in).join()
            for thread in threads:
                thread.join()
            stats = scheduler.stats
        if stats.expected_s:
            self.told.append(
                {
                    "pass_ms": 1e3 * stats.passes_s / stats.passes,
                    "shares": stats.shares / stats.passes,
                    "of_expected": stats.passes_s / stats.expected_s,
                }
            )
        return done


Way = Callable[[Bundle, list[dict[str, Any]], Sequence[float]], Done]


def ways(cost: PassCost | None, pass_ms: Sequence[float]) -> dict[str, Way]:
    """Return the ways to serve requests, by name."""
    found: dict[str, Way] = {
        "alone": lambda bundle, wishes, moments: in_batches(bundle, wishes, moments, 1),
        "batches": lambda bundle, wishes, moments: in_batches(bundle, wishes, moments, 8),
        "scheduler": Scheduled(),
    }
    if cost is not None:
        found["any time"] = Scheduled(cost=cost)
        found |= {f"{most:g} ms": Scheduled(cost=cost, max_pass_ms=most) for most in pass_ms}
    return found


def judged(done: Done, moments: Sequence[float], alone: list[Generation]) -> dict[str, float]:
    """Return the results of one round, by name."""
    latencies = sorted(done[number][0] - moment for number, moment in enumerate(moments))
    return {
        "tokens_per_s": sum(out.completion_tokens for _, out in done.values())
        / max(at for at, _ in done.values()),
        "p50_ms": 1e3 * latencies[len(latencies) // 2],
        "p99_ms": 1e3 * latencies[min(len(latencies) - 1, math.ceil(0.99 * len(latencies)) - 1)],
        "unequal": sum(done[number][1].tokens != one.tokens for number, one in enumerate(alone)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--max-new-tokens", type=int, default=192)
    parser.add_argument("--loads", default="0.8,1.5,inf")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--cost", type=Path)
    parser.add_argument("--pass-ms", default="10,20")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    prompts = [json.loads(line)["prompt"] for line in arguments.data.read_text().splitlines()][
        : arguments.requests
    ]
    wishes = [{"prompt": prompt, "max_new_tokens": arguments.max_new_tokens} for prompt in prompts]
    cost = None if arguments.cost is None else PassCost.read(arguments.cost)
    result: dict[str, Any] = {
        "machine": machine(),
        "requests": len(wishes),
        "rounds": arguments.rounds,
        "loads": {},
    }
    with dlm_runtime.open(arguments.bundle, threads=arguments.threads) as bundle:
        for wish in wishes[:8]:
            bundle.generate(**wish)
        began = time.perf_counter()
        alone = [bundle.generate(**wish) for wish in wishes]
        each = (time.perf_counter() - began) / len(wishes)
        for load in map(float, arguments.loads.split(",")):
            draw = random.Random(1)
            moment, moments = 0.0, []
            for _ in wishes:
                moments.append(moment)
                moment += draw.expovariate(load / each) if math.isfinite(load) else 0.0
            tried = ways(cost, list(map(float, arguments.pass_ms.split(","))))
            rounds: dict[str, list[dict[str, float]]] = {name: [] for name in tried}
            for _ in range(arguments.rounds):
                for name, run in tried.items():
                    rounds[name].append(judged(run(bundle, wishes, moments), moments, alone))
            rows = {
                name: {
                    key: round(statistics.median(row[key] for row in found), 2) for key in found[0]
                }
                | {"tokens_per_s_all": [round(row["tokens_per_s"], 1) for row in found]}
                for name, found in rounds.items()
            }
            for name, run in tried.items():
                said = run.told if isinstance(run, Scheduled) else []
                rows[name] |= (
                    {key: round(statistics.median(one[key] for one in said), 3) for key in said[0]}
                    if said
                    else {}
                )
            result["loads"][str(load)] = rows
            print(f"load {load} of one at a time ({1e3 * each:.1f} ms each)")
            for name, row in rows.items():
                times = f"p50 {row['p50_ms']:8.1f} ms  p99 {row['p99_ms']:8.1f} ms"
                print(
                    f"  {name:10} {row['tokens_per_s']:8.0f} tokens/s  {times}  {row['unequal']:.0f} unequal",
                    flush=True,
                )
                if "pass_ms" in row:
                    share = f"{row['of_expected']:.2f} of what was expected"
                    print(
                        f"    a pass {row['pass_ms']:.2f} ms of {row['shares']:.1f} requests, {share}",
                        flush=True,
                    )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
