"""Times several contestants.

The contestants take turns, round after round, so that other load on the machine affects all of them
equally.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def clocked(run: Callable[[], Any]) -> Callable[[], float]:
    """Wrap ``run`` in a function that returns the seconds that it takes."""

    def timed() -> float:
        began = time.perf_counter()
        run()
        return time.perf_counter() - began

    return timed


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Return the median and quartiles in ms.

    If ``seconds`` has a single value, the median and the quartiles are equal to this value.
    """
    low, median, high = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else [seconds[0]] * 3
    return {
        "median_ms": round(median * 1e3, 3),
        "q1_ms": round(low * 1e3, 3),
        "q3_ms": round(high * 1e3, 3),
    }


def interleave(
    runs: Mapping[str, Callable[[], float]], rounds: int, warm_ups: int = 2
) -> dict[str, dict[str, float]]:
    """Call each contestant in turn, ``rounds`` times after the warm-ups.

    Each contestant returns the seconds that it took. Returns the median and quartiles in ms.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(warm_ups + rounds):
        for name, run in runs.items():
            seconds = run()
            if number >= warm_ups:
                times[name].append(seconds)
    return {name: spread(values) for name, values in times.items()}


def cell(row: dict[str, Any]) -> str:
    """Return the median and quartiles as text with a suitable number of digits."""
    digits = 1 if row["median_ms"] < 1000 else 0
    return " .. ".join(f"{row[name]:.{digits}f}" for name in ("q1_ms", "q3_ms")).join(
        (f"{row['median_ms']:.{digits}f} (", ")")
    )


def show(title: str, rows: dict[str, dict[str, float]], baseline: str) -> None:
    """Print the medians and quartiles, and their ratios to the row ``baseline``."""
    print(title)
    for name, row in rows.items():
        print(
            f"  {name:28} {cell(row):>32} ms  {rows[baseline]['median_ms'] / row['median_ms']:.2f} x",
            flush=True,
        )
