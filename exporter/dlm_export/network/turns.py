"""Schedules the unmasking loop: which passes run, and which scored positions commit.

A turn is one pass and the commit after it. The reference loop uses this module. Code that replays
the canvases of a finished run uses it too. The module needs neither torch nor a denoiser.

The papers of the decoding algorithms do not define two rules: every step commits at least one
token, and positions with equal scores commit from left to right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from dlm_export.network.pass_plan import (
    FULL_CACHES,
    Looped,
    Span,
    Stage,
    block_length_of,
    plan,
    transfer_counts,
)
from dlm_runtime.policy import Policy


@dataclass(frozen=True, eq=False)
class Canvas:
    """A canvas between two passes: token ids, int64 ``[L]``, and undecided positions, bool ``[L]``.

    At an undecided position, the token id is an input of the denoiser, but not a result.
    """

    tokens: np.ndarray
    undecided: np.ndarray


def start_canvas(tokens: Sequence[int], max_new_tokens: int, mask_token_id: int) -> Canvas:
    """Return the canvas of a request before its first pass.

    Mask tokens in the prompt, and all positions after the prompt, are undecided.
    """
    canvas = np.array([*tokens, *[mask_token_id] * max_new_tokens], np.int64)
    return Canvas(canvas, canvas == mask_token_id)


def reserve_end(canvas: Canvas, policy: Policy, eos_token_ids: Sequence[int]) -> Canvas:
    """Return a canvas with an end token at its last position, if the policy reserves this position.

    The canvas is not changed if the last position is decided or is the only undecided position.
    """
    tokens, undecided = canvas.tokens.copy(), canvas.undecided.copy()
    if policy.reserve == "none" or not eos_token_ids or not undecided[-1]:
        return canvas
    tokens[-1], undecided[-1] = eos_token_ids[0], False
    return Canvas(tokens, undecided) if undecided.any() else canvas


@dataclass(frozen=True, eq=False)
class Turn:
    """The next turn of the loop: a pass over ``span``, and a commit in the block ``[start, end)``.

    - ``passes``: the number of earlier passes of the request. With ``remask`` "noise", the number of
      earlier passes for the same positions. Random numbers depend on ``passes``.
    - ``step``: the number of earlier passes for the same positions.
    - ``positions``: the scored positions, int64 ``[M]``, in ascending order. The array is empty if
      the pass only fills the cache.
    - ``planned``: the number of positions that the schedule commits in this step.
    - ``is_forced``: True if the first position must commit, even with a low score.
    - ``standing``: if the turn may edit decided tokens, the current tokens of the positions, int64
      ``[M]``, and -1 for undecided positions.
    - ``drafted``: the drafted tokens of the positions, int64 ``[M]``, if the turn verifies them. The
      last position has no drafted token, and contains -1.
    - ``first_end``: the end of the first unfinished block, if the turn decides positions of several
      blocks. At least one position before ``first_end`` commits.
    - ``steps``: the number of passes planned for the same positions.
    """

    start: int
    end: int
    step: int
    passes: int
    span: Span
    positions: np.ndarray
    planned: int = 0
    is_forced: bool = False
    standing: np.ndarray | None = None
    drafted: np.ndarray | None = None
    first_end: int | None = None
    steps: int = 1


def turns(
    canvas: Canvas,
    policy: Policy,
    looped: Looped,
    steps: int = 0,
    scaffold: Callable[[int, int], None] = lambda *_: None,
) -> Iterator[Turn]:
    """Yield the turns that fill the undecided positions of a canvas, in the order of ``plan``.

    The caller writes the committed tokens to ``canvas`` before it requests the next turn. If the
    policy stops at end tokens and a finished block contains an end token, all undecided positions
    become end tokens.

    ``steps`` is the number of passes planned for the whole generation. The passes are divided
    evenly among the blocks. If ``steps`` is 0, the number of passes in the policy is used. The
    function ``scaffold(first, last)`` fills the positions of ``[first, last)`` where only one token
    is possible. ``scaffold`` is first called once for the whole canvas. Before each pass,
    ``scaffold`` is then called for the block of the pass.
    """
    if policy.commit == "verify":
        yield from _verified_turns(canvas, policy, looped)
        return
    if policy.next_block < 1:
        yield from _ahead_turns(canvas, policy, looped, steps)
        return
    tokens, undecided, wanted = canvas.tokens, canvas.undecided, canvas.undecided.copy()
    scaffold(0, len(tokens))
    passes, step, masked, counts = 0, 0, 0, [0]
    before: Stage | None = None
    for stage in plan(wanted, policy, looped, steps):
        if before is None or (before.first, before.last) != (stage.first, stage.last):
            step = 0
            masked = int(undecided[stage.first : stage.last].sum())
            shared = stage.last - stage.first if policy.schedule == "block" else masked
            counts = transfer_counts(shared, stage.steps)
        before, is_made = stage, False
        # Skip the first pass of a block if no position of the block is undecided, and no later
        # block needs the rows that the pass stores. With ``refresh``, later blocks need these rows.
        is_whole_block = (stage.span.first, stage.span.last) == (stage.start, stage.end)
        is_for_block = not policy.refresh if policy.cache in FULL_CACHES else is_whole_block
        own = slice(stage.first, stage.last)
        while True:
            scaffold(stage.start, stage.end)
            if policy.stop == "early-eos" and _end(
                canvas, wanted, stage.start, stage.end, policy, looped
            ):
                return
            left = int(undecided[own].sum())
            is_first = not is_made and (left > 0 or not stage.is_repeated)
            if not (is_first or undecided[stage.first : stage.awaited].any()):
                break
            is_made = True
            if not (left or (stage.span.is_stored and not is_for_block)):
                continue
            positions, standing = np.zeros(0, np.int64), None
            if left:
                positions, standing = _scored(canvas, wanted, stage, policy)
            planned = counts[step] if step < stage.steps else 1
            if policy.commit == "timestep":
                planned = timestep_count(left, step, stage.steps, policy.timestep_eps)
            elif policy.schedule == "floor":
                planned = floor_count(masked, left, stage.steps)
            # With ``shift`` 1, the row before the block predicts the block's first position. Only
            # the first pass of the block computes that row, so the position must commit in this
            # pass.
            is_opening = left > 0 and not stage.is_repeated and policy.cache in FULL_CACHES
            is_forced = is_opening and looped.shift == 1 and int(positions[0]) == stage.start
            yield Turn(
                stage.start,
                stage.end,
                step,
                step if policy.remask == "noise" else passes,
                stage.span,
                positions,
                planned,
                is_forced,
                standing,
                steps=stage.steps,
            )
            step, passes = step + 1, passes + 1
        if stage.is_last:
            for turn in _edits(canvas, wanted, stage, policy, passes):
                yield turn
                passes += 1
            if _end(canvas, wanted, stage.start, stage.end, policy, looped):
                return


def _ahead_turns(canvas: Canvas, policy: Policy, looped: Looped, steps: int) -> Iterator[Turn]:
    """Yield passes that decide positions of several blocks (d3LLM, arXiv:2601.07568).

    A pass decides positions from the first unfinished block to a last block. Before each pass, the
    next block becomes the last block if at least the share ``next_block`` of the last block is
    decided. If the policy stops at end tokens, all generated positions after the first end token
    become end tokens.
    """
    tokens, undecided, wanted = canvas.tokens, canvas.undecided, canvas.undecided.copy()
    uncached = replace(policy, cache="none")
    blocks = [(stage.first, stage.last) for stage in plan(wanted, uncached, looped, steps)]
    whole, last, passes = Span(0, len(tokens), "drop"), 0, 0
    spans = _AheadSpans([first for first, _ in blocks], len(tokens), policy)
    while undecided.any():
        start = next(i for i, block in enumerate(blocks) if undecided[slice(*block)].any())
        if last < start:
            last = start
        elif 1 - undecided[slice(*blocks[last])].mean() >= policy.next_block:
            last = min(last + 1, len(blocks) - 1)
        first, end = blocks[start][0], blocks[last][1]
        positions = first + np.flatnonzero(undecided[first:end])
        span = whole if policy.cache == "none" else spans.next_span(start)
        yield Turn(first, end, passes, passes, span, positions, 1, first_end=blocks[start][1])
        passes += 1
        ends = np.flatnonzero(wanted & ~undecided & np.isin(tokens, looped.eos_token_ids))
        if policy.stop != "none" and len(ends):
            after = wanted & (np.arange(len(tokens)) > ends[0])
            tokens[after], undecided[after] = looped.eos_token_ids[0], False


class _AheadSpans:
    """Chooses the rows of passes that decide positions of several blocks and use a cache (d3LLM).

    The cache contains the keys and values of the prompt and of decided blocks. A block is stored
    ``cache_delay`` passes after the first pass before which all its positions were decided. Until
    then, passes compute the whole canvas. All other passes compute the positions that are not
    cached. A pass computes the whole cache again if its number is a multiple of
    ``refresh_interval``.
    """

    def __init__(self, starts: Sequence[int], length: int, policy: Policy) -> None:
        """``starts`` contains the first position of each block. ``length`` is that of the canvas."""
        self._starts, self._length, self._policy = starts, length, policy
        self._passes = self._cached = 0
        self._is_stored = False
        # The number of the first pass before which the next uncached block was decided. The prompt
        # has the number 0.
        self._decided_at = 0 if starts and starts[0] else None

    def next_span(self, unfinished: int) -> Span:
        """Return the rows of the next pass. All blocks before ``unfinished`` are decided."""
        policy, first = self._policy, self._cached
        self._passes += 1
        is_waiting = False
        for end in self._starts[: unfinished + 1]:
            if end <= self._cached:
                continue
            if self._decided_at is None:
                self._decided_at = self._passes
            is_waiting = self._passes - self._decided_at < policy.cache_delay
            if is_waiting:
                break
            self._cached, self._decided_at = end, None
        interval = policy.refresh_interval
        is_refreshing = is_waiting or (interval > 0 and self._passes % interval == 0)
        if self._cached > first:
            self._is_stored = True
            return Span(first, self._length, "keep")
        if not self._is_stored:
            return Span(0, self._length, "drop")
        return Span(0, self._length, "keep") if is_refreshing else Span(first, self._length, "drop")


def _verified_turns(canvas: Canvas, policy: Policy, looped: Looped) -> Iterator[Turn]:
    """Yield the turns of the commit rule "verify" (self-speculation).

    The first pass is causal. It stores the prompt, and decides the first position. Each block then
    takes two passes over the same rows: the row before the block, and all rows of the block but the
    last. The draft pass predicts a token for each of these positions. It uses the network's low-rank
    updates for draft passes, if there are any. The causal pass stores the
    rows, and predicts the token after each row. The caller decides the positions whose predicted
    tokens equal the drafted tokens, up to and including the first position where the tokens differ.
    The next block starts after these positions.
    """
    tokens, undecided, wanted = canvas.tokens, canvas.undecided, canvas.undecided.copy()
    if not undecided.any():
        return
    length, start = len(undecided), int(undecided.argmax())
    block_length = block_length_of(policy, looped.visible_block, looped.draft_block)
    assert start > 0
    assert undecided[start:].all()
    end, passes, step = start + 1, 0, 0
    stored = Span(0, start, "append")
    yield Turn(start, end, 0, 0, stored, np.array([start]), 1, drafted=np.array([-1]))
    while not _end(canvas, wanted, start, end, policy, looped):
        if not undecided.any():
            return
        start = int(undecided.argmax())
        end = min(start + block_length, length)
        rows = Span(start - 1, end - 1, "append")
        passes, step = passes + 1, step + 1
        if end - start > 1:
            drafts = np.arange(start, end - 1)
            drafting = replace(rows, kept="drop", is_draft=True, is_updated=True)
            yield Turn(start, end, step, passes, drafting, drafts, len(drafts))
            passes += 1
        drafted = np.append(tokens[start : end - 1], -1)
        positions = np.arange(start, end)
        yield Turn(start, end, step, passes, rows, positions, len(positions), drafted=drafted)


def _scored(
    canvas: Canvas, wanted: np.ndarray, stage: Stage, policy: Policy
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the positions that a pass scores, and the field ``standing`` of its turn.

    With ``remask`` "edit", a pass that computes the whole block also scores its decided positions,
    except given ones (LLaDA2.1).
    """
    is_scored = np.zeros(len(wanted), bool)
    is_scored[stage.first : stage.last] = canvas.undecided[stage.first : stage.last]
    is_whole = stage.span.first <= stage.start and stage.end <= stage.span.last
    if policy.remask != "edit" or not is_whole:
        return np.flatnonzero(is_scored), None
    block = slice(stage.start, stage.end)
    is_scored[block] |= wanted[block] & ~canvas.undecided[block]
    positions = np.flatnonzero(is_scored)
    return positions, np.where(canvas.undecided[positions], -1, canvas.tokens[positions])


def _edits(
    canvas: Canvas, wanted: np.ndarray, stage: Stage, policy: Policy, passes: int
) -> Iterator[Turn]:
    """Yield the turns that may edit the tokens of a finished block (LLaDA2.1).

    If a turn changes no token, it is the last turn.
    """
    for step in range(policy.edit_passes if policy.remask == "edit" else 0):
        positions, standing = _scored(canvas, wanted, stage, policy)
        yield Turn(
            stage.start, stage.end, step, passes + step, stage.span, positions, standing=standing
        )
        if not (canvas.tokens[positions] != standing).any():
            return


def _end(
    canvas: Canvas, wanted: np.ndarray, start: int, end: int, policy: Policy, looped: Looped
) -> bool:
    """Return True if the text ends in the block ``[start, end)``.

    This is the case if the policy stops at end tokens, and the block contains a generated end token
    and no undecided position before it. All undecided positions then become end tokens.
    """
    block = slice(start, end)
    is_end = wanted[block] & np.isin(canvas.tokens[block], looped.eos_token_ids)
    if policy.stop == "none" or not is_end[np.cumsum(canvas.undecided[block]) == 0].any():
        return False
    canvas.tokens[canvas.undecided] = looped.eos_token_ids[0]
    canvas.undecided[:] = False
    return True


@dataclass(frozen=True, eq=False)
class Step:
    """A recorded pass: the canvas before it, and the rows that the pass computed and scored.

    The canvas is int64 ``[L]``, and the scored rows are ``[R]``.
    """

    canvas: np.ndarray
    span: Span
    rows: np.ndarray


Walk = Sequence[Step]
"""The recorded passes of one run of the unmasking loop, in order."""


def timestep_count(masked: int, step: int, steps: int, eps: float) -> int:
    """Return how many positions Dream's schedule commits in pass ``step`` of ``steps`` passes.

    ``masked`` is the number of undecided positions before the pass. The last pass commits all
    undecided positions.
    """
    if step >= steps - 1:
        return masked
    # Compute the same numbers as torch.linspace(1, eps, steps + 1) in fp32. Like torch, compute the
    # first half of the numbers from the start, and the second half from the end. The increment is
    # rounded to fp32, and each number is rounded once.
    end, places = np.float32(eps), np.arange(steps + 1)
    increment = float((end - np.float32(1)) / np.float32(steps))
    from_end = float(end) - increment * (steps - places)
    t = np.where(places < (steps + 1) // 2, 1.0 + increment * places, from_end).astype(np.float32)
    return max(1, int(np.float32(masked) * (np.float32(1) - t[step + 1] / t[step])))


def floor_count(masked: int, left: int, steps: int) -> int:
    """Return how many positions RND1's schedule commits in the next pass.

    The block started with ``masked`` undecided positions, of which ``left`` are undecided now.

    After pass k of N, the schedule leaves floor(masked * (N - k) / N) positions masked, computed in
    fp32. In the published code, some passes commit no position. This module skips such passes.
    """
    kept = (np.float32(masked) * (np.arange(steps) / steps).astype(np.float32)).astype(int)
    return left - int(kept[kept < left].max(initial=0))


Word = TypeVar("Word", int, Any)
"""The type of random 32-bit integers: one integer, or an array of uint64."""


def philox(key: int, counter: tuple[Word, Word, Word, Word]) -> tuple[Word, Word, Word, Word]:
    """Compute four random 32-bit integers with Philox4x32-10 (Salmon et al., SC 2011).

    The arguments are a 64-bit key, and a counter of four 32-bit integers. Arrays are processed
    element by element.
    """
    k0, k1, c = key & 0xFFFFFFFF, key >> 32, counter
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = ((p1 >> 32) ^ c[1] ^ k0, p1 & 0xFFFFFFFF, (p0 >> 32) ^ c[3] ^ k1, p0 & 0xFFFFFFFF)
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c


def unit(high: Word, low: Word) -> Any:
    """Convert two random 32-bit integers to a random number, uniform in the open interval (0, 1).

    The number is (a random 52-bit integer plus one half) / 2^52, which a double represents exactly.
    """
    return (((high << 32 | low) >> 12) + 0.5) * 2.0**-52


def random_tokens(
    seed: int, step: int, positions: np.ndarray, vocab_size: int, mask_token_id: int
) -> np.ndarray:
    """Return random tokens, int64 ``[M]``, for positions of a block that starts from random tokens.

    ``step`` is the number of earlier passes over the block. The mask token is never drawn. If
    ``mask_token_id`` is ``vocab_size``, there is no mask token.
    """
    counters = positions.astype(np.uint64)
    high, low, _, _ = philox(seed, (step, counters, 0, 2))
    count = vocab_size - (mask_token_id < vocab_size)
    tokens = (unit(high, low) * count).astype(np.int64)
    found: np.ndarray = tokens + (tokens >= mask_token_id)
    return found


def temperature_of(policy: Policy, step: int, steps: int) -> float:
    """Return the temperature of a pass.

    The pass has the number ``step``, counted from 0. ``steps`` is the number of planned passes.
    With ``temperature_drop``, the temperature is computed in fp32, like DiffusionGemma's code does.
    With ``select`` "argmax", the temperature is 1.
    """
    if policy.select == "argmax":
        return 1.0
    if not policy.temperature_drop:
        return policy.temperature
    share = np.float32(steps - step) / np.float32(steps)
    lowest = np.float32(min(policy.temperature - policy.temperature_drop, 1e30))
    return float(lowest + np.float32(policy.temperature_drop) * share)


def soft_temperature(policy: Policy, step: int, steps: int) -> float:
    """Return the temperature of the soft embeddings that come from a pass.

    It is the pass's temperature, but never 0 or infinite.
    """
    return min(max(temperature_of(policy, step, steps), 1e-30), 1e30)


def temperature_before(policy: Policy, noise_ratio: float, block_length: int) -> float:
    """Return the temperature of the soft embeddings that a pass over a block reads.

    ``noise_ratio`` is the share of random tokens in the block. The function assumes that the share
    falls by the same amount in each pass over the block.
    """
    steps = policy.steps_per_block or block_length
    before = max(0, round((1 - noise_ratio) * steps) - 1)
    return soft_temperature(policy, before, steps)


def random_score(seed: int, step: int, position: int) -> float:
    """Return a random number in (0, 1) that depends only on the arguments.

    ``step`` is the number of earlier passes of the request.
    """
    high, low, _, _ = philox(seed, (step, position, 0, 0))
    return float(unit(high, low))


def gumbels(seed: int, step: int, position: int, vocab_size: int) -> np.ndarray:
    """Return Gumbel noise for sampling, float64 ``[V]``: -ln(-ln u), for a uniform number u.

    The number u depends only on the arguments and on the token.
    """
    pairs = np.arange((vocab_size + 1) // 2, dtype=np.uint64)
    even_high, even_low, odd_high, odd_low = philox(seed, (step, position, pairs, 1))
    u = np.stack((unit(even_high, even_low), unit(odd_high, odd_low)), 1).reshape(-1)[:vocab_size]
    noise: np.ndarray = -np.log(-np.log(u))
    return noise


def random_scores(turn: Turn, policy: Policy) -> np.ndarray:
    """Return random scores, float64 ``[M]``.

    A score depends only on the seed, the pass and the position.
    """
    return np.array(
        [random_score(policy.seed, turn.passes, position) for position in turn.positions.tolist()]
    )


def scored_by(turn: Turn, policy: Policy) -> str:
    """Return the kind of score for a turn.

    The result is ``policy.score``, except that the rules entropy_bound and entropy_threshold always
    use entropies.
    """
    is_entropy = policy.commit in ("entropy_bound", "entropy_threshold")
    return "entropy" if is_entropy else policy.score


LEAST_ENTROPY = 1e-30
"""Entropies nearer to 0 than this count as 0, because fp32 cannot hold much smaller numbers."""


def log_odds_of(fraction: Any) -> Any:
    """Return ln(c / (1 - c)) of the fractions c, float64. Fractions above 1 count as 1."""
    with np.errstate(divide="ignore"):
        return np.log(fraction) - np.log1p(-np.minimum(fraction, 1.0))


def score_of_log_odds(log_odds: Any) -> Any:
    """Return the scores of fractions with these log odds."""
    # atanh(c) is ln((1 + c) / (1 - c)) / 2, and (1 + c) / (1 - c) is 1 + 2 c / (1 - c). Above 40,
    # the 1 does not change the sum.
    small = np.log1p(2 * np.exp(np.minimum(log_odds, 40.0))) / 2
    return np.where(log_odds > 40, (log_odds + np.log(2)) / 2, small)


def score_of(fraction: Any) -> Any:
    """Return the scores of confidences, margins or random numbers.

    A float64 cannot tell 1 - 1e-17 from 1. So the loop keeps a fraction c as the score atanh(c),
    computed from the odds c / (1 - c), and compares it with the score of the threshold. Negative
    margins have negative scores.
    """
    return np.copysign(score_of_log_odds(log_odds_of(np.abs(fraction))), fraction)


def log_odds(logits: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Return ln(p / (1 - p)) for the probabilities p of tokens, float64 ``[M]``.

    ``logits`` is ``[M, V]``, and ``tokens`` contains one token of each row. The odds are computed
    from the sum of the other tokens' exponentials, without a subtraction from 1.
    """
    rows, wide = np.arange(len(tokens)), logits.astype(np.float64)
    own = wide[rows, tokens]
    wide[rows, tokens] = -np.inf
    most = wide.max(-1)
    most[np.isneginf(most)] = 0
    with np.errstate(divide="ignore"):
        found: np.ndarray = own - most - np.log(np.exp(wide - most[:, None]).sum(-1))
    return found


def scores(turn: Turn, logits: np.ndarray, policy: Policy) -> np.ndarray:
    """Return the scores, float64 ``[M]``, of the most likely tokens at a turn's positions.

    A higher score means a surer token. A score is an entropy, or comes from ``score_of``. ``logits``
    ``[M, V]`` exclude the mask token.
    """
    by, odds = scored_by(turn, policy), log_odds(logits, logits.argmax(-1))
    confidences = score_of_log_odds(odds)
    if by == "random":
        found = score_of(random_scores(turn, policy))
    elif by == "confidence":
        found = confidences
    elif by == "margin":
        second, best = np.sort(np.partition(logits, -2, axis=-1)[:, -2:], -1).astype(np.float64).T
        behind = second - best
        with np.errstate(divide="ignore"):
            margin = np.log(-np.expm1(behind)) - np.logaddexp(-odds, behind)
        found = score_of_log_odds(margin)
    else:
        behind = logits.astype(np.float64) - logits.max(-1, keepdims=True)
        weights = np.exp(behind)
        weights[np.arange(len(weights)), logits.argmax(-1)] = 0
        others = weights.sum(-1)
        mean = (weights * np.where(weights > 0, behind, 0)).sum(-1) / (1 + others)
        found = mean - np.log1p(others)
        found[found > -LEAST_ENTROPY] = 0
    return score_edits(turn, found, confidences)


def score_edits(turn: Turn, found: np.ndarray, confidences: np.ndarray) -> np.ndarray:
    """Replace the scores ``found`` of decided positions by the scores of the confidences.

    Edits compare probabilities, whatever the policy's score is. All arrays are float64 ``[M]``.
    """
    return found if turn.standing is None else np.where(turn.standing >= 0, confidences, found)


def choose(score: np.ndarray, policy: Policy, count: int) -> np.ndarray:
    """Choose which undecided positions to commit, bool ``[M]``.

    ``score``, float64 ``[M]``, contains the scores of the positions. Positions are in ascending
    order. ``count`` is the number of positions that the schedule plans for this step. The rules
    static, dynamic, timestep and sequential use ``count``. At least one position is chosen.
    """
    order = np.argsort(-score, kind="stable")
    ranked = score[order]
    count = max(1, min(count, len(score)))
    above = _reach(ranked, policy)
    if policy.commit in ("static", "timestep"):
        taken = count
    elif policy.commit == "sequential":
        order, taken = np.arange(len(score)), count
    elif policy.commit in ("threshold", "entropy_threshold"):
        taken = max(1, int(above.sum()))
    elif policy.commit == "dynamic":
        taken = max(int(above.sum()), count)
    elif policy.commit == "factor":
        taken = 1
        while taken < len(ranked) and ranked[taken] >= score_of(1 - policy.factor / (taken + 2)):
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


def _reach(score: np.ndarray, policy: Policy) -> np.ndarray:
    """Return the positions whose scores reach the threshold, bool ``[M]``."""
    is_entropy = policy.commit == "entropy_threshold"
    limit = -policy.entropy_bound if is_entropy else score_of(policy.threshold)
    found: np.ndarray = score > limit if policy.compare == ">" else score >= limit
    return found


def _choose_ahead(turn: Turn, score: np.ndarray, policy: Policy) -> np.ndarray:
    """Choose positions of several blocks, at least one of them in the first unfinished block.

    With ``compare`` ">=", the position with the highest score always commits, as in d3LLM's code
    for LLaDA. With ``compare`` ">", a position whose score does not reach the threshold commits
    only if it is in the first unfinished block, as in d3LLM's code for Dream.
    """
    is_low = policy.compare == ">" and not _reach(score, policy).any()
    chosen = np.zeros(len(score), bool) if is_low else choose(score, policy, 1)
    in_first = turn.positions < turn.first_end
    if not (chosen & in_first).any():
        chosen[np.argmax(np.where(in_first, score, -np.inf))] = True
    return chosen


def _verified(turn: Turn, guess: np.ndarray) -> np.ndarray:
    """Choose the positions up to and including the first one where drafted and new tokens differ.

    A draft pass chooses no position.
    """
    chosen = np.zeros(len(guess), bool)
    if turn.drafted is not None:
        chosen[: int((guess != turn.drafted).argmax()) + 1] = True
    return chosen


def choose_in(turn: Turn, guess: np.ndarray, score: np.ndarray, policy: Policy) -> np.ndarray:
    """Choose which positions of a turn to commit. Returns bool ``[M]``.

    ``guess`` int64 ``[M]`` contains the token proposed for each position, and ``score`` float64
    ``[M]`` contains the score of this token.
    """
    if policy.commit == "verify":
        return _verified(turn, guess)
    if turn.standing is not None:
        is_edit = turn.standing >= 0
        is_surer = score > score_of(policy.edit_threshold)
        changed: np.ndarray = is_edit & (guess != turn.standing) & is_surer
        if not is_edit.all():
            changed[~is_edit] = choose(score[~is_edit], policy, turn.planned)
        return changed
    if not len(score):
        return np.zeros(0, bool)
    if turn.first_end is not None:
        return _choose_ahead(turn, score, policy)
    if turn.is_forced:
        score = score.copy()
        # Give the first position the score of a prediction with probability 1.
        score[0] = 0.0 if scored_by(turn, policy) == "entropy" else np.inf
    return choose(score, policy, turn.planned)
