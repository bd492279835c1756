"""Finds the folder of a checkpoint: a local folder, or a download of ``hf:ORG/NAME[@REVISION]``.

The configuration, tokenizer and safetensors files are downloaded with huggingface_hub. Code and
pickles are never downloaded. A revision is first resolved to a commit, so that all files are from
the same commit. A path without the prefix ``hf:`` is a local folder, and nothing is downloaded.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

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

    def as_dict(self) -> dict[str, Any]:
        """Return this record as plain Python objects."""
        return asdict(self)


@dataclass(frozen=True)
class Located:
    """The folder of a checkpoint or bundle.

    ``hub`` describes the download. ``hub`` is ``None`` if ``path`` was not downloaded.
    """

    path: Path
    hub: Hub | None = None


@contextlib.contextmanager
def local(source: Path | HubName, *, headers_only: bool = False) -> Iterator[Located]:
    """Yield the folder of a checkpoint or bundle. If necessary, download it from the hub first.

    Downloads are stored in the cache of huggingface_hub. If ``headers_only`` is true, the yielded
    folder is temporary. The weight files in the folder have the right header and the full size, but
    contain zeros instead of weights. Raises HubError.
    """
    if isinstance(source, Path):
        yield Located(source)
        return
    from dlm_export.checkpoints import fetching

    with fetching.fetched(source, headers_only=headers_only) as found:
        yield found
