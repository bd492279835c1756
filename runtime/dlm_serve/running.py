"""Runs the server with uvicorn until a signal ends it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import uvicorn

import dlm_runtime
from dlm_runtime import DlmError, RequestError
from dlm_runtime.files import read_text
from dlm_serve.app import Limits, Server
from dlm_serve.connections import ConnectionLimits, protocol
from dlm_serve.hosting import Models
from dlm_serve.web import Web

MOST_KEY_FILE_BYTES = 1 << 20
ACCEPTS = 16
"""The maximum number of connections that asyncio accepts in one iteration of the event loop."""
BACKLOG = 2048
"""The maximum number of connections that the kernel keeps until the server accepts them."""
SILENT_S = 10
"""The approximate number of seconds for which the kernel keeps a connection whose client sends
nothing, before the server accepts the connection.
"""


@dataclass(frozen=True)
class Address:
    """The address at which the server listens.

    Args:
        host, port: The IP address or host name, and the TCP port. Port 0 chooses a free port.
        certificate, key: The PEM files of the TLS certificate and its private key. If both are
            None, the server uses plain HTTP.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    certificate: Path | None = None
    key: Path | None = None


def read_keys(path: Path) -> list[str]:
    """Return the API keys in a file that contains one key per line. Raises RequestError."""
    lines = [
        line.strip() for line in read_text(path, MOST_KEY_FILE_BYTES, RequestError).splitlines()
    ]
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise RequestError(f"{path}: there is no key in it: write one key a line")
    return keys


class _Uvicorn(uvicorn.Server):
    """A uvicorn server whose process exits with 0 after SIGTERM or SIGINT."""

    def __init__(self, config: uvicorn.Config, on_start: Callable[[int], None]) -> None:
        super().__init__(config)
        self._on_start = on_start

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    async def startup(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        await super().startup(sockets)  # type: ignore[arg-type]
        if self.started:
            for listener in self.servers[0].sockets:
                with listener.dup() as same:
                    same.listen(BACKLOG)
                    # Accept a connection only when data arrives, so that clients that send nothing
                    # cost the event loop no time.
                    if hasattr(socket, "TCP_DEFER_ACCEPT"):
                        same.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, SILENT_S)
            self._on_start(self.servers[0].sockets[0].getsockname()[1])


def serve(
    paths: Mapping[str, Path],
    opener: Callable[[Path], dlm_runtime.Bundle],
    address: Address,
    *,
    keys: Sequence[str] = (),
    limits: Limits | None = None,
    max_running: int = 16,
    max_waiting: int = 256,
    prefix_cache_bytes: int | None = None,
    connections: ConnectionLimits | None = None,
    shutdown_s: int = 60,
    has_log: bool = True,
    web: Web | None = None,
    shares_prompts: bool = False,
    on_start: Callable[[int], None] = lambda port: None,
    warn: Callable[[str], None] = lambda said: None,
) -> None:
    """Serve bundles until SIGTERM or SIGINT.

    Before the server ends, it finishes all running requests. On SIGHUP, the server opens the
    bundles again.

    Args:
        paths: Maps the name of each model to its bundle's folder.
        opener: A function that opens the bundle in a folder.
        address: The address at which the server listens.
        keys: The valid API keys. Each request must contain a valid key, unless ``keys`` is empty.
        limits: The limits that apply to each request.
        max_running: The maximum number of requests that share a pass of one model.
        max_waiting: The maximum number of requests that wait for one model.
        prefix_cache_bytes: The maximum number of bytes of keys and values that one model keeps
            after its requests have ended. If None, the limit is the memory for keys and values that
            running requests do not need.
        connections: The limits that apply to all connections.
        shutdown_s: The maximum number of seconds that running requests may take after SIGTERM or
            SIGINT.
        has_log: If True, a line of JSON is written to stderr for each request.
        web: The host names and web pages that may be used with the server.
        shares_prompts: If False, a request reuses only keys and values of requests with the same
            API key.
        on_start: Called with the port number when the server starts to listen.
        warn: Called with a message if the bundles cannot be opened again after SIGHUP.

    Raises:
        DlmError: A bundle cannot be opened, or the server cannot listen at the address.
    """
    models = Models(paths, opener, max_running, max_waiting, prefix_cache_bytes)
    server = Server(models, keys, limits, has_log, web, shares_prompts)
    config = uvicorn.Config(
        server.app,
        http=protocol(connections or ConnectionLimits()),  # type: ignore[arg-type]
        host=address.host,
        port=address.port,
        ssl_certfile=address.certificate,
        ssl_keyfile=address.key,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=shutdown_s,
        # asyncio uses this number for two limits: the kernel's queue of new connections, and the
        # connections that one iteration of the event loop accepts. After the start, ``_Uvicorn``
        # increases the kernel's limit.
        backlog=ACCEPTS,
        lifespan="on",
    )
    uvicorn_server = _Uvicorn(config, on_start)

    async def run() -> None:
        loop, tasks = asyncio.get_running_loop(), set[asyncio.Task[None]]()

        async def reload() -> None:
            try:
                await models.reload()
            except DlmError as err:
                warn(f"cannot open the bundles again, so the old bundles stay in use: {err}")

        def on_hangup() -> None:
            task = loop.create_task(reload())
            tasks.add(task)
            task.add_done_callback(tasks.discard)

        loop.add_signal_handler(signal.SIGHUP, on_hangup)
        try:
            await uvicorn_server.serve()
        finally:
            loop.remove_signal_handler(signal.SIGHUP)

    # Exclude all loaded objects from garbage collection, because they are never freed.
    gc.freeze()
    try:
        asyncio.run(run())
    except SystemExit as err:  # uvicorn raises SystemExit if it cannot listen
        raise DlmError(
            f"the server cannot listen on {address.host}:{address.port}: choose another --port or --host"
        ) from err
    if not uvicorn_server.started:
        raise DlmError(
            f"the server cannot listen on {address.host}:{address.port}: choose another --port or --host"
        )
