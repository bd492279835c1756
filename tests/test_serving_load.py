"""Tests of ``dlm-export serve`` under load.

No request may be lost because of a signal or a full queue.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import json
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from serving_process import Served, serving

httpx = pytest.importorskip("httpx")
pytest.importorskip("uvicorn")

CLIENTS = 4
BODY = {
    "messages": [{"role": "user", "content": "turn on the kitchen lights"}],
    "max_tokens": 32,
    # the answer takes 32 passes
    "dlm": {"policy": {"commit": "static", "steps_per_block": 4096, "cache": "none"}},
}


class Load:
    """Several clients. Each client sends one request after another until ``is_over`` is set.

    ``statuses`` maps the ids of answered requests to HTTP status codes. ``lost`` contains the ids
    of requests without a complete answer.
    """

    def __init__(self, served: Served) -> None:
        self._served = served
        self.is_over = threading.Event()
        self.statuses: dict[str, int] = {}
        self.lost: list[str] = []
        self._numbers = itertools.count()
        self.threads = [threading.Thread(target=self._run) for _ in range(CLIENTS)]

    def _run(self) -> None:
        with httpx.Client(base_url=self._served.url, timeout=120) as client:
            while not self.is_over.is_set():
                number = next(self._numbers)
                body = BODY | {"model": self._served.model, "stream": number % 2 == 0}
                try:
                    response = client.post(
                        "/v1/chat/completions", json=body, headers={"x-request-id": f"r{number}"}
                    )
                except httpx.TransportError:
                    self.lost.append(f"r{number}")
                    continue
                is_whole = number % 2 == 1 or response.text.endswith("data: [DONE]\n\n")
                if response.status_code == 200 and not is_whole:
                    self.lost.append(f"r{number}")
                self.statuses[f"r{number}"] = response.status_code


def wait_for_answers(load: Load, count: int) -> None:
    end, goal = time.monotonic() + 120, len(load.statuses) + count
    while len(load.statuses) < goal:
        assert time.monotonic() < end
        time.sleep(0.01)


@contextmanager
def loaded(served: Served) -> Iterator[Load]:
    """A context in which clients send requests."""
    load = Load(served)
    for thread in load.threads:
        thread.start()
    try:
        wait_for_answers(load, CLIENTS)
        yield load
    finally:
        load.is_over.set()
        for thread in load.threads:
            thread.join()


def test_signals_under_load_lose_no_accepted_request(demo_bundle: Path) -> None:
    """SIGHUP loads the model again, and SIGTERM ends the server."""
    with serving(demo_bundle) as served:
        created = served.client.get("/v1/models").json()["data"][0]["created"]
        time.sleep(1.1)  # the server reports a model's time in whole seconds
        with loaded(served) as load:
            served.process.send_signal(signal.SIGHUP)
            end = time.monotonic() + 60
            while served.client.get("/v1/models").json()["data"][0]["created"] == created:
                assert time.monotonic() < end
                time.sleep(0.02)
            wait_for_answers(load, CLIENTS)
            assert not load.lost
            assert served.stop() == 0
        lines = [json.loads(line) for line in served.said().splitlines() if line[:1] == "{"]
    logged = {line["id"]: line["status"] for line in lines if line["path"] != "/v1/models"}
    assert set(load.statuses.values()) == {200}
    assert logged == load.statuses  # the server logged each request that it accepted
    assert load.lost  # requests that came after the signal get no answer
    assert not logged.keys() & set(load.lost)


def test_a_full_queue_gets_429_and_the_retries_of_openais_client_outlast_it(
    demo_bundle: Path,
) -> None:
    with serving(demo_bundle, "--no-log", "--max-running", "1", "--max-waiting", "1") as served:
        path, body = "/v1/chat/completions", BODY | {"model": served.model}
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda _: served.client.post(path, json=body), range(8)))
        assert {each.status_code for each in found} == {200, 429}
        refused = next(each for each in found if each.status_code == 429)
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["type"] == "rate_limit_error"
        answered = sum(each.status_code == 200 for each in found)

        openai = pytest.importorskip("openai")
        client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=60)
        given: dict[str, Any] = {key: value for key, value in BODY.items() if key != "dlm"}
        given["extra_body"] = {"dlm": BODY["dlm"]}

        def ask(_: int) -> str:
            made = client.chat.completions.create(model=served.model, **given)
            return str(made.choices[0].finish_reason)

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            assert set(pool.map(ask, range(8))) <= {"stop", "length"}
        lines = served.client.get("/metrics").text.splitlines()
    counts = {line.split(" ")[0]: float(line.split(" ")[1]) for line in lines if "#" not in line}
    labels = f'model="{served.model}",path="/v1/chat/completions"'
    assert counts[f'dlm_requests_total{{{labels},status="200"}}'] == answered + 8
    assert counts[f'dlm_requests_total{{{labels},status="429"}}'] > 8 - answered
