"""Fits a linear cost model of passes to the measurements of ``bench``, for the scheduler's
admission.

The four figures do not describe a machine. They minimise the relative error over the measured
passes, with none below zero; the remaining errors are reported with them.
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
    """Regressors of ``bench`` passes, fp64 ``[N, 4]``: 1, tokens, scored rows, and pairs of a token
    and a visible token.
    """
    sizes = [[one[name] for name in ("batch", "tokens", "cached", "rows")] for one in passes]
    batch, tokens, cached, rows = np.array(sizes, np.float64).T
    return np.stack(
        [np.ones_like(batch), batch * tokens, batch * rows, batch * tokens * (tokens + cached)],
        axis=1,
    )


def check_telling(passes: Sequence[Mapping[str, Any]]) -> None:
    """Raises RequestError if the passes cannot determine the four figures."""
    computed = loads(passes)
    if np.linalg.matrix_rank(computed / computed.max(0)) < len(fields(PassCost)):
        raise RequestError(
            "cost: these passes cannot separate the costs of a pass, a token, a scored row and a cached token: measure some "
            "that differ in only one of these, or omit --passes"
        )


def fit_cost(passes: Sequence[Mapping[str, Any]]) -> tuple[PassCost, list[float]]:
    """The cost with the least relative error, and each pass's predicted time (from ``ms``) relative
    to the measured one, minus 1.
    """
    wanted = loads(passes) / np.array([one["ms"] for one in passes])[:, None]
    best, least = np.zeros(len(fields(PassCost))), np.inf
    # Try every subset of figures to be positive, and keep the best fit without negative ones.
    for count in range(1, len(best) + 1):
        for chosen in map(list, combinations(range(len(best)), count)):
            found = np.linalg.lstsq(wanted[:, chosen], np.ones(len(passes)), rcond=None)[0]
            error = float(np.square(wanted[:, chosen] @ found - 1).sum())
            if (found >= 0).all() and error < least:
                best, least = np.zeros_like(best), error
                best[chosen] = found
    return PassCost(*best.tolist()), (wanted @ best - 1).tolist()


def cost_of(passes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """``fit_cost`` as plain values for ``bench --json``."""
    cost, errors = fit_cost(passes)
    distances = [abs(error) for error in errors]
    return asdict(cost) | {
        "median_error": statistics.median(distances),
        "worst_error": max(distances),
    }
