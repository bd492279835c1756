"""Schedules the turns of the unmasking loop: which passes run, and which positions they score.

A turn is one pass and the commit after it. The reference loop uses this module. Code that replays
the canvases of a finished run uses it too. The module needs neither torch nor a denoiser.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from dlm_export.network.commit_rules import floor_count, timestep_count
from dlm_export.network.pass_plan import (
    FULL_CACHES,
    Looped,
    Span,
    Stage,
    block_length_of,
    blocks_of,
    even_count,
    plan,
)
from dlm_runtime.policy import Policy


@dataclass(eq=False)
class Canvas:
    """A canvas between two passes: token ids, int64 ``[L]``, and undecided positions, bool ``[L]``.

    At an undecided position, the token id is an input of the denoiser, but not a result. If a
    network changes the length of canvases, its loop replaces the arrays.
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
      earlier passes for the same positions. With ``commit`` "verify", 0. Random numbers depend on
      ``passes``.
    - ``step``: the number of earlier passes for the same positions. With ``commit`` "verify", 0.
    - ``positions``: the scored positions, int64 ``[M]``, in ascending order. The array is empty if
      the pass only fills the cache.
    - ``planned``: the number of positions that the schedule commits in this step.
    - ``is_forced``: True if the first position must commit, even with a low score.
    - ``standing``: if the turn may edit decided tokens, the current tokens of the positions, int64
      ``[M]``, and -1 for undecided positions.
    - ``drafted``: the drafted tokens of the positions, int64 ``[M]``, if the turn verifies them. The
      last position has no drafted token, and contains -1.
    - ``drafts``: the positions after ``positions`` whose tokens the pass drafts, int64 ``[N]``, if
      it also verifies tokens. The drafts are used only if the turn decides all of ``positions``.
    - ``started``: if the turn decides positions of several blocks, the unfinished blocks ``(first,
      last, is_forced)``. In a forced block, at least one position commits.
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
    drafts: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    started: tuple[tuple[int, int, bool], ...] = ()
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
    made = _turns(canvas, policy, looped, steps, scaffold)
    if not looped.blocks_after_prompt:
        yield from made
        return
    prompt = int(canvas.undecided.argmax())
    for turn in made:
        yield replace(turn, span=replace(turn.span, prompt=prompt))


def _turns(
    canvas: Canvas,
    policy: Policy,
    looped: Looped,
    steps: int,
    scaffold: Callable[[int, int], None],
) -> Iterator[Turn]:
    """Yield the turns of ``turns``. Their spans contain no ``prompt``."""
    is_shifted = looped.draft_block is not None and looped.shift
    if policy.commit == "verify" or (policy.commit == "longest_prefix" and is_shifted):
        start = int(canvas.undecided.argmax())
        if canvas.undecided.any():
            assert start > 0
            assert canvas.undecided[start:].all()
            make = _verified_turns if policy.commit == "verify" else _prefix_turns
            yield from make(canvas, policy, looped, start)
        return
    if policy.next_block < 1:
        yield from _ahead_turns(canvas, policy, looped, steps, scaffold)
        return
    if looped.resizes:
        yield from _resized_turns(canvas, policy, looped, steps)
        return
    tokens, undecided, wanted = canvas.tokens, canvas.undecided, canvas.undecided.copy()
    scaffold(0, len(tokens))
    passes, step, masked = 0, 0, 0
    before: Stage | None = None
    for stage in plan(wanted, policy, looped, steps):
        if before is None or (before.first, before.last) != (stage.first, stage.last):
            step = 0
            masked = int(undecided[stage.first : stage.last].sum())
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
            planned = _planned(policy, stage, step, masked, left)
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


def _planned(policy: Policy, stage: Stage, step: int, masked: int, left: int) -> int:
    """Return how many positions the schedule commits in pass ``step`` of a stage.

    The stage started with ``masked`` undecided positions, of which ``left`` are undecided now.
    """
    if policy.commit == "timestep":
        return timestep_count(left, step, stage.steps, policy.timestep_eps)
    if policy.schedule == "floor":
        return floor_count(masked, left, stage.steps)
    shared = stage.last - stage.first if policy.schedule == "block" else masked
    return even_count(shared, step, stage.steps) if step < stage.steps else 1


def _resized_turns(canvas: Canvas, policy: Policy, looped: Looped, steps: int) -> Iterator[Turn]:
    """Yield the turns of a network that changes the length of its canvases (DreamOn).

    Each pass computes the whole canvas, which is one block. The caller may replace the arrays of
    ``canvas`` between two turns.
    """
    stages = plan(canvas.undecided, policy, looped, steps)
    assert policy.cache == "none", "tokens move, so their keys and values cannot be cached"
    assert len(stages) <= 1, "tokens move, so a canvas is one block"
    masked = int(canvas.undecided.sum())
    for stage in stages:
        for step in itertools.count():
            positions, length = np.flatnonzero(canvas.undecided), len(canvas.tokens)
            if not len(positions):
                return
            span = Span(0, length, "drop")
            stage = replace(stage, last=length)
            planned = _planned(policy, stage, step, masked, len(positions))
            yield Turn(stage.first, length, step, step, span, positions, planned, steps=stage.steps)


def _ahead_turns(
    canvas: Canvas,
    policy: Policy,
    looped: Looped,
    steps: int,
    scaffold: Callable[[int, int], None],
) -> Iterator[Turn]:
    """Yield passes that decide positions of several blocks (D2F, arXiv:2508.09192, and d3LLM,
    arXiv:2601.07568).

    A pass decides positions from the first unfinished block to a last block. Before each pass, the
    next block becomes the last block if at least the share ``next_block`` of the last block is
    decided, and no block up to the last one contains an end token. With full attention, all
    generated positions after the first end token become end tokens.

    With block-causal attention and a cache, a pass also stores the blocks that were finished since
    the pass before. With ``shift`` 1, it computes the row before its first block again.
    """
    tokens, undecided, wanted = canvas.tokens, canvas.undecided, canvas.undecided.copy()
    blocks = [(first, last) for first, last, _ in blocks_of(wanted, policy, looped, steps)]
    spans = _AheadSpans([first for first, _ in blocks], len(tokens), policy)
    start = last = passes = cached = 0
    scaffold(0, len(tokens))
    while start < len(blocks):
        block = slice(*blocks[start])
        scaffold(block.start, block.stop)
        is_done = not undecided[block].any()
        if is_done or policy.stop == "early-eos":
            if _end(canvas, wanted, block.start, block.stop, policy, looped):
                return
            if is_done:
                start += 1
                continue
        has_end = policy.stop != "none" and _ends(canvas, wanted, looped)[: blocks[last][1]].any()
        shares = [1 - undecided[slice(*each)].mean() for each in blocks[start : last + 1]]
        if last < start:
            last = start
        elif shares[-1] >= policy.next_block and not has_end:
            last = min(last + 1, len(blocks) - 1)
        later = zip(shares, blocks[start + 1 : last + 1], strict=False)
        started = [
            (*each, policy.force_next < 1 and share >= policy.force_next)
            for share, each in later
            if undecided[slice(*each)].any()
        ]
        end = blocks[last][1]
        if policy.cache == "none":
            span = Span(0, len(tokens), "drop")
        elif looped.visible_block is None:
            span = spans.next_span(start)
        else:
            stored = max(0, block.start - looped.shift)
            span = Span(cached, end, "append" if stored > cached else "drop")
            cached = stored
        positions = block.start + np.flatnonzero(undecided[block.start : end])
        yield Turn(
            *(block.start, end, passes, passes, span, positions, 1),
            started=((block.start, block.stop, True), *started),
        )
        passes += 1
        ends = np.flatnonzero(_ends(canvas, wanted, looped))
        if policy.stop != "none" and looped.visible_block is None and len(ends):
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


def _verified_turns(canvas: Canvas, policy: Policy, looped: Looped, start: int) -> Iterator[Turn]:
    """Yield the turns of the commit rule "verify" (self-speculation).

    The first pass is causal. It stores the prompt, and decides the first position. Each block then
    takes two passes over the same rows: the row before the block, and all rows of the block but the
    last. The draft pass predicts a token for each of these positions. It uses the network's low-rank
    updates for draft passes, if there are any. The causal pass stores the rows, and predicts the
    token after each row. The caller decides the positions whose predicted tokens equal the drafted
    tokens, up to and including the first position where the tokens differ. The next block starts
    after these positions.

    With causal drafts (``shift`` 1), one pass verifies a block and drafts the next one.
    ``_drafting_turn`` describes it.
    """
    tokens, undecided, wanted = canvas.tokens, canvas.undecided, canvas.undecided.copy()
    length = len(undecided)
    block_length = block_length_of(policy, looped.visible_block, looped.draft_block)
    end = start + 1
    stored = Span(0, start, "append")
    yield Turn(start, end, 0, 0, stored, np.array([start]), 1, drafted=np.array([-1]))
    drafts = 0
    while not _end(canvas, wanted, start, end, policy, looped):
        if not undecided.any():
            return
        start = int(undecided.argmax())
        if looped.shift:
            drafts = drafts if start == end else 0  # wrong tokens make all later drafts useless
            turn = _drafting_turn(tokens, start, drafts, block_length)
            yield turn
            end, drafts = turn.end, len(turn.drafts)
            continue
        end = min(start + block_length, length)
        rows = Span(start - 1, end - 1, "append")
        if end - start > 1:
            positions = np.arange(start, end - 1)
            drafting = Span(rows.first, rows.last, "drop", True, True)
            yield Turn(start, end, 0, 0, drafting, positions, len(positions))
        drafted = np.append(tokens[start : end - 1], -1)
        positions = np.arange(start, end)
        yield Turn(start, end, 0, 0, rows, positions, len(positions), drafted=drafted)


def _drafting_turn(tokens: np.ndarray, start: int, drafts: int, block_length: int) -> Turn:
    """Return a turn that verifies ``drafts`` tokens from ``start`` on, and drafts the next block.

    All rows of the pass are causal. The first rows contain the last decided token and the drafted
    tokens. They predict the positions of the block, which ends one position after the last drafted
    token. The other rows are draft rows, and contain random tokens or mask tokens. They draft all
    positions of the next block but its last one.
    """
    end = start + drafts + 1
    next_end = min(end + block_length, len(tokens))
    found = np.arange(end, next_end - 1)
    first_draft = end - 1 if len(found) else None
    return Turn(
        start,
        end,
        0,
        0,
        Span(start - 1, end - 1 + len(found), "append", draft_rows=first_draft),
        np.arange(start, end),
        end - start,
        drafted=np.append(tokens[start : end - 1], -1),
        drafts=found,
    )


def _prefix_turns(canvas: Canvas, policy: Policy, looped: Looped, start: int) -> Iterator[Turn]:
    """Yield the turns of SDLM (arXiv:2509.24007), whose draft passes decide the text.

    A causal pass stores the prompt, except its last token. All other passes are draft passes. The
    first drafted row is the last decided token, and the others are mask tokens. Each row predicts
    the next position. The caller decides the first positions of the block, and the next block
    starts after them. The next draft pass starts with causal rows, which store the decided tokens
    before its first drafted row.
    """
    undecided, wanted = canvas.undecided, canvas.undecided.copy()
    length = len(undecided)
    block_length = block_length_of(policy, looped.visible_block, looped.draft_block)
    stored, passes, end = start - 1, 0, min(start + block_length, length)
    if stored:
        yield Turn(start, end, 0, passes, Span(0, stored, "append"), np.zeros(0, np.int64))
        passes += 1
    while True:
        span = Span(stored, end - 1, "append", True, draft_rows=start - 1)
        yield Turn(start, end, 0, passes, span, np.arange(start, end))
        stored, passes = start - 1, passes + 1
        if _end(canvas, wanted, start, end, policy, looped) or not undecided.any():
            return
        start = int(undecided.argmax())
        end = min(start + block_length, length)


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
    """Yield the turns that edit a finished block (LLaDA2.1), until one changes no token."""
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
    is_end = _ends(canvas, wanted, looped)[block]
    if policy.stop == "none" or not is_end[np.cumsum(canvas.undecided[block]) == 0].any():
        return False
    canvas.tokens[canvas.undecided] = looped.eos_token_ids[0]
    canvas.undecided[:] = False
    return True


def _ends(canvas: Canvas, wanted: np.ndarray, looped: Looped) -> np.ndarray:
    """Return the generated positions that contain end tokens, bool ``[L]``."""
    is_decided = wanted & ~canvas.undecided
    found: np.ndarray = is_decided & np.isin(canvas.tokens, looped.eos_token_ids)
    return found
