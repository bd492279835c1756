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
from dlm_export.graph.taps import Tap
from dlm_export.judging import accuracy, layerwise, verify
from dlm_export.judging.judge import Judgement, check_budgets
from dlm_export.judging.parity import Parity, require_parity
from dlm_export.judging.sensitivity import layer_losses
from dlm_export.judging.threshold import Refit
from dlm_export.progress import Stages


@dataclass(frozen=True)
class Proof:
    """What was proven. ``judgement`` and ``threshold``: of quantised bundles; ``record``: the contents of accuracy.json."""

    parity: Parity
    record: dict[str, Any]
    judgement: Judgement | None = None
    threshold: Refit | None = None

    def applied(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """The manifest with the fitted threshold, and with the preset that it was fitted for set to it where it changed."""
        if self.threshold is None:
            return dict(manifest)
        presets = dict(manifest["loop"]["presets"])
        if self.threshold.verdict in ("raised", "lowered"):
            assert self.threshold.preset is not None
            presets[self.threshold.preset] = presets[self.threshold.preset] | {"threshold": self.threshold.refitted.threshold}
        precision = manifest["precision"] | {"threshold": self.threshold.as_dict()}
        return {**manifest, "precision": precision, "loop": manifest["loop"] | {"presets": presets}}


def prove(job: Job, quantised: Quantised | None, taps: Mapping[str, Tap], folder: Path, output: Path, stages: Stages) -> Proof:
    """Compare the bundle in ``folder`` with torch and judge it; messages call it ``output``.

    ``taps``: where layers stand in its graph.

    Raises ParityError, AccuracyError.
    """
    parity = _check_pass(job, folder, stages) if quantised is None else _check_layers(job, quantised, taps, folder, stages)
    require_parity(parity, f"{output}: not written, it differs from PyTorch")
    record: dict[str, Any] = {"parity": parity.as_dict()}
    if quantised is None:
        return Proof(parity, record)
    judgement, threshold = _judge(job, quantised, folder, stages)
    check_budgets(judgement, f"{output}: not written")
    assert quantised.calibration is not None
    record |= {
        "judgement": judgement.as_dict(),
        "calibration": accuracy.statistics(quantised.numbers, quantised.calibration.provenance),
        "auto": [point.as_dict() for point in quantised.curve],
    }
    return Proof(parity, record, judgement, threshold)


def _check_pass(job: Job, folder: Path, stages: Stages) -> Parity:
    """Full precision: whole passes and whole canvases."""
    source = job.source
    with stages.stage("check parity", verify.parity_units(source.presets)):
        return verify.check_parity(
            folder,
            source.network,
            lambda: families.load(source.parameters, source.network),
            source.presets,
            job.base,
            progress=stages.progress,
        )


def _check_layers(job: Job, quantised: Quantised, taps: Mapping[str, Tap], folder: Path, stages: Stages) -> Parity:
    """Quantised: layer by layer from equal inputs."""
    with stages.stage("check parity", layerwise.units(job.source.network)):
        return layerwise.check_layers(
            folder,
            job.source.network,
            quantised.numbers,
            job.base,
            taps,
            is_simulated=job.request.on_gpu or quantised.is_simulated_on_cpu,
            on_done=stages.progress.advance,
        )


def _judge(job: Job, quantised: Quantised, folder: Path, stages: Stages) -> tuple[Judgement, Refit]:
    """What quantisation costs, and the threshold that makes up for it."""
    source, options = job.source, job.request.options.quantise
    numbers, calibration = quantised.numbers, quantised.calibration
    assert calibration is not None
    judging = calibration.data.judging[: options.judged]
    fitting = calibration.data.calibration[: options.judged]
    with dlm_runtime.open(folder, engine="onnxruntime", check_hashes=False) as bundle:
        with stages.stage("judge", accuracy.judge_units(judging)) as advance:
            policy = source.presets[job.preset]
            name, seed = numbers.recipe.name, options.calibration.seed
            judgement = accuracy.judge_source(source, bundle, judging, name, policy, seed, advance)
        with stages.stage("fit threshold", accuracy.fit_units(fitting, policy)) as advance:
            threshold = accuracy.fit_threshold(source, bundle, fitting, job.preset, seed, advance)
    with stages.stage("sweep layers", len(numbers.formats)) as advance:
        denoiser = families.load(numbers.parameters, source.network)
        layers = layer_losses(denoiser, numbers, calibration.states, advance)
    return replace(judgement, layers=layers, threshold=threshold.as_dict()).with_budgets(options.budgets), threshold
