"""Measure the memory of a process that runs thousands of requests.

Some of the requests are cancelled, exceed their time limit, or fail.

    python benchmarks/soak.py build/demo [--requests 10000]

Several threads send requests to several schedulers. Two of five requests go to a bundle and share
passes. All other requests go to a denoiser in Python whose passes sometimes fail. A third of the
requests to this denoiser run without a scheduler. The script prints the resident memory ten times:
after each tenth of the requests. The exit code is 1 if a request ended in an unexpected way.
"""

from __future__ import annotations

import argparse
import random
import threading
import time
from collections import Counter
from pathlib import Path

import dlm_runtime
from dlm_runtime import Bundle, CallbackPass, DenoiserInfo, DlmError, EngineError, Scheduler

PROMPTS = ("turn on the kitchen lights", "remind me to call the garage at seven", "play jazz", "go")
ENDS = {"stop", "length", "steps", "deadline", "cancelled", "failed"}


def resident_kib() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1])


def failing(p: CallbackPass) -> None:
    """A denoiser with a vocabulary of 40 tokens. One pass in 200 fails."""
    if random.random() < 0.005:
        raise RuntimeError("made to fail")
    for row, at in enumerate(p.score_rows):
        token = 2 + int(p.position_ids[at]) % 30
        p.top_tokens[row], p.top_probs[row] = (token, token + 1), (0.5, 0.25)


class Soak:
    """Runs requests from several threads.

    ``ended`` counts the requests that ended in each way, such as "cancelled".
    """

    def __init__(self, bundle: Bundle, callback: Bundle) -> None:
        self.bundle, self.callback = bundle, callback
        self.ended: Counter[str] = Counter()
        self._lock = threading.Lock()

    def work(self, seed: int, requests: int, shared: Scheduler, turns: Scheduler) -> None:
        draw = random.Random(seed)
        for _ in range(requests):
            options = {"max_new_tokens": draw.choice((8, 16, 32)), "seed": draw.randrange(99)}
            if draw.random() < 0.3:
                options["deadline_ms"] = draw.uniform(0.01, 20)
            if draw.random() < 0.1:
                options["max_steps"] = draw.randrange(1, 6)
            finish = self._one(draw, options, shared, turns)
            with self._lock:
                self.ended[finish] += 1

    def _one(
        self, draw: random.Random, options: dict[str, object], shared: Scheduler, turns: Scheduler
    ) -> str:
        kind = draw.random()
        try:
            if kind < 0.2:
                return self.callback.generate(tokens=[3, 4], **options).finish
            if kind < 0.6:
                job = turns.submit(tokens=[3, 4], **options)
            else:
                job = shared.submit(
                    prompt=draw.choice(PROMPTS),
                    preset=draw.choice(("fast-dllm", "llada")),
                    **options,
                )
            if draw.random() < 0.3:
                job.cancel()
            return job.result(600).finish
        except (EngineError, DlmError, RuntimeError) as err:
            return (
                "failed"
                if "made to fail" in f"{err} {err.__cause__}" or "callback" in str(err)
                else repr(err)
            )


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    arguments.add_argument("bundle", type=Path)
    arguments.add_argument("--requests", type=int, default=10000)
    arguments.add_argument("--threads", type=int, default=4)
    chosen = arguments.parse_args()
    info = DenoiserInfo(
        vocab_size=40, mask_token_id=39, max_canvas_length=64, eos_token_ids=(1,), has_cache=True
    )
    started = time.monotonic()
    with (
        dlm_runtime.open(chosen.bundle, threads=1) as bundle,
        dlm_runtime.from_callback(info, failing) as callback,
    ):
        soak = Soak(bundle, callback)
        for tenth in range(10):
            # Create new schedulers for each tenth of the requests.
            with (
                bundle.scheduler(max_running=6) as shared,
                callback.scheduler(max_running=3) as turns,
            ):
                each = chosen.requests // 10 // chosen.threads
                threads = [
                    threading.Thread(
                        target=soak.work, args=(10 * tenth + number, each, shared, turns)
                    )
                    for number in range(chosen.threads)
                ]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
            seconds = time.monotonic() - started
            print(
                f"{soak.ended.total():6} requests, {resident_kib() / 1024:7.1f} MiB resident, {seconds:6.1f} s",
                flush=True,
            )
    print(", ".join(f"{count} {finish}" for finish, count in sorted(soak.ended.items())))
    return int(not soak.ended.keys() <= ENDS)


if __name__ == "__main__":
    raise SystemExit(main())
