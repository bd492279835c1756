"""Rounds keys and values in torch exactly like the caches that ``graph.functions`` defines."""

from __future__ import annotations

import torch
from torch import Tensor

_SMALLEST_ROW = 1e-30


def read_back(rows: Tensor, cache_dtype: str) -> Tensor:
    """Rows ``[.., D]`` as a pass reads them from a cache; ``cache_dtype`` is a manifest value."""
    if cache_dtype == "int8":
        return _through_int8(rows.float()).to(rows.dtype)
    stored: torch.dtype = getattr(torch, cache_dtype)
    return rows.to(stored).to(rows.dtype)


def _through_int8(rows: Tensor) -> Tensor:
    """Quantise each row to codes -127..127 and back.

    A row's scale is the smallest ``mantissa * 2 ** n`` that is at least amax / 127, with a mantissa
    of at most 255.
    """
    is_bad = ~rows.isfinite().all(-1, keepdim=True)
    finite = rows.masked_fill(is_bad, 0)
    wanted = finite.abs().amax(-1, keepdim=True).clamp(min=_SMALLEST_ROW) / 127
    fraction, exponent = wanted.frexp()  # wanted = fraction * 2 ** exponent, fraction in [0.5, 1)
    # torch.ldexp is not exact everywhere.
    power = ((exponent + (127 - 8)) << 23).view(torch.float32)
    scale = (256 * fraction).ceil() * power
    return ((finite / scale).round() * scale).masked_fill(is_bad, torch.nan)
