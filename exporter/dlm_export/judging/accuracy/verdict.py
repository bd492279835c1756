"""Defines the judgement of a candidate denoiser, and checks the judgement against accuracy budgets.

A judgement compares the candidate with a reference denoiser in three ways:

- Masked positions: both denoisers predict the tokens at the same randomly masked positions of
  held-out text (see ``masked``).
- Frontier: both denoisers predict which tokens they would commit in the passes of the reference's
  decoding runs (see ``frontier``).
- Runs: both denoisers generate text for the same prompts. The judgement compares the texts and the
  numbers of passes.

``evidence`` collects the data. ``dlm_calibration.metrics`` computes the 95% intervals.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from dlm_calibration import metrics
from dlm_calibration.samples import Sample
from dlm_export.judging.report.figures import sensitivity
from dlm_export.judging.sides.side import JudgeError
from dlm_runtime.errors import DlmError, ExitCode

WORST_LAYERS = 3  # number of layers that are named in an error message about a missed budget


class AccuracyError(DlmError):
    """Raised if a candidate does not meet an accuracy budget."""

    exit_code = ExitCode.MISSED


@dataclass(frozen=True)
class Budgets:
    """Limits for a candidate's accuracy. A field that is ``None`` sets no limit.

    - ``max_ce_increase``: largest relative increase of cross-entropy over all mask ratios; 0.01
      means 1%.
    - ``min_top1``: smallest share of masked positions where candidate and reference predict the
      same token.

    For a denoiser that verifies drafts, these two limits also apply to causal passes.

    - ``max_nfe_ratio``: largest ratio of the candidate's passes to the reference's passes.
    - ``min_right_answers``: smallest share of prompts to which the candidate gives the right answer.
    """

    max_ce_increase: float | None = None
    min_top1: float | None = None
    max_nfe_ratio: float | None = None
    min_right_answers: float | None = None

    def limits(self, *, has_causal: bool) -> dict[str, float]:
        """Return the limits that are set. The keys are the names of rows in ``Judgement.budgets``.

        ``has_causal`` is true if the judgement contains the loss of causal passes.
        """
        names = {field.name: field.name for field in fields(self)}
        if has_causal:
            names |= {row: limit for row, (limit, _) in OF_CAUSAL_PASSES.items()}
        return {
            row: limit for row, name in names.items() if (limit := getattr(self, name)) is not None
        }

    def check(self, samples: Sequence[Sample]) -> None:
        """Raise JudgeError if ``min_right_answers`` is set, but no sample contains a right answer.

        Call this method before the denoisers are compared.
        """
        if self.min_right_answers is not None and all(sample.answer is None for sample in samples):
            raise JudgeError(
                "a smallest share of right answers is set, but the data has no answers: give prompts with completions"
            )

    def check_texts(self, *, has_texts: bool) -> None:
        """Raise JudgeError if a limit needs generated texts, but ``has_texts`` is false."""
        if not has_texts and (self.max_nfe_ratio is not None or self.min_right_answers is not None):
            raise JudgeError(
                "--max-nfe-ratio and --min-right-answers need generated texts. Without a mask token, texts are only "
                "generated with --judge full"
            )


OF_CAUSAL_PASSES = {
    "max_causal_ce_increase": ("max_ce_increase", "ce_increase"),
    "min_causal_top1": ("min_top1", "top1"),
}
"""Maps the name of a row in ``Judgement.budgets`` to its limit, and to its value in causal passes."""


@dataclass(frozen=True)
class Judgement:
    """A candidate's loss of accuracy. Each field except ``speed`` is a section of accuracy.json.

    - ``buckets``: one entry per mask ratio. For a denoiser without a mask token, the mask ratio is
      the share of random tokens in a block (see ``masked``).
    - ``speculation``: the loss of the passes of self-speculation, or ``None`` if the denoiser does
      not verify drafts. The keys are "draft" and "causal" (see ``masked.Kind``).
    - ``frontier``: ``None`` if the commits cannot be compared (see ``side.can_compare_commits``).
    - ``free_running``: ``None`` if no text was generated.
    - ``effort``: the name of the ``Effort``.
    - ``layers``: one entry ``{"layer", "format", "kl", "frontier_kl"}`` per quantised layer.
    - ``layers_method``: the method that measured ``layers``, which is ``fisher`` or ``exact``.
    - ``threshold``: the result of ``Refit.as_dict``.
    - ``candidate_loop``: set only if the candidate generated text with a different policy than the
      reference. Contains the candidate's policy, the number of prompt tokens, and the number of
      prompt tokens whose keys and values were reused from earlier prompts.
    - ``speed``: the result of ``BundlePredictor.speed``. The report shows the speed, but
      accuracy.json does not contain the speed, because speed depends on the machine.
    """

    reference: str
    candidate: str
    data: dict[str, Any]
    policy: dict[str, Any]
    buckets: list[dict[str, Any]]
    overall: dict[str, Any]
    frontier: dict[str, Any] | None
    free_running: dict[str, Any] | None
    effort: str = "full"
    noise_floor: dict[str, Any] | None = None
    speculation: dict[str, Any] | None = None
    layers: list[dict[str, Any]] = field(default_factory=list)
    layers_method: str | None = None
    threshold: dict[str, Any] | None = None
    budgets: list[dict[str, Any]] = field(default_factory=list)
    candidate_loop: dict[str, Any] | None = None
    speed: dict[str, Any] | None = None

    def with_budgets(self, budgets: Budgets) -> Judgement:
        """Compare the measured values with ``budgets``, and return a judgement with the results."""
        free = self.free_running
        right = None if free is None else free["right_answers"]
        found = {
            "max_ce_increase": _measured(self.overall, "ce_increase"),
            "min_top1": _measured(self.overall, "top1"),
            "max_nfe_ratio": _measured(free, "nfe_ratio"),
            "min_right_answers": _measured(right, "candidate"),
        }
        if self.speculation is not None:
            causal = self.speculation["causal"]
            found |= {row: _measured(causal, value) for row, (_, value) in OF_CAUSAL_PASSES.items()}
        rows = []
        for name, limit in budgets.limits(has_causal=self.speculation is not None).items():
            # ``value`` is None if the increase is infinite, because the reference's loss is zero
            # and the candidate's loss is not. An infinite increase exceeds every limit.
            value, interval = found[name]
            passed = value is not None and (
                value <= limit if name.startswith("max") else value >= limit
            )
            row = {"name": name, "limit": limit, "value": value, "passed": bool(passed)}
            is_clear = interval is not None and not interval[0] <= limit <= interval[1]
            rows.append(row | {"interval": interval, "is_clear": is_clear})
        return replace(self, budgets=rows)

    @property
    def passed(self) -> bool:
        """True if every limit is met."""
        return all(row["passed"] for row in self.budgets)

    @property
    def misses(self) -> list[str]:
        """Describe each missed limit, and then the worst mask ratio and the worst layers."""
        words = {
            "max_ce_increase": "masked cross-entropy rises by {value:.2%}, the limit is {limit:.2%}",
            "min_top1": "top-1 agreement is {value:.2%}, the minimum is {limit:.2%}",
            "max_nfe_ratio": "NFE ratio is {value:.4f}, the limit is {limit:.4f}",
            "min_right_answers": "right answers are {value:.2%}, the minimum is {limit:.2%}",
            "max_causal_ce_increase": "cross-entropy of causal passes rises by {value:.2%}, the limit is {limit:.2%}",
            "min_causal_top1": "top-1 agreement of causal passes is {value:.2%}, the minimum is {limit:.2%}",
        }
        missed = [row for row in self.budgets if not row["passed"]]
        found = [
            words[row["name"]].format(
                value=np.inf if row["value"] is None else row["value"], limit=row["limit"]
            )
            for row in missed
        ]
        told = [row for row in self.buckets if metrics.direction(row) > 0]
        if missed and told:
            # Compare differences, not ratios. At a low mask ratio, the loss is close to zero, so
            # the relative increase of the loss is mostly noise.
            worst = max(told, key=lambda row: row["candidate_ce"] - row["reference_ce"])
            rise = worst["candidate_ce"] - worst["reference_ce"]
            found.append(
                f"worst bucket: mask ratio {worst['mask_ratio']}, cross-entropy {rise:+.4f} nats, top-1 {worst['top1']:.2%}"
            )
        ranked = sorted(self.layers, key=sensitivity, reverse=True)[:WORST_LAYERS]
        if missed and ranked:
            found.append(
                "worst layers: "
                + ", ".join(
                    f"{row['layer']} ({row['format']}, KL {sensitivity(row):.2e})" for row in ranked
                )
            )
        return found

    def as_dict(self) -> dict[str, Any]:
        """Return the judgement as plain Python objects, for accuracy.json and ``--json``."""
        return {
            name: getattr(self, name) for name in self.__dataclass_fields__ if name != "speed"
        } | {
            "passed": self.passed,
            "misses": self.misses,
        }


def check_budgets(judgement: Judgement, where: str) -> None:
    """Raise AccuracyError if the candidate misses a budget."""
    if judgement.passed:
        return
    raise AccuracyError(f"{where}: {'; '.join(judgement.misses)}")


def _measured(section: Mapping[str, Any] | None, name: str) -> tuple[float | None, Any]:
    """Return a value of a section of the judgement, and its 95% interval."""
    return (None, None) if section is None else (section[name], section[f"{name}_interval"])
