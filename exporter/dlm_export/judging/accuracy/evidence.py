"""Compares two denoisers sample by sample, so that the comparison can stop after any sample.

The candidate is the denoiser whose accuracy is measured. The reference is the denoiser with which
the candidate is compared. A decoding run is one generation with all its passes.
Part of the comparison uses the canvases of decoding runs. Either the reference or the candidate
generates these runs:

- If the reference generates the runs, both denoisers generate text for every sample. Such a
  comparison is slow, because the reference makes all passes of its own runs.
- If the candidate generates the runs, the reference generates no text. It only predicts which
  tokens it would commit on each canvas of the candidate's runs.

For some loops, only the reference can generate the runs, and the tokens that each pass would commit
are not compared (see ``side.can_follow``).

A reference that generates no text may be a ``Seer``: a denoiser whose layers are loaded one at a
time. A ``Seer`` must receive the canvases of several samples at once.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from dlm_calibration import metrics
from dlm_calibration.metrics import Decode, Frontier, Run
from dlm_calibration.samples import Sample, samples_sha256
from dlm_calibration.states import MASK_RATIOS
from dlm_export.judging.accuracy.frontier import Met, follow, meet, predict_commitment, within
from dlm_export.judging.accuracy.masked import (
    Kind,
    Masked,
    MaskedCanvas,
    compare_masked,
    masked_canvases,
)
from dlm_export.judging.accuracy.verdict import Budgets, Judgement
from dlm_export.judging.sides.side import (
    JudgeError,
    Predictor,
    Scorer,
    Seer,
    can_follow,
    check_comparable,
    is_verifying,
)
from dlm_runtime import Policy

DECIDING_SAMPLES = 8  # with fewer samples, the comparison does not stop early

Side = Literal["reference", "candidate"]


@dataclass(frozen=True, eq=False)
class Compared:
    """The comparison of one decoding run.

    - ``number``: the index of the sample.
    - ``prompt``: the text of the prompt, or ``None`` if there is no tokenizer.
    - ``theirs``, ``ours``: the generated texts of the reference and of the candidate. ``theirs`` is
      ``None`` if it is not known what the reference would generate.
    - ``nfe``: the number of passes that the reference needs, either counted or estimated.
    - ``is_equal``: True if the reference would commit the same tokens in every pass. ``None`` if
      this is not known.
    """

    number: int
    prompt: str | None
    theirs: Run | None
    ours: Run
    nfe: float
    is_equal: bool | None


@dataclass(frozen=True, eq=False)
class Part:
    """The result of comparing the denoisers on some of the samples.

    ``masked[0]`` compares the candidate with the reference. If there is a noise floor,
    ``masked[1]`` compares the noise floor with the reference.
    """

    masked: list[Masked]
    frontier: Frontier
    runs: list[Compared]


class Compute(Protocol):
    """Compares two denoisers on samples, in this process or in worker processes."""

    def canvases(self, number: int, sample: Sample) -> int:
        """Return the number of masked canvases of a sample. Raises JudgeError."""

    def runs(self, samples: Sequence[tuple[int, Sample]]) -> Generator[Met, None, None]:
        """Generate text for the samples, one sample at a time. Raises JudgeError."""

    def compare(
        self,
        samples: Sequence[tuple[int, Sample]],
        runs: Sequence[Met],
        freely: frozenset[int],
        on_done: Callable[[], None],
    ) -> list[Part]:
        """Compare the denoisers on masked canvases of the samples, and on the canvases of ``runs``.

        ``freely`` contains the indices of the samples for which the reference generates text too.
        """


class Pair:
    """Implements ``Compute`` in this process. The docstring of ``Evidence`` explains the arguments."""

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
        states_of: Side,
        free: Predictor | None,
    ) -> None:
        self.others = [candidate, *([noise_floor] if noise_floor is not None else [])]
        self._reference, self._candidate, self._floor = reference, candidate, noise_floor
        self._policy, self._candidate_policy = policy, candidate_policy
        self._new_tokens, self._decode, self._seed = max_new_tokens, decode, seed
        self._states_of, self._free = states_of, free
        self._follows = can_follow(reference, policy)
        self._limit = min(p.max_canvas_length for p in (reference, *self.others))

    def canvases(self, number: int, sample: Sample) -> int:
        """See ``Compute``."""
        return len(self._masked(number, sample))

    def _masked(self, number: int, sample: Sample) -> list[MaskedCanvas]:
        return list(
            masked_canvases(
                sample,
                number,
                self._reference,
                policy=self._policy,
                limit=self._limit,
                seed=self._seed,
            )
        )

    def runs(self, samples: Sequence[tuple[int, Sample]]) -> Generator[Met, None, None]:
        """See ``Compute``."""
        side = self._free if self._states_of == "reference" else self._candidate
        assert side is not None
        for number, sample in samples:
            yield meet(side, sample, number, self._policy, self._new_tokens, self._limit)

    def compare(
        self,
        samples: Sequence[tuple[int, Sample]],
        runs: Sequence[Met],
        freely: frozenset[int],
        on_done: Callable[[], None],
    ) -> list[Part]:
        """See ``Compute``. Returns one part for all samples."""
        canvases = [seen for number, sample in samples for seen in self._masked(number, sample)]
        views = [seen.view for seen in canvases]
        if isinstance(self._floor, Seer):
            self._floor.see(views)
        if isinstance(self._reference, Seer):
            followed = runs if self._follows else []
            walks = [run.walk(self._reference) for run in followed]
            self._reference.see([*views, *(view for run in followed for view in run.views)], walks)
        masked = compare_masked(self._reference, self.others, canvases, on_done)
        part = Part(masked, Frontier(self._reference.mask_token_id), [])
        prompts = dict(samples)
        for walk, run in enumerate(runs):
            self._add_run(part, walk, run, prompts[run.number], is_free=run.number in freely)
            on_done()
        return [part]

    def _add_run(self, part: Part, walk: int, run: Met, sample: Sample, *, is_free: bool) -> None:
        """Compare both denoisers on the canvases of ``run``.

        ``walk`` is the index of ``run`` in the list of runs that ``Seer.see`` has received.
        """
        reference, policy = self._reference, self._policy
        for state in run.deciding if self._follows else ():
            theirs = predict_commitment(reference, state, policy, reference.scores)
            part.frontier.add(
                state.mask_ratio,
                theirs,
                predict_commitment(self._candidate, state, policy, reference.scores),
            )
        met = self._as_run(run, run.tokens, run.nfe)
        prompt = self._decode(run.prompt) if sample.prompt is None else sample.prompt
        if self._states_of == "reference":
            made = self._candidate.generate(run.prompt, run.room, self._candidate_policy)
            ours = self._as_run(run, *made)
            part.runs.append(Compared(run.number, prompt, met, ours, run.nfe, None))
            return
        known, nfe, is_equal = None, float(run.nfe), None
        if isinstance(reference, Seer):
            followed = follow(reference, walk, run, policy)
            is_equal, nfe = followed.is_equal, followed.nfe
            known = met if is_equal else None
        if is_free:
            assert self._free is not None
            known = self._as_run(run, *self._free.generate(run.prompt, run.room, policy))
            nfe = known.nfe
        part.runs.append(Compared(run.number, prompt, known, met, nfe, is_equal))

    def _as_run(self, run: Met, tokens: Sequence[int], nfe: int) -> Run:
        return metrics.as_run(tokens, run.prompt, nfe, self._reference.eos_token_ids, self._decode)


class Evidence:
    """Compares a candidate with a reference on the samples of ``pool``.

    Each call of ``add`` compares the denoisers on the next samples. ``states_of`` names the
    denoiser that generates the decoding runs. ``free`` generates text with the reference. If
    ``free`` is ``None``, the reference generates no text, and only predicts tokens on the
    candidate's canvases. If the reference cannot follow runs (see ``side.can_follow``),
    ``states_of`` must be "reference". No text is generated if ``free`` is ``None``.
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
        compute: Callable[[Pair], Compute] = lambda pair: pair,
    ) -> None:
        """Check that the denoisers can be compared on the samples of ``pool``. Raises JudgeError.

        ``decode`` converts generated IDs to text, up to the first end token. ``decode`` returns
        ``None`` if there is no tokenizer. ``noise_floor`` is the same denoiser as the reference,
        but computes in the precision of the stored weights. Like the candidate, ``noise_floor`` is
        compared with the reference. ``free`` generates text for at most ``free_runs`` samples, or
        for all samples if ``free_runs`` is ``None``. If ``candidate_policy`` is not ``None``, the
        candidate generates text with this policy. In this case, ``states_of`` must be "reference".
        ``compute`` returns the object that compares the denoisers on samples. By default, this
        process compares them.
        """
        assert candidate_policy is None or states_of == "reference"
        if not pool:
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
            states_of=states_of,
            free=free,
        )
        for other in pair.others:
            check_comparable(reference, other)
        for number, sample in enumerate(pool):
            if (sample.tokens == reference.mask_token_id).any():
                raise JudgeError(
                    f"sample {number + 1}: its text contains the mask token ({reference.mask_token_id}). Remove this sample."
                )
        self.pool, self.seed, self._policy, self._decode = list(pool), seed, policy, decode
        self._reference, self._candidate = reference, candidate
        self._states_of, self._can_run, self._free_runs = states_of, free is not None, free_runs
        self._new_tokens, self._compute = max_new_tokens, compute(pair)
        self._parts: list[Part] = []
        self.judged = self._freely = 0

    def add(self, count: int, on_done: Callable[[], None] = lambda: None) -> None:
        """Compare the denoisers on the next ``count`` samples. Raises JudgeError.

        ``on_done`` is called once per sample, and once per decoding run.
        """
        taken = list(enumerate(self.pool))[self.judged : self.judged + count]
        self.judged += count
        limit = self._free_runs
        runs: list[Met]
        if self._states_of == "reference" and not self._can_run:
            runs, freely = [], frozenset[int]()
        elif self._states_of == "reference":
            left = None if limit is None else max(0, limit - self._freely)
            runs = list(self._compute.runs(taken[:left]))
            self._freely += len(runs)
            freely = frozenset()
        else:
            # Generating text may need many passes. Generate text for fewer samples if the passes
            # of all runs would otherwise outnumber the masked canvases.
            least = max(1, (limit or 0) - self._freely)
            passes = sum(self._compute.canvases(number, sample) for number, sample in taken)
            made = self._compute.runs(taken)
            runs = within(made, passes=passes, least=least)
            made.close()
            left = None if limit is None else max(0, limit - self._freely)
            freely = frozenset(run.number for run in runs[:left] if self._can_run)
            self._freely += len(freely)
        self._parts += self._compute.compare(taken, runs, freely, on_done)

    def judgement(self) -> Judgement:
        """Summarise the comparison of all samples so far."""
        compared, *rest = [
            Masked.join(parts) for parts in zip(*(part.masked for part in self._parts), strict=True)
        ]
        ours, rest = compared.of("masked"), [each.of("masked") for each in rest]
        count, seed = self.judged, self.seed
        frontier = Frontier(self._reference.mask_token_id)
        for part in self._parts:
            frontier.merge(part.frontier)
        made = [run for part in self._parts for run in part.runs]
        is_drafting = self._reference.draft_block is not None
        floor = metrics.summarise(rest[0].rows, rest[0].sample, count, seed) if rest else None
        buckets = [
            {"mask_ratio": mask_ratio}
            | metrics.summarise(ours.rows.take(chosen), ours.sample[chosen], count, seed)
            for index, mask_ratio in enumerate(MASK_RATIOS)
            if (chosen := ours.ratio == index).any()
        ]
        text_bytes = _text_bytes(self.pool[:count], self._decode)

        def summary(found: Masked, *, is_bound: bool) -> dict[str, Any]:
            """Summarise rows. If ``is_bound`` is false, their loss is no bound of the likelihood."""
            return metrics.summarise(found.rows, found.sample, count, seed) | {
                f"{who}_bits_per_byte": metrics.bits_per_byte(
                    float(found.weight @ losses), text_bytes if is_bound else 0
                )
                for who, losses in (
                    ("reference", found.rows.reference_ce),
                    ("candidate", found.rows.candidate_ce),
                )
            }

        speculation = None
        if is_verifying(self._reference):
            speculation = {
                "draft": summary(compared.of("draft"), is_bound=False),
                "causal": summary(compared.of("causal"), is_bound=True),
            }
        runs = (
            None
            if not made
            else metrics.summarise_runs(
                [self.pool[run.number] for run in made],
                [run.prompt for run in made],
                [run.theirs for run in made],
                [run.ours for run in made],
                seed,
                [run.nfe for run in made],
            )
        )
        equal = [run.is_equal for run in made if run.is_equal is not None]
        return Judgement(
            reference=self._reference.name,
            candidate=self._candidate.name,
            data={"samples": count, "sha256": samples_sha256(self.pool), "seed": seed},
            policy=self._policy.as_dict() | {"max_new_tokens": self._new_tokens},
            buckets=buckets,
            overall=summary(ours, is_bound=not is_drafting),
            speculation=speculation,
            frontier=frontier.as_dict() if can_follow(self._reference, self._policy) else None,
            free_running=None
            if runs is None
            else runs | {"equal_by_induction": float(np.mean(equal)) if equal else None},
            effort={"states_of": self._states_of, "free_runs": self._freely},
            noise_floor=None
            if floor is None
            else {name: floor[name] for name in ("ce_increase", "top1", "kl_mean")},
        )

    def is_decided(self, judgement: Judgement, budgets: Budgets) -> bool:
        """Return True if further samples would probably not change which budgets are met.

        The function computes a 95% interval for each measured value that ``budgets`` limits. It
        returns True if every limit is outside the interval of the limited value. It returns False
        if there are no budgets, or if fewer than ``DECIDING_SAMPLES`` samples were used.
        """
        if self.judged < DECIDING_SAMPLES:
            return False
        compared = Masked.join([part.masked[0] for part in self._parts])
        right = [
            float(metrics.same_answer(run.ours.text, answer))
            for part in self._parts
            for run in part.runs
            if (answer := self.pool[run.number].answer) is not None
        ]

        def top1(kind: Kind) -> tuple[float, float] | None:
            found = compared.of(kind)
            hits, rows = (
                np.bincount(found.sample, weights, self.judged)
                for weights in (found.rows.rank == 0, None)
            )
            return metrics.ratio_interval(hits, rows, self.seed)

        intervals = {
            "max_ce_increase": judgement.overall["ce_increase_interval"],
            "min_top1": top1("masked"),
            "max_nfe_ratio": judgement.free_running
            and judgement.free_running["nfe_ratio_interval"],
            "min_task": metrics.difference_interval(np.array(right), self.seed) if right else None,
        }
        speculation = judgement.speculation
        if speculation is not None:
            intervals |= {
                "max_causal_ce_increase": speculation["causal"]["ce_increase_interval"],
                "min_causal_top1": top1("causal"),
            }
        asked = budgets.limits(has_causal=speculation is not None)
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
