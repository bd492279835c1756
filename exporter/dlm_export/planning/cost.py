"""Fits a linear model to the pass times that ``bench`` measured.

The scheduler uses the model to decide when to admit a request. The model has four coefficients,
none of which is negative. The fit chooses the coefficients that minimise the relative errors for
the measured passes. The result also contains the relative error of each pass.
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
    """Return the model's four inputs for each of N measured passes, fp64 ``[N, 4]``.

    The inputs are the constant 1, the number of tokens, the number of rows of logits, and the
    number of attention scores. There is one attention score for each pair of a token and a token that
    it attends to.
    """
    sizes = [[one[name] for name in ("batch", "tokens", "cached", "rows")] for one in passes]
    batch, tokens, cached, rows = np.array(sizes, np.float64).T
    return np.stack(
        [np.ones_like(batch), batch * tokens, batch * rows, batch * tokens * (tokens + cached)],
        axis=1,
    )


def check_telling(passes: Sequence[Mapping[str, Any]]) -> None:
    """Raise RequestError if the passes are too similar to determine the four coefficients."""
    computed = loads(passes)
    if np.linalg.matrix_rank(computed / computed.max(0)) < len(fields(PassCost)):
        raise RequestError(
            "cost: these passes cannot separate the costs of a pass, a token, a scored row and a cached token: measure some "
            "that differ in only one of these, or omit --passes"
        )


def fit_cost(passes: Sequence[Mapping[str, Any]]) -> tuple[PassCost, list[float]]:
    """Find the coefficients that give the smallest relative errors.

    Also returns the relative error of each pass: the predicted time divided by the measured time
    ``ms``, minus 1.
    """
    wanted = loads(passes) / np.array([one["ms"] for one in passes])[:, None]
    best, least = np.zeros(len(fields(PassCost))), np.inf
    # Coefficients must not be negative. Therefore fit every subset of the coefficients, and set all
    # other coefficients to 0. Then choose the best fit without a negative coefficient.
    for count in range(1, len(best) + 1):
        for chosen in map(list, combinations(range(len(best)), count)):
            found = np.linalg.lstsq(wanted[:, chosen], np.ones(len(passes)), rcond=None)[0]
            error = float(np.square(wanted[:, chosen] @ found - 1).sum())
            if (found >= 0).all() and error < least:
                best, least = np.zeros_like(best), error
                best[chosen] = found
    return PassCost(*best.tolist()), (wanted @ best - 1).tolist()


def cost_of(passes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Fit the linear model to measured passes, and return the result for ``bench --json``."""
    cost, errors = fit_cost(passes)
    distances = [abs(error) for error in errors]
    return asdict(cost) | {
        "median_error": statistics.median(distances),
        "worst_error": max(distances),
    }
