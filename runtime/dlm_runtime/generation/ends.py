"""Wakes coroutines when the jobs that they wait for have ended.

Each scheduler has a separate thread that waits for ended jobs.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol


class Job(Protocol):
    """A job, as far as this module needs to know it."""

    @property
    def done(self) -> bool: ...


class Ends:
    """Calls functions when jobs have ended.

    ``descriptor`` is the scheduler's file descriptor ``ended_fd``, to which the native scheduler
    writes when jobs end. A separate thread reads the descriptor and calls the functions that
    ``when_ended`` received. Passes therefore never wait for Python. This thread starts at the first
    call of ``when_ended``.
    """

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_CLOEXEC)
        # The lock is re-entrant. The garbage collector may close a coroutine at any time, and
        # closing a coroutine calls forget().
        self._lock = threading.RLock()
        self._waiting: set[tuple[Job, Callable[[], None]]] = set()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def when_ended(self, job: Job, call: Callable[[], None]) -> None:
        """Call a function once when a job has ended. The call may be made on any thread.

        Args:
            job: A job of the scheduler.
            call: The function. The function must return immediately. A RuntimeError of the function
                is ignored, because the function may wake an event loop that is closed.
        """
        with self._lock:
            is_late = self._is_closed
            if not is_late:
                self._waiting.add((job, call))
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="dlm-ends", daemon=True)
                    self._thread.start()
                if job.done:  # otherwise, a job that ended earlier would be missed
                    os.eventfd_write(self.descriptor, 1)
        if is_late:  # the scheduler is closed, so the job has ended
            call()

    def forget(self, job: Job, call: Callable[[], None]) -> None:
        """Undo a call of ``when_ended`` that had the same arguments."""
        with self._lock:
            self._waiting.discard((job, call))

    def close(self) -> None:
        """Call the remaining functions, and end the thread.

        The native scheduler must already be destroyed.
        """
        with self._lock:
            self._is_closed = True
            if self._thread is None:
                os.close(self.descriptor)
            else:
                os.eventfd_write(self.descriptor, 1)

    def _run(self) -> None:
        while True:
            os.eventfd_read(self.descriptor)
            with self._lock:
                is_last = self._is_closed
                ended = {each for each in list(self._waiting) if each[0].done}
                self._waiting -= ended
            for _, call in ended:
                with suppress(RuntimeError):
                    call()
            if is_last:
                os.close(self.descriptor)
                return
