"""Calibrates experts: counts the tokens of each expert, and collects each expert's inputs.

To limit memory, this module processes one expert at a time. It first stores the inputs of a mixture
for all tokens, in memory or in a memory-mapped file. For each expert, it then reads the inputs of
the tokens that are routed to the expert, and computes the expert's Gram matrix. If too few tokens
are routed to an expert, the expert's weights are rounded to nearest. All experts of a layer share
one activation range, so an expert without tokens has a range too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dlm_calibration.observers import Observer
from dlm_calibration.states import State
from dlm_export.memory import give_back
from dlm_export.network.experts import RoutedMLPs
from dlm_export.network.layered import BATCH_TOKENS, Batch, Carried, room_for
from dlm_export.quantising import gptq
from dlm_export.quantising.gptq import Gram

_NAMED = 6  # maximum number of experts that a message names


def member(layer: str, expert: int) -> str:
    """Return the name of one expert's matrix in the experts' stack of matrices."""
    return f"{layer}.{expert}"


class Entered:
    """The recorded inputs of one layer's mixture of experts, for all states.

    ``x`` contains the inputs, ``[tokens, hidden]``, in the order of the batches. ``chosen``
    contains the k experts of each token, ``[tokens, k]``, and ``weights`` contains the routing
    weights of the chosen experts. ``counts_for`` contains the factor with which each token enters a
    Gram matrix.
    """

    def __init__(
        self,
        module: RoutedMLPs,
        carried: Carried,
        states: Sequence[State],
        is_masked: Sequence[np.ndarray],
        memory_bytes: int | None,
        folder: Path | None,
    ) -> None:
        """``is_masked`` contains the masked positions of each state, bool ``[L]``.

        If ``x`` needs more than ``memory_bytes``, ``x`` is stored in a file in ``folder``. Raises MemoryLimitError.
        """
        self.module, self._carried, self._states = module, carried, states
        self.device = carried.layered.device
        shape = (carried.states.shape[0], module.down.outputs)
        self.x = room_for(shape, carried.states.dtype, memory_bytes, folder)
        self.chosen = torch.empty(0, 0, dtype=torch.int64)
        self.weights = torch.empty(0, 0)
        in_order = [is_masked[number] for batch in carried.batches for number in batch.numbers]
        self.counts_for = torch.where(
            torch.from_numpy(np.concatenate(in_order)), 1.0, gptq.COMMITTED_WEIGHT
        )

    def watch(self, hidden: Observer) -> None:
        """Register hooks that store the mixture's inputs, and observe the down projection's inputs."""
        self.module.register_forward_pre_hook(self._keep)
        self.module.down.register_forward_pre_hook(self._collect)
        self.module.register_forward_hook(lambda *_: self._show(hidden))

    def rows(self, expert: int) -> tuple[Tensor, Tensor]:
        """Return the indices ``[n]`` of an expert's tokens, and their routing weights ``[n, 1]``."""
        rows, places = (self.chosen == expert).nonzero(as_tuple=True)
        return rows, self.weights[rows, places, None]

    @property
    def tokens(self) -> np.ndarray:
        """The number of tokens that were routed to each expert, int64 ``[E]``."""
        return self.chosen.flatten().bincount(minlength=self.module.count).numpy()

    def inputs(self, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the rows of ``x`` with the indices ``rows``, in batches on the layer's device.

        Also yields, for each batch, the factors of the tokens in the Gram matrix.
        """
        for some in torch.split(rows, BATCH_TOKENS):
            yield self.x[some].to(self.device), self.counts_for[some].to(self.device)

    def _keep(self, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        x, chosen, weights = (each.flatten(0, -2).cpu() for each in inputs)
        at = self._carried.now.rows
        if not self.chosen.numel():
            self.chosen = torch.zeros(len(self.x), chosen.shape[1], dtype=torch.int64)
            self.weights = torch.zeros(len(self.x), chosen.shape[1])
        self.x[at], self.chosen[at], self.weights[at] = x, chosen, weights.float()
        self._hidden = torch.empty(len(x), chosen.shape[1], self.module.down.inputs)

    def _collect(self, _: nn.Module, inputs: tuple[Tensor, int]) -> None:
        x, expert = inputs
        self._hidden[self.chosen[self._carried.now.rows] == expert] = x.float().cpu()

    def _show(self, observer: Observer) -> None:
        batch: Batch = self._carried.now
        by_canvas = self._hidden.view(*batch.ids.shape, *self._hidden.shape[1:])
        is_masked = (self.counts_for[batch.rows] == 1).view(batch.ids.shape)
        for number, vectors, masked in zip(batch.numbers, by_canvas, is_masked, strict=True):
            every = masked.repeat_interleave(vectors.shape[1]).numpy()
            observer.add(vectors.flatten(0, 1).numpy(), every, self._states[number].bucket)


@torch.no_grad()
def hidden_of(
    entered: Entered, expert: int, rows: Tensor, share: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield an expert's features before the down projection in batches ``[n, size]``.

    Also yields, for each batch, the factors of the tokens in the Gram matrix.
    """
    for (x, counts), mine in zip(
        entered.inputs(rows), torch.split(share, BATCH_TOKENS), strict=True
    ):
        yield entered.module.hidden(expert, x) * mine.to(x), counts


@torch.no_grad()
def kept_rows(pieces: Iterator[tuple[Tensor, Tensor]], most: int) -> np.ndarray:
    """Return at most ``most`` input vectors of an expert, evenly spaced, fp32 ``[.., K]``."""
    x = torch.cat([piece.float().cpu() for piece, _ in pieces])
    chosen = np.unique(np.linspace(0, len(x) - 1, min(most, len(x))).astype(int))
    rows: np.ndarray = x.numpy()[chosen]
    return rows


@torch.no_grad()
def factor_of(
    pieces: Iterator[tuple[Tensor, Tensor]], channels: int, device: torch.device
) -> Tensor:
    """Return the result of ``gptq.inverse_factor`` for an expert's inputs."""
    gram = Gram(channels, device)
    for x, counts in pieces:
        gram.add(x.float(), counts)
    factor = gptq.inverse_factor(gram.matrix)
    del gram
    give_back()
    return factor


# ---- Reports to the user ----


@dataclass(frozen=True)
class Reached:
    """The number of calibration tokens that were routed to each expert of a mixture.

    The weights of an expert with fewer than ``fewest`` tokens are rounded to nearest.
    """

    layer: str
    tokens: tuple[int, ...]
    fewest: int

    @property
    def never(self) -> list[int]:
        return [expert for expert, count in enumerate(self.tokens) if count == 0]

    @property
    def few(self) -> list[int]:
        """The indices of experts with 0 to ``fewest - 1`` tokens."""
        return [expert for expert, count in enumerate(self.tokens) if count < self.fewest]

    def as_dict(self) -> dict[str, Any]:
        """Return this record as plain Python objects, for accuracy.json."""
        plain = asdict(self) | {"tokens": list(self.tokens)}
        return plain | {"never": self.never, "few": self.few}


def doubts(reached: Mapping[str, Reached]) -> list[str]:
    """Return warnings about experts with too few calibration tokens."""
    total = sum(len(each.tokens) for each in reached.values())
    never = [member(each.layer, expert) for each in reached.values() for expert in each.never]
    few = [
        member(each.layer, expert)
        for each in reached.values()
        for expert in each.few
        if each.tokens[expert]
    ]
    found = []
    if never:
        found.append(
            f"{len(never)} of {total} experts received no calibration token ({_some(never)}): they use the ranges of their "
            "stack, and weights rounded to nearest. Give more text, or more kinds of it (--calib, --calib-samples)"
        )
    if few:
        fewest = max(each.fewest for each in reached.values())
        found.append(
            f"{len(few)} of {total} experts received fewer than {fewest} calibration tokens ({_some(few)}; "
            "--calib-min-tokens-per-expert): their weights are rounded to nearest"
        )
    return found


def _some(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
