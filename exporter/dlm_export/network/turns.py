"""The books of the unmasking loop: blocks, steps, and which of the scored positions commit. In numpy, without a denoiser.

``turns`` keeps the books for whoever runs the passes: the reference loop (``reference``), or a judge who has seen the canvases.

Rules that the papers leave open: every step commits at least one token; equal scores commit left to right. Scores compare with
thresholds in float64.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dlm_runtime.policy import Policy


@dataclass(frozen=True, eq=False)
class Canvas:
    """A canvas between two passes: token ids int64 ``[L]``, and which positions are undecided, bool ``[L]``.

    What stands at an undecided position is what the denoiser sees there, and nothing more.
    """

    tokens: np.ndarray
    undecided: np.ndarray


def start_canvas(tokens: Sequence[int], max_new_tokens: int, mask_token_id: int) -> Canvas:
    """A request's canvas before its first pass: undecided are the mask tokens among the given ones, and all new ones."""
    canvas = np.array([*tokens, *[mask_token_id] * max_new_tokens], np.int64)
    return Canvas(canvas, canvas == mask_token_id)


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


@dataclass(frozen=True)
class Span:
    """The rows ``[first, last)`` of a canvas that a pass computes; it takes the keys and values of all others from the cache.

    ``is_stored``: the cache takes the pass's own.
    """

    first: int
    last: int
    is_stored: bool

    def is_whole(self, length: int) -> bool:
        """Whether these are all rows of a canvas of this length, so that its pass reads no cache."""
        return (self.first, self.last) == (0, length)


class Spans:
    """Which rows the passes of one request compute, turn by turn.

    A block's opening pass runs the whole canvas, or with ``refresh`` from the second block on the rows from that many tokens
    before the block, and at least those that have been decided since they were stored.
    """

    def __init__(self, policy: Policy, length: int) -> None:
        self._policy, self._length = policy, length
        self._before: int | None = None  # start of the block decided before

    def of(self, turn: Turn) -> Span:
        """The rows of a turn's pass; to be asked once a turn, in their order."""
        policy, start, is_opening = self._policy, turn.start, turn.step == 0
        is_whole = is_opening and not (policy.refresh and self._before is not None)
        if is_opening:
            if not is_whole:
                assert self._before is not None
                start = max(0, min(turn.start - policy.refresh, self._before))
            self._before = turn.start
        cache = "none" if is_whole else policy.cache
        first, last = {"none": (0, self._length), "prefix": (start, self._length), "dual": (start, turn.end)}[cache]
        return Span(first, last, is_opening and policy.cache != "none")


@dataclass(frozen=True, eq=False)
class Step:
    """One pass of a loop: the canvas that it meets, int64 ``[L]``, the rows it computes, and those that are scored ``[R]``."""

    canvas: np.ndarray
    span: Span
    rows: np.ndarray


Walk = Sequence[Step]
"""A loop's passes, in their order."""


def end_early(
    tokens: np.ndarray, undecided: np.ndarray, wanted: np.ndarray, turn: Turn, policy: Policy, eos_token_ids: Sequence[int]
) -> None:
    """Fill what is undecided with the end token, if a turn has finished a block that holds one among its ``wanted`` positions.

    All ``[L]``, behind the turn's commit; nothing is done where the policy does not stop by end tokens.
    """
    if policy.stop != "eos" or undecided[turn.start : turn.end].any():
        return
    if np.isin(tokens[turn.start : turn.end][wanted[turn.start : turn.end]], eos_token_ids).any():
        tokens[undecided] = eos_token_ids[0]
        undecided[:] = False


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
    # torch.linspace(1, eps, steps + 1) in fp32: from either end by the rounded increment, one rounding a value.
    end, places = np.float32(eps), np.arange(steps + 1)
    increment = float((end - np.float32(1)) / np.float32(steps))
    from_end = float(end) - increment * (steps - places)
    t = np.where(places < (steps + 1) // 2, 1.0 + increment * places, from_end).astype(np.float32)
    return max(1, int(np.float32(masked) * (np.float32(1) - t[step + 1] / t[step])))


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


def random_scores(turn: Turn, policy: Policy) -> np.ndarray:
    """The scores that look at no prediction, float64 ``[M]``: keyed by the passes made before and the positions."""
    return np.array([random_score(policy.seed, turn.passes, position) for position in turn.positions.tolist()])


def is_by_entropy(policy: Policy) -> bool:
    """Whether scores are entropies, which no probability compares with: the rule or the score asks for them."""
    return policy.commit == "entropy_bound" or policy.score == "entropy"


def choose(score: np.ndarray, policy: Policy, count: int) -> np.ndarray:
    """Which of the undecided positions to commit: bool ``[M]`` for scores float64 ``[M]`` in order of position.

    ``count`` is what the schedule plans for this step (static, dynamic, timestep, sequential). At least one is chosen.
    """
    order = np.argsort(-score, kind="stable")
    ranked = score[order]
    count = max(1, min(count, len(score)))
    above = ranked > policy.threshold if policy.compare == ">" else ranked >= policy.threshold
    if policy.commit in ("static", "timestep"):
        taken = count
    elif policy.commit == "sequential":
        order, taken = np.arange(len(score)), count
    elif policy.commit == "threshold":
        taken = max(1, int(above.sum()))
    elif policy.commit == "dynamic":
        taken = max(int(above.sum()), count)
    elif policy.commit == "factor":
        taken = 1
        while taken < len(ranked) and ranked[taken] >= 1 - policy.factor / (taken + 2):
            taken += 1
    elif policy.commit == "entropy_bound":
        taken, before = 1, -ranked[0]
        while taken < len(ranked) and before <= policy.entropy_bound:
            taken, before = taken + 1, before - ranked[taken]
    else:
        raise ValueError(f"unknown commit rule {policy.commit!r}")
    chosen = np.zeros(len(score), bool)
    chosen[order[:taken]] = True
    return chosen


def choose_in(turn: Turn, score: np.ndarray, policy: Policy) -> np.ndarray:
    """Which of a turn's positions commit: bool ``[M]``, from their scores float64 ``[M]``."""
    if turn.is_forced:
        score = score.copy()
        score[0] = 0.0 if is_by_entropy(policy) else 1.0  # a prediction without doubt
    return choose(score, policy, turn.planned)
