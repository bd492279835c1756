"""Canvases as a denoiser sees them: text whose positions are masked independently, at stratified mask ratios.

The forward process of masked diffusion (arXiv:2502.09992, section 2.1) at fixed ratios, so that every bucket is covered.
"""

from __future__ import annotations

import numpy as np

MASK_RATIOS = tuple(round(0.05 + 0.1 * i, 2) for i in range(10))  # one a bucket of width 0.1


def mask_independently(
    tokens: np.ndarray, mask_ratio: float, mask_token_id: int, rng: np.random.Generator, protected: int = 0
) -> np.ndarray:
    """A copy of ``tokens`` ``[L]`` with each position behind the first ``protected`` masked with this probability.

    At least one position is masked. Raises ValueError if the ratio is outside (0, 1] or nothing is left to mask.
    """
    if not 0 < mask_ratio <= 1:
        raise ValueError(f"mask_ratio {mask_ratio} is outside (0, 1]")
    if protected >= len(tokens):
        raise ValueError(f"no position is left to mask: {protected} of {len(tokens)} are protected")
    is_masked = rng.random(len(tokens)) < mask_ratio
    is_masked[:protected] = False
    if not is_masked.any():
        is_masked[rng.integers(protected, len(tokens))] = True
    return np.where(is_masked, mask_token_id, tokens)


def random_tokens(length: int, vocab_size: int, excluded: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """``length`` ids drawn evenly from the vocabulary without the excluded ones, int64."""
    allowed = np.setdiff1d(np.arange(vocab_size), np.array(excluded, dtype=np.int64))
    return rng.choice(allowed, size=length).astype(np.int64)
