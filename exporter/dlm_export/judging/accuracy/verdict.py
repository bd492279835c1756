"""A candidate denoiser judged against its reference: what it predicts, what it would commit, what
it writes.

Three views, from near to far. Masked positions of held-out text, with the same random masks for
both (``masked``). The frontier: on every canvas that a loop met, what each of the two would commit
under the policy. Runs: both loops from the same prompts, canvases and passes compared. ``evidence``
gathers them; here is what comes of it. Intervals are paired bootstraps over samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from dlm_calibration import metrics
from dlm_calibration.states import Sample
from dlm_export.judging.sides.side import JudgeError
from dlm_runtime.errors import DlmError, ExitCode

WORST_LAYERS = 3  # named when a budget is missed


class AccuracyError(DlmError):
    """A stated accuracy budget is exceeded."""

    exit_code = ExitCode.MISSED


@dataclass(frozen=True)
class Budgets:
    """Limits that a candidate has to keep, None where not asked.

    ``max_ce_increase`` is relative (0.01: one per cent) and over all mask ratios, ``min_top1`` and
    ``min_task`` are shares, ``min_task`` of the candidate's own right answers.
    """

    max_ce_increase: float | None = None
    min_top1: float | None = None
    max_nfe_ratio: float | None = None
    min_task: float | None = None

    def check(self, samples: Sequence[Sample]) -> None:
        """Raise JudgeError for a limit that this data cannot judge, before an evaluation."""
        if self.min_task is not None and all(sample.answer is None for sample in samples):
            raise JudgeError(
                "a lowest task score is asked for, but the data carries no answers: give prompts with completions"
            )


@dataclass(frozen=True)
class Judgement:
    """What a candidate costs against its reference, in the sections of accuracy.json.

    ``effort`` says how much was run, and whose canvases the frontier's are: see ``evidence`` and
    ``rounds``. ``layers`` (``{"layer", "format", "kl", "frontier_kl"}`` each, found by
    ``layers_method``: ``fisher`` or ``exact``) and ``threshold`` (``Refit.as_dict``) come from
    elsewhere: see ``dataclasses.replace``. ``speed`` (``BundlePredictor.speed``) is of one run on
    one machine, so that it stands in the report and not in accuracy.json.
    """

    reference: str
    candidate: str
    data: dict[str, Any]
    policy: dict[str, Any]
    buckets: list[dict[str, Any]]
    overall: dict[str, Any]
    frontier: dict[str, Any]
    free_running: dict[str, Any]
    effort: dict[str, Any] = field(default_factory=dict)
    noise_floor: dict[str, Any] | None = None
    layers: list[dict[str, Any]] = field(default_factory=list)
    layers_method: str | None = None
    threshold: dict[str, Any] | None = None
    budgets: list[dict[str, Any]] = field(default_factory=list)
    speed: dict[str, Any] | None = None

    def with_budgets(self, budgets: Budgets) -> Judgement:
        """This judgement measured by some limits. Raises JudgeError if the data cannot tell."""
        task = self.free_running["task"]
        if budgets.min_task is not None and task is None:
            raise JudgeError(
                "a lowest task score is asked for, but the data carries no answers: give prompts with completions"
            )
        values = {
            "max_ce_increase": self.overall["ce_increase"],
            "min_top1": self.overall["top1"],
            "max_nfe_ratio": self.free_running["nfe_ratio"],
            "min_task": None if task is None else task["candidate"],
        }
        rows = []
        for name, value in values.items():
            limit = getattr(budgets, name)
            if limit is not None:
                # No value: the reference loses nothing and the candidate something, an increase
                # beyond any limit.
                passed = value is not None and (
                    value <= limit if name.startswith("max") else value >= limit
                )
                rows.append({"name": name, "limit": limit, "value": value, "passed": bool(passed)})
        return replace(self, budgets=rows)

    @property
    def passed(self) -> bool:
        """Whether every stated limit is kept."""
        return all(row["passed"] for row in self.budgets)

    @property
    def misses(self) -> list[str]:
        """A sentence for every broken limit, and where the loss is: worst bucket and layers."""
        words = {
            "max_ce_increase": "masked cross-entropy rises by {value:.2%}, at most {limit:.2%} is allowed",
            "min_top1": "top-1 agreement is {value:.2%}, at least {limit:.2%} is asked for",
            "max_nfe_ratio": "NFE ratio is {value:.4f}, at most {limit:.4f} is allowed",
            "min_task": "task score is {value:.2%}, at least {limit:.2%} is asked for",
        }
        missed = [row for row in self.budgets if not row["passed"]]
        found = [
            words[row["name"]].format(
                value=np.inf if row["value"] is None else row["value"], limit=row["limit"]
            )
            for row in missed
        ]
        told = [row for row in self.buckets if metrics.is_told_from_zero(row)]
        if missed and told:
            # In nats: where few positions are masked there is next to no loss, and its relative
            # change is noise.
            worst = max(told, key=lambda row: row["candidate_ce"] - row["reference_ce"])
            rise = worst["candidate_ce"] - worst["reference_ce"]
            found.append(
                f"worst bucket: mask ratio {worst['mask_ratio']}, cross-entropy {rise:+.4f} nats, top-1 {worst['top1']:.2%}"
            )
        ranked = sorted(self.layers, key=_sensitivity, reverse=True)[:WORST_LAYERS]
        if missed and ranked:
            found.append(
                "worst layers: "
                + ", ".join(
                    f"{row['layer']} ({row['format']}, KL {_sensitivity(row):.2e})"
                    for row in ranked
                )
            )
        return found

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as accuracy.json and ``--json`` show them."""
        return {
            name: getattr(self, name) for name in self.__dataclass_fields__ if name != "speed"
        } | {
            "passed": self.passed,
            "misses": self.misses,
        }


def check_budgets(judgement: Judgement, where: str) -> None:
    """Raises AccuracyError with the budgets missed, the worst bucket and the worst layers."""
    if judgement.passed:
        return
    raise AccuracyError(f"{where}: {'; '.join(judgement.misses)}")


def _sensitivity(row: Mapping[str, Any]) -> float:
    value = row["kl"] if row["frontier_kl"] is None else row["frontier_kl"]
    return float(value or 0.0)
