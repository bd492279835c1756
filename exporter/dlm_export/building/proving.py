"""Implements the stages of a build that check a finished bundle.

The stages compare a bundle with torch, and measure how much accuracy quantisation costs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import dlm_runtime
from dlm_export.building.quantising import Quantised, conditioned
from dlm_export.building.request import Job
from dlm_export.graph.taps import Tap
from dlm_export.judging.accuracy import rounded_cache
from dlm_export.judging.accuracy.run import JudgingOptions, judge_source, judge_units
from dlm_export.judging.accuracy.verdict import Judgement, check_budgets
from dlm_export.judging.parity import against_torch, by_layer
from dlm_export.judging.parity.verdict import Parity, require_parity
from dlm_export.judging.precision_search import sensitivity
from dlm_export.judging.sides.side import can_compare_commits
from dlm_export.judging.tuning.default_loop import with_levels
from dlm_export.judging.tuning.effort_levels import Levels, level_units
from dlm_export.judging.tuning.fit_in_build import fit_effort, fit_threshold
from dlm_export.judging.tuning.threshold import Refit, refit_steps
from dlm_export.progress import Stages
from dlm_export.quantising import samples
from dlm_export.quantising.quantisation import Quantisation
from dlm_export.workplace import Workplace

# Number of samples on which the build measures the loss from rounding the cache, if the user does
# not pass --judged.
CACHE_SAMPLES = 8
# Number of calibration states (canvases) per sample of the accuracy measurement. On these canvases,
# the build measures how much loss the quantisation of each layer causes. Each canvas takes as much
# time as ten passes.
STATES_A_SAMPLE = 2


@dataclass(frozen=True)
class Proof:
    """The results of all checks of a bundle.

    ``record`` is the content of accuracy.json. ``judgement`` is the measured loss of accuracy, and
    is ``None`` if the build did not measure it. ``threshold`` and ``levels`` are the fitted
    threshold and effort levels, and are ``None`` if they were not fitted. ``cache`` is the result
    of ``rounded_cache.judge_cache``: the loss from rounding the cache.
    """

    parity: Parity
    record: dict[str, Any]
    judgement: Judgement | None = None
    threshold: Refit | None = None
    levels: Levels | None = None
    cache: dict[str, Any] | None = None

    def applied(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """Return a copy of ``manifest`` with the fitted effort levels and the fitted threshold."""
        if self.threshold is None or self.levels is None:
            return dict(manifest)
        presets = dict(manifest["loop"]["presets"])
        if self.threshold.verdict in ("raised", "lowered"):
            assert self.threshold.preset is not None
            presets[self.threshold.preset] = presets[self.threshold.preset] | {
                "threshold": self.threshold.refitted.threshold
            }
        precision = manifest["precision"] | {"threshold": self.threshold.as_dict()}
        return with_levels(
            {**manifest, "precision": precision, "loop": manifest["loop"] | {"presets": presets}},
            self.levels,
        )


def prove(
    job: Job,
    quantised: Quantised | None,
    taps: Mapping[str, Tap],
    manifest: Mapping[str, Any],
    folder: Path,
    output: Path,
    workplace: Workplace,
    stages: Stages,
) -> Proof:
    """Compare the bundle in ``folder`` with torch, and measure its accuracy.

    ``output`` is the final path of the bundle. Error messages show this path. ``taps`` maps each
    layer to its inputs and outputs in the graph. Raises ParityError or AccuracyError.
    """
    if quantised is None:
        parity = _check_pass(job, manifest, folder, workplace, stages)
    else:  # compare each layer with the same layer in torch, for equal inputs
        with stages.stage("check parity", by_layer.units(job.source.network)):
            parity = by_layer.check_layers(
                folder,
                job.source.network,
                quantised.numbers,
                job.base,
                taps,
                cache_dtype=job.cache_dtype,
                is_simulated=job.request.on_gpu or quantised.is_simulated_on_cpu,
                on_done=stages.progress.advance,
                workplace=workplace,
            )
    require_parity(parity, f"{output}: not written, it differs from PyTorch")
    record: dict[str, Any] = {"parity": parity.as_dict()}
    cache = _judge_cache(job, quantised, folder, workplace, stages) if job.is_cache_judged else None
    if cache is not None:
        record["cache"] = cache
    if quantised is None:
        return Proof(parity, record, cache=cache)
    if quantised.calibration is not None:
        record["calibration"] = _statistics(quantised.numbers, quantised.calibration.provenance)
    record["auto"] = [asdict(point) for point in quantised.curve]
    if not job.request.is_judged:
        return Proof(parity, record, cache=cache)
    judgement, threshold, levels = _judge(job, quantised, folder, workplace, stages)
    check_budgets(judgement, f"{output}: not written")
    return Proof(
        parity, record | {"judgement": judgement.as_dict()}, judgement, threshold, levels, cache
    )


def _check_pass(
    job: Job, manifest: Mapping[str, Any], folder: Path, workplace: Workplace, stages: Stages
) -> Parity:
    """Compare whole passes of an unquantised bundle with torch.

    In a network with experts, a tiny difference can route a token to a different expert. The rest
    of the pass then computes different results. If whole passes of such a network differ, the
    function therefore compares the layers one by one.
    """
    source = job.source
    with stages.stage("check parity", against_torch.parity_units(source.presets, source.network)):
        parity = against_torch.check_parity(
            folder,
            source,
            source.presets,
            job.base,
            cache_dtype=job.cache_dtype,
            progress=stages.progress,
        )
    if not (parity.misses and source.network.mixtures()):
        return parity
    with stages.stage("check layers", by_layer.units(source.network)) as advance:
        return against_torch.by_layers(parity, folder, manifest, source, advance, workplace)


def _judge_cache(
    job: Job, quantised: Quantised | None, folder: Path, workplace: Workplace, stages: Stages
) -> dict[str, Any]:
    """Measure how much accuracy is lost if only the cached keys and values are rounded."""
    source, options = job.source, job.request.options.quantise
    with dlm_runtime.open(folder, engine="onnxruntime", check_hashes=False) as bundle:
        if quantised is not None and quantised.calibration is not None:
            data = quantised.calibration.data
        else:
            of, tokenizer = source.network, bundle.tokenizer
            data = samples.load_data(
                of, source.path, tokenizer, options.calibration, is_calibrating=False
            )
        judging = data.judging[: options.effort.judged or CACHE_SAMPLES]
        policy, seed = samples.comparable(source.presets[job.preset]), options.calibration.seed
        with stages.stage(
            "judge cache", len(rounded_cache.caches_of(source.network)) * len(judging)
        ) as advance:
            return rounded_cache.judge_cache(
                source, bundle, judging, job.cache_dtype, policy, seed, advance, workplace
            )


def _judge(
    job: Job, quantised: Quantised, folder: Path, workplace: Workplace, stages: Stages
) -> tuple[Judgement, Refit | None, Levels | None]:
    """Measure the bundle's accuracy. With "full" effort, also fit its threshold and levels."""
    source, options = job.source, job.request.options.quantise
    numbers, calibration = quantised.numbers, quantised.calibration
    assert calibration is not None
    effort = options.effort
    exact = effort.name == "full"
    policy, seed = samples.comparable(source.presets[job.preset]), options.calibration.seed
    judging = effort.chosen(calibration.data.judging)
    # Without texts, the bundle of a denoiser with self-conditioning makes no pass in the native
    # runtime (see ``judging.sides.drafting``).
    has_texts = effort.has_texts(source.network)
    is_idle = source.network.conditioning is not None and not has_texts
    engine = "none" if is_idle else "onnxruntime"
    with dlm_runtime.open(folder, engine=engine, check_hashes=False) as bundle:
        with stages.stage("judge", judge_units(judging)) as advance:
            name = numbers.recipe.name
            how = JudgingOptions(options.calibration, effort, options.budgets)
            judgement = judge_source(source, bundle, judging, name, policy, how, advance, workplace)
        # Use as many samples for fitting as for measuring the accuracy.
        fitting = calibration.data.calibration[: judgement.data["samples"]]
        threshold, levels = None, None
        if exact and can_compare_commits(source.network, policy):
            with stages.stage("fit threshold", refit_steps(len(fitting), policy)) as advance:
                threshold = fit_threshold(
                    source, bundle, fitting, job.preset, seed, advance, workplace
                )
            with stages.stage(
                "fit effort", level_units(policy, source.network, len(fitting))
            ) as advance:
                levels = fit_effort(source, bundle, fitting, threshold, advance)
    fitted = replace(calibration.data, calibration=fitting)
    states = calibration.states or list(
        samples.calibration_states(source, fitted, options.calibration, None)
    )
    if not exact:
        states = states[: STATES_A_SAMPLE * len(fitting)]
    states = conditioned(job, states, workplace, stages)
    with stages.stage(
        "sweep layers", sensitivity.units(source.network, len(source.network.units()), exact=exact)
    ) as advance:
        (lost,) = sensitivity.losses(
            numbers.parameters,
            source.network,
            [numbers],
            states,
            advance,
            exact=exact,
            workplace=workplace,
        )
    judgement = replace(
        judgement,
        layers=sensitivity.as_rows(lost, source.network, numbers.formats),
        layers_method="exact" if exact else "fisher",
        threshold=None if threshold is None else threshold.as_dict(),
    )
    return judgement.with_budgets(options.budgets), threshold, levels


def _statistics(done: Quantisation, provenance: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Summarise the calibration data and each layer's activation ranges, for accuracy.json."""
    if provenance is None or done.observers is None:
        return None
    layers = [observer.summary() for observer in done.observers.values()]
    reached = [each.as_dict() for each in done.reached.values()]
    return {**provenance, "observer": done.recipe.observer, "layers": layers, "experts": reached}
