"""Measure the HTTP service of examples/embed/serve under load.

    python -m benchmarks.serving.serve SERVER BUNDLE --data FILE.jsonl [--seconds 30] [--soak 600] [--rounds 3] [--json FILE]

SERVER is the program that examples/embed/README.md builds. Each line of the file has a `prompt`.
wrk must be installed. wrk runs on the same machine as the server. It uses a fixed number of
connections, and sends the next request on a connection as soon as the previous request is answered.
The stages are:

- load: The script measures requests per second and latencies with 1, 4 and 16 connections. Two
  servers take turns: one runs 16 requests at the same time in shared passes, and one runs a single
  request at a time. The script prints medians of the rounds.
- soak: wrk uses 16 connections. The script prints the server's resident memory every ten seconds.
- overload: 64 clients use a server that runs 4 requests and queues 8 requests. A client that gets
  status 429 (queue full) waits for the time in the header Retry-After. The script compares the
  number of sent requests with the number of answered requests.
- stop: The script sends SIGTERM to the server while 16 clients send requests. It compares the
  number of accepted requests with the number of answered requests.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import threading
import time
from collections import Counter
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.shapes import machine
from dlm_runtime.abi import native as _native

RUNNING = 16
SCRIPT = """
local bodies, number = {}, 0
for line in io.lines(os.getenv("DLM_BODIES")) do bodies[#bodies + 1] = line end
local threads = 0
function setup(thread) thread:set("first", threads * 7); threads = threads + 1 end
function init() number = first end
function request()
  number = number % #bodies + 1
  return wrk.format("POST", "/v1/completions", {["Content-Type"] = "application/json"}, bodies[number])
end
function done(summary, latency)
  local e = summary.errors
  print(string.format(
    'RESULT {"requests": %d, "seconds": %.6f, "p50_ms": %.3f, "p95_ms": %.3f, "p99_ms": %.3f, "refused": %d, "failed": %d}',
    summary.requests, summary.duration / 1e6, latency:percentile(50) / 1e3, latency:percentile(95) / 1e3,
    latency:percentile(99) / 1e3, e.status, e.connect + e.read + e.write + e.timeout))
end
"""


class Server:
    """A running service."""

    def __init__(self, program: Path, bundle: Path, *options: str) -> None:
        environment = os.environ | {
            "DLM_ONNXRUNTIME": os.environ.get("DLM_ONNXRUNTIME")
            or _native.onnxruntime_library()
            or ""
        }
        command = [str(program), str(bundle), "--port", "0", *options]
        self.process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        found = re.search(r":(\d+), (.*)", self.process.stdout.readline())
        if found is None:
            raise SystemExit(self.process.communicate()[1])
        self.port, self.engine = int(found[1]), found[2]

    def resident_kib(self) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.findall(r"VmRSS:\s*(\d+)", status)[0])

    def stop(self) -> dict[str, int]:
        """Stop the service.

        Returns the counts that the service reported: the answers of each status, the accepted
        requests (``taken``), and the requests whose client disconnected (``gone``).
        """
        self.process.send_signal(signal.SIGTERM)
        said = self.process.communicate(timeout=60)[1]
        if self.process.returncode:
            raise SystemExit(f"the server ended with {self.process.returncode}: {said}")
        counts = {status: int(count) for count, status in re.findall(r"(\d+) answered (\d+)", said)}
        taken, gone = re.findall(r"(\d+) requests taken", said), re.findall(r"(\d+) given up", said)
        return counts | {"taken": int(taken[0]), "gone": int(gone[0])}


def wrk(server: Any, folder: Path, connections: int, seconds: float) -> dict[str, float]:
    """Run wrk once on the port of a server.

    ``requests`` is the number of answers. ``refused`` is the number of answers with a status other
    than 2xx.
    """
    command = [
        "wrk",
        "-t1",
        f"-c{connections}",
        f"-d{seconds:.0f}s",
        "--timeout",
        "60s",
        "-s",
        str(folder / "post.lua"),
    ]
    environment = os.environ | {"DLM_BODIES": str(folder / "bodies")}
    command.append(f"http://127.0.0.1:{server.port}")
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    row: dict[str, float] = json.loads(re.findall(r"^RESULT (.*)$", done.stdout, re.MULTILINE)[0])
    return row | {"per_s": row["requests"] / row["seconds"]}


def load(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    rows: dict[tuple[int, str], list[dict[str, float]]] = {}
    for _ in range(arguments.rounds):
        for connections in (1, 4, 16):
            for name, running in (("shared", RUNNING), ("one at a time", 1)):
                server = Server(
                    arguments.server,
                    arguments.bundle,
                    "--max-running",
                    str(running),
                    *arguments.limits,
                )
                wrk(server, folder, connections, 2)  # warm-up
                rows.setdefault((connections, name), []).append(
                    wrk(server, folder, connections, arguments.seconds)
                )
                server.stop()
    out = {}
    for (connections, name), found in rows.items():
        row = {key: round(statistics.median(each[key] for each in found), 3) for key in found[0]}
        out[f"{connections} connections, {name}"] = row | {
            "per_s_all": [round(each["per_s"], 1) for each in found]
        }
        times = f"p50 {row['p50_ms']:.1f}  p95 {row['p95_ms']:.1f}  p99 {row['p99_ms']:.1f} ms"
        print(
            f"{connections:3} connections, {name:14} {row['per_s']:7.1f} requests/s  {times}",
            flush=True,
        )
    return out


def soak(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    server = Server(arguments.server, arguments.bundle, *arguments.limits)
    samples: list[int] = []
    is_over = threading.Event()

    def sample() -> None:
        while not is_over.wait(10):
            samples.append(server.resident_kib())

    thread = threading.Thread(target=sample)
    thread.start()
    row = wrk(server, folder, 16, arguments.soak)
    is_over.set()
    thread.join()
    counts = server.stop()
    half = samples[len(samples) // 2 :]
    print(
        f"soak of {arguments.soak:.0f} s: {row['requests']:.0f} requests, {row['failed']:.0f} failed; the server: {counts}"
    )
    print(
        f"  resident KiB: first {samples[0]}, second half {min(half)} .. {max(half)}, last {samples[-1]}",
        flush=True,
    )
    return row | {"resident_kib": samples, "server": counts}


class Clients:
    """Threads that send requests, each on a separate connection, and count the answers."""

    def __init__(self, server: Server, folder: Path, count: int) -> None:
        self.server, self.bodies = server, (folder / "bodies").read_text().splitlines()
        self.outcomes: Counter[str] = Counter()
        self.latencies: list[float] = []
        self.lock, self.is_over = threading.Lock(), threading.Event()
        self.threads = [
            threading.Thread(target=self.run, args=(number,)) for number in range(count)
        ]
        for thread in self.threads:
            thread.start()

    def run(self, number: int) -> None:
        connection = HTTPConnection("127.0.0.1", self.server.port, timeout=60)
        while not self.is_over.is_set():
            number += 1
            began = time.perf_counter()
            outcome, wait = "unanswered", 0.0
            try:
                connection.request(
                    "POST", "/v1/completions", self.bodies[number % len(self.bodies)]
                )
                response = connection.getresponse()
                response.read()
                outcome, wait = str(response.status), float(response.getheader("Retry-After", "0"))
            except (HTTPException, OSError) as error:
                outcome = type(error).__name__
                connection.close()
                self.is_over.set()
            with self.lock:
                self.outcomes[outcome] += 1
                if outcome == "200":
                    self.latencies.append(1e3 * (time.perf_counter() - began))
            if wait:
                self.is_over.wait(wait)
        connection.close()

    def join(self) -> dict[str, int]:
        self.is_over.set()
        for thread in self.threads:
            thread.join()
        return dict(self.outcomes)


def overload(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    server = Server(
        arguments.server,
        arguments.bundle,
        "--max-running",
        "4",
        "--max-waiting",
        "8",
        *arguments.limits,
    )
    clients = Clients(server, folder, 64)
    time.sleep(arguments.seconds)
    outcomes = clients.join()
    counts = server.stop()
    times = statistics.quantiles(clients.latencies, n=100)
    sent = sum(outcomes.values())
    print(f"overload: {sent} sent, {outcomes}; the server: {counts}")
    print(f"  of 200: p50 {times[49]:.1f}, p99 {times[98]:.1f} ms", flush=True)
    return {
        "sent": sent,
        "outcomes": outcomes,
        "server": counts,
        "p50_ms": times[49],
        "p99_ms": times[98],
    }


def stop(arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    out = []
    for _ in range(arguments.rounds):
        server = Server(arguments.server, arguments.bundle, *arguments.limits)
        clients = Clients(server, folder, 16)
        time.sleep(5)
        began = time.perf_counter()
        counts = server.stop()
        seconds = time.perf_counter() - began
        outcomes = clients.join()
        out.append({"seconds": seconds, "server": counts, "clients": outcomes})
        print(
            f"stop: {1e3 * seconds:.0f} ms; the server: {counts}; the clients: {outcomes}",
            flush=True,
        )
    return out


STAGES = {"load": load, "overload": overload, "stop": stop, "soak": soak}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("server", type=Path)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--preset", default="fast-dllm")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--soak", type=float, default=600)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--stages", default=",".join(STAGES))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    arguments.limits = ["--max-tokens", str(arguments.max_new_tokens), "--preset", arguments.preset]
    prompts = [json.loads(line)["prompt"] for line in arguments.data.read_text().splitlines()]
    result: dict[str, Any] = {
        "machine": machine(),
        "load_average": os.getloadavg(),
        "max_new_tokens": arguments.max_new_tokens,
    }
    with TemporaryDirectory() as name:
        folder = Path(name)
        bodies = (
            json.dumps({"prompt": prompt, "max_tokens": arguments.max_new_tokens})
            for prompt in prompts
        )
        (folder / "bodies").write_text("\n".join(bodies) + "\n")
        (folder / "post.lua").write_text(SCRIPT)
        print(f"load of the machine before: {os.getloadavg()[0]:.2f}", flush=True)
        for stage in arguments.stages.split(","):
            result[stage] = STAGES[stage](arguments, folder)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
