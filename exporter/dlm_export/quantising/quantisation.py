"""Stores the numbers of a quantised graph: parameters with folded scales, ranges, and codes.

Codes are computed only when the caller asks for them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch import Tensor

from dlm_calibration import solvers
from dlm_calibration.observers import Observers
from dlm_calibration.pieces import Index, Lazy, slices
from dlm_calibration.precision_rounding import (
    FP16,
    FP32,
    QuantisedWeight,
    ScaleType,
    quantise_weight,
    with_scales,
)
from dlm_calibration.precisions import FORMATS, HIGH, LayerFormat, Recipe
from dlm_export import families
from dlm_export.families.base import Parameters, later
from dlm_export.network.spec import EMBEDDING, HEAD, LinearSpec, NetworkSpec
from dlm_export.quantising import gptq
from dlm_export.quantising.experts import Reached, member
from dlm_export.quantising.solved import Solved

_HEAD_COLUMNS = 1 << 14  # number of a head's columns that the solver rounds at a time


def by_site(layers: Iterable[LinearSpec]) -> dict[str, list[LinearSpec]]:
    """Group layers that have the same input. The keys are the layers' sites (see ``LinearSpec``).

    The groups, and the layers in each group, are in the order in which a pass computes them.
    """
    sites: dict[str, list[LinearSpec]] = {}
    for layer in layers:
        sites.setdefault(layer.site, []).append(layer)
    return sites


@dataclass
class Folded:
    """A checkpoint's parameters, into which scales have been folded.

    ``rows`` contains the scales of a parameter's inputs. ``columns`` contains the scales of the
    parameter's outputs, or of the elements of a norm or bias. If each of the E experts of a stack
    has separate scales, the stack's scales have the shape ``[E, K]``.
    """

    source: Parameters
    network: NetworkSpec
    rows: dict[str, np.ndarray] = field(default_factory=dict)
    columns: dict[str, np.ndarray] = field(default_factory=dict)

    def read(self, parameter: str, dtype: np.dtype, at: Index = ()) -> np.ndarray:
        """Implements ``Parameters.read``. The parameter is scaled in fp32."""
        if parameter not in self.rows and parameter not in self.columns:
            return self.source.read(parameter, dtype, at)
        array = self.source.read(parameter, np.dtype(np.float32), at)
        if parameter in self.rows:
            array = array * _along(self.rows[parameter], at, array.ndim, -2)[..., None]
        if parameter in self.columns:
            scales = _along(self.columns[parameter], at, array.ndim, -1)
            array = array * (scales if scales.ndim == 1 else scales[:, None])
        return np.asarray(array, dtype=dtype)

    def view(self, parameter: str) -> Tensor | None:
        return (
            None
            if parameter in self.rows or parameter in self.columns
            else self.source.view(parameter)
        )

    def stored_type(self, parameter: str) -> np.dtype:
        return (
            FP32
            if parameter in self.rows or parameter in self.columns
            else self.source.stored_type(parameter)
        )

    @functools.cached_property
    def _readers(self) -> dict[str, list[LinearSpec]]:
        return by_site(self.network.linear_layers())

    @functools.cached_property
    def _updates(self) -> dict[str, str]:
        """Maps the weights of matrices with low-rank updates to the module paths of the updates."""
        updates = self.network.draft_updates()
        return {layer.weight: path for path, (layer, _) in updates.items()}

    def fold(self, of: str, scales: np.ndarray) -> None:
        """Divide a layer input by ``scales``, and multiply the weights that use this input.

        The product of the input and the weights stays the same, also with low-rank updates of the
        weights. ``of`` is the site of the layers with this input (see ``LinearSpec``). ``scales`` is
        ``[K]`` for K inputs, or ``[E, K]`` with separate scales for each of E experts.
        """
        readers = self._readers[of]
        fold = readers[0].fold
        assert fold is not None, of
        shared = scales
        # With grouped-query attention, several inputs of the output matrix come from the same value
        # head. These inputs must have the same scale (see ``Fold``).
        if scales.ndim == 1:
            runs = scales.reshape(-1, fold.repeats, fold.run).max(1)
            shared, scales = runs.reshape(-1), np.repeat(runs, fold.repeats, 0).reshape(-1)
        for name in fold.parameters:
            for divided in (name, *self._update(name, "b")):
                self.columns[divided] = self.columns.get(divided, np.float32(1)) / shared
        for reader in readers:
            for multiplied in (reader.weight, *self._update(reader.weight, "a")):
                self.rows[multiplied] = self.rows.get(multiplied, np.float32(1)) * scales

    def _update(self, weight: str, matrix: str) -> list[str]:
        """Return the name of a matrix of the low-rank update of ``weight``, if there is one."""
        return [f"{self._updates[weight]}.{matrix}"] if weight in self._updates else []


def _transposed(matrix: Lazy) -> Lazy:
    """Return the transposed matrix as a ``Lazy`` array. An index must have one part per axis."""
    return Lazy(matrix.shape[::-1], lambda at: matrix[at[::-1]].T)


def _along(scales: np.ndarray, at: Index, ndim: int, axis: int) -> np.ndarray:
    """Return the scales along ``axis`` for the part ``at``. Each expert may have its own scales."""
    place = ndim + axis
    found: np.ndarray = scales[at[: scales.ndim - 1] + at[place : place + 1]]
    return found


@dataclass
class Quantisation:
    """The quantised weights, scales and activation ranges of a graph.

    ``weight`` and ``embedding`` return quantised matrices.
    """

    recipe: Recipe
    formats: dict[str, str]
    parameters: Folded
    amax: dict[str, float] = field(default_factory=dict)
    rotated: dict[str, int] = field(default_factory=dict)
    observers: Observers | None = None
    stored: families.Weights | None = None
    scale_dtype: ScaleType = FP32
    """The data type of scales in the graph. Some formats always use fp16 scales."""
    solved: Solved = field(default_factory=Solved)
    is_dense: bool = False
    """True if the graph computes all experts for every token.

    Each stack of experts is then joined into one matrix, and all experts of a down projection share
    one scale per column.
    """
    reached: dict[str, Reached] = field(default_factory=dict)
    """For each quantised mixture, the number of calibration tokens that were routed to each expert.
    """
    _ranges: dict[str, np.ndarray | float] = field(default_factory=dict)

    def matrix(self, layer: str) -> np.ndarray:
        """Return a layer's unquantised weight, fp32 ``[K, N]``. The folded scales are applied.

        The weight is rotated (multiplied by a Hadamard matrix) if the layer's input is rotated.
        """
        spec = self.parameters.network.quantisable()[layer]
        w = self.parameters.read(spec.weight, FP32)
        if spec.is_tied:
            w = np.ascontiguousarray(w.T)
        return solvers.rotate_rows(w) if layer in self.rotated else w

    def _stored(self, layer: str) -> Lazy:
        """Return a layer's weight, lazy fp32 ``[K, N]``, with folded scales but not rotated."""
        spec = self.parameters.network.quantisable()[layer]
        parameter = self._later(spec.weight)
        return _transposed(parameter) if spec.is_tied else parameter

    def expert(self, layer: str, expert: int) -> QuantisedWeight:
        """Return one expert's quantised weight, rounded to nearest if no solver has rounded it."""
        name = member(layer, expert)
        if name in self.solved:
            return self.solved[name]
        stack = self._later(f"{layer}.weight")

        def read(at: Index) -> np.ndarray:
            of_stack = (slice(expert, expert + 1), *at)
            found: np.ndarray = stack[of_stack][0]
            return found

        return self.rounded(
            Lazy(stack.shape[1:], read), FORMATS[self.formats[layer]], self._shared_range(layer)
        )

    def _shared_range(self, layer: str) -> np.ndarray | float | None:
        """Return the weight range that all experts of a stack share, or ``None`` if there is none.

        In NVFP4, all experts share one range. If experts are joined into one matrix along their
        inputs, the experts share one range per column.
        """
        chosen = FORMATS[self.formats[layer]]
        is_column = self.is_dense and layer.endswith(".down") and chosen.weights in ("int8", "fp8")
        if chosen.weights != "nvfp4" and not is_column:
            return None
        if layer not in self._ranges:
            stack = self._later(f"{layer}.weight")
            largest = [np.abs(stack[(slice(i, i + 1),)][0]).max(0) for i in range(stack.shape[0])]
            by_column: np.ndarray = np.max(largest, 0)
            self._ranges[layer] = by_column if is_column else float(by_column.max())
        return self._ranges[layer]

    def _joined(self, layer: LinearSpec) -> QuantisedWeight:
        """Return the matrices of all experts as one matrix, for ``graph.experts.spread``."""
        each = [self.expert(layer.path, i) for i in range(layer.count)]
        (first, *_), is_down = each, layer.role == "down"
        along = 0 if is_down != (first.format == "nvfp4") else 1  # NVFP4 codes are transposed
        codes = np.concatenate([weight.codes for weight in each], along)
        scales = first.scales
        # otherwise, all experts have the same scales
        if not is_down or first.group_size is not None:
            scales = np.concatenate(
                [weight.scales for weight in each], 0 if first.group_size is None else along
            )
        return replace(first, codes=codes, scales=scales)

    def weight(self, layer: str) -> QuantisedWeight:
        """Return a layer's quantised weight, rounded to nearest if no solver has rounded it.

        If ``layer`` is a stack of experts' matrices, they are joined into one matrix.
        """
        chosen = FORMATS[self.formats[layer]]
        assert chosen.weights is not None
        spec = self.parameters.network.quantisable().get(layer)
        if spec is not None and spec.is_stacked:
            return self._joined(spec)
        if self.stored is not None:
            found = self.stored.stored(f"{layer}.weight")
            assert found is not None
            return with_scales(found.weight, self._scales_in(chosen))
        if layer in self.solved:
            return self.solved[layer]
        w = self.matrix(layer) if layer in self.rotated else self._stored(layer)
        return self.rounded(w, chosen)

    def rounded(
        self, w: np.ndarray | Lazy, chosen: LayerFormat, amax: np.ndarray | float | None = None
    ) -> QuantisedWeight:
        """Round a matrix to the nearest numbers of a layer format.

        The docstring of ``quantise_weight`` explains ``amax``.
        """
        assert chosen.weights is not None
        return quantise_weight(
            w,
            chosen.weights,
            group_size=chosen.group_size,
            amax=amax,
            scale_dtype=self._scales_in(chosen),
            is_signed=chosen.is_int4_in_panels,
        )

    def _scales_in(self, chosen: LayerFormat) -> ScaleType:
        return FP16 if chosen.is_int4_in_panels else self.scale_dtype

    def solve(self, layer: str, factor: Tensor, expert: int | None = None) -> None:
        """Round a layer's or an expert's weight with GPTQ.

        ``factor`` is the result of ``gptq.inverse_factor`` for the weight's input.
        """
        chosen = FORMATS[self.formats[layer]]
        assert chosen.weights is not None
        options: dict[str, Any] = {
            "format": chosen.weights,
            "group_size": chosen.group_size,
            "scale_dtype": self._scales_in(chosen),
            "is_signed": chosen.is_int4_in_panels,
        }
        if layer == HEAD and chosen.weights != "nvfp4":
            # Round a head a few columns at a time, because all columns in fp32 would take
            # gigabytes. The result stays the same, because the solver rounds each column
            # independently.
            stored = self._stored(layer)
            pieces = [
                gptq.gptq(np.ascontiguousarray(stored[:, at], FP32), factor, **options)
                for at in slices(stored.shape[1], _HEAD_COLUMNS)
            ]
            self.solved[layer] = replace(
                pieces[0],
                codes=np.concatenate([piece.codes for piece in pieces], 1),
                scales=np.concatenate([piece.scales for piece in pieces], -1),
            )
            return
        if expert is None:
            self.solved[layer] = gptq.gptq(self.matrix(layer), factor, **options)
            return
        (w,) = self.parameters.read(
            f"{layer}.weight", np.dtype(np.float32), (slice(expert, expert + 1),)
        )
        self.solved[member(layer, expert)] = gptq.gptq(
            w, factor, amax=self._shared_range(layer), **options
        )

    def embedding(self) -> QuantisedWeight:
        """Return the quantised embedding table as ``[hidden, V]``, with one scale per token."""
        assert self.recipe.embedding is not None
        return quantise_weight(_transposed(self._later(EMBEDDING)), self.recipe.embedding)

    @property
    def has_tied_table(self) -> bool:
        """True if a quantised head uses the codes and scales of the embedding table."""
        head = self.parameters.network.quantisable().get(HEAD)
        return head is not None and head.is_tied and self.formats.get(HEAD, HIGH) != HIGH

    def embedding_rows(self, table: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """Return the embeddings of ``ids`` ``[N]`` in the quantised graph, fp32 ``[N, hidden]``.

        ``table`` ``[N, hidden]`` contains the unquantised embeddings of ``ids``.
        """
        if self.has_tied_table and HEAD in self.solved:
            return np.ascontiguousarray(self.solved[HEAD].columns(ids).dequantise().T)
        if self.has_tied_table:
            return np.ascontiguousarray(
                self.rounded(table.T, FORMATS[self.formats[HEAD]]).dequantise().T
            )
        if self.recipe.embedding is not None:
            return np.ascontiguousarray(
                quantise_weight(table.T, self.recipe.embedding).dequantise().T
            )
        return table

    def _later(self, parameter: str) -> Lazy:
        return later(self.parameters, self.parameters.network, parameter)

    def summary(self) -> dict[str, Any]:
        """Return the recipe and every layer's format, for the manifest."""
        return {"recipe": self.recipe.as_dict(), "layers": self.formats}
