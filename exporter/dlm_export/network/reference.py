"""The unmasking loop in plain torch: short, slow, and the oracle that the native loop is compared with.

It follows the papers' algorithms over a ``Policy``: LLaDA (arXiv:2502.09992, algorithms 4 and 5), Fast-dLLM
(arXiv:2505.22618: threshold, factor, prefix and dual cache), Dream (arXiv:2508.15487: timestep schedule, entropy and
margin scores), SDAR (arXiv:2510.06303: dynamic), entropy-bounded sampling (arXiv:2505.24857).

Rules that the papers leave open: every step commits at least one token; the mask token is never predicted; equal
predictions take the lowest id; equal scores commit left to right. Scores compare with thresholds in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dlm_export.network.denoiser import Denoiser
from dlm_runtime.policy import Policy

Past = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Reference:
    """What a run of the loop gives: the whole canvas, and the passes it took."""

    tokens: list[int]
    nfe: int


def transfer_counts(masked: int, steps: int) -> list[int]:
    """Split ``masked`` positions over ``steps`` as evenly as integers allow, larger counts first.

    Raises ValueError if ``steps < 1``. The schedule of LLaDA (arXiv:2502.09992, algorithm 4).
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, not {steps}")
    return [masked // steps + (k < masked % steps) for k in range(steps)]


def timestep_count(masked: int, step: int, steps: int, eps: float) -> int:
    """How many of ``masked`` positions Dream commits at ``step`` of ``steps``: the schedule's share, all at the last."""
    if step >= steps - 1:
        return masked
    t = torch.linspace(1, eps, steps + 1)
    return max(1, int(masked * (1 - t[step + 1] / t[step])))


def philox(key: int, counter: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 (Salmon et al., SC 2011): 4 random words from a 64-bit key and a 4-word counter."""
    k0, k1, c = key & 0xFFFFFFFF, key >> 32, counter
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = ((p1 >> 32) ^ c[1] ^ k0, p1 & 0xFFFFFFFF, (p0 >> 32) ^ c[3] ^ k1, p0 & 0xFFFFFFFF)
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c


def random_score(seed: int, step: int, position: int) -> float:
    """Uniform in (0, 1), a pure function of its arguments; ``step`` counts the request's passes."""
    high, low, _, _ = philox(seed, (step, position, 0, 0))
    return (((high << 32 | low) >> 11) + 0.5) * 2.0**-53


def choose(score: Tensor, policy: Policy, count: int) -> Tensor:
    """Which of the masked positions to commit: bool ``[M]`` for scores ``[M]`` in order of position.

    ``count`` is what the schedule plans for this step (static, dynamic, timestep, sequential). At least one is chosen.
    """
    score = score.double()
    order = torch.sort(score, descending=True, stable=True).indices
    ranked = score[order]
    count = max(1, min(count, len(score)))
    above = ranked > policy.threshold if policy.compare == ">" else ranked >= policy.threshold
    if policy.commit in ("static", "timestep"):
        taken = count
    elif policy.commit == "sequential":
        order, taken = torch.arange(len(score)), count
    elif policy.commit == "threshold":
        taken = max(1, int(above.sum()))
    elif policy.commit == "dynamic":
        taken = max(int(above.sum()), count)
    elif policy.commit == "factor":
        taken = 1
        while taken < len(ranked) and ranked[taken] >= 1 - policy.factor / (taken + 2):
            taken += 1
    elif policy.commit == "entropy_bound":
        taken = 1
        while taken < len(ranked) and -ranked[:taken].sum() <= policy.entropy_bound:
            taken += 1
    else:
        raise ValueError(f"unknown commit rule {policy.commit!r}")
    chosen = torch.zeros(len(score), dtype=torch.bool)
    chosen[order[:taken]] = True
    return chosen


def _is_by_entropy(policy: Policy) -> bool:
    return policy.commit == "entropy_bound" or policy.score == "entropy"


def surest(policy: Policy) -> float:
    """The score of a prediction without doubt."""
    return 0.0 if _is_by_entropy(policy) else 1.0


def scores(probs: Tensor, policy: Policy, passes: int, positions: Sequence[int]) -> Tensor:
    """How sure the policy is of masked positions, float64 ``[M]``, from probabilities ``[M, V]``; higher is surer.

    ``passes`` were made before this one; they and the positions key the random score.
    """
    if _is_by_entropy(policy):
        return (probs * (probs + 1e-10).log()).sum(-1).double()
    if policy.score == "random":
        return torch.tensor([random_score(policy.seed, passes, position) for position in positions], dtype=torch.double)
    best = probs.topk(2).values
    return (best[:, 0] - best[:, 1] if policy.score == "margin" else best[:, 0]).double()


class _Run:
    """One request: a canvas, its keys and values, and the passes so far."""

    def __init__(self, denoiser: Denoiser, canvas: Tensor, policy: Policy) -> None:
        self.denoiser = denoiser
        self.network = denoiser.network
        self.canvas = canvas
        self.policy = policy
        self.nfe = 0
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
        positions = torch.arange(first, last).unsqueeze(0)
        hidden, present = self.denoiser.hidden(self.canvas[first:last].unsqueeze(0), positions, past)
        if is_opening:
            for kept, new in zip(self.cache, present, strict=False):
                kept[0][:, :, first:last], kept[1][:, :, first:last] = new
            self.cache = self.cache or present
        self.nfe += 1
        return hidden[0], first

    def step(self, start: int, end: int, step: int, steps: int, planned: int) -> None:
        """One pass over the block ``[start, end)`` and its commit; ``planned`` by the even schedule."""
        c, policy = self.network, self.policy
        hidden, first = self.features(start, end, is_opening=step == 0)
        positions = start + (self.canvas[start:end] == c.mask_token_id).nonzero().squeeze(1)
        # Later passes over a shifted denoiser lack the row before the block: its first position commits in the opening pass.
        forced = step == 0 and policy.cache != "none" and c.shift == 1 and int(positions[0]) == start
        rows = (positions - c.shift).clamp(min=0) - first
        logits = self.denoiser.project(hidden[rows]).float()
        logits[:, c.mask_token_id] = -torch.inf
        probs = logits.softmax(-1)
        guess = logits.argmax(-1)
        score = scores(probs, policy, self.nfe - 1, positions.tolist())
        if forced:
            score[0] = surest(policy)
        if policy.commit == "timestep":
            planned = timestep_count(len(positions), step, steps, policy.timestep_eps)
        chosen = choose(score, policy, planned)
        self.canvas[positions[chosen]] = guess[chosen]


@torch.no_grad()
def generate(
    denoiser: Denoiser,
    tokens: Sequence[int],
    policy: Policy,
    max_new_tokens: int,
    steps: int = 0,
    on_step: Callable[[list[int]], None] | None = None,
) -> Reference:
    """Fill the mask tokens of ``tokens`` and ``max_new_tokens`` more behind them.

    ``steps`` plans that many passes for the whole generation, split evenly over its blocks; 0 leaves it to the policy.
    ``on_step`` gets the canvas after each step.
    """
    c = denoiser.network
    canvas = torch.tensor([*tokens, *[c.mask_token_id] * max_new_tokens])
    is_given = canvas != c.mask_token_id
    run = _Run(denoiser, canvas, policy)
    length = len(canvas)
    origin = int((~is_given).nonzero()[0]) if not bool(is_given.all()) else length
    block_length = policy.block_length or max(1, length - origin)
    starts = list(range(origin, length, block_length))
    shares = transfer_counts(steps, len(starts)) if steps and starts else []
    for number, start in enumerate(starts):
        end = min(start + block_length, length)
        masked = int((canvas[start:end] == c.mask_token_id).sum())
        block_steps = shares[number] if shares else policy.steps_per_block or block_length
        counts = transfer_counts(masked, block_steps)
        step = 0
        while bool((canvas[start:end] == c.mask_token_id).any()):
            run.step(start, end, step, block_steps, counts[step] if step < block_steps else 1)
            step += 1
            if on_step is not None:
                on_step(canvas.tolist())
        is_new = ~is_given[start:end]
        if policy.stop == "eos" and any(bool((canvas[start:end][is_new] == eos).any()) for eos in c.eos_token_ids):
            canvas[canvas == c.mask_token_id] = c.eos_token_ids[0]
            break
    return Reference(canvas.tolist(), run.nfe)
