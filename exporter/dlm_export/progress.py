"""Progress of long commands, and the time of their stages."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol


class Progress(Protocol):
    """Receives stages, each with a number of units of work."""

    def start(self, stage: str, total: int) -> None:
        """Start a stage of ``total`` units; the previous stage has ended."""

    def advance(self, units: int = 1) -> None:
        """Report finished units of the current stage."""


class Silent:
    """Progress that is not shown."""

    def start(self, stage: str, total: int) -> None: ...

    def advance(self, units: int = 1) -> None: ...


class Stages:
    """Reports stages to ``progress`` as they begin, and keeps the ``seconds`` of those that
    succeeded, by name.
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
