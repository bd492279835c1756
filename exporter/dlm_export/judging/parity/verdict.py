"""Defines the tolerances and the results of parity checks.

Parity is checked in two ways. At the end of every build, ``against_torch`` compares the bundle with
dlm-export's own torch denoiser. If dlm-export reads a checkpoint wrongly, the bundle and the torch
denoiser contain the same mistake, so ``against_torch`` cannot find the mistake. ``against_golden``
compares a bundle with logits of the released code, so it finds such mistakes too.

This module does not import torch, so that devices without torch can compare a bundle with a golden
file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from dlm_export.judging.parity.canvases import Canvas
from dlm_export.network.cache_dtypes import ROUNDED_ROWS
from dlm_runtime import Bundle
from dlm_runtime.errors import DlmError, ExitCode

OUR_DENOISER = "our torch denoiser"
ROUTER = "fp32"  # the format that results show for a router; routers always compute in fp32
LOGITS = "logits"  # stands for a layer's name in the result of comparing the final logits


class ParityError(DlmError):
    """Raised if a bundle's results differ from the reference's results by more than the tolerance."""

    exit_code = ExitCode.MISSED


@dataclass(frozen=True)
class Tolerance:
    """The tolerance for differences between the results of a bundle and of its reference.

    ``relative`` is the largest allowed difference of a logit, divided by the range of the logits.
    ``agreement`` is the smallest allowed share of identical canvases. ``rounding`` is the largest
    difference, divided by the range of the values, that one rounded key or value may cause.
    """

    relative: float
    agreement: float
    rounding: float = 0.0

    @property
    def passed_on(self) -> float:
        """The largest allowed difference of a value that depends on the output of attention."""
        return max(self.relative, self.rounding)


# Torch computes in fp32. A bundle in fp32 differs from torch only in the order of additions. A
# bundle in fp16 rounds to 11 significant bits in every layer, so it may choose a different token
# than torch if two logits are nearly equal. A bundle in bf16 rounds to 8 significant bits, which is
# eight times coarser than fp16.
TOLERANCES = {
    "fp32": Tolerance(2e-4, 1.0),
    "fp16": Tolerance(2e-2, 0.8),
    "bf16": Tolerance(1.6e-1, 0.5),
}
# The smallest allowed share of identical canvases if the cache is rounded. A key or value halfway
# between two quantisation codes may get either code. If two logits are nearly equal, the bundle may
# therefore choose a different token than torch.
ROUNDED_CACHE_AGREEMENT = 0.8
# Tolerances for a single layer, and for the operators between two layers. The keys are precisions
# of the unquantised parts of a bundle.
PART_TOLERANCES = {
    "fp32": Tolerance(2e-5, 0.0),
    "fp16": Tolerance(5e-3, 0.0),
    "bf16": Tolerance(4e-2, 0.0),
}


def tolerance_of(precision: str, cache_dtype: str, visible_block: int | None) -> Tolerance:
    """Return the tolerance for whole passes and for generated text."""
    found = rounded(TOLERANCES[precision], cache_dtype, visible_block)
    if cache_dtype == "float32":
        return found
    return replace(found, agreement=min(found.agreement, ROUNDED_CACHE_AGREEMENT))


def rounded(tolerance: Tolerance, cache_dtype: str, visible_block: int | None) -> Tolerance:
    """Add the tolerance for rounded keys and values if attention is block-causal.

    A block-causal pass rounds its own keys and values to the type of the cache before it reads
    them.
    """
    if visible_block is None:
        return tolerance
    return replace(tolerance, rounding=ROUNDED_ROWS[cache_dtype])


@dataclass(frozen=True)
class GraphRow:
    """The comparison of logits at one mask ratio.

    ``argmax_equal`` is the number of rows for which both denoisers predict the same token.
    """

    mask_ratio: float
    rows: int
    worst_difference: float
    logit_range: float
    relative: float
    argmax_equal: int


@dataclass(frozen=True)
class LoopRow:
    """The comparison of text that was generated with one policy.

    ``canvases_equal`` includes the canvases that differ after a tie. ``canvases_tied`` is their
    number.
    """

    name: str
    canvases: int
    canvases_equal: int
    nfe: int
    nfe_equal: bool
    first_difference: str | None
    canvases_tied: int = 0


@dataclass(frozen=True)
class LayerRow:
    """The comparison of one quantised layer, computed by the bundle and by torch from equal inputs.

    Each number is the worst difference between the bundle and torch, divided by the range of the
    values.

    - ``input_relative`` compares the layer's inputs, to check the operators between the previous
      layer and this layer.
    - ``output_relative`` compares the layer's outputs. An input near the boundary between two
      codes may get either code. The difference that this may cause in an output is subtracted. If
      the layer is part of a fused operator, ``output_relative`` is ``None``, because the layer's
      output cannot be read. In this case, the comparison of the next layer's inputs also checks
      this layer.

    For a router, ``output_relative`` compares the scores and the weights of the chosen experts. The
    result named ``LOGITS`` checks everything after the last quantised layer.
    """

    layer: str
    format: str
    input_relative: float
    output_relative: float | None

    @property
    def worst(self) -> float:
        return max(self.input_relative, self.output_relative or 0.0)


@dataclass(frozen=True)
class Parity:
    """The result of a parity check.

    ``reference`` describes the denoiser with which the bundle was compared. If single layers were
    compared, each element of ``layers`` must meet the tolerance. In this case, ``graph`` (the
    comparison of whole passes) need not meet a tolerance, because a single different code affects
    all later layers. If no layers were compared, ``graph`` and ``loop`` must meet the tolerance.
    """

    precision: str
    tolerance: Tolerance
    graph: list[GraphRow]
    loop: list[LoopRow]
    reference: str = OUR_DENOISER
    layers: list[LayerRow] = field(default_factory=list)

    @property
    def misses(self) -> list[str]:
        """Return a list with a sentence for each missed tolerance."""
        if self.layers:
            return [miss for row in self.layers for miss in self._missed(row)]
        found = []
        for row in self.graph:
            if not row.relative <= self.tolerance.passed_on:
                found.append(
                    f"mask ratio {row.mask_ratio}: logits differ by {row.relative:.2e} of their range, "
                    f"more than {self.tolerance.passed_on:.1e}"
                )
            if row.logit_range == 0:
                found.append(
                    f"mask ratio {row.mask_ratio}: all logits are equal, so the network predicts nothing"
                )
        total = sum(row.canvases for row in self.loop)
        equal = sum(row.canvases_equal for row in self.loop)
        if total and equal < self.tolerance.agreement * total:
            first = next(row.first_difference for row in self.loop if row.first_difference)
            found.append(f"{total - equal} of {total} canvases differ, first {first}")
        if self.tolerance.agreement == 1.0:
            found += [
                f"{row.name}: NFE differs from the reference"
                for row in self.loop
                if not row.nfe_equal
            ]
        return found

    def _missed(self, row: LayerRow) -> list[str]:
        is_router = row.format == ROUTER
        limit = PART_TOLERANCES[ROUTER].relative if is_router else self.tolerance.relative
        where = (
            "the logits, after the last layer,"
            if row.layer == LOGITS
            else f"the input of {row.layer}"
        )
        found = []
        if not row.input_relative <= self.tolerance.passed_on:
            found.append(
                f"{where} differs from torch's by {row.input_relative:.2e} of its range, more than "
                f"{self.tolerance.passed_on:.1e}, although the "
                "layers before it gave both sides the same"
            )
        if row.output_relative is None or row.output_relative <= limit:
            return found
        if is_router:
            found.append(
                f"{row.layer} chooses worse experts than torch for the same tokens, or weighs them differently: "
                f"by {row.output_relative:.2e} of the largest, more than {limit:.1e}"
            )
        else:
            found.append(
                f"{row.layer} ({row.format}) gives a different result from torch for the same input: the difference is "
                f"{row.output_relative:.2e} of its range, more than {limit:.1e} beyond one code's step"
            )
        return found

    @property
    def summary(self) -> str:
        """Describe the first two missed tolerances, and count the other missed tolerances."""
        more = len(self.misses) - 2
        return "; ".join(self.misses[:2]) + (f"; and {more} more" if more > 0 else "")

    def as_dict(self) -> dict[str, Any]:
        """Return the results as plain Python objects, for accuracy.json and ``--json``."""
        return asdict(self) | {"passed": not self.misses, "misses": self.misses}


def compare_logits(
    bundle: Bundle,
    canvases: Sequence[Canvas],
    expected: Sequence[np.ndarray],
    on_done: Callable[[], None],
) -> list[GraphRow]:
    """Compare a bundle's logits with the expected logits, one array fp32 ``[R, V]`` per canvas.

    Returns one result per mask ratio. ``on_done`` is called after each mask ratio.
    """
    found: list[np.ndarray] = []
    for number, canvas in enumerate(canvases, start=1):
        found.append(bundle.logits(canvas.tokens.tolist())[canvas.rows])
        if number == len(canvases) or canvases[number].mask_ratio != canvas.mask_ratio:
            on_done()
    return graph_rows(canvases, found, expected)


def graph_rows(
    canvases: Sequence[Canvas], found: Sequence[np.ndarray], expected: Sequence[np.ndarray]
) -> list[GraphRow]:
    """Compare two lists of logits, and return one result per mask ratio.

    Each list contains one array fp32 ``[R, V]`` per canvas, for R rows and V tokens.
    """
    by_ratio: dict[float, list[int]] = {}
    for number, canvas in enumerate(canvases):
        by_ratio.setdefault(canvas.mask_ratio, []).append(number)
    return [
        _graph_row(
            ratio,
            np.concatenate([found[i] for i in numbers]),
            np.concatenate([expected[i] for i in numbers]),
        )
        for ratio, numbers in by_ratio.items()
    ]


def _graph_row(ratio: float, ours: np.ndarray, theirs: np.ndarray) -> GraphRow:
    worst = float(np.abs(ours - theirs).max()) if np.isfinite(ours).all() else float("inf")
    span = float(theirs.max() - theirs.min())
    is_equal = ours.argmax(-1) == theirs.argmax(-1)
    return GraphRow(
        ratio,
        len(theirs),
        worst,
        span,
        worst / max(span, 1e-30),
        int(is_equal.sum()),
    )


def require_parity(parity: Parity, where: str) -> None:
    """Raise ParityError if a tolerance is missed. The message names every missed tolerance."""
    if parity.misses:
        raise ParityError(f"{where}: {parity.summary}")
