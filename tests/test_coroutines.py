"""Tests of jobs in coroutines: ``await job`` and ``async for event in job``."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import dlm_runtime
from dlm_runtime import RequestError, Scheduler

PROMPT = "turn on the kitchen lights"
SLOW: dict[str, Any] = {
    "new_tokens": 400,
    "commit": "static",
    "steps_per_block": 4096,
    "cache": "none",
}


@pytest.fixture(scope="module")
def scheduler(demo_bundle: Path) -> Iterator[Scheduler]:
    with dlm_runtime.open(demo_bundle) as bundle, bundle.scheduler() as made:
        yield made


def test_awaited_and_read_results_are_equal(scheduler: Scheduler) -> None:
    async def run() -> list[Any]:
        jobs = [scheduler.submit(prompt=PROMPT) for _ in range(20)]
        return list(await asyncio.gather(*jobs))

    expected = scheduler.submit(prompt=PROMPT).result()
    assert [each.tokens for each in asyncio.run(run())] == [expected.tokens] * 20


def test_events_are_those_of_the_iterator(scheduler: Scheduler) -> None:
    options: dict[str, Any] = {"prompt": PROMPT, "commit": "static", "steps_per_block": 8}

    async def run() -> list[Any]:
        return [event async for event in scheduler.submit(**options, events=True)]

    found = asyncio.run(run())
    expected = list(scheduler.submit(**options, events=True))
    assert [each.canvas for each in found] == [each.canvas for each in expected]
    assert [each.text for each in found] == [each.text for each in expected]
    assert [each.done for each in found] == [False] * (len(found) - 1) + [True]
    assert found[-1].result.tokens == expected[-1].result.tokens


@pytest.mark.parametrize("has_events", [False, True])
def test_a_cancelled_coroutine_cancels_its_job(scheduler: Scheduler, has_events: bool) -> None:
    job = scheduler.submit(prompt=PROMPT, events=has_events, **SLOW)

    async def read() -> None:
        if not has_events:
            await job
        async for _ in job:
            pass

    async def run() -> None:
        task = asyncio.create_task(read())
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert job.result(60).finish == "cancelled"


def test_a_coroutine_that_leaves_the_events_cancels_its_job(scheduler: Scheduler) -> None:
    job = scheduler.submit(prompt=PROMPT, events=True, **SLOW)

    async def run() -> None:
        events = job.__aiter__()
        await events.__anext__()
        await events.aclose()  # type: ignore[attr-defined]

    asyncio.run(run())
    assert job.result(60).finish == "cancelled"


def test_a_job_without_events_has_none_to_read(scheduler: Scheduler) -> None:
    async def run() -> None:
        async for _ in scheduler.submit(prompt=PROMPT):
            pass

    with pytest.raises(RequestError, match="events=True"):
        asyncio.run(run())


def test_a_closed_scheduler_ends_its_coroutines(demo_bundle: Path) -> None:
    with dlm_runtime.open(demo_bundle) as bundle:
        scheduler = bundle.scheduler()
        waiting = scheduler.submit(prompt=PROMPT, **SLOW)
        watched = scheduler.submit(prompt=PROMPT, events=True, **SLOW)

        async def watch() -> Any:
            return [event async for event in watched][-1].result

        async def run() -> list[Any]:
            tasks = [asyncio.ensure_future(waiting), asyncio.create_task(watch())]
            await asyncio.sleep(0.05)
            await asyncio.to_thread(scheduler.close)
            return list(await asyncio.gather(*tasks))

        assert [each.finish for each in asyncio.run(run())] == ["cancelled", "cancelled"]


def test_importing_the_runtime_does_not_import_asyncio() -> None:
    program = "import sys, dlm_runtime; sys.exit('asyncio' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_waiting_jobs_share_one_thread(scheduler: Scheduler) -> None:
    async def run() -> int:
        jobs = [asyncio.ensure_future(scheduler.submit(prompt=PROMPT, **SLOW)) for _ in range(64)]
        await asyncio.sleep(0.05)
        threads = threading.active_count()
        for job in jobs:
            job.cancel()
        await asyncio.wait(jobs)
        return threads

    before = threading.active_count()
    assert asyncio.run(run()) <= before + 1


def test_two_coroutines_wait_for_one_job(scheduler: Scheduler) -> None:
    job = scheduler.submit(prompt=PROMPT)

    async def run() -> list[Any]:
        return await asyncio.gather(asyncio.ensure_future(job), asyncio.ensure_future(job))

    first, second = asyncio.run(run())
    assert first is second


def test_a_closed_scheduler_leaves_no_thread_and_no_descriptor(demo_bundle: Path) -> None:
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    with dlm_runtime.open(demo_bundle) as bundle:
        with bundle.scheduler() as warm:
            asyncio.run(_awaited(warm))
        # Free the objects of other tests now, because they would be freed during this test
        # otherwise.
        gc.collect()
        threads, files = threading.active_count(), descriptors()
        for is_awaited in (True, False):
            with bundle.scheduler() as one:
                if is_awaited:
                    asyncio.run(_awaited(one))
        end = time.monotonic() + 30
        while threading.active_count() > threads or descriptors() > files:
            assert time.monotonic() < end
            time.sleep(0.01)


async def _awaited(scheduler: Scheduler) -> Any:
    return await scheduler.submit(prompt=PROMPT)
