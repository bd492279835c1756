"""Names checkpoints on the hub (``hf:ORG/NAME[@REVISION]``), and records downloads."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

PREFIX = "hf:"
_PART = r"[\w-][\w.-]{0,95}"
_NAME = re.compile(rf"hf:(?P<repository>{_PART}/{_PART})(@(?P<revision>[\w][\w./-]{{0,127}}))?")


@dataclass(frozen=True)
class HubName:
    """A repository on the hub, and one of its revisions.

    ``revision`` is a branch, tag or commit. ``None`` means the default branch.
    """

    repository: str
    revision: str | None = None

    @classmethod
    def parse(cls, text: str) -> HubName:
        """Read ``hf:ORG/NAME[@REVISION]``. Raises ValueError."""
        found = _NAME.fullmatch(text)
        if found is None or ".." in text:
            raise ValueError(f"{text[:200]!r} is no name on the hub: write hf:ORG/NAME[@REVISION]")
        return cls(found["repository"], found["revision"])

    def __str__(self) -> str:
        return f"{PREFIX}{self.repository}" + (f"@{self.revision}" if self.revision else "")


@dataclass(frozen=True)
class Hub:
    """Says which repository on the hub a checkpoint was downloaded from, for the manifest.

    ``revision`` is a commit. ``files`` contains the SHA-256 of each file, and is empty if only
    headers were read.
    """

    repository: str
    revision: str
    files: dict[str, str]


@dataclass(frozen=True)
class Located:
    """The folder of a checkpoint or bundle.

    ``hub`` describes the download. ``hub`` is ``None`` if ``path`` was not downloaded.
    """

    path: Path
    hub: Hub | None = None
