"""Loops that were run elsewhere, walked through a denoiser a layer at a time.

The canvas that each pass meets is known beforehand, so that a layer can compute all passes before the next one is read: each on
the rows that the loop computes, with the keys and values that this denoiser would have kept from the passes before.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dlm_export.network.denoiser import Block, Past
from dlm_export.network.layered import Layered
from dlm_export.network.reference import outside, store
from dlm_export.network.turns import Walk


class Walked:
    """The hidden states of every pass of ``walks`` between two layers."""

    @torch.no_grad()
    def __init__(self, layered: Layered, walks: Sequence[Walk]) -> None:
        self.layered, self.walks = layered, walks
        self._ids = [[torch.from_numpy(s.canvas[s.span.first : s.span.last]).unsqueeze(0) for s in walk] for walk in walks]
        self._states = [[layered.embed(ids).cpu() for ids in walk] for walk in self._ids]

    @torch.no_grad()
    def through(self, i: int, block: Block) -> None:
        """Every pass through layer ``i``."""
        for walk, ids, states in zip(self.walks, self._ids, self._states, strict=True):
            cache: Past | None = None
            for number, step in enumerate(walk):
                span, past = step.span, None
                if (span.first, span.last) != (0, len(step.canvas)):
                    assert cache is not None
                    past = outside(cache, span)
                x = states[number].to(self.layered.device)
                out, new = block(x, *self.layered.beside(i, ids[number], span.first, past))
                states[number] = out.cpu()
                if span.is_stored:
                    cache = cache or new
                    store(cache, new, span)

    @torch.no_grad()
    def features(self) -> list[list[Tensor]]:
        """Final-norm features ``[R, hidden]`` of each pass's scored rows, on the CPU, behind the last layer."""
        norm = self.layered.final_norm()
        return [
            [
                norm(states[0, torch.from_numpy(step.rows - step.span.first)].to(self.layered.device)).cpu()
                for step, states in zip(walk, found, strict=True)
            ]
            for walk, found in zip(self.walks, self._states, strict=True)
        ]
