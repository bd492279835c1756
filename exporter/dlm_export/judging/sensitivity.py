"""Which layers a quantised denoiser's loss comes from: each quantised alone, in torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dlm_calibration.recipes import HIGH
from dlm_calibration.states import State
from dlm_export.network.denoiser import Denoiser
from dlm_export.quantising import calibrate

SWEPT_STATES = 16
FRONTIER = 0.9  # probability from which a masked position counts as about to commit


class Sweep:
    """What single layers lose when they alone are quantised: mean KL on masked positions, and on those about to commit."""

    def __init__(self, denoiser: Denoiser, states: Sequence[State]) -> None:
        self.denoiser = denoiser
        self.states = [state for state in states if state.mask_ratio > 0]
        picked = np.linspace(0, len(self.states) - 1, min(SWEPT_STATES, len(self.states))).astype(int)
        self.states = [self.states[i] for i in dict.fromkeys(picked.tolist())]
        self.expected = [self._log_probs(state) for state in self.states]

    @torch.no_grad()
    def _log_probs(self, state: State) -> Tensor:
        c = self.denoiser.network
        features, _ = self.denoiser.hidden(*calibrate.batch(state))
        masked = torch.from_numpy(np.flatnonzero(state.canvas == c.mask_token_id))
        logits = self.denoiser.project(features[0, (masked - c.shift).clamp(min=0)]).float()
        logits[:, c.mask_token_id] = -torch.inf
        return logits.log_softmax(-1)

    def loss(self, done: calibrate.Quantisation, layers: Sequence[str]) -> tuple[float, float]:
        """``(kl, frontier_kl)`` in nats a position with ``layers`` quantised."""
        undo = calibrate.simulate(dict(self.denoiser.named_modules()), done, layers)
        all_kl, frontier_kl = [], []
        for state, expected in zip(self.states, self.expected, strict=True):
            found = self._log_probs(state)
            probs = expected.exp()
            kl = torch.where(probs > 0, probs * (expected - found), 0.0).sum(-1)
            best = probs.max(-1).values
            is_frontier = (best >= FRONTIER) | (best == best.max())
            all_kl.append(kl)
            frontier_kl.append(kl[is_frontier])
        undo()
        return float(torch.cat(all_kl).mean()), float(torch.cat(frontier_kl).mean())


def layer_losses(
    denoiser: Denoiser, done: calibrate.Quantisation, states: Sequence[State], on_done: Callable[[], None]
) -> list[dict[str, Any]]:
    """Every quantised layer's loss alone, as the report shows it. ``denoiser`` is the folded one, in fp32."""
    sweep = Sweep(denoiser, states)
    rows = []
    for layer, name in done.formats.items():
        if name != HIGH:
            kl, frontier_kl = sweep.loss(done, [layer])
            rows.append({"layer": layer, "format": name, "kl": kl, "frontier_kl": frontier_kl})
        on_done()
    return rows
