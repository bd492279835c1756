"""Python's signals, and its threads' wish to end a request, between the passes of a native call.

Python runs the handlers of signals on the main thread alone, and while that thread runs Python
code: a whole generation would go by first. So the library asks before every pass, the handlers run
then, and what one of them raises ends the call.
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
    """0 as often as it is asked, then 1 once a handler has raised. Requests whose event is set are
    cancelled.

    A generator, as a handler may run at the first instruction of a function, where no ``try`` of
    its own is around it yet, and ctypes drops what leaves a callback. This one is inside its
    ``try`` already when it goes on.
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
    """Lets signals in before each pass of the session's calls; raises what a handler raised, once
    its call has ended.

    ``cancels`` has an event, or None, for each request of the session.
    """
    raised: list[BaseException] = []
    answers = _answers(session, raised, cancels)
    next(answers)  # into the ``try``
    is_main = threading.current_thread() is threading.main_thread()
    before_pass = (
        _native.BeforePassFn(answers.send) if is_main or cancels else _native.BeforePassFn()
    )
    # Every user of a session sets its own: one that a signal ended may not have come to taking its
    # back.
    _native.library().dlm_session_before_pass(session, before_pass, None)
    try:
        yield
    except CancelledError:
        if raised:
            raise raised.pop() from None
        raise
