"""Handles signals that end a process: Ctrl-C, ``kill``, a closed terminal."""

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
    """A signal arrived. Not KeyboardInterrupt, which click converts to an exit code."""

    def __init__(self, number: int) -> None:
        self.number = number


@contextmanager
def handled_by(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Within the block, ``handler`` receives signals that end a process, except ignored ones
    (``nohup``).

    Does nothing outside the main thread, because only that may set handlers.
    """
    is_main = threading.current_thread() is threading.main_thread()
    # None: the handler was not set from Python, so Python cannot restore it.
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
    """Within the block, the first ending signal sets ``cancel``; the process then dies after the
    block.

    A second signal ends it at once. For use inside ``dying_by_signal``.
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
    """Within the block, Ctrl-C calls ``on_interrupt``; if it returns False, also the old handler."""
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
    """Within the block, a signal that ends the process raises an exception, so everything is
    cleaned up; then the process dies by the signal.

    An exit code of 128 + n would tell a script the same, but a shell would continue its loop.
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
