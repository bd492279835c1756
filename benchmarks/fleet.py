"""Compare the latencies that `dlm-export plan --fleet` predicts with measured latencies.

    python benchmarks/fleet.py BUNDLE --data FILE.jsonl [--loads 0.3,0.6,0.8] [--seconds 6] [--json FILE]

Each line of the file has a `prompt`. The steps are:

1. Measure the bundle as `dlm-export bench BUNDLE --data FILE --batch 1,2,4,8,16` does, but only the
   prompts. The bundle runs on one thread, so that the server and its clients have a core of their
   own on a machine with two cores.
2. For each load, submit prompts to a scheduler at random times. A load of 0.5 means half of the
   highest number of requests per second that `plan` predicts from the times of step 1.
3. Measure the time that a server adds to a request, with requests that are sent one at a time. Then
   send requests to the server at random times.

The script prints p50 and p95 of the predicted and of the measured latencies.
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
from datetime import date
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from shapes import machine

import dlm_runtime
from dlm_export.planning.loads import measure_loads, measure_overhead
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
    bundle: dlm_runtime.Bundle, prompts: list[list[int]], at: list[float], new: int
) -> list[float]:
    """Submit prompts at the given times. Returns the latencies in ms, in the order of arrival."""
    chosen = choice(at, len(prompts))
    ended = [0.0] * len(at)
    with bundle.scheduler(max_running=16, prefix_cache_bytes=0) as scheduler:

        def wait(number: int, job: Any) -> None:
            job.result()
            ended[number] = time.perf_counter()

        threads = []
        began = time.perf_counter()
        for number, moment in enumerate(at):
            time.sleep(max(0.0, began + moment - time.perf_counter()))
            job = scheduler.submit(tokens=prompts[chosen[number]], max_new_tokens=new)
            threads.append(threading.Thread(target=wait, args=(number, job)))
            threads[-1].start()
        for thread in threads:
            thread.join()
    return [1e3 * (end - began - moment) for end, moment in zip(ended, at, strict=True)]


async def through_server(
    url: str, texts: list[str], at: list[float], new: int, model: str
) -> list[float]:
    """Send prompts at the given times. Returns the latencies in ms, in the order of arrival."""
    chosen = choice(at, len(texts))
    limits = httpx.Limits(max_connections=256, max_keepalive_connections=256)
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as client:
        began = time.perf_counter()

        async def send(number: int) -> float:
            await asyncio.sleep(max(0.0, began + at[number] - time.perf_counter()))
            body = {"model": model, "prompt": texts[chosen[number]], "max_tokens": new}
            (await client.post("/v1/completions", json=body)).raise_for_status()
            return 1e3 * (time.perf_counter() - began - at[number])

        return list(await asyncio.gather(*(send(number) for number in range(len(at)))))


def choice(at: list[float], count: int) -> np.ndarray:
    """Choose a prompt for each time of arrival."""
    return np.random.default_rng(SEED).integers(count, size=len(at))


def compared(predicted: np.ndarray, measured: list[float]) -> dict[str, float]:
    row = {}
    for name, percent in (("p50", 50), ("p95", 95)):
        row[f"predicted_{name}_ms"] = float(np.percentile(predicted, percent))
        row[f"measured_{name}_ms"] = float(np.percentile(measured, percent))
        row[f"{name}_error"] = row[f"predicted_{name}_ms"] / row[f"measured_{name}_ms"] - 1
    return row


def show(name: str, load: float, per_s: float, row: dict[str, float]) -> None:
    shown = "  ".join(
        f"{each} {row[f'predicted_{each}_ms']:6.2f} ms predicted, {row[f'measured_{each}_ms']:6.2f} ms measured "
        f"({row[f'{each}_error']:+.0%})"
        for each in ("p50", "p95")
    )
    print(f"{name:10} load {load:.2f}, {per_s:6.1f} requests/s: {shown}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--loads", default="0.3,0.6,0.8")
    parser.add_argument("--seconds", type=float, default=6)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    texts = [json.loads(line)["prompt"] for line in arguments.data.read_text().splitlines()][
        : arguments.samples
    ]
    loads = list(map(float, arguments.loads.split(",")))
    new = arguments.max_new_tokens
    rows: list[dict[str, Any]] = []
    with dlm_runtime.open(arguments.bundle, threads=1) as bundle:
        assert bundle.tokenizer is not None
        encoded = [bundle.tokenizer.encode(text) for text in texts]
        nfe = tuple(bundle.generate(tokens=each, max_new_tokens=new).nfe for each in encoded)
        measured = measure_loads(bundle, encoded, {"max_new_tokens": new}, RUNNING, Silent())
        service = Service(
            nfe,
            tuple(sorted((each["shares"], each["ms_per_pass"]) for each in measured)),
            measure_overhead(bundle, encoded, {"max_new_tokens": new}),
        )
        most = service.most_per_s(16)
        print(service)
        print(
            f"{statistics.mean(nfe):.2f} passes, {service.alone_ms:.2f} ms alone, {most:.1f} requests/s at most"
        )
        predicted = {}
        for load in loads:
            per_s = load * most
            at = moments(per_s, arguments.seconds, SEED)
            passes = np.array(nfe)[choice(at, len(nfe))]
            predicted[load] = replay(service, 16, 1e3 * np.array(at), passes)
            row = compared(predicted[load], through_scheduler(bundle, encoded, at, new))
            show("scheduler", load, per_s, row)
            rows.append({"what": "scheduler", "load": load, "per_s": per_s} | row)
    with serving(arguments.bundle, "--threads", "1", "--no-log") as served:
        spaced = [0.02 * number for number in range(100)]
        alone = asyncio.run(through_server(served.url, texts, spaced, new, served.model))
        overhead = max(0.0, statistics.median(alone[10:]) - service.alone_ms)
        print(f"The server adds {overhead:.2f} ms to a request")
        for load in loads:
            per_s = load * most
            at = moments(per_s, arguments.seconds, SEED)
            found = asyncio.run(through_server(served.url, texts, at, new, served.model))
            row = compared(predicted[load] + overhead, found)
            show("server", load, per_s, row)
            rows.append({"what": "server", "load": load, "per_s": per_s} | row)
    if arguments.json is not None:
        result = {
            "machine": machine(),
            "date": date.today().isoformat(),
            "cores": os.cpu_count(),
            "requests": measured,
            "scheduler_overhead_ms": service.overhead_ms,
            "server_overhead_ms": overhead,
            "rows": rows,
        }
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
