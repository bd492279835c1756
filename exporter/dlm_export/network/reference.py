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

from dlm_export.network.denoiser import Denoiser, Past
from dlm_export.network.turns import (
    Canvas,
    Span,
    Spans,
    Turn,
    choose_in,
    end_early,
    is_by_entropy,
    random_scores,
    start_canvas,
    turns,
)
from dlm_runtime.policy import Policy


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


def outside(past: Past, span: Span) -> Past:
    """The cached keys and values of the rows that a pass does not compute."""
    (keys, values), first, last = past, span.first, span.last
    return torch.cat((keys[:, :, :first], keys[:, :, last:]), 2), torch.cat((values[:, :, :first], values[:, :, last:]), 2)


def store(past: Past, new: Past, span: Span) -> None:
    """Put a pass's keys and values in place of those that are cached for its rows."""
    for kept, row in zip(past, new, strict=True):
        kept[:, :, span.first : span.last] = row


class _Run:
    """One request: a canvas, its keys and values, and what is undecided."""

    def __init__(self, denoiser: Denoiser, canvas: Tensor, policy: Policy) -> None:
        self.denoiser = denoiser
        self.network = denoiser.network
        self.device = denoiser.embed.weight.device
        self.canvas = canvas.to(self.device)
        self.policy = policy
        self.spans = Spans(policy, len(canvas))
        self.cache: list[Past] = []

    def features(self, span: Span) -> Tensor:
        """Final features ``[T, hidden]`` of a pass over the rows of ``span``."""
        is_whole = (span.first, span.last) == (0, len(self.canvas))
        past = None if is_whole else [outside(kept, span) for kept in self.cache]
        positions = torch.arange(span.first, span.last, device=self.device).unsqueeze(0)
        hidden, present = self.denoiser.hidden(self.canvas[span.first : span.last].unsqueeze(0), positions, past)
        if span.is_stored:
            self.cache = self.cache or present
            for kept, new in zip(self.cache, present, strict=True):
                store(kept, new, span)
        return hidden[0]

    def take(self, turn: Turn) -> np.ndarray:
        """Make a turn's pass and its commit. Returns the committed positions, int64."""
        c = self.network
        span = self.spans.of(turn)
        hidden = self.features(span)
        positions = torch.from_numpy(turn.positions).to(self.device)
        rows = (positions - c.shift).clamp(min=0) - span.first
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
        if undecided.any():
            tokens = run.canvas.cpu().numpy()
            end_early(tokens, undecided, canvas.undecided, turn, policy, c.eos_token_ids)
            run.canvas = torch.from_numpy(tokens).to(run.device)
    return Reference(run.canvas.tolist(), nfe)
