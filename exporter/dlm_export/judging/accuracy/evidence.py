"""Compares two denoisers on samples.

The candidate is the denoiser whose accuracy is measured. The reference is the denoiser with which
the candidate is compared. Everything that the reference does depends on the samples, the seed and
the policy only, not on the candidate. Two candidates that were compared with the same reference on
the same samples can therefore be compared with each other, pair by pair.

Both denoisers predict the same masked positions, and both generate text for every sample. They also
predict which tokens they would commit on the canvases of the reference's decoding runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dlm_calibration import metrics
from dlm_calibration.metrics import Decode, Frontier
from dlm_calibration.samples import Sample, samples_sha256
from dlm_calibration.states import MASK_RATIOS
from dlm_export.judging.accuracy.frontier import FrontierState, Met, met, predict_commitment
from dlm_export.judging.accuracy.masked import Kind, Masked, compare_masked, masked_canvases
from dlm_export.judging.accuracy.verdict import Judgement
from dlm_export.judging.sides.prompts import asked_of, runs_of
from dlm_export.judging.sides.side import JudgeError, Side, can_compare_commits, check_comparable
from dlm_runtime import Policy


def _states(run: Met, most: int | None) -> list[FrontierState]:
    """Choose at most ``most`` states of a run in which to predict what the denoisers would commit.

    The states are evenly spaced. Where they begin depends on the index of the sample.
    """
    found = run.deciding
    if most is None or len(found) <= most:
        return found
    shift = run.number % len(found)
    return [found[(shift + i * len(found) // most) % len(found)] for i in range(most)]


def judge(
    reference: Side,
    candidate: Side,
    samples: Sequence[Sample],
    *,
    policy: Policy,
    max_new_tokens: int,
    decode: Decode,
    seed: int = 0,
    noise_floor: Side | None = None,
    has_texts: bool = True,
    candidate_policy: Policy | None = None,
    canvases: int | None = None,
    on_done: Callable[[], None] = lambda: None,
) -> Judgement:
    """Compare a candidate with its reference on all samples. Raises JudgeError.

    Args:
        reference: The denoiser with which the candidate is compared.
        candidate: The denoiser to judge.
        samples: Held-out samples.
        policy: The policy with which both denoisers generate text.
        max_new_tokens: Number of tokens to generate after each prompt.
        decode: Converts generated IDs to text, up to the first end token. Returns ``None`` if there
            is no tokenizer.
        seed: Seed of the masks and of the bootstrap.
        noise_floor: The same denoiser as the reference, but it computes in the precision of the
            stored weights. It is compared with the reference, like the candidate.
        has_texts: False generates no text.
        candidate_policy: Policy of the candidate's texts, if it differs from ``policy``.
        canvases: Maximum number of masked canvases per sample, and of states per decoding run.
            ``None``: one canvas per mask ratio, and all states.
        on_done: Called once per sample, and once per decoding run.
    """
    if not samples:
        raise JudgeError("no samples to judge on: give held-out data")
    if max_new_tokens < 1:
        raise JudgeError("judging needs at least one new token")
    others = [candidate, *([noise_floor] if noise_floor is not None else [])]
    for other in others:
        check_comparable(reference, other)
    for number, sample in enumerate(samples):
        if (sample.tokens == reference.mask_token_id).any():
            raise JudgeError(
                f"sample {number + 1}: its text contains the mask token ({reference.mask_token_id}). Remove this sample."
            )
    limit = min(side.max_canvas_length for side in (reference, *others))
    runs: list[Met] = []
    if has_texts:
        asked = [
            asked_of(sample, number, max_new_tokens, limit) for number, sample in enumerate(samples)
        ]
        runs = [
            met(reference, number, prompt, canvases, policy)
            for number, ((prompt, _), canvases) in enumerate(
                zip(asked, reference.courses(asked, policy), strict=True)
            )
        ]
    are_compared = can_compare_commits(reference, policy)
    states = [
        (run.number, state) for run in runs if are_compared for state in _states(run, canvases)
    ]
    seen = [
        masked
        for number, sample in enumerate(samples)
        for masked in masked_canvases(
            sample, number, reference, policy=policy, limit=limit, seed=seed, most=canvases
        )
    ]
    views = [each.view for each in seen]
    if noise_floor is not None:
        noise_floor.see(views)
    reference.see([*views, *(state.view for _, state in states)])
    compared, *rest = compare_masked(reference, others, seen, on_done)
    frontier = Frontier(reference.mask_token_id)
    for number, state in states:
        commits = (predict_commitment(side, state, policy) for side in (reference, candidate))
        frontier.add(number, state.mask_ratio, *commits)
    stops = reference.eos_token_ids
    theirs = [metrics.as_run(run.tokens, run.prompt, run.nfe, stops, decode) for run in runs]
    given = [(run.prompt, run.room) for run in runs]
    texts = runs_of(candidate, given, candidate_policy or policy, decode, on_done)
    # An autoregressive denoiser is judged by its causal passes, which decide its text.
    is_causal = reference.is_verifying and reference.shift == 1
    kind: Kind = "causal" if is_causal else "masked"
    ours, rest = compared.of(kind), [each.of(kind) for each in rest]
    count = len(samples)
    floor = metrics.summarise(rest[0].rows, rest[0].sample, count, seed) if rest else None
    buckets = [
        {"mask_ratio": mask_ratio}
        | metrics.summarise(ours.rows.take(chosen), ours.sample[chosen], count, seed)
        for index, mask_ratio in enumerate(MASK_RATIOS)
        if (chosen := ours.ratio == index).any()
    ]
    text_bytes = _text_bytes(samples, decode)

    def summary(seen: Masked, *, is_bound: bool) -> dict[str, Any]:
        """Summarise rows. If ``is_bound`` is false, their loss is no bound of the likelihood."""
        return metrics.summarise(seen.rows, seen.sample, count, seed) | {
            f"{who}_bits_per_byte": metrics.bits_per_byte(
                float(seen.weight @ losses), text_bytes if is_bound else 0
            )
            for who, losses in (
                ("reference", seen.rows.reference_ce),
                ("candidate", seen.rows.candidate_ce),
            )
        }

    speculation = None
    if reference.is_verifying:
        speculation = {
            "draft": summary(compared.of("draft"), is_bound=False),
            "causal": summary(compared.of("causal"), is_bound=True),
        }
    return Judgement(
        reference=reference.name,
        candidate=candidate.name,
        data={"samples": count, "sha256": samples_sha256(samples), "seed": seed},
        policy=policy.as_dict() | {"max_new_tokens": max_new_tokens},
        buckets=buckets,
        overall=summary(ours, is_bound=is_causal or reference.draft_block is None),
        speculation=speculation,
        frontier=frontier.as_dict() if frontier.is_measured else None,
        free_running=metrics.summarise_runs(
            samples,
            [
                decode(run.prompt) if sample.prompt is None else sample.prompt
                for run, sample in zip(runs, samples, strict=True)
            ],
            theirs,
            texts,
            seed,
        )
        if runs
        else None,
        noise_floor=None
        if floor is None
        else {name: floor[name] for name in ("ce_increase", "top1", "kl_mean")},
    )


def _text_bytes(samples: Sequence[Sample], decode: Decode) -> int:
    """Return the number of UTF-8 bytes in the text to predict. If there is no tokenizer, return 0."""
    texts = [
        decode(sample.tokens.tolist()) if sample.answer is None else sample.answer
        for sample in samples
    ]
    return (
        0 if None in texts else sum(len((text or "").encode("utf-8", "replace")) for text in texts)
    )
