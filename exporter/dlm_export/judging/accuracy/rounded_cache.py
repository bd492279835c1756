"""Measures how much accuracy a bundle loses if its cache stores rounded keys and values.

All other accuracy measurements use full passes without a cache, so they do not include the loss
from a rounded cache. This module first fills a cache with a full pass over a canvas. It then
predicts the masked positions block by block, with one pass per block. Each pass reads keys and
values from the cache. If the kind of cache is ``dual``, the pass reads the keys and values of all
positions outside the block. If the kind is ``prefix``, or ``block`` in a block-causal network, the
pass reads the keys and values of all positions before the block.

Torch predicts every canvas twice: once with a rounded cache, and once with an unrounded cache. The
two predictions differ only because of the rounding. The parity check makes sure that the bundle
rounds in the same way as torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from dlm_calibration.metrics import Frontier, summarise
from dlm_calibration.samples import Sample
from dlm_export import families
from dlm_export.judging.accuracy.frontier import meet_within, predict_commitment
from dlm_export.judging.accuracy.masked import all_masked, compare_masked
from dlm_export.judging.sides.bundle import BundlePredictor
from dlm_export.judging.sides.layerwise import SweptPredictor, ViewKey, shown_source, view_key
from dlm_export.judging.sides.prompts import new_tokens
from dlm_export.judging.sides.side import DraftPass, View, rows_of
from dlm_export.network.layered import Layered
from dlm_export.network.pass_plan import FULL_CACHES, Span, block_length_of
from dlm_export.network.spec import NetworkSpec
from dlm_export.network.walks import Step, Walk, Walked
from dlm_export.sources import Source
from dlm_export.workplace import Workplace
from dlm_runtime import Bundle, Policy


class CachedPredictor(SweptPredictor):
    """A torch denoiser that fills a cache with a full pass, and then predicts with this cache."""

    def __init__(self, layered: Layered, cache_dtype: str, policy: Policy) -> None:
        """``policy`` determines the kind of cache and the block length."""
        super().__init__(layered, f"{policy.cache} cache in {cache_dtype}")
        self._policy, self._cache_dtype = policy, cache_dtype
        self._walked: list[list[torch.Tensor]] = []
        self._passes: dict[
            ViewKey, tuple[int, int]
        ] = {}  # maps a canvas and its rows to the index of a walk, and the walk's number of passes

    def see(self, views: Sequence[View]) -> None:
        wanted = {
            view_key(canvas, rows): (canvas, rows)
            for canvas, rows in ((view.canvas, rows_of(self, view.positions)) for view in views)
        }
        made = [self._walk(canvas, rows) for canvas, rows in wanted.values()]
        self._passes = {
            key: (number, len(walk))
            for number, (key, walk) in enumerate(zip(wanted, made, strict=True))
        }
        walked = Walked(self.layered, made, self._cache_dtype)
        for i in range(len(self.layered.network.layers)):
            block = self.layered.block(i)
            walked.through(i, block)
            del block  # free the memory before the next block is read
        self._walked = walked.features()

    def logits(
        self, canvas: np.ndarray, rows: np.ndarray, draft: DraftPass | None = None
    ) -> np.ndarray:
        """Implements ``Side.logits``. The canvas and rows must have been passed to ``see``."""
        walk, steps = self._passes[view_key(canvas, rows)]
        return np.concatenate([self._logits(self._walked[walk][step]) for step in range(1, steps)])

    def _walk(self, canvas: np.ndarray, rows: np.ndarray) -> Walk:
        """Plan a pass that fills the cache, and one for each block with some of ``rows``."""
        length, size = len(canvas), block_length_of(self._policy, self.visible_block) or len(canvas)
        whole = Span.of_canvas(self.layered.network, canvas)
        origin = int(rows[0]) if self.visible_block is None else whole.prompt or 0
        numbers = (rows - origin) // size
        walk = [Step(canvas, replace(whole, kept="keep"), rows[:0])]
        for number in np.unique(numbers):
            first = max(0, int(origin + number * size))  # the last row of a prompt may be scored
            last = min(first + size, length) if self._policy.cache == "dual" else length
            span = replace(whole, first=first, last=last)
            walk.append(Step(canvas, span, rows[numbers == number]))
        return walk


def caches_of(network: NetworkSpec) -> Sequence[str]:
    """Return the kinds of cache that a decoding loop can use with this network."""
    return FULL_CACHES if network.visible_block is None else ("block",)


def judge_cache(
    source: Source,
    bundle: Bundle,
    samples: Sequence[Sample],
    cache_dtype: str,
    policy: Policy,
    seed: int,
    on_done: Callable[[], None],
    workplace: Workplace,
) -> dict[str, Any]:
    """Measure how much accuracy a bundle loses if its cache has the type ``cache_dtype``.

    The caller writes the result to accuracy.json. The result contains one entry for each kind of
    cache in ``caches_of``. In each entry, ``masked`` is the loss at randomly masked positions, like
    ``Judgement.overall``. ``frontier`` is the loss at positions that a decoding run of ``bundle``
    may commit, like ``Judgement.frontier``.

    ``on_done`` is called once per sample and kind of cache. Raises DlmError.
    """
    network, found = source.network, {}
    reference = shown_source(source, "fp32", torch.float32, workplace)
    layered = families.layered(source.parameters, network, torch.float32, workplace.device)
    limit = network.max_canvas_length
    masked = all_masked(samples, reference, policy=policy, seed=seed)
    for cache in caches_of(network):
        loop = policy.with_fields({"cache": cache})
        side = BundlePredictor(bundle, "met")
        room = new_tokens(samples, loop, network, bundle)
        runs = meet_within(side, list(enumerate(samples)), loop, room, limit, passes=len(masked))
        states = [(run.number, state) for run in runs for state in run.deciding]
        views = [
            *(seen.view for seen in masked),
            *(state.view for _, state in states),
        ]
        candidate = CachedPredictor(layered, cache_dtype, loop)
        reference.see(views)
        candidate.see(views)
        (rows,) = compare_masked(reference, [candidate], masked, on_done)
        frontier = Frontier(network.mask_token_id)
        for number, state in states:
            theirs, ours = (
                predict_commitment(each, state, loop) for each in (reference, candidate)
            )
            frontier.add(number, state.mask_ratio, theirs, ours)
        overall = summarise(rows.rows, rows.sample, len(samples), seed)
        found[cache] = {"masked": overall, "frontier": frontier.as_dict()}
    return {"cache_dtype": cache_dtype, "samples": len(samples), **found}
