"""Compares the predictions of denoisers at randomly masked positions of held-out text.

For a denoiser without a mask token, random tokens take the place of mask tokens, in one block of
the text. The mask ratio is then the share of random tokens in the block (the noise ratio).

A denoiser with draft passes and a mask token predicts the masked positions of one block in a draft
pass. Two more kinds of passes are compared for such a denoiser (see ``Kind``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from dlm_calibration import metrics
from dlm_calibration.samples import Sample
from dlm_calibration.states import (
    MASK_RATIOS,
    fill_masks,
    mask_draft_block,
    mask_share,
    noise_block,
    pad_to_blocks,
)
from dlm_export.judging.sides.side import DraftPass, JudgeError, Side, View, finite_logits
from dlm_export.network.loop_random import temperature_before
from dlm_export.network.pass_plan import block_length_of, shift_of
from dlm_runtime.policy import Policy

Kind = Literal["masked", "draft", "causal"]
"""What a canvas compares.

- ``masked``: predictions at masked positions, at one of ``MASK_RATIOS``. For a denoiser with
  ``has_shifted_drafts``, all positions of a block except the first are masked, as in its loop.
- ``draft``: the drafts of self-speculation. A draft pass with low-rank updates, if there are any,
  predicts all positions of a block except the first.
- ``causal``: the predictions of the next token in a causal pass over the whole text. In
  self-speculation, such passes decide the text.
"""


@dataclass(frozen=True, eq=False)
class Masked:
    """The predictions of two denoisers on the same canvases, with one row per position.

    For each row, ``sample`` contains the index of the sample, and ``kind`` a ``Kind``. ``ratio``
    contains the index of the mask ratio, or -1 if there is none. ``weight`` contains the
    factor by which a row's loss must be multiplied. For each kind, the sum of the multiplied losses
    is an upper bound of the text's negative log-likelihood, unless all factors are 0.
    """

    rows: metrics.Rows
    sample: np.ndarray
    ratio: np.ndarray
    weight: np.ndarray
    kind: np.ndarray

    def of(self, kind: Kind) -> Masked:
        chosen = self.kind == kind
        columns = [getattr(self, name)[chosen] for name in COLUMNS]
        return Masked(self.rows.take(chosen), *columns)


COLUMNS = ("sample", "ratio", "weight", "kind")
"""The fields of ``Masked`` that have one element per row."""


@dataclass(frozen=True, eq=False)
class MaskedCanvas:
    """A sample after masking, with the positions to predict and their true tokens.

    ``Masked`` explains ``ratio``, ``weight`` and ``kind``. The weight is 0 for draft passes, whose
    loss gives no bound of the likelihood. ``View`` explains ``draft``.
    """

    sample: int
    ratio: int
    canvas: np.ndarray
    positions: np.ndarray
    truth: np.ndarray
    weight: float
    draft: DraftPass | None = None
    kind: Kind = "masked"

    @property
    def view(self) -> View:
        return View(self.canvas, self.positions, self.draft)


def all_masked(
    samples: Sequence[Sample], side: Side, *, policy: Policy, seed: int
) -> list[MaskedCanvas]:
    """Mask every sample with each of ``MASK_RATIOS``. Raises the errors of ``masked_canvases``."""
    limit = side.max_canvas_length
    return [
        seen
        for number, sample in enumerate(samples)
        for seen in masked_canvases(sample, number, side, policy=policy, limit=limit, seed=seed)
    ]


def masked_canvases(
    sample: Sample,
    number: int,
    side: Side,
    *,
    policy: Policy,
    limit: int,
    seed: int,
    most: int | None = None,
) -> Iterator[MaskedCanvas]:
    """Mask a sample once with each of ``MASK_RATIOS``, on canvases of at most ``limit`` tokens.

    With ``most``, the sample is masked with only so many ratios, which are evenly spaced. Where they
    begin depends on ``number``, so that neighbouring samples get all ratios.

    For a denoiser that verifies drafts, the function also yields one canvas of each other ``Kind``.

    End tokens are appended to a completion until its last block is full, as in training and in
    decoding. Positions after the completion's first end token are masked too, but the predictions
    at these positions are not compared. A mask ratio is skipped if it would mask none of the
    compared positions.

    ``policy`` gives the block length, and the temperatures for self-conditioning. The sample's index
    ``number`` and the seed determine the masks. Raises JudgeError if there is no position to
    compare, or no block length for random tokens.
    """
    block_length = block_length_of(policy, side.visible_block, side.draft_block)
    if block_length < 1 and not side.has_mask_token:
        raise JudgeError("the preset has no block length: set block_length")
    if block_length < 2 and (side.is_verifying or side.has_shifted_drafts):
        raise JudgeError(
            "the preset decides one token a block, so it makes no draft passes: choose another preset"
        )
    # With a shift of 1, the denoiser cannot predict position 0.
    start, end = max(sample.prompt_length, shift_of(side, is_draft=False)), len(sample.tokens)
    if sample.answer is not None:
        end = start + len(metrics.until_end(sample.tokens[start:].tolist(), side.eos_token_ids))
    if start >= end:
        raise JudgeError(f"sample {number + 1}: nothing to predict after its prompt. Remove it.")
    canvas = pad_to_blocks(sample, next(iter(side.eos_token_ids), None), block_length, limit)
    rng = np.random.default_rng([seed, number])
    count = len(MASK_RATIOS)
    indices = sorted(
        {(number + i * count // most) % count for i in range(most)} if most else range(count)
    )
    if side.is_verifying or side.has_shifted_drafts:
        yield from _speculated(sample, number, side, canvas, block_length, rng, start, end, indices)
        return
    for index in indices:
        mask_ratio = MASK_RATIOS[index]
        if not side.has_mask_token:
            noised, first, is_noised = noise_block(
                canvas, mask_ratio, side.vocab_size, block_length, rng, start, end
            )
            positions = np.flatnonzero(is_noised[:end])
            if len(positions):
                ratio = float(is_noised[first:].mean())
                draft = DraftPass(first, temperature_before(policy, ratio, block_length))
                truth = canvas[positions]
                yield MaskedCanvas(number, index, noised, positions, truth, 0.0, draft)
            continue
        masked = mask_share(canvas, mask_ratio, side.mask_token_id, rng, start)
        is_masked = masked == side.mask_token_id
        positions = start + np.flatnonzero(is_masked[start:end])
        if len(positions):
            weight = (len(canvas) - start) / int(is_masked.sum()) / len(indices)
            yield MaskedCanvas(number, index, masked, positions, canvas[positions], weight)


def _speculated(
    sample: Sample,
    number: int,
    side: Side,
    canvas: np.ndarray,
    block_length: int,
    rng: np.random.Generator,
    start: int,
    end: int,
    indices: Sequence[int],
) -> Iterator[MaskedCanvas]:
    """Yield the canvases of every ``Kind`` for a denoiser with draft passes and a mask token.

    If draft passes decide its text, the only kind is "masked".
    """
    ratios = [
        *((i, MASK_RATIOS[i]) for i in indices),
        (-1, 1.0),
    ]  # the drafts of self-speculation come last
    if side.has_shifted_drafts:
        ratios = [(-1, 1.0)] * len(indices)
    elif side.shift == 1:  # the drafts are causal
        ratios = ratios[-1:]
    for index, mask_ratio in ratios:
        masked, first = mask_draft_block(
            canvas, mask_ratio, side.mask_token_id, block_length, rng, start, end
        )
        positions = np.flatnonzero(masked[:end] == side.mask_token_id)
        if len(positions):
            truth, is_speculated = canvas[positions], index < 0 and side.is_verifying
            if not side.has_mask_token:
                masked = fill_masks(masked, side.vocab_size, rng)
            draft = DraftPass(first, is_updated=is_speculated)
            kind: Kind = "draft" if is_speculated else "masked"
            yield MaskedCanvas(number, index, masked, positions, truth, 0.0, draft, kind)
    if not side.is_verifying:
        return
    positions = np.arange(start, end)
    text = sample.tokens[:end]
    yield MaskedCanvas(number, -1, text, positions, text[positions], 1.0, kind="causal")


def compare_masked(
    reference: Side,
    others: Sequence[Side],
    canvases: Sequence[MaskedCanvas],
    on_done: Callable[[], None] = lambda: None,
) -> list[Masked]:
    """Compare each denoiser in ``others`` with the reference on the same canvases.

    ``on_done`` is called once per sample.
    """
    found: list[list[metrics.Rows]] = [[] for _ in others]
    for number, seen in enumerate(canvases):
        theirs = finite_logits(reference, *seen.view)
        for parts, other in zip(found, others, strict=True):
            ours = finite_logits(other, *seen.view)
            parts.append(metrics.compare_rows(theirs, ours, seen.truth, reference.mask_token_id))
        if number + 1 == len(canvases) or canvases[number + 1].sample != seen.sample:
            on_done()
    counts = [len(seen.positions) for seen in canvases]
    columns = [np.repeat([getattr(seen, name) for seen in canvases], counts) for name in COLUMNS]
    return [Masked(metrics.Rows.join(parts), *columns) for parts in found]
