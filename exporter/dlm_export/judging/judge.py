"""A candidate denoiser judged against its reference: what it predicts, what it would commit, what it writes.

Three views, from near to far. Masked positions of held-out text, with the same random masks for both (``MASK_RATIOS``).
The frontier: on every canvas that the reference's own loop meets, what each of the two would commit under the policy.
Free runs: both loops from the same prompts, canvases and passes compared. Intervals are paired bootstraps over samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from dlm_calibration import metrics
from dlm_calibration.metrics import Commitment, Decode, Frontier, Run
from dlm_calibration.states import MASK_RATIOS, Sample, mask_share, pad_to_blocks, samples_sha256
from dlm_export.judging.predictors import JudgeError, Predictor, check_comparable, finite_logits
from dlm_export.network.turns import Canvas, Turn, choose_in, turns
from dlm_runtime import Policy
from dlm_runtime.errors import DlmError, ExitCode

WORST_LAYERS = 3  # named when a budget is missed
Scores = Callable[[Turn, np.ndarray, Policy], np.ndarray]
"""``Predictor.scores``."""


# --- Masked positions ---


@dataclass(frozen=True, eq=False)
class Masked:
    """Comparison of masked positions: per row its sample, its mask ratio's index, and its share of the likelihood bound."""

    rows: metrics.Rows
    sample: np.ndarray
    ratio: np.ndarray
    weight: np.ndarray


def scored_span(sample: Sample, shift: int, eos_token_ids: Sequence[int]) -> tuple[int, int]:
    """First position that is masked, and the end of those that are scored: behind the first end token of a completion.

    A shifted denoiser has no row that predicts position 0, so that it is never masked.
    """
    start = max(sample.prompt_length, shift)
    if sample.answer is None:
        return start, len(sample.tokens)
    return start, start + len(metrics.until_end(sample.tokens[start:].tolist(), eos_token_ids))


def compare_masked(
    reference: Predictor,
    others: Sequence[Predictor],
    samples: Sequence[Sample],
    *,
    block_length: int,
    seed: int,
    on_done: Callable[[], None],
) -> list[Masked]:
    """Compare each of ``others`` with the reference on the same canvases: every sample once at each of ``MASK_RATIOS``.

    Completions are padded with the end token, where there is one, to whole blocks, as denoisers are trained and decoded; what
    lies behind their first end token is masked with the rest and not scored. A sample's masks depend on its place and the seed
    alone. ``on_done`` is called once a sample. Raises JudgeError.
    """
    limit = min(p.max_canvas_length for p in (reference, *others))
    end_token_id = next(iter(reference.eos_token_ids), None)
    found: list[list[tuple[metrics.Rows, int, int, float]]] = [[] for _ in others]
    for number, sample in enumerate(samples):
        start, end = scored_span(sample, reference.shift, reference.eos_token_ids)
        if start >= end:
            raise JudgeError(f"sample {number + 1}: nothing behind its prompt to predict: leave it out")
        canvas = pad_to_blocks(sample, end_token_id, block_length, limit)
        rng = np.random.default_rng([seed, number])
        for index, mask_ratio in enumerate(MASK_RATIOS):
            masked = mask_share(canvas, mask_ratio, reference.mask_token_id, rng, start)
            is_masked = masked == reference.mask_token_id
            positions = start + np.flatnonzero(is_masked[start:end])
            if not len(positions):
                continue
            weight = (len(canvas) - start) / int(is_masked.sum()) / len(MASK_RATIOS)
            theirs = finite_logits(reference, masked, positions)
            for parts, other in zip(found, others, strict=True):
                ours = finite_logits(other, masked, positions)
                rows = metrics.compare_rows(theirs, ours, canvas[positions], reference.mask_token_id)
                parts.append((rows, number, index, weight))
        on_done()
    return [_join(parts) for parts in found]


def _join(parts: Sequence[tuple[metrics.Rows, int, int, float]]) -> Masked:
    counts = [len(rows) for rows, _, _, _ in parts]
    sample, ratio, weight = (np.repeat([part[i] for part in parts], counts) for i in (1, 2, 3))
    return Masked(metrics.Rows.join([rows for rows, _, _, _ in parts]), sample, ratio, weight)


# --- The frontier ---


@dataclass(frozen=True, eq=False)
class FrontierState:
    """A canvas that a loop met before one of its passes, int64 ``[L]``, and what it does with it.

    ``mask_ratio`` is the undecided share of the positions from the first one on that the request wants filled.
    """

    canvas: np.ndarray
    turn: Turn
    mask_ratio: float


def frontier_states(canvases: Sequence[Canvas], policy: Policy, shift: int) -> Iterator[FrontierState]:
    """What the loop decides at each of the canvases that its passes saw, in their order."""
    if not canvases:
        return
    undecided = canvases[0].undecided.copy()
    origin = int(undecided.argmax())
    ahead = turns(undecided, policy, shift)
    for canvas in canvases:
        undecided[:] = canvas.undecided
        yield FrontierState(canvas.tokens, next(ahead), float(undecided[origin:].mean()))


def predict_commitment(predictor: Predictor, state: FrontierState, policy: Policy, scores: Scores) -> Commitment:
    """What a denoiser would commit here, from a full pass: what a cache would have kept from earlier passes is left out.

    ``scores`` of one side's loop serve both, so that thresholds compare with values that were computed the same way.
    """
    logits = finite_logits(predictor, state.canvas, state.turn.positions)
    return Commitment(logits, logits.argmax(-1), choose_in(state.turn, scores(state.turn, logits, policy), policy))


def prompt_of(sample: Sample, max_new_tokens: int, max_canvas_length: int) -> tuple[list[int], int]:
    """A sample's prompt and how many tokens to write behind it; plain text is continued from its middle."""
    start = sample.prompt_length or max(1, len(sample.tokens) // 2)
    return sample.tokens[:start].tolist(), min(max_new_tokens, max_canvas_length - start)


# --- The judgement ---


class AccuracyError(DlmError):
    """A stated accuracy budget is exceeded."""

    exit_code = ExitCode.MISSED


@dataclass(frozen=True)
class Budgets:
    """Limits that a candidate has to keep, None where not asked.

    ``max_ce_increase`` is relative (0.01: one per cent) and over all mask ratios, ``min_top1`` and ``min_task`` are shares,
    ``min_task`` of the candidate's own right answers.
    """

    max_ce_increase: float | None = None
    min_top1: float | None = None
    max_nfe_ratio: float | None = None
    min_task: float | None = None

    def check(self, samples: Sequence[Sample]) -> None:
        """Raise JudgeError if a limit cannot be judged on this data; for asking before an evaluation."""
        if self.min_task is not None and all(sample.answer is None for sample in samples):
            raise JudgeError("a lowest task score is asked for, but the data carries no answers: give prompts with completions")


@dataclass(frozen=True)
class Judgement:
    """What a candidate costs against its reference, in the sections of accuracy.json.

    ``layers`` (``{"layer", "format", "kl", "frontier_kl"}`` each) and ``threshold`` (``Refit.as_dict``) come from elsewhere:
    see ``dataclasses.replace``. ``speed`` (``BundlePredictor.speed``) is of one run on one machine, so that it stands in the
    report and not in accuracy.json.
    """

    reference: str
    candidate: str
    data: dict[str, Any]
    policy: dict[str, Any]
    buckets: list[dict[str, Any]]
    overall: dict[str, Any]
    frontier: dict[str, Any]
    free_running: dict[str, Any]
    noise_floor: dict[str, Any] | None = None
    layers: list[dict[str, Any]] = field(default_factory=list)
    threshold: dict[str, Any] | None = None
    budgets: list[dict[str, Any]] = field(default_factory=list)
    speed: dict[str, Any] | None = None

    def with_budgets(self, budgets: Budgets) -> Judgement:
        """This judgement measured by some limits. Raises JudgeError if the data cannot tell."""
        task = self.free_running["task"]
        if budgets.min_task is not None and task is None:
            raise JudgeError("a lowest task score is asked for, but the data carries no answers: give prompts with completions")
        values = {
            "max_ce_increase": self.overall["ce_increase"],
            "min_top1": self.overall["top1"],
            "max_nfe_ratio": self.free_running["nfe_ratio"],
            "min_task": None if task is None else task["candidate"],
        }
        rows = []
        for name, value in values.items():
            limit = getattr(budgets, name)
            if limit is not None:
                # No value: the reference loses nothing and the candidate something, an increase beyond any limit.
                passed = value is not None and (value <= limit if name.startswith("max") else value >= limit)
                rows.append({"name": name, "limit": limit, "value": value, "passed": bool(passed)})
        return replace(self, budgets=rows)

    @property
    def passed(self) -> bool:
        """Whether every stated limit is kept."""
        return all(row["passed"] for row in self.budgets)

    @property
    def misses(self) -> list[str]:
        """One sentence for every limit that is not kept, and where the loss is: worst bucket, worst layers."""
        words = {
            "max_ce_increase": "masked cross-entropy rises by {value:.2%}, at most {limit:.2%} is allowed",
            "min_top1": "top-1 agreement is {value:.2%}, at least {limit:.2%} is asked for",
            "max_nfe_ratio": "NFE ratio is {value:.4f}, at most {limit:.4f} is allowed",
            "min_task": "task score is {value:.2%}, at least {limit:.2%} is asked for",
        }
        missed = [row for row in self.budgets if not row["passed"]]
        found = [
            words[row["name"]].format(value=np.inf if row["value"] is None else row["value"], limit=row["limit"])
            for row in missed
        ]
        told = [row for row in self.buckets if metrics.is_told_from_zero(row)]
        if missed and told:
            # In nats: where few positions are masked there is next to no loss, and its relative change is noise.
            worst = max(told, key=lambda row: row["candidate_ce"] - row["reference_ce"])
            rise = worst["candidate_ce"] - worst["reference_ce"]
            found.append(
                f"worst bucket: mask ratio {worst['mask_ratio']}, cross-entropy {rise:+.4f} nats, top-1 {worst['top1']:.2%}"
            )
        ranked = sorted(self.layers, key=_sensitivity, reverse=True)[:WORST_LAYERS]
        if missed and ranked:
            found.append(
                "worst layers: " + ", ".join(f"{row['layer']} ({row['format']}, KL {_sensitivity(row):.2e})" for row in ranked)
            )
        return found

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as accuracy.json and ``--json`` show them."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "speed"} | {
            "passed": self.passed,
            "misses": self.misses,
        }


def check_budgets(judgement: Judgement, where: str) -> None:
    """Raises AccuracyError with the budgets missed, the worst bucket and the worst layers."""
    if judgement.passed:
        return
    raise AccuracyError(f"{where}: {'; '.join(judgement.misses)}")


def _sensitivity(row: Mapping[str, Any]) -> float:
    value = row["kl"] if row["frontier_kl"] is None else row["frontier_kl"]
    return float(value or 0.0)


def judge(
    reference: Predictor,
    candidate: Predictor,
    samples: Sequence[Sample],
    *,
    policy: Policy,
    max_new_tokens: int,
    decode: Decode,
    seed: int = 0,
    noise_floor: Predictor | None = None,
    free_runs: int | None = None,
    on_done: Callable[[], None] = lambda: None,
) -> Judgement:
    """Judge a candidate on held-out samples.

    ``decode`` turns generated token ids, without the end token, into text (None: there is no tokenizer). Masked positions
    of every sample are compared; the first ``free_runs`` of them (None: all) are run freely and give the frontier's states.
    ``noise_floor`` is the reference in its own storage format, judged by the same masks. ``on_done`` is called
    ``len(samples) + min(free_runs, len(samples))`` times. Raises JudgeError.
    """
    if not samples:
        raise JudgeError("no samples to judge by: give held-out data")
    if max_new_tokens < 1 or (free_runs is not None and free_runs < 1):
        raise JudgeError("judging needs at least one new token and one free run")
    others = [candidate, *([noise_floor] if noise_floor is not None else [])]
    for other in others:
        check_comparable(reference, other)
    for number, sample in enumerate(samples):
        if (sample.tokens == reference.mask_token_id).any():
            raise JudgeError(f"sample {number + 1}: its text holds the mask token ({reference.mask_token_id}): leave it out")
    ours, *rest = compare_masked(reference, others, samples, block_length=policy.block_length, seed=seed, on_done=on_done)
    floor = metrics.summarise(rest[0].rows, rest[0].sample, len(samples), seed) if rest else None
    buckets = [
        {"mask_ratio": mask_ratio} | metrics.summarise(ours.rows.take(chosen), ours.sample[chosen], len(samples), seed)
        for index, mask_ratio in enumerate(MASK_RATIOS)
        if (chosen := ours.ratio == index).any()
    ]
    text_bytes = _text_bytes(samples, decode)
    bound = {
        "reference_bits_per_byte": metrics.bits_per_byte(float(ours.weight @ ours.rows.reference_ce), text_bytes),
        "candidate_bits_per_byte": metrics.bits_per_byte(float(ours.weight @ ours.rows.candidate_ce), text_bytes),
    }
    limit = min(reference.max_canvas_length, candidate.max_canvas_length)
    frontier = Frontier(reference.mask_token_id)
    run_samples = samples[:free_runs]
    runs: tuple[list[Run], list[Run]] = ([], [])
    prompts = []
    for number, sample in enumerate(run_samples):
        prompt, room = prompt_of(sample, max_new_tokens, limit)
        if room < 1:
            raise JudgeError(f"sample {number + 1}: its prompt of {len(prompt)} tokens fills the canvas: leave it out")
        prompts.append(decode(prompt) if sample.prompt is None else sample.prompt)
        *seen, finished = reference.states(prompt, room, policy)
        for state in frontier_states(seen, policy, reference.shift):
            theirs_now = predict_commitment(reference, state, policy, reference.scores)
            frontier.add(state.mask_ratio, theirs_now, predict_commitment(candidate, state, policy, reference.scores))
        written, nfe = candidate.generate(prompt, room, policy)
        for side, tokens, passes in zip(runs, (finished.tokens.tolist(), written), (len(seen), nfe), strict=True):
            side.append(metrics.as_run(tokens, prompt, passes, reference.eos_token_ids, decode))
        on_done()
    return Judgement(
        reference=reference.name,
        candidate=candidate.name,
        data={"samples": len(samples), "sha256": samples_sha256(samples), "seed": seed},
        policy=policy.as_dict() | {"max_new_tokens": max_new_tokens},
        buckets=buckets,
        overall=metrics.summarise(ours.rows, ours.sample, len(samples), seed) | bound,
        frontier=frontier.as_dict(),
        free_running=metrics.summarise_runs(run_samples, prompts, *runs, seed),
        noise_floor=None if floor is None else {name: floor[name] for name in ("ce_increase", "top1", "kl_mean")},
    )


def _text_bytes(samples: Sequence[Sample], decode: Decode) -> int:
    """Bytes of what was scored, in UTF-8; 0 if some of it has no text."""
    texts = [decode(sample.tokens.tolist()) if sample.answer is None else sample.answer for sample in samples]
    return 0 if None in texts else sum(len((text or "").encode("utf-8", "replace")) for text in texts)
