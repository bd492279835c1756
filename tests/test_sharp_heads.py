"""Tests that positions are ranked as in exact arithmetic where the best token is almost certain.

The loops of LLaDA, Fast-dLLM, d3LLM and Stable-DiffCoder compute a softmax in float64. If the best
logit leads by more than 15, its probability is exactly 1 in float32, so float32 cannot rank two such
positions.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from published import MASK, VOCABULARY, random_network
from traces import trace_once

from dlm_export.graph import fuse
from dlm_export.judging.parity.ties import Decided, find_divergence
from dlm_export.network.loop_scores import log_odds
from dlm_export.network.loop_turns import start_canvas
from dlm_export.network.reference import Run
from dlm_runtime import CallbackPass, DenoiserInfo, Policy, from_callback

PROMPT, NEW_TOKENS = [11, 23, 42], 24
NETWORK = random_network(0, 0, 0).network
Head = Callable[[np.ndarray], list[np.ndarray]]


def logits_of(canvas: np.ndarray, scale: float, seed: int) -> np.ndarray:
    """Return random logits, fp32 ``[L, V]``, that depend on the whole canvas."""
    rng = np.random.default_rng([seed, zlib.crc32(canvas.astype(np.int64).tobytes())])
    logits = rng.standard_normal((len(canvas), VOCABULARY)) * scale
    return logits.astype(np.float32)


def published(scale: float, seed: int, block_length: int) -> list[int]:
    """Run LLaDA's static loop in float64, with one position per pass.

    The published code may take any of several positions whose probabilities are equal in float64.
    This function takes the one whose other tokens have the smallest sum.
    """
    canvas = np.array([*PROMPT, *[MASK] * NEW_TOKENS])
    for first in range(len(PROMPT), len(canvas), block_length):
        while (masked := first + np.flatnonzero(canvas[first:][:block_length] == MASK)).size:
            logits = logits_of(canvas, scale, seed)[masked].astype(np.float64)
            logits[:, MASK] = -np.inf
            ranked = np.sort(logits, -1)
            behind_second = np.log(np.exp(ranked[:, :-1] - ranked[:, -2:-1]).sum(-1))
            best = int((ranked[:, -1] - ranked[:, -2] - behind_second).argmax())
            probs = 1 / np.exp(ranked - ranked[:, -1:]).sum(-1)
            assert probs[best] >= probs.max() - 1e-15
            canvas[masked[best]] = logits[best].argmax()
    return canvas.tolist()


def in_reference(policy: Policy, scale: float, seed: int) -> list[int]:
    run = Run(NETWORK, start_canvas(PROMPT, NEW_TOKENS, MASK), policy)
    while run.advance() is not None:
        run.commit(torch.from_numpy(logits_of(run.tokens, scale, seed)[run.rows.numpy()]))
    return run.tokens.tolist()


def natively(policy: Policy, scale: float, seed: int, head: Head) -> list[int]:
    """Generate with the native loop, and compute the outputs of each pass with ``head``."""

    def run(p: CallbackPass) -> None:
        logits = logits_of(p.input_ids, scale, seed)[p.score_rows]
        p.top_tokens[:], p.top_probs[:], p.top_log_odds[:], entropy = head(logits)
        if p.entropy is not None:
            p.entropy[:] = entropy

    info = DenoiserInfo(
        vocab_size=VOCABULARY,
        mask_token_id=MASK,
        max_canvas_length=NETWORK.max_canvas_length,
        eos_token_ids=NETWORK.eos_token_ids,
    )
    with from_callback(info, run) as bundle:
        fields = policy.as_dict()
        return bundle.generate(tokens=PROMPT, max_new_tokens=NEW_TOKENS, **fields).tokens


def on_host(logits: np.ndarray) -> list[np.ndarray]:
    logits = logits.astype(np.float64)
    logits[:, MASK] = -np.inf
    best = np.argsort(-logits, axis=-1, kind="stable")[:, :2]
    odds = np.stack([log_odds(logits, best[:, rank]) for rank in (0, 1)], -1)
    return [best, 1 / (1 + np.exp(-odds)), odds, np.zeros(len(logits))]


def of_graph(*, is_fused: bool) -> Head:
    """Return the part of a graph after the logits, in ONNX Runtime.

    The fused graph is that of bundles for CPUs, and the other one that of bundles for GPUs.
    """
    traced = trace_once(NETWORK, "fp32")
    if is_fused:
        fuse.fuse(traced)
    weights = traced.model.graph.initializers
    bias = np.zeros(VOCABULARY, np.float32)
    bias[MASK] = -np.inf
    for name in set(weights) - {"mask_token_bias"}:
        weights.pop(name)  # they have no values, and the head does not read them
    weights["mask_token_bias"].const_value = ir.tensor(bias)
    head = onnx.utils.Extractor(ir.to_proto(traced.model)).extract_model(
        ["logits"], ["top_token", "top_prob", "top_log_odds", "entropy"]
    )
    assert ("Candidates" in {node.op_type for node in head.graph.node}) is is_fused
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    session = onnxruntime.InferenceSession(head.SerializeToString(), options)
    return lambda logits: [found[0] for found in session.run(None, {"logits": logits[None]})]


@pytest.mark.parametrize("scale", [10, 30, 100])
def test_static_canvases_equal_those_of_a_loop_in_float64(scale: float) -> None:
    heads = [on_host, of_graph(is_fused=False), of_graph(is_fused=True)]
    for seed in range(12):
        policy = Policy(commit="static", block_length=(8, 24)[seed % 2], stop="none")
        wanted = published(scale, seed, policy.block_length)
        assert in_reference(policy, scale, seed) == wanted
        for head in heads:
            assert natively(policy, scale, seed, head) == wanted


@pytest.mark.parametrize(
    ("commit", "score"),
    [
        ("static", "entropy"),
        *(
            (c, s)
            for c in ("static", "threshold", "dynamic", "factor")
            for s in ("confidence", "margin")
        ),
    ],
)
def test_the_native_loop_decides_as_the_reference(commit: str, score: str) -> None:
    head = of_graph(is_fused=False)
    for seed, scale in enumerate((1, 3, 10, 40)):
        policy = Policy(
            commit=commit, score=score, block_length=12, stop="none", threshold=1 - 1e-9
        )
        policy = policy.with_fields({"factor": 1e-8 * scale})
        wanted = in_reference(policy, scale, seed)
        assert natively(policy, scale, seed, head) == wanted


def test_the_head_keeps_the_digits_of_small_remainders() -> None:
    rng = np.random.default_rng(3)
    logits = (rng.standard_normal((200, VOCABULARY)) * 3).astype(np.float32)
    logits[np.arange(200), rng.integers(0, MASK, 200)] += np.linspace(0, 190, 200, dtype=np.float32)
    best, probs, odds, _ = on_host(logits)
    wide = np.sort(np.delete(logits, MASK, 1).astype(np.float64))
    behind = wide[:, :-1] - wide[:, -1:]
    others = np.exp(behind).sum(-1)
    entropy = (np.exp(behind) * behind).sum(-1) / (1 + others) - np.log1p(others)
    for is_fused in (False, True):
        found = of_graph(is_fused=is_fused)(logits)
        np.testing.assert_array_equal(found[0], best)
        np.testing.assert_allclose(found[1], probs, rtol=3e-5, atol=1e-37)
        np.testing.assert_allclose(found[2], odds, rtol=0, atol=4e-5)
        np.testing.assert_allclose(found[3], entropy, rtol=1e-4, atol=1e-37)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_logit_makes_the_probabilities_not_finite(bad: float) -> None:
    for is_fused in (False, True):
        for token in (0, 50, VOCABULARY - 2):
            logits = np.random.default_rng(4).standard_normal((3, VOCABULARY)).astype(np.float32)
            logits[1, token] = bad
            probs = of_graph(is_fused=is_fused)(logits)[1]
            assert np.isfinite(probs).all(-1).tolist() == [True, False, True]


@pytest.mark.parametrize("commit", ["static", "threshold", "factor", "entropy_bound"])
@pytest.mark.parametrize("select", ["argmax", "sample"])
def test_rounding_explains_the_decisions_of_logits_that_differ_little(
    commit: str, select: str
) -> None:
    """Decisions for changed logits are explained by the change, and other decisions are not."""
    fields = {"commit": commit, "select": select, "temperature": 0.5 * (select == "sample")}
    policy = Policy(
        block_length=0, threshold=0.2, score="entropy" if "bound" in commit else "confidence"
    )
    policy = policy.with_fields(fields)
    rng, changed = np.random.default_rng(5), 0
    for seed in range(40):
        canvas = start_canvas(PROMPT, NEW_TOKENS, MASK)
        logits = logits_of(canvas.tokens, 2, seed)
        error = 10.0 ** rng.uniform(-1.5, 0)
        noise = error * rng.uniform(-1, 1, logits.shape).astype(np.float32)
        runs = []
        for each in (logits, logits + noise):
            run = Run(NETWORK, canvas, policy)
            run.advance()
            found = run.commit(torch.from_numpy(each[run.rows.numpy()]))
            runs.append((run, found))
        (theirs, proposals), (ours, _) = runs
        masked = theirs.proposer.masked(torch.from_numpy(logits[theirs.rows.numpy()])).numpy()
        decided = Decided(theirs.turn, proposals, masked)
        assert find_divergence([decided], [theirs.canvas], policy) is None
        divergence = find_divergence([decided], [ours.canvas], policy)
        if divergence is not None:
            changed += 1
            assert divergence.number == 1
            assert divergence.needed <= 1.5 * error
        wrong = ours.canvas
        at = theirs.turn.positions[int(proposals.scores.argmax())]
        wrong.tokens[at] = (proposals.tokens[proposals.scores.argmax()] + 1) % MASK
        wrong.undecided[at] = False
        mistake = find_divergence([decided], [wrong], policy)
        assert mistake is not None
        assert mistake.needed > 1e-3
        assert int(at) in mistake.positions
    assert changed
