"""Handles signals that end a process, such as those of Ctrl-C, ``kill`` and a closed terminal."""

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
    """Raised when a signal arrives that ends the process.

    KeyboardInterrupt is not used, because click turns KeyboardInterrupt into an exit code.
    """

    def __init__(self, number: int) -> None:
        self.number = number


@contextmanager
def handled_by(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """While the ``with`` statement runs, call ``handler`` for signals that would end the process.

    Signals that the process ignores, for example under ``nohup``, stay ignored. Python lets only
    the main thread set handlers, so this function does nothing in other threads.
    """
    is_main = threading.current_thread() is threading.main_thread()
    # getsignal returns None for a handler that C code has set. Do not replace such a handler,
    # because Python could not restore it later.
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
def postponed() -> Iterator[None]:
    """Delay signals that would end the process until the ``with`` statement has run."""
    arrived: list[int] = []
    try:
        with handled_by(lambda number, _: arrived.append(number)):
            yield
    finally:
        if arrived:
            signal.raise_signal(arrived[0])


@contextmanager
def cancelling(cancel: threading.Event) -> Iterator[None]:
    """While the ``with`` statement runs, set ``cancel`` when a signal would end the process.

    The code in the ``with`` statement can then finish its work before the process ends. A second
    signal ends the process at once. Use this function inside ``dying_by_signal``.
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
    """While the ``with`` statement runs, call ``on_interrupt`` when the user presses Ctrl-C.

    If ``on_interrupt`` returns False, the previous handler is called too.
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
    """While the ``with`` statement runs, raise an exception on signals that end the process.

    The exception lets the code clean up. The process then kills itself with the same signal, which
    also ends a shell loop that runs the command. After an exit code of 128 + n, such a loop would
    continue.
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
