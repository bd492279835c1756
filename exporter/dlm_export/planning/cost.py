"""What passes cost on a machine by what they compute, fitted to passes that ``bench`` measured: a
scheduler admits by it.

Four figures are not a model of a machine: they are the plane of least relative error through what
was measured, none of them negative, and how far the measured passes are from it is told beside
them.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from itertools import combinations
from typing import Any

import numpy as np

from dlm_runtime import PassCost, RequestError


def loads(passes: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """What passes of ``bench`` compute, fp64 ``[N, 4]``: themselves, tokens, scored rows, pairs of
    a token and what it sees.
    """
    sizes = [[one[name] for name in ("batch", "tokens", "cached", "rows")] for one in passes]
    batch, tokens, cached, rows = np.array(sizes, np.float64).T
    return np.stack(
        [np.ones_like(batch), batch * tokens, batch * rows, batch * tokens * (tokens + cached)],
        axis=1,
    )


def check_telling(passes: Sequence[Mapping[str, Any]]) -> None:
    """Raise RequestError for passes that do not tell the four figures apart, whatever they take."""
    computed = loads(passes)
    if np.linalg.matrix_rank(computed / computed.max(0)) < len(fields(PassCost)):
        raise RequestError(
            "cost: these passes do not tell apart what a pass, a token, a scored row and a cached token take: measure some "
            "that differ in one of these alone, or leave --passes out"
        )


def fit_cost(passes: Sequence[Mapping[str, Any]]) -> tuple[PassCost, list[float]]:
    """The cost of least relative error, and of each pass what it predicts of it, less 1.
    Milliseconds are under ``ms``.
    """
    wanted = loads(passes) / np.array([one["ms"] for one in passes])[:, None]
    best, least = np.zeros(len(fields(PassCost))), np.inf
    # Of all choices of figures above zero the one that fits best without any below: there are few.
    for count in range(1, len(best) + 1):
        for chosen in map(list, combinations(range(len(best)), count)):
            found = np.linalg.lstsq(wanted[:, chosen], np.ones(len(passes)), rcond=None)[0]
            error = float(np.square(wanted[:, chosen] @ found - 1).sum())
            if (found >= 0).all() and error < least:
                best, least = np.zeros_like(best), error
                best[chosen] = found
    return PassCost(*best.tolist()), (wanted @ best - 1).tolist()


def cost_of(passes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """``fit_cost`` as ``bench --json`` prints it."""
    cost, errors = fit_cost(passes)
    distances = [abs(error) for error in errors]
    return asdict(cost) | {
        "median_error": statistics.median(distances),
        "worst_error": max(distances),
    }
