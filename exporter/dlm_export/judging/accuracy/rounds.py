"""Decides how many samples to judge, and when to stop."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Literal

from dlm_export.judging.accuracy.evidence import Evidence
from dlm_export.judging.accuracy.verdict import Budgets, Judgement

MOST_JUDGED = 32  # the most samples to judge, unless the user asks for more
LEAST_SECONDS = 4.0  # lower bound of the time limit, for builds whose other stages are short
PILOT_SAMPLES = 4  # the number of samples to judge first, in order to measure the time of a sample
LARGE_PILOT = 1  # the same number for denoisers whose passes take seconds

EffortName = Literal["default", "full", "none"]


@dataclass(frozen=True)
class Effort:
    """How thoroughly to judge.

    - ``default`` judges on the canvases of the candidate's loop. It uses as many samples as fit
      into ``seconds``, at most 32, and stops earlier if every budget is decided.
    - ``full`` lets the loops of both sides run freely on every sample, without a time limit.
    - ``none`` does not judge.

    If ``judged`` is set, exactly this number of samples is judged. ``free_runs`` is for
    ``default``: it is the number of prompts on which the reference runs freely too.
    """

    name: EffortName = "default"
    judged: int | None = None
    free_runs: int = 0
    seconds: float = LEAST_SECONDS

    @property
    def is_exact(self) -> bool:
        """True if the number of samples is known in advance."""
        return self.judged is not None or self.name == "full"

    @property
    def most(self) -> int:
        """Largest number of samples."""
        return self.judged or MOST_JUDGED

    def lasting(self, seconds: float) -> Effort:
        """Return this effort with another time limit, which is at least ``LEAST_SECONDS``."""
        return replace(self, seconds=max(LEAST_SECONDS, seconds))

    def beside(self, seconds: float) -> Effort:
        """Return this effort with half the time that the other stages of a build took."""
        return self.lasting(seconds / 2)


def judge_in_rounds(
    evidence: Evidence,
    effort: Effort,
    budgets: Budgets,
    pilot: int,
    on_done: Callable[[], None] = lambda: None,
) -> Judgement:
    """Judge one sample after another, until the effort is reached.

    The default effort starts with ``pilot`` samples, and then takes as many as fit into its time.
    If there are budgets, each round at most doubles the number of samples, and judging ends when
    all budgets are decided.

    ``Judgement.effort`` records why judging stopped:

    - ``asked``: the requested number of samples is reached.
    - ``all``: there are no more samples.
    - ``most``: the default maximum is reached.
    - ``decided``: every budget is decided.
    - ``time``: the time is used up.

    Raises JudgeError.
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
