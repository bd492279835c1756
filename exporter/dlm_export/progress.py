"""Reports the progress of long commands, and measures how long their stages take."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol


class Progress(Protocol):
    """Receives notifications about a command's progress.

    A command consists of stages, and a stage consists of units of work.
    """

    def start(self, stage: str, total: int) -> None:
        """Called when a stage of ``total`` units starts. This call also ends the previous stage."""

    def advance(self, units: int = 1) -> None:
        """Called when ``units`` more units of the current stage are finished."""


class Silent:
    """A ``Progress`` that ignores all notifications."""

    def start(self, stage: str, total: int) -> None: ...

    def advance(self, units: int = 1) -> None: ...


class Stages:
    """Reports each stage to ``progress`` when it starts, and measures its duration.

    ``seconds`` maps the name of each stage that succeeded to its duration in seconds.
    """

    def __init__(self, progress: Progress | None = None) -> None:
        self.progress = progress or Silent()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str, total: int) -> Iterator[Callable[..., None]]:
        """Report the ``with`` block as a stage of ``total`` units, and measure its duration.

        Yields a function that the ``with`` block calls to report finished units.
        """
        self.progress.start(name, total)
        began = time.perf_counter()
        yield self.progress.advance
        self.seconds[name] = round(time.perf_counter() - began, 3)
