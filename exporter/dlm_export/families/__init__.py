"""Model families: what each released layout is called, and how its tensors become a ``Denoiser``'s.

A family is one file with a ``Family`` record and one line in ``FAMILIES``.
"""

from __future__ import annotations

import reprlib

import numpy as np
import torch

from dlm_export.checkpoint import Checkpoint, CheckpointError
from dlm_export.denoiser import Capabilities, Denoiser
from dlm_export.families import dream, llada
from dlm_export.families.base import Family, Overrides

FAMILIES: dict[str, Family] = {family.name: family for family in (llada.FAMILY, dream.FAMILY)}
_LISTED = 8  # names shown of each kind of tensor error


def find(checkpoint: Checkpoint) -> Family:
    """The family of a checkpoint by ``architectures[0]``. Raises CheckpointError that lists the known ones."""
    architectures = checkpoint.config.values.get("architectures")
    name = architectures[0] if isinstance(architectures, list) and architectures else None
    for family in FAMILIES.values():
        if name in family.architectures:
            return family
    known = ", ".join(architecture for family in FAMILIES.values() for architecture in family.architectures)
    raise CheckpointError(f"{checkpoint.config.path}: unknown architecture {reprlib.repr(name)}. Known: {known}.")


def read_capabilities(checkpoint: Checkpoint, overrides: Overrides) -> Capabilities:
    """What a checkpoint's denoiser is. Raises CheckpointError."""
    capabilities = find(checkpoint).capabilities(checkpoint, overrides)
    if capabilities.head_size % 2:
        raise CheckpointError(f"{checkpoint.config.path}: head size {capabilities.head_size} is odd, RoPE needs pairs")
    return capabilities


class Weights:
    """A checkpoint's tensors under the denoiser's parameter names, checked once, read one at a time."""

    def __init__(self, checkpoint: Checkpoint, capabilities: Capabilities) -> None:
        """Raises CheckpointError that names every missing, extra and wrongly shaped tensor."""
        self.checkpoint = checkpoint
        self.shapes = capabilities.parameter_shapes()
        self.sources = FAMILIES[capabilities.family].layout.sources(capabilities)
        assert self.sources.keys() == self.shapes.keys(), self.sources.keys() ^ self.shapes.keys()
        self._check()

    def read(self, parameter: str, dtype: np.dtype) -> np.ndarray:
        """One parameter as a C-contiguous array of ``dtype``.

        Raises CheckpointError if a weight is NaN or infinite, or leaves the range of ``dtype``.
        """
        source = self.sources[parameter]
        tensor = self.checkpoint.tensor(source.tensor).to(torch.float32)
        if not bool(tensor.isfinite().all()):
            bad = int((~tensor.isfinite()).sum())
            raise CheckpointError(
                f"{self.checkpoint.tensors[source.tensor].file}: {source.tensor} holds {bad} NaN or infinite weights"
            )
        array = np.ascontiguousarray((tensor.T if source.transpose else tensor).numpy(), dtype=np.float32)
        largest = float(np.finfo(dtype).max)
        if dtype != np.float32 and float(np.abs(array).max(initial=0.0)) > largest:
            raise CheckpointError(
                f"{source.tensor}: weights up to {np.abs(array).max():.3g} do not fit {dtype} (largest {largest:.3g}). "
                "Use --precision fp32."
            )
        return array.astype(dtype, copy=False)

    def _check(self) -> None:
        tensors = self.checkpoint.tensors
        problems = []
        missing = [source.tensor for source in self.sources.values() if source.tensor not in tensors]
        used = {source.tensor for source in self.sources.values()}
        extra = [name for name in tensors if name not in used and not name.endswith("rotary_emb.inv_freq")]
        wrong = []
        for parameter, source in self.sources.items():
            expected = self.shapes[parameter][::-1] if source.transpose else self.shapes[parameter]
            found = tensors[source.tensor].shape if source.tensor in tensors else expected
            if found != expected:
                wrong.append(f"{source.tensor} is {list(found)}, expected {list(expected)}")
        for kind, names in (("missing", missing), ("not known", extra), ("of the wrong shape", wrong)):
            if names:
                more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
                problems.append(f"{len(names)} tensors {kind}: {', '.join(names[:_LISTED])}{more}")
        if problems:
            raise CheckpointError(f"{self.checkpoint.path}: {'; '.join(problems)}")


def load(weights: Weights, capabilities: Capabilities, dtype: torch.dtype = torch.float32) -> Denoiser:
    """The checkpoint as a torch ``Denoiser`` on the CPU, in evaluation mode; ``dtype`` of its parameters."""
    denoiser = Denoiser(capabilities).to(dtype)
    with torch.no_grad():
        for name, parameter in denoiser.named_parameters():
            parameter.copy_(torch.from_numpy(weights.read(name, np.dtype(np.float32))))
    return denoiser.eval().requires_grad_(False)


__all__ = ["FAMILIES", "Family", "Weights", "find", "load", "read_capabilities"]
