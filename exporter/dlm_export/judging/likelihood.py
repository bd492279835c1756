"""Estimates how likely a bundle's denoiser finds a given continuation of a text.

A masked diffusion model defines a lower bound of the log-likelihood (LLaDA, arXiv:2502.09992, equation
6). For a set of masked tokens, the bound needs the log-probabilities of these tokens, divided by the
share of masked tokens. It is the mean over all numbers of masked tokens and over all their places. With
block-causal attention, the bound of a continuation is the sum of the bounds of its blocks, where each
block sees the blocks before it (BD3-LM, arXiv:2503.09573). If blocks consist of one token, the bound is
the log-likelihood itself.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from dlm_runtime import Bundle
from dlm_runtime.errors import RequestError


def log_likelihood(
    bundle: Bundle, context: Sequence[int], target: Sequence[int], samples: int, seed: int
) -> float:
    """Return the bound of ln p(``target`` | ``context``), in nats.

    Args:
        bundle: A bundle whose denoiser ``check_likelihood`` accepts.
        context: The token ids before the continuation. At least one if the denoiser's shift is 1.
        target: The token ids of the continuation.
        samples: Number of masks for each block of the continuation, 1 or more. If a block has no
            more masks than this, all of them are used, and the bound is exact.
        seed: Seed of the masks.
    """
    tokens, shift = [*context, *target], bundle.shift
    if _is_autoregressive(bundle):
        rows = range(len(context) - 1, len(tokens) - 1)
        return float(_ln_p(bundle.logits(tokens, rows), target).sum())
    rng = np.random.default_rng(seed)
    size, total, first = bundle.visible_block or len(tokens), 0.0, len(context)
    while first < len(tokens):
        last = min(len(tokens), first - first % size + size)
        for weight, masked in _masks(last - first, samples, rng):
            places, canvas = [first + at for at in masked], tokens[:last]
            for place in places:
                canvas[place] = bundle.mask_token_id
            logits = bundle.logits(canvas, [place - shift for place in places])
            total += weight * float(_ln_p(logits, [tokens[place] for place in places]).sum())
        first = last
    return total


def check_likelihood(bundle: Bundle) -> None:
    """Raise RequestError with the reason if the bound is not defined for the bundle's denoiser."""
    loop = bundle.manifest["loop"]
    reason = None
    if _is_autoregressive(bundle):
        return
    if loop.get("noise", "absorbing") != "absorbing":
        reason = "the denoiser starts from random tokens, and has no mask token"
    elif "delete_token_id" in loop:
        reason = "the denoiser inserts and deletes tokens, so a text has no fixed positions"
    elif bundle.blocks_after_prompt:
        reason = "the attention blocks of the denoiser depend on where the prompt ends"
    if reason is not None:
        raise RequestError(f"log-likelihoods are not defined for this bundle: {reason}")


def _is_autoregressive(bundle: Bundle) -> bool:
    """Return True if each row sees the tokens up to its own, and predicts the next token."""
    return bundle.visible_block == 1 and bundle.shift == 1


def _masks(
    length: int, samples: int, rng: np.random.Generator
) -> Iterator[tuple[float, Sequence[int]]]:
    """Yield weights and masked places, 0..length-1. The bound is the weighted sum of ln p."""
    if 2**length - 1 <= samples:
        for count in range(1, length + 1):
            weight = 1 / (count * math.comb(length, count))
            for places in itertools.combinations(range(length), count):
                yield weight, places
        return
    start = rng.random()
    for sample in range(samples):
        # The counts are spread evenly over 1..length, which lowers the variance.
        count = 1 + int((start + sample / samples) % 1 * length)
        yield length / (count * samples), rng.permutation(length)[:count].tolist()


def _ln_p(logits: np.ndarray, wanted: Sequence[int]) -> np.ndarray:
    """Return ln p of the token ``wanted[r]`` in each row r of the logits ``[R, V]``."""
    rows = logits.astype(np.float64)
    rows -= rows.max(axis=-1, keepdims=True)
    found: np.ndarray = rows[np.arange(len(rows)), wanted] - np.log(np.exp(rows).sum(axis=-1))
    return found
