"""Hostile and slow clients of ``dlm-export serve``. The other clients still get their answers."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from serving_process import Served, serving

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


def read_all(client: socket.socket) -> bytes:
    """What the server sends until it closes the connection."""
    found = b""
    try:
        while piece := client.recv(1 << 16):
            found += piece
    except ConnectionResetError:
        pass
    return found


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
