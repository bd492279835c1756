"""Random numbers, random tokens and temperatures of the unmasking loop."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np

from dlm_runtime.policy import Policy

Word = TypeVar("Word", int, Any)
"""The type of random 32-bit integers: one integer, or an array of uint64."""


def philox(key: int, counter: tuple[Word, Word, Word, Word]) -> tuple[Word, Word, Word, Word]:
    """Compute four random 32-bit integers with Philox4x32-10 (Salmon et al., SC 2011).

    The arguments are a 64-bit key, and a counter of four 32-bit integers. Arrays are processed
    element by element.
    """
    k0, k1, c = key & 0xFFFFFFFF, key >> 32, counter
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = ((p1 >> 32) ^ c[1] ^ k0, p1 & 0xFFFFFFFF, (p0 >> 32) ^ c[3] ^ k1, p0 & 0xFFFFFFFF)
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c


def unit(high: Word, low: Word) -> Any:
    """Convert two random 32-bit integers to a random number, uniform in the open interval (0, 1).

    The number is (a random 52-bit integer plus one half) / 2^52, which a double represents exactly.
    """
    return (((high << 32 | low) >> 12) + 0.5) * 2.0**-52


def random_tokens(
    seed: int, step: int, positions: np.ndarray, vocab_size: int, mask_token_id: int
) -> np.ndarray:
    """Return random tokens, int64 ``[M]``, for positions of a block that starts from random tokens.

    ``step`` is the number of earlier passes over the block. The mask token is never drawn. If
    ``mask_token_id`` is ``vocab_size``, there is no mask token.
    """
    counters = positions.astype(np.uint64)
    high, low, _, _ = philox(seed, (step, counters, 0, 2))
    count = vocab_size - (mask_token_id < vocab_size)
    tokens = (unit(high, low) * count).astype(np.int64)
    found: np.ndarray = tokens + (tokens >= mask_token_id)
    return found


def random_score(seed: int, step: int, position: int) -> float:
    """Return a random number in (0, 1) that depends only on the arguments.

    ``step`` is the number of earlier passes of the request.
    """
    high, low, _, _ = philox(seed, (step, position, 0, 0))
    return float(unit(high, low))


def gumbels(seed: int, step: int, position: int, vocab_size: int) -> np.ndarray:
    """Return Gumbel noise for sampling, float64 ``[V]``: -ln(-ln u), for a uniform number u.

    The number u depends only on the arguments and on the token.
    """
    pairs = np.arange((vocab_size + 1) // 2, dtype=np.uint64)
    even_high, even_low, odd_high, odd_low = philox(seed, (step, position, pairs, 1))
    u = np.stack((unit(even_high, even_low), unit(odd_high, odd_low)), 1).reshape(-1)[:vocab_size]
    noise: np.ndarray = -np.log(-np.log(u))
    return noise


def temperature_of(policy: Policy, step: int, steps: int) -> float:
    """Return the temperature of a pass.

    The pass has the number ``step``, counted from 0. ``steps`` is the number of planned passes.
    With ``temperature_drop``, the temperature is computed in fp32, like DiffusionGemma's code does.
    With ``select`` "argmax", the temperature is 1.
    """
    if policy.select == "argmax":
        return 1.0
    if not policy.temperature_drop:
        return policy.temperature
    share = np.float32(steps - step) / np.float32(steps)
    lowest = np.float32(min(policy.temperature - policy.temperature_drop, 1e30))
    return float(lowest + np.float32(policy.temperature_drop) * share)


def soft_temperature(policy: Policy, step: int, steps: int) -> float:
    """Return the temperature of the soft embeddings that come from a pass.

    It is the pass's temperature, but never 0 or infinite.
    """
    return min(max(temperature_of(policy, step, steps), 1e-30), 1e30)


def temperature_before(policy: Policy, noise_ratio: float, block_length: int) -> float:
    """Return the temperature of the soft embeddings that a pass over a block reads.

    ``noise_ratio`` is the share of random tokens in the block. The function assumes that the share
    falls by the same amount in each pass over the block.
    """
    steps = policy.steps_per_block or block_length
    before = max(0, round((1 - noise_ratio) * steps) - 1)
    return soft_temperature(policy, before, steps)
