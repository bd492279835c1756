"""How thoroughly to judge, and when the default effort stops."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Literal

from dlm_export.judging.accuracy.evidence import Evidence
from dlm_export.judging.accuracy.verdict import Budgets, Judgement

MOST_JUDGED = 32  # samples, unless the user asks for more
LEAST_SECONDS = 4.0  # minimum time limit, however short the rest of a build is
PILOT_SAMPLES = 4  # judged first, to find what a sample costs
LARGE_PILOT = 1  # for denoisers whose passes take seconds

EffortName = Literal["default", "full", "none"]


@dataclass(frozen=True)
class Effort:
    """How thoroughly to judge.

    ``default`` judges on the canvases of the candidate's loop, with as many samples as fit
    ``seconds`` (at most 32), until every budget is decided. ``full`` lets both loops run freely on
    every sample, without a time limit. ``none`` does not judge. ``judged`` asks for exactly that
    many samples. With ``free_runs``, the reference also runs freely on that many prompts of the
    default effort.
    """

    name: EffortName = "default"
    judged: int | None = None
    free_runs: int = 0
    seconds: float = LEAST_SECONDS

    @property
    def is_exact(self) -> bool:
        """True if the number of samples is fixed in advance."""
        return self.judged is not None or self.name == "full"

    @property
    def most(self) -> int:
        """Maximum number of samples."""
        return self.judged or MOST_JUDGED

    def lasting(self, seconds: float) -> Effort:
        """This effort with a time limit of ``seconds``, but at least ``LEAST_SECONDS``."""
        return replace(self, seconds=max(LEAST_SECONDS, seconds))

    def beside(self, seconds: float) -> Effort:
        """This effort for a build whose other stages took ``seconds``: half of that time."""
        return self.lasting(seconds / 2)


def judge_in_rounds(
    evidence: Evidence,
    effort: Effort,
    budgets: Budgets,
    pilot: int,
    on_done: Callable[[], None] = lambda: None,
) -> Judgement:
    """Judge with an effort: the default one starts with ``pilot`` samples, then takes as many as
    fit its time.

    With a budget to decide, the number of samples doubles each round, and judging ends with the
    first round that decides all budgets. ``Judgement.effort`` records why it stopped: ``asked``
    (the requested number is reached), ``all`` (no samples are left), ``most`` (the default maximum
    is reached), ``decided`` or ``time``. Raises JudgeError.
    """
    began = time.perf_counter()
    most = min(effort.most, len(evidence.pool))
    has_budgets = any(getattr(budgets, field.name) is not None for field in fields(budgets))
    evidence.add(most if effort.is_exact else min(pilot, most), on_done)
    while True:
        judgement, left = evidence.judgement(), most - evidence.judged
        spent = time.perf_counter() - began
        count = min(left, int((effort.seconds - spent) / (spent / evidence.judged)))
        if has_budgets:
            count = min(count, evidence.judged)
        if not left:
            stopped = "all" if most < effort.most else "most" if effort.judged is None else "asked"
        elif evidence.is_decided(judgement, budgets):
            stopped = "decided"
        elif count < 1:
            stopped = "time"
        else:
            evidence.add(count, on_done)
            continue
        return replace(
            judgement, effort={"judge": effort.name, "stopped": stopped} | judgement.effort
        )
