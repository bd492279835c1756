"""The native runtime's CPU kernels by instruction set, and which of them run here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dlm_runtime.abi import native as _native


@dataclass(frozen=True)
class KernelSet:
    """Kernels for one instruction set.

    ``codes`` multiply quantised rows by INT8 and INT4 weights; ``floats`` compute NVFP4 layers,
    attention and candidates.
    """

    name: str
    processors: str
    codes: str
    floats: str

    @property
    def instructions(self) -> dict[str, str]:
        """Instruction set per format of a linear layer, and for attention and candidates."""
        codes, floats = self.codes, self.floats
        return {
            "int8": codes,
            "int4": codes,
            "nvfp4": floats,
            "attention": floats,
            "candidates": floats,
        }


KERNEL_SETS = (
    KernelSet("amx-int8", "Sapphire Rapids and later", "AMX", "AVX-512"),
    KernelSet("avx512-vnni", "Cascade Lake, Zen 4 and later", "AVX-512 VNNI", "AVX-512"),
    KernelSet("avx-vnni", "Alder Lake, Zen 5 and later", "AVX-VNNI", "AVX2"),
    KernelSet("avx2", "Haswell, Zen and later", "AVX2", "AVX2"),
    KernelSet("neon-dotprod", "Arm v8.2 with dot products", "NEON dot", "NEON"),
)
"""Fastest first per architecture. $DLM_KERNELS accepts their names."""


def list_kernels() -> list[dict[str, Any]]:
    """Plain values of each of ``KERNEL_SETS``; ``refusal``: why it does not run here, or ``None``."""
    here = _native.kernel_sets()
    return [
        {
            "name": known.name,
            "processors": known.processors,
            "instructions": known.instructions,
            "refusal": here.get(known.name, "it is for another architecture"),
        }
        for known in KERNEL_SETS
    ]
