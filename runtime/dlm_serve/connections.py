"""Limits the number of connections, and the time that slow clients may take.

These limits stop clients that are slow on purpose. uvicorn limits neither the number of connections
nor the time in which a request's headers must arrive. If the application rejects a body, uvicorn
still receives the rest of the body.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from dlm_serve.errors import ApiError

LINGER_S = 1.0
"""The number of seconds for which the server still receives the rest of a rejected body.

If the server closed the connection at once, a client that is still sending would not receive the
response.
"""


@dataclass(frozen=True)
class ConnectionLimits:
    """The limits that apply to all connections.

    Args:
        connections: The maximum number of open connections.
        head_s: The maximum number of seconds that a request's headers may take to arrive.
        write_s: The maximum number of seconds for which a connection's send buffers may stay full
            because the client receives no data.
    """

    connections: int = 512
    head_s: float = 10.0
    write_s: float = 30.0


def protocol(limits: ConnectionLimits) -> Callable[..., asyncio.Protocol]:
    """Return a function that creates connections for uvicorn. All connections share ``limits``."""
    idle: dict[Connection, None] = {}
    turns = Turns()
    return lambda **given: Connection(limits, idle, turns, **given)


class Turns:
    """Starts the pipelined requests of all connections, one per iteration of the event loop.

    A pipelined request arrives before the previous request of the same connection is answered.
    uvicorn starts a pipelined request as soon as the previous answer is complete. If many
    connections did so in the same iteration, the iteration would take long, and would delay all
    other requests.
    """

    def __init__(self) -> None:
        self._waiting: deque[Connection] = deque()

    def wait(self, connection: Connection) -> None:
        """Start the next pipelined request of ``connection`` in a later iteration."""
        self._waiting.append(connection)
        if len(self._waiting) == 1:
            connection.loop.call_soon(self._next)

    def _next(self) -> None:
        connection = self._waiting.popleft()
        if self._waiting:
            connection.loop.call_soon(self._next)
        connection.take_turn()


class Connection(H11Protocol):
    """A connection that closes if no request arrives in time.

    Args:
        limits: The limits that all connections share.
        idle: The connections without a request, oldest first. If there are too many connections,
            the server closes the oldest connection in ``idle``. Clients that open connections and
            send nothing therefore cannot keep other clients out.
        turns: Starts pipelined requests. All connections share this object.
        given: The arguments for the protocol class of uvicorn.
    """

    def __init__(
        self, limits: ConnectionLimits, idle: dict[Connection, None], turns: Turns, **given: Any
    ) -> None:
        super().__init__(**given)
        self._limits, self._idle, self._turns = limits, idle, turns
        self._is_completing = self._waits_for_turn = False
        self._timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    @property
    def _has_request(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._limits.connections:
            if not self._idle:
                self._refuse()
                return
            next(iter(self._idle)).abort()
        self._wait(self._limits.head_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._has_request:
            self._stop_waiting()

    def handle_events(self) -> None:
        has_more = self._is_completing and bool(self.conn.trailing_data[0])
        if has_more and not self._waits_for_turn:
            self._waits_for_turn = True
            self.flow.pause_reading()
            self._turns.wait(self)
        if not self._waits_for_turn:
            super().handle_events()

    def take_turn(self) -> None:
        """Start the next pipelined request, whose data has already arrived."""
        self._waits_for_turn = False
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        self.handle_events()
        if self._has_request:
            self._stop_waiting()

    def on_response_complete(self) -> None:
        self._is_completing = True
        super().on_response_complete()
        self._is_completing = False
        if not self._has_request:
            is_refused = self.cycle.more_body
            self._wait(LINGER_S if is_refused else self._limits.head_s)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(self._limits.write_s, self._drop)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def abort(self) -> None:
        """Close the connection at once."""
        self._stop_waiting()
        self.transport.abort()

    def _drop(self) -> None:
        """Close the connection, and discard all data that the client has not received.

        By default, the kernel would keep megabytes of unsent data and try to send them. The socket
        option SO_LINGER makes the kernel discard this data.
        """
        linger = struct.pack("ii", 1, 0)
        self.transport.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, linger
        )
        self.abort()

    def send_400_response(self, msg: str) -> None:
        if self._has_request and self.cycle.response_started:
            self.abort()
            return
        self._answer(400, "Bad Request", ApiError(400, msg, code="invalid_http"))

    def _refuse(self) -> None:
        error = ApiError(503, "the server has too many connections: try again", code="too_busy")
        self._answer(503, "Service Unavailable", error)

    def _answer(self, status: int, reason: str, error: ApiError) -> None:
        """Send an error to a client that has not sent a whole request, and disconnect it."""
        self._stop_waiting()
        body = json.dumps(error.body).encode()
        headers = {"content-type": "application/json", "content-length": len(body)}
        lines = [f"HTTP/1.1 {status} {reason}"]
        lines += [f"{name}: {value}" for name, value in (headers | error.headers).items()]
        head = "\r\n".join([*lines, "connection: close", "", ""]).encode()
        self.transport.write(head + body)
        self.transport.close()

    def _wait(self, seconds: float) -> None:
        self._stop_waiting()
        self._idle[self] = None
        self._timer = self.loop.call_later(seconds, self.abort)

    def _stop_waiting(self) -> None:
        self._idle.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
