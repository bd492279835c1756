"""Tests of fleets: the simulated queues, and the replicas that `plan --fleet` plans."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_plan import invoke, measurement

from dlm_export.planning import queueing
from dlm_export.planning.queueing import (
    Service,
    fewest_replicas,
    latencies_at,
    p95_range,
    replay,
    simulate,
)
from dlm_export.planning.shapes import scaled_shape

SHARED = Service((1, 1, 2, 8), ((1.0, 10.0), (2.0, 12.0), (4.0, 16.0)))
LOADS = [
    {"running": 1, "count": 8, "passes": 8, "shares": 1.0, "ms_per_pass": 10.0},
    {"running": 4, "count": 8, "passes": 3, "shares": 4.0, "ms_per_pass": 16.0},
]
REQUESTS = {"nfe": [1, 2, 1, 4], "overhead_ms": 1.0, "loads": LOADS, "paces": [0.9, 1.0, 1.1]}


# ---- Queues ----


def test_a_queue_followed_by_hand() -> None:
    service = Service((1,), ((1.0, 10.0), (2.0, 12.0)), overhead_ms=1.0)
    # At most two requests share a pass. From 0 to 10 ms, a pass runs the first request. From 10 to
    # 22 ms, a pass runs the second and the third, because they had no pass yet and arrived before
    # the fourth. From 22 to 34 ms, a pass runs the fourth and the first. The fourth had no pass yet,
    # and the first has waited longest. From 34 to 44 ms, a pass runs the third.
    found = replay(service, 4, np.array([0.0, 1.0, 2.0, 3.0]), np.array([2, 1, 2, 1]))
    assert found.tolist() == [35.0, 22.0, 43.0, 32.0]


def test_requests_above_the_limit_wait_until_another_one_ends() -> None:
    service = Service((1,), ((1.0, 10.0), (2.0, 12.0)))
    found = replay(service, 1, np.array([0.0, 1.0, 2.0]), np.array([3, 1, 1]))
    assert found.tolist() == [30.0, 39.0, 48.0]


@pytest.mark.parametrize("load", [0.3, 0.7])
def test_with_equal_requests_one_at_a_time_the_wait_is_that_of_pollaczek_and_khinchine(
    load: float,
) -> None:
    found = simulate(Service((1,), ((1.0, 10.0),)), 1, load * 100, 60_000)
    assert found.mean() == pytest.approx(10 + 10 * load / (2 * (1 - load)), rel=0.05)


def test_a_replica_completes_as_many_requests_as_fill_its_passes() -> None:
    assert SHARED.most_per_s(16) == pytest.approx(4 / 16 * 1000 / 3)
    assert SHARED.most_per_s(1) == pytest.approx(1 / 10 * 1000 / 3)
    below, above = (simulate(SHARED, 16, times * SHARED.most_per_s(16)) for times in (0.9, 1.1))
    assert below[-100:].mean() < 2_000 < 10_000 < above[-100:].mean()


@pytest.fixture(scope="module")
def few_requests() -> Iterator[None]:
    """Simulate fewer requests, so that many services can be tried."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(queueing, "REQUESTS", 1000)
        patch.setattr(queueing, "LEAST_REQUESTS", 1000)
        queueing._simulated.cache_clear()
        yield
    queueing._simulated.cache_clear()


@pytest.mark.usefixtures("few_requests")
@settings(max_examples=20)
@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=4),
    st.floats(0.5, 50),
    st.integers(1, 16),
    st.floats(1, 2000),
    st.floats(1, 5000),
)
def test_replicas_keep_the_target_and_are_never_fewer_for_more_requests(
    nfe: list[int], ms: float, max_running: int, per_s: float, p95_ms: float
) -> None:
    service = Service(tuple(nfe), ((1.0, ms), (3.0, 1.5 * ms)))
    found = fewest_replicas(service, max_running, per_s, p95_ms)
    if found is None:
        assert latencies_at(service, max_running, 0.01).p95_ms > p95_ms
        return
    assert found.latencies.p95_ms <= p95_ms
    assert found.load == pytest.approx(per_s / found.count / service.most_per_s(max_running))
    more = fewest_replicas(service, max_running, 2 * per_s, p95_ms)
    easier = fewest_replicas(service, max_running, per_s, 2 * p95_ms)
    assert more is not None
    assert easier is not None
    assert easier.count <= found.count <= more.count


def test_devices_that_differ_only_in_speed_have_latencies_that_do_too() -> None:
    slow = Service(SHARED.nfe, tuple((shares, 2 * ms) for shares, ms in SHARED.pass_ms))
    one, other = (latencies_at(service, 8, 0.5) for service in (SHARED, slow))
    assert other.p95_ms == pytest.approx(2 * one.p95_ms)


def test_the_range_of_the_p95_has_no_end_if_slow_passes_overload_the_replica() -> None:
    varying = replace(SHARED, paces=(0.9, 1.25))
    usual = latencies_at(SHARED, 16, 0.6).p95_ms
    low, high = p95_range(varying, 16, 0.6)
    assert high is not None
    assert low < usual < high
    assert high == pytest.approx(1.25 * latencies_at(SHARED, 16, 0.75).p95_ms)
    assert p95_range(varying, 16, 0.8)[1] is None


# ---- Plans ----


def planned(*arguments: object) -> list[dict[str, Any]]:
    told = invoke("plan", "--sizes", "8B", "--new-tokens", 32, *arguments, "--json")
    assert told.exit_code == 0, told.stderr
    found: list[dict[str, Any]] = json.loads(told.stdout)["fleets"]
    return found


def test_a_fleet_costs_its_replicas() -> None:
    arguments = ("--targets", "h100", "--precisions", "bf16", "--price-per-hour", 2.5)
    rows = planned(*arguments, "--fleet", 20, "--p95-ms", 5000)
    assert [row["tokens_per_pass"] for row in rows] == [1, 2, 4, 8]
    for row in rows:
        assert row["basis"] == "lower limit"
        assert row["cost_per_hour"] == 2.5 * row["replicas"]
        assert row["cost_per_million_requests"] == pytest.approx(
            row["cost_per_hour"] / 3600 / 20 * 1e6
        )
        assert row["replicas"] * row["most_per_s"] * row["load"] == pytest.approx(20)
    counts = [row["replicas"] for row in rows]
    assert counts == sorted(counts, reverse=True)


def test_the_time_of_a_pass_can_be_given() -> None:
    arguments = ("--targets", "h100,cpu", "--precisions", "fp32,bf16", "--tokens-per-pass", 2)
    rows = planned(*arguments, "--fleet", 1, "--p95-ms", 60_000, "--pass-ms", "cpu=30")
    found = {row["target"]: row for row in rows}
    assert found["h100"]["basis"] == "lower limit"
    assert found["cpu"]["basis"] == "given"
    told = invoke("plan", "--sizes", "8B", "--new-tokens", 32, *arguments, "--json")
    passes = json.loads(told.stdout)["passes"]
    assert found["cpu"]["alone_ms"] == pytest.approx(30 * passes[0]["nfe"])


def test_a_target_below_the_time_of_one_request_has_no_fleet() -> None:
    arguments = ("--targets", "h100", "--precisions", "bf16", "--tokens-per-pass", 1)
    (row,) = planned(*arguments, "--fleet", 1, "--p95-ms", 1, "--price-per-hour", 1)
    names = ("replicas", "load", "p95_ms", "cost_per_hour", "cost_per_million_requests")
    assert [row[name] for name in names] == [None] * 5


def test_measured_requests_share_passes_in_the_plan(tmp_path: Path) -> None:
    path = tmp_path / "measured.json"
    parameters = scaled_shape("0.5B").network.parameter_count()
    bundle = {"precision": "int8", "parameters": parameters}
    path.write_text(json.dumps(measurement(requests=REQUESTS, bundle=bundle)))
    arguments = ("--targets", "cpu", "--precisions", "int8,int4", "--measured", path)
    memory = ("--prompt-tokens", 8, "--new-tokens", 8, "--sizes", "0.5B")
    told = invoke("plan", *memory, *arguments, "--fleet", 100, "--p95-ms", 90, "--json")
    rows = json.loads(told.stdout)["fleets"]
    row = next(row for row in rows if row["precision"] == "int8")
    assert (row["basis"], row["tokens_per_pass"]) == ("measured", None)
    assert row["alone_ms"] == 1 + 10 * 2
    assert row["most_per_s"] == pytest.approx(1000 * 4 / 16 / 2)
    assert row["p95_ms"] <= 90
    assert row["p95_low_ms"] < row["p95_ms"]
    assert row["p95_high_ms"] is None or row["p95_high_ms"] > row["p95_ms"]
    server = invoke(
        "plan", *memory, *arguments, "--fleet", 100, "--p95-ms", 90, "--overhead-ms", 9, "--json"
    )
    slower = next(row for row in json.loads(server.stdout)["fleets"] if row["precision"] == "int8")
    assert slower["alone_ms"] == row["alone_ms"] + 9
    path.write_text(
        json.dumps(measurement(requests=REQUESTS, bundle=bundle | {"parameters": parameters + 1}))
    )
    other = invoke("plan", *memory, *arguments, "--fleet", 100, "--p95-ms", 90, "--json")
    assert all(row["basis"] != "measured" for row in json.loads(other.stdout)["fleets"])
    path.write_text(json.dumps(measurement(requests=REQUESTS, bundle=bundle)))
    shown = invoke("plan", *memory, *arguments, "--fleet", 100, "--p95-ms", 90).stdout
    assert "Fleet for 100 requests/s with a p95 of at most 90 ms, 16 running per replica" in shown
    assert "cpu int8: p95 at the highest measured speed: " in shown
    assert max(map(len, shown[shown.index("Fleet for") :].splitlines())) <= 100


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--fleet", 5), "--fleet and --p95-ms belong together"),
        (("--fleet", "nan", "--p95-ms", 5), "--fleet must be a number above 0"),
        (("--pass-ms", 5), "--pass-ms belongs to --fleet"),
        (("--fleet", 5, "--p95-ms", 5, "--pass-ms", "x=5"), "write a number, or TARGET=NUMBER"),
        (("--fleet", 5, "--p95-ms", 5, "--batch", 2), "remove --batch"),
        (("--fleet", 5, "--p95-ms", 5), "needs the time of a pass"),
    ],
)
def test_wrong_usage_is_refused(arguments: tuple[object, ...], said: str) -> None:
    told = invoke("plan", "--sizes", "1B", "--targets", "cpu", *arguments)
    assert (told.exit_code, told.stdout) == (2, "")
    assert said in told.stderr


@pytest.mark.parametrize(
    "broken",
    [
        {"nfe": [0]},
        {"loads": []},
        {"loads": [{"shares": 1.0}]},
        {"paces": []},
    ],
)
def test_damaged_requests_are_refused(tmp_path: Path, broken: dict[str, Any]) -> None:
    path = tmp_path / "measured.json"
    path.write_text(json.dumps(measurement(requests=REQUESTS | broken)))
    told = invoke("plan", "--sizes", "1B", "--targets", "cpu", "--measured", path)
    assert (told.exit_code, told.stdout) == (2, "")
    assert "requests" in told.stderr
