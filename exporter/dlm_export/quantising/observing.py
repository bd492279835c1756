"""Runs calibration states through a denoiser layer by layer, and observes the inputs of layers.

The states can be split into parts that run separately, on this machine or on others. Every batch
belongs to one part, so the hidden states do not depend on how the states are split.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor

from dlm_calibration import solvers
from dlm_calibration.observers import Observer, Observers
from dlm_calibration.states import State
from dlm_export.network.experts import RoutedMLPs
from dlm_export.network.layered import Carried, Layered, make_batches, named
from dlm_export.network.spec import LinearSpec
from dlm_export.quantising import gptq
from dlm_export.quantising.experts import Entered
from dlm_export.quantising.gptq import Gram


@dataclass(frozen=True)
class Part:
    """Some of the calibration states.

    ``predicted`` contains, for each state, the positions for which the head is computed. ``first``
    is the number of positions in all earlier parts. ``first_predicted`` is the number of predicted
    positions in all earlier parts.
    """

    states: Sequence[State]
    predicted: Sequence[np.ndarray]
    first: int = 0
    first_predicted: int = 0


@dataclass(frozen=True)
class Wanted:
    """Describes what to observe while layer ``layer`` runs, or the head after the last layer.

    - ``sites``: the layers whose inputs are observed, grouped by input.
    - ``seeds``: for each of the sites, the seed of its observer.
    - ``keep_rows``: the number of input vectors that each observer stores.
    - ``grams``: the sites whose Gram matrix is computed.
    - ``rotated``: the sites whose input is multiplied by a Hadamard matrix.
    - ``keep``: True if the layer's output becomes the input of the next layer.
    """

    layer: int
    sites: Mapping[str, Sequence[LinearSpec]]
    seeds: Mapping[str, int]
    keep_rows: int = 0
    grams: tuple[str, ...] = ()
    rotated: frozenset[str] = frozenset()
    keep: bool = True


@dataclass
class Observed:
    """What was observed while a layer ran.

    ``entered`` contains the inputs of the layer's quantised experts.
    """

    observers: Observers
    grams: dict[str, Gram] = field(default_factory=dict)
    entered: Entered | None = None

    def merge(self, later: Observed) -> None:
        """Add the results of the same run with a later part of the states."""
        self.observers.merge(later.observers)
        for of, gram in later.grams.items():
            self.grams[of].matrix += gram.matrix


def predicted_positions(states: Sequence[State], mask_token_id: int) -> list[np.ndarray]:
    """Return, for each state, the positions for which the head is computed.

    The head is computed for masked positions. If no state contains masked positions, the head is
    computed for all positions.
    """
    is_masked = [state.is_masked(mask_token_id) for state in states]
    found = [np.flatnonzero(each) for each in is_masked]
    return found if any(map(len, found)) else [np.arange(len(each)) for each in is_masked]


def split(states: Sequence[State], predicted: Sequence[np.ndarray], part_tokens: int) -> list[Part]:
    """Split the states into parts of about ``part_tokens`` tokens. No batch is divided.

    The order of the parts is the order of the batches in a run with all states.
    """
    parts: list[Part] = []
    first = first_predicted = 0
    batches = make_batches(
        [state.canvas for state in states], drafts=[state.draft for state in states]
    )
    while batches:
        numbers: list[int] = []
        tokens = 0
        while batches and (not numbers or tokens + batches[0].ids.numel() <= part_tokens):
            batch = batches.pop(0)
            numbers += batch.numbers
            tokens += batch.ids.numel()
        own = [predicted[number] for number in numbers]
        parts.append(Part([states[number] for number in numbers], own, first, first_predicted))
        first, first_predicted = first + tokens, first_predicted + sum(map(len, own))
    return parts


class Run:
    """Runs the layers of the denoiser on a part of the states, one layer at a time."""

    def __init__(
        self,
        layered: Layered,
        part: Part,
        *,
        memory_bytes: int | None = None,
        folder: Path | None = None,
        entering: Tensor | None = None,
    ) -> None:
        """Hidden states that do not fit into ``memory_bytes`` are stored in a file in ``folder``.

        ``entering`` contains the hidden states before the next layer. If ``entering`` is ``None``,
        the run starts with the embeddings of the canvases.
        """
        self._layered, self._part = layered, part
        self._memory_bytes, self._folder = memory_bytes, folder
        self._is_masked = [state.is_masked(layered.network.mask_token_id) for state in part.states]
        canvases = [state.canvas for state in part.states]
        self._carried = Carried(
            layered,
            canvases,
            memory_bytes=memory_bytes,
            folder=folder,
            states=entering,
            drafts=[state.draft for state in part.states],
        )

    @property
    def hidden(self) -> Tensor:
        """The hidden states before the next layer, ``[tokens, hidden]``."""
        return self._carried.states

    @torch.no_grad()
    def observe(self, wanted: Wanted) -> Observed:
        """Run a layer, and observe its inputs."""
        head = wanted.layer == len(self._layered.network.layers)
        first = self._part.first_predicted if head else self._part.first
        observers = Observers(
            {
                of: Observer(
                    of,
                    readers[0].inputs,
                    keep_rows=wanted.keep_rows,
                    seed=wanted.seeds[of],
                    first=first,
                )
                for of, readers in wanted.sites.items()
            }
        )
        device = self._layered.device
        found = Observed(
            observers, {of: Gram(wanted.sites[of][0].inputs, device) for of in wanted.grams}
        )
        if not head:
            self._through_block(wanted, found)
        elif wanted.sites:
            features = self._carried.features(self._part.predicted)
            for number in (number for batch in self._carried.batches for number in batch.numbers):
                rows = self._part.predicted[number]
                self._look(found, "head", False, features[number][None], (number,), rows)
        return found

    def _through_block(self, wanted: Wanted, found: Observed) -> None:
        block = self._layered.block(wanted.layer)
        modules = named(wanted.layer, block)
        for of, readers in wanted.sites.items():
            if readers[0].is_stacked and readers[0].role == "down":
                mixture = cast(RoutedMLPs, modules[of.removesuffix(".down")])
                found.entered = Entered(
                    mixture,
                    self._carried,
                    self._part.states,
                    self._is_masked,
                    self._memory_bytes,
                    self._folder,
                )
                found.entered.watch(found.observers[of])
                continue
            look = functools.partial(self._look, found, of, of in wanted.rotated)
            # A stack of experts gets the rows of one expert. Look at the mixture's input instead.
            entering = of.removesuffix(".gate") if readers[0].is_stacked else of
            modules[entering].register_forward_pre_hook(
                lambda _, inputs, look=look: look(inputs[0], self._carried.now.numbers)
            )
        self._carried.through(wanted.layer, block, keep=wanted.keep)

    def _look(
        self,
        found: Observed,
        of: str,
        turn: bool,
        x: Tensor,
        numbers: Sequence[int],
        rows: np.ndarray | slice = slice(None),
    ) -> None:
        """Add the inputs ``x`` ``[B, L, K]`` of the site ``of`` to the site's statistics.

        ``numbers`` contains the index of each of the B canvases among the states. ``rows`` selects
        the positions of each canvas that ``x`` contains. If ``turn`` is true, ``x`` is multiplied
        by a Hadamard matrix first.
        """
        wide = x.float().cpu().numpy()
        if turn:
            wide = solvers.rotate(wide)
        for number, vectors in zip(numbers, wide, strict=True):
            found.observers[of].add(
                vectors, self._is_masked[number][rows], self._part.states[number].bucket
            )
        gram = found.grams.get(of)
        if gram is not None:
            weights = [
                np.where(self._is_masked[number][rows], 1.0, gptq.COMMITTED_WEIGHT)
                for number in numbers
            ]
            device = self._layered.device
            weight = torch.from_numpy(np.concatenate(weights).astype(np.float32)).to(device)
            gram.add(
                (torch.from_numpy(wide).to(device) if turn else x.float()).flatten(0, 1), weight
            )
