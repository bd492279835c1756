"""Measures how long the passes of a scheduler take while several requests run."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

from dlm_export.progress import Progress
from dlm_runtime import Bundle

ROUNDS = 4  # to measure N requests that run together, run at least ROUNDS * N


def measure_overhead(
    bundle: Bundle, prompts: Sequence[Sequence[int]], options: Mapping[str, Any]
) -> float:
    """Return the median time in ms that a scheduler adds to the passes of a request.

    The prompts run one at a time. The added time is needed to submit a request, to wake threads and
    to decode the result.
    """
    added = []
    with bundle.scheduler(prefix_cache_bytes=0) as scheduler:
        for prompt in prompts:
            began = time.perf_counter()
            result = scheduler.submit(tokens=prompt, **options).result()
            added.append(time.perf_counter() - began - result.timings["total"])
    return 1e3 * max(0.0, statistics.median(added))


def measure_loads(
    bundle: Bundle,
    prompts: Sequence[Sequence[int]],
    options: Mapping[str, Any],
    running: Sequence[int],
    progress: Progress,
) -> list[dict[str, Any]]:
    """Run all prompts in a scheduler, once for each number of running requests.

    ``options`` are arguments of ``Scheduler.submit``. In each returned row, ``shares`` is the mean
    number of requests in a pass, and ``ms_per_pass`` is the mean time from the start of a pass to
    the start of the next pass. The scheduler does not reuse keys and values of earlier prompts.
    Otherwise, repeated prompts would be computed only once.
    """
    progress.start("loads", len(running))
    rows = []
    for count in running:
        chosen = list(itertools.islice(itertools.cycle(prompts), max(len(prompts), ROUNDS * count)))
        with bundle.scheduler(
            max_running=count, max_waiting=len(chosen), prefix_cache_bytes=0
        ) as scheduler:
            scheduler.submit(tokens=chosen[0], **options).result()  # warm-up
            before, began = scheduler.stats, time.perf_counter()
            jobs = [scheduler.submit(tokens=prompt, **options) for prompt in chosen]
            for job in jobs:
                job.result()
            seconds, after = time.perf_counter() - began, scheduler.stats
        passes = after.passes - before.passes
        rows.append(
            {
                "running": count,
                "count": len(chosen),
                "passes": passes,
                "shares": (after.shares - before.shares) / max(1, passes),
                "ms_per_pass": 1e3 * seconds / max(1, passes),
                "requests_per_s": len(chosen) / seconds,
            }
        )
        progress.advance()
    return rows
