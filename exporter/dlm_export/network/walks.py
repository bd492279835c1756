"""Recomputes the passes of finished runs of the unmasking loop, with one layer in memory at a time.

A *walk* is the list of the recorded passes of one run. The canvas of each pass is already known.
Each layer can therefore compute all passes before the next layer is loaded. Each pass computes the
same rows as in the original run, and uses the keys and values that the recomputed earlier passes
have cached.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from dlm_export.network.cache_dtypes import read_back
from dlm_export.network.denoiser import Block, Past
from dlm_export.network.layered import BATCH_TOKENS, Layered
from dlm_export.network.loop_turns import Walk
from dlm_export.network.reference import outside, store

_Pass = tuple[int, int]  # index of the walk, index of the pass in the walk


class Walked:
    """The hidden states between two layers, for every pass of ``walks``."""

    @torch.no_grad()
    def __init__(
        self, layered: Layered, walks: Sequence[Walk], cache_dtype: str | None = None
    ) -> None:
        """``cache_dtype`` is the type of the cache, as the manifest names it.

        If ``cache_dtype`` is ``None``, the cache is not rounded.
        """
        self.layered, self.walks, self._cache_dtype = layered, walks, cache_dtype
        self._ids = [
            [torch.from_numpy(s.canvas[s.span.first : s.span.last]) for s in walk] for walk in walks
        ]
        self._states = [
            [
                layered.embed(ids, torch.arange(*s.span.ids(layered.network))).cpu()
                for s, ids in zip(walk, of_walk, strict=True)
            ]
            for walk, of_walk in zip(walks, self._ids, strict=True)
        ]
        self._batches = [batch for ready in _rounds(walks) for batch in self._together(ready)]

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
            spans = [step.span.ids(self.layered.network) for step in steps]
            out, (keys, values) = block(
                x.unsqueeze(0), *self.layered.packed(i, ids, spans, past), self._cache_dtype
            )
            start = 0
            for (walk, number), step in zip(batch, steps, strict=True):
                own = slice(start, start + len(self._ids[walk][number]))
                start = own.stop
                self._states[walk][number] = out[0, own].cpu()
                if step.span.is_stored:
                    present = self._stored(keys[:, :, own]), self._stored(values[:, :, own])
                    caches[walk] = store(caches[walk], present, step.span)

    def _stored(self, rows: Tensor) -> Tensor:
        return rows if self._cache_dtype is None else read_back(rows, self._cache_dtype)

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

    def _together(self, ready: Sequence[_Pass]) -> Iterator[list[_Pass]]:
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


def _rounds(walks: Sequence[Walk]) -> Iterator[list[_Pass]]:
    """Yield groups of passes that do not depend on each other, in the order in which they must run."""
    for ready in itertools.zip_longest(*map(_stretches, walks), fillvalue=()):
        yield [(walk, number) for walk, numbers in enumerate(ready) for number in numbers]


def _stretches(walk: Walk) -> Iterator[Sequence[int]]:
    """Split the passes of a walk into groups of passes that do not depend on each other, in order.

    A pass that stores keys and values is a separate group. Passes that do not store keys and values
    form one group if these passes directly follow each other.
    """
    for is_stored, run in itertools.groupby(
        range(len(walk)), lambda number: walk[number].span.is_stored
    ):
        if is_stored:
            yield from ([number] for number in run)
        else:
            yield list(run)
