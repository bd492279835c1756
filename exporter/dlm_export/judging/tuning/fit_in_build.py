"""Fits a bundle's commit threshold and effort levels during the build."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

import dlm_runtime
from dlm_calibration.samples import Sample
from dlm_export.judging.sides.bundle import BundlePredictor
from dlm_export.judging.sides.layerwise import shown_source
from dlm_export.judging.sides.prompts import decoder, new_tokens
from dlm_export.judging.tuning.effort_levels import Levels, fit_levels
from dlm_export.judging.tuning.threshold import Refit, refit_threshold
from dlm_export.sources import Source
from dlm_export.workplace import Workplace


def fit_threshold(
    source: Source,
    bundle: dlm_runtime.Bundle,
    samples: Sequence[Sample],
    preset: str,
    seed: int,
    on_done: Callable[[], None],
    workplace: Workplace | None = None,
) -> Refit:
    """Check whether the bundle needs a different commit threshold than its source.

    Both the bundle and the source generate text for ``samples``. The bundle's accuracy must be
    measured on other samples. The docstring of ``refit_threshold`` explains the details.
    """
    policy = source.presets[preset].greedy()
    return refit_threshold(
        shown_source(source, "fp32", torch.float32, workplace),
        BundlePredictor(bundle, "candidate"),
        samples,
        policy,
        new_tokens(samples, policy, source.network, bundle),
        decoder(bundle),
        preset=preset,
        seed=seed,
        on_done=on_done,
    )


def fit_effort(
    source: Source,
    bundle: dlm_runtime.Bundle,
    samples: Sequence[Sample],
    threshold: Refit,
    on_done: Callable[[], None],
) -> Levels:
    """Fit the effort levels of the preset that ``threshold`` names, with the fitted threshold."""
    assert threshold.preset is not None
    fitted = {"threshold": threshold.refitted.threshold}
    policy = source.presets[threshold.preset].greedy().with_fields(fitted)
    return fit_levels(
        BundlePredictor(bundle, "candidate"),
        samples,
        policy,
        new_tokens(samples, policy, source.network, bundle),
        decoder(bundle),
        preset=threshold.preset,
        on_done=on_done,
    )
