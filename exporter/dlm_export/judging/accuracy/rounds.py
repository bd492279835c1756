"""The efforts of judging, and when the default one has seen enough."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Literal

from dlm_export.judging.accuracy.evidence import Evidence
from dlm_export.judging.accuracy.verdict import Budgets, Judgement

MOST_JUDGED = 32  # samples, unless more are asked for
LEAST_SECONDS = 4.0  # that judging may take, however quick the rest of a build is
PILOT_SAMPLES = 4  # judged before it is known what a sample costs
LARGE_PILOT = 1  # of a denoiser whose passes take seconds

EffortName = Literal["default", "full", "none"]


@dataclass(frozen=True)
class Effort:
    """How thoroughly to judge.

    ``default``: on the canvases that the candidate meets, on as many samples as take about
    ``seconds``, until every budget is decided, 32 at most. ``full``: both loops run freely on every
    sample, whatever it takes. ``none``: not at all. ``judged`` asks for exactly that many samples;
    ``free_runs`` lets the reference run freely on as many of the default effort's prompts.
    """

    name: EffortName = "default"
    judged: int | None = None
    free_runs: int = 0
    seconds: float = LEAST_SECONDS

    @property
    def is_exact(self) -> bool:
        """Whether it is known beforehand which samples are judged."""
        return self.judged is not None or self.name == "full"

    @property
    def most(self) -> int:
        """Samples that are judged at most."""
        return self.judged or MOST_JUDGED

    def lasting(self, seconds: float) -> Effort:
        """This effort, with ``seconds`` to be worth; never less than ``LEAST_SECONDS``."""
        return replace(self, seconds=max(LEAST_SECONDS, seconds))

    def beside(self, seconds: float) -> Effort:
        """This effort in a build whose other stages took ``seconds``: worth half of them."""
        return self.lasting(seconds / 2)


def judge_in_rounds(
    evidence: Evidence,
    effort: Effort,
    budgets: Budgets,
    pilot: int,
    on_done: Callable[[], None] = lambda: None,
) -> Judgement:
    """Judge as an effort says: the default one by a ``pilot`` of samples, then by as many as fit
    the time.

    With a budget to decide, rounds double, and the first that decides every one ends it. Why it
    stopped is in ``Judgement.effort``: ``asked`` (as many as were asked for are judged), ``all``
    (there are no more), ``most`` (no more are judged unless asked for), ``decided`` or ``time``.
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
