"""Where a long command says how far it is."""

from __future__ import annotations

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
