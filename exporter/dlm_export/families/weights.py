"""A checkpoint's tensors as a denoiser's parameters: checked once, read one at a time, or loaded into torch."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NoReturn

import ml_dtypes
import numpy as np
import torch

from dlm_calibration.formats import FP32, NVFP4_GROUP_SIZE
from dlm_calibration.pieces import Index, ahead, row_slices
from dlm_export.checkpoints import prequantised
from dlm_export.checkpoints.folder import WEIGHT_DTYPES, Checkpoint, CheckpointError, weight_format
from dlm_export.checkpoints.prequantised import Expected, StoredQuantised
from dlm_export.families.base import Origin, Parameters, Piece
from dlm_export.memory import give_back
from dlm_export.network.denoiser import Denoiser, cosines_and_sines
from dlm_export.network.layered import Layered
from dlm_export.network.spec import NetworkSpec

LARGE_TENSOR = 1 << 20  # elements; smaller ones leave no holes worth a call
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_BF16_MAGNITUDE, _BF16_INFINITY = np.uint16(0x7FFF), np.uint16(0x7F80)  # bits; above infinity are the NaNs
_LISTED = 8  # names shown of each kind of tensor error


class Weights:
    """A checkpoint's tensors under the denoiser's parameter names, checked once, read one at a time.

    ``quantised``: parameter -> modelopt's algorithm, for the matrices that are stored quantised. ``notes`` says in sentences
    what the checkpoint holds and is not used as it stands.
    """

    def __init__(self, checkpoint: Checkpoint, network: NetworkSpec, origins: Mapping[str, Origin]) -> None:
        """``origins``: of each of the network's parameters.

        Raises CheckpointError that names every missing, extra, wrongly typed and wrongly shaped tensor.
        """
        self.checkpoint = checkpoint
        self.shapes = network.parameters()
        self.origins = dict(origins)
        assert self.origins.keys() == self.shapes.keys(), self.origins.keys() ^ self.shapes.keys()
        self.quantised: dict[str, str] = {}
        for parameter, origin in self.origins.items():
            for piece in origin.pieces if origin.transpose else ():
                algorithm = prequantised.algorithm_of(checkpoint, piece.tensor)
                if algorithm is not None and origin.whole is None:
                    raise CheckpointError(
                        f"{checkpoint.path}: {piece.tensor} is quantised, and only a part of {parameter}: not read. "
                        "Use the checkpoint that is not quantised."
                    )
                if algorithm is not None:
                    self.quantised[parameter] = algorithm
        self.notes: list[str] = []
        self._opened: tuple[str, torch.Tensor] | None = None
        self._viewed: set[str] = set()  # parameters whose values were found to be numbers
        self._check()

    def read(self, parameter: str, dtype: np.dtype, at: Index = ()) -> np.ndarray:
        """One parameter as an array of ``dtype``; a quantised matrix as the values that its codes stand for.

        All of it is C-contiguous, and put together from parts, beside which nothing large is held. Raises CheckpointError if a
        weight is NaN or infinite, or leaves the range of ``dtype``.
        """
        if at:
            return self._part(parameter, dtype, at)
        whole = np.empty(self.shapes[parameter], dtype)
        parts = row_slices(whole.shape)
        for rows, part in zip(parts, ahead(lambda rows: self._part(parameter, dtype, (rows,)), parts), strict=True):
            whole[rows] = part
        self._opened = None
        return whole

    def _part(self, parameter: str, dtype: np.dtype, at: Index) -> np.ndarray:
        tensor = self._stack(parameter, at) if self.origins[parameter].is_stacked else self._tensor(parameter)[at]
        if dtype == BFLOAT16 and tensor.dtype == torch.bfloat16:  # as it lies in the file, without fp32 between
            bits = _bits(tensor)
            if (bits & _BF16_MAGNITUDE).max(initial=0) >= _BF16_INFINITY:
                self._refuse(parameter, dtype)
            return bits.view(BFLOAT16)
        array = _as_fp32(tensor)
        largest = max(array.max(initial=0.0), -array.min(initial=0.0))
        if not largest <= _largest(dtype):
            self._refuse(parameter, dtype)
        return array.astype(dtype, copy=False)

    def view(self, parameter: str) -> torch.Tensor | None:
        """See ``Parameters.view``. Raises CheckpointError if a weight is NaN or infinite."""
        if self.origins[parameter].whole is None or parameter in self.quantised:
            return None
        tensor = self._tensor(parameter)
        if parameter not in self._viewed:
            rows = row_slices(tuple(tensor.shape))
            if not all(ahead(lambda at: bool(tensor[at].isfinite().all()), rows)):
                self._refuse(parameter, np.dtype(np.float32))
            self._viewed.add(parameter)
        return tensor

    def _refuse(self, parameter: str, dtype: np.dtype) -> NoReturn:
        """CheckpointError for a parameter that holds what ``dtype`` does not."""
        pieces = self.origins[parameter].pieces
        for piece in pieces:
            bad = int((~self._piece(piece).isfinite()).sum())
            if bad:
                file = self.checkpoint.tensors[piece.tensor].file
                raise CheckpointError(f"{file}: {piece.tensor} holds {bad} NaN or infinite weights")
        largest = max(float(self._piece(piece).abs().max()) for piece in pieces)
        raise CheckpointError(
            f"{pieces[0].tensor}: weights up to {largest:.3g} do not fit {dtype} "
            f"(largest {_largest(dtype):.3g}). Use --precision fp32."
        )

    def stored(self, parameter: str) -> StoredQuantised | None:
        """A quantised matrix's codes and scales as they lie in the checkpoint, ``[in, out]``; None in full precision.

        Raises CheckpointError for scales and codes that are no numbers.
        """
        algorithm = self.quantised.get(parameter)
        if algorithm is None:
            return None
        tensor = self.origins[parameter].whole
        assert tensor is not None
        return prequantised.read(self.checkpoint, tensor, algorithm)

    def _tensor(self, parameter: str) -> torch.Tensor:
        """A parameter as it is stored, mapped where it is one whole tensor; the last one stays at hand for its parts."""
        opened = self._opened
        if opened is not None and opened[0] == parameter:
            return opened[1]
        stored, origin = self.stored(parameter), self.origins[parameter]
        if stored is not None:
            tensor = torch.from_numpy(stored.weight.dequantise())
        else:
            pieces = [self._piece(piece) for piece in origin.pieces]
            tensor = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
            tensor = tensor.mT if origin.transpose else tensor
        self._opened = (parameter, tensor)
        return tensor

    def _stack(self, parameter: str, at: Index) -> torch.Tensor:
        """A part of a parameter whose entries are tensors of their own: those outside of it are not opened."""
        origin = self.origins[parameter]
        pieces = [self._piece(piece) for piece in origin.pieces[at[0]]]
        return torch.stack([(piece.mT if origin.transpose else piece)[at[1:]] for piece in pieces])

    def _piece(self, piece: Piece) -> torch.Tensor:
        tensor = self.checkpoint.tensor(piece.tensor)
        return tensor if piece.rows is None else tensor[slice(*piece.rows)]

    def _expected(self) -> dict[str, Expected]:
        """Every tensor that the denoiser reads, by its released name."""
        expected: dict[str, Expected] = {}
        read: dict[str, list[tuple[int, int]]] = {}  # rows of tensors that several parameters share
        for parameter, origin in self.origins.items():
            if parameter in self.quantised:
                assert origin.whole is not None
                inputs, outputs = self.shapes[parameter]
                expected |= prequantised.expected_tensors(origin.whole, self.quantised[parameter], inputs, outputs)
                continue
            for piece, shape in zip(origin.pieces, origin.shapes(self.shapes[parameter]), strict=True):
                if piece.rows is not None:
                    read.setdefault(piece.tensor, []).append(piece.rows)
                    shape = (max(last for _, last in read[piece.tensor]), *shape[1:])
                expected[piece.tensor] = Expected(tuple(WEIGHT_DTYPES), (shape,))
        for tensor, rows in read.items():
            ends = [0, *(last for _, last in sorted(set(rows)))]
            assert [first for first, _ in sorted(set(rows))] == ends[:-1], f"{tensor}: rows {rows} are not read once each"
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
            f"{self.origins[parameter].whole} has {self.shapes[parameter][0]} inputs"
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
        kept = prequantised.not_excluded(self.checkpoint, (s.whole for s in self.origins.values() if s.transpose and s.whole))
        if said is not None and kept:
            self.notes.append(f"{len(kept)} matrices are in full precision, which {said.path.name} does not say: {_some(kept)}")


def _bits(tensor: torch.Tensor) -> np.ndarray:
    bits: np.ndarray = tensor.view(torch.int16).numpy()
    return bits.view(np.uint16)


def _as_fp32(tensor: torch.Tensor) -> np.ndarray:
    """In the tensor's order of memory. Torch would start threads of its own in each of ours."""
    if tensor.dtype != torch.bfloat16:
        array: np.ndarray = tensor.numpy().astype(np.float32, copy=False)
        return array
    wide = _bits(tensor).astype(np.uint32)
    wide <<= np.uint32(16)
    return wide.view(np.float32)


def _largest(dtype: np.dtype) -> float:
    return float(ml_dtypes.finfo(dtype).max)  # type: ignore[no-untyped-call]


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"{', '.join(names[:_LISTED])}{more}"


def tensor(weights: Parameters, parameter: str, dtype: torch.dtype | None, rows: torch.Tensor | None = None) -> torch.Tensor:
    """A parameter, or ``rows`` of its first axis, in ``dtype`` on the CPU; where it lies like that in a file, that itself.

    ``dtype`` None: as it is stored, fp32 where it has to be computed. Not to be written to. Raises CheckpointError.
    """
    found = weights.view(parameter)
    if found is not None and rows is not None:
        found = found[rows]
        return found if dtype is None else found.to(dtype)
    if rows is not None and len(rows) == 1:  # an expert, of whose stack nothing else is read
        row = int(rows[0])
        part = torch.from_numpy(np.ascontiguousarray(weights.read(parameter, FP32, (slice(row, row + 1),))))
        return part if dtype is None else part.to(dtype)
    if found is not None and dtype == torch.float32:
        found = found.to(dtype)  # in its order of memory
    elif found is None or dtype not in (None, found.dtype):
        if dtype == torch.bfloat16:
            found = torch.from_numpy(weights.read(parameter, BFLOAT16).view(np.int16)).view(torch.bfloat16)
        else:
            found = torch.from_numpy(weights.read(parameter, FP32))
    return found if rows is None else found[rows]


def load(weights: Parameters, network: NetworkSpec, dtype: torch.dtype = torch.float32) -> Denoiser:
    """A denoiser's parameters as a torch ``Denoiser`` on the CPU, in evaluation mode; ``dtype`` of its parameters."""
    with torch.device("meta"):
        denoiser = Denoiser(network)
    state = {}
    for name, _ in denoiser.named_parameters():
        state[name] = tensor(weights, name, dtype)
        if state[name].numel() > LARGE_TENSOR:
            give_back()
    denoiser.load_state_dict(state, assign=True)
    for rotary, table in zip(denoiser.rotary, network.rotary_tables(), strict=True):
        rotary.cos, rotary.sin = (values.to(dtype) for values in cosines_and_sines(table, network.max_canvas_length))
    return denoiser.eval().requires_grad_(False)


def layered(
    weights: Parameters, network: NetworkSpec, dtype: torch.dtype = torch.float32, device: torch.device | None = None
) -> Layered:
    """A denoiser's parameters to be read a layer at a time; see ``Layered``."""
    return Layered(functools.partial(tensor, weights), network, dtype, device)
