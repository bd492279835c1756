"""Computes passes that read a cache, with one layer of the denoiser in memory at a time.

The first pass over a canvas computes the whole canvas and fills the cache. All other passes over
this canvas read the cache. Their canvases are known, so each layer can compute all passes before the
next layer is loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dlm_export.network.cache_dtypes import read_back
from dlm_export.network.denoiser import Block, Past
from dlm_export.network.layered import BATCH_TOKENS, Layered
from dlm_export.network.pass_plan import Span
from dlm_export.network.reference import outside


@dataclass(frozen=True, eq=False)
class Step:
    """A pass over ``span`` of the canvas ``[L]``. The rows ``[R]`` are scored."""

    canvas: np.ndarray
    span: Span
    rows: np.ndarray


Walk = Sequence[Step]
"""The passes over one canvas. The first pass fills the cache."""
_Pass = tuple[int, int]  # index of the walk, index of the pass in the walk


class Walked:
    """The hidden states between two layers, for every pass of ``walks``."""

    @torch.no_grad()
    def __init__(self, layered: Layered, walks: Sequence[Walk], cache_dtype: str) -> None:
        """``cache_dtype`` is the type of the cache, as the manifest names it."""
        self.layered, self.walks, self._cache_dtype = layered, walks, cache_dtype
        self._ids = [
            [torch.from_numpy(s.canvas[s.span.first : s.span.last]) for s in walk] for walk in walks
        ]
        self._states = [
            [
                layered.embed(ids, torch.from_numpy(s.span.ids(layered.network))).cpu()
                for s, ids in zip(walk, of_walk, strict=True)
            ]
            for walk, of_walk in zip(walks, self._ids, strict=True)
        ]
        passes = [
            (walk, number) for walk, steps in enumerate(walks) for number in range(len(steps))
        ]
        self._batches = [
            *self._together(each for each in passes if each[1] == 0),
            *self._together(each for each in passes if each[1] > 0),
        ]

    @torch.no_grad()
    def through(self, i: int, block: Block) -> None:
        """Run every pass through layer ``i``."""
        caches: list[Past | None] = [None] * len(self.walks)
        for batch in self._batches:
            steps = [self.walks[walk][number] for walk, number in batch]
            x = torch.cat([self._states[walk][number] for walk, number in batch]).to(
                self.layered.device
            )
            past = [
                outside(caches[walk], step.span)
                for (walk, _), step in zip(batch, steps, strict=True)
            ]
            ids = [self._ids[walk][number] for walk, number in batch]
            positions = [step.span.ids(self.layered.network) for step in steps]
            out, (keys, values) = block(
                x.unsqueeze(0), *self.layered.packed(i, ids, positions, past), self._cache_dtype
            )
            start = 0
            for walk, number in batch:
                own = slice(start, start + len(self._ids[walk][number]))
                start = own.stop
                self._states[walk][number] = out[0, own].cpu()
                if number == 0:
                    caches[walk] = (
                        read_back(keys[:, :, own], self._cache_dtype),
                        read_back(values[:, :, own], self._cache_dtype),
                    )

    @torch.no_grad()
    def features(self) -> list[list[Tensor]]:
        """Return the inputs of the head for each pass's scored rows: ``[R, hidden]`` on the CPU.

        Call this method after the last layer.
        """
        end = self.layered.end()
        return [
            [
                end(
                    states[torch.from_numpy(step.rows - step.span.first)].to(self.layered.device)
                ).cpu()
                for step, states in zip(walk, found, strict=True)
            ]
            for walk, found in zip(self.walks, self._states, strict=True)
        ]

    def _together(self, ready: Iterable[_Pass]) -> Iterator[list[_Pass]]:
        """Yield batches of at most ``BATCH_TOKENS`` tokens. A longer pass is a batch of its own."""
        batch: list[_Pass] = []
        tokens = 0
        for walk, number in ready:
            own = len(self._ids[walk][number])
            if batch and tokens + own > BATCH_TOKENS:
                yield batch
                batch, tokens = [], 0
            batch.append((walk, number))
            tokens += own
        if batch:
            yield batch
