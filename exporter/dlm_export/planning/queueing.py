"""Predicts how long requests wait and run on replicas of a server, by simulating their queues.

Each replica runs one scheduler. Requests arrive as a Poisson process, and each request goes to a
random replica, so the arrivals at one replica are a Poisson process too. The simulation of a replica
follows the rules of the scheduler in ``runtime/native/src/decode/runner.cc``:

- At most ``max_running`` requests run. All other requests wait, and start in the order of arrival.
- A pass computes several of the running requests. It first takes requests that have had no pass
  yet, and then the requests that have waited longest since their last pass.
- A request that arrives during a pass starts after the pass.

The formulas for M/G/k queues do not apply to such a server, because requests share passes, and a
pass with more requests takes longer.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from dataclasses import dataclass, replace

import numpy as np

REQUESTS = 20_000  # number of requests to simulate, if they need at most ``MOST_PASSES`` passes
MOST_PASSES = 400_000
LEAST_REQUESTS = 4_000
WARM_UP = 0.1  # the latencies of this share of the requests, at the start, are ignored
STEPS = 100  # a replica's load is planned in steps of one hundredth of the highest possible load


@dataclass(frozen=True)
class Service:
    """How a replica computes requests.

    - ``nfe``: the possible numbers of passes of a request, which are all equally likely.
    - ``pass_ms``: pairs ``(requests, ms)``: a pass with this many requests takes this many
      milliseconds. The pairs are in ascending order. Times between two pairs are interpolated. The
      rounded number of requests in the last pair is the largest number of requests in a pass.
    - ``overhead_ms``: time that is added to each request. Other requests may run during this time.
    - ``paces``: the smallest and the largest factor by which all pass times changed between the
      rounds of a measurement.
    """

    nfe: tuple[int, ...]
    pass_ms: tuple[tuple[float, float], ...]
    overhead_ms: float = 0.0
    paces: tuple[float, float] = (1.0, 1.0)

    @property
    def most_shares(self) -> int:
        """The largest number of requests in a pass."""
        return max(1, round(self.pass_ms[-1][0]))

    def times(self, max_running: int) -> list[float]:
        """Return the times in ms of passes with 1, 2, ... requests."""
        counts = np.arange(1, min(self.most_shares, max_running) + 1)
        shares, times = zip(*self.pass_ms, strict=True)
        # The last pair may have fewer requests than the largest pass, because a measured number is a
        # mean. A pass with more requests takes more time in proportion.
        more = np.maximum(1, counts / shares[-1])
        return [float(ms) for ms in np.interp(counts, shares, times) * more]

    @property
    def alone_ms(self) -> float:
        """The mean time of a request that runs alone."""
        return self.overhead_ms + self.times(1)[0] * sum(self.nfe) / len(self.nfe)

    def most_per_s(self, max_running: int) -> float:
        """Return the largest number of requests per second that a replica can complete.

        At this load, requests always wait, so each pass contains as many requests as possible.
        """
        times = self.times(max_running)
        return 1e3 * len(times) / times[-1] * len(self.nfe) / sum(self.nfe)


@dataclass(frozen=True)
class Latencies:
    """Percentiles of the latency in ms, from a request's arrival to its end."""

    p50_ms: float
    p95_ms: float
    p99_ms: float


@dataclass(frozen=True)
class Replicas:
    """A number of replicas. ``load`` is each replica's share of its highest possible load."""

    count: int
    load: float
    latencies: Latencies


def simulate(
    service: Service, max_running: int, per_s: float, requests: int = REQUESTS, seed: int = 0
) -> np.ndarray:
    """Simulate one replica, and return the latencies of all requests in ms, fp64 ``[requests]``.

    ``per_s`` is the mean number of requests that arrive per second.
    """
    draw = np.random.default_rng(seed)
    arrivals = np.cumsum(draw.exponential(1e3 / per_s, requests))
    return replay(service, max_running, arrivals, draw.choice(np.array(service.nfe), requests))


def replay(
    service: Service, max_running: int, arrivals_ms: np.ndarray, nfe: np.ndarray
) -> np.ndarray:
    """Simulate one replica for known requests, and return their latencies in ms, fp64.

    ``arrivals_ms`` must increase. ``nfe`` contains the number of passes of each request.
    """
    arrivals, left = arrivals_ms.tolist(), nfe.tolist()
    times = service.times(max_running)
    most, now, arrived = len(times), 0.0, 0
    new, old = deque[int](), deque[int]()  # running requests before and after their first pass
    ended = np.zeros(len(arrivals))
    while arrived < len(arrivals) or new or old:
        if not new and not old:
            now = max(now, arrivals[arrived])
        while (
            arrived < len(arrivals)
            and arrivals[arrived] <= now
            and len(new) + len(old) < max_running
        ):
            new.append(arrived)
            arrived += 1
        chosen = [new.popleft() for _ in range(min(most, len(new)))]
        chosen += [old.popleft() for _ in range(min(most - len(chosen), len(old)))]
        now += times[len(chosen) - 1]
        for request in chosen:
            left[request] -= 1
            if left[request] > 0:
                old.append(request)
            else:
                ended[request] = now
    found: np.ndarray = ended - arrivals_ms + service.overhead_ms
    return found


def latencies_at(service: Service, max_running: int, load: float) -> Latencies:
    """Return the latencies of a replica whose load is the share ``load`` of its highest load.

    ``load`` must be less than 1, and is rounded up to a multiple of ``1 / STEPS``.
    """
    alone = service.times(1)[0]
    # Use the time of a pass with one request as the unit of time, so that devices that differ only
    # in speed share one cached simulation.
    pass_ms = tuple((shares, round(ms / alone, 6)) for shares, ms in service.pass_ms)
    relative = replace(service, pass_ms=pass_ms, overhead_ms=0.0, paces=(1.0, 1.0))
    found = _simulated(relative, max_running, math.ceil(load * STEPS - 1e-9))
    return Latencies(*(service.overhead_ms + alone * value for value in found))


def p95_range(service: Service, max_running: int, load: float) -> tuple[float, float | None]:
    """Return the p95 in ms for the smallest and for the largest of the service's ``paces``.

    The number of requests per second stays the same, so slower passes mean a higher load. The second
    value is ``None`` if the replica cannot complete this number of requests per second.
    """
    found: list[float | None] = []
    for pace in service.paces:
        pass_ms = tuple((shares, pace * ms) for shares, ms in service.pass_ms)
        paced = replace(service, pass_ms=pass_ms)
        is_steady = load * pace <= (STEPS - 1) / STEPS
        found.append(latencies_at(paced, max_running, load * pace).p95_ms if is_steady else None)
    low, high = found
    assert low is not None  # the smallest pace is at most 1
    return low, high


@functools.lru_cache(maxsize=1 << 12)
def _simulated(service: Service, max_running: int, step: int) -> tuple[float, float, float]:
    per_s = service.most_per_s(max_running) * max(step, 1) / STEPS
    passes = sum(service.nfe) / len(service.nfe)
    requests = max(LEAST_REQUESTS, min(REQUESTS, int(MOST_PASSES / passes)))
    found = simulate(service, max_running, per_s, requests)[int(WARM_UP * requests) :]
    p50, p95, p99 = np.percentile(found, (50, 95, 99)).tolist()
    return p50, p95, p99


def fewest_replicas(
    service: Service, max_running: int, per_s: float, p95_ms: float
) -> Replicas | None:
    """Find the smallest number of replicas for which 95% of requests take at most ``p95_ms``.

    Returns ``None`` if even a replica without load is too slow.
    """
    low, high = 0, STEPS - 1  # the bounds of the highest load for which ``p95_ms`` is met, in steps
    while low < high:
        step = (low + high + 1) // 2
        if latencies_at(service, max_running, step / STEPS).p95_ms <= p95_ms:
            low = step
        else:
            high = step - 1
    if low == 0:
        return None
    most = service.most_per_s(max_running)
    count = math.ceil(per_s / (most * low / STEPS) - 1e-9)
    load = per_s / (count * most)
    return Replicas(count, load, latencies_at(service, max_running, load))
