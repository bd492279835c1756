"""Runs the unmasking loop for many requests together, and loads the denoiser one layer at a time.

Each step computes the next pass of every running request. A step loads each layer once, and
multiplies the layer's matrices with the tokens of all passes together. Attention is computed for
each pass separately. A run needs memory for one layer, for the keys and values of the running
requests, and for the hidden states of one step. Each request gets the same result as with
``reference``, except that sums are rounded in a different order.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from dlm_calibration.states import Draft, State
from dlm_export.network.denoiser import Block, Past
from dlm_export.network.layered import BATCH_TOKENS, Head, Layered, MemoryLimitError
from dlm_export.network.loop_turns import Canvas, reserve_end
from dlm_export.network.reference import Run, outside, store
from dlm_export.network.spec import NetworkSpec
from dlm_runtime.policy import Policy

HELD = 250_000_000
"""All layers of a denoiser stay in memory if it has at most this many parameters (1 GB in fp32),
and if the layers need at most half of the memory limit.
"""
SCORED_ROWS = 256  # number of rows of logits that are in memory at a time


class Course:
    """A running request, with the request's cache.

    ``canvases`` contains the canvas before the first pass, and the canvas after every pass. With
    self-conditioning, ``conditioning`` contains the soft embeddings for the next draft pass.
    ``drafts`` contains the state of each draft pass so far, if the denoiser has draft passes. Soft
    embeddings are rounded to fp16 in the states, to save memory.
    """

    def __init__(self, network: NetworkSpec, canvas: Canvas, policy: Policy) -> None:
        canvas = reserve_end(canvas, policy, network.eos_token_ids)
        self.run = Run(network, canvas, policy)
        self.canvases = [canvas]
        self.cache: list[Past | None] = [None] * len(network.layers)
        self.conditioning: Tensor | None = None
        self.drafts: list[State] = []
        self._first = int(canvas.undecided.argmax())
        self._is_conditioned = network.conditioning is not None
        self._advance()

    def _advance(self) -> None:
        self.span = self.run.advance()
        if self.span is None or not self.span.is_draft or self.run.is_first:
            self.conditioning = None
        if self.span is None:
            return
        start, end, is_updated = self.span.draft_start, self.span.last, self.span.is_updated
        if not self.span.is_draft:
            if self.span.draft_rows is None:
                return
            start, is_updated = start - 1, True
        read = None if self.conditioning is None else self.conditioning.half().numpy()
        is_open = self.run.is_noised if self.run.policy.remask == "noise" else self.run.undecided
        ratio = float(is_open[start:end].mean())
        canvas, draft = self.run.tokens[:end].copy(), Draft(start, read, is_updated)
        self.drafts.append(State(canvas, "trajectory", ratio, self._first, draft))

    def past(self, i: int) -> Past | None:
        """Return the cached keys and values of layer ``i`` to which the next pass attends."""
        assert self.span is not None
        return outside(self.cache[i], self.span)

    def keep(self, i: int, keys: Tensor, values: Tensor) -> None:
        """Store keys and values ``[1, Hkv, T, D]`` of layer ``i``, if ``span.is_stored``."""
        assert self.span is not None
        if self.span.is_stored:
            self.cache[i] = store(self.cache[i], (keys, values), self.span)

    def commit(self, logits: Tensor, head: Head) -> None:
        assert self.span is not None
        if self._is_conditioned and self.span.is_draft:
            scale = self.run.network.embedding.scale
            self.conditioning = head.soft_embedding(logits, self.run.temperature, scale)
        self.run.commit(logits)
        self.canvases.append(self.run.canvas)
        self._advance()
        if self.span is None:
            self.cache = []

    def left(self) -> int:
        """Return the number of positions that are still undecided."""
        return 0 if self.span is None else int(np.count_nonzero(self.run.canvas.undecided))


@torch.no_grad()
def courses(
    layered: Layered,
    canvases: Sequence[Canvas],
    policy: Policy,
    memory_bytes: int | None = None,
    on_decided: Callable[[int], None] = lambda positions: None,
) -> Iterator[Course]:
    """Run all requests, and yield them in order when they are finished.

    After each step, ``on_decided`` is called with the number of positions that the step decided.

    Requests run together if their tokens fit into ``BATCH_TOKENS``, and their keys and values fit
    into half of ``memory_bytes``. If ``memory_bytes`` is ``None``, memory is not limited. At least
    one request runs at a time. Raises MemoryLimitError if the keys and values of the longest canvas
    need more than ``memory_bytes``.
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
                f"--memory: keys and values of a canvas of {longest:,} tokens need {needed:,} bytes; {memory_bytes:,} remain "
                f"after one layer. Allow {needed - memory_bytes:,} more bytes, or use shorter samples."
            )
        most = min(most, memory_bytes // 2 // cache_bytes(layered))
    head, end = layered.head(), layered.end()
    waiting = deque(Course(layered.network, canvas, policy) for canvas in canvases)
    under_way: deque[Course] = deque()
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
            _make_passes(layered, held, end, head, step)
            on_decided(before - sum(course.left() for course in step))
        while under_way and under_way[0].span is None:
            yield under_way.popleft()


def cache_bytes(layered: Layered) -> int:
    """Return the bytes of one token's keys and values."""
    return layered.network.cache_bytes(layered.dtype.itemsize)


def _make_passes(
    layered: Layered,
    held: Sequence[Block] | None,
    end: torch.nn.Module,
    head: Head,
    step: Sequence[Course],
) -> None:
    """Run the next pass of every request, and commit tokens."""
    places = [course.span.ids(layered.network) for course in step if course.span is not None]
    ids = [
        torch.from_numpy(c.run.tokens[c.span.first : c.span.last])
        for c in step
        if c.span is not None
    ]
    positions = torch.from_numpy(np.concatenate(places))
    conditioning = None
    if layered.network.conditioning is not None:
        parts = [
            torch.zeros(len(own), layered.network.hidden_size)
            if course.conditioning is None
            else course.conditioning
            for course, own in zip(step, ids, strict=True)
        ]
        conditioning = torch.cat(parts).unsqueeze(0)
    x = layered.embed(torch.cat(ids).unsqueeze(0), positions.unsqueeze(0), conditioning)
    for i in range(len(layered.network.layers)):
        block = layered.block(i) if held is None else held[i]
        x, present = block(x, *layered.packed(i, ids, places, [course.past(i) for course in step]))
        new = (torch.split(kind, [len(own) for own in ids], 2) for kind in present)
        for course, keys, values in zip(step, *new, strict=True):
            course.keep(i, keys, values)
        del block  # free the block before the next block is loaded into the same memory
    starts = itertools.accumulate(map(len, ids), initial=0)
    scored: list[Course] = []
    rows: list[Tensor] = []
    for course, start in zip(step, starts, strict=False):
        scored.append(course)
        rows.append(course.run.rows + start)
        if sum(map(len, rows)) >= SCORED_ROWS or course is step[-1]:
            logits = head(end(x[0, torch.cat(rows).to(x.device)]))
            for one, own in zip(
                scored, torch.split(logits, [len(own) for own in rows]), strict=True
            ):
                one.commit(own, head)
            scored, rows = [], []
