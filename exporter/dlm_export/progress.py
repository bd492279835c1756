"""Reports the progress of long commands, and measures the time of their stages."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol


class Progress(Protocol):
    """Receives the progress of a command, which consists of stages. Each stage has a number of
    units of work.
    """

    def start(self, stage: str, total: int) -> None:
        """Start a stage of ``total`` units. The previous stage has then ended."""

    def advance(self, units: int = 1) -> None:
        """Report that units of the current stage are finished."""


class Silent:
    """Discards progress."""

    def start(self, stage: str, total: int) -> None: ...

    def advance(self, units: int = 1) -> None: ...


class Stages:
    """Reports stages to ``progress`` as they begin.

    ``seconds`` has the time of each stage that has succeeded, by its name.
    """

    def __init__(self, progress: Progress | None = None) -> None:
        self.progress = progress or Silent()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str, total: int) -> Iterator[Callable[..., None]]:
        """Run and time a stage of ``total`` units; yields the function that advances it."""
        self.progress.start(name, total)
        began = time.perf_counter()
        yield self.progress.advance
        self.seconds[name] = round(time.perf_counter() - began, 3)
