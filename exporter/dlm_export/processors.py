"""Lists the CPU kernels of the native runtime, and finds the kernels that this machine can run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dlm_runtime.abi import native as _native


@dataclass(frozen=True)
class KernelSet:
    """The kernels for one kind of processor.

    ``codes`` names the instruction set of the integer kernels, which compute INT8 and INT4 layers.
    ``floats`` names the instruction set of the floating-point kernels, which compute NVFP4 layers,
    attention, and the choice of the most likely tokens.
    """

    name: str
    processors: str
    codes: str
    floats: str

    @property
    def instructions(self) -> dict[str, str]:
        """Maps each kind of kernel to its instruction set.

        The kinds of kernels are the formats of linear layers, ``attention``, and ``candidates``
        (the choice of the most likely tokens).
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
"""All kernel sets, fastest first on each architecture. $DLM_KERNELS accepts the names of these
sets.
"""


def list_kernels() -> list[dict[str, Any]]:
    """Describe each kernel set in ``KERNEL_SETS`` with plain Python objects.

    ``refusal`` is the reason why this machine cannot run the kernels, or ``None`` if it can.
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
