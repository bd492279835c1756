"""Rounds keys and values in torch exactly as the functions in ``graph.cache_dtypes`` do.

Only ``read_back`` imports torch, because devices without torch compare results too.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_SMALLEST_ROW = 1e-30
ROUNDED_ROWS = {"float32": 0.0, "float16": 1e-3, "bfloat16": 8e-3, "int8": 1e-2}
"""The tolerance for rounded keys and values in block-causal networks, for each type of cache.

If two denoisers round a value to neighbouring codes, the output of attention may differ by the
distance between the two codes. fp16 has 11 significant bits, bf16 has 8, and INT8 has 127 steps up
to the largest magnitude of a row.
"""


def read_back(rows: Tensor, cache_dtype: str) -> Tensor:
    """Round keys or values ``[.., D]`` to the numbers that a pass gets back from the cache.

    ``cache_dtype`` is the cache's type, as the manifest names it.
    """
    if cache_dtype == "int8":
        return _through_int8(rows.float()).to(rows.dtype)
    import torch

    stored: torch.dtype = getattr(torch, cache_dtype)
    return rows.to(stored).to(rows.dtype)


def _through_int8(rows: Tensor) -> Tensor:
    """Quantise each row to codes from -127 to 127, and dequantise the row.

    The scale of a row has the form ``mantissa * 2 ** n``, with an integer mantissa of at most 255.
    The scale is the smallest number of this form that is at least amax / 127, where amax is the
    largest magnitude in the row.
    """
    is_bad = ~rows.isfinite().all(-1, keepdim=True)
    finite = rows.masked_fill(is_bad, 0)
    wanted = finite.abs().amax(-1, keepdim=True).clamp(min=_SMALLEST_ROW) / 127
    fraction, exponent = wanted.frexp()  # wanted = fraction * 2 ** exponent, fraction in [0.5, 1)
    # Assemble the power of two from its bits, because torch.ldexp is not exact on every processor.
    power = ((exponent + (127 - 8)) << 23).view(rows.dtype)
    scale = (256 * fraction).ceil() * power
    return ((finite / scale).round() * scale).masked_fill(is_bad, math.nan)
