"""How commands open the bundles that they run."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import dlm_runtime
from dlm_runtime import Bundle


@dataclass(frozen=True)
class Opening:
    """Arguments of ``dlm_runtime.open``, by their names there."""

    engine: str = "auto"
    provider: str = "cpu"
    allow_fallback: bool = False
    threads: int = 0

    def open(self, path: Path, *, check_hashes: bool = True) -> Bundle:
        """The bundle in the folder ``path``. Raises what ``dlm_runtime.open`` raises."""
        return dlm_runtime.open(path, check_hashes=check_hashes, **asdict(self))


ON_CPU = Opening(engine="onnxruntime")
"""The graph of any bundle, also of one for GPUs, on the CPU."""
