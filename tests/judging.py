"""Judges a candidate against its reference on given samples, for tests.

The candidate and the reference are loaded completely, so both can generate whole answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dlm_calibration.metrics import Decode
from dlm_calibration.samples import Sample
from dlm_export.judging.accuracy.evidence import Evidence
from dlm_export.judging.accuracy.verdict import Judgement
from dlm_export.judging.sides.side import JudgeError, Predictor, Scorer
from dlm_runtime import Policy


def judge(
    reference: Predictor,
    candidate: Predictor,
    samples: Sequence[Sample],
    *,
    policy: Policy,
    max_new_tokens: int,
    decode: Decode,
    seed: int = 0,
    noise_floor: Scorer | None = None,
    free_runs: int | None = None,
    on_done: Callable[[], None] = lambda: None,
) -> Judgement:
    """Judge a candidate on all held-out samples.

    Both denoisers make predictions for the canvases of the reference's runs. The predictions are
    compared at the positions that a pass may commit (the frontier).

    In addition, each denoiser generates its own answers for the first ``free_runs`` samples, or for
    all samples if ``free_runs`` is None. ``on_done`` is called once for each sample,
    and once more for each of the first ``free_runs`` samples. Raises JudgeError.
    """
    if free_runs is not None and free_runs < 1:
        raise JudgeError("judging needs at least one free run")
    evidence = Evidence(
        reference,
        candidate,
        samples,
        policy=policy,
        max_new_tokens=max_new_tokens,
        decode=decode,
        seed=seed,
        noise_floor=noise_floor,
        states_of="reference",
        free=reference,
        free_runs=free_runs,
    )
    evidence.add(len(samples), on_done)
    return evidence.judgement()
