"""Compares two denoisers sample by sample, so that the comparison can stop after any sample.

The candidate is the denoiser whose accuracy is measured. The reference is the denoiser with which
the candidate is compared. A decoding run is one generation with all its passes.
Part of the comparison uses the canvases of decoding runs. Either the reference or the candidate
generates these runs:

- If the reference generates the runs, both denoisers generate text for every sample. Such a
  comparison is slow, because the reference makes all passes of its own runs.
- If the candidate generates the runs, the reference generates no text. It only predicts which
  tokens it would commit on each canvas of the candidate's runs.

In the second case, the reference may be a ``Seer``: a denoiser whose layers are loaded one at a
time. A ``Seer`` must receive the canvases of several samples at once. If the reference would commit
the same tokens as the candidate at every pass, then the reference's own run would be equal to the
candidate's run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from dlm_calibration import metrics
from dlm_calibration.metrics import Decode, Frontier, Run
from dlm_calibration.samples import Sample, samples_sha256
from dlm_calibration.states import MASK_RATIOS
from dlm_export.judging.accuracy.frontier import Met, follow, meet, meet_within, predict_commitment
from dlm_export.judging.accuracy.masked import Masked, compare_masked, masked_canvases
from dlm_export.judging.accuracy.verdict import Budgets, Judgement
from dlm_export.judging.sides.side import JudgeError, Predictor, Scorer, Seer, check_comparable
from dlm_runtime import Policy

DECIDING_SAMPLES = 8  # with fewer samples, the comparison does not stop early

Side = Literal["reference", "candidate"]


class Evidence:
    """Compares a candidate with a reference on the samples of ``pool``.

    Each call of ``add`` compares the denoisers on the next samples. ``states_of`` names the
    denoiser that generates the decoding runs. ``free`` generates text with the reference. If
    ``free`` is ``None``, the reference generates no text, and only predicts tokens on the
    candidate's canvases.
    """

    def __init__(
        self,
        reference: Scorer,
        candidate: Predictor,
        pool: Sequence[Sample],
        *,
        policy: Policy,
        max_new_tokens: int,
        decode: Decode,
        seed: int = 0,
        noise_floor: Scorer | None = None,
        states_of: Side = "candidate",
        free: Predictor | None = None,
        free_runs: int | None = None,
        candidate_policy: Policy | None = None,
    ) -> None:
        """Check that the denoisers can be compared on the samples of ``pool``. Raises JudgeError.

        ``decode`` converts generated IDs to text, up to the first end token. ``decode`` returns
        ``None`` if there is no tokenizer. ``noise_floor`` is the same denoiser as the reference,
        but computes in the precision of the stored weights. The class compares ``noise_floor`` with
        the reference in the same way as it compares the candidate. ``free`` generates text for at
        most ``free_runs`` samples, or for all samples if ``free_runs`` is ``None``. If
        ``candidate_policy`` is not ``None``, the candidate generates text with this policy. In this
        case, ``states_of`` must be "reference".
        """
        assert candidate_policy is None or states_of == "reference"
        if not pool:
            raise JudgeError("no samples to judge on: give held-out data")
        if max_new_tokens < 1:
            raise JudgeError("judging needs at least one new token")
        self._others = [candidate, *([noise_floor] if noise_floor is not None else [])]
        for other in self._others:
            check_comparable(reference, other)
        for number, sample in enumerate(pool):
            if (sample.tokens == reference.mask_token_id).any():
                raise JudgeError(
                    f"sample {number + 1}: its text contains the mask token ({reference.mask_token_id}). Remove this sample."
                )
        self.pool, self.seed, self._policy, self._decode = list(pool), seed, policy, decode
        self._candidate_policy = candidate_policy or policy
        self._reference, self._candidate, self._floor = reference, candidate, noise_floor
        self._states_of, self._free, self._free_runs = states_of, free, free_runs
        self._new_tokens = max_new_tokens
        self._limit = min(p.max_canvas_length for p in (reference, *self._others))
        self._masked: list[list[Masked]] = [[] for _ in self._others]
        self._frontier = Frontier(reference.mask_token_id)
        self._run_samples: list[Sample] = []
        self._prompts: list[str | None] = []
        self._runs: tuple[list[Run | None], list[Run]] = ([], [])
        self._nfe: list[
            float
            # For each run, the number of passes that the reference needs, either counted or estimated.
        ] = []
        # For each run of the candidate, true if the reference would commit the same tokens.
        self._equal: list[bool] = []
        self.judged = self._freely = 0

    def add(self, count: int, on_done: Callable[[], None] = lambda: None) -> None:
        """Compare the denoisers on the next ``count`` samples. Raises JudgeError.

        ``on_done`` is called once per sample, and once per decoding run.
        """
        taken = list(enumerate(self.pool))[self.judged : self.judged + count]
        block_length, policy = self._policy.block_length, self._policy
        canvases = [
            seen
            for number, sample in taken
            for seen in masked_canvases(
                sample,
                number,
                self._reference,
                block_length=block_length,
                limit=self._limit,
                seed=self.seed,
            )
        ]
        self.judged += count
        if self._states_of == "reference":
            assert self._free is not None
            taken = taken[
                : None if self._free_runs is None else max(0, self._free_runs - len(self._prompts))
            ]
            runs = [
                meet(self._free, sample, number, policy, self._new_tokens, self._limit)
                for number, sample in taken
            ]
        else:
            # Limit the number of runs, because a loop that commits one token per pass needs many
            # passes. All runs together may need at most as many passes as there are masked
            # canvases.
            least = max(1, (self._free_runs or 0) - self._freely)
            passes = len(canvases)
            runs = meet_within(
                self._candidate,
                taken,
                policy,
                self._new_tokens,
                self._limit,
                passes=passes,
                least=least,
            )
        views = [seen.view for seen in canvases]
        if isinstance(self._floor, Seer):
            self._floor.see(views)
        if isinstance(self._reference, Seer):
            walks = [run.walk(self._reference.shift) for run in runs]
            self._reference.see([*views, *(view for run in runs for view in run.views)], walks)
        for parts, found in zip(
            self._masked,
            compare_masked(self._reference, self._others, canvases, on_done),
            strict=True,
        ):
            parts.append(found)
        for walk, run in enumerate(runs):
            self._add_run(walk, run)
            on_done()

    def _add_run(self, walk: int, run: Met) -> None:
        """Compare both denoisers on the canvases of ``run``.

        ``walk`` is the index of ``run`` in the list of runs that ``Seer.see`` has received.
        """
        reference, policy, sample = self._reference, self._policy, self.pool[run.number]
        for state in run.deciding:
            theirs = predict_commitment(reference, state, policy, reference.scores)
            self._frontier.add(
                state.mask_ratio,
                theirs,
                predict_commitment(self._candidate, state, policy, reference.scores),
            )
        met = self._as_run(run, run.tokens, run.nfe)
        if self._states_of == "reference":
            made = self._candidate.generate(run.prompt, run.room, self._candidate_policy)
            self._keep(sample, run, met, self._as_run(run, *made), run.nfe)
            return
        known, nfe = None, float(run.nfe)
        if isinstance(reference, Seer):
            followed = follow(reference, walk, run, policy)
            self._equal.append(followed.is_equal)
            known, nfe = met if followed.is_equal else None, followed.nfe
        if self._free is not None and (self._free_runs is None or self._freely < self._free_runs):
            self._freely += 1
            known = self._as_run(run, *self._free.generate(run.prompt, run.room, policy))
            nfe = known.nfe
        self._keep(sample, run, known, met, nfe)

    def _as_run(self, run: Met, tokens: Sequence[int], nfe: int) -> Run:
        return metrics.as_run(tokens, run.prompt, nfe, self._reference.eos_token_ids, self._decode)

    def _keep(self, sample: Sample, run: Met, theirs: Run | None, ours: Run, nfe: float) -> None:
        self._run_samples.append(sample)
        self._prompts.append(self._decode(run.prompt) if sample.prompt is None else sample.prompt)
        self._runs[0].append(theirs)
        self._runs[1].append(ours)
        self._nfe.append(nfe)

    def judgement(self) -> Judgement:
        """Summarise the comparison of all samples so far."""
        ours, *rest = [Masked.join(parts) for parts in self._masked]
        count, seed = self.judged, self.seed
        floor = metrics.summarise(rest[0].rows, rest[0].sample, count, seed) if rest else None
        buckets = [
            {"mask_ratio": mask_ratio}
            | metrics.summarise(ours.rows.take(chosen), ours.sample[chosen], count, seed)
            for index, mask_ratio in enumerate(MASK_RATIOS)
            if (chosen := ours.ratio == index).any()
        ]
        text_bytes = _text_bytes(self.pool[:count], self._decode)
        bound = {
            "reference_bits_per_byte": metrics.bits_per_byte(
                float(ours.weight @ ours.rows.reference_ce), text_bytes
            ),
            "candidate_bits_per_byte": metrics.bits_per_byte(
                float(ours.weight @ ours.rows.candidate_ce), text_bytes
            ),
        }
        runs = metrics.summarise_runs(
            self._run_samples, self._prompts, *self._runs, seed, self._nfe
        )
        return Judgement(
            reference=self._reference.name,
            candidate=self._candidate.name,
            data={"samples": count, "sha256": samples_sha256(self.pool), "seed": seed},
            policy=self._policy.as_dict() | {"max_new_tokens": self._new_tokens},
            buckets=buckets,
            overall=metrics.summarise(ours.rows, ours.sample, count, seed) | bound,
            frontier=self._frontier.as_dict(),
            free_running=runs
            | {"equal_by_induction": float(np.mean(self._equal)) if self._equal else None},
            effort={
                "states_of": self._states_of,
                "free_runs": len(self._prompts) if self._states_of == "reference" else self._freely,
            },
            noise_floor=None
            if floor is None
            else {name: floor[name] for name in ("ce_increase", "top1", "kl_mean")},
        )

    def is_decided(self, judgement: Judgement, budgets: Budgets) -> bool:
        """Return True if more samples would hardly change which budgets are met.

        The function computes a 95% interval for each value that has a limit in ``budgets``. It
        returns True if no interval contains the limit of its value. If there are no budgets, it
        returns False.
        """
        if self.judged < DECIDING_SAMPLES:
            return False
        ours = Masked.join(self._masked[0])
        right = [
            float(metrics.same_answer(run.text, sample.answer))
            for run, sample in zip(self._runs[1], self._run_samples, strict=True)
            if sample.answer is not None
        ]
        hits, rows = (
            np.bincount(ours.sample, weights, self.judged)
            for weights in (ours.rows.rank == 0, None)
        )
        intervals = {
            "max_ce_increase": judgement.overall["ce_increase_interval"],
            "min_top1": metrics.ratio_interval(hits, rows, self.seed),
            "max_nfe_ratio": judgement.free_running["nfe_ratio_interval"],
            "min_task": metrics.difference_interval(np.array(right), self.seed) if right else None,
        }
        asked = {name: limit for name in intervals if (limit := getattr(budgets, name)) is not None}
        return bool(asked) and all(
            (interval := intervals[name]) is not None and not interval[0] <= limit <= interval[1]
            for name, limit in asked.items()
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
