"""Many requests under the unmasking loop at once: each step computes the next pass of all of them,
a layer at a time.

A layer is read once a step, and the rows of all passes go through its matrices together; attention
is each pass's own. What is held is a layer, the keys and values of the requests under way, and one
step's hidden states. Equal to ``reference``, request by request, as far as sums of floats in
another order allow.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from dlm_export.network.denoiser import Block, Past
from dlm_export.network.layered import BATCH_TOKENS, Head, Layered, MemoryLimitError
from dlm_export.network.reference import Run, outside, store
from dlm_export.network.spec import NetworkSpec
from dlm_export.network.turns import Canvas
from dlm_runtime.policy import Policy

HELD = 250_000_000
"""Parameters up to which all layers are held while requests run, a gigabyte in fp32, if that is
half of the memory given.
"""
SCORED_ROWS = 256  # whose logits are held at a time


class _Course:
    """One request under way: what it has come to after each pass, and its cache."""

    def __init__(self, network: NetworkSpec, canvas: Canvas, policy: Policy) -> None:
        self.run = Run(network, canvas, policy)
        self.canvases = [canvas]
        self.cache: list[Past | None] = [None] * len(network.layers)
        self.span = self.run.advance()

    def past(self, i: int) -> Past | None:
        """Layer ``i``'s cached keys and values of the rows that the pass does not compute."""
        assert self.span is not None
        return outside(self.cache[i], self.span)

    def keep(self, i: int, keys: Tensor, values: Tensor) -> None:
        """Take a pass's keys and values ``[1, Hkv, T, D]`` of layer ``i``, if it stores them."""
        assert self.span is not None
        if self.span.is_stored:
            self.cache[i] = store(self.cache[i], (keys, values), self.span)

    def commit(self, logits: Tensor) -> None:
        self.run.commit(logits)
        self.canvases.append(self.run.canvas)
        self.span = self.run.advance()
        if self.span is None:
            self.cache = []

    def left(self) -> int:
        """Positions that passes to come have to decide."""
        return 0 if self.span is None else int(np.count_nonzero(self.run.canvas.undecided))


@torch.no_grad()
def courses(
    layered: Layered,
    canvases: Sequence[Canvas],
    policy: Policy,
    memory_bytes: int | None = None,
    on_decided: Callable[[int], None] = lambda positions: None,
) -> Iterator[list[Canvas]]:
    """Of each canvas, in their order, what it was before the first pass and after each one.

    ``on_decided`` is told after each step how many positions fewer are left.

    As many go on together as ``BATCH_TOKENS`` hold, and as have room for their keys and values in
    half of ``memory_bytes`` (None: any); one at least. Raises MemoryLimitError if the longest has
    none in all of it.
    """
    assert not policy.cfg_scale, "guidance takes two canvases a pass"
    held = None
    if layered.network.parameter_count() <= min(
        HELD, math.inf if memory_bytes is None else memory_bytes // 8
    ):
        held = [layered.block(i) for i in range(len(layered.network.layers))]
    most = BATCH_TOKENS
    if policy.cache != "none" and memory_bytes is not None:
        longest = max((len(canvas.tokens) for canvas in canvases), default=0)
        needed = longest * cache_bytes(layered)
        if needed > memory_bytes:
            raise MemoryLimitError(
                f"--memory: keys and values of a canvas of {longest:,} tokens take {needed:,} bytes, {memory_bytes:,} are "
                f"left beside a layer. Allow {needed - memory_bytes:,} bytes more, or take shorter samples."
            )
        most = min(most, memory_bytes // 2 // cache_bytes(layered))
    head, norm = layered.head(), layered.final_norm()
    waiting = deque(_Course(layered.network, canvas, policy) for canvas in canvases)
    under_way: deque[_Course] = deque()
    while waiting or under_way:
        step = [course for course in under_way if course.span is not None]
        tokens = sum(len(course.run.tokens) for course in step)
        while waiting and (not step or tokens + len(waiting[0].run.tokens) <= most):
            under_way.append(waiting.popleft())
            if under_way[-1].span is not None:
                step.append(under_way[-1])
                tokens += len(step[-1].run.tokens)
        if step:
            before = sum(course.left() for course in step)
            _make_passes(layered, held, norm, head, step)
            on_decided(before - sum(course.left() for course in step))
        while under_way and under_way[0].span is None:
            yield under_way.popleft().canvases


def cache_bytes(layered: Layered) -> int:
    """Of keys and values, a token."""
    return layered.network.cache_bytes(layered.dtype.itemsize)


def _make_passes(
    layered: Layered,
    held: Sequence[Block] | None,
    norm: torch.nn.Module,
    head: Head,
    step: Sequence[_Course],
) -> None:
    """The next pass of every course, and its commit."""
    spans = [(course.span.first, course.span.last) for course in step if course.span is not None]
    ids = [
        torch.from_numpy(c.run.tokens[first:last])
        for c, (first, last) in zip(step, spans, strict=True)
    ]
    x = layered.embed(torch.cat(ids).unsqueeze(0))
    for i in range(len(layered.network.layers)):
        block = layered.block(i) if held is None else held[i]
        x, present = block(x, *layered.packed(i, spans, [course.past(i) for course in step]))
        parts = (torch.split(kind, [len(own) for own in ids], 2) for kind in present)
        for course, keys, values in zip(step, *parts, strict=True):
            course.keep(i, keys, values)
        del block  # before the next one is read into its memory
    starts = itertools.accumulate(map(len, ids), initial=0)
    scored: list[_Course] = []
    rows: list[Tensor] = []
    for course, start in zip(step, starts, strict=False):
        scored.append(course)
        rows.append(course.run.rows + start)
        if sum(map(len, rows)) >= SCORED_ROWS or course is step[-1]:
            logits = head(norm(x[0, torch.cat(rows).to(x.device)]))
            for one, own in zip(
                scored, torch.split(logits, [len(own) for own in rows]), strict=True
            ):
                one.commit(own)
            scored, rows = [], []
