"""The judgement of a candidate denoiser against a reference. The two are called the sides.

It has three parts:

- Masked positions: both sides predict the same randomly masked positions of held-out text
  (``masked``).
- Frontier: what each side would commit under the policy, on every canvas of a loop's run.
- Runs: both loops start from the same prompts. Their finished texts and numbers of passes are
  compared.

``evidence`` collects the data. Confidence intervals are paired bootstraps over samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from dlm_calibration import metrics
from dlm_calibration.samples import Sample
from dlm_export.judging.sides.side import JudgeError
from dlm_runtime.errors import DlmError, ExitCode

WORST_LAYERS = 3  # the number of layers that an error names when a budget is missed


class AccuracyError(DlmError):
    """A candidate misses an accuracy budget."""

    exit_code = ExitCode.MISSED


@dataclass(frozen=True)
class Budgets:
    """Limits that a candidate must meet. ``None`` means no limit.

    ``max_ce_increase`` limits the increase of cross-entropy over all mask ratios. It is relative:
    0.01 is one per cent. ``min_top1`` is the smallest share of positions where both sides have the
    same best token. ``max_nfe_ratio`` limits the number of passes, divided by that of the
    reference. ``min_task`` is the smallest share of right answers of the candidate.
    """

    max_ce_increase: float | None = None
    min_top1: float | None = None
    max_nfe_ratio: float | None = None
    min_task: float | None = None

    def check(self, samples: Sequence[Sample]) -> None:
        """Raises JudgeError if this data cannot judge one of the limits. Call it before judging."""
        if self.min_task is not None and all(sample.answer is None for sample in samples):
            raise JudgeError(
                "a smallest task score is set, but the data has no answers: give prompts with completions"
            )


@dataclass(frozen=True)
class Judgement:
    """What a candidate loses against its reference, in the sections of accuracy.json.

    ``effort`` records how many samples were judged, and whose canvases the frontier uses: see
    ``evidence`` and ``rounds``.

    Other modules add two fields with ``dataclasses.replace``. ``layers`` has entries ``{"layer",
    "format", "kl", "frontier_kl"}``, and ``layers_method`` says how they were measured, ``fisher``
    or ``exact``. ``threshold`` is ``Refit.as_dict``.

    ``speed`` is ``BundlePredictor.speed``. It belongs to one run on one machine, so it appears in
    the report but not in accuracy.json.
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
        """Return a judgement with the results for these limits.

        Raises JudgeError if the data cannot judge one of them.
        """
        task = self.free_running["task"]
        if budgets.min_task is not None and task is None:
            raise JudgeError(
                "a smallest task score is set, but the data has no answers: give prompts with completions"
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
                # There is no value if the reference's loss is zero and the candidate's is not.
                # Every limit is then missed.
                passed = value is not None and (
                    value <= limit if name.startswith("max") else value >= limit
                )
                rows.append({"name": name, "limit": limit, "value": value, "passed": bool(passed)})
        return replace(self, budgets=rows)

    @property
    def passed(self) -> bool:
        """True if every limit is met."""
        return all(row["passed"] for row in self.budgets)

    @property
    def misses(self) -> list[str]:
        """One sentence per missed limit, followed by the worst mask ratio and the worst layers."""
        words = {
            "max_ce_increase": "masked cross-entropy rises by {value:.2%}, the limit is {limit:.2%}",
            "min_top1": "top-1 agreement is {value:.2%}, the minimum is {limit:.2%}",
            "max_nfe_ratio": "NFE ratio is {value:.4f}, the limit is {limit:.4f}",
            "min_task": "task score is {value:.2%}, the minimum is {limit:.2%}",
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
            # Compare in nats. If few positions are masked, the loss is close to zero and its
            # relative change is noise.
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
        """Return plain values for accuracy.json and ``--json``."""
        return {
            name: getattr(self, name) for name in self.__dataclass_fields__ if name != "speed"
        } | {
            "passed": self.passed,
            "misses": self.misses,
        }


def check_budgets(judgement: Judgement, where: str) -> None:
    """Raises AccuracyError if a budget is missed.

    The error names the missed budgets, the worst mask ratio and the worst layers.
    """
    if judgement.passed:
        return
    raise AccuracyError(f"{where}: {'; '.join(judgement.misses)}")


def _sensitivity(row: Mapping[str, Any]) -> float:
    value = row["kl"] if row["frontier_kl"] is None else row["frontier_kl"]
    return float(value or 0.0)
