"""Cancels the work for a request whose client has disconnected.

Closing a stream also cancels its jobs (``streams.Writer.chunks``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from typing import Any

from starlette.requests import ClientDisconnect, Request

from dlm_runtime import DlmError, Job
from dlm_serve.errors import of_runtime


async def results_of(jobs: Sequence[Job]) -> list[Any]:
    """Return the results of all jobs. If this coroutine is cancelled, cancel the jobs.

    Raises ApiError.
    """
    try:
        return list(await asyncio.gather(*jobs))
    except DlmError as err:
        raise of_runtime(err) from err
    finally:
        for job in jobs:
            job.cancel()


async def unless_disconnected(request: Request, work: Awaitable[Any]) -> Any:
    """Return the result of ``work``, or cancel ``work`` if the client disconnects first.

    Raises ClientDisconnect if the client has disconnected.
    """
    running = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({running, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            raise ClientDisconnect
        return running.result()
    finally:
        leaving.cancel()
        if not running.done():
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
