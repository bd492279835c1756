"""Hostile and slow clients of ``dlm-export serve``. The other clients still get their answers."""

from __future__ import annotations

import asyncio
import json
import select
import socket
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from serving_process import Served, read_all, serving

pytest.importorskip("httpx")
pytest.importorskip("uvicorn")

pytestmark = pytest.mark.xdist_group("serving")

WAIT_S = 60
POST = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"


@pytest.fixture(scope="module")
def served(demo_bundle: Path) -> Iterator[Served]:
    with serving(demo_bundle, "--max-connections", "16") as process:
        yield process


def connect(served: Served) -> socket.socket:
    return socket.create_connection((served.host, served.port), timeout=WAIT_S)


def is_polite_client_answered(served: Served) -> bool:
    body = {"model": served.model, "messages": [{"role": "user", "content": "play jazz"}]}
    return served.client.post("/v1/chat/completions", json=body).status_code == 200


def test_connections_without_a_request_make_room_for_others(served: Served) -> None:
    slow = [connect(served) for _ in range(64)]
    try:
        for client in slow[-8:]:
            client.sendall(POST)
        assert is_polite_client_answered(served)
        assert read_all(slow[0]) == b""  # closed
    finally:
        for client in slow:
            client.close()


@pytest.mark.slow
def test_headers_that_do_not_end_close_the_connection(served: Served) -> None:
    with connect(served) as client:
        client.sendall(POST)
        began = time.monotonic()
        assert read_all(client) == b""
        assert time.monotonic() - began < WAIT_S
    assert is_polite_client_answered(served)


@pytest.mark.slow
def test_a_client_that_does_not_read_is_dropped(served: Served) -> None:
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(WAIT_S)
        client.connect((served.host, served.port))
        client.sendall(200 * b"GET /openapi.json HTTP/1.1\r\nhost: x\r\n\r\n")
        poll = select.poll()
        poll.register(client, 0)  # errors only
        assert poll.poll(1e3 * WAIT_S)
        with pytest.raises(ConnectionResetError):
            list(iter(lambda: client.recv(1 << 16), b""))  # reads to the end
    assert is_polite_client_answered(served)


def test_a_large_body_is_refused_before_it_is_read(served: Served) -> None:
    with connect(served) as client:
        client.sendall(POST + b"content-length: 1073741824\r\n\r\n")
        head, _, body = read_all(client).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 413")
    assert json.loads(body)["error"]["code"] == "body_too_large"


def test_an_endless_body_is_refused(served: Served) -> None:
    with connect(served) as client:
        client.sendall(POST + b"transfer-encoding: chunked\r\n\r\n")
        piece = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
        end = time.monotonic() + WAIT_S
        is_refused = False
        while not is_refused and time.monotonic() < end:
            try:
                client.sendall(piece)
            except ConnectionError:
                is_refused = True
    assert is_refused
    assert is_polite_client_answered(served)


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\x16\x03\x01\x00\xff\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\nx-request-id: a\rb: c\r\n\r\n",
    ],
    ids=["no-http", "carriage-return"],
)
def test_what_is_no_http_gets_an_error_object(served: Served, request_bytes: bytes) -> None:
    with connect(served) as client:
        client.sendall(request_bytes)
        head, _, body = read_all(client).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400")
    assert b"\r\nb: c" not in head
    assert json.loads(body)["error"]["code"] == "invalid_http"


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "%2e%2e/demo", "a\x00b"])
def test_a_model_is_a_name_and_no_path(served: Served, name: str) -> None:
    body = {"model": name, "messages": [{"role": "user", "content": "x"}]}
    response = served.client.post("/v1/chat/completions", json=body)
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


def test_a_list_of_wrong_items_is_read_up_to_the_first() -> None:
    from dlm_export.serving import fields
    from dlm_export.serving.errors import ApiError

    body = b'{"tokens": [' + b'"x",' * 1000 + b"1]}"
    with pytest.raises(ApiError) as raised:
        fields.read(fields.DetokenizeBody, body)
    cause = raised.value.__cause__
    assert raised.value.param == "tokens[0]"
    assert cause.error_count() == 1  # type: ignore[union-attr]


def test_a_stream_is_released_if_its_client_leaves_before_the_first_byte() -> None:
    from dlm_export.serving.streams import EventStream

    released: list[bool] = []
    read: list[bool] = []

    async def chunks() -> AsyncIterator[bytes]:
        read.append(True)
        yield b""

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    async def send(_: Any) -> None:
        await asyncio.sleep(60)

    response = EventStream(chunks(), lambda: released.append(True))
    scope = {"type": "http", "asgi": {"spec_version": "2.3"}}
    asyncio.run(asyncio.wait_for(response(scope, receive, send), 30))
    assert released == [True]
    assert not read


JSON = st.recursive(
    st.none() | st.integers() | st.text(st.sampled_from('a"\\[{:,\n'), max_size=6),
    lambda each: st.lists(each) | st.dictionaries(st.text(st.sampled_from('a"\\[{')), each),
)


@given(JSON)
def test_the_values_of_a_body_are_counted(value: Any) -> None:
    from dlm_export.serving.fields import values

    def count(each: Any) -> int:
        if isinstance(each, dict):
            return 1 + len(each) + sum(map(count, each.values()))
        if isinstance(each, list):
            return 1 + sum(map(count, each))
        return int(isinstance(each, str))

    assert values(json.dumps(value).encode()) == count(value)


def test_a_body_with_too_many_values_is_refused_and_a_long_text_is_not() -> None:
    from dlm_export.serving import fields
    from dlm_export.serving.errors import ApiError

    text = '"[{' * 100_000
    body: dict[str, Any] = {"model": "x", "prompt": text}
    assert fields.read(fields.CompletionBody, json.dumps(body).encode()).prompt == text
    names = dict.fromkeys(map(str, range(fields.MOST_VALUES)), 0)
    for many in (body | names, body | {"prompt": [[]] * fields.MOST_VALUES}):
        with pytest.raises(ApiError, match="strings, lists and objects") as raised:
            fields.read(fields.CompletionBody, json.dumps(many).encode())
        assert raised.value.code == "too_many_values"


def test_thousands_of_problems_are_one_error() -> None:
    from dlm_export.serving import fields
    from dlm_export.serving.errors import ApiError

    names = dict.fromkeys(map(str, range(2 * fields.MOST_PROBLEMS)), 0)
    body = {"model": "x", "prompt": "x"} | names
    with pytest.raises(ApiError, match="2000 unknown fields"):
        fields.read(fields.CompletionBody, json.dumps(body).encode())


def test_a_schema_that_failed_is_not_compiled_again_for_a_while(
    demo_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import httpx

    import dlm_runtime
    from dlm_export.serving import hosting
    from dlm_export.serving.app import Server

    compiled: list[str] = []
    compile_one = dlm_runtime.Bundle.constraint

    def counted(bundle: dlm_runtime.Bundle, **given: Any) -> Any:
        compiled.append(given["regex"])
        return compile_one(bundle, **given)

    monkeypatch.setattr(dlm_runtime.Bundle, "constraint", counted)

    async def run() -> list[Any]:
        models = hosting.Models({"demo": demo_bundle}, dlm_runtime.open, 4, 16)
        transport = httpx.ASGITransport(Server(models).app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:

            async def ask(regex: str) -> Any:
                body = {"model": "demo", "prompt": "x", "dlm": {"regex": regex}}
                return await client.post("/v1/completions", json=body)

            together = await asyncio.gather(*(ask("(") for _ in range(8)))
            other = await ask("[")
            monkeypatch.setattr(hosting, "FAILURE_S", 0.0)
            found = [*together, other, await ask("(")]
        models.close()
        return found

    found = asyncio.run(run())
    assert [each.status_code for each in found] == [400] * 10
    assert found[0].json()["error"]["param"] == "dlm"
    assert len({each.text for each in [*found[:8], found[9]]}) == 1
    # Two requests are compiled at once. The others wait, and find the failure.
    assert compiled.count("(") in (2, 3)
    assert compiled.count("[") == 1
