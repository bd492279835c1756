"""Reads a checkpoint's tensors as the parameters of a denoiser."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NoReturn

import ml_dtypes
import numpy as np
import torch

from dlm_calibration.pieces import Index, ahead, row_slices
from dlm_calibration.precision_rounding import FP32
from dlm_export.checkpoints import prequantised
from dlm_export.checkpoints.folder import Checkpoint, CheckpointError
from dlm_export.checkpoints.prequantised import StoredQuantised
from dlm_export.families.base import Origin, Parameters, Piece
from dlm_export.families.tensors import BFLOAT16, Tensors
from dlm_export.memory import give_back
from dlm_export.network.denoiser import Denoiser, cosines_and_sines
from dlm_export.network.layered import Layered
from dlm_export.network.spec import EMBEDDING, TRANSFORM, NetworkSpec

# After reading a tensor with more elements than this, the module returns freed memory to the
# system.
LARGE_TENSOR = 1 << 20
# All predictions depend on these parameters. If one of them is 0 everywhere, all logits are equal.
_VITAL = (
    EMBEDDING,
    "embed.norm.weight",
    f"{TRANSFORM}.weight",
    f"{TRANSFORM}.norm.weight",
    "final_norm.weight",
    "head.weight",
)
# Bits of a bf16 number without its sign, and bits of infinity. A number is NaN if its bits without
# the sign are greater than the bits of infinity.
_BF16_MAGNITUDE, _BF16_INFINITY = np.uint16(0x7FFF), np.uint16(0x7F80)


class Weights(Tensors):
    """Reads tensors by parameter name, one at a time. Rejects tensors with NaN or infinity."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        network: NetworkSpec,
        origins: Mapping[str, Origin],
        left_out: tuple[str, ...] = (),
    ) -> None:
        super().__init__(checkpoint, network, origins, left_out)
        self._opened: tuple[str, torch.Tensor] | None = None
        self._viewed: set[str] = set()  # the parameters that have been checked for NaN and infinity

    def check_vital(self) -> None:
        """Check that the parameters on which all predictions depend are not constant.

        The function reads only as many tokens as it needs. Raises CheckpointError if such a
        parameter is 0, or if the table of embeddings or the head is equal for all tokens.
        """
        for parameter in self.shapes.keys() & set(_VITAL) - self.quantised.keys():
            weight, axis = self._tensor(parameter), int(parameter == "head.weight")
            is_table = parameter in (EMBEDDING, "head.weight")
            first = weight.narrow(axis, 0, 1) if is_table else torch.zeros((), dtype=weight.dtype)
            parts = torch.split(weight, 1024, axis)  # type: ignore[no-untyped-call]
            if all(bool((part == first).all()) for part in parts):
                name = self.origins[parameter].pieces[0].tensor
                raise CheckpointError(
                    f"{self.checkpoint.tensors[name].file}: {name} "
                    f"{'is equal for all tokens' if first.any() else 'is 0 everywhere'}, so the network "
                    "would predict the same token at every position. The checkpoint is damaged or incomplete: "
                    "download or save it again."
                )
        self._opened = None

    def read(self, parameter: str, dtype: np.dtype, at: Index = ()) -> np.ndarray:
        """Read one parameter as an array of ``dtype``. A quantised matrix is dequantised.

        A whole parameter is C-contiguous. The function reads and converts a few rows at a time, so
        that only one large array is in memory. Raises CheckpointError if an element is NaN,
        infinite, or outside the range of ``dtype``.
        """
        if at:
            return self._part(parameter, dtype, at)
        whole = np.empty(self.shapes[parameter], dtype)
        parts = row_slices(whole.shape)
        for rows, part in zip(
            parts, ahead(lambda rows: self._part(parameter, dtype, (rows,)), parts), strict=True
        ):
            whole[rows] = part
        self._opened = None
        return whole

    def _part(self, parameter: str, dtype: np.dtype, at: Index) -> np.ndarray:
        tensor = (
            self._stack(parameter, at)
            if self.origins[parameter].is_stacked
            else self._tensor(parameter)[at]
        )
        scale = self.origins[parameter].scale
        # Use the file's bits directly, without converting them to fp32 and back.
        if dtype == BFLOAT16 and tensor.dtype == torch.bfloat16 and scale == 1:
            bits = _bits(tensor)
            if (bits & _BF16_MAGNITUDE).max(initial=0) >= _BF16_INFINITY:
                self._refuse(parameter, dtype)
            return bits.view(BFLOAT16)
        array = _as_fp32(tensor)
        if scale != 1:
            with np.errstate(over="ignore"):  # the next check rejects infinity
                array = array * np.float32(scale)
        largest = max(array.max(initial=0.0), -array.min(initial=0.0))
        if not largest <= _largest(dtype):
            self._refuse(parameter, dtype)
        return array.astype(dtype, copy=False)

    def view(self, parameter: str) -> torch.Tensor | None:
        """See ``Parameters.view``. Raises CheckpointError if an element is NaN or infinite."""
        origin = self.origins[parameter]
        if origin.whole is None or origin.scale != 1 or parameter in self.quantised:
            return None
        tensor = self._tensor(parameter)
        if parameter not in self._viewed:
            rows = row_slices(tuple(tensor.shape))
            if not all(ahead(lambda at: bool(tensor[at].isfinite().all()), rows)):
                self._refuse(parameter, np.dtype(np.float32))
            self._viewed.add(parameter)
        return tensor

    def _refuse(self, parameter: str, dtype: np.dtype) -> NoReturn:
        """Raise a CheckpointError that describes the elements that ``dtype`` cannot represent."""
        pieces, scale = self.origins[parameter].pieces, self.origins[parameter].scale
        for piece in pieces:
            bad = int((~self._piece(piece).isfinite()).sum())
            if bad:
                file = self.checkpoint.tensors[piece.tensor].file
                raise CheckpointError(
                    f"{file}: {piece.tensor} contains {bad} NaN or infinite weights"
                )
        largest = scale * max(float(self._piece(piece).abs().max()) for piece in pieces)
        raise CheckpointError(
            f"{pieces[0].tensor}: weights up to {largest:.3g} do not fit {dtype} "
            f"(largest {_largest(dtype):.3g}). Use --precision fp32."
        )

    def stored(self, parameter: str) -> StoredQuantised | None:
        """Return the stored codes and scales of a quantised matrix ``[in, out]``.

        If the matrix is not quantised, returns ``None``.

        Raises CheckpointError if a scale or a code is not a valid number.
        """
        algorithm = self.quantised.get(parameter)
        if algorithm is None:
            return None
        tensor = self.origins[parameter].whole
        assert tensor is not None
        return prequantised.read(self.checkpoint, tensor, algorithm)

    def _tensor(self, parameter: str) -> torch.Tensor:
        """Return a parameter in its stored type, dequantised. Remembers the last result."""
        opened = self._opened
        if opened is not None and opened[0] == parameter:
            return opened[1]
        stored, origin = self.stored(parameter), self.origins[parameter]
        if stored is not None:
            tensor = torch.from_numpy(stored.weight.dequantise())
        else:
            pieces = [self._piece(piece) for piece in origin.pieces]
            axis = origin.pieces[0].axis
            tensor = pieces[0] if len(pieces) == 1 else torch.cat(pieces, axis)
            tensor = tensor.mT if origin.transpose else tensor
        self._opened = (parameter, tensor)
        return tensor

    def _stack(self, parameter: str, at: Index) -> torch.Tensor:
        """Return the part ``at`` of a stacked parameter. Opens only the tensors of this part."""
        origin = self.origins[parameter]
        pieces = [self._piece(piece) for piece in origin.pieces[at[0]]]
        return torch.stack([(piece.mT if origin.transpose else piece)[at[1:]] for piece in pieces])

    def _piece(self, piece: Piece) -> torch.Tensor:
        tensor = self.checkpoint.tensor(piece.tensor)
        if (update := self.updates.get(piece.tensor)) is not None:
            a, b = (self.checkpoint.tensor(name).float() for name in (update.a, update.b))
            # The type is that of the merged checkpoint which PEFT would write.
            tensor = (tensor.float() + update.scale * (b @ a)).to(tensor.dtype)
        if piece.rows is None:
            return tensor
        first, last = piece.rows
        return tensor.narrow(piece.axis, first, last - first)


def _bits(tensor: torch.Tensor) -> np.ndarray:
    bits: np.ndarray = tensor.view(torch.int16).numpy()
    return bits.view(np.uint16)


def _as_fp32(tensor: torch.Tensor) -> np.ndarray:
    """Convert to fp32 in the same memory order. numpy starts no threads, unlike torch."""
    if tensor.dtype != torch.bfloat16:
        array: np.ndarray = tensor.numpy().astype(np.float32, copy=False)
        return array
    wide = _bits(tensor).astype(np.uint32)
    wide <<= np.uint32(16)
    return wide.view(np.float32)


def _largest(dtype: np.dtype) -> float:
    return float(ml_dtypes.finfo(dtype).max)  # type: ignore[no-untyped-call]


def tensor(
    weights: Parameters, parameter: str, dtype: torch.dtype | None, rows: torch.Tensor | None = None
) -> torch.Tensor:
    """Read a parameter as a tensor of type ``dtype`` on the CPU.

    If ``rows`` is set, the function reads only these rows of the first axis. If ``dtype`` is
    ``None``, the result has the stored type, or fp32 if the parameter must be computed. A result in
    the stored type is memory-mapped, and must not be modified. Raises CheckpointError.
    """
    found = weights.view(parameter)
    if found is not None and rows is not None:
        found = found[rows]
        return found if dtype is None else found.to(dtype)
    # If only one expert's matrix is requested, read only that matrix.
    if rows is not None and len(rows) == 1:
        row = int(rows[0])
        part = torch.from_numpy(
            np.ascontiguousarray(weights.read(parameter, FP32, (slice(row, row + 1),)))
        )
        return part if dtype is None else part.to(dtype)
    if found is not None and dtype == torch.float32:
        found = found.to(dtype)  # ``to`` keeps the memory order of the tensor
    elif found is None or dtype not in (None, found.dtype):
        if dtype == torch.bfloat16:
            found = torch.from_numpy(weights.read(parameter, BFLOAT16).view(np.int16)).view(
                torch.bfloat16
            )
        else:
            found = torch.from_numpy(weights.read(parameter, FP32))
    return found if rows is None else found[rows]


def load(weights: Parameters, network: NetworkSpec, dtype: torch.dtype = torch.float32) -> Denoiser:
    """Load the parameters into a torch ``Denoiser`` of type ``dtype``, on the CPU, for inference."""
    with torch.device("meta"):
        denoiser = Denoiser(network)
    state = {}
    for name, _ in denoiser.named_parameters():
        state[name] = tensor(weights, name, dtype)
        if state[name].numel() > LARGE_TENSOR:
            give_back()
    denoiser.load_state_dict(state, assign=True)
    for rotary, table in zip(denoiser.rotary, network.rotary_tables(), strict=True):
        rotary.cos, rotary.sin = (
            values.to(dtype)
            for values in cosines_and_sines(table, network.max_canvas_length, network.rotary_copies)
        )
    return denoiser.eval().requires_grad_(False)


def layered(
    weights: Parameters,
    network: NetworkSpec,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> Layered:
    """Return a denoiser whose parameters are loaded layer by layer (see ``Layered``)."""
    return Layered(functools.partial(tensor, weights), network, dtype, device)
