"""Measure how much HTTP slows requests down, by comparing servers with a scheduler in this process.

    python benchmarks/http_cost.py BUNDLE --data FILE.jsonl [--service PROGRAM] [--connections 1,4,16,64]
        [--seconds 10] [--rounds 3] [--json FILE]

Each line of the file has a `prompt`. wrk must be installed. The script measures the requests per
second and the latencies of the following contestants, which take turns:

- "scheduler": coroutines of this process submit to a scheduler and wait, without HTTP.
- "dlm-export serve": wrk asks ``dlm-export serve`` in another process.
- "C service": wrk asks PROGRAM. examples/embed/README.md explains how to build this service.
- "scheduler, streamed": coroutines of this process read the events of jobs.
- "dlm-export serve, streamed": coroutines of this process read streamed answers.

For the streamed contestants, the script also measures the time to the first text.

All contestants run the bundle's default loop with the same limits. The clients and the servers run
on the same machine.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from serve import SCRIPT, Server, wrk
from shapes import machine
from tables import table

import dlm_runtime

RUNNING, WAITING = 16, 256
HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\n\r\n"
)
Ask = Callable[[str], Awaitable[float | None]]
"""Sends a prompt and waits for the whole answer. Returns the time when the first text arrived.

The result is None if the answer is not streamed."""


def percentiles(latencies: list[float], name: str) -> dict[str, float]:
    times = statistics.quantiles(latencies, n=100)
    return {f"{name}p{share}_ms": times[share - 1] for share in (50, 95, 99)}


async def ask_often(ask: Ask, prompts: list[str], count: int, seconds: float) -> dict[str, float]:
    """Let ``count`` coroutines send one request after another.

    Return the requests per second and the latencies in milliseconds.
    """
    given, firsts, latencies = itertools.cycle(prompts), [], []
    end = (began := time.perf_counter()) + seconds

    async def client() -> None:
        while (start := time.perf_counter()) < end:
            first = await ask(next(given))
            latencies.append(1e3 * (time.perf_counter() - start))
            if first is not None:
                firsts.append(1e3 * (first - start))

    await asyncio.gather(*(client() for _ in range(count)))
    row = {"per_s": len(latencies) / (time.perf_counter() - began), "failed": 0, "refused": 0}
    return row | percentiles(latencies, "") | (percentiles(firsts, "first_") if firsts else {})


def scheduler_row(
    bundle: dlm_runtime.Bundle, new_tokens: int, streamed: bool, *load: Any
) -> dict[str, float]:
    """Measure a scheduler in this process, and return its row of the table."""

    async def ask(prompt: str) -> float | None:
        job = scheduler.submit(prompt=prompt, max_new_tokens=new_tokens, events=streamed)
        if not streamed:
            await job
            return None
        first = None
        async for event in job:
            if first is None and event.text:
                first = time.perf_counter()
        return first

    with bundle.scheduler(max_running=RUNNING, max_waiting=WAITING) as scheduler:
        return asyncio.run(ask_often(ask, *load))


def streamed_row(port: int, fields: dict[str, Any], *load: Any) -> dict[str, float]:
    """Measure ``dlm-export serve`` with streamed answers, and return its row of the table.

    Each client uses one connection for all its requests.
    """

    async def run() -> dict[str, float]:
        idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

        async def ask(prompt: str) -> float | None:
            reader, writer = (
                idle.pop() if idle else await asyncio.open_connection("127.0.0.1", port)
            )
            body = json.dumps({"prompt": prompt, "stream": True, **fields}).encode()
            writer.write(HEAD % len(body) + body)
            first, line = None, b""
            while not line.startswith(b"data: [DONE]"):
                line = await reader.readline()
                if not line or line.startswith((b"HTTP/1.1 4", b"HTTP/1.1 5")):
                    raise SystemExit(f"the server did not answer: {line!r}")
                has_data = first is None and line.startswith(b"data: {")
                if has_data and json.loads(line[6:])["choices"][0]["text"]:
                    first = time.perf_counter()
            await reader.readuntil(b"0\r\n\r\n")  # the end of the chunked body
            idle.append((reader, writer))
            return first

        try:
            return await ask_often(ask, *load)
        finally:
            for _, writer in idle:
                writer.close()

    return asyncio.run(run())


def main() -> None:
    from serving_process import serving  # the import of shapes adds the tests' folder to the path

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--service", type=Path, help="the C service of examples/embed")
    parser.add_argument("--connections", default="1,4,16,64")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    prompts = [json.loads(line)["prompt"] for line in arguments.data.read_text().splitlines()]
    rows: dict[tuple[int, str], list[dict[str, float]]] = {}
    with TemporaryDirectory() as name, dlm_runtime.open(arguments.bundle) as bundle:
        folder, new_tokens = Path(name), arguments.max_new_tokens
        fields = {"model": arguments.bundle.resolve().name, "max_tokens": new_tokens}
        bodies = "".join(json.dumps({"prompt": prompt, **fields}) + "\n" for prompt in prompts)
        (folder / "bodies").write_text(bodies)
        (folder / "post.lua").write_text(SCRIPT)
        service = arguments.service and Server(arguments.service, arguments.bundle)
        with serving(arguments.bundle, "--no-log") as server:
            for round_number in range(arguments.rounds + 1):  # the first round only warms up
                for count in map(int, arguments.connections.split(",")):
                    seconds = arguments.seconds if round_number else 1
                    load = (prompts, count, seconds)
                    found = {
                        "scheduler": scheduler_row(bundle, new_tokens, False, *load),
                        "dlm-export serve": wrk(server, folder, count, seconds),
                        "scheduler, streamed": scheduler_row(bundle, new_tokens, True, *load),
                        "dlm-export serve, streamed": streamed_row(server.port, fields, *load),
                    }
                    if service:
                        found["C service"] = wrk(service, folder, count, seconds)
                    if round_number:
                        for who, row in found.items():
                            rows.setdefault((count, who), []).append(row)
            if exit_code := server.stop():
                raise SystemExit(f"the server ended with {exit_code}")
        if service:
            service.stop()
    result: dict[str, Any] = {"machine": machine()}
    lines = []
    for (count, who), found_rows in rows.items():
        row = {key: statistics.median(each[key] for each in found_rows) for key in found_rows[0]}
        spread = [round(each["per_s"], 1) for each in found_rows]
        result[f"{count} connections, {who}"] = row | {"per_s_all": spread}
        times = [
            " / ".join(f"{row[key]:.3g}" for key in keys) if keys[0] in row else ""
            for keys in (
                [f"{name}p{share}_ms" for share in (50, 95, 99)] for name in ("first_", "")
            )
        ]
        rate = f"{row['per_s']:.0f} ({min(spread):.0f} .. {max(spread):.0f})"
        lines.append([str(count), who, rate, *times, f"{row['failed'] + row['refused']:.0f}"])
    titles = ["connections", "requests go to", "requests/s"]
    titles += [f"{what}, p50 / p95 / p99, ms" for what in ("first text", "whole answer")]
    print(table([*titles, "failed"], lines))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
