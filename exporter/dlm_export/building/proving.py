"""The stages that prove a finished bundle: parity with torch, and what quantisation costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import dlm_runtime
from dlm_export import families
from dlm_export.building.quantising import Quantised
from dlm_export.building.request import Job
from dlm_export.judging import accuracy, verify
from dlm_export.judging.judge import Judgement
from dlm_export.judging.parity import Parity, require_parity
from dlm_export.judging.threshold import Refit
from dlm_export.network.denoiser import Denoiser
from dlm_export.progress import Stages
from dlm_export.quantising import calibrate

FITTED = 4  # times as many samples as are judged by: a threshold moves single answers


@dataclass(frozen=True)
class Proof:
    """What was proven. ``judgement`` and ``threshold``: of quantised bundles; ``record``: the contents of accuracy.json."""

    parity: Parity
    record: dict[str, Any]
    judgement: Judgement | None = None
    threshold: Refit | None = None

    def applied(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """The manifest with the fitted threshold, and with the preset that it was fitted for set to it where that helps."""
        if self.threshold is None:
            return dict(manifest)
        presets = dict(manifest["loop"]["presets"])
        if self.threshold.reached:
            assert self.threshold.preset is not None
            presets[self.threshold.preset] = presets[self.threshold.preset] | {"threshold": self.threshold.refitted.threshold}
        precision = manifest["precision"] | {"threshold": self.threshold.as_dict()}
        return {**manifest, "precision": precision, "loop": manifest["loop"] | {"presets": presets}}


def prove(job: Job, quantised: Quantised | None, folder: Path, output: Path, stages: Stages) -> Proof:
    """Compare the bundle in ``folder`` with torch and judge it; messages call it ``output``.

    Raises ParityError, AccuracyError.
    """
    parity = _check_parity(job, quantised, folder, stages)
    require_parity(parity, f"{output}: not written, it differs from PyTorch")
    record: dict[str, Any] = {"parity": parity.as_dict()}
    if quantised is None:
        return Proof(parity, record)
    judgement, threshold = _judge(job, quantised, folder, stages)
    accuracy.check_budgets(judgement, f"{output}: not written")
    assert quantised.calibration is not None
    record |= {
        "judgement": judgement.as_dict(),
        "calibration": accuracy.statistics(quantised.numbers, quantised.calibration.provenance),
        "auto": [point.as_dict() for point in quantised.curve],
    }
    return Proof(parity, record, judgement, threshold)


def _check_parity(job: Job, quantised: Quantised | None, folder: Path, stages: Stages) -> Parity:
    source = job.source

    def load() -> Denoiser:
        if quantised is None:
            return families.load(source.parameters, source.network)
        denoiser = families.load(quantised.numbers.parameters, source.network)
        calibrate.simulate(denoiser, quantised.numbers)
        return denoiser

    kind = job.base if quantised is None else _tolerance_of(job.base, quantised)
    with stages.stage("check parity", verify.parity_units(source.presets)):
        return verify.check_parity(folder, source.network, load, source.presets, kind, progress=stages.progress)


def _tolerance_of(base: str, quantised: Quantised) -> str:
    """Which of ``parity.TOLERANCES`` a quantised bundle is held to."""
    if base != "bf16":
        return "quantised"
    return "four-bit activations, bf16" if quantised.uses("nvfp4") else "quantised, bf16"


def _judge(job: Job, quantised: Quantised, folder: Path, stages: Stages) -> tuple[Judgement, Refit]:
    """What quantisation costs, and the threshold that makes up for it."""
    source, options = job.source, job.request.options.quantise
    numbers, calibration = quantised.numbers, quantised.calibration
    assert calibration is not None
    judging = calibration.data.judging[: options.judged]
    fitting = calibration.data.calibration[: FITTED * options.judged]
    with dlm_runtime.open(folder, engine="onnxruntime", check_hashes=False) as bundle:
        with stages.stage("judge", accuracy.judge_units(judging)) as advance:
            policy = source.presets[job.preset]
            name, seed = numbers.recipe.name, options.calibration.seed
            judgement = accuracy.judge_source(source, bundle, judging, name, policy, seed, advance)
        with stages.stage("fit threshold", accuracy.fit_units(fitting)) as advance:
            threshold = accuracy.fit_threshold(source, bundle, fitting, job.preset, advance)
    with stages.stage("sweep layers", len(numbers.formats)) as advance:
        denoiser = families.load(numbers.parameters, source.network)
        layers = accuracy.layer_losses(denoiser, numbers, calibration.states, advance)
    return replace(judgement, layers=layers, threshold=threshold.as_dict()).with_budgets(options.budgets), threshold
