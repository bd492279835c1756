"""Where a long command says how far it is, and how long its stages took."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol


class Progress(Protocol):
    """Stages, each with so many units of work."""

    def start(self, stage: str, total: int) -> None:
        """A stage of ``total`` units begins; the one before it has ended."""

    def advance(self, units: int = 1) -> None:
        """Part of the current stage is done."""


class Silent:
    """Progress that nobody watches."""

    def start(self, stage: str, total: int) -> None: ...

    def advance(self, units: int = 1) -> None: ...


class Stages:
    """The stages of one piece of work, told to ``progress`` as they begin. ``seconds``: those that
    ended well, by name.
    """

    def __init__(self, progress: Progress | None = None) -> None:
        self.progress = progress or Silent()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str, total: int) -> Iterator[Callable[..., None]]:
        """Run and time a stage of ``total`` units; gives what advances it."""
        self.progress.start(name, total)
        began = time.perf_counter()
        yield self.progress.advance
        self.seconds[name] = round(time.perf_counter() - began, 3)
