"""Defines the doctor's report and its lines, which are called findings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

OK, NOTE, MISSING = "ok", "note", "missing"


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    ``state`` is one of three values:

    - ``ok``: the part works.
    - ``missing``: the part does not work, because something is missing.
    - ``note``: the line gives information about a part that is not required.

    A part is something that dlm-export uses, such as a library or a GPU. The fields ``part`` and
    ``name`` identify the part. ``said`` is the message. ``remedy`` tells the user what to do, and
    may be empty. ``is_needed`` is true if dlm-export cannot work without the part, or if the user
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
        """True if all required parts work."""
        return not any(each.is_needed and each.state == MISSING for each in self.findings)

    def as_dict(self) -> dict[str, Any]:
        return {"works": self.works, "findings": [asdict(each) for each in self.findings]}


def ok(part: str, name: str, said: str) -> Finding:
    """Create a finding for a part that works."""
    return Finding(part, name, OK, said)


def note(part: str, name: str, said: str, remedy: str = "") -> Finding:
    """Create a finding for a part that is not required."""
    return Finding(part, name, NOTE, said, remedy)


def needed(part: str, name: str, lacking: Sequence[tuple[str, str]], said: str) -> Finding:
    """Create a finding for a part that is required.

    Each entry of ``lacking`` says what is missing, and how to get it. If ``lacking`` is empty, the
    part works and the message is ``said``. Otherwise, the finding reports the first entry.
    """
    if not lacking:
        return Finding(part, name, OK, said, is_needed=True)
    return Finding(part, name, MISSING, *lacking[0], is_needed=True)
