"""Handles Python's signals, and cancellation by other threads, between the passes of a native call.

Python runs signal handlers only on the main thread, and only while this thread runs Python code. A
native call would therefore delay handlers until a whole generation is done. To avoid this, the
library calls a Python function before every pass. Signal handlers run during that function. If a
handler raises an exception, the native call ends.
"""

from __future__ import annotations

import ctypes as C
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

from dlm_runtime.abi import native as _native
from dlm_runtime.errors import CancelledError

Cancels: TypeAlias = Sequence[threading.Event | None]


def _answers(
    session: C.c_void_p, raised: list[BaseException], cancels: Cancels
) -> Generator[int, None, None]:
    """Yields 0 until a signal handler has raised an exception, then 1. Cancels requests whose event
    is set.

    This is a generator because a handler may run at the first instruction of a function, before the
    function enters its ``try``, and ctypes drops exceptions that leave a callback. A generator
    resumes inside its ``try``.
    """
    try:
        while True:
            yield 0
            for number, event in enumerate(cancels):
                if event is not None and event.is_set():
                    _native.library().dlm_session_cancel(session, number)
    except GeneratorExit:
        raise
    except BaseException as err:
        raised.append(err)
    yield 1


@contextmanager
def seen_between_passes(session: C.c_void_p, cancels: Cancels = ()) -> Iterator[None]:
    """Run signal handlers before each pass of the session's calls. If a handler raised an
    exception, raise this exception after the native call has ended.

    ``cancels`` has an event, or None, for each request of the session.
    """
    raised: list[BaseException] = []
    answers = _answers(session, raised, cancels)
    next(answers)  # into the ``try``
    is_main = threading.current_thread() is threading.main_thread()
    before_pass = (
        _native.BeforePassFn(answers.send) if is_main or cancels else _native.BeforePassFn()
    )
    # Every use of a session sets its callback, because a signal may have kept the last one from
    # removing its own.
    _native.library().dlm_session_before_pass(session, before_pass, None)
    try:
        yield
    except CancelledError:
        if raised:
            raise raised.pop() from None
        raise
