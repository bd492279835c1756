"""Measure what HTTP costs: requests a second and latencies with and without ``dlm-export serve``.

    python benchmarks/http_cost.py BUNDLE --data FILE.jsonl [--connections 1,4,16,64] [--seconds 10] [--rounds 3] [--json FILE]

Each line of the file has a `prompt`. wrk must be installed. The contestants take turns:

- "scheduler": coroutines of this process submit to a scheduler and wait, without HTTP.
- "serve": wrk asks ``dlm-export serve`` in another process.

Both run the bundle's default loop with the same limits. wrk and the server share the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from serve import SCRIPT, wrk
from shapes import machine

import dlm_runtime


def scheduler_row(
    bundle: dlm_runtime.Bundle, prompts: list[str], new_tokens: int, count: int, seconds: float
) -> dict[str, float]:
    """Requests a second and milliseconds of ``count`` coroutines that submit and wait."""
    latencies: list[float] = []

    async def run() -> float:
        given, end = itertools.cycle(prompts), time.perf_counter() + seconds
        began = time.perf_counter()

        async def client() -> None:
            while (start := time.perf_counter()) < end:
                await scheduler.submit(prompt=next(given), max_new_tokens=new_tokens)
                latencies.append(1e3 * (time.perf_counter() - start))

        await asyncio.gather(*(client() for _ in range(count)))
        return time.perf_counter() - began

    with bundle.scheduler(max_running=16, max_waiting=256) as scheduler:
        taken = asyncio.run(run())
    times = statistics.quantiles(latencies, n=100)
    return {
        "per_s": len(latencies) / taken,
        "p50_ms": times[49],
        "p95_ms": times[94],
        "p99_ms": times[98],
        "failed": 0,
        "refused": 0,
    }


def main() -> None:
    from serving_process import serving  # shapes adds its folder to the path

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--connections", default="1,4,16,64")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    prompts = [json.loads(line)["prompt"] for line in arguments.data.read_text().splitlines()]
    rows: dict[str, list[dict[str, float]]] = {}
    with TemporaryDirectory() as name, dlm_runtime.open(arguments.bundle) as bundle:
        folder, new_tokens = Path(name), arguments.max_new_tokens
        fields = {"model": arguments.bundle.resolve().name, "max_tokens": new_tokens}
        bodies = "".join(json.dumps({"prompt": prompt, **fields}) + "\n" for prompt in prompts)
        (folder / "bodies").write_text(bodies)
        (folder / "post.lua").write_text(SCRIPT)
        with serving(arguments.bundle, "--no-log") as server:
            for round_number in range(arguments.rounds + 1):  # the first one only warms up
                for count in map(int, arguments.connections.split(",")):
                    seconds = arguments.seconds if round_number else 1
                    found = {
                        "scheduler": scheduler_row(bundle, prompts, new_tokens, count, seconds),
                        "serve": wrk(server, folder, count, seconds),
                    }
                    if round_number:
                        for who, row in found.items():
                            rows.setdefault(f"{count} connections, {who}", []).append(row)
            if exit_code := server.stop():
                raise SystemExit(f"the server ended with {exit_code}")
    result: dict[str, Any] = {"machine": machine()}
    for title, found_rows in rows.items():
        row = {key: statistics.median(each[key] for each in found_rows) for key in found_rows[0]}
        spread = [round(each["per_s"], 1) for each in found_rows]
        result[title] = row | {"per_s_all": spread}
        print(
            f"{title:28} {row['per_s']:7.1f} requests/s ({min(spread)} .. {max(spread)})  p50 {row['p50_ms']:.1f}  "
            f"p95 {row['p95_ms']:.1f}  p99 {row['p99_ms']:.1f} ms  {row['failed'] + row['refused']:.0f} failed"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
