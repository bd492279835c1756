"""Plans the passes of a request: the rows that each pass computes, takes from the cache and stores.

In this module, a row is a position of the canvas. A cached row is the keys and values of a
position. The native loop makes the same plan in ``decode/pass_plan.cc``. There are five cache modes:

- ``none`` uses no cache. Every pass computes the whole canvas.
- ``prefix`` and ``dual`` (Fast-dLLM, arXiv:2505.22618) approximate full attention.
- ``block`` is exact for block-causal networks (SDAR, arXiv:2510.06303). The cache stores only
  finished blocks.
- ``block-dual`` (Fast-dLLM v2, arXiv:2509.26328) works like ``block``, and applies ``dual`` within
  each block.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from dlm_export.network.spec import NetworkSpec
from dlm_runtime.policy import Policy

FULL_CACHES = ("prefix", "dual")
"""Cache modes for full attention. These modes cannot be used with block-causal networks."""


class Looped(Protocol):
    """The fields of a network that the unmasking loop needs.

    ``NetworkSpec`` explains ``visible_block``, ``draft_block`` and ``blocks_after_prompt``.
    """

    @property
    def shift(self) -> int: ...
    @property
    def visible_block(self) -> int | None: ...
    @property
    def draft_block(self) -> int | None: ...
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...
    @property
    def resizes(self) -> bool: ...
    @property
    def blocks_after_prompt(self) -> bool: ...


@dataclass(frozen=True)
class Span:
    """The canvas rows ``[first, last)`` that a pass computes.

    The pass takes the keys and values of all other rows from the cache. The pass does not attend to
    rows that are missing in the cache. ``kept`` says what happens to the keys and values that the
    pass computes:

    - "drop" discards these keys and values.
    - "keep" overwrites the cached rows at the same positions.
    - "append" keeps the cached rows of ``[0, first)``, adds the new rows, and discards all other
      rows.

    If ``is_draft`` is true, the pass is a draft pass, in which the rows from the position
    ``draft_rows`` on, or all rows, attend to each other. Only networks with a ``draft_block`` have
    draft passes. All other passes and rows are causal. If ``is_updated`` is true, the pass uses the
    network's low-rank updates for draft passes, if there are any.

    With causal drafts, ``is_draft`` is false, and the rows from the position ``draft_rows`` on are
    draft rows, which use the low-rank updates. If ``draft_rows`` is ``None``, all rows are ordinary.

    In a network with ``blocks_after_prompt``, ``prompt`` is the number of tokens of the prompt.
    """

    first: int
    last: int
    kept: str
    is_draft: bool = False
    is_updated: bool = False
    draft_rows: int | None = None
    prompt: int | None = None

    def ids(self, network: NetworkSpec) -> np.ndarray:
        """Return the position ids of the pass, int64 ``[T]``.

        The length of the longest canvas is added to the position ids of draft rows. If a draft pass
        uses low-rank updates, this length is added twice. With causal drafts, it is added once. With
        ``prompt``, it is added n times in block n after the prompt.
        """
        found, is_updated = np.arange(self.first, self.last), self.is_draft and self.is_updated
        if self.prompt is not None:
            assert network.visible_block is not None
            blocks = (found - self.prompt) // network.visible_block + 1
            found += blocks.clip(min=0) * network.max_canvas_length
            return found
        if self.is_draft or self.draft_rows is not None:
            times = 1 + (is_updated and network.has_draft_updates)
            found[self.draft_start - self.first :] += times * network.max_canvas_length
        return found

    @classmethod
    def of_canvas(cls, network: NetworkSpec, canvas: np.ndarray) -> Span:
        """Return the span of a pass over a whole canvas ``[L]``, outside the loop.

        With ``blocks_after_prompt``, the prompt ends before the first mask token.
        """
        if not network.blocks_after_prompt:
            return cls(0, len(canvas), "drop")
        masks = np.flatnonzero(canvas == network.mask_token_id)
        return cls(0, len(canvas), "drop", prompt=int(masks[0]) if len(masks) else len(canvas))

    @property
    def draft_start(self) -> int:
        """The position of the first draft row, in a pass with draft rows."""
        return self.first if self.draft_rows is None else self.draft_rows

    @property
    def is_stored(self) -> bool:
        return self.kept != "drop"

    @classmethod
    def of_draft(cls, network: NetworkSpec, start: int, last: int, is_updated: bool) -> Span:
        """Return the span of a pass that drafts a block and stores no keys and values.

        With causal drafts, the row ``start`` contains a decided token, and is not a draft row.
        """
        is_causal = network.has_causal_drafts
        first_draft = start + 1 if is_causal else None
        return cls(start, last, "drop", not is_causal, is_updated, first_draft)


@dataclass(frozen=True)
class Stage:
    """A stage: one or more passes over the same span.

    - ``kind``: "prefill" fills a cache before a block is decided, "store" stores a finished block,
      and "denoise" decides positions.
    - ``first``, ``last``: the positions to score and decide.
    - ``awaited``: the pass is repeated until all positions in ``[first, awaited)`` are decided. If
      ``awaited`` equals ``first``, the stage has one pass.
    - ``steps``: the number of passes planned for these positions.
    - ``start``, ``end``: the block to which the positions belong.
    - ``is_last``: True if this stage is the last stage of the block.
    """

    span: Span
    kind: str
    first: int
    last: int
    awaited: int
    steps: int
    start: int
    end: int
    is_last: bool

    @property
    def is_repeated(self) -> bool:
        return self.awaited > self.first


def shift_of(looped: Looped, *, is_draft: bool) -> int:
    """Return the distance between a position and the row that predicts it, in one pass.

    In a network with draft passes, all passes but draft passes predict the next position.
    ``is_draft`` is true for draft passes.
    """
    return looped.shift if looped.draft_block is None or is_draft else 1


def block_length_of(
    policy: Policy, visible_block: int | None, draft_block: int | None = None
) -> int:
    """Return the number of tokens that a policy decides in one block.

    ``visible_block`` and ``draft_block`` are properties of the network. If the policy sets no block
    length, the result is ``draft_block``, or ``visible_block`` if the network has no draft passes.
    A result of 0 means that the whole generation is one block.
    """
    return policy.block_length or draft_block or visible_block or 0


def plan(undecided: np.ndarray, policy: Policy, looped: Looped, steps: int = 0) -> list[Stage]:
    """Plan the passes that fill the undecided positions, bool ``[L]``, block by block.

    ``turns.turns`` explains ``steps``. Loops whose blocks depend on the tokens do not use this
    function (see ``turns.turns``).
    """
    blocks = blocks_of(undecided, policy, looped, steps)
    if looped.visible_block is None:
        return list(_full_stages(blocks, policy, len(undecided)))
    return list(_block_causal_stages(blocks, undecided, policy, looped))


Block = tuple[int, int, int]  # start of the block, end of the block, number of planned passes


def blocks_of(undecided: np.ndarray, policy: Policy, looped: Looped, steps: int = 0) -> list[Block]:
    """Return the blocks that contain undecided positions. ``turns.turns`` explains ``steps``.

    With full or causal attention, and with ``blocks_after_prompt``, the first block starts at the
    first undecided position. With other block-causal attention, blocks start at multiples of the
    block length, so the first block may begin with tokens of the prompt.
    """
    if not undecided.any():
        return []
    length, origin = len(undecided), int(undecided.argmax())
    block_length = block_length_of(policy, looped.visible_block, looped.draft_block)
    block_length = block_length or length - origin
    if (looped.visible_block or 1) > 1 and not looped.blocks_after_prompt:
        origin -= origin % block_length
    starts = range(origin, length, block_length)
    shares = (
        transfer_counts(steps, len(starts))
        if steps
        else [policy.steps_per_block or block_length] * len(starts)
    )
    return [
        (start, min(start + block_length, length), share)
        for start, share in zip(starts, shares, strict=True)
        if undecided[start : start + block_length].any()
    ]


def _full_stages(blocks: list[Block], policy: Policy, length: int) -> Iterator[Stage]:
    """Yield the stages for full attention.

    With a cache, the first pass of each block computes the whole canvas. If ``refresh`` is set,
    only the first pass of the first block computes the whole canvas. The first pass of a later
    block starts ``refresh`` tokens before the block. If the previous block starts even earlier, the
    pass starts with the previous block. The cached rows of the previous block are outdated, because
    they were stored before its positions were decided.
    """
    before: int | None = None  # start of the block that was decided before this block
    for start, end, steps in blocks:
        of_block = functools.partial(
            Stage, first=start, last=end, steps=steps, start=start, end=end
        )
        if policy.cache == "none":
            yield of_block(Span(0, length, "drop"), "denoise", awaited=end, is_last=True)
            continue
        last = end if policy.cache == "dual" else length
        opening = Span(0, length, "keep")
        if policy.refresh and before is not None:
            opening = Span(max(0, min(start - policy.refresh, before)), last, "keep")
        yield of_block(opening, "prefill", awaited=start, is_last=False)
        yield of_block(Span(start, last, "drop"), "denoise", awaited=end, is_last=True)
        before = start


def _block_causal_stages(
    blocks: list[Block], undecided: np.ndarray, policy: Policy, looped: Looped
) -> Iterator[Stage]:
    """Yield the stages for block-causal attention.

    Before a block is decided, one pass stores the keys and values of the finished blocks. With
    ``store=open``, this pass also computes the new block and decides some of its positions. Without
    a cache, no pass stores keys and values.

    A denoiser with ``shift`` 1 predicts the token after each row. The row before a block therefore
    predicts the first token of the block. The pass that stores the finished blocks computes this
    row. In a network with draft passes, the passes that store finished blocks are causal, so the
    row before a block predicts the first token of the block too. All other passes of such a network
    are draft passes.

    With ``block-dual``, blocks are divided into sub-blocks. The first pass of each sub-block
    computes the whole block, and stores the keys and values of the block. With ``shift`` 1, the
    first pass is repeated until the first position of the sub-block is decided. All later passes
    compute only the sub-block, and use the stored keys and values of the other rows.
    """
    length, is_draft = len(undecided), looped.draft_block is not None
    # If blocks start from random tokens, causal passes do not decide any positions.
    shift = 0 if policy.remask == "noise" else 1 if is_draft else looped.shift
    has_cache, stored = policy.cache != "none", 0
    has_parts = policy.cache == "block-dual" and bool(policy.sub_block_length)
    for number, (start, end, steps) in enumerate(blocks):
        size = policy.sub_block_length or end - start
        firsts = range(start, end, size)
        shares = [max(1, share) for share in transfer_counts(steps, len(firsts))]
        early = functools.partial(Stage, start=start, end=end, is_last=False)
        if has_cache and stored < start:
            kind = "store" if number else "prefill"
            opened = min(start + size, end)
            if policy.store == "open" and undecided[start:opened].any():
                opening = Span(stored, end, "append")
                yield early(opening, kind, first=start, last=opened, awaited=start, steps=shares[0])
            else:
                storing = Span(stored, start, "append")
                yield early(storing, kind, first=start, last=start + shift, awaited=start, steps=1)
        elif shift and start and not has_cache:
            whole = Span(0, length, "drop")
            yield early(whole, "denoise", first=start, last=start + shift, awaited=start, steps=1)
        kept = "append" if policy.store == "reuse" else "drop"
        span = Span(start, end, kept, is_draft) if has_cache else Span(0, length, "drop")
        for first, share in zip(firsts, shares, strict=True):
            last = min(first + size, end)
            if has_parts and undecided[first:last].any():
                opening = Span(start, end, "append")
                # The row before the sub-block predicts the sub-block's first position.
                yield early(
                    opening, "prefill", first=first, last=last, awaited=first + shift, steps=share
                )
            now = Span(first, last, "drop") if has_parts else span
            yield Stage(now, "denoise", first, last, last, share, start, end, last == end)
        stored = end if policy.store == "reuse" else start


def transfer_counts(masked: int, steps: int) -> list[int]:
    """Split ``masked`` positions over ``steps`` as evenly as integers allow, larger counts first.

    The counts follow the schedule of LLaDA (arXiv:2502.09992, algorithm 4). Raises ValueError if
    ``steps < 1``.
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, not {steps}")
    return [even_count(masked, k, steps) for k in range(steps)]


def even_count(masked: int, step: int, steps: int) -> int:
    """Return the count of one step in ``transfer_counts``. Steps are counted from 0."""
    return masked // steps + (step < masked % steps)
