"""Rounds keys and values in torch, exactly like the caches that ``graph.functions`` defines."""

from __future__ import annotations

import torch
from torch import Tensor

_SMALLEST_ROW = 1e-30


def read_back(rows: Tensor, cache_dtype: str) -> Tensor:
    """Round rows ``[.., D]`` as a cache does: the result is what a pass reads from the cache.

    ``cache_dtype`` is the cache's type, as the manifest names it.
    """
    if cache_dtype == "int8":
        return _through_int8(rows.float()).to(rows.dtype)
    stored: torch.dtype = getattr(torch, cache_dtype)
    return rows.to(stored).to(rows.dtype)


def _through_int8(rows: Tensor) -> Tensor:
    """Quantise each row to codes -127..127 and dequantise it.

    The scale of a row is the smallest number ``mantissa * 2 ** n`` that is at least amax / 127,
    where the mantissa is an integer of at most 255.
    """
    is_bad = ~rows.isfinite().all(-1, keepdim=True)
    finite = rows.masked_fill(is_bad, 0)
    wanted = finite.abs().amax(-1, keepdim=True).clamp(min=_SMALLEST_ROW) / 127
    fraction, exponent = wanted.frexp()  # wanted = fraction * 2 ** exponent, fraction in [0.5, 1)
    # Computed from the bits, because torch.ldexp is not exact on every processor.
    power = ((exponent + (127 - 8)) << 23).view(torch.float32)
    scale = (256 * fraction).ceil() * power
    return ((finite / scale).round() * scale).masked_fill(is_bad, torch.nan)
