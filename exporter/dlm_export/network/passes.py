"""Plans the passes of a request: the rows each pass computes, reads from the cache and stores.

The native loop makes the same plan in ``decode/plan.cc``. Cache modes: ``none`` runs the whole
canvas in every pass. ``prefix`` and ``dual`` (Fast-dLLM, arXiv:2505.22618) approximate full
attention. ``block`` is exact for block-causal networks (SDAR, arXiv:2510.06303): it stores finished
blocks only. ``block-dual`` (Fast-dLLM v2, arXiv:2509.26328) applies ``dual`` within a block.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from dlm_runtime.policy import Policy

FULL_CACHES = ("prefix", "dual")
"""Cache modes for full attention; block-causal networks do not support them."""


class Looped(Protocol):
    """Network fields that a loop needs; for ``visible_block`` see ``NetworkSpec``."""

    @property
    def shift(self) -> int: ...
    @property
    def visible_block(self) -> int | None: ...
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class Span:
    """The canvas rows ``[first, last)`` that a pass computes.

    The pass reads the keys and values of all other rows from the cache; rows not in the cache are
    invisible to it. ``kept`` says what happens to the pass's own keys and values. "drop" discards
    them. "keep" overwrites the stored rows at the same positions. "append" keeps the stored rows of
    ``[0, first)``, adds the new ones and discards the rest.
    """

    first: int
    last: int
    kept: str

    def is_whole(self, length: int) -> bool:
        """True if the span covers a whole canvas of this length, so that its pass reads no cache."""
        return (self.first, self.last) == (0, length)

    @property
    def is_stored(self) -> bool:
        return self.kept != "drop"


@dataclass(frozen=True)
class Stage:
    """One or more passes over the same span.

    ``is_repeated``: passes repeat until ``[first, last)`` is decided; otherwise there is one pass.
    ``kind`` is "prefill" (fill a cache before deciding a block), "store" (store a finished block)
    or "denoise". ``steps`` is the number of passes planned for the positions. ``[start, end)`` is
    their block, and ``is_last`` marks the block's last stage.
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
    """Block length of a policy, for a network with this ``visible_block``; 0 means one block for
    the whole generation.
    """
    return policy.block_length or visible_block or 0


def plan(undecided: np.ndarray, policy: Policy, looped: Looped, steps: int = 0) -> list[Stage]:
    """Plan the passes that fill the undecided positions, bool ``[L]``, block by block.

    Blocks start at the first undecided position. For block-causal attention they start at position
    0, so the first block may begin with prompt tokens. ``steps``: see ``turns``.
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


_Block = tuple[int, int, int]  # start, end, planned passes


def _full_stages(blocks: list[_Block], policy: Policy, length: int) -> Iterator[Stage]:
    """Stages for full attention.

    With a cache, the first pass of a block runs the whole canvas. With ``refresh``, from the second
    block on, it runs only the rows from ``refresh`` tokens before the block; it always includes the
    rows decided since they were last stored.
    """
    before: int | None = None  # start of the previously decided block
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
    """Stages for block-causal attention.

    Before a block is decided, one pass stores the finished blocks. With ``store=open`` that pass
    also covers the new block and decides its first positions. Without a cache nothing is stored.

    A denoiser with ``shift`` 1 predicts the next position, so a block's first token is predicted by
    the row before the block, which that storing pass computes. With ``block-dual``, a pass over the
    whole block opens each sub-block; further passes compute that sub-block only and read the other
    rows from the opening pass.
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
            # The row before a sub-block predicts its first position, so the span includes that row.
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
