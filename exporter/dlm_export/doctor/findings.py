"""One line of the doctor's report, and the whole report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

OK, NOTE, MISSING = "ok", "note", "missing"


@dataclass(frozen=True)
class Finding:
    """One finding.

    ``state`` is ``ok``; ``note`` for information that blocks nothing; or ``missing`` for something
    that blocks. ``is_needed``: the base install or the request needs it. ``remedy``: what to do, or
    empty.
    """

    part: str
    name: str
    state: str
    said: str
    remedy: str = ""
    is_needed: bool = False


@dataclass(frozen=True)
class Report:
    findings: tuple[Finding, ...]

    @property
    def works(self) -> bool:
        """True if everything that the base install or the request needs is there."""
        return not any(each.is_needed and each.state == MISSING for each in self.findings)

    def as_dict(self) -> dict[str, Any]:
        return {"works": self.works, "findings": [asdict(each) for each in self.findings]}


def ok(part: str, name: str, said: str) -> Finding:
    """A finding without a problem."""
    return Finding(part, name, OK, said)


def note(part: str, name: str, said: str, remedy: str = "") -> Finding:
    """A finding for information."""
    return Finding(part, name, NOTE, said, remedy)


def needed(part: str, name: str, lacking: Sequence[tuple[str, str]], said: str) -> Finding:
    """A need that is met (``said``), or that lacks the first of ``lacking``, with its remedy."""
    if not lacking:
        return Finding(part, name, OK, said, is_needed=True)
    return Finding(part, name, MISSING, *lacking[0], is_needed=True)
