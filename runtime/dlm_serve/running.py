"""Runs the server with uvicorn until a signal ends it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from dlm_runtime import DlmError, RequestError
from dlm_runtime.files import read_text
from dlm_serve.app import Server
from dlm_serve.connections import ConnectionLimits, protocol
from dlm_serve.hosting import Models

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
    server: Server,
    models: Models,
    address: Address,
    *,
    connections: ConnectionLimits,
    shutdown_s: int,
    on_start: Callable[[int], None],
    warn: Callable[[str], None],
) -> None:
    """Run a server until SIGTERM or SIGINT.

    Before the server ends, it finishes all running requests. On SIGHUP, the server opens the
    bundles again.

    Args:
        server: The server application.
        models: The models of ``server``.
        address: The address at which the server listens.
        connections: The limits that apply to all connections.
        shutdown_s: The maximum number of seconds that running requests may take after SIGTERM or
            SIGINT.
        on_start: Called with the port number when the server starts to listen.
        warn: Called with a message if the bundles cannot be opened again after SIGHUP.

    Raises:
        DlmError: The server cannot listen at the address.
    """
    config = uvicorn.Config(
        server.app,
        http=protocol(connections),  # type: ignore[arg-type]
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
    with contextlib.suppress(SystemExit):  # uvicorn raises SystemExit if it cannot listen
        asyncio.run(run())
    if not uvicorn_server.started:
        raise DlmError(
            f"the server cannot listen on {address.host}:{address.port}: choose another --port or --host"
        )
