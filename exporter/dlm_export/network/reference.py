"""The unmasking loop in plain torch: short, slow, and the oracle that the native loop is compared with.

It follows the papers' algorithms over a ``Policy``: LLaDA (arXiv:2502.09992, algorithms 4 and 5), Fast-dLLM
(arXiv:2505.22618: threshold, factor, prefix and dual cache), Dream (arXiv:2508.15487: timestep schedule, entropy and
margin scores), SDAR (arXiv:2510.06303: dynamic), entropy-bounded sampling (arXiv:2505.24857).

``turns`` keeps the books of blocks and steps for whoever runs the passes; ``generate`` runs them.

Rules that the papers leave open: every step commits at least one token; the mask token is never predicted; equal
predictions take the lowest id; equal scores commit left to right. Scores compare with thresholds in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
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
    """Which of the undecided positions to commit: bool ``[M]`` for scores ``[M]`` in order of position.

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


def scores(probs: Tensor, policy: Policy, passes: int, positions: Sequence[int]) -> Tensor:
    """How sure the policy is of undecided positions, float64 ``[M]``, from probabilities ``[M, V]``; higher is surer.

    ``passes`` were made before this one; they and the positions key the random score.
    """
    if _is_by_entropy(policy):
        return (probs * (probs + 1e-10).log()).sum(-1).double()
    if policy.score == "random":
        return torch.tensor([random_score(policy.seed, passes, position) for position in positions], dtype=torch.double)
    best = probs.topk(2).values
    return (best[:, 0] - best[:, 1] if policy.score == "margin" else best[:, 0]).double()


@dataclass(frozen=True, eq=False)
class Canvas:
    """A canvas between two passes: token ids int64 ``[L]``, and which positions are undecided, bool ``[L]``.

    What stands at an undecided position is what the denoiser sees there, and nothing more.
    """

    tokens: np.ndarray
    undecided: np.ndarray


@dataclass(frozen=True, eq=False)
class Turn:
    """What a loop does with a canvas next: one pass that fills the block ``[start, end)``, and its commit.

    ``passes`` were made before, ``step`` of them for this block. ``positions`` int64 ``[M]`` are the block's undecided ones,
    ascending; ``planned`` is the schedule's count of commits; ``is_forced``: the first position commits whatever its score.
    """

    start: int
    end: int
    step: int
    passes: int
    positions: np.ndarray
    planned: int
    is_forced: bool


def turns(undecided: np.ndarray, policy: Policy, shift: int, steps: int = 0) -> Iterator[Turn]:
    """The passes that fill the undecided positions of a canvas, bool ``[L]``: blocks from the first of them on, in order.

    Who takes a turn clears what it committed in ``undecided`` before asking for the next one. ``shift`` is the denoiser's;
    ``steps`` plans that many passes for the whole generation, split evenly over its blocks; 0 leaves it to the policy.
    """
    if not undecided.any():
        return
    length, origin = len(undecided), int(undecided.argmax())
    block_length = policy.block_length or length - origin
    starts = range(origin, length, block_length)
    shares = transfer_counts(steps, len(starts)) if steps else [policy.steps_per_block or block_length] * len(starts)
    passes = 0
    for start, block_steps in zip(starts, shares, strict=True):
        end = min(start + block_length, length)
        counts = transfer_counts(int(undecided[start:end].sum()), block_steps)
        step = 0
        while undecided[start:end].any():
            positions = start + np.flatnonzero(undecided[start:end])
            planned = counts[step] if step < block_steps else 1
            if policy.commit == "timestep":
                planned = timestep_count(len(positions), step, block_steps, policy.timestep_eps)
            # Later passes over a shifted denoiser lack the row before the block: its first position commits in the opening one.
            is_forced = step == 0 and policy.cache != "none" and shift == 1 and int(positions[0]) == start
            yield Turn(start, end, step, passes, positions, planned, is_forced)
            step, passes = step + 1, passes + 1


def choose_in(turn: Turn, probs: Tensor, policy: Policy) -> Tensor:
    """Which of a turn's positions commit: bool ``[M]``, from their probabilities ``[M, V]``."""
    score = scores(probs, policy, turn.passes, turn.positions.tolist())
    if turn.is_forced:
        score[0] = 0.0 if _is_by_entropy(policy) else 1.0  # a prediction without doubt
    return choose(score, policy, turn.planned)


class _Run:
    """One request: a canvas, its keys and values, and what is undecided."""

    def __init__(self, denoiser: Denoiser, canvas: Tensor, policy: Policy) -> None:
        self.denoiser = denoiser
        self.network = denoiser.network
        self.canvas = canvas
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
        positions = torch.arange(first, last).unsqueeze(0)
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
        positions = torch.from_numpy(turn.positions)
        rows = (positions - c.shift).clamp(min=0) - first
        logits = self.denoiser.project(hidden[rows]).float()
        logits[:, c.mask_token_id] = -torch.inf
        chosen = choose_in(turn, logits.softmax(-1), self.policy)
        self.canvas[positions[chosen]] = logits.argmax(-1)[chosen]
        committed: np.ndarray = turn.positions[chosen.numpy()]
        return committed


def start_canvas(tokens: Sequence[int], max_new_tokens: int, mask_token_id: int) -> Canvas:
    """A request's canvas before its first pass: undecided are the mask tokens among the given ones, and all new ones."""
    canvas = np.array([*tokens, *[mask_token_id] * max_new_tokens], np.int64)
    return Canvas(canvas, canvas == mask_token_id)


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
            on_step(Canvas(run.canvas.numpy().copy(), undecided.copy()))
        if policy.stop != "eos" or undecided[turn.start : turn.end].any():
            continue
        new = turn.start + np.flatnonzero(canvas.undecided[turn.start : turn.end])
        if np.isin(run.canvas.numpy()[new], c.eos_token_ids).any():
            run.canvas[torch.from_numpy(undecided)] = c.eos_token_ids[0]
            undecided[:] = False
    return Reference(run.canvas.tolist(), nfe)
