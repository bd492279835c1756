"""Choose the cases of a parametrised test that ``make test`` runs. The others are slow tests."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_except(quick: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """Mark each case as slow that is not in ``quick``. A case is a value or a tuple of values."""
    cases = list(cases)
    assert all(case in cases for case in quick)
    return [
        case
        if case in quick
        else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        for case in cases
    ]
