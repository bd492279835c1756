"""Defines the doctor's report and its lines, which are called findings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

OK, NOTE, MISSING = "ok", "note", "missing"


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    ``state`` has one of three values:

    - ``ok``: ``part`` works.
    - ``missing``: ``part`` does not work, because something is missing.
    - ``note``: information about something that is not required.

    ``said`` is the message, and ``remedy`` tells the user what to do; ``remedy`` may be empty.
    ``is_needed`` is true if dlm-export cannot work without the part. It is also true if the user
    named a bundle or target that cannot work without the part.
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
        """True if all parts that are needed work."""
        return not any(each.is_needed and each.state == MISSING for each in self.findings)

    def as_dict(self) -> dict[str, Any]:
        return {"works": self.works, "findings": [asdict(each) for each in self.findings]}


def ok(part: str, name: str, said: str) -> Finding:
    """Create a finding that says that a part works."""
    return Finding(part, name, OK, said)


def note(part: str, name: str, said: str, remedy: str = "") -> Finding:
    """Create a finding about something that is not required."""
    return Finding(part, name, NOTE, said, remedy)


def needed(part: str, name: str, lacking: Sequence[tuple[str, str]], said: str) -> Finding:
    """Create a finding about something that is required.

    ``lacking`` lists what is missing, each entry with its remedy. If ``lacking`` is empty, the
    finding has the message ``said``. Otherwise, it reports the first entry.
    """
    if not lacking:
        return Finding(part, name, OK, said, is_needed=True)
    return Finding(part, name, MISSING, *lacking[0], is_needed=True)
