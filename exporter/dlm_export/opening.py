"""Defines the options for opening a bundle. All commands that run a bundle use these options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import dlm_runtime
from dlm_runtime import Bundle


@dataclass(frozen=True)
class Opening:
    """Options with the names and meanings of the arguments of ``dlm_runtime.open``."""

    engine: str = "auto"
    provider: str = "cpu"
    allow_fallback: bool = False
    cuda_graphs: bool = False
    threads: int = 0
    prefix_cache_bytes: int = 0
    prompt_caches: Sequence[Path] = ()

    def open(self, path: Path, *, check_hashes: bool = True) -> Bundle:
        """Open the bundle in the folder ``path``. Raises the errors of ``dlm_runtime.open``."""
        return dlm_runtime.open(path, check_hashes=check_hashes, **asdict(self))


ON_CPU = Opening(engine="onnxruntime")
"""Opens a bundle with ONNX Runtime on the CPU.

Every bundle can be opened in this way, even a bundle for GPUs.
"""
