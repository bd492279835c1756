"""What this process holds, and memory that is free given back to the system."""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Callable


@functools.cache
def _trim() -> Callable[[int], int] | None:
    try:
        trim: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None
    return trim


def give_back() -> None:
    """Return freed heap pages to the system where the C library can (glibc); elsewhere nothing.

    Reading a checkpoint tensor by tensor leaves holes between those that stay: a fifth of the
    denoiser at 1 B parameters.
    """
    trim = _trim()
    if trim is not None:
        trim(0)


def resident_bytes() -> int:
    """What this process holds of its own, mapped files left out; 0 where the system does not say."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            _, resident, shared, *_ = map(int, file.read().split())
    except (OSError, ValueError):
        return 0
    return (resident - shared) * mmap.PAGESIZE
