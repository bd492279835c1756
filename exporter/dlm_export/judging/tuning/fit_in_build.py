"""Threshold and effort levels of a bundle, fitted while it is built: its source is at hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import dlm_runtime
from dlm_calibration.states import Sample
from dlm_export.judging.sides.bundle import BundlePredictor
from dlm_export.judging.sides.layerwise import shown_source
from dlm_export.judging.sides.prompts import decoder, new_tokens
from dlm_export.judging.sides.side import Generator
from dlm_export.judging.tuning.effort_levels import Levels, fit_levels
from dlm_export.judging.tuning.replay import Recording, record
from dlm_export.judging.tuning.threshold import (
    Refit,
    check_policy,
    refit_by_replay,
    refit_steps,
    refit_threshold,
)
from dlm_runtime.policy import Policy

if TYPE_CHECKING:
    from dlm_export.sources import Source
    from dlm_export.workplace import Workplace


def record_runs(
    source: Source,
    bundle: dlm_runtime.Bundle,
    samples: Sequence[Sample],
    preset: str,
    on_done: Callable[[], None],
) -> Recording:
    """The bundle's runs under a preset of its source, for thresholds and effort levels to be fitted
    by a replay of them.

    ``on_done`` is called once a run, of which there are as many as samples at most.
    """
    policy, candidate = source.presets[preset].greedy(), BundlePredictor(bundle, "candidate")
    check_policy(policy)
    length = new_tokens(samples, policy, source.network)
    return record(candidate, samples, policy, length, candidate.max_canvas_length, on_done)


def fit_threshold(
    source: Source,
    bundle: dlm_runtime.Bundle,
    samples: Sequence[Sample],
    preset: str,
    seed: int,
    on_done: Callable[[], None],
    *,
    recording: Recording | None,
    workplace: Workplace | None = None,
) -> Refit:
    """Whether the bundle wants another threshold than its source; on samples that are not judged
    by. See ``judge_source``.

    Thresholds are tried by a replay of ``recording``; None: by generations of both.
    """
    import torch

    from dlm_export import families
    from dlm_export.judging.sides.torch import TorchPredictor

    c, policy, candidate = (
        source.network,
        source.presets[preset].greedy(),
        BundlePredictor(bundle, "candidate"),
    )
    length, decode = new_tokens(samples, policy, c), decoder(bundle)
    if recording is not None:
        seer = shown_source(source, "fp32", torch.float32, workplace)
        return refit_by_replay(
            seer, candidate, recording, length, decode, preset=preset, seed=seed, on_done=on_done
        )
    reference = TorchPredictor(families.load(source.parameters, c), "fp32")
    return refit_threshold(
        reference,
        candidate,
        samples,
        policy,
        length,
        decode,
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
    *,
    recording: Recording | None,
) -> Levels:
    """Effort levels of the preset that ``threshold`` was fitted for, with what came of that. See
    ``fit_threshold``.
    """
    assert threshold.preset is not None
    policy = (
        source.presets[threshold.preset]
        .greedy()
        .with_fields({"threshold": threshold.refitted.threshold})
    )
    length, decode = new_tokens(samples, policy, source.network), decoder(bundle)
    side: Generator = BundlePredictor(bundle, "candidate") if recording is None else recording.side
    return fit_levels(
        side,
        samples if recording is None else recording.samples,
        policy,
        length,
        decode,
        preset=threshold.preset,
        found_by="generations" if recording is None else "replay",
        on_done=on_done,
    )


def fit_units(samples: Sequence[Sample], policy: Policy) -> int:
    """How often ``fit_threshold`` calls ``on_done``, at most."""
    return refit_steps(len(samples), policy)
