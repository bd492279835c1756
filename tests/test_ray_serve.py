"""Tests of the Ray Serve application, with two replicas on this machine."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray", reason="ray is not installed: pip install '.[ray]'")
import httpx  # noqa: E402
import openai  # noqa: E402
import ray_machine  # noqa: E402
from ray import serve  # noqa: E402

import dlm_runtime  # noqa: E402
from dlm_serve.ray_serve import Settings, build  # noqa: E402

TEXTS = ["turn on the kitchen lights", "set a timer for ten minutes", "stop", "lock the front door"]
CLIENTS = 6
TIMEOUT = 300  # time limit of a request in seconds; long enough for a busy machine


def settings(bundle: Path, **changes: Any) -> Settings:
    values = {"min_replicas": 2, "max_replicas": 2, "shutdown_s": 20} | changes
    return Settings(bundles=f"demo={bundle}", **values)


# ---- Settings ----


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"bundles": "/nowhere"}, "/nowhere is not the folder of a bundle"),
        ({"min_replicas": 3}, "max_replicas must be at least min_replicas"),
        ({"api_key_file": "/nowhere"}, "/nowhere"),
    ],
)
def test_wrong_settings_are_refused(demo_bundle: Path, changes: dict[str, Any], said: str) -> None:
    given = settings(demo_bundle).model_copy(update=changes)
    with pytest.raises((ValueError, dlm_runtime.RequestError), match=said):
        build(given)


def test_two_bundles_of_one_name_are_refused(demo_bundle: Path) -> None:
    with pytest.raises(ValueError, match="two bundles have the name a"):
        Settings(bundles=f"a={demo_bundle},a={demo_bundle}").paths()


def test_misspelt_settings_are_refused(demo_bundle: Path) -> None:
    with pytest.raises(ValueError, match="replicas"):
        settings(demo_bundle, replicas=2)


# ---- Replicas ----


@pytest.fixture(scope="module")
def url(demo_bundle: Path) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with ray_machine.started(cores=4):
        try:
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            serve.run(build(settings(demo_bundle)), name="dlm", route_prefix="/")
            yield f"http://127.0.0.1:{port}"
        finally:
            serve.shutdown()


def send(url: str, text: str, session: str | None = None) -> tuple[str, str]:
    """Send a message without retries. Returns the answer and the name of the replica."""
    headers = {} if session is None else {"x-session-id": session}
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT)
    raw = client.chat.completions.with_raw_response.create(
        model="demo", messages=[{"role": "user", "content": text}], extra_headers=headers
    )
    content = raw.parse().choices[0].message.content
    assert content is not None
    return content, raw.headers["x-replica"]


class Load:
    """Clients that each send one request after another, until the ``with`` block ends."""

    def __init__(self, url: str) -> None:
        self._url, self._ended = url, threading.Event()
        self.sent: list[tuple[float, float, str, str, str]] = []
        """When a request started and ended, its text, the answer or the error, and the replica."""
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(CLIENTS)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _run(self, number: int) -> None:
        while not self._ended.is_set():
            number += 1
            text, began = TEXTS[number % len(TEXTS)], time.monotonic()
            try:
                answer, replica = send(self._url, text)
            except openai.OpenAIError as err:
                answer, replica = repr(err), ""
            self.sent.append((began, time.monotonic(), text, answer, replica))

    def failed(self) -> list[tuple[float, float, str, str, str]]:
        return [one for one in self.sent if not one[4]]


def replicas() -> set[str]:
    """Return the names of the two replicas, or an empty set while Ray starts or stops a replica."""
    found = serve.status().applications["dlm"].deployments["dlm-serve"].replica_states
    counts = {str(state): count for state, count in found.items() if count}
    actors = ray.util.list_named_actors(all_namespaces=True)
    parts = [one["name"].split("#") for one in actors if "::dlm#dlm-serve#" in one["name"]]
    running = len(parts) == 2 and list(counts.values()) == [2] and "RUNNING" in next(iter(counts))
    return {part[-1] for part in parts} if running else set()


def wait_for(condition: Callable[[], bool], seconds: float = TIMEOUT) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.2)


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_two_replicas_answer_as_the_bundle_does(url: str, demo_bundle: Path) -> None:
    with dlm_runtime.open(demo_bundle) as bundle:
        expected = {
            text: bundle.generate(chat=[{"role": "user", "content": text}]).text for text in TEXTS
        }
    with Load(url) as load:
        wait_for(lambda: len({one[4] for one in load.sent}) == 2)
    assert not load.failed()
    assert {(text, answer) for _, _, text, answer, _ in load.sent} <= set(expected.items())


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_a_killed_replica_loses_only_its_own_requests(url: str) -> None:
    wait_for(lambda: bool(replicas()))
    victim, survivor = replicas()
    before, pid = answered(url, survivor), pid_of(victim)
    with Load(url) as load:
        wait_for(lambda: len({one[4] for one in load.sent}) == 2)
        killed_at = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: sum(one[0] > killed_at + 1 for one in load.sent) > 4 * CLIENTS)
    assert all(began <= killed_at <= ended for began, ended, *_ in load.failed())
    # Clients received every answer of the surviving replica, so only requests to the killed replica
    # failed.
    assert answered(url, survivor) - before == sum(one[4] == survivor for one in load.sent)
    wait_for(lambda: bool(replicas() - {victim, survivor}))
    assert victim not in replicas()


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_a_rolling_update_loses_no_request(url: str, demo_bundle: Path) -> None:
    wait_for(lambda: bool(replicas()))
    old = replicas()
    with Load(url) as load:
        wait_for(lambda: {one[4] for one in load.sent} == old)
        serve.run(build(settings(demo_bundle, max_running=8)), name="dlm", route_prefix="/")
        wait_for(lambda: bool(replicas()) and not replicas() & old)
        # From now on, the old replicas must not answer new requests.
        new, updated = replicas(), time.monotonic()
        wait_for(lambda: {one[4] for one in load.sent if one[0] > updated} == new)
    assert load.failed() == []
    assert {one[4] for one in load.sent} == old | new


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_requests_of_a_session_go_to_one_replica(url: str, demo_bundle: Path) -> None:
    there = f"{url}/sessions"
    chosen = settings(demo_bundle, routing="session")
    serve.run(build(chosen), name="sessions", route_prefix="/sessions")
    try:
        names = [f"prompt {number}" for number in range(12)]
        found = {
            name: {send(there, text, name)[1] for text in TEXTS for _ in range(3)} for name in names
        }
    finally:
        serve.delete("sessions")
    assert all(len(each) == 1 for each in found.values())
    assert len(set.union(*found.values())) == 2


def pid_of(replica: str) -> int:
    """The process of a replica."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    (found,) = (one for one in actors if one["name"].endswith(replica))
    actor = ray.get_actor(found["name"], namespace=found["namespace"])
    pid: int = ray.get(actor.__ray_call__.remote(lambda _: os.getpid()))
    return pid


def answered(url: str, replica: str) -> int:
    """Return the number of chats that a replica has answered with status 200, from its metrics."""
    while True:
        said = httpx.get(f"{url}/metrics", timeout=TIMEOUT)
        if said.headers["x-replica"] == replica:
            pattern = r'^\w+_total\{path="/v1/chat/completions",status="200"\} ([\d.e+]+)$'
            found = re.findall(pattern, said.text, re.MULTILINE)
            return int(float(found[0])) if found else 0
