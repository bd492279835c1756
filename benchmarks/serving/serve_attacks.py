"""Attack ``dlm-export serve`` and measure how long other requests wait during the attack.

    python -m benchmarks.serving.serve_attacks [BUNDLE] [--only NAME ...] [--before 5] [--threads 0]
        [--kept] [--elsewhere] [--json FILE]

Without BUNDLE, the server has a random INT8 denoiser with 89 million parameters, as in
``text_bundle``, and each chat takes one pass over 128 new tokens.

All attacks are made on the same server, one after another. A polite client sends one chat after
another. First, the polite client uses the server alone for a few seconds. Then the attack begins,
and the polite client continues. Each chat uses a new connection. With --kept, all chats use the
same connection. With --elsewhere, the attacker attacks a second server on the same machine, so that
the polite client is delayed only because the servers share the processor. --threads is the number
of threads that compute the passes; with 0, the server uses all cores for the passes. Each attack
runs in a separate process with the lowest priority, so that the attacker's own processor time
hardly delays the polite client. All attackers except "wrong keys" have a valid API key. The script
prints a Markdown table with a row for each attack:

- got: how often the attacker got each status or other result.
- p50 and longest: latencies of the polite client, without and during the attack.
- pass: the mean time of a denoiser pass without the attack.
- memory: the largest resident memory of the server during the attack.

The exit code is 1 if a request of the polite client fails.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import select
import socket
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from http.client import HTTPConnection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.shapes import machine, text_bundle
from benchmarks.tables import table
from dlm_serve.fields import commas_for

KEY = "a-valid-key"
CHAT = "/v1/chat/completions"
MOST_S = 60.0
ONE_PASS = {"preset": "llada", "steps": 1, "policy": {"block_length": 128}}
PAUSE_S = 0.02
"""Seconds between two requests of the polite client."""


class Target:
    """The server that an attack talks to."""

    def __init__(self, host: str, port: int, model: str, one_pass: bool) -> None:
        self.host, self.port, self.model, self.one_pass = host, port, model, one_pass

    def connect(self) -> socket.socket:
        return socket.create_connection((self.host, self.port), timeout=MOST_S)

    def head(self, path: str, *lines: str, key: str = KEY) -> bytes:
        """Return the head of a POST request, without the empty line at its end."""
        first = (f"POST {path} HTTP/1.1", "host: localhost", "content-type: application/json")
        every = (*first, f"authorization: Bearer {key}", *lines)
        return "".join(f"{line}\r\n" for line in every).encode()

    def post(self, body: bytes, path: str = CHAT, key: str = KEY) -> str:
        """Send a request on a new connection and return the status of the response."""
        with self.connect() as client:
            length = f"content-length: {len(body)}"
            client.sendall(self.head(path, length, "connection: close", key=key) + b"\r\n" + body)
            return status_of(client)

    def context(self) -> int:
        """Return the longest context of the server's models, in tokens."""
        client = HTTPConnection(self.host, self.port, timeout=MOST_S)
        client.request("GET", "/v1/models", headers={"authorization": f"Bearer {KEY}"})
        models = json.loads(client.getresponse().read())["data"]
        client.close()
        return max(model["context_length"] for model in models)

    def chat(self, **fields: Any) -> bytes:
        message = {"role": "user", "content": "play jazz"}
        body = {"model": self.model, "messages": [message]} | fields
        if self.one_pass:
            body = {"max_tokens": 128, "dlm": ONE_PASS} | body
        return json.dumps(body).encode()


def status_of(client: socket.socket) -> str:
    """Return the status of the response that arrives on a connection."""
    from serving_process import read_all  # the import of shapes adds the tests' folder to the path

    found = read_all(client)
    return found.split(b" ", 2)[1].decode() if found.startswith(b"HTTP/") else "closed"


def trickle(clients: list[socket.socket], piece: bytes) -> Counter[str]:
    """Every second, send ``piece`` on each connection, until the server has closed them all."""
    found: Counter[str] = Counter()
    began = time.monotonic()
    while clients and time.monotonic() - began < MOST_S:
        time.sleep(1)
        for client in list(clients):
            is_readable = bool(select.select([client], [], [], 0)[0])
            try:
                if not is_readable:
                    client.sendall(piece)
                    continue
            except ConnectionError:
                pass
            found[f"{status_of(client)} after {time.monotonic() - began:.0f} s"] += 1
            client.close()
            clients.remove(client)
    found["open"] += len(clients)
    return +found


# ---- Attacks. Each function returns how often the attacker got each result. ----


def slow_headers(target: Target) -> Counter[str]:
    clients = [target.connect() for _ in range(100)]
    for client in clients:
        client.sendall(target.head(CHAT))
    return trickle(clients, b"x")


def slow_body(target: Target) -> Counter[str]:
    clients = [target.connect() for _ in range(100)]
    for client in clients:
        client.sendall(target.head(CHAT, "content-length: 1000") + b"\r\n{")
    return trickle(clients, b" ")


def slow_reader(target: Target) -> Counter[str]:
    """Ask for many large responses, and never read them."""
    poll = select.poll()
    clients = {}
    for _ in range(50):
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((target.host, target.port))
        client.setblocking(False)
        request = (
            f"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {KEY}\r\n\r\n"
        )
        client.send(200 * request.encode())
        clients[client.fileno()] = client
        poll.register(client, 0)  # with 0, poll reports only errors
    found: Counter[str] = Counter()
    began = time.monotonic()
    while clients and time.monotonic() - began < MOST_S:
        for number, _ in poll.poll(1000):
            poll.unregister(number)
            clients.pop(number).close()
            found[f"closed after {time.monotonic() - began:.0f} s"] += 1
    found["open"] += len(clients)
    return +found


def gigabyte_body(target: Target) -> Counter[str]:
    """Send a body of 1 GiB, with a Content-Length or in chunks, until the server answers."""
    found: Counter[str] = Counter()
    chunk = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
    for at in range(20):
        kind = ("transfer-encoding: chunked", "content-length: 1073741824")[at % 2]
        with target.connect() as client:
            client.sendall(target.head(CHAT, kind) + b"\r\n")
            sent = 0
            try:
                while sent < 1 << 30 and not select.select([client], [], [], 0)[0]:
                    client.sendall(chunk)
                    sent += len(chunk)
            except ConnectionError:
                pass
            found[status_of(client)] += 1
    return found


def tiny_requests(target: Target) -> Counter[str]:
    """Send 100,000 requests on 8 connections, 20 at a time on each connection."""
    found: Counter[str] = Counter()
    clients = [target.connect() for _ in range(8)]
    request = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
    for _ in range(100_000 // (8 * 20)):
        for client in clients:
            client.sendall(20 * request)
        for client in clients:
            answers, said = 0, b""
            while answers < 20:
                piece = client.recv(1 << 16)
                if not piece:
                    found["closed"] += 1
                    return found
                said += piece
                answers = said.count(b'{"status":"ok"}')
            found["200"] += said.count(b"HTTP/1.1 200")
    return found


def repeated(target: Target, bodies: list[bytes], times: int, **given: str) -> Counter[str]:
    """Send each body in turn, each time on a new connection."""
    return Counter(target.post(bodies[at % len(bodies)], **given) for at in range(times))


def together(target: Target, bodies: list[bytes], path: str = CHAT) -> Counter[str]:
    """Send all bodies at the same time."""
    with ThreadPoolExecutor(len(bodies)) as pool:
        return Counter(pool.map(lambda body: target.post(body, path), bodies))


def deep_json(target: Target) -> Counter[str]:
    start = target.chat()[:-1] + b', "metadata": '
    return repeated(target, [b"[" * 100_000, start + b'{"a":' * 100_000], 200)


def invalid_utf8(target: Target) -> Counter[str]:
    return repeated(
        target, [b"\xff\xfe", target.chat().replace(b"jazz", b"\xc3(\xed\xa0\x80")], 500
    )


def unknown_keys(target: Target) -> Counter[str]:
    """Send bodies of 1 MiB with as many unknown fields as possible."""
    fields = b",".join(b'"%x":0' % number for number in range(104_000))
    return repeated(target, [target.chat()[:-1] + b"," + fields + b"}"], 20)


def many_lists(target: Target) -> Counter[str]:
    """Send bodies of 1 MiB with as many lists as possible."""
    body = json.dumps({"model": target.model, "prompt": []}).encode()
    return repeated(target, [body[:-2] + b"[]," * 349_000 + b"[]]}"], 20, path="/v1/completions")


def largest_bodies(target: Target) -> Counter[str]:
    """Send the largest bodies that the limits allow: 16,000 unknown fields, or a long list of
    numbers.
    """
    fields = b",".join(b'"%x":0' % number for number in range(16_000))
    ones = b"1," * (commas_for(target.context()) - 2)
    numbers = b'{"model": "%s", "prompt": [%s1]}' % (target.model.encode(), ones)
    found = repeated(target, [target.chat()[:-1] + b"," + fields + b"}"], 10)
    return found + repeated(target, [numbers], 10, path="/v1/completions")


def schema(number: int) -> dict[str, Any]:
    """Return a schema whose automaton has 2 ** 60 states. Each number gives a different schema."""
    pattern = f"^(a|b|{number})*a(a|b){{60}}$"
    made = {"name": "x", "schema": {"type": "string", "pattern": pattern}}
    return {"type": "json_schema", "json_schema": made}


def exploding_schemas(target: Target) -> Counter[str]:
    return repeated(target, [target.chat(response_format=schema(at)) for at in range(10)], 10)


def same_exploding_schema(target: Target) -> Counter[str]:
    return repeated(target, [target.chat(response_format=schema(99))], 50)


def schemas_in_policies(target: Target) -> Counter[str]:
    """Send schemas that explode as fields of the policy, where the server allows no schemas."""
    wanted = [schema(at)["json_schema"]["schema"] for at in range(6)]
    return together(target, [target.chat(dlm={"policy": {"schema": each}}) for each in wanted])


def enormous_holes(target: Target) -> Counter[str]:
    exact = {"new_tokens": (1 << 24) - 1}
    body = {"model": target.model, "prompt": "a", "suffix": "b", "dlm": exact}
    return repeated(target, [json.dumps(body).encode()], 200, path="/v1/fim/completions")


def megabytes_of_spaces(target: Target) -> Counter[str]:
    body = target.chat(messages=[{"role": "user", "content": 1_000_000 * " "}])
    return together(target, 20 * [body])


def long_texts(target: Target) -> Counter[str]:
    """Send the longest texts of spaces that the server tokenises."""
    spaces = (64 * target.context() - 200) * " "
    body = target.chat(messages=[{"role": "user", "content": spaces}])
    return together(target, 20 * [body])


def evicted_schemas(target: Target) -> Counter[str]:
    """Send 8 schemas, decisions that need 100 other constraints, and the same schemas again.

    The schemas are sent together, so that the server could compile all of them at the same time.
    """

    def known(number: int) -> bytes:
        pattern = f"^(a|b|{number})*a(a|b){{15}}$"
        made = {"name": "x", "schema": {"type": "string", "pattern": pattern}}
        wanted = {"type": "json_schema", "json_schema": made}
        return target.chat(response_format=wanted, max_tokens=16)

    def decision(number: int) -> bytes:
        options = dict.fromkeys((f"a{number}", f"b{number}"))
        questions = {"q": {"type": "choice", "criteria": options}}
        return json.dumps({"model": target.model, "state": "x", "questions": questions}).encode()

    schemas = [known(at) for at in range(8)]
    found = together(target, schemas)
    found += repeated(target, [decision(at) for at in range(100)], 100, path="/v1/decisions")
    return found + together(target, schemas)


def header_injection(target: Target) -> Counter[str]:
    """Send line breaks in headers whose value the response repeats."""
    found: Counter[str] = Counter()
    for at in range(500):
        value = (b"a\rset-cookie: b", b"a\nset-cookie: b", b"a%0d%0aset-cookie: b", b"a\x00b")[
            at % 4
        ]
        with target.connect() as client:
            head = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\nx-request-id: "
            client.sendall(head + value + b"\r\n\r\n")
            said = b""
            while piece := client.recv(1 << 16):
                said += piece
        lines = said.partition(b"\r\n\r\n")[0].splitlines()
        is_injected = any(line.startswith(b"set-cookie") for line in lines)
        found["injected" if is_injected else lines[0].split()[1].decode()] += 1
    return found


def path_traversal(target: Target) -> Counter[str]:
    names = ("../../etc/passwd", "/etc/passwd", "%2e%2e/demo", "a\x00b", "./" + target.model)
    return repeated(target, [target.chat(model=name) for name in names], 500)


def wrong_keys(target: Target) -> Counter[str]:
    return repeated(target, [target.chat()], 500, key="wrong")


def connections(target: Target) -> Counter[str]:
    """Open 2,000 connections for 8 seconds, and send nothing."""
    clients = [target.connect() for _ in range(2000)]
    time.sleep(8)
    poll = select.poll()
    for client in clients:
        poll.register(client, select.POLLIN)
    closed = len(poll.poll(0))
    for client in clients:
        client.close()
    return Counter({"closed": closed, "open": len(clients) - closed})


ATTACKS: dict[str, Callable[[Target], Counter[str]]] = {
    "100 connections with slow headers": slow_headers,
    "100 connections with slow bodies": slow_body,
    "50 connections that do not read": slow_reader,
    "20 bodies of 1 GiB": gigabyte_body,
    "100,000 tiny requests": tiny_requests,
    "200 bodies with 100,000 levels of JSON": deep_json,
    "500 bodies that are not UTF-8": invalid_utf8,
    "20 bodies with 104,000 unknown fields": unknown_keys,
    "20 bodies with 349,000 lists": many_lists,
    "20 bodies just below the limits": largest_bodies,
    "10 schemas that explode": exploding_schemas,
    "50 times the same schema that explodes": same_exploding_schema,
    "6 schemas that explode, in `dlm.policy`": schemas_in_policies,
    "200 holes of 16 million tokens": enormous_holes,
    "20 chats of 1 MB of spaces": megabytes_of_spaces,
    "20 chats of the longest text": long_texts,
    "100 decisions between 8 schemas": evicted_schemas,
    "500 injected headers": header_injection,
    "500 paths in `model`": path_traversal,
    "500 wrong keys": wrong_keys,
    "2,000 connections": connections,
}


def attack(name: str, target: Target, results: Any) -> None:
    os.nice(19)
    results.put(ATTACKS[name](target))


# ---- The polite client ----


class Polite:
    """A client that sends one chat after another.

    Args:
        target: The server.
        keeps: If True, all chats use one connection.
    """

    def __init__(self, target: Target, keeps: bool) -> None:
        self.target, self.keeps = target, keeps
        self.client = HTTPConnection(target.host, target.port, timeout=MOST_S)

    def ask(self) -> float | None:
        """Send one chat and return its milliseconds, or None if the chat failed."""
        began = time.perf_counter()
        try:
            body = self.target.chat()
            headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
            self.client.request("POST", CHAT, body, headers)
            response = self.client.getresponse()
            response.read()
        except OSError:
            return None
        finally:
            if not self.keeps:
                self.client.close()  # the next request then opens a new connection
        return 1e3 * (time.perf_counter() - began) if response.status == 200 else None

    def latencies(self, is_over: Callable[[], bool]) -> list[float | None]:
        found = []
        while not is_over() or not found:
            found.append(self.ask())
            time.sleep(PAUSE_S)
        return found


def passes(served: Any) -> tuple[float, float]:
    """Return the total seconds of the passes that the server has made, and their number."""
    text = served.client.get("/metrics", headers={"authorization": f"Bearer {KEY}"}).text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[:1] != "#")
    labels = f'{{model="{served.model}"}}'
    seconds, count = (
        float(values[f"dlm_scheduler_{name}_total{labels}"]) for name in ("busy_seconds", "passes")
    )
    return seconds, count


def measured(
    name: str, served: Any, polite: Polite, target: Target, before_s: float
) -> dict[str, Any]:
    """Run one attack on ``target``, and return its row of the table."""
    end = time.monotonic() + before_s
    seconds_before, passes_before = passes(served)
    alone = polite.latencies(lambda: time.monotonic() > end)
    seconds_after, passes_after = passes(served)
    mean_pass_s = (seconds_after - seconds_before) / (passes_after - passes_before)
    served.reset_peak()
    results: Any = multiprocessing.Queue()
    attacker = multiprocessing.Process(target=attack, args=(name, target, results))
    attacker.start()
    began = time.monotonic()
    during = polite.latencies(lambda: not attacker.is_alive() or not results.empty())
    seconds = time.monotonic() - began
    got = results.get(timeout=MOST_S)
    attacker.join()
    ok_alone, ok = ([ms for ms in each if ms is not None] for each in (alone, during))
    return {
        "attack": name,
        "got": dict(got),
        "seconds": seconds,
        "p50_alone_ms": statistics.median(ok_alone),
        "longest_alone_ms": max(ok_alone),
        "p50_ms": statistics.median(ok),
        "longest_ms": max(ok),
        "answered": len(ok),
        "failed": len(alone) + len(during) - len(ok_alone) - len(ok),
        "pass_ms": 1e3 * mean_pass_s,
        "peak_mib": served.memory_kib("VmHWM") / 1024,
    }


def cells(row: dict[str, Any]) -> list[str]:
    return [
        row["attack"],
        ", ".join(f"{count} x {status}" for status, count in row["got"].items()),
        f"{row['seconds']:.1f}",
        f"{row['p50_alone_ms']:.1f} / {row['p50_ms']:.1f}",
        f"{row['longest_alone_ms']:.0f} / {row['longest_ms']:.0f}",
        f"{row['pass_ms']:.1f}",
        f"{row['peak_mib']:.0f}",
        f"{row['failed']} of {row['answered'] + row['failed']}",
    ]


HEAD = [
    "attack",
    "the attacker got",
    "duration, s",
    "p50 without / during, ms",
    "longest without / during, ms",
    "one pass, ms",
    "peak memory, MiB",
    "polite requests that failed",
]


def main() -> int:
    from serving_process import serving

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", type=Path, nargs="?")
    parser.add_argument("--only", nargs="+", default=[""], help="parts of the names of attacks")
    parser.add_argument("--before", type=float, default=5, help="seconds without an attack")
    parser.add_argument("--threads", type=int, default=0, help="threads of the passes")
    parser.add_argument("--kept", action="store_true", help="keep the polite client's connection")
    parser.add_argument("--elsewhere", action="store_true", help="attack a second server")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    names = [name for name in ATTACKS if any(part in name for part in arguments.only)]
    rows = []
    with TemporaryDirectory() as folder:
        keys = Path(folder) / "keys"
        keys.write_text(f"{KEY}\n")
        options = ("--api-key-file", str(keys), "--no-log", "--threads", str(arguments.threads))
        with ExitStack() as stack:
            bundle = arguments.bundle or text_bundle()
            served = stack.enter_context(serving(bundle, *options))
            other = (
                stack.enter_context(serving(bundle, *options)) if arguments.elsewhere else served
            )
            target, own = (
                Target(each.host, each.port, each.model, one_pass=arguments.bundle is None)
                for each in (other, served)
            )
            polite = Polite(own, arguments.kept)
            for _ in range(20):
                polite.ask()  # warm-up
            for name in names:
                rows.append(measured(name, served, polite, target, arguments.before))
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
            exit_code = served.stop()
    print(table(HEAD, [cells(row) for row in rows]))
    if arguments.json:
        result = {"machine": machine(), "load_average": os.getloadavg(), "rows": rows}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    return int(exit_code != 0 or any(row["failed"] for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
