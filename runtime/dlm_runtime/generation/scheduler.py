"""Schedulers accept requests from any thread and run the requests in shared passes on one thread.
This module uses the functions ``dlm_scheduler_*`` of the C ABI.

The scheduler's thread refers to a ``_Runner`` and not to the ``Scheduler``. A ``Scheduler`` that
the program no longer refers to can therefore be garbage-collected. Before the thread ends, it
destroys the native scheduler. The thread must end before the interpreter exits. Otherwise, Python
would raise an exception inside a native callback, and this exception would abort the process.
"""

from __future__ import annotations

import atexit
import ctypes as C
import itertools
import queue
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from dlm_runtime.abi import native as _native
from dlm_runtime.errors import ClosedError, DlmError, RequestError, shown
from dlm_runtime.generation.ends import Ends
from dlm_runtime.generation.forks import Origin
from dlm_runtime.generation.pass_cost import PassCost
from dlm_runtime.generation.request import (
    Options,
    Request,
    RequestOptions,
    count_of,
    milliseconds_of,
)
from dlm_runtime.generation.results import Event, Generation

if TYPE_CHECKING:
    import asyncio

    from typing_extensions import Unpack

    from dlm_runtime.generation.handle import Handle

WAIT_S = 0.1  # seconds between checks for signals while a thread waits for a job
EVENT_WAIT_S = 0.02  # seconds between checks whether a request ended without a last event


@dataclass(frozen=True)
class SchedulerStats:
    """Statistics of a scheduler since it was created.

    Args:
        waiting, running: The number of requests that wait now, and the number that run now.
        submitted, finished, refused: The number of requests that were submitted, that ended, and
            that were refused. ``submit`` raises BusyError when it refuses a request.
        passes: Number of passes.
        shares: Each pass adds its number of requests to this sum.
        busy_s: Seconds spent in passes and commits.
        cache_bytes: The most bytes of keys and values that were in memory at the same time.
        passes_s: Seconds spent in passes alone.
        expected_s: Seconds that the scheduler's ``cost`` predicts for these passes. 0 if the
            scheduler has no ``cost``, or if requests take turns.
        prefix_hits: Number of requests that reused keys and values of other requests.
        prefix_tokens: Number of prompt tokens that were not computed because their keys and values
            were reused.
        prefix_bytes: Number of bytes of the keys and values that new requests can reuse.
    """

    waiting: int
    running: int
    submitted: int
    finished: int
    refused: int
    passes: int
    shares: int
    busy_s: float
    cache_bytes: int
    passes_s: float
    expected_s: float
    prefix_hits: int
    prefix_tokens: int
    prefix_bytes: int


class Job:
    """A request that was submitted with ``Scheduler.submit``.

    The request is cancelled when the last reference to the job is dropped.

    Until its result is read, the job keeps its scheduler alive.
    """

    def __init__(self, scheduler: Scheduler, request: Request, events: bool) -> None:
        self._library, self._request = _native.library(), request
        self._handle = C.c_void_p()
        self._origin = Origin("job")
        self._scheduler: Scheduler | None = scheduler
        self._text: str | None = None  # the text of the latest event
        self._events: queue.SimpleQueue[Event] | None = queue.SimpleQueue() if events else None
        self._wake: Callable[[], object] | None = None  # called after an event was added
        self._has_ended = False
        self._result: Generation | None = None
        self._error: Exception | None = None  # the exception that _step raised
        runner = scheduler._runner
        self._ends = runner.ends
        runner.keep(self, request)
        with runner.using() as handle:
            given = (handle, C.byref(request.native))
            _native.check(self._library.dlm_scheduler_submit, given, C.byref(self._handle))

    def __del__(self) -> None:
        if getattr(self, "_handle", None) and self._origin.is_here:
            self._library.dlm_job_destroy(self._handle)

    @property
    def prompt_tokens(self) -> int:
        """The number of tokens at the start of the canvas that the caller passed."""
        return len(self._request.given)

    @property
    def done(self) -> bool:
        """True if the job has ended, so that ``result`` returns immediately."""
        self._origin.check()
        if not self._has_ended:
            self._has_ended = bool(self._library.dlm_job_wait(self._handle, 0.0))
        return self._has_ended

    def cancel(self) -> None:
        """End the request within one pass. The result contains the canvas at that time."""
        self._origin.check()
        self._library.dlm_job_cancel(self._handle)

    def result(self, timeout: float | None = None) -> Generation:
        """Wait for the job and return its result.

        Args:
            timeout: The longest time to wait, in seconds. None means no limit.

        Returns:
            The result. In ``timings``, the time of a pass is divided among the requests in the
            pass.

        Raises:
            TimeoutError: The job did not end within ``timeout`` seconds.
            DlmError: The errors of ``Bundle.generate``, or the error that ended the scheduler's
                thread.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while not self.done:
            left = WAIT_S if end is None else min(WAIT_S, end - time.monotonic())
            if left <= 0:
                raise TimeoutError(f"the request is not done after {timeout} s")
            # Wait in short intervals, so that Ctrl-C works.
            self._library.dlm_job_wait(self._handle, 1000 * left)
        if self._result is None:
            found = C.POINTER(_native.Result)()
            status = self._library.dlm_job_result(self._handle, C.byref(found))
            if status:
                raised = self._request.error
                if raised is not None:
                    raise raised
                raise _native.error(status, found.contents.message) from self._error
            self._result = self._request.generation(found.contents)
            self._scheduler = None
        return self._result

    def __iter__(self) -> Iterator[Event]:
        """Yield an event after each pass. The job must have been submitted with ``events=True``.
        The last event contains the result.
        """
        events = self._queue()
        while not self.done or not events.empty():
            try:
                event = events.get(timeout=EVENT_WAIT_S)
            except queue.Empty:
                continue
            if event.done:
                yield replace(event, result=self.result())
                return
            yield event
        yield self._event_without_step()

    def __await__(self) -> Generator[Any, None, Generation]:
        """Wait for the job in a coroutine and return its result: ``result = await job``.

        If the coroutine is cancelled, the job is cancelled too.

        Raises the errors of ``result``.
        """
        return self._awaited().__await__()

    async def _awaited(self) -> Generation:
        # asyncio is imported inside functions, because importing it takes longer than importing the
        # whole runtime.
        import asyncio

        await self._ended(asyncio.Event())
        return self.result()

    async def __aiter__(self) -> AsyncIterator[Event]:
        """Yield the events in a coroutine: ``async for event in job``.

        If the coroutine is cancelled, the job is cancelled too.
        """
        import asyncio

        events, changed = self._queue(), asyncio.Event()
        loop = asyncio.get_running_loop()
        self._wake = lambda: loop.call_soon_threadsafe(changed.set)
        ended = asyncio.ensure_future(self._ended(changed))
        try:
            while not ended.done() or not events.empty():
                while not events.empty():
                    event = events.get_nowait()
                    if event.done:
                        await ended
                        yield replace(event, result=self.result())
                        return
                    yield event
                if not ended.done():
                    await changed.wait()
                    changed.clear()
            yield self._event_without_step()
        finally:
            self._wake = None
            ended.cancel()

    async def _ended(self, changed: asyncio.Event) -> None:
        """Wait until the job has ended.

        When the job ends, ``changed`` is set, which wakes ``__aiter__``.

        If this coroutine is cancelled, the job is cancelled too.
        """
        import asyncio

        self._origin.check()
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def tell() -> None:
            ended.set()
            changed.set()

        def call() -> None:
            loop.call_soon_threadsafe(tell)

        self._ends.when_ended(self, call)
        try:
            await ended.wait()
        except asyncio.CancelledError:
            self.cancel()
            raise
        finally:
            self._ends.forget(self, call)

    def _queue(self) -> queue.SimpleQueue[Event]:
        if self._events is None:
            raise RequestError("this job has no events: submit it with events=True")
        return self._events

    def _event_without_step(self) -> Event:
        """Return the last event of a failed request, or of a request of a closed scheduler."""
        result = self.result()
        length = len(result.tokens)
        return Event(
            canvas=result.tokens,
            undecided=result.undecided,
            guess=[-1] * length,
            score=[0.0] * length,
            block=(0, length),
            nfe=result.nfe,
            committed=0,
            text=result.text,
            delta=None if result.text is None else result.text[len(self._text or "") :],
            done=True,
            result=result,
        )

    def _step(self, step: Any) -> None:
        """Put the event of a native step into the job's queue. The scheduler's thread calls it."""
        if self._events is not None:
            event = self._request.event(step, self._text)
            self._text = event.text
            self._events.put(event)
            wake = self._wake
            if wake is not None:
                with suppress(RuntimeError):  # the event loop may be closed
                    wake()


class _Runner:
    """A native scheduler, and the thread that runs its passes."""

    def __init__(self, bundle: Handle, options: Any) -> None:
        """Raises RequestError or EngineError, and DlmError if the thread cannot be started."""
        self.origin = Origin("scheduler")
        self.failure: DlmError | None = None
        """The error that ended the thread. None if ``stop`` ended the thread."""
        self._library, self._bundle, self._handle = _native.library(), bundle, C.c_void_p()
        self._changed = (
            threading.Condition()
        )  # its lock is re-entrant: the garbage collector may call stop() at any time
        # Number of running calls that use the native scheduler's handle. The thread waits until
        # these calls have ended before it destroys the handle.
        self._users = 0
        self.is_closed = False
        self._last: SchedulerStats | None = None  # set when the handle is destroyed
        # All jobs share these callbacks, which live until the last pass. A job cannot own its
        # callbacks, because the job may be dropped before its request has ended.
        self._on_step, self._on_decode = (
            _native.StepFn(self._dispatch),
            _native.DecodeFn(self._decode),
        )
        self._jobs: weakref.WeakValueDictionary[int, Job] = weakref.WeakValueDictionary()
        self._numbers = itertools.count(1)
        self._message = C.create_string_buffer(_native.MESSAGE_BYTES)
        self.ends = Ends()
        options.ended_fd = self.ends.descriptor
        bundle.begin()
        try:
            given = (bundle.pointer, C.byref(options))
            _native.check(self._library.dlm_scheduler_create, given, C.byref(self._handle))
            self._thread = threading.Thread(target=self._run, name="dlm-scheduler", daemon=True)
            try:
                self._thread.start()
            except RuntimeError as err:
                self._library.dlm_scheduler_destroy(self._handle)
                raise DlmError(
                    f"the scheduler's thread cannot be started ({err}): end other threads, or raise their limit"
                ) from err
        except BaseException:
            self.ends.close()
            bundle.end()
            raise
        _RUNNERS.add(self)

    def _run(self) -> None:
        status = self._library.dlm_scheduler_run(
            self._handle, 0, _native.BeforePassFn(), None, self._message, len(self._message)
        )
        with self._changed:
            self.is_closed = True
            if status:
                self.failure = _native.error(status, self._message.value)
            while self._users:
                self._changed.wait()
            self._last = self.stats()
            handle, self._handle = self._handle, C.c_void_p()
        self._library.dlm_scheduler_destroy(handle)
        self.ends.close()
        # The callbacks refer to this ``_Runner``. They are replaced by empty callbacks, so that the
        # ``_Runner`` can be garbage-collected.
        self._on_step, self._on_decode = _native.StepFn(), _native.DecodeFn()
        self._bundle.end()

    def keep(self, job: Job, request: Request) -> None:
        """Register a job, so that the shared callbacks find it.

        The registration does not keep the job alive.
        """
        native, number = request.native, next(self._numbers)
        self._jobs[number] = job
        native.user = number
        if native.decode:
            native.decode = self._on_decode
        if job._events is not None:
            native.on_step = self._on_step
            native.text = _native.TEXT_STEPS if native.decode else native.text

    def _dispatch(self, number: int, step: Any) -> int:
        job = self._jobs.get(number)
        if job is None:
            return 0
        try:
            job._step(step.contents)
        except Exception as err:  # ctypes would print and ignore the exception
            job._error = err
            return 1
        return 0

    def _decode(
        self, number: int, tokens: Any, count: int, string: int, capacity: int, size: Any
    ) -> int:
        job = self._jobs.get(number)
        if job is None:
            return 7  # DLM_CANCELLED: the job was dropped
        return job._request.decoded(number, tokens, count, string, capacity, size)

    def check_open(self) -> None:
        """Raise an error if the scheduler cannot be used.

        The error is a ForkError, a ClosedError, or the error that ended the scheduler's thread.
        """
        self.origin.check()
        if self.failure is not None:
            raise type(self.failure)(
                f"the scheduler takes no more requests, because its thread ended: {self.failure}"
            )
        if self.is_closed:
            raise ClosedError("the scheduler is closed")

    @contextmanager
    def using(self) -> Iterator[C.c_void_p]:
        """Return a context that keeps the native scheduler from being destroyed.

        Raises the errors of ``check_open``.
        """
        # A forked process is rejected before the lock is taken. In a forked process, the lock may
        # be locked forever.
        self.origin.check()
        with self._changed:
            self.check_open()
            self._users += 1
        try:
            yield self._handle
        finally:
            with self._changed:
                self._users -= 1
                self._changed.notify_all()

    def stats(self) -> SchedulerStats:
        """Return the current statistics, or the last statistics if the thread has ended."""
        with self._changed:
            if self._last is not None:
                return self._last
            found = _native.SchedulerStats()
            self._library.dlm_scheduler_get_stats(self._handle, C.byref(found), C.sizeof(found))
        return SchedulerStats(
            **{field.name: getattr(found, field.name) for field in fields(SchedulerStats)}
        )

    def stop(self) -> None:
        """Tell the scheduler's thread to end after its current pass, and return at once.

        In a forked process, this method does nothing.
        """
        if not self.origin.is_here:
            return
        with self._changed:
            if not self.is_closed:
                self.is_closed = True
                self._library.dlm_scheduler_stop(self._handle)

    def close(self) -> None:
        """Call ``stop`` and wait until the thread has ended."""
        if self.origin.is_here:
            self.stop()
            if self._thread is not threading.current_thread():
                self._thread.join()


_RUNNERS: weakref.WeakSet[_Runner] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for runner in list(_RUNNERS):
        runner.close()


class Scheduler:
    """Accepts requests from any thread and runs these requests.

    ``Bundle.scheduler`` creates schedulers.

    A scheduler is closed at the end of its ``with`` block, when its last reference is dropped, or
    when the interpreter exits. In a forked process, every method raises ForkError.
    """

    def __init__(
        self,
        bundle: Handle,
        make: Callable[[tuple[Any, ...], Options], Request],
        max_running: int,
        max_waiting: int,
        max_tokens: int,
        cache_bytes: int,
        max_pass_ms: float,
        cost: PassCost | None,
        prefix_cache_bytes: int | None,
    ) -> None:
        options = _native.initialised(_native.SchedulerOptions)
        options.max_running = count_of("max_running", max_running)
        options.max_waiting = count_of("max_waiting", max_waiting)
        options.max_tokens = count_of("max_tokens", max_tokens)
        options.cache_bytes = count_of("cache_bytes", cache_bytes, (1 << 64) - 1)
        options.max_pass_ms = milliseconds_of("max_pass_ms", max_pass_ms)
        if prefix_cache_bytes is not None:
            options.prefix_cache_bytes = count_of(
                "prefix_cache_bytes", prefix_cache_bytes, (1 << 64) - 1
            )
        if cost is not None:
            if not isinstance(cost, PassCost):
                raise RequestError(f"cost = {shown(cost)}: give a PassCost, or None")
            native = _native.PassCost(C.sizeof(_native.PassCost), *astuple(cost))
            options.cost = C.pointer(native)
        self._make, self._runner = make, _Runner(bundle, options)
        # The finalizer calls ``stop`` and not ``close``, because it must not wait. The garbage
        # collector can run it on a thread that holds a lock, and the scheduler's thread may need
        # this lock to end.
        weakref.finalize(self, self._runner.stop).atexit = False

    def submit(
        self,
        *,
        prompt: str | None = None,
        tokens: Sequence[int] | None = None,
        chat: Sequence[Mapping[str, Any]] | None = None,
        events: bool = False,
        **options: Unpack[RequestOptions],
    ) -> Job:
        """Submit a request, with the arguments of ``Bundle.generate``.

        The time limit ``deadline_ms`` starts now.

        Args:
            events: If True, iterating over the job yields an ``Event`` for each step.

        Raises:
            BusyError: The queue already has ``max_waiting`` requests.
            ClosedError: The scheduler is closed.
            DlmError: An argument is invalid, as for ``generate``, or an error has ended the
                scheduler's thread.
        """
        self._runner.check_open()
        if "cancel" in options:
            raise RequestError(
                "submit has no argument cancel: call the method cancel of the job that it returns"
            )
        return Job(self, self._make((prompt, tokens, chat), Options.of(options)), events)

    @property
    def stats(self) -> SchedulerStats:
        """The current statistics, or the last statistics if the scheduler was closed."""
        self._runner.origin.check()
        return self._runner.stats()

    @property
    def has_ended(self) -> bool:
        """True if the scheduler was closed, or if an error ended its thread."""
        self._runner.origin.check()
        return self._runner.is_closed

    def close(self) -> None:
        """End the scheduler after the current pass, and cancel the requests that have not ended.

        This method may be called several times.

        If an error ended the scheduler's thread, this error is raised.
        """
        self._runner.origin.check()
        self._runner.close()
        if self._runner.failure is not None:
            raise type(self._runner.failure)(
                f"the scheduler's thread ended: {self._runner.failure}"
            )

    def __enter__(self) -> Scheduler:
        return self

    def __exit__(self, raised: type[BaseException] | None, *_: object) -> None:
        if raised is None and self._runner.origin.is_here:
            self.close()
        else:
            self._runner.close()
