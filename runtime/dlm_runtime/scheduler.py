"""Requests that any thread hands in and that share passes: ``dlm_scheduler_*`` of the C ABI, and a thread that makes them."""

from __future__ import annotations

import ctypes as C
import itertools
import math
import queue
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlm_runtime import _native
from dlm_runtime.errors import ClosedError, RequestError, shown
from dlm_runtime.files import read_object
from dlm_runtime.request import Options, Request, RequestOptions, count_of, milliseconds_of
from dlm_runtime.results import Event, Generation

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from dlm_runtime.bundle import Bundle
    from dlm_runtime.constraints.compiled import Constraint

_MOST_BYTES = 1 << 20  # of a file that bench wrote
WAIT_S = 0.1  # seconds between two looks of a waiting thread at its signals
EVENT_WAIT_S = 0.02  # and at whether a request that tells of its steps has ended without one: cancelled, late, failed


@dataclass(frozen=True)
class PassCost:
    """Milliseconds that a pass takes whatever it computes, and for each token of it, each row that it scores and each pair of a
    token and a position that it sees: what a machine takes for a bundle's passes, as ``dlm-export bench --cost`` fits it."""

    pass_ms: float
    token_ms: float
    row_ms: float
    pair_ms: float

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < math.inf:
                raise RequestError(f"cost: {each.name} = {value!r} is no time: give milliseconds")

    @classmethod
    def read(cls, path: str | Path) -> PassCost:
        """What ``dlm-export bench BUNDLE --cost --json`` printed into a file. Raises RequestError."""
        hint = " Write it with `dlm-export bench BUNDLE --cost --json`."
        found = read_object(Path(path), _MOST_BYTES, RequestError, hint).get("cost")
        names = [each.name for each in fields(cls)]
        if not isinstance(found, dict) or not set(names) <= set(found):
            raise RequestError(f"{path}: holds no cost of {', '.join(names)}.{hint}")
        return cls(*(found[name] for name in names))


@dataclass(frozen=True)
class SchedulerStats:
    """``waiting`` and ``running`` requests now; ``submitted``, ``finished`` and ``refused`` (by BusyError) so far.

    ``passes`` were made in ``busy_s`` seconds, commits included; ``shares`` is the sum of the requests that took part in each.
    ``cache_bytes``: keys and values held at once, at most. ``passes_s`` seconds were of passes alone, which the scheduler's
    cost expected to take ``expected_s`` (0 without one, or where requests take turns).
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


class Job:
    """A request that was handed in. Made by ``Scheduler.submit``; one that nobody refers to any more is cancelled."""

    def __init__(self, scheduler: Scheduler, request: Request, constraint: Constraint | None, events: bool) -> None:
        self._library, self._request = _native.library(), request
        self._handle = C.c_void_p()
        self._stream = request.text_stream() if events or request.stop_strings else None
        self._events: queue.SimpleQueue[Event | None] | None = queue.SimpleQueue() if events else None
        self._result: Generation | None = None
        self._error: Exception | None = None  # of what was made of its steps
        if events or self._stream is not None:
            scheduler._tell(self, request)
        message = C.create_string_buffer(_native.MESSAGE_BYTES)
        given = (C.c_int32 * max(1, len(request.given)))(*request.given)
        status = self._library.dlm_scheduler_submit(
            scheduler._handle,
            C.byref(request.options),
            None if constraint is None else constraint.handle,
            0,
            given,
            len(request.given),
            message,
            len(message),
            C.byref(self._handle),
        )
        if status:
            raise _native.error(status, message.value)

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._library.dlm_job_destroy(self._handle)

    @property
    def done(self) -> bool:
        """Whether ``result`` is there."""
        return bool(self._library.dlm_job_wait(self._handle, 0.0))

    def cancel(self) -> None:
        """End it within one pass with what it has."""
        self._library.dlm_job_cancel(self._handle)

    def result(self, timeout: float | None = None) -> Generation:
        """What it came to, after waiting ``timeout`` seconds for that at most; None: as long as it takes.

        ``timings``, ``passes`` and ``cache_bytes`` say nothing: passes are shared. Raises TimeoutError, and what
        ``Bundle.generate`` raises.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while not self.done:
            left = WAIT_S if end is None else min(WAIT_S, end - time.monotonic())
            if left <= 0:
                raise TimeoutError(f"the request is not done after {timeout} s")
            self._library.dlm_job_wait(self._handle, 1000 * left)  # in pieces, so that Ctrl-C is seen
        if self._result is None:
            found = _native.Result()
            status = self._library.dlm_job_result_sized(self._handle, C.byref(found), C.sizeof(found))
            if status:
                raise _native.error(status, self._library.dlm_job_message(self._handle)) from self._error
            canvas = self._library.dlm_job_tokens(self._handle, None)[: found.length]
            stopped = self._stream if self._stream is not None and self._stream.is_stopped else None
            self._result = self._request.generation(canvas, _native.outcome(found), stopped)
        return self._result

    def __iter__(self) -> Iterator[Event]:
        """The canvas after each of its passes, of a job that was submitted with ``events``; the last event has the result."""
        if self._events is None:
            raise RequestError("this job has no events: submit it with events=True")
        while not self.done or not self._events.empty():
            try:
                event = self._events.get(timeout=EVENT_WAIT_S)
            except queue.Empty:
                continue
            if event is None:
                break
            yield event
        result = self.result()
        length = len(result.tokens)
        told = 0 if self._stream is None else len(self._stream.text)
        yield Event(
            canvas=result.tokens,
            undecided=result.undecided,
            guess=[-1] * length,
            score=[0.0] * length,
            block=(0, length),
            nfe=result.nfe,
            committed=0,
            text=result.text,
            delta=None if result.text is None else result.text[told:],
            done=True,
            result=result,
        )

    def _step(self, view: _native.Step) -> None:
        """On the thread that makes the passes. The last step is told with the result, in ``__iter__``."""
        if view.done:
            if self._events is not None:
                self._events.put(None)  # wakes who waits
            return
        canvas = view.canvas[: view.length]
        undecided = [token == self._request.bundle.mask_token_id for token in canvas]
        delta = None if self._stream is None else self._request.push(self._stream, view, undecided)
        if self._stream is not None and self._stream.is_stopped:
            self.cancel()
        if self._events is not None:
            self._events.put(
                Event(
                    canvas=canvas,
                    undecided=undecided,
                    guess=view.guess[: view.length],
                    score=view.score[: view.length],
                    block=(view.block_start, view.block_end),
                    nfe=view.nfe,
                    committed=view.committed,
                    text=None if self._stream is None else self._stream.text,
                    delta=delta,
                    done=False,
                    result=None,
                )
            )


class Scheduler:
    """Made by ``Bundle.scheduler``; usable as a context manager, by any number of threads."""

    def __init__(
        self,
        bundle: Bundle,
        max_running: int,
        max_waiting: int,
        max_tokens: int,
        cache_bytes: int,
        max_pass_ms: float,
        cost: PassCost | None,
    ) -> None:
        self._library, self._bundle, self._handle = _native.library(), bundle, C.c_void_p()
        # One function for all jobs, which lives until no pass is made any more: a job may go before its request does.
        self._on_step = _native.StepFn(self._dispatch)
        self._told: weakref.WeakValueDictionary[int, Job] = weakref.WeakValueDictionary()
        self._numbers = itertools.count(1)
        self._last: SchedulerStats | None = None
        options = _native.initialised(_native.SchedulerOptions)
        options.max_running = count_of("max_running", max_running)
        options.max_waiting = count_of("max_waiting", max_waiting)
        options.max_tokens = count_of("max_tokens", max_tokens)
        options.cache_bytes = count_of("cache_bytes", cache_bytes, (1 << 64) - 1)
        options.max_pass_ms = milliseconds_of("max_pass_ms", max_pass_ms)
        if cost is not None:
            if not isinstance(cost, PassCost):
                raise RequestError(f"cost = {shown(cost)}: give a PassCost, or None")
            options.cost = _native.PassCost(*astuple(cost))
        message = C.create_string_buffer(_native.MESSAGE_BYTES)
        bundle._begin()
        status = self._library.dlm_scheduler_create(
            bundle._handle, C.byref(options), message, len(message), C.byref(self._handle)
        )
        if status:
            bundle._end()
            raise _native.error(status, message.value)
        self._thread = threading.Thread(target=self._run, name="dlm-scheduler", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        message = C.create_string_buffer(_native.MESSAGE_BYTES)
        self._library.dlm_scheduler_run(self._handle, 0, _native.BeforePassFn(), None, message, len(message))

    def _tell(self, job: Job, request: Request) -> None:
        """Let a job know of its request's steps."""
        number = next(self._numbers)
        self._told[number] = job
        request.options.on_step, request.options.user = self._on_step, number

    def _dispatch(self, number: int, step: Any) -> int:
        job = self._told.get(number)
        if job is None:
            return 0
        try:
            job._step(step.contents)
        except Exception as err:  # ctypes would print it, and go on
            job._error = err
            return 1
        return 0

    def submit(
        self,
        *,
        prompt: str | None = None,
        tokens: Sequence[int] | None = None,
        chat: Sequence[Mapping[str, Any]] | None = None,
        events: bool = False,
        **options: Unpack[RequestOptions],
    ) -> Job:
        """Hand in a request, which is what ``Bundle.generate`` takes; its deadline counts from now.

        ``events``: the job tells of every step. Raises BusyError where as many wait as may, and what ``generate`` raises of
        arguments.
        """
        if not self._handle:
            raise ClosedError("the scheduler is closed")
        if "cancel" in options:
            raise RequestError("submit takes no cancel: the job that it returns has a method of that name")
        request, constraint = self._bundle._request("generate", (prompt, tokens, chat), Options.of(options))
        return Job(self, request, constraint, events)

    @property
    def stats(self) -> SchedulerStats:
        """What it has done so far, or had done when it was closed."""
        if self._last is not None:
            return self._last
        found = _native.SchedulerStats()
        self._library.dlm_scheduler_stats_sized(self._handle, C.byref(found), C.sizeof(found))
        return SchedulerStats(**{field.name: getattr(found, field.name) for field in fields(SchedulerStats)})

    def close(self) -> None:
        """Make no more passes; requests that are not done end as cancelled ones."""
        if not self._handle:
            return
        self._library.dlm_scheduler_stop(self._handle)
        self._thread.join()
        self._last = self.stats
        self._library.dlm_scheduler_destroy(self._handle)
        self._handle = C.c_void_p()
        self._bundle._end()

    def __enter__(self) -> Scheduler:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_thread", None) is not None:
            self.close()
