"""Defines the interface of a family, which reads config.json and maps tensors to parameters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from dlm_calibration.pieces import Index, Lazy
from dlm_calibration.precision_rounding import FP32
from dlm_export.checkpoints.folder import Checkpoint, CheckpointError
from dlm_export.network.spec import EMBEDDING, NetworkSpec

if TYPE_CHECKING:
    from torch import Tensor


class Parameters(Protocol):
    """Reads a denoiser's parameters, one at a time or in parts. Any thread may call the methods."""

    def read(self, parameter: str, dtype: np.dtype, at: Index = ()) -> np.ndarray:
        """Read one parameter of ``Denoiser``, or the part of the parameter that ``at`` selects.

        A whole parameter is C-contiguous. A part may have any memory order. Raises CheckpointError.
        """

    def view(self, parameter: str) -> Tensor | None:
        """Return the parameter as a memory-mapped tensor. The caller must not modify the tensor.

        Returns ``None`` if the parameter must be computed from the tensors in the file.
        """

    def stored_type(self, parameter: str) -> np.dtype:
        """Return a data type that represents all elements of a parameter exactly.

        If the parameter is stored in fp16 or bf16, the result is the stored type. Otherwise, the
        result is fp32.
        """


def table_type(network: NetworkSpec, stored_type: Callable[[str], np.dtype]) -> np.dtype:
    """Return the type of an unquantised embedding table in an fp32 graph for CPUs.

    This is the stored type, which saves memory: the lookup and a tied head widen the rows that they
    read. Soft embeddings multiply by the whole table, and ONNX Runtime would keep a second, fp32
    copy of a narrower table for this product. ``stored_type`` is the method of ``Parameters``.
    """
    return FP32 if network.conditioning is not None else stored_type(EMBEDDING)


def later(
    parameters: Parameters, network: NetworkSpec, parameter: str, dtype: np.dtype = FP32
) -> Lazy:
    """Return a lazy array for a parameter. Indexing the array reads and checks the values."""
    return Lazy(network.parameters()[parameter], lambda at: parameters.read(parameter, dtype, at))


@dataclass(frozen=True)
class Piece:
    """A released tensor, or a part of it.

    ``rows`` is ``None`` for a whole tensor. If ``rows`` is ``(first, last)``, the piece consists of
    the entries ``[first, last)`` of the tensor's axis ``axis``.
    """

    tensor: str
    rows: tuple[int, int] | None = None
    axis: int = 0


@dataclass(frozen=True)
class Origin:
    """Says which tensors of a checkpoint, or parts of tensors (pieces), make up one parameter.

    If ``is_stacked`` is false, the pieces are concatenated along their axis ``axis``. If
    ``is_stacked`` is true, each piece is one entry of a new first axis, for example one expert. If
    ``transpose`` is true, the released matrices are ``[out, in]``, and the parameter is ``[in,
    out]``. The parameter is multiplied by ``scale``. Several parameters may use the same tensor.
    For example, a fused matrix contains the rows of several parameters.
    """

    pieces: tuple[Piece, ...]
    transpose: bool = False
    is_stacked: bool = False
    scale: float = 1.0

    @staticmethod
    def of(tensor: str, transpose: bool = False, scale: float = 1.0) -> Origin:
        """Create an ``Origin`` for a parameter that consists of one whole tensor."""
        return Origin((Piece(tensor),), transpose, scale=scale)

    @property
    def whole(self) -> str | None:
        """The tensor's name if the parameter consists of one whole tensor, otherwise ``None``."""
        (first, *rest) = self.pieces
        return first.tensor if not rest and first.rows is None and not self.is_stacked else None

    def shapes(self, parameter: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Return the shapes that the pieces must have if the parameter's shape is ``parameter``."""
        released = (*parameter[:-2], parameter[-1], parameter[-2]) if self.transpose else parameter
        if self.is_stacked:
            assert released[0] == len(self.pieces), (released, self)
            return [released[1:]] * len(self.pieces)
        if self.whole is not None:
            return [released]
        (axis,) = {piece.axis for piece in self.pieces}
        counts = [last - first for piece in self.pieces for first, last in (piece.rows or (0, 0),)]
        assert sum(counts) == released[axis], (released, self)
        return [(*released[:axis], count, *released[axis + 1 :]) for count in counts]


@dataclass(frozen=True)
class Overrides:
    """The user's settings, which replace settings of the checkpoint.

    If a field is ``None``, the checkpoint's setting is used.
    """

    mask_token_id: int | None = None
    max_canvas_length: int | None = None
    attention_block: int | None = None
    max_new_tokens: int | None = None
    json_layout: str | None = None
    call_format: str | None = None
    no_adapter: bool | None = None
    """True to leave out all adapters beside the checkpoint's weights."""
    adapter: str | None = None
    """An adapter to merge into the weights: the name of a folder in the checkpoint, "." for files
    beside the weights, or the path of another folder.

    If the family's draft passes use an adapter, the other folder contains this adapter.
    """
    accept_unknown: tuple[str, ...] | None = ()
    """Keys of config.json that dlm-export does not know, and that the user accepts.

    ``None`` accepts all keys.
    """
    family: str | None = None
    """The name of the family, which is necessary if the family's architecture is ambiguous."""


@dataclass(frozen=True)
class Family:
    """A family of checkpoints: its architectures, its reader of config.json, and its tensor names."""

    name: str
    architectures: tuple[str, ...]
    description: str
    default_preset: str
    """The name of the preset with the loop that was published for the family.

    A bundle uses this preset until ``dlm-export effort`` fits a different default loop.
    """
    read: Callable[[Checkpoint, Overrides], NetworkSpec]
    origins: Callable[[NetworkSpec, Checkpoint], dict[str, Origin]]
    trunk: str | None = None
    """The name of the class in transformers with the same layers and tensor names.

    ``capture`` can run this class with the network's attention mask.
    """
    block_preset: str | None = None
    """The default preset of checkpoints with block-causal attention, or ``None`` if it is
    ``default_preset`` too.
    """
    left_out: tuple[str, ...] = ()
    """Prefixes of tensor names.

    The checkpoint may contain tensors whose names start with a prefix, but the denoiser does not
    need them. For example, it does not need a classification head. A message to the user lists such
    tensors.
    """
    is_ambiguous: bool = False
    """True if the family's architectures are also the names of other networks.

    Users must then name the family with the option ``--family``.
    """

    draft_adapter: str | None = None
    """Name of the folder with the adapter that the draft passes of this family use."""
    claims: Callable[[Checkpoint], bool] = lambda _: True
    """Returns False for checkpoints of other families with the same architecture."""

    def preset_for(self, network: NetworkSpec) -> str:
        """Return the default preset for a network of this family."""
        presets = network.presets()
        if len(presets) == 1:
            return next(iter(presets))
        return (
            self.default_preset
            if network.visible_block is None
            else self.block_preset or self.default_preset
        )


@dataclass(frozen=True)
class Layout:
    """The names of a family's tensors, as patterns.

    ``layer`` is the prefix of the tensor names in a layer. In ``layer``, ``{i}`` is replaced by the
    layer's index. ``names`` maps the path of a module inside a layer to the tensor's name in the
    released checkpoint, without ``.weight`` or ``.bias``. If the tensor's name does not end with
    ``.weight`` or ``.bias``, ``names`` maps the path of the parameter to the whole name. The
    checkpoint's matrices are ``[out, in]``, and the denoiser's matrices are ``[in, out]``.

    ``embed``, ``final_norm`` and ``head`` are the names of modules outside layers in the released
    checkpoint, also without ``.weight`` or ``.bias``. For all other
    modules and parameters outside layers, ``outside`` contains the same kind of entries as
    ``names``.

    A name that contains ``{e}`` names the matrix of expert e. Some releases store one tensor ``[E,
    out, in]`` for all experts instead. The name of a tensor for all experts contains neither
    ``.{e}`` nor ``.weight``.

    ``fused`` contains the roles of the matrices that are rows of fused tensors (see ``split_rows``).
    Queries, keys and values are rows of one tensor, in this order. Gate and up are rows of another
    tensor, in this order.
    """

    embed: str
    layer: str
    names: dict[str, str]
    final_norm: str
    head: str
    outside: Mapping[str, str] = field(default_factory=dict)
    fused: Collection[str] = ()

    def origins(self, network: NetworkSpec, checkpoint: Checkpoint) -> dict[str, Origin]:
        """Return the tensors that make up each parameter.

        Raises CheckpointError if a layer contains both kinds of tensors: one tensor per expert, and
        one tensor for all experts.
        """
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
        return split_rows(origins, network, self.fused)

    def released(self, parameter: str) -> str:
        """Return the name of a parameter's tensor, with ``{e}`` in place of an expert's index."""
        module, _, kind = parameter.rpartition(".")
        outside = {"embed": self.embed, "final_norm": self.final_norm, "head": self.head}
        outside |= self.outside
        if parameter in outside:
            return outside[parameter]
        if module in outside:
            return f"{outside[module]}.{kind}"
        _, i, inner = parameter.split(".", 2)  # blocks.I.INNER
        own = self.names.get(inner)
        if own is None:
            own = f"{self.names[inner.removesuffix(f'.{kind}')]}.{kind}"
        return self.layer.format(i=i) + own


def split_rows(
    origins: Mapping[str, Origin], network: NetworkSpec, roles: Collection[str]
) -> dict[str, Origin]:
    """Split fused tensors, which contain the rows of several matrices or biases.

    ``roles`` says which matrices are rows of fused tensors. Their biases are rows of fused tensors
    too. The rows are in the order of ``network.linear_layers()``. The argument ``origins`` maps
    each of these matrices and biases to the whole fused tensor. In the result, each matrix or bias
    is mapped to its rows of the fused tensor. All other origins are unchanged.
    """
    found = dict(origins)
    rows: dict[str, int] = {}  # the number of rows of each fused tensor that earlier parameters use
    for linear in network.linear_layers():
        for parameter in (linear.weight, f"{linear.path}.bias") if linear.role in roles else ():
            if parameter not in found:
                continue
            (piece,) = found[parameter].pieces
            first = rows.get(piece.tensor, 0)
            rows[piece.tensor] = first + linear.outputs
            part = Piece(piece.tensor, (first, rows[piece.tensor]))
            found[parameter] = Origin((part,), transpose=parameter == linear.weight)
    return found
