"""Defines one line of the doctor's report (a finding), and the whole report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

OK, NOTE, MISSING = "ok", "note", "missing"


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    ``state`` has one of three values:

    - ``ok``: there is no problem.
    - ``missing``: something is absent, and the part does not work without it.
    - ``note``: information about something that is not required.

    ``remedy`` says what to do; it may be empty. ``is_needed`` is true if the base install does not
    work without this part, or if the bundle or target that the user named does not.
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
        """True if nothing is missing that the base install or the user's request needs."""
        return not any(each.is_needed and each.state == MISSING for each in self.findings)

    def as_dict(self) -> dict[str, Any]:
        return {"works": self.works, "findings": [asdict(each) for each in self.findings]}


def ok(part: str, name: str, said: str) -> Finding:
    """Create a finding that reports no problem."""
    return Finding(part, name, OK, said)


def note(part: str, name: str, said: str, remedy: str = "") -> Finding:
    """Create a finding that only informs."""
    return Finding(part, name, NOTE, said, remedy)


def needed(part: str, name: str, lacking: Sequence[tuple[str, str]], said: str) -> Finding:
    """Create a finding about a requirement.

    ``lacking`` has the missing things, each with its remedy. If it is empty, the requirement is met
    and the finding says ``said``. Otherwise the finding reports the first missing thing.
    """
    if not lacking:
        return Finding(part, name, OK, said, is_needed=True)
    return Finding(part, name, MISSING, *lacking[0], is_needed=True)
