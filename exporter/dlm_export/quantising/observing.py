"""Runs calibration states through a denoiser layer by layer, and observes the inputs of layers."""

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
from dlm_export.network.layered import Carried, Layered, named
from dlm_export.network.spec import LinearSpec
from dlm_export.quantising import gptq
from dlm_export.quantising.experts import Entered
from dlm_export.quantising.gptq import Gram


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


class Run:
    """Runs the layers of the denoiser on calibration states, one layer at a time."""

    def __init__(
        self,
        layered: Layered,
        states: Sequence[State],
        *,
        memory_bytes: int | None = None,
        folder: Path | None = None,
    ) -> None:
        """Hidden states that do not fit into ``memory_bytes`` are stored in a file in ``folder``.

        The head is computed for masked positions. If no state contains masked positions, the head
        is computed for all positions.
        """
        self._layered, self._states = layered, states
        self._memory_bytes, self._folder = memory_bytes, folder
        self._is_masked = [state.is_masked(layered.network.mask_token_id) for state in states]
        masked = [np.flatnonzero(each) for each in self._is_masked]
        self._predicted = (
            masked if any(map(len, masked)) else [np.arange(len(each)) for each in self._is_masked]
        )
        self._carried = Carried(
            layered,
            [state.canvas for state in states],
            memory_bytes=memory_bytes,
            folder=folder,
            drafts=[state.draft for state in states],
        )

    @torch.no_grad()
    def observe(self, wanted: Wanted) -> Observed:
        """Run a layer, and observe its inputs."""
        head = wanted.layer == len(self._layered.network.layers)
        observers = Observers(
            {
                of: Observer(
                    of,
                    readers[0].inputs,
                    keep_rows=wanted.keep_rows,
                    seed=wanted.seeds[of],
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
            features = self._carried.features(self._predicted)
            for number in (number for batch in self._carried.batches for number in batch.numbers):
                rows = self._predicted[number]
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
                    self._states,
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
                vectors, self._is_masked[number][rows], self._states[number].bucket
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
