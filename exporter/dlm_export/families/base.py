"""The interface of a family: it reads a config as a ``NetworkSpec`` and maps tensors to parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from dlm_calibration.formats import FP32
from dlm_calibration.pieces import Index, Lazy
from dlm_export.checkpoints.folder import Checkpoint, CheckpointError
from dlm_export.network.spec import NetworkSpec

if TYPE_CHECKING:
    from torch import Tensor


class Parameters(Protocol):
    """A denoiser's parameters, read one at a time or in parts; thread-safe."""

    def read(self, parameter: str, dtype: np.dtype, at: Index = ()) -> np.ndarray:
        """Read one parameter of ``Denoiser``, or a part of it.

        A whole parameter is C-contiguous; a part may have any memory order. Raises CheckpointError.
        """

    def view(self, parameter: str) -> Tensor | None:
        """The parameter as memory-mapped from its file, read-only, or ``None`` if it must be computed."""

    def stored_type(self, parameter: str) -> np.dtype:
        """The type that holds all values of a parameter: fp16 or bf16 if stored so, else fp32."""


def later(
    parameters: Parameters, network: NetworkSpec, parameter: str, dtype: np.dtype = FP32
) -> Lazy:
    """A parameter that is read and checked when it is indexed."""
    return Lazy(network.parameters()[parameter], lambda at: parameters.read(parameter, dtype, at))


@dataclass(frozen=True)
class Piece:
    """A released tensor, or ``rows`` ``[first, last)`` of its first axis."""

    tensor: str
    rows: tuple[int, int] | None = None


@dataclass(frozen=True)
class Origin:
    """The released tensors that make up a denoiser's parameter.

    Several pieces are concatenated along their first axis. With ``is_stacked``, each piece is one
    entry of a new first axis, as for experts. ``transpose``: matrices are stored ``[out, in]``.
    Several parameters may read one tensor: rows of a fused matrix, or all of a tied one.
    """

    pieces: tuple[Piece, ...]
    transpose: bool = False
    is_stacked: bool = False

    @staticmethod
    def of(tensor: str, transpose: bool = False) -> Origin:
        """A parameter that is one whole tensor."""
        return Origin((Piece(tensor),), transpose)

    @property
    def whole(self) -> str | None:
        """The tensor's name if the parameter is one whole tensor, else ``None``."""
        (first, *rest) = self.pieces
        return first.tensor if not rest and first.rows is None and not self.is_stacked else None

    def shapes(self, parameter: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Expected shapes of the pieces, for a parameter of this shape."""
        released = (*parameter[:-2], parameter[-1], parameter[-2]) if self.transpose else parameter
        if self.is_stacked:
            assert released[0] == len(self.pieces), (released, self)
            return [released[1:]] * len(self.pieces)
        if self.whole is not None:
            return [released]
        counts = [last - first for piece in self.pieces for first, last in (piece.rows or (0, 0),)]
        assert sum(counts) == released[0], (released, self)
        return [(count, *released[1:]) for count in counts]


@dataclass(frozen=True)
class Overrides:
    """Values given by the user; ``None`` uses the checkpoint's."""

    mask_token_id: int | None = None
    max_canvas_length: int | None = None
    attention_block: int | None = None
    json_layout: str | None = None
    call_format: str | None = None


@dataclass(frozen=True)
class Family:
    """A released layout: its architectures, how to read its config, and its tensor names."""

    name: str
    architectures: tuple[str, ...]
    description: str
    default_preset: str
    """The adaptive loop published for it; a bundle runs it until another one is fitted."""
    read: Callable[[Checkpoint, Overrides], NetworkSpec]
    origins: Callable[[NetworkSpec, Checkpoint], dict[str, Origin]]
    trunk: str | None = None
    """The transformers class with these layers and tensor names, for ``capture``; uses the
    network's mask.
    """
    block_preset: str | None = None
    """The default preset for checkpoints with block-causal attention, if different."""

    def preset_for(self, network: NetworkSpec) -> str:
        """The default preset of a network of this family."""
        return (
            self.default_preset
            if network.visible_block is None
            else self.block_preset or self.default_preset
        )


@dataclass(frozen=True)
class Layout:
    """Tensor names that follow one pattern.

    ``layer`` is formatted with ``i``; ``names`` maps module paths inside a layer to names without
    ``.weight`` and ``.bias``, except for parameters with separate names. Released matrices are
    ``[out, in]``, the denoiser's ``[in, out]``. A name with ``{e}`` is one expert's matrix. The
    same name without ``.{e}`` and ``.weight`` is one tensor ``[E, out, in]`` for all experts.
    """

    embed: str
    layer: str
    names: dict[str, str]
    final_norm: str
    head: str

    def origins(self, network: NetworkSpec, checkpoint: Checkpoint) -> dict[str, Origin]:
        """Parameter -> released tensors. Raises CheckpointError if experts have both forms."""
        matrices = {
            linear.weight: linear for linear in network.linear_layers() if not linear.is_tied
        }
        released = {parameter: self.released(parameter) for parameter in network.parameters()}
        stacks = {parameter: name for parameter, name in released.items() if "{e}" in name}
        merged = {
            parameter: name.replace(".{e}", "").removesuffix(".weight")
            for parameter, name in stacks.items()
        }
        together = next((name for name in merged.values() if name in checkpoint.tensors), None)
        apart = next(
            (
                first
                for name in stacks.values()
                if (first := name.format(e=0)) in checkpoint.tensors
            ),
            None,
        )
        if together is not None and apart is not None:
            raise CheckpointError(
                f"{checkpoint.path}: {apart} has one expert and {together} has all experts: the folder has two exports, or "
                "an incomplete one. Export the checkpoint again."
            )
        origins = {}
        for parameter, name in released.items():
            linear = matrices.get(parameter)
            if parameter not in stacks or together is not None:
                origins[parameter] = Origin.of(
                    merged.get(parameter, name), transpose=linear is not None
                )
            else:
                assert linear is not None, parameter
                pieces = tuple(Piece(name.format(e=expert)) for expert in range(linear.count))
                origins[parameter] = Origin(pieces, transpose=True, is_stacked=True)
        return origins

    def released(self, parameter: str) -> str:
        """The name of a parameter's tensor; ``{e}`` in it means an expert's number."""
        module, _, kind = parameter.rpartition(".")
        outside = {"embed": self.embed, "final_norm": self.final_norm, "head": self.head}
        if module in outside:
            return f"{outside[module]}.{kind}"
        _, i, inner = module.split(".", 2)  # blocks.I.INNER
        own = self.names.get(f"{inner}.{kind}")
        return self.layer.format(i=i) + (f"{self.names[inner]}.{kind}" if own is None else own)
