"""The unmasking loop in plain torch: short, slow, and the oracle that the native loop is compared with.

It follows the papers' algorithms over a ``Policy``: LLaDA (arXiv:2502.09992, algorithms 4 and 5), Fast-dLLM
(arXiv:2505.22618: threshold, factor, prefix and dual cache), Dream (arXiv:2508.15487: timestep schedule, entropy and
margin scores), SDAR (arXiv:2510.06303: dynamic), entropy-bounded sampling (arXiv:2505.24857).

``turns`` keeps the books of blocks and steps and says what commits; this runs the passes of one request (``lockstep`` those of
many). The papers leave open what is ruled there, and here: the mask token is never predicted; equal predictions take the lowest
id.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dlm_export.network.caches import read_back
from dlm_export.network.denoiser import Denoiser, Past
from dlm_export.network.spec import NetworkSpec
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


class Run:
    """One request between its passes: who runs it asks for a pass (``advance``), and gives the logits of its ``rows``."""

    def __init__(self, network: NetworkSpec, canvas: Canvas, policy: Policy, steps: int = 0) -> None:
        """``steps``: see ``generate``."""
        self.network, self.policy = network, policy
        self.tokens, self.undecided = canvas.tokens.copy(), canvas.undecided.copy()
        self.nfe = 0
        self._wanted = canvas.undecided
        self._turns = turns(self.undecided, policy, network.shift, steps)
        self._spans = Spans(policy, len(canvas.tokens))

    @property
    def canvas(self) -> Canvas:
        """What the request has come to."""
        return Canvas(self.tokens.copy(), self.undecided.copy())

    def advance(self) -> Span | None:
        """The rows of the canvas that the next pass computes; None: nothing is undecided any more."""
        turn = next(self._turns, None)
        if turn is None:
            return None
        self._turn, self._span = turn, self._spans.of(turn)
        return self._span

    @property
    def is_whole(self) -> bool:
        """Whether the pass computes the whole canvas, and so reads no cache."""
        return self._span.is_whole(len(self.tokens))

    @property
    def rows(self) -> Tensor:
        """The pass's rows that are scored, int64 ``[M]``, counted from its first."""
        return torch.from_numpy((self._turn.positions - self.network.shift).clip(min=0) - self._span.first)

    def commit(self, logits: Tensor) -> None:
        """Commit what the policy chooses by the logits fp32 ``[M, V]`` of ``rows``, which are written to."""
        turn, policy = self._turn, self.policy
        logits[:, self.network.mask_token_id] = -torch.inf
        chosen = choose_in(turn, scores(turn, logits, policy), policy)
        committed = turn.positions[chosen]
        self.tokens[committed] = logits.argmax(-1).cpu().numpy()[chosen]
        self.undecided[committed] = False
        self.nfe += 1

    def end_early(self) -> None:
        """Behind a commit: fill what is undecided with the end token where the policy stops by one."""
        if self.undecided.any():
            end_early(self.tokens, self.undecided, self._wanted, self._turn, self.policy, self.network.eos_token_ids)


def generate(
    denoiser: Denoiser,
    tokens: Sequence[int],
    policy: Policy,
    max_new_tokens: int,
    steps: int = 0,
    on_step: Callable[[Canvas], None] | None = None,
    *,
    cache_dtype: str = "float32",
) -> Reference:
    """Fill the mask tokens of ``tokens`` and ``max_new_tokens`` more behind them.

    ``steps`` plans that many passes for the whole generation, split evenly over its blocks; 0 leaves it to the policy.
    ``on_step`` gets the canvas after each step. ``cache_dtype``: what cached rows are stored in, as the manifest has it.
    """
    canvas = start_canvas(tokens, max_new_tokens, denoiser.network.mask_token_id)
    return fill(denoiser, canvas, policy, steps, on_step, cache_dtype=cache_dtype)


@torch.no_grad()
def fill(
    denoiser: Denoiser,
    canvas: Canvas,
    policy: Policy,
    steps: int = 0,
    on_step: Callable[[Canvas], None] | None = None,
    *,
    cache_dtype: str = "float32",
) -> Reference:
    """Fill the undecided positions of a canvas; see ``generate``."""
    run, device = Run(denoiser.network, canvas, policy, steps), denoiser.embed.weight.device
    cache: list[Past] = []
    while (span := run.advance()) is not None:
        past = None if run.is_whole else [outside(kept, span) for kept in cache]
        ids = torch.from_numpy(run.tokens[span.first : span.last]).to(device)
        positions = torch.arange(span.first, span.last, device=device)
        hidden, presents = denoiser.hidden(ids.unsqueeze(0), positions.unsqueeze(0), past)
        if span.is_stored:
            stored = [(read_back(keys, cache_dtype), read_back(values, cache_dtype)) for keys, values in presents]
            cache = cache or stored
            for kept, new in zip(cache, stored, strict=True):
                store(kept, new, span)
        run.commit(denoiser.project(hidden[0, run.rows.to(device)]).float())
        if on_step is not None:
            on_step(run.canvas)
        run.end_early()
    return Reference(run.tokens.tolist(), run.nfe)
