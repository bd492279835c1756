"""Runs calls that take time on a few threads, so that the event loop stays free.

Without limits, one client could make all threads busy, and all other clients would wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from dlm_serve.errors import ApiError

_Result = TypeVar("_Result")


class Workers:
    """A few threads, and a queue of limited length.

    If a task is cancelled while its call waits, the call never runs. A call that runs already keeps
    its thread until it ends. Only the thread of the event loop may use this object.

    Args:
        name: What the calls do, for error messages.
        threads: The number of threads.
        most_waiting: The maximum number of calls that wait for a thread. Further calls are rejected
            with status 429.
    """

    def __init__(self, name: str, threads: int, most_waiting: int) -> None:
        self._name, self._most = name, threads + most_waiting
        self._pool = ThreadPoolExecutor(threads, f"dlm-{name}")
        self._open = 0

    async def run(self, call: Callable[..., _Result], *arguments: Any) -> _Result:
        """Run a call on a thread. Raises ApiError if too many calls wait already."""
        if self._open >= self._most:
            said = f"too many requests wait for {self._name}: try again"
            raise ApiError(429, said, code="server_busy")
        loop = asyncio.get_running_loop()
        self._open += 1

        def ended() -> None:
            self._open -= 1

        def on_done(_: Future[_Result]) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(ended)

        future = self._pool.submit(call, *arguments)
        future.add_done_callback(on_done)
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Drop all calls that wait, and end the threads when they are free."""
        self._pool.shutdown(wait=False, cancel_futures=True)
