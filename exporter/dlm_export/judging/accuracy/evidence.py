"""Compares two denoisers on samples.

The candidate is the denoiser whose accuracy is measured. The reference is the denoiser with which
the candidate is compared. Everything that the reference does depends on the samples, the seed and
the policy only, not on the candidate. Two candidates that were compared with the same reference on
the same samples can therefore be compared with each other, pair by pair.

Both denoisers predict the same masked positions, and both generate text for every sample. They also
predict which tokens they would commit on the canvases of the reference's decoding runs.

The reference may be a ``Seer``: a denoiser whose layers are loaded one at a time. A ``Seer`` must
receive the canvases of several samples at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dlm_calibration import metrics
from dlm_calibration.metrics import Decode, Frontier, Run
from dlm_calibration.samples import Sample, samples_sha256
from dlm_calibration.states import MASK_RATIOS
from dlm_export.judging.accuracy.frontier import FrontierState, Met, meet, met, predict_commitment
from dlm_export.judging.accuracy.masked import (
    Masked,
    MaskedCanvas,
    compare_masked,
    masked_canvases,
)
from dlm_export.judging.accuracy.verdict import Judgement
from dlm_export.judging.sides.prompts import asked_of
from dlm_export.judging.sides.side import (
    JudgeError,
    Predictor,
    Scorer,
    Seer,
    can_compare_commits,
    check_comparable,
    is_verifying,
)
from dlm_runtime import Policy


@dataclass(frozen=True, eq=False)
class Compared:
    """The texts that the reference (``theirs``) and the candidate (``ours``) generated.

    ``number`` is the index of the sample. ``prompt`` is the text of the prompt, or ``None`` if there
    is no tokenizer.
    """

    number: int
    prompt: str | None
    theirs: Run
    ours: Run


@dataclass(frozen=True, eq=False)
class Evidence:
    """The result of comparing the denoisers on the samples.

    ``masked[0]`` compares the candidate with the reference. If there is a noise floor,
    ``masked[1]`` compares the noise floor with the reference.
    """

    masked: list[Masked]
    frontier: Frontier
    runs: list[Compared]


class Pair:
    """Two denoisers to compare. The docstring of ``judge`` explains the arguments."""

    def __init__(
        self,
        reference: Scorer,
        candidate: Predictor,
        *,
        policy: Policy,
        candidate_policy: Policy,
        max_new_tokens: int,
        decode: Decode,
        seed: int,
        noise_floor: Scorer | None,
        has_texts: bool,
        canvases: int | None,
    ) -> None:
        self.others = [candidate, *([noise_floor] if noise_floor is not None else [])]
        self._reference, self._candidate, self._floor = reference, candidate, noise_floor
        self._policy, self._candidate_policy = policy, candidate_policy
        self._new_tokens, self._decode, self._seed = max_new_tokens, decode, seed
        self._has_texts, self._canvases = has_texts, canvases
        self._limit = min(p.max_canvas_length for p in (reference, *self.others))

    def _masked(self, number: int, sample: Sample) -> list[MaskedCanvas]:
        return list(
            masked_canvases(
                sample,
                number,
                self._reference,
                policy=self._policy,
                limit=self._limit,
                seed=self._seed,
                most=self._canvases,
            )
        )

    def _runs(self, samples: Sequence[tuple[int, Sample]]) -> list[Met]:
        """Generate text for the samples with the reference."""
        reference, policy = self._reference, self._policy
        if not self._has_texts:
            return []
        if not isinstance(reference, Seer):
            assert isinstance(reference, Predictor)
            return [
                meet(reference, sample, number, policy, self._new_tokens, self._limit)
                for number, sample in samples
            ]
        asked = [
            asked_of(sample, number, self._new_tokens, self._limit) for number, sample in samples
        ]
        return [
            met(reference, number, prompt, canvases, policy)
            for (number, _), (prompt, _), canvases in zip(
                samples, asked, reference.courses(asked, policy), strict=True
            )
        ]

    def _states(self, run: Met) -> list[FrontierState]:
        """Choose the states of a run in which both denoisers predict what they would commit.

        The states are evenly spaced. Where they begin depends on the index of the sample.
        """
        if not can_compare_commits(self._reference, self._policy):
            return []
        found, most = run.deciding, self._canvases
        if most is None or len(found) <= most:
            return found
        shift = run.number % len(found)
        return [found[(shift + i * len(found) // most) % len(found)] for i in range(most)]

    def compare(
        self, samples: Sequence[tuple[int, Sample]], on_done: Callable[[], None]
    ) -> Evidence:
        """Compare the denoisers on the samples, which have their indices beside them.

        ``on_done`` is called once per sample, and once per decoding run. Raises JudgeError.
        """
        runs = self._runs(samples)
        states = [(run.number, state) for run in runs for state in self._states(run)]
        canvases = [seen for number, sample in samples for seen in self._masked(number, sample)]
        views = [seen.view for seen in canvases]
        for side, seen in (
            (self._floor, views),
            (self._reference, [*views, *(state.view for _, state in states)]),
        ):
            if isinstance(side, Seer):
                side.see(seen)
        masked = compare_masked(self._reference, self.others, canvases, on_done)
        found = Evidence(masked, Frontier(self._reference.mask_token_id), [])
        for number, state in states:
            commits = (
                predict_commitment(side, state, self._policy)
                for side in (self._reference, self._candidate)
            )
            found.frontier.add(number, state.mask_ratio, *commits)
        prompts = dict(samples)
        for run in runs:
            made = self._candidate.generate(run.prompt, run.room, self._candidate_policy)
            given = prompts[run.number].prompt
            prompt = self._decode(run.prompt) if given is None else given
            theirs = self._as_run(run, run.tokens, run.nfe)
            found.runs.append(Compared(run.number, prompt, theirs, self._as_run(run, *made)))
            on_done()
        return found

    def _as_run(self, run: Met, tokens: Sequence[int], nfe: int) -> Run:
        return metrics.as_run(tokens, run.prompt, nfe, self._reference.eos_token_ids, self._decode)


def judge(
    reference: Scorer,
    candidate: Predictor,
    samples: Sequence[Sample],
    *,
    policy: Policy,
    max_new_tokens: int,
    decode: Decode,
    seed: int = 0,
    noise_floor: Scorer | None = None,
    has_texts: bool = True,
    candidate_policy: Policy | None = None,
    canvases: int | None = None,
    on_done: Callable[[], None] = lambda: None,
) -> Judgement:
    """Compare a candidate with its reference on all samples. Raises JudgeError.

    Args:
        reference: A ``Predictor`` or a ``Seer``.
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
    pair = Pair(
        reference,
        candidate,
        policy=policy,
        candidate_policy=candidate_policy or policy,
        max_new_tokens=max_new_tokens,
        decode=decode,
        seed=seed,
        noise_floor=noise_floor,
        has_texts=has_texts,
        canvases=canvases,
    )
    for other in pair.others:
        check_comparable(reference, other)
    for number, sample in enumerate(samples):
        if (sample.tokens == reference.mask_token_id).any():
            raise JudgeError(
                f"sample {number + 1}: its text contains the mask token ({reference.mask_token_id}). Remove this sample."
            )
    found = pair.compare(list(enumerate(samples)), on_done)
    compared, *rest = found.masked
    ours, rest = compared.of("masked"), [each.of("masked") for each in rest]
    count, frontier, made = len(samples), found.frontier, found.runs
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
    if is_verifying(reference):
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
        overall=summary(ours, is_bound=reference.draft_block is None),
        speculation=speculation,
        frontier=frontier.as_dict() if frontier.is_measured else None,
        free_running=metrics.summarise_runs(
            [samples[run.number] for run in made],
            [run.prompt for run in made],
            [run.theirs for run in made],
            [run.ours for run in made],
            seed,
        )
        if made
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
