"""The families room: a checkpoint with its released names in, a network's description and parameters out.

A family is one file with a ``Family`` record and one line in ``FAMILIES``.
"""

from __future__ import annotations

import reprlib

import ml_dtypes
import numpy as np
import torch

from dlm_calibration.formats import NVFP4_GROUP_SIZE
from dlm_export.checkpoints import prequantised
from dlm_export.checkpoints.folder import WEIGHT_DTYPES, Checkpoint, CheckpointError, weight_format
from dlm_export.checkpoints.prequantised import Expected, StoredQuantised
from dlm_export.families import dream, llada
from dlm_export.families.base import Family, Overrides, Parameters
from dlm_export.memory import give_back
from dlm_export.network.denoiser import Denoiser, NetworkSpec, rotary_tables

LARGE_TENSOR = 1 << 20  # elements; smaller ones leave no holes worth a call
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
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


def read_network(checkpoint: Checkpoint, overrides: Overrides) -> NetworkSpec:
    """What a checkpoint's denoiser is. Raises CheckpointError."""
    network = find(checkpoint).network(checkpoint, overrides)
    if network.head_size % 2:
        raise CheckpointError(f"{checkpoint.config.path}: head size {network.head_size} is odd, RoPE needs pairs")
    return network


class Weights:
    """A checkpoint's tensors under the denoiser's parameter names, checked once, read one at a time.

    ``quantised``: parameter -> modelopt's algorithm, for the matrices that are stored quantised. ``notes`` says in sentences
    what the checkpoint holds and is not used as it stands.
    """

    def __init__(self, checkpoint: Checkpoint, network: NetworkSpec) -> None:
        """Raises CheckpointError that names every missing, extra, wrongly typed and wrongly shaped tensor."""
        self.checkpoint = checkpoint
        self.shapes = network.parameter_shapes()
        self.sources = FAMILIES[network.family].layout.sources(network)
        assert self.sources.keys() == self.shapes.keys(), self.sources.keys() ^ self.shapes.keys()
        self.quantised: dict[str, str] = {}
        for parameter, source in self.sources.items():
            algorithm = prequantised.algorithm_of(checkpoint, source.tensor) if source.transpose else None
            if algorithm is not None:
                self.quantised[parameter] = algorithm
        self.notes: list[str] = []
        self._check()

    def read(self, parameter: str, dtype: np.dtype) -> np.ndarray:
        """One parameter as a C-contiguous array of ``dtype``; a quantised matrix as the values that its codes stand for.

        Raises CheckpointError if a weight is NaN or infinite, or leaves the range of ``dtype``.
        """
        source = self.sources[parameter]
        stored = self.stored(parameter)
        if stored is not None:
            array = stored.weight.dequantise()
        else:
            tensor = self.checkpoint.tensor(source.tensor)
            # In pieces: torch's isfinite holds several copies of what it is asked about.
            pieces: tuple[torch.Tensor, ...] = torch.split(tensor.reshape(-1), 1 << 22)
            bad = sum([int((~piece.isfinite()).sum()) for piece in pieces])
            if bad:
                raise CheckpointError(
                    f"{self.checkpoint.tensors[source.tensor].file}: {source.tensor} holds {bad} NaN or infinite weights"
                )
            if dtype == BFLOAT16 and tensor.dtype == torch.bfloat16:  # as it lies in the file, without fp32 between
                bits = tensor.view(torch.int16)
                return np.ascontiguousarray((bits.T if source.transpose else bits).numpy()).view(BFLOAT16)
            tensor = tensor.to(torch.float32)
            array = np.ascontiguousarray((tensor.T if source.transpose else tensor).numpy(), dtype=np.float32)
        largest = float(ml_dtypes.finfo(dtype).max)  # type: ignore[no-untyped-call]
        if dtype != np.float32 and float(np.abs(array).max(initial=0.0)) > largest:
            raise CheckpointError(
                f"{source.tensor}: weights up to {np.abs(array).max():.3g} do not fit {dtype} (largest {largest:.3g}). "
                "Use --precision fp32."
            )
        return array.astype(dtype, copy=False)

    def stored(self, parameter: str) -> StoredQuantised | None:
        """A quantised matrix's codes and scales as they lie in the checkpoint, ``[in, out]``; None in full precision.

        Raises CheckpointError for scales and codes that are no numbers.
        """
        algorithm = self.quantised.get(parameter)
        if algorithm is None:
            return None
        return prequantised.read(self.checkpoint, self.sources[parameter].tensor, algorithm)

    def _expected(self) -> dict[str, Expected]:
        """Every tensor that the denoiser reads, by its released name."""
        expected: dict[str, Expected] = {}
        for parameter, source in self.sources.items():
            shape = self.shapes[parameter]
            if parameter in self.quantised:
                inputs, outputs = shape
                expected |= prequantised.expected_tensors(source.tensor, self.quantised[parameter], inputs, outputs)
            else:
                expected[source.tensor] = Expected(tuple(WEIGHT_DTYPES), (shape[::-1] if source.transpose else shape,))
        return expected

    def _check(self) -> None:
        tensors, expected = self.checkpoint.tensors, self._expected()
        missing = [name for name, wanted in expected.items() if wanted.is_required and name not in tensors]
        cache = [name for name in tensors if name not in expected and name.endswith(prequantised.CACHE_SUFFIXES)]
        extra = [
            name for name in tensors if name not in expected and name not in cache and not name.endswith("rotary_emb.inv_freq")
        ]
        present = {name: (tensors[name], wanted) for name, wanted in expected.items() if name in tensors}
        mistyped = [
            f"{name} is {found.dtype}, expected {' or '.join(wanted.dtypes)}"
            for name, (found, wanted) in present.items()
            if found.dtype not in wanted.dtypes
        ]
        misshaped = [
            f"{name} is {list(found.shape)}, expected {' or '.join(str(list(shape)) for shape in wanted.shapes)}"
            for name, (found, wanted) in present.items()
            if found.shape not in wanted.shapes and found.dtype in wanted.dtypes
        ]
        problems = [
            f"{len(names)} tensors {kind}: {_some(names)}"
            for kind, names in (
                ("missing", missing),
                ("not known", extra),
                ("of the wrong type", mistyped),
                ("of the wrong shape", misshaped),
                ("that NVFP4's groups do not divide", self._undivided()),
            )
            if names
        ]
        if problems:
            raise CheckpointError(f"{self.checkpoint.path}: {'; '.join(problems)}")
        self._note(cache)

    def _undivided(self) -> list[str]:
        """NVFP4 matrices whose inputs no whole number of groups covers."""
        return [
            f"{self.sources[parameter].tensor} has {self.shapes[parameter][0]} inputs"
            for parameter, algorithm in self.quantised.items()
            if weight_format(algorithm) == "nvfp4" and self.shapes[parameter][0] % NVFP4_GROUP_SIZE
        ]

    def _note(self, cache: list[str]) -> None:
        said = self.checkpoint.quantisation
        if cache:
            kind = f"{said.kv_cache} " if said is not None and said.kv_cache else ""
            self.notes.append(
                f"{len(cache)} scales of a quantised {kind}cache are not used, keys and values stay in full precision: "
                f"{_some(cache)}"
            )
        kept = prequantised.not_excluded(self.checkpoint, (s.tensor for s in self.sources.values() if s.transpose))
        if said is not None and kept:
            self.notes.append(f"{len(kept)} matrices are in full precision, which {said.path.name} does not say: {_some(kept)}")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"{', '.join(names[:_LISTED])}{more}"


def load(weights: Parameters, network: NetworkSpec, dtype: torch.dtype = torch.float32) -> Denoiser:
    """A denoiser's parameters as a torch ``Denoiser`` on the CPU, in evaluation mode; ``dtype`` of its parameters."""
    with torch.device("meta"):
        denoiser = Denoiser(network)
    state = {}
    for name, _ in denoiser.named_parameters():
        if dtype == torch.bfloat16:
            state[name] = torch.from_numpy(weights.read(name, BFLOAT16).view(np.int16)).view(torch.bfloat16)
        else:
            state[name] = torch.from_numpy(weights.read(name, np.dtype(np.float32))).to(dtype)
        if state[name].numel() > LARGE_TENSOR:
            give_back()
    denoiser.load_state_dict(state, assign=True)
    denoiser.cos, denoiser.sin = (table.to(dtype) for table in rotary_tables(network))
    return denoiser.eval().requires_grad_(False)


__all__ = ["FAMILIES", "Family", "StoredQuantised", "Weights", "find", "load", "read_network"]
