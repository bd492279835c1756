"""Signals that end a process: Ctrl-C, ``kill``, a terminal that closes."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _Ended(BaseException):
    """A signal came; not KeyboardInterrupt, which click makes an exit code of."""

    def __init__(self, number: int) -> None:
        self.number = number


@contextmanager
def handled_by(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Within, ``handler`` gets the signals that end a process, but for those that this one was
    started to ignore (``nohup``).

    Nothing changes on other threads than the main one, which alone may set handlers.
    """
    is_main = threading.current_thread() is threading.main_thread()
    # None: not set from Python, and so not to be set back.
    numbers = [
        number
        for number in ENDING
        if is_main and signal.getsignal(number) not in (signal.SIG_IGN, None)
    ]
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@contextmanager
def cancelling(cancel: threading.Event) -> Iterator[None]:
    """Within, the first signal that ends the process sets ``cancel`` instead, and the process ends
    by it behind the block; a second one ends it at once. For use inside ``dying_by_signal``.
    """
    ending: list[int] = []

    def end(number: int, _: FrameType | None) -> None:
        ending.append(number)
        cancel.set()
        if len(ending) > 1:
            raise _Ended(number)

    with handled_by(end):
        yield
    if ending:
        raise _Ended(ending[0])


@contextmanager
def interrupted_by(on_interrupt: Callable[[], bool]) -> Iterator[None]:
    """Within, Ctrl-C calls ``on_interrupt``, and is what it was before where that says that it had
    nothing to do.
    """
    before = signal.getsignal(signal.SIGINT)

    def interrupt(number: int, frame: FrameType | None) -> None:
        if not on_interrupt() and callable(before):
            before(number, frame)

    is_ours = threading.current_thread() is threading.main_thread() and before not in (
        signal.SIG_IGN,
        None,
    )
    if is_ours:
        signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        if is_ours:
            signal.signal(signal.SIGINT, before)


@contextmanager
def dying_by_signal() -> Iterator[None]:
    """Within, a signal that ends the process is an exception, on whose way all is cleared up; then
    the process dies by it.

    An exit code of 128 + n would say the same to a script, but a shell would go on with its loop.
    """

    def end(number: int, _: FrameType | None) -> None:
        raise _Ended(number)

    try:
        with handled_by(end):
            yield
    except _Ended as err:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        signal.signal(err.number, signal.SIG_DFL)
        os.kill(os.getpid(), err.number)
