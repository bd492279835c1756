"""Measure the memory of ``dlm-export serve`` while its clients disconnect at random moments.

    python -m benchmarks.serving.serve_soak BUNDLE [--minutes 10] [--clients 8] [--every 30] [--json FILE]

Each client sends one random request after another. A request asks for a whole answer or for a
stream. Some requests also ask for the canvas after each pass (`diffusing`) or for several answers,
contain a schema, or contain a wrong field. In two of three requests, the client disconnects before
it has the whole answer. The script prints the server's resident memory at intervals.

The exit code is 1 if a request was not answered although its client stayed connected. It is also 1
if the server still runs requests after all clients have disconnected.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.shapes import machine

TIMEOUT_S = 60.0
SHORT_S = 0.1
"""The maximum number of seconds after which a client disconnects.

After a longer time, most answers would already be complete."""
PROMPTS = ("turn on the kitchen lights", "remind me to call the garage at seven", "play jazz", "go")
SCHEMA = {
    "type": "object",
    "properties": {"room": {"enum": ["kitchen", "hall"]}, "level": {"type": "integer"}},
    "required": ["room", "level"],
    "additionalProperties": False,
}


def body_of(draw: random.Random, model: str) -> dict[str, Any]:
    """Return the body of a random request."""
    message = {"role": "user", "content": draw.choice(PROMPTS)}
    body: dict[str, Any] = {"model": model, "messages": [message]}
    body["max_tokens"] = draw.choice((16, 32, 64, 256))
    body["stream"] = draw.random() < 0.6
    body["n"] = draw.choice((1, 1, 1, 3))
    if body["stream"] and draw.random() < 0.5:
        body["diffusing"] = True
    if draw.random() < 0.2:
        named = {"name": "x", "schema": SCHEMA}
        body["response_format"] = {"type": "json_schema", "json_schema": named}
    if draw.random() < 0.4:
        policy = {"commit": "static", "steps_per_block": 64, "cache": "none"}
        body["dlm"] = {"policy": policy}
    if draw.random() < 0.05:
        body["colour"] = "red"
    return body


class Soak:
    """Runs requests from several threads.

    ``ended`` counts the requests that ended in each way, such as "answered".
    """

    def __init__(self, served: Any) -> None:
        self._served = served
        self.ended: Counter[str] = Counter()
        self.is_over = threading.Event()
        self._lock = threading.Lock()

    def work(self, seed: int) -> None:
        draw = random.Random(seed)
        while not self.is_over.is_set():
            how = self._one(draw)
            with self._lock:
                self.ended[how] += 1

    def count(self) -> int:
        with self._lock:
            return self.ended.total()

    def _one(self, draw: random.Random) -> str:
        body = body_of(draw, self._served.model)
        content = json.dumps(body).encode()
        first = ("POST /v1/chat/completions HTTP/1.1", "host: localhost", "connection: close")
        lines = (*first, "content-type: application/json")
        head = "\r\n".join([*lines, f"content-length: {len(content)}", "", ""]).encode()
        request = head + content
        leaves = draw.choice(("never", "while sending", "while reading"))
        with socket.create_connection((self._served.host, self._served.port), TIMEOUT_S) as client:
            try:
                if leaves == "while sending":
                    client.sendall(request[: draw.randrange(1, len(request))])
                    time.sleep(draw.uniform(0, SHORT_S))
                    return "left while sending"
                client.sendall(request)
                if leaves == "while reading":
                    return self._read_some(client, draw.uniform(0, SHORT_S))
                said = b""
                while piece := client.recv(1 << 16):
                    said += piece
            except OSError as err:
                return f"failed: {type(err).__name__}"
        if "colour" in body:
            return "wrong field" if b" 400 " in said[:20] else "failed: no error"
        is_whole = b"data: [DONE]" in said if body["stream"] else b'"usage"' in said
        return "answered" if b" 200 " in said[:20] and is_whole else f"failed: {said[:20]!r}"

    @staticmethod
    def _read_some(client: socket.socket, seconds: float) -> str:
        """Read for some time, then disconnect."""
        end = time.monotonic() + seconds
        said = b""
        while (left := end - time.monotonic()) > 0:
            client.settimeout(left)
            try:
                piece = client.recv(1 << 12)
            except TimeoutError:
                break
            if not piece:
                return "answered before it left"
            said += piece
        return "left in the middle of an answer" if said else "left before an answer"


def running(served: Any) -> int:
    """Return the number of requests that run or wait in the server."""
    lines = served.client.get("/metrics").text.splitlines()
    names = ("dlm_scheduler_running{", "dlm_scheduler_waiting{")
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith(names))


def main() -> int:
    from serving_process import serving  # the import of shapes adds the tests' folder to the path

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--every", type=float, default=30, help="seconds between two figures")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    resident_mib = []
    with serving(arguments.bundle, "--no-log") as served:
        soak = Soak(served)
        threads = [
            threading.Thread(target=soak.work, args=(seed,)) for seed in range(arguments.clients)
        ]
        began = time.monotonic()
        for thread in threads:
            thread.start()
        while time.monotonic() - began < 60 * arguments.minutes:
            resident_mib.append(served.memory_kib() / 1024)
            seconds, count = time.monotonic() - began, soak.count()
            print(f"{seconds:6.0f} s {count:7} requests {resident_mib[-1]:7.1f} MiB", flush=True)
            time.sleep(arguments.every)
        soak.is_over.set()
        for thread in threads:
            thread.join()
        end = time.monotonic() + 5
        while (left := running(served)) and time.monotonic() < end:
            time.sleep(0.1)
        resident_mib.append(served.memory_kib() / 1024)
        exit_code = served.stop()
    print(f"at the end {resident_mib[-1]:.1f} MiB, {left} requests still run, exit {exit_code}")
    print(", ".join(f"{count} {how}" for how, count in sorted(soak.ended.items())))
    if arguments.json:
        result = {"machine": machine(), "load_average": os.getloadavg()}
        result |= {"ended": dict(soak.ended), "resident_mib": resident_mib}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    return int(any(how.startswith("failed") for how in soak.ended) or left or exit_code)


if __name__ == "__main__":
    raise SystemExit(main())
