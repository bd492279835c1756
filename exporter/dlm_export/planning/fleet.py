"""Plans how many replicas of a server are needed for a given latency, and what they cost.

``queueing`` simulates a replica. The times of its passes come from the first of these sources that
is available:

1. ``given``: the time of a pass that the user gives for a device.
2. ``measured``: the loads that ``bench --data --batch`` measured on this machine.
3. ``lower limit``: the plan's prediction. Real passes take longer, so a real server may need more
   replicas than the plan predicts.

Requests share passes only if ``bench`` has measured shared passes. Otherwise, each pass computes
one request.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from dlm_export.planning.measured import Measured
from dlm_export.planning.plan import Plan, PlanError
from dlm_export.planning.predict import Prediction
from dlm_export.planning.queueing import Service, fewest_replicas, p95_range

GIVEN, MEASURED, LOWER_LIMIT = "given", "measured", "lower limit"


@dataclass(frozen=True)
class Demand:
    """The requests that a fleet must serve, and the latency that it must achieve.

    - ``per_s``: mean number of requests per second.
    - ``p95_ms``: the required latency in ms. 95% of the requests must take at most this time.
    - ``max_running``: largest number of requests that run at the same time on a replica.
    - ``overhead_ms``: time that a server adds to each request outside the scheduler.
    - ``pass_ms``: maps the names of targets to the time in ms of a pass of one request.
    """

    per_s: float
    p95_ms: float
    max_running: int = 16
    overhead_ms: float = 0.0
    pass_ms: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Fleet:
    """The replicas of one denoiser on one target, in one precision.

    - ``tokens_per_pass``: number of tokens that a pass commits. ``None`` if ``bench`` has measured
      the number of passes.
    - ``basis``: the source of the times: "given", "measured" or "lower limit".
    - ``alone_ms``: mean time of a request without other requests.
    - ``most_per_s``: largest number of requests per second that a replica can complete.
    - ``replicas``: number of replicas. ``None`` if even a replica without load is too slow.
    - ``load``: requests per second of each replica, divided by ``most_per_s``.
    - ``p95_low_ms``, ``p95_high_ms``: the p95 for the fastest and for the slowest round of the
      measurement. ``p95_high_ms`` is ``None`` if the replicas are too few at this speed. Both are
      ``None`` if the times are not measured.
    - ``cost_per_hour``, ``cost_per_million_requests``: ``None`` if the target's price is unknown.
    """

    denoiser: str
    target: str
    precision: str
    tokens_per_pass: float | None
    basis: str
    alone_ms: float
    most_per_s: float
    replicas: int | None = None
    load: float | None = None
    p50_ms: float | None = None
    p95_ms: float | None = None
    p95_low_ms: float | None = None
    p95_high_ms: float | None = None
    p99_ms: float | None = None
    cost_per_hour: float | None = None
    cost_per_million_requests: float | None = None


def plan_fleets(plan: Plan, demand: Demand, measured: Measured | None = None) -> list[Fleet]:
    """Plan a fleet for each denoiser, target, precision and number of tokens per pass.

    Only the first block length of the plan is used. Raises PlanError if no target has a time. Also
    raises PlanError if the plan sets a batch size, because a scheduler decides how many requests
    share a pass.
    """
    if plan.request.batch > 1:
        raise PlanError("--fleet plans single requests: remove --batch")
    found = [
        _fleet(each, per_pass, basis, service, plan, demand)
        for each in plan.predictions
        if each.block_length == plan.passes[0].block_length
        for per_pass, basis, service in _services(each, plan, demand, measured)
    ]
    if not found:
        raise PlanError(
            "--fleet needs the time of a pass on at least one target: give --pass-ms, or --measured with a file of "
            "`dlm-export bench BUNDLE --data FILE --batch 1,2,4,8 --json`"
        )
    return found


def _services(
    each: Prediction, plan: Plan, demand: Demand, measured: Measured | None
) -> Iterator[tuple[float | None, str, Service]]:
    """Yield (tokens per pass, source of times, ``Service``), once if requests were measured."""
    if each.fits is False:
        return
    given = demand.pass_ms.get(each.target)
    is_measured = each.is_calibrated and each.denoiser in plan.measured_denoisers
    if given is None and is_measured and measured is not None and measured.service:
        yield None, MEASURED, measured.service
        return
    passes = {
        made.tokens_per_pass: sum(made.counts.values())
        for made in plan.passes
        if made.denoiser == each.denoiser and made.block_length == each.block_length
    }
    if given is not None:
        for per_pass, nfe in passes.items():
            yield per_pass, GIVEN, Service((nfe,), ((1, given),))
        return
    for speed in each.speeds:
        ms = speed.ms_per_token * plan.request.new_tokens / speed.nfe
        yield speed.tokens_per_pass, LOWER_LIMIT, Service((speed.nfe,), ((1, ms),))


def _fleet(
    each: Prediction,
    per_pass: float | None,
    basis: str,
    service: Service,
    plan: Plan,
    demand: Demand,
) -> Fleet:
    service = replace(service, overhead_ms=service.overhead_ms + demand.overhead_ms)
    fleet = Fleet(
        each.denoiser,
        each.target,
        each.precision,
        per_pass,
        basis,
        service.alone_ms,
        service.most_per_s(demand.max_running),
    )
    found = fewest_replicas(service, demand.max_running, demand.per_s, demand.p95_ms)
    if found is None:
        return fleet
    more: dict[str, Any] = asdict(found.latencies)
    if basis == MEASURED:
        low, high = p95_range(service, demand.max_running, found.load)
        more |= {"p95_low_ms": low, "p95_high_ms": high}
    if (price := plan.request.prices.get(each.target)) is not None:
        cost = price * found.count
        per_million = cost / (3600 * demand.per_s) * 1e6
        more |= {"cost_per_hour": cost, "cost_per_million_requests": per_million}
    return replace(fleet, replicas=found.count, load=found.load, **more)
