"""The unmasking loop in plain torch: short, slow, and the oracle that the native loop is compared with.

It follows the papers' algorithms over a ``Policy``: LLaDA (arXiv:2502.09992, algorithms 4 and 5), Fast-dLLM
(arXiv:2505.22618: threshold, factor, prefix and dual cache), Dream (arXiv:2508.15487: timestep schedule, entropy and
margin scores), SDAR (arXiv:2510.06303: dynamic), entropy-bounded sampling (arXiv:2505.24857).

``turns`` keeps the books of blocks and steps and says what commits; this runs the passes. The papers leave open what is ruled
there, and here: the mask token is never predicted; equal predictions take the lowest id.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dlm_export.network.denoiser import Denoiser
from dlm_export.network.turns import Canvas, Turn, choose_in, is_by_entropy, random_scores, start_canvas, turns
from dlm_runtime.policy import Policy

Past = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Reference:
    """What a run of the loop gives: the whole canvas, and the passes it took."""

    tokens: list[int]
    nfe: int


def scores(turn: Turn, logits: Tensor, policy: Policy) -> np.ndarray:
    """How sure the policy is of a turn's positions, float64 ``[M]``, from their logits fp32 ``[M, V]``; higher is surer."""
    if policy.score == "random" and not is_by_entropy(policy):
        return random_scores(turn, policy)
    probs = logits.softmax(-1)
    if is_by_entropy(policy):
        found = (probs * (probs + 1e-10).log()).sum(-1)
    else:
        best = probs.topk(2).values
        found = best[:, 0] - best[:, 1] if policy.score == "margin" else best[:, 0]
    return found.double().cpu().numpy()


class _Run:
    """One request: a canvas, its keys and values, and what is undecided."""

    def __init__(self, denoiser: Denoiser, canvas: Tensor, policy: Policy) -> None:
        self.denoiser = denoiser
        self.network = denoiser.network
        self.device = denoiser.embed.weight.device
        self.canvas = canvas.to(self.device)
        self.policy = policy
        self.cache: Past = []
        self.before = 0  # start of the block decided before

    def features(self, start: int, end: int, is_opening: bool) -> tuple[Tensor, int]:
        """Final features of the pass that this step makes, and the position of its first row.

        A block's opening pass stores its keys and values. It runs the whole canvas, or with ``refresh`` from the second
        block on the rows from that many tokens before the block, and at least those that have been decided since they
        were stored.
        """
        length, refresh = len(self.canvas), self.policy.refresh
        policy_cache = "none" if is_opening and not (refresh and self.cache) else self.policy.cache
        if is_opening and refresh:
            self.before, start = start, max(0, min(start - refresh, self.before))
        first, last = {"none": (0, length), "prefix": (start, length), "dual": (start, end)}[policy_cache]
        past = None
        if (first, last) != (0, length):
            past = [
                (torch.cat((k[:, :, :first], k[:, :, last:]), 2), torch.cat((v[:, :, :first], v[:, :, last:]), 2))
                for k, v in self.cache
            ]
        positions = torch.arange(first, last, device=self.device).unsqueeze(0)
        hidden, present = self.denoiser.hidden(self.canvas[first:last].unsqueeze(0), positions, past)
        if is_opening:
            for kept, new in zip(self.cache, present, strict=False):
                kept[0][:, :, first:last], kept[1][:, :, first:last] = new
            self.cache = self.cache or present
        return hidden[0], first

    def take(self, turn: Turn) -> np.ndarray:
        """Make a turn's pass and its commit. Returns the committed positions, int64."""
        c = self.network
        hidden, first = self.features(turn.start, turn.end, is_opening=turn.step == 0)
        positions = torch.from_numpy(turn.positions).to(self.device)
        rows = (positions - c.shift).clamp(min=0) - first
        logits = self.denoiser.project(hidden[rows]).float()
        logits[:, c.mask_token_id] = -torch.inf
        chosen = choose_in(turn, scores(turn, logits, self.policy), self.policy)
        committed: np.ndarray = turn.positions[chosen]
        best = logits.argmax(-1).cpu()[torch.from_numpy(chosen)]
        self.canvas[torch.from_numpy(committed).to(self.device)] = best.to(self.device)
        return committed


def generate(
    denoiser: Denoiser,
    tokens: Sequence[int],
    policy: Policy,
    max_new_tokens: int,
    steps: int = 0,
    on_step: Callable[[Canvas], None] | None = None,
) -> Reference:
    """Fill the mask tokens of ``tokens`` and ``max_new_tokens`` more behind them.

    ``steps`` plans that many passes for the whole generation, split evenly over its blocks; 0 leaves it to the policy.
    ``on_step`` gets the canvas after each step.
    """
    canvas = start_canvas(tokens, max_new_tokens, denoiser.network.mask_token_id)
    return fill(denoiser, canvas, policy, steps, on_step)


@torch.no_grad()
def fill(
    denoiser: Denoiser,
    canvas: Canvas,
    policy: Policy,
    steps: int = 0,
    on_step: Callable[[Canvas], None] | None = None,
) -> Reference:
    """Fill the undecided positions of a canvas; see ``generate``."""
    c = denoiser.network
    undecided, run, nfe = canvas.undecided.copy(), _Run(denoiser, torch.tensor(canvas.tokens), policy), 0
    for turn in turns(undecided, policy, c.shift, steps):
        undecided[run.take(turn)] = False
        nfe += 1
        if on_step is not None:
            on_step(Canvas(run.canvas.cpu().numpy().copy(), undecided.copy()))
        if policy.stop != "eos" or undecided[turn.start : turn.end].any():
            continue
        new = turn.start + np.flatnonzero(canvas.undecided[turn.start : turn.end])
        if np.isin(run.canvas.cpu().numpy()[new], c.eos_token_ids).any():
            run.canvas[torch.from_numpy(undecided).to(run.device)] = c.eos_token_ids[0]
            undecided[:] = False
    return Reference(run.canvas.tolist(), nfe)
