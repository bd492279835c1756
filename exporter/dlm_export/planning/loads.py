"""Measures how long the passes of a scheduler take while requests arrive.

A pass after an idle time takes longer than a pass that follows another pass. The speed of a machine
also changes over seconds, for example if other programs or other virtual machines use the
processor. ``measure_service`` therefore measures requests with idle times between them, and repeats
all measurements in several rounds. The differences between the rounds show how exact the result is.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dlm_export.progress import Progress
from dlm_runtime import Bundle

ROUNDS = 5
TIMES = 6  # to measure N requests that run together, each round submits at least TIMES * N
SEED = 0


@dataclass(frozen=True)
class _Window:
    """A part of a measurement. ``seconds`` is the time of ``passes`` passes."""

    requests: int
    passes: int
    shares: int
    seconds: float


def measure_service(
    bundle: Bundle,
    prompts: Sequence[Sequence[int]],
    options: Mapping[str, Any],
    running: Sequence[int],
    progress: Progress,
) -> dict[str, Any]:
    """Run the prompts in a scheduler, for each number of running requests in ``running``.

    ``options`` are arguments of ``Scheduler.submit``. The scheduler does not reuse keys and values
    of earlier prompts. Otherwise, repeated prompts would be computed only once. Returns a dict:

    - ``overhead_ms``: the median time that a scheduler adds to the passes of a request. The time is
      needed to submit a request, to wake threads and to decode the result.
    - ``loads``: a row for one request that runs alone, and a row for each larger number of running
      requests. ``shares`` is the mean number of requests in a pass. ``ms_per_pass`` is the mean
      time of a pass. If several requests run, this time ends when the next pass starts.
    - ``paces``: for each round, the time of the round's passes divided by the mean time of all
      rounds.
    """
    counts = sorted({1, *running})
    progress.start("loads", ROUNDS * len(counts))
    draw = np.random.default_rng(SEED)
    windows: dict[int, list[_Window]] = {count: [] for count in counts}
    added: list[float] = []
    for _ in range(ROUNDS):
        for count in counts:
            if count == 1:
                windows[count].append(_alone(bundle, prompts, options, draw, added))
            else:
                windows[count].append(_together(bundle, prompts, options, count))
            progress.advance()
    rows = [_row(count, windows[count]) for count in counts]
    paces = [
        statistics.mean(
            1e3 * found[number].seconds / found[number].shares * row["shares"] / row["ms_per_pass"]
            for row, found in zip(rows, windows.values(), strict=True)
        )
        for number in range(ROUNDS)
    ]
    return {
        "overhead_ms": 1e3 * max(0.0, statistics.median(added)),
        "loads": rows,
        "paces": paces,
    }


def _row(count: int, windows: Sequence[_Window]) -> dict[str, Any]:
    passes = sum(each.passes for each in windows)
    return {
        "running": count,
        "count": sum(each.requests for each in windows),
        "passes": passes,
        "shares": sum(each.shares for each in windows) / passes,
        "ms_per_pass": 1e3 * sum(each.seconds for each in windows) / passes,
    }


def _alone(
    bundle: Bundle,
    prompts: Sequence[Sequence[int]],
    options: Mapping[str, Any],
    draw: np.random.Generator,
    added: list[float],
) -> _Window:
    """Run the prompts one at a time, with random idle times between them.

    The mean idle time is the latency of a request. Appends to ``added`` the seconds that each
    request took in addition to its passes.
    """
    with bundle.scheduler(max_running=1, prefix_cache_bytes=0) as scheduler:
        began = time.perf_counter()
        scheduler.submit(tokens=prompts[0], **options).result()  # warm-up
        seconds, before = time.perf_counter() - began, scheduler.stats
        for prompt in prompts:
            time.sleep(draw.exponential(seconds))
            began = time.perf_counter()
            result = scheduler.submit(tokens=prompt, **options).result()
            seconds = time.perf_counter() - began
            added.append(seconds - result.timings["total"])
        after = scheduler.stats
    passes = max(1, after.passes - before.passes)
    return _Window(len(prompts), passes, passes, after.busy_s - before.busy_s)


def _together(
    bundle: Bundle, prompts: Sequence[Sequence[int]], options: Mapping[str, Any], count: int
) -> _Window:
    """Submit many prompts at once, and measure while ``count`` of them run.

    The window ends before the queue is empty, because the last passes contain fewer requests.
    """
    chosen = list(itertools.islice(itertools.cycle(prompts), max(len(prompts), TIMES * count)))
    with bundle.scheduler(
        max_running=count, max_waiting=len(chosen), prefix_cache_bytes=0
    ) as scheduler:
        scheduler.submit(tokens=chosen[0], **options).result()  # warm-up
        before, began = scheduler.stats, time.perf_counter()
        jobs = [scheduler.submit(tokens=prompt, **options) for prompt in chosen]
        jobs[-count - 1].result()
        seconds, after = time.perf_counter() - began, scheduler.stats
        for job in jobs:
            job.result()
    passes = max(1, after.passes - before.passes)
    shares = max(passes, after.shares - before.shares)
    return _Window(after.finished - before.finished, passes, shares, seconds)
