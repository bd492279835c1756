"""Compare the latencies that `dlm-export plan --fleet` predicts with measured latencies.

    python benchmarks/fleet.py [BUNDLE] [--data FILE.jsonl] [--samples 64] [--max-new-tokens 64]
        [--steps 0] [--layers N] [--loads 0.3,0.6,0.8] [--seconds 6] [--repeats 4] [--json FILE]

Without BUNDLE, the denoiser is the random INT8 denoiser of `text_bundle`. With --layers N, it has
only N layers. Each line of the file has a `prompt`. With --steps N, each request takes N passes of
the preset `llada`. With 0, the bundle's default loop decides how many passes a request takes. The
script measures the bundle as `dlm-export bench BUNDLE --data FILE --batch 1,2,4,8,16` does, but
only the prompts. The bundle runs on one thread, so that the server and its clients can use the
other core of a machine with two cores. A load of 0.5 means half of the highest number of requests
per second that `plan` predicts from this measurement.

The speed of a machine changes over time. The script therefore repeats these steps:

1. Measure the time that a server adds to a request, with requests that are sent one at a time.
2. For each load, measure one round of `measure_service`. Then submit prompts to a scheduler at
   random times, and send requests to the server at random times.

The prediction uses the mean pass times of all rounds, multiplied by the pace of the two rounds that
were measured just before and just after the load, and the same times of arrival as the measurement.
The script prints the medians of p50 and p95 over the repeats, the lowest and the highest measured
p95, and the p95 that is predicted at the paces of the fastest and of the slowest round. It also
prints the share of time in which the host ran other virtual machines instead of this one (steal
time).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import threading
import time
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from shapes import DEMO, machine, text_bundle

import dlm_runtime
from dlm_export.planning.loads import measure_service
from dlm_export.planning.measured import service_of
from dlm_export.planning.queueing import Service, replay
from dlm_export.progress import Silent

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from serving_process import serving

RUNNING = (1, 2, 4, 8, 16)
SEED = 3


def moments(per_s: float, seconds: float, seed: int) -> list[float]:
    """Return random times of arrival in seconds."""
    draw = np.random.default_rng(seed)
    count = max(20, int(per_s * seconds))
    return np.cumsum(draw.exponential(1 / per_s, count)).tolist()


def through_scheduler(
    bundle: dlm_runtime.Bundle,
    prompts: list[list[int]],
    at: list[float],
    options: dict[str, Any],
    seed: int,
) -> list[float]:
    """Submit prompts at the given times. Returns the latencies in ms, in the order of arrival."""
    chosen = choice(at, len(prompts), seed)
    ended = [0.0] * len(at)
    with bundle.scheduler(max_running=16, prefix_cache_bytes=0) as scheduler:

        def wait(number: int, job: Any) -> None:
            job.result()
            ended[number] = time.perf_counter()

        threads = []
        began = time.perf_counter()
        for number, moment in enumerate(at):
            time.sleep(max(0.0, began + moment - time.perf_counter()))
            job = scheduler.submit(tokens=prompts[chosen[number]], **options)
            threads.append(threading.Thread(target=wait, args=(number, job)))
            threads[-1].start()
        for thread in threads:
            thread.join()
    return [1e3 * (end - began - moment) for end, moment in zip(ended, at, strict=True)]


async def through_server(
    url: str, texts: list[str], at: list[float], fields: dict[str, Any], seed: int
) -> list[float]:
    """Send prompts at the given times. Returns the latencies in ms, in the order of arrival."""
    chosen = choice(at, len(texts), seed)
    limits = httpx.Limits(max_connections=256, max_keepalive_connections=256)
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as client:
        began = time.perf_counter()

        async def send(number: int) -> float:
            await asyncio.sleep(max(0.0, began + at[number] - time.perf_counter()))
            body = {"prompt": texts[chosen[number]], **fields}
            (await client.post("/v1/completions", json=body)).raise_for_status()
            return 1e3 * (time.perf_counter() - began - at[number])

        return list(await asyncio.gather(*(send(number) for number in range(len(at)))))


def choice(at: list[float], count: int, seed: int) -> np.ndarray:
    """Choose a prompt for each time of arrival."""
    return np.random.default_rng(seed).integers(count, size=len(at))


@dataclass(frozen=True)
class Run:
    """The latencies of one load in one repeat."""

    what: str
    load: float
    at: list[float]
    seed: int
    latencies_ms: list[float]
    round: int  # the number of the round that was measured just before


@dataclass
class Measured:
    """Everything that the script measures."""

    nfe: tuple[int, ...]
    rounds: list[dict[str, Any]]
    most_per_s: float
    overheads_ms: list[float]  # latencies of requests that run alone on the server, in every repeat
    runs: list[Run]


def cost(measured_round: dict[str, Any]) -> float:
    """Return the mean ms of a pass per request in it."""
    return statistics.mean(row["ms_per_pass"] / row["shares"] for row in measured_round["loads"])


def service_from(nfe: tuple[int, ...], rounds: list[dict[str, Any]]) -> Service:
    """Make a ``Service`` from the results of several calls of ``measure_service``."""
    rows = [row for each in rounds for row in each["loads"]]
    times = [(row["shares"], row["ms_per_pass"], row["passes"]) for row in rows]
    mean = statistics.mean(map(cost, rounds))
    overhead = statistics.median(each["overhead_ms"] for each in rounds)
    return service_of(nfe, times, overhead, [cost(each) / mean for each in rounds])


def at_pace(service: Service, overhead_ms: float, pace: float) -> Service:
    """Multiply the times of passes by ``pace``, and add ``overhead_ms`` to each request."""
    pass_ms = tuple((shares, pace * ms) for shares, ms in service.pass_ms)
    return replace(service, pass_ms=pass_ms, overhead_ms=service.overhead_ms + overhead_ms)


def ticks() -> tuple[int, int]:
    """Return the machine's steal time and total time, in ticks. Linux only."""
    times = list(map(int, Path("/proc/stat").read_text().splitlines()[0].split()[1:9]))
    return times[7], sum(times)


def compared(predicted: list[np.ndarray], measured: list[list[float]]) -> dict[str, Any]:
    """Compare percentiles. Each list contains the latencies of one repeat."""
    row: dict[str, Any] = {}
    for name, percent in (("p50", 50), ("p95", 95)):
        ours = [float(np.percentile(each, percent)) for each in predicted]
        real = [float(np.percentile(each, percent)) for each in measured]
        row[f"predicted_{name}_ms"] = statistics.median(ours)
        row[f"measured_{name}_ms"] = statistics.median(real)
        row[f"measured_{name}s_ms"] = real
        row[f"{name}_error"] = statistics.median(ours) / statistics.median(real) - 1
    return row


def show(row: dict[str, Any]) -> None:
    real = row["measured_p95s_ms"]
    print(
        f"{row['what']:10} load {row['load']:.2f}, {row['per_s']:6.1f} requests/s: "
        f"p50 {row['predicted_p50_ms']:6.1f} ms predicted, {row['measured_p50_ms']:6.1f} measured; "
        f"p95 {row['predicted_p95_ms']:6.1f} ({row['low_p95_ms']:.1f} to {row['high_p95_ms']:.1f}) ms predicted, "
        f"{row['measured_p95_ms']:6.1f} ({min(real):.1f} to {max(real):.1f}) measured ({row['p95_error']:+.0%})",
        flush=True,
    )


def measure(arguments: argparse.Namespace) -> Measured:
    texts = [json.loads(line)["prompt"] for line in arguments.data.read_text().splitlines()][
        : arguments.samples
    ]
    loads = list(map(float, arguments.loads.split(",")))
    new = arguments.max_new_tokens
    loop = {"preset": "llada", "steps": arguments.steps} if arguments.steps else {}
    how = {"max_new_tokens": new, **loop}
    path = arguments.bundle or text_bundle(arguments.layers)
    with (
        dlm_runtime.open(path, threads=1) as bundle,
        serving(path, "--threads", "1", "--no-log") as served,
    ):
        fields = {"model": served.model, "max_tokens": new, "dlm": loop}
        assert bundle.tokenizer is not None
        encoded = [bundle.tokenizer.encode(text) for text in texts]
        nfe = tuple(bundle.generate(tokens=each, **how).nfe for each in encoded)
        found = Measured(nfe, [], 0.0, [], [])

        def measure_round() -> None:
            found.rounds.append(measure_service(bundle, encoded, how, RUNNING, Silent(), 1))

        for _ in range(3):
            measure_round()
        most = found.most_per_s = service_from(nfe, found.rounds).most_per_s(16)
        print(f"{statistics.mean(nfe):.2f} passes, {most:.1f} requests/s at most", flush=True)
        for number in range(arguments.repeats):
            before, seed = ticks(), SEED + number
            # A request starts after three times the latency of a request, so requests do not overlap.
            space_s = max(0.02, 3e-3 * service_from(nfe, found.rounds).alone_ms)
            spaced = [space_s * count for count in range(50)]
            alone = asyncio.run(through_server(served.url, texts, spaced, fields, seed))
            found.overheads_ms.append(statistics.median(alone[10:]))
            for load in loads:
                measure_round()
                at = moments(load * most, arguments.seconds, seed)
                by = len(found.rounds) - 1
                took = through_scheduler(bundle, encoded, at, how, seed)
                found.runs.append(Run("scheduler", load, at, seed, took, by))
                took = asyncio.run(through_server(served.url, texts, at, fields, seed))
                found.runs.append(Run("server", load, at, seed, took, by))
            steal, total = (now - then for now, then in zip(ticks(), before, strict=True))
            print(f"repeat {number + 1}: steal time {steal / total:.1%}", flush=True)
        measure_round()
    return found


def compare(found: Measured, service: Service, overhead_ms: float) -> list[dict[str, Any]]:
    """Return one row for each load of the scheduler and of the server."""
    mean = statistics.mean(map(cost, found.rounds))
    paces = [cost(each) / mean for each in found.rounds]
    nfe = np.array(found.nfe)

    def predict(run: Run, pace: float) -> np.ndarray:
        at_this_pace = at_pace(service, overhead_ms if run.what == "server" else 0.0, pace)
        return replay(
            at_this_pace, 16, 1e3 * np.array(run.at), nfe[choice(run.at, len(nfe), run.seed)]
        )

    rows = []
    for what, load in sorted({(run.what, run.load) for run in found.runs}):
        runs = [run for run in found.runs if (run.what, run.load) == (what, load)]
        measured = [run.latencies_ms for run in runs]
        usual = [predict(run, statistics.mean(paces[run.round : run.round + 2])) for run in runs]
        row = {"what": what, "load": load, "per_s": load * found.most_per_s}
        row |= compared(usual, measured)
        for name, pace in (("low_p95_ms", min(paces)), ("high_p95_ms", max(paces))):
            other = compared([predict(run, pace) for run in runs], measured)
            row[name] = other["predicted_p95_ms"]
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", type=Path, nargs="?")
    parser.add_argument("--data", type=Path, default=DEMO / "calibration.jsonl")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--loads", default="0.3,0.6,0.8")
    parser.add_argument("--seconds", type=float, default=6)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = measure(arguments)
    service = service_from(found.nfe, found.rounds)
    print(service)
    overhead = max(0.0, statistics.median(found.overheads_ms) - service.alone_ms)
    print(f"The server adds {overhead:.2f} ms to a request")
    rows = compare(found, service, overhead)
    for row in rows:
        show(row)
    if arguments.json is not None:
        result = {
            "machine": machine(),
            "date": date.today().isoformat(),
            "cores": os.cpu_count(),
            "rounds": found.rounds,
            "scheduler_overhead_ms": service.overhead_ms,
            "server_overhead_ms": overhead,
            "rows": rows,
        }
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
