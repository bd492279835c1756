"""Tests of judging, which compares a quantised candidate with its reference.

The tests cover predictions on the same canvases, the loop's decisions, budgets and thresholds.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import llada_config, write_checkpoint
from click.testing import CliRunner, Result
from denoisers import load
from loops import loops
from torch_side import TorchPredictor

import dlm_runtime
from dlm_calibration.samples import Sample
from dlm_calibration.states import MASK_RATIOS, random_tokens
from dlm_export.cli import main
from dlm_export.judging.accuracy import frontier
from dlm_export.judging.accuracy.evidence import judge
from dlm_export.judging.accuracy.verdict import Budgets, Judgement
from dlm_export.judging.sides.bundle import BundlePredictor
from dlm_export.judging.sides.side import JudgeError, Side
from dlm_export.judging.tuning.threshold import Point, Refit, refit_steps, refit_threshold
from dlm_export.network.loop_turns import Canvas, start_canvas
from dlm_export.network.reference import fill
from dlm_runtime import PRESETS, Policy, RequestError

VOCAB, MASK, EOS = 20, 18, 19
POLICY = Policy(commit="threshold", threshold=0.9, block_length=8)


def decode(tokens: list[int]) -> str | None:
    """Return a text for made-up tokens."""
    return " ".join(map(str, tokens))


def no_text(tokens: list[int]) -> str | None:
    """The decoder of a bundle without a tokenizer, which returns None."""
    return None


class Scripted(Side):
    """A predictor that computes logits and texts with given functions.

    It stores the canvases that it gets.
    """

    name = "scripted"
    vocab_size, mask_token_id, eos_token_ids, max_canvas_length = VOCAB, MASK, (EOS,), 64
    visible_block = None
    draft_block = None
    has_mask_token, is_verifying, resizes, has_shifted_drafts = True, False, False, False
    blocks_after_prompt = False

    def __init__(
        self,
        logits: Callable[[np.ndarray], np.ndarray] = lambda canvas: np.zeros(
            (len(canvas), VOCAB), np.float32
        ),
        shift: int = 0,
        write: Callable[[Sequence[int], int, Policy], tuple[list[int], int]] | None = None,
    ) -> None:
        self._logits, self.shift = logits, shift
        self._write = write or (lambda tokens, count, policy: ([EOS] * count, 1))
        self.seen: list[np.ndarray] = []

    def logits(
        self, canvas: np.ndarray, rows: np.ndarray | None = None, draft: Any = None
    ) -> np.ndarray:
        self.seen.append(canvas)
        out = self._logits(canvas)
        return out if rows is None else out[rows]

    def courses(
        self, asked: Sequence[tuple[Sequence[int], int]], policy: Policy
    ) -> Iterator[list[Canvas]]:
        for tokens, count in asked:
            written, nfe = self._write(tokens, count, policy)
            finished = np.array([*tokens, *written])
            yield [start_canvas(tokens, count, MASK)] * nfe + [
                Canvas(finished, np.zeros(len(finished), bool))
            ]


def knows(truth: np.ndarray, shift: int) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function that computes logits which give the true token of each position a
    probability near 1.
    """

    def logits(canvas: np.ndarray) -> np.ndarray:
        out = np.zeros((len(canvas), VOCAB), np.float32)
        for row in range(len(canvas) - shift):
            if row + shift < len(truth):
                out[row, truth[row + shift]] = 50
        return out

    return logits


def text_sample(length: int = 12) -> Sample:
    return Sample(np.arange(length) % 15, 0, None, None)


def answered(completion: Sequence[int] = (7, 8, 9), answer: str = "7 8 9") -> Sample:
    return Sample(np.array([1, 2, 3, *completion, EOS]), 3, answer, "a prompt")


def judged(reference: Any, candidate: Any, samples: Sequence[Sample], **options: Any) -> Judgement:
    given = {"policy": POLICY, "max_new_tokens": 8, "decode": decode, "seed": 0} | options
    return judge(reference, candidate, samples, **given)


# --- Masked positions ---


def test_both_see_the_same_canvases_and_prompts_are_never_masked() -> None:
    reference, candidate = Scripted(), Scripted()
    judged(reference, candidate, [answered(), text_sample()])
    masked = reference.seen[: 2 * len(MASK_RATIOS)]
    assert len(masked) == len(candidate.seen[: len(masked)])
    for theirs, ours in zip(masked, candidate.seen, strict=False):
        np.testing.assert_array_equal(theirs, ours)
    for canvas in reference.seen:
        if len(canvas) == 3 + 8:  # 3 prompt tokens and a completion in a block of 8
            assert canvas[:3].tolist() == [1, 2, 3]


@pytest.mark.parametrize("shift", [0, 1])
def test_a_row_is_scored_for_the_position_that_it_predicts(shift: int) -> None:
    sample = text_sample(30)
    right, wrong = (knows(sample.tokens, s) for s in (shift, 1 - shift))
    found = judged(Scripted(right, shift), Scripted(wrong, shift), [sample])
    assert found.overall["reference_ce"] < 1e-12
    assert found.overall["candidate_ce"] > 10


def test_a_shifted_denoiser_is_not_asked_for_the_first_position() -> None:
    reference = Scripted(shift=1)
    judged(reference, Scripted(shift=1), [text_sample()])
    assert all(canvas[0] != MASK for canvas in reference.seen)


def test_what_lies_behind_the_end_token_is_masked_and_not_scored() -> None:
    sample = answered()
    whole = np.pad(sample.tokens, (0, 4), constant_values=EOS)

    def wrong_behind_the_end(canvas: np.ndarray) -> np.ndarray:
        logits = knows(whole, 0)(canvas)
        logits[7:] = 0
        return logits

    reference = Scripted(knows(whole, 0))
    found = judged(reference, Scripted(wrong_behind_the_end), [sample], seed=3)
    assert found.overall["candidate_ce"] < 1e-12
    assert any((canvas[7:] == MASK).any() for canvas in reference.seen[: len(MASK_RATIOS)])


def test_the_likelihood_bound_of_even_guesses_is_exact() -> None:
    sample = text_sample(24)
    found = judged(Scripted(), Scripted(), [sample])
    bits = 24 * math.log2(VOCAB - 1)  # all tokens except the mask token are equally likely
    assert found.overall["reference_bits_per_byte"] == pytest.approx(
        bits / len(decode(sample.tokens.tolist()) or "")
    )
    assert found.overall["reference_ce"] == pytest.approx(math.log(VOCAB - 1))
    without_text = judged(Scripted(), Scripted(), [sample], decode=no_text)
    assert without_text.overall["reference_bits_per_byte"] is None


def test_a_canvas_ends_where_the_shorter_of_both_does() -> None:
    reference, candidate = Scripted(), Scripted()
    candidate.max_canvas_length = 9
    judged(reference, candidate, [answered()], max_new_tokens=50)
    assert max(map(len, reference.seen)) == 9


# --- The loop's own decisions ---

LOOPS = loops("""
threshold, odd blocks: commit=threshold threshold=0.05 compare=> block_length=7
static, random order: steps_per_block=3 block_length=8 score=random seed=7
dynamic: commit=dynamic threshold=0.05 steps_per_block=5 block_length=12
factor: commit=factor factor=20.0 block_length=12
sequential: commit=sequential steps_per_block=5 block_length=8
timestep, entropy: commit=timestep score=entropy block_length=0 steps_per_block=6
entropy bound: commit=entropy_bound entropy_bound=10.0 block_length=8
""")


@pytest.fixture(scope="module")
def predictors(llada_checkpoint: Path, dream_checkpoint: Path) -> dict[str, TorchPredictor]:
    return {
        "llada": TorchPredictor(load(llada_checkpoint), "llada"),
        "dream": TorchPredictor(load(dream_checkpoint), "dream"),
    }


def _prompt(predictor: TorchPredictor, length: int = 9) -> list[int]:
    special = (predictor.mask_token_id, *predictor.eos_token_ids)
    return random_tokens(length, predictor.vocab_size, special, np.random.default_rng(4)).tolist()


def _walk(
    predictor: TorchPredictor, policy: Policy, new: int = 24
) -> Iterator[tuple[np.ndarray, np.ndarray, Any]]:
    """For each pass, yield two canvases after the pass, and the state before the pass.

    ``predict_commitment`` predicts the first canvas. The loop computes the second canvas.
    """
    (canvases,) = predictor.courses([(_prompt(predictor), new)], policy)
    states = frontier.frontier_states(canvases[:-1], policy, predictor)
    for state, after in zip(states, canvases[1:], strict=True):
        commitment = frontier.predict_commitment(predictor, state, policy)
        expected = state.canvas.copy()
        expected[state.turn.positions[commitment.is_chosen]] = commitment.guess[
            commitment.is_chosen
        ]
        yield expected, after.tokens, state


@pytest.mark.parametrize(("name", "family"), [*zip(LOOPS, itertools.cycle(("llada", "dream")))])
def test_what_a_denoiser_would_commit_is_what_its_loop_commits(
    predictors: dict[str, TorchPredictor], family: str, name: str
) -> None:
    passes, several = 0, False
    for expected, after, state in _walk(predictors[family], Policy(stop="none", **LOOPS[name])):
        np.testing.assert_array_equal(expected, after, err_msg=f"pass {passes}")
        passes, several = passes + 1, several or int((state.canvas != after).sum()) > 1
    assert passes > 1
    assert several


@pytest.mark.parametrize("family", ["llada", "dream"])
# With the threshold 0.9, a full pass of Dream only commits the first position of a block.
@pytest.mark.parametrize("threshold", [0.05, 0.9])
def test_a_cached_loops_full_passes_commit_the_same(
    predictors: dict[str, TorchPredictor], family: str, threshold: float
) -> None:
    policy = Policy(
        commit="threshold", threshold=threshold, block_length=8, cache="dual", stop="none"
    )
    first_of_block = [
        (expected, after)
        for expected, after, state in _walk(predictors[family], policy)
        if len(state.turn.positions) == 8
    ]
    assert len(first_of_block) == 3
    for expected, after in first_of_block:
        np.testing.assert_array_equal(expected, after)


def test_the_mask_token_is_never_what_would_be_committed() -> None:
    def logits(canvas: np.ndarray) -> np.ndarray:
        return np.tile(
            np.where(np.arange(VOCAB) == MASK, 9, np.arange(VOCAB) % 7 - 9).astype(np.float32),
            (len(canvas), 1),
        )

    (state,) = frontier.frontier_states([start_canvas([1, 2], 2, MASK)], POLICY, Scripted())
    commitment = frontier.predict_commitment(Scripted(logits), state, POLICY)
    assert commitment.guess.tolist() == [6, 6]
    assert commitment.is_chosen.tolist() == [True, False]


@pytest.mark.parametrize(("family", "cache"), [("llada", "none"), ("dream", "dual")])
def test_a_mask_token_that_was_decided_is_neither_filled_nor_judged(
    predictors: dict[str, TorchPredictor], family: str, cache: str
) -> None:
    predictor = predictors[family]
    # The canvas starts with 9 prompt tokens. The positions ``mask`` contain mask tokens that are
    # marked as decided, so the loop must not replace them.
    start = Canvas(np.array(_prompt(predictor, 24)), np.arange(24) >= 9)
    mask = [3, 11, *range(17, 21)]
    start.tokens[mask], start.undecided[mask] = predictor.mask_token_id, False
    policy = Policy(block_length=4, cache=cache, stop="none")
    seen = [start]
    done = fill(predictor.denoiser, start, policy, on_step=seen.append)
    assert done.nfe == int(start.undecided.sum()) == 10
    assert [i for i, token in enumerate(done.tokens) if token == predictor.mask_token_id] == mask
    states = list(frontier.frontier_states(seen[:-1], policy, predictor))
    assert [len(state.turn.positions) for state in states] == [3, 2, 1, 4, 3, 2, 1, 3, 2, 1]
    for state, after in zip(states, seen[1:], strict=True):
        committed = np.flatnonzero(state.canvas != after.tokens)
        assert set(committed) <= set(state.turn.positions) - {*mask}
        if cache == "none":
            commitment = frontier.predict_commitment(predictor, state, policy)
            chosen = state.turn.positions[commitment.is_chosen]
            assert after.tokens[chosen].tolist() == commitment.guess[commitment.is_chosen].tolist()
    assert states[0].mask_ratio == 10 / 15


@pytest.mark.parametrize("stop", ["none", "eos"])
def test_states_are_the_canvas_of_every_pass_and_the_finished_one(
    predictors: dict[str, TorchPredictor], stop: str
) -> None:
    denoiser = copy.deepcopy(predictors["llada"].denoiser)
    policy = Policy(block_length=4, stop=stop)
    prompt = _prompt(predictors["llada"])
    ((*_, last),) = predictors["llada"].courses(
        [(prompt, 12)], policy.with_fields({"stop": "none"})
    )
    first = int(last.tokens[len(prompt) + 1])
    denoiser.network = replace(denoiser.network, eos_token_ids=(first,))
    predictor = TorchPredictor(denoiser, "ends early")
    (states,) = predictor.courses([(prompt, 12)], policy)
    assert len(states) == 1 + (4 if stop == "eos" else 12)
    assert states[0].tokens.tolist() == [*prompt, *[predictor.mask_token_id] * 12]
    for canvas in states:
        np.testing.assert_array_equal(canvas.tokens == predictor.mask_token_id, canvas.undecided)
    counts = [canvas.undecided.sum() for canvas in states]
    assert counts[:-1] == sorted(counts[:-1], reverse=True)
    assert counts[-2] > 0
    assert counts[-1] == 0


# --- The judgement ---


def _samples(predictor: TorchPredictor, count: int = 3) -> list[Sample]:
    rng, special = np.random.default_rng(5), (predictor.mask_token_id, *predictor.eos_token_ids)
    tokens = [random_tokens(14, predictor.vocab_size, special, rng) for _ in range(count)]
    return [
        Sample(np.append(t, predictor.eos_token_ids[0]), 6, decode(t[6:].tolist()), "a prompt")
        for t in tokens
    ]


@pytest.mark.parametrize("family", ["llada", "dream"])
def test_a_bundle_in_fp32_costs_nothing(
    predictors: dict[str, TorchPredictor], family: str, request: pytest.FixtureRequest
) -> None:
    reference = predictors[family]
    with dlm_runtime.open(request.getfixturevalue(f"{family}_bundle"), threads=1) as bundle:
        found = judged(
            reference,
            BundlePredictor(bundle, "bundle"),
            _samples(reference),
            policy=replace(POLICY, cache="dual"),
        )
        back = judged(
            BundlePredictor(bundle, "bundle"),
            reference,
            _samples(reference),
            policy=POLICY,
        )
    for one in (found, back):
        assert abs(one.overall["ce_increase"]) < 1e-5
        assert one.overall["kl_mean"] < 1e-8
        assert one.overall["top1"] == 1
        assert (one.frontier["jaccard"], one.frontier["flips"]) == (1, 0)
        assert (one.free_running["exact_match"], one.free_running["nfe_ratio"]) == (1, 1)


@pytest.fixture(scope="module")
def damaged(predictors: dict[str, TorchPredictor]) -> TorchPredictor:
    """A bad candidate: a tiny LLaDA with noise added to its weights."""
    denoiser = copy.deepcopy(predictors["llada"].denoiser)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in denoiser.parameters():
            parameter += torch.randn_like(parameter) * parameter.std() * 0.5
    return TorchPredictor(denoiser, "damaged")


def test_a_damaged_denoiser_shows_in_every_view(
    predictors: dict[str, TorchPredictor], damaged: TorchPredictor
) -> None:
    reference = predictors["llada"]
    half = copy.deepcopy(reference.denoiser).to(torch.bfloat16)
    calls = []
    found = judged(
        reference,
        damaged,
        _samples(reference),
        noise_floor=TorchPredictor(half, "bf16"),
        on_done=lambda: calls.append(1),
    )
    assert len(calls) == 3 + 3
    floor = found.noise_floor
    assert floor is not None
    assert 0 < floor["kl_mean"] < found.overall["kl_mean"]
    assert found.overall["top1"] < floor["top1"]
    assert found.overall["top1"] <= found.overall["top5"]
    assert found.frontier["jaccard"] < 1
    assert found.free_running["exact_match"] < 1
    assert found.free_running["prompts"] == 3
    assert [row["mask_ratio"] for row in found.buckets] == list(MASK_RATIOS)
    assert sum(row["positions"] for row in found.buckets) == found.overall["positions"]
    low, high = found.overall["ce_increase_interval"]
    assert low <= found.overall["ce_increase"] <= high
    again = judged(
        reference,
        damaged,
        _samples(reference),
        noise_floor=TorchPredictor(half, "bf16"),
    )
    assert again.as_dict() == found.as_dict()


def test_one_bundle_is_compared_with_itself_under_another_policy(
    demo_bundle: Path, tmp_path: Path
) -> None:
    """The prompts start with the same words, so keys and values of earlier prompts are reused."""
    start = "turn on the lights in the kitchen and in the bathroom and in the hall and " * 3
    lines = [
        json.dumps({"prompt": f"{start}{end}", "completion": "?"})
        for end in ("play jazz", "call amir", "open the door", "play rock")
    ]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))

    def compared(*arguments: str) -> Result:
        both = ["compare", str(demo_bundle), str(demo_bundle)]
        return CliRunner().invoke(main, [*both, "--data", str(tmp_path / "data.jsonl"), *arguments])

    changes = [f"--candidate-set={each}" for each in ("refresh=8", "reuse_prompt=1")]
    done = compared(*changes, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    own, shared = found["candidate_loop"], found["policy"]
    assert (own["policy"]["refresh"], own["policy"]["reuse_prompt"]) == (8, 1)
    assert (shared["cache"], shared["refresh"], shared["reuse_prompt"]) == ("dual", 0, 0)
    assert 0 < own["cached_tokens"] < own["prompt_tokens"]
    assert found["free_running"]["prompts"] == found["data"]["samples"]
    assert found["free_running"]["right_answers"] is not None
    assert found["overall"]["top1"] == 1  # masked positions are predicted without a cache
    assert "has refresh 8, reuse_prompt 1; it reused" in compared(*changes).output
    assert "no prompt was reused" in compared(*changes, "--candidate-set=refresh=64").output
    wrong = compared("--candidate-set=reuse_prompt")
    assert wrong.exit_code == 2
    assert "--candidate-set reuse_prompt: write FIELD=VALUE" in wrong.output


def test_plain_text_is_continued_from_its_middle() -> None:
    asked: list[tuple[list[int], int]] = []

    def write(tokens: Sequence[int], count: int, policy: Policy) -> tuple[list[int], int]:
        asked.append((list(tokens), count))
        return [4] * count, 2

    found = judged(Scripted(write=write), Scripted(write=write), [text_sample(12)])
    assert asked == [(list(range(6)), 8)] * 2
    assert found.free_running["right_answers"] is None
    assert found.free_running["samples"][0]["prompt"] == "0 1 2 3 4 5"
    assert found.free_running["samples"][0]["reference"] == "4 4 4 4 4 4 4 4"


# --- Data that cannot be judged ---


def test_logits_are_finite_but_for_the_mask_token() -> None:
    def nan_at(token: int) -> Scripted:
        logits = np.zeros((64, VOCAB), np.float32)
        logits[:, token] = np.nan
        return Scripted(lambda canvas: logits[: len(canvas)])

    broken = nan_at(3)
    broken.name = "int3"
    with pytest.raises(JudgeError, match="int3: NaN or infinite logits at 1 of 1"):
        judged(Scripted(), broken, [answered((7,))])
    assert judged(Scripted(), nan_at(MASK), [answered()]).overall["kl_mean"] == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [("vocab_size", 21), ("mask_token_id", 17), ("eos_token_ids", (16,)), ("shift", 1)],
)
def test_two_different_denoisers_are_not_compared(name: str, value: Any) -> None:
    other = Scripted()
    setattr(other, name, value)
    with pytest.raises(JudgeError, match=f"{name} is .* different denoisers"):
        judged(Scripted(), other, [answered()])
    with pytest.raises(JudgeError, match=name):
        judged(Scripted(), Scripted(), [answered()], noise_floor=other)
    with pytest.raises(JudgeError, match=name):
        refit_threshold(Scripted(), other, [answered()], POLICY, 8, decode)


def test_data_that_cannot_judge_is_refused_by_its_number() -> None:
    masked = Sample(np.array([1, MASK, 3, EOS]), 1, "x", "y")
    with pytest.raises(JudgeError, match="sample 2: its text contains the mask token"):
        judged(Scripted(), Scripted(), [answered(), masked])
    with pytest.raises(JudgeError, match="sample 1: nothing to predict after its prompt"):
        judged(Scripted(), Scripted(), [Sample(np.array([1, 2]), 2, None, None)])
    short = Scripted()
    short.max_canvas_length = 3
    with pytest.raises(JudgeError, match="sample 1: its prompt of 3 tokens fills the canvas"):
        judged(Scripted(), short, [answered()])
    with pytest.raises(JudgeError, match="no samples"):
        judged(Scripted(), Scripted(), [])
    with pytest.raises(JudgeError, match="at least one"):
        judged(Scripted(), Scripted(), [answered()], max_new_tokens=0)


# --- Budgets ---


@pytest.fixture(scope="module")
def judgement() -> Judgement:
    """A made-up judgement of a candidate.

    The candidate's loss is 2% higher than the reference's loss. Both predict the same most likely
    token at 95% of positions. The candidate needs 10% more passes and gives 80% right answers.
    """
    # Three groups of states. In the first, the relative increase of the loss is largest, but the loss
    # is very small. In the third, the absolute increase is largest, but the interval includes zero.
    # The report must therefore name the second as the worst group.
    names = ("mask_ratio", "ce_increase", "ce_increase_interval", "top1")
    names += ("reference_ce", "candidate_ce")
    rows = (
        (0.05, 4.0, [2.0, 7.0], 0.97, 0.001, 0.005),
        (0.15, 0.09, [0.02, 0.2], 0.9, 1.0, 1.09),
        (0.25, 0.5, [-0.1, 1.0], 0.9, 1.0, 1.5),
    )
    return Judgement(
        reference="fp32",
        candidate="int4",
        data={},
        policy={},
        buckets=[dict(zip(names, row, strict=True)) for row in rows],
        overall={
            "ce_increase": 0.02,
            "ce_increase_interval": [0.01, 0.03],
            "top1": 0.95,
            "top1_interval": [0.955, 0.97],
        },
        frontier={},
        free_running={
            "nfe_ratio": 1.1,
            "nfe_ratio_interval": None,
            "right_answers": {"candidate": 0.8, "candidate_interval": [0.7, 0.9]},
        },
        layers=[
            {"layer": f"blocks.{i}.mlp.down", "format": "int4", "kl": 0.0, "frontier_kl": 0.1 * i}
            for i in (1, 4, 3, 2)
        ],
    )


@pytest.mark.parametrize(
    ("kept", "missed", "words"),
    [
        (
            Budgets(max_ce_increase=0.02),
            Budgets(max_ce_increase=0.019),
            "cross-entropy rises by 2.00%, the limit is 1.90%",
        ),
        (
            Budgets(min_top1=0.95),
            Budgets(min_top1=0.96),
            "top-1 agreement is 95.00%, the minimum is 96.00%",
        ),
        (
            Budgets(max_nfe_ratio=1.1),
            Budgets(max_nfe_ratio=1.05),
            "NFE ratio is 1.1000, the limit is 1.0500",
        ),
        (
            Budgets(min_right_answers=0.8),
            Budgets(min_right_answers=0.81),
            "right answers are 80.00%, the minimum is 81.00%",
        ),
    ],
)
def test_a_budget_is_kept_up_to_its_limit(
    judgement: Judgement, kept: Budgets, missed: Budgets, words: str
) -> None:
    good, bad = judgement.with_budgets(kept), judgement.with_budgets(missed)
    assert good.passed
    assert good.misses == []
    assert [row["passed"] for row in good.budgets] == [True]
    assert not bad.passed
    assert not bad.as_dict()["passed"]
    assert words in bad.misses[0]
    assert "mask ratio 0.15" in bad.misses[1]
    assert (
        bad.misses[2].index("blocks.4.")
        < bad.misses[2].index("blocks.3.")
        < bad.misses[2].index("blocks.2.")
    )
    assert "blocks.1." not in bad.misses[2]


def test_no_budget_is_no_miss_and_all_are_measured(judgement: Judgement) -> None:
    assert judgement.with_budgets(Budgets()).passed
    everything = judgement.with_budgets(Budgets(0.5, 0.99, 1.0, 0.5))
    assert [row["passed"] for row in everything.budgets] == [True, False, False, True]
    # The intervals exclude the limits, but the third value has no interval.
    assert [row["is_clear"] for row in everything.budgets] == [True, True, False, True]
    # The intervals contain the limits.
    close = judgement.with_budgets(Budgets(0.03, 0.96, 1.0, 0.7))
    assert [row["is_clear"] for row in close.budgets] == [False] * 4


def test_a_loss_out_of_nothing_exceeds_every_budget(judgement: Judgement) -> None:
    lost = replace(judgement, overall=judgement.overall | {"ce_increase": None})
    assert not lost.with_budgets(Budgets(max_ce_increase=1e9)).passed
    assert "inf" in lost.with_budgets(Budgets(max_ce_increase=1e9)).misses[0]


def test_a_budget_for_right_answers_needs_answers() -> None:
    with pytest.raises(JudgeError, match="no answers"):
        Budgets(min_right_answers=0.5).check([text_sample()])
    Budgets(min_right_answers=0.5).check([text_sample(), answered()])
    Budgets(max_nfe_ratio=1.0).check([text_sample()])


# --- The threshold, fitted again ---


def writer(
    good_from: float, hesitation: int = 0
) -> Callable[[Sequence[int], int, Policy], tuple[list[int], int]]:
    """Return a function that writes the right answer if the threshold is at least ``good_from``.

    An answer takes ``threshold / 0.1 + hesitation`` passes.
    """

    def write(tokens: Sequence[int], count: int, policy: Policy) -> tuple[list[int], int]:
        is_good = policy.commit == "static" or policy.threshold >= good_from
        written = [7, 8, 9] if is_good else [7, 8, 4]
        return [
            *written,
            *[EOS] * (count - 3),
        ], count if policy.commit == "static" else hesitation + int(policy.threshold * 10 + 1e-9)

    return write


GRID = (0.3, 0.5, 0.62, 0.65, 0.8)


def fit(reference: Side, candidate: Side, samples: Sequence[Sample], **options: Any) -> Refit:
    return refit_threshold(reference, candidate, samples, POLICY, 8, decode, GRID, **options)


@pytest.mark.parametrize(
    ("sample", "quality"), [(answered(), "task"), (text_sample(6), "agreement")]
)
def test_a_candidate_that_hesitates_gets_a_lower_threshold_that_costs_nothing(
    sample: Sample, quality: str
) -> None:
    calls: list[int] = []
    samples = [sample] * 4
    hesitating = Scripted(write=writer(0.6, hesitation=3))
    found = fit(
        Scripted(write=writer(0.9)),
        hesitating,
        samples,
        preset="fast-dllm",
        on_done=lambda: calls.append(1),
    )
    # Four right answers of four do not show that at least 95% are right.
    assert (found.verdict, found.reached) == ("lowered", quality == "agreement")
    assert (found.refitted.threshold, found.refitted.nfe) == (
        0.62,
        9,
    )  # with 0.5, answers are wrong; 0.65 needs as many passes as 0.62
    assert (found.original.threshold, found.original.nfe) == (0.9, 12)
    assert (found.reference.quality, found.refitted.quality, found.quality) == (1, 1, quality)
    assert found.difference == 0
    assert (found.interval[0] < -0.4) == (quality == "task")
    assert found.samples == 4
    assert found.curve[0] == Point(0.5, 0 if quality == "task" else 0.75, 8)
    assert len(calls) <= refit_steps(len(samples), POLICY, GRID)
    as_dict = found.as_dict()
    assert json.loads(json.dumps(as_dict)) == as_dict
    assert as_dict["preset"] == "fast-dllm"


def test_a_candidate_that_loses_quality_gets_the_lowest_threshold_that_gives_it_back() -> None:
    grid = (0.5, 0.92, 0.95, 0.97, 0.99)
    losing = Scripted(write=writer(0.94))
    found = refit_threshold(
        Scripted(write=writer(0.9)), losing, [answered()] * 4, POLICY, 8, decode, grid
    )
    assert (found.verdict, found.reached, found.refitted.threshold) == ("raised", False, 0.95)
    assert (found.original.quality, found.refitted.quality) == (0, 1)


def test_a_quality_that_no_threshold_gives_back_leaves_the_preset_and_is_flagged() -> None:
    found = fit(Scripted(write=writer(0.2)), Scripted(write=writer(2.0)), [answered()] * 2)
    assert (found.verdict, found.reached) == ("lost", False)
    assert found.refitted == found.original


def test_a_reference_that_scores_nothing_supports_no_threshold() -> None:
    """All answers of the reference are wrong, with every threshold.

    Low thresholds need fewer passes. The quality is equal (0), but this is no reason to choose a
    low threshold.
    """
    found = fit(
        Scripted(write=writer(2.0)), Scripted(write=writer(2.0, hesitation=3)), [answered()] * 4
    )
    assert (found.verdict, found.reached, found.reference.quality) == ("untold", False, 0)
    assert found.refitted == found.original


@pytest.mark.parametrize("commit", ["static", "factor"])
def test_a_policy_without_threshold_is_refused(commit: str) -> None:
    with pytest.raises(RequestError, match=f"'{commit}' has no threshold .* fast-dllm"):
        refit_threshold(
            Scripted(), Scripted(), [answered()], replace(POLICY, commit=commit), 8, decode
        )


def test_a_denoiser_in_fp32_needs_no_other_threshold_than_any_that_gives_its_text(
    tmp_path: Path,
) -> None:
    reference = TorchPredictor(
        load(write_checkpoint(tmp_path, llada_config(n_layers=1), seed=3)), "torch"
    )
    policy = PRESETS["fast-dllm"].with_fields({"block_length": 8, "threshold": 0.05})
    found = refit_threshold(
        reference, reference, _samples(reference, 2), policy, 8, no_text, (0.01, 0.5)
    )
    # Without a tokenizer, answers cannot be compared as text, so agreement of tokens is measured.
    assert found.quality == "agreement"
    assert (found.verdict, found.reached) == ("kept", True)
    assert found.refitted == found.original == found.reference
