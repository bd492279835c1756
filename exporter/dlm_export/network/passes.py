"""The plan of a request's passes: what each one computes, what it reads from the cache, and what
becomes of its rows.

Both loops read one plan, this one here and the native one in ``decode/plan.cc``. Caches: ``none``
runs the whole canvas every pass; ``prefix`` and ``dual`` (Fast-dLLM, arXiv:2505.22618) are
approximations for full attention; ``block`` is exact for block-causal networks (SDAR,
arXiv:2510.06303): finished blocks are stored, and nothing is read but them. ``block-dual``
(Fast-dLLM v2, arXiv:2509.26328) is ``dual`` inside of a block.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from dlm_runtime.policy import Policy

FULL_CACHES = ("prefix", "dual")
"""Caches of full attention, which a block-causal network does not take."""


class Looped(Protocol):
    """What a loop must know of a denoiser; ``visible_block``: see ``NetworkSpec``."""

    @property
    def shift(self) -> int: ...
    @property
    def visible_block(self) -> int | None: ...
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class Span:
    """The rows ``[first, last)`` of a canvas that a pass computes; the keys and values of all
    others come from the cache.

    What the cache does not hold is not seen. ``kept`` says what becomes of the pass's own keys and
    values: they are dropped ("drop"), put in place of those that are stored ("keep"), or put behind
    those of ``[0, first)``, all others being forgotten ("append").
    """

    first: int
    last: int
    kept: str

    def is_whole(self, length: int) -> bool:
        """Whether these are all rows of a canvas of this length, so that its pass reads no cache."""
        return (self.first, self.last) == (0, length)

    @property
    def is_stored(self) -> bool:
        return self.kept != "drop"


@dataclass(frozen=True)
class Stage:
    """Passes over one span: one, or as many as it takes to decide ``[first, last)``
    (``is_repeated``).

    ``kind``: "prefill" fills a cache before a block is decided, "store" after one, "denoise" is any
    other. ``steps`` are planned for the positions. ``start`` and ``end`` are those of the block
    that they belong to, which is done behind a stage that ``is_last``.
    """

    span: Span
    kind: str
    is_repeated: bool
    first: int
    last: int
    steps: int
    start: int
    end: int
    is_last: bool


def block_length_of(policy: Policy, visible_block: int | None) -> int:
    """Tokens of a policy's blocks on a network of this ``visible_block``; 0: the whole generation
    is one block.
    """
    return policy.block_length or visible_block or 0


def plan(undecided: np.ndarray, policy: Policy, looped: Looped, steps: int = 0) -> list[Stage]:
    """The passes that fill the undecided positions of a canvas, bool ``[L]``, block by block.

    Blocks are counted from the first undecided position on; where attention is block-causal, from
    position 0 on, so that the end of what is given may share the first one. ``steps``: see
    ``turns``.
    """
    if not undecided.any():
        return []
    length, origin = len(undecided), int(undecided.argmax())
    block_length = block_length_of(policy, looped.visible_block) or length - origin
    if looped.visible_block is not None:
        origin -= origin % block_length
    starts = range(origin, length, block_length)
    shares = (
        transfer_counts(steps, len(starts))
        if steps
        else [policy.steps_per_block or block_length] * len(starts)
    )
    blocks = [
        (start, min(start + block_length, length), share)
        for start, share in zip(starts, shares, strict=True)
        if undecided[start : start + block_length].any()
    ]
    if looped.visible_block is None:
        return list(_full_stages(blocks, policy, length))
    return list(_block_causal_stages(blocks, undecided, policy, looped.shift))


_Block = tuple[int, int, int]  # its start, its end, and the passes planned for it


def _full_stages(blocks: list[_Block], policy: Policy, length: int) -> Iterator[Stage]:
    """Over a cache, a block's opening pass runs the whole canvas; or with ``refresh``, from the
    second block on, the rows from that many tokens before the block, and at least those that have
    been decided since they were stored.
    """
    before: int | None = None  # start of the block decided before
    for start, end, steps in blocks:
        of_block = functools.partial(
            Stage, first=start, last=end, steps=steps, start=start, end=end
        )
        if policy.cache == "none":
            yield of_block(Span(0, length, "drop"), "denoise", is_repeated=True, is_last=True)
            continue
        last = end if policy.cache == "dual" else length
        opening = Span(0, length, "keep")
        if policy.refresh and before is not None:
            opening = Span(max(0, min(start - policy.refresh, before)), last, "keep")
        yield of_block(opening, "prefill", is_repeated=False, is_last=False)
        yield of_block(Span(start, last, "drop"), "denoise", is_repeated=True, is_last=True)
        before = start


def _block_causal_stages(
    blocks: list[_Block], undecided: np.ndarray, policy: Policy, shift: int
) -> Iterator[Stage]:
    """Before a block is decided, one pass stores what is finished before it, or that and the block
    as it is, which it opens (``store=open``). Without a cache nothing is stored.

    The row before a block lies in that pass. A denoiser that predicts the next position (``shift``)
    decides the block's first one there, with a cache and without. Where a block has parts
    (``block-dual``), a pass over the block opens each of them, whose other passes run it alone over
    what that pass made of the rest.
    """
    length = len(undecided)
    has_cache, stored = policy.cache != "none", 0
    has_parts = policy.cache == "block-dual" and bool(policy.sub_block_length)
    for number, (start, end, steps) in enumerate(blocks):
        size = policy.sub_block_length or end - start
        firsts = range(start, end, size)
        shares = [max(1, share) for share in transfer_counts(steps, len(firsts))]
        once = functools.partial(Stage, is_repeated=False, start=start, end=end, is_last=False)
        if has_cache and stored < start:
            kind = "store" if number else "prefill"
            opened = min(start + size, end)
            if policy.store == "open" and undecided[start:opened].any():
                opening = Span(stored, end, "append")
                yield once(opening, kind, first=start, last=opened, steps=shares[0])
            else:
                storing = Span(stored, start, "append")
                yield once(storing, kind, first=start, last=start + shift, steps=1)
        elif shift and start and not has_cache:
            whole = Span(0, length, "drop")
            yield once(whole, "denoise", first=start, last=start + shift, steps=1)
        kept = "append" if policy.store == "reuse" else "drop"
        span = Span(start, end, kept) if has_cache else Span(0, length, "drop")
        for first, share in zip(firsts, shares, strict=True):
            last = min(first + size, end)
            if has_parts and undecided[first:last].any():
                opening = Span(start, end, "append")
                yield once(opening, "prefill", first=first, last=last, steps=share)
            # A sub-block's first position is predicted by the row before it, which is then one of
            # the span.
            now = Span(max(start, first - shift), last, "drop") if has_parts else span
            yield Stage(now, "denoise", True, first, last, share, start, end, last == end)
        stored = end if policy.store == "reuse" else start


def transfer_counts(masked: int, steps: int) -> list[int]:
    """Split ``masked`` positions over ``steps`` as evenly as integers allow, larger counts first.

    Raises ValueError if ``steps < 1``. The schedule of LLaDA (arXiv:2502.09992, algorithm 4).
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, not {steps}")
    return [masked // steps + (k < masked % steps) for k in range(steps)]
