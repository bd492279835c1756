"""A line of the doctor's report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

OK, NOTE, MISSING = "ok", "note", "missing"


@dataclass(frozen=True)
class Finding:
    """``state``: ``ok``; ``note``, worth knowing, and nothing stands still for it; ``missing``,
    something does.

    ``is_needed``: by the base install, or by what was asked for. ``remedy``: what to do, empty
    where nothing need be done.
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
        """Whether nothing is missing that the base install, or what was asked for, needs."""
        return not any(each.is_needed and each.state == MISSING for each in self.findings)

    def as_dict(self) -> dict[str, Any]:
        return {"works": self.works, "findings": [asdict(each) for each in self.findings]}


def ok(part: str, name: str, said: str) -> Finding:
    """One that is as it should be."""
    return Finding(part, name, OK, said)


def note(part: str, name: str, said: str, remedy: str = "") -> Finding:
    """One that is worth knowing."""
    return Finding(part, name, NOTE, said, remedy)


def needed(part: str, name: str, lacking: Sequence[tuple[str, str]], said: str) -> Finding:
    """A need that is met, as ``said``, or that lacks the first of ``lacking``, with its remedy."""
    if not lacking:
        return Finding(part, name, OK, said, is_needed=True)
    return Finding(part, name, MISSING, *lacking[0], is_needed=True)
