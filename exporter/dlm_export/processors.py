"""The CPU kernels of the native runtime by instruction set, and which of them this machine can run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dlm_runtime.abi import native as _native


@dataclass(frozen=True)
class KernelSet:
    """The kernels for one kind of processor.

    ``codes`` is the instruction set that multiplies quantised rows by INT8 and INT4 weights.
    ``floats`` is the one that computes NVFP4 layers, attention and candidates.
    """

    name: str
    processors: str
    codes: str
    floats: str

    @property
    def instructions(self) -> dict[str, str]:
        """The instruction set used for each format of a linear layer, for attention, and for
        candidates.
        """
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
"""For each architecture, the fastest set comes first. $DLM_KERNELS accepts these names."""


def list_kernels() -> list[dict[str, Any]]:
    """Describe each of ``KERNEL_SETS`` in plain values.

    ``refusal`` is the reason why the set does not run on this machine, or ``None`` if it does.
    """
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
