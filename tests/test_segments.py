"""Tests of passes that compute several requests in one sequence of tokens.

The tokens of each request form a segment. A token only attends to tokens in the same segment.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from engine_bundles import read_manifest

import dlm_runtime

# Allowed difference of logits. The order in which matrix products add numbers depends on the number
# of rows.
TOLERANCE = 1e-4


def session(bundle: Path) -> onnxruntime.InferenceSession:
    """Return a session that computes a graph's ONNX functions without this project's kernels."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    return onnxruntime.InferenceSession(
        bundle / "denoiser.onnx", options, providers=["CPUExecutionProvider"]
    )


class Graph:
    """Runs passes of a bundle's graph with one or several requests."""

    def __init__(self, bundle: Path) -> None:
        self.session = session(bundle)
        self.layers = read_manifest(bundle)["loop"]["graph"]["ports"]["layers"]

    def run(
        self, parts: Sequence[dict[str, Any]], past: dict[str, np.ndarray], **more: np.ndarray
    ) -> dict[str, np.ndarray]:
        tokens = [token for part in parts for token in part["tokens"]]
        positions = [part["first"] + i for part in parts for i in range(len(part["tokens"]))]
        feeds = {
            "input_ids": np.array([tokens]),
            "position_ids": np.array([positions]),
            "score_rows": np.arange(len(tokens))[None],
        }
        names = [
            "logits",
            *(layer[kind] for layer in self.layers for kind in ("present_key", "present_value")),
        ]
        return dict(zip(names, self.session.run(names, feeds | past | more), strict=True))

    def past(self, of: dict[str, np.ndarray] | None = None) -> dict[str, np.ndarray]:
        """Convert the outputs of a pass to the cache inputs of the next pass.

        If ``of`` is None, there was no pass yet, and the cache is empty.
        """
        found = {}
        for layer in self.layers:
            for kind in ("key", "value"):
                empty = np.zeros((1, layer["kv_heads"], 0, layer["head_size"]), np.float32)
                found[layer[f"past_{kind}"]] = empty if of is None else of[layer[f"present_{kind}"]]
        return found


@pytest.fixture(params=["llada_bundle", "dream_bundle", "several_bundle"])
def bundle(request: pytest.FixtureRequest) -> Path:
    found: Path = request.getfixturevalue(request.param)
    return found


def test_the_definition_lets_a_request_see_its_own_rows_alone(bundle: Path) -> None:
    graph, rng = Graph(bundle), np.random.default_rng(1)
    # Attention is block-causal with blocks of 16, so only whole blocks are cached. The three
    # requests have different numbers of cached and new tokens.
    parts = [
        {"cached": 16, "first": 16, "tokens": rng.integers(2, 150, 16).tolist()},
        {"cached": 0, "first": 0, "tokens": rng.integers(2, 150, 5).tolist()},
        {"cached": 32, "first": 32, "tokens": rng.integers(2, 150, 9).tolist()},
    ]
    alone, pasts = [], []
    for part in parts:
        before = {"first": 0, "tokens": rng.integers(2, 150, part["cached"]).tolist()}
        pasts.append(graph.past(graph.run([before], graph.past()) if part["cached"] else None))
        alone.append(graph.run([part], pasts[-1]))
    # Cache rows that do not belong to a request contain huge and invalid numbers. These numbers
    # must have no effect.
    noise = rng.choice([1e30, np.inf, np.nan], 100).astype(np.float32)
    starts = [21, 0, 40]
    arena = {}
    for name, empty in graph.past().items():
        rows = np.broadcast_to(
            noise[None, None, :, None], (1, empty.shape[1], 100, empty.shape[3])
        ).copy()
        for past, part, start in zip(pasts, parts, starts, strict=True):
            rows[:, :, start : start + part["cached"]] = past[name]
        arena[name] = rows
    firsts = np.cumsum([0, *(len(part["tokens"]) for part in parts)])
    # The cached rows of each request are split into two segments.
    segments = np.array(
        [
            [start + half, part["cached"] // 2, first, len(part["tokens"])]
            for start, part, first in zip(starts, parts, firsts[:-1], strict=True)
            for half in (0, part["cached"] // 2)
        ]
    )
    together = graph.run(parts, arena, segments=segments)
    for one, first, last in zip(alone, firsts[:-1], firsts[1:], strict=True):
        assert np.abs(together["logits"][0, first:last] - one["logits"][0]).max() < TOLERANCE
        for name in one.keys() - {"logits"}:
            assert np.abs(together[name][:, :, first:last] - one[name]).max() < TOLERANCE
    # Without segments, all tokens belong to one request.
    whole = graph.run([parts[1]], graph.past(), segments=np.zeros((0, 4), np.int64))
    assert (whole["logits"] == alone[1]["logits"]).all()


@pytest.mark.parametrize("kernels", ["", "none"])
def test_a_batch_of_any_lengths_shares_its_passes(
    bundle: Path, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DLM_KERNELS", kernels)
    rng = np.random.default_rng(2)
    given = [rng.integers(2, 150, length).tolist() for length in (1, 17, 30, 4, 11)]
    with dlm_runtime.open(bundle, threads=1) as opened:
        presets = ["sdar"] if opened.visible_block else ["llada", "fast-dllm"]
        for preset in presets:
            changes: dict[str, Any] = {"preset": preset, "max_new_tokens": 24, "stop": "none"}
            alone = [opened.generate(tokens=tokens, **changes) for tokens in given]
            together = opened.generate_batch(tokens=given, max_batch=4, **changes)
            with opened.scheduler(max_running=4) as scheduler:
                jobs = [scheduler.submit(tokens=tokens, **changes) for tokens in given]
                scheduled = [job.result(60) for job in jobs]
                stats = scheduler.stats
            for outs in (together, scheduled):
                assert [(out.tokens, out.nfe, out.passes) for out in outs] == [
                    (out.tokens, out.nfe, out.passes) for out in alone
                ]
            assert stats.shares == sum(out.nfe for out in alone)
            # Without kernels, each pass computes only one request. A pass with several requests
            # would waste time on attention scores between tokens of different requests.
            assert stats.passes < stats.shares if not kernels else stats.passes == stats.shares
