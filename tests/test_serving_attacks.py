"""Tests of ``dlm-export serve`` with hostile and slow clients.

The server must still answer other clients.
"""

from __future__ import annotations

import asyncio
import json
import re
import select
import signal
import socket
import threading
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

WAIT_S = 60
POST = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
)


@pytest.fixture(scope="module")
def served(demo_bundle: Path) -> Iterator[Served]:
    with serving(demo_bundle, "--max-connections", "16") as process:
        yield process


def connect(served: Served) -> socket.socket:
    return socket.create_connection((served.host, served.port), timeout=WAIT_S)


def is_polite_client_answered(served: Served) -> bool:
    import httpx

    # Open a new connection, because the server may close idle connections of ``served.client``.
    body = {"model": served.model, "messages": [{"role": "user", "content": "play jazz"}]}
    url = f"{served.url}/v1/chat/completions"
    return httpx.post(url, json=body, timeout=WAIT_S).status_code == 200


def test_connections_without_a_request_make_room_for_others(served: Served) -> None:
    slow = [connect(served) for _ in range(64)]
    try:
        for client in slow[-8:]:
            client.sendall(POST)
        assert is_polite_client_answered(served)
        assert read_all(slow[0]) == b""  # the server closed the connection
    finally:
        for client in slow:
            client.close()


def test_the_oldest_connections_without_a_request_make_room(served: Served) -> None:
    clients = [connect(served) for _ in range(20)]
    try:
        for client in clients:
            client.sendall(POST)
        closed: list[socket.socket] = []
        end = time.monotonic() + WAIT_S
        while len(closed) < 4 and time.monotonic() < end:
            closed, _, _ = select.select(clients, [], [], 0)
            time.sleep(0.01)
        assert len(closed) >= 4
        assert closed == clients[: len(closed)]
    finally:
        for client in clients:
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
        client.sendall(200 * b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n")
        poll = select.poll()
        poll.register(client, 0)  # with 0, poll reports only errors
        assert poll.poll(1e3 * WAIT_S)
        with pytest.raises(ConnectionResetError):
            # Read until the server closes the connection.
            list(iter(lambda: client.recv(1 << 16), b""))
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
        b"GET / HTTP/1.1\r\nhost: localhost\r\nx-request-id: a\rb: c\r\n\r\n",
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
    from dlm_serve import fields
    from dlm_serve.errors import ApiError

    body = b'{"tokens": [' + b'"x",' * 1000 + b"1]}"
    with pytest.raises(ApiError) as raised:
        fields.read(fields.DetokenizeBody, body)
    cause = raised.value.__cause__
    assert raised.value.param == "tokens[0]"
    assert cause.error_count() == 1  # type: ignore[union-attr]


def test_a_stream_is_released_if_its_client_leaves_before_the_first_byte() -> None:
    from dlm_serve.streams import EventStream

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
    from dlm_serve.fields import counts

    def count(each: Any) -> int:
        if isinstance(each, dict):
            return 1 + len(each) + sum(map(count, each.values()))
        if isinstance(each, list):
            return 1 + sum(map(count, each))
        return int(isinstance(each, str))

    def commas(each: Any) -> int:
        items = list(each.values()) if isinstance(each, dict) else each
        if not isinstance(items, list):
            return 0
        return max(0, len(items) - 1) + sum(map(commas, items))

    assert counts(json.dumps(value).encode()) == (count(value), commas(value))


def test_a_body_with_too_many_values_is_refused_and_a_long_text_is_not() -> None:
    from dlm_serve import fields
    from dlm_serve.errors import ApiError

    text = '"[{' * 100_000
    body: dict[str, Any] = {"model": "x", "prompt": text}
    assert fields.read(fields.CompletionBody, json.dumps(body).encode()).prompt == text
    names = dict.fromkeys(map(str, range(fields.MOST_VALUES)), 0)
    for many in (body | names, body | {"prompt": [[]] * fields.MOST_VALUES}):
        with pytest.raises(ApiError, match="strings, lists and objects") as raised:
            fields.read(fields.CompletionBody, json.dumps(many).encode())
        assert raised.value.code == "too_many_values"


def test_a_body_with_too_many_numbers_is_refused_and_a_long_prompt_is_not() -> None:
    from dlm_serve import fields
    from dlm_serve.errors import ApiError

    ids = list(range(1 << 17))
    for prompt in (ids, "," * 2 * fields.MOST_COMMAS, ["7"], [ids[:9], ids[:9]]):
        body = json.dumps({"model": "x", "prompt": prompt}).encode()
        assert fields.read(fields.CompletionBody, body).prompt == prompt
    body = json.dumps({"model": "x", "prompt": [1] * (fields.MOST_COMMAS + 2)}).encode()
    with pytest.raises(ApiError, match="commas outside strings") as raised:
        fields.read(fields.CompletionBody, body)
    assert raised.value.code == "too_many_values"


def test_too_many_token_ids_are_refused_before_they_are_converted(served: Served) -> None:
    for path, field, ids in [
        ("/v1/completions", "prompt", [1] * 600),
        ("/v1/completions", "prompt", [[1], [1] * 600]),
        ("/detokenize", "tokens", [1] * 600),
    ]:
        body = {"model": served.model, field: ids}
        error = served.client.post(path, json=body).json()["error"]
        assert (error["param"], error["code"]) == (field, "invalid_value")
        assert error["message"] == f"{field}: 600 token IDs are more than the denoiser's 512"


def test_the_limit_of_numbers_depends_on_the_longest_context(served: Served) -> None:
    from dlm_serve import fields

    limit = fields.commas_for(512)
    assert fields.MOST_PROMPTS * 512 < limit < fields.MOST_COMMAS
    assert fields.commas_for(1 << 17) == fields.MOST_COMMAS
    for more, code in ((0, "invalid_value"), (1, "too_many_values")):
        prompt = [1] * (limit + more)  # the commas in the body are counted
        body = {"model": served.model, "prompt": prompt}
        response = served.client.post("/v1/completions", json=body)
        assert (response.status_code, response.json()["error"]["code"]) == (400, code)


@pytest.mark.skipif(not hasattr(socket, "TCP_DEFER_ACCEPT"), reason="the option exists on Linux")
def test_a_connection_is_accepted_when_data_arrives(served: Served) -> None:
    def count() -> int:
        return len(list(Path(f"/proc/{served.process.pid}/fd").iterdir()))

    assert is_polite_client_answered(served)
    before = count()
    clients = [connect(served) for _ in range(8)]
    try:
        assert is_polite_client_answered(served)
        assert count() < before + len(clients) // 2
        for client in clients:
            client.sendall(b"GET /health")
        end = time.monotonic() + 20
        while count() < before + len(clients) // 2 and time.monotonic() < end:
            time.sleep(0.05)
        assert count() >= before + len(clients) // 2
    finally:
        for client in clients:
            client.close()


def test_connections_wait_in_the_kernel_until_they_are_accepted(served: Served) -> None:
    from dlm_serve.running import ACCEPTS

    served.process.send_signal(signal.SIGSTOP)
    address, clients = (served.host, served.port), []
    try:
        for _ in range(4 * ACCEPTS):
            clients.append(socket.create_connection(address, timeout=0.5))
    finally:
        served.process.send_signal(signal.SIGCONT)
        for client in clients:
            client.close()
    assert is_polite_client_answered(served)


def test_pipelined_requests_are_answered_in_order(served: Served) -> None:
    paths = [f"/v1/none{at}" for at in range(20)]
    requests = "".join(f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n" for path in paths[:-1])
    requests += f"GET {paths[-1]} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    clients = [connect(served) for _ in range(8)]
    for client in clients:
        client.sendall(requests.encode())
    for client in clients:
        with client:
            assert re.findall(r"/v1/none\d+", read_all(client).decode()) == paths


def test_one_pipelined_request_starts_in_each_iteration_of_the_event_loop() -> None:
    from dlm_serve.connections import Turns

    started: list[tuple[int, int]] = []

    async def run() -> None:
        turns, iteration = Turns(), 0

        class Fake:
            loop = asyncio.get_running_loop()

            def __init__(self, number: int) -> None:
                self.number = number

            def take_turn(self) -> None:
                started.append((iteration, self.number))

        for number in range(4):
            turns.wait(Fake(number))  # type: ignore[arg-type]
        for _ in range(6):
            await asyncio.sleep(0)
            iteration += 1

    asyncio.run(run())
    assert [number for _, number in started] == [0, 1, 2, 3]
    assert len({iteration for iteration, _ in started}) == 4


def test_thousands_of_problems_are_one_error() -> None:
    from dlm_serve import fields
    from dlm_serve.errors import ApiError

    names = dict.fromkeys(map(str, range(2 * fields.MOST_PROBLEMS)), 0)
    body = {"model": "x", "prompt": "x"} | names
    with pytest.raises(ApiError, match="2000 unknown fields"):
        fields.read(fields.CompletionBody, json.dumps(body).encode())


def test_bodies_are_limited_together_only_while_they_arrive(demo_bundle: Path) -> None:
    import httpx

    import dlm_runtime
    from dlm_serve import hosting
    from dlm_serve.app import Limits, Server

    text, headers = "x" * 600, {"content-type": "application/json"}

    async def run() -> None:
        models = hosting.Models({"demo": demo_bundle}, dlm_runtime.open, 4, 64)
        server = Server(models, limits=Limits(bodies_bytes=1000))
        transport, begun, may_end = (
            httpx.ASGITransport(server.app),
            *(asyncio.Event() for _ in "ab"),
        )

        async def slow() -> AsyncIterator[bytes]:
            yield f'{{"prompt": "{text}'.encode()
            begun.set()
            await may_end.wait()
            yield b'"}'

        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:

            async def status() -> int:
                return (await client.post("/tokenize", json={"prompt": text})).status_code

            assert [await status() for _ in range(3)] == [200] * 3
            first = asyncio.create_task(client.post("/tokenize", content=slow(), headers=headers))
            await asyncio.wait_for(begun.wait(), WAIT_S)
            assert await status() == 503
            may_end.set()
            assert (await first).status_code == 200
            assert await status() == 200
        models.close()

    asyncio.run(run())


def test_few_constraints_are_compiled_at_once_and_each_only_once(
    demo_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import httpx

    import dlm_runtime
    from dlm_runtime.constraints import compiled
    from dlm_serve import hosting
    from dlm_serve.app import Limits, Server

    running: list[str] = []
    most: list[int] = []
    made: list[str] = []
    compile_one = compiled.compile_content

    def counted(content: compiled.Content, *given: Any, **how: Any) -> Any:
        made.append(content.text)
        running.append(content.text)
        most.append(len(running))
        time.sleep(0.05)
        try:
            return compile_one(content, *given, **how)
        finally:
            running.remove(content.text)

    monkeypatch.setattr(compiled, "compile_content", counted)

    async def run() -> None:
        models = hosting.Models({"demo": demo_bundle}, dlm_runtime.open, 4, 64)
        transport = httpx.ASGITransport(Server(models, limits=Limits(waiting=20)).app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:

            async def ask(regex: str, status: int = 200) -> Any:
                body = {"model": "demo", "prompt": "x", "max_tokens": 8, "dlm": {"regex": regex}}
                answer = await client.post("/v1/completions", json=body)
                assert answer.status_code == status, answer.text
                return answer.json()

            answers = await asyncio.gather(*(ask("(", 400) for _ in range(8)))
            assert made == ["("]
            assert answers[0]["error"]["param"] == "dlm"
            await asyncio.gather(*(ask(f"a{at % 5}") for at in range(20)))
            assert sorted(made[1:]) == [f"a{at}" for at in range(5)]
            # Decisions need constraints too, and use the same threads.
            asked = {
                "state": "x",
                "questions": {"q": {"type": "choice", "criteria": dict.fromkeys("abc")}},
            }
            path = "/v1/decisions"
            bodies = [asked | {"state": str(at), "model": "demo"} for at in range(6)]
            await asyncio.gather(*(client.post(path, json=each) for each in bodies))
            assert len(made) == 7
            assert max(most) == 2
            # Stored constraints do not wait for the compilers.
            slow = asyncio.gather(*(ask(f"b{at}") for at in range(10)))
            await ask("a0")
            assert not slow.done()
            await slow
        models.close()

    asyncio.run(run())


def test_workers_refuse_more_calls_and_drop_cancelled_ones() -> None:
    from dlm_serve.errors import ApiError
    from dlm_serve.workers import Workers

    calls: list[str] = []
    may_end = threading.Event()

    def call(name: str) -> str:
        calls.append(name)
        may_end.wait(60)
        return name

    async def run() -> None:
        workers = Workers("a test", 1, 1)
        first = asyncio.create_task(workers.run(call, "first"))
        left = asyncio.create_task(workers.run(call, "left"))
        await asyncio.sleep(0.05)
        with pytest.raises(ApiError, match="wait for a test") as raised:
            await workers.run(call, "refused")
        assert raised.value.status == 429
        left.cancel()  # its client has disconnected
        await asyncio.gather(left, return_exceptions=True)
        await asyncio.sleep(0)  # the queue has room again
        next_one = asyncio.create_task(workers.run(call, "next"))
        await asyncio.sleep(0)
        may_end.set()
        assert await asyncio.gather(first, next_one) == ["first", "next"]
        workers.close()

    asyncio.run(run())
    assert calls == ["first", "next"]


def test_work_of_a_client_that_left_is_dropped(
    demo_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import dlm_runtime
    from dlm_runtime.text.tokenizer import Tokenizer
    from dlm_serve import app, hosting

    encoded: list[str] = []
    may_end = threading.Event()
    encode = Tokenizer.encode

    def slow(tokenizer: Any, text: str, *given: Any) -> list[int]:
        encoded.append(text)
        may_end.wait(60)
        return encode(tokenizer, text, *given)

    monkeypatch.setattr(Tokenizer, "encode", slow)
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def post(server: app.Server, body: dict[str, Any], leaves: asyncio.Event) -> None:
        messages = [{"type": "http.request", "body": json.dumps(body).encode()}]

        async def receive() -> Any:
            if messages:
                return messages.pop()
            await leaves.wait()
            return {"type": "http.disconnect"}

        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}
        scope |= {"query_string": b"", "scheme": "http", "server": ("localhost", 80)}
        await server.app(scope, receive, send)

    async def run() -> None:
        models = hosting.Models({"demo": demo_bundle}, dlm_runtime.open, 4, 16)
        server = app.Server(models)
        leaves = [asyncio.Event() for _ in range(3 * app.SHORT_THREADS)]
        tasks = [
            asyncio.create_task(post(server, {"model": "demo", "prompt": f"a{at}"}, leaves[at]))
            for at in range(len(leaves))
        ]
        while len(encoded) < app.SHORT_THREADS:
            await asyncio.sleep(0.01)
        for each in leaves:
            each.set()
        await asyncio.gather(*tasks)
        may_end.set()
        models.close()

    asyncio.run(run())
    assert len(encoded) == 4
    assert {message["status"] for message in sent if "status" in message} == {499}


CALL = {
    "role": "assistant",
    "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": f"[{'[],' * 99_999}[]]"}}],
}


HUGE = {"new_tokens": 1 << 24}


def test_sizes_are_checked_before_any_work(served: Served) -> None:
    served.reset_peak()
    before = served.memory_kib("VmHWM")
    spaces = " " * 1_000_000
    file = "<|current_file_content|><|code_to_edit|>{}<|cursor|><|/code_to_edit|><|/current_file_content|>"
    user = {"role": "user", "content": spaces}
    options = dict.fromkeys(map(str, range(200)))
    questions = {f"{at}{'q' * 3000}": {"type": "choice", "criteria": options} for at in range(60)}
    for path, body, said in [
        ("fim/completions", {"prompt": "a", "dlm": HUGE}, "longer than the denoiser's"),
        ("completions", {"prompt": "a", "suffix": "b", "dlm": HUGE}, "longer than"),
        ("completions", {"prompt": ["a"] * 64, "n": 16}, "1024 answers are more than the 272"),
        ("completions", {"prompt": spaces}, "1000000 characters are more than 32768"),
        ("completions", {"prompt": "a", "dlm": {"prefix": spaces}}, "characters are more than"),
        ("fim/completions", {"prompt": spaces, "suffix": "b"}, "characters are more than"),
        ("chat/completions", {"messages": [user]}, "characters are more than"),
        ("responses", {"input": spaces}, "characters are more than"),
        (
            "edit/completions",
            {"messages": [{"role": "user", "content": file.format(spaces)}]},
            "characters are more than",
        ),
        (
            "chat/completions",
            {"messages": [CALL, {"role": "user", "content": "a"}]},
            "the arguments of a call have more than 16384",
        ),
        ("decisions", {"state": spaces, "questions": {"q": {"type": "noul"}}}, "are more than"),
        ("decisions", {"state": "a", "questions": questions}, "ask fewer questions"),
    ]:
        response = served.client.post(f"/v1/{path}", json={"model": served.model} | body)
        assert response.status_code == 400, (path, response.text)
        assert said in response.json()["error"]["message"], (path, response.text)
    assert served.memory_kib("VmHWM") - before < 64 << 10
