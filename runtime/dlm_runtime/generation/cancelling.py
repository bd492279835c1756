"""Runs Python's signal handlers and cancels requests between the passes of a native call.

Python runs signal handlers only on the main thread, and only while this thread runs Python code.
Without this module, a handler would have to wait until a native call has finished the whole
generation. To avoid this wait, the native library calls a Python function before every pass, and
pending signal handlers run during that function. If a handler raises an exception, the native call
ends.
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
    """Yield one value before each pass for the native library: 0 to continue, 1 to end the call.

    The value is 0 until a signal handler raises an exception. This generator also cancels requests
    whose event is set.

    A plain function would not be safe: a signal handler may run at the function's first
    instruction, before the function enters its ``try``. The handler's exception would then leave
    the callback, and ctypes would drop the exception. A generator resumes inside its ``try``, so it
    always catches the exception.
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
    """Within this context, the handlers of pending signals run before each pass of the session.

    If a handler raises an exception, this exception is raised again after the native call has
    ended.

    ``cancels`` contains an event, or None, for each request of the session.
    """
    raised: list[BaseException] = []
    answers = _answers(session, raised, cancels)
    next(answers)  # runs the generator into its ``try``
    is_main = threading.current_thread() is threading.main_thread()
    before_pass = (
        _native.BeforePassFn(answers.send) if is_main or cancels else _native.BeforePassFn()
    )
    # The callback is set at every use of a session. The previous use may not have removed its
    # callback, because a signal can interrupt the removal.
    _native.library().dlm_session_before_pass(session, before_pass, None)
    try:
        yield
    except CancelledError:
        if raised:
            raise raised.pop() from None
        raise
