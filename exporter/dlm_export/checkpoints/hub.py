"""Checkpoints by name: ``hf:ORG/NAME[@REVISION]``, downloaded through huggingface_hub.

Only configuration, tokenizer and safetensors files are fetched, never code or pickles. A revision
is resolved to a commit first, so that all files belong together. ``local`` gives the folder to read:
the cache of huggingface_hub for a build, or a temporary folder that has the headers of the weights
only. Without the prefix, nothing is downloaded.
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
    """A repository on the hub, and a branch, tag or commit of it; None is the default branch."""

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
    """The origin of a checkpoint, as the manifest records it.

    ``revision`` is a commit. ``files`` are the SHA-256 of all files; empty if only headers were
    read.
    """

    repository: str
    revision: str
    files: dict[str, str]

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


@dataclass(frozen=True)
class Located:
    """The folder of a checkpoint or bundle, and its origin on the hub, if it has one."""

    path: Path
    hub: Hub | None = None


@contextlib.contextmanager
def local(source: Path | HubName, *, headers_only: bool = False) -> Iterator[Located]:
    """Give the folder of a checkpoint or bundle; fetch it first if it is on the hub.

    With ``headers_only``, weights are files of the full size without data. Raises HubError.
    """
    if isinstance(source, Path):
        yield Located(source)
        return
    from dlm_export.checkpoints import fetching

    with fetching.fetched(source, headers_only=headers_only) as found:
        yield found
