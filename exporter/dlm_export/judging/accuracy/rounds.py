"""Determines how many samples are used to compare a candidate with its reference."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Literal

from dlm_export.judging.accuracy.evidence import Evidence
from dlm_export.judging.accuracy.verdict import Budgets, Judgement

MOST_JUDGED = 32  # maximum number of samples to compare on, unless the user requests more
LEAST_SECONDS = 4.0  # smallest time limit in seconds
PILOT_SAMPLES = 4  # number of samples in the first round, which measures how long a sample takes
LARGE_PILOT = 1  # samples in the first round if a single pass takes several seconds

EffortName = Literal["default", "full", "none"]


@dataclass(frozen=True)
class Effort:
    """Defines how thoroughly a candidate is compared with its reference. ``name`` is one of:

    - ``default``: only the candidate generates text. The comparison stops after ``seconds`` or
      after 32 samples. It stops earlier if further samples would probably not change which budgets
      are met.
    - ``full``: both denoisers generate text for every sample, without a time limit.
    - ``none``: the denoisers are not compared.

    If ``judged`` is set, exactly this number of samples is used. With ``default``, ``free_runs`` is
    the number of samples for which the reference generates text too.
    """

    name: EffortName = "default"
    judged: int | None = None
    free_runs: int = 0
    seconds: float = LEAST_SECONDS

    @property
    def is_exact(self) -> bool:
        """True if the number of samples does not depend on the time that the comparison takes."""
        return self.judged is not None or self.name == "full"

    @property
    def most(self) -> int:
        """The maximum number of samples to compare on."""
        return self.judged or MOST_JUDGED

    def lasting(self, seconds: float) -> Effort:
        """Return a copy with the time limit ``seconds``, or ``LEAST_SECONDS`` if this is longer."""
        return replace(self, seconds=max(LEAST_SECONDS, seconds))

    def beside(self, seconds: float) -> Effort:
        """Return a copy for a build whose other stages took ``seconds``.

        The copy's time limit is half of ``seconds``.
        """
        return self.lasting(seconds / 2)


def judge_in_rounds(
    evidence: Evidence,
    effort: Effort,
    budgets: Budgets,
    pilot: int,
    on_done: Callable[[], None] = lambda: None,
) -> Judgement:
    """Compare a candidate with its reference on as many samples as ``effort`` demands.

    With the default effort, the function first uses ``pilot`` samples, to measure how long a sample
    takes. It then uses as many further samples as fit into the time limit. If there are budgets,
    the further samples are split into rounds. A round uses at most as many samples as all earlier
    rounds together. After each round, the function stops if further samples would probably not
    change which budgets are met.

    ``Judgement.effort`` records why the comparison stopped:

    - ``asked``: all samples that the user requested were used.
    - ``all``: there are no more samples.
    - ``most``: the default maximum number of samples was reached.
    - ``decided``: further samples would probably not change which budgets are met.
    - ``time``: the time limit was reached.

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
