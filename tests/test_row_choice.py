"""Tests of graphs that choose cached rows: passes of several requests on ONNX Runtime's GPU provider.

Here, ONNX Runtime's CPU provider runs these graphs. The last test runs the runtime on mocks of CUDA
and of ONNX Runtime, with sanitizers.
"""

from __future__ import annotations

import functools
import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from checkpoints import diffusion_gemma_config, write_checkpoint
from engine_bundles import copy_of, gpu_bundle, read_manifest, tiny
from shared_requests import check_shared, wishes
from test_native import sanitized  # noqa: F401
from test_native_tensorrt import Drive, drive, in_python  # noqa: F401
from test_providers import CUDA, bundle_of, graph, needs_mocks

import dlm_runtime
from dlm_export.bundle.folder import finish
from dlm_export.bundle.prompt_reuse import FULL_ATTENTION, prompt_reuse_of
from dlm_export.families.base import later
from dlm_export.graph import (
    CACHED_REQUESTS,
    CACHED_ROWS,
    TOKEN_REQUESTS,
    experts,
    row_choice,
    trace,
    write,
)
from dlm_export.sources import Source, open_source

# ruff: noqa: F811
ROWS = 400  # cached rows of all requests together
ROW_PORTS = (CACHED_ROWS, CACHED_REQUESTS, TOKEN_REQUESTS)


class Graph:
    """Runs passes of a graph that chooses rows, over random keys and values."""

    def __init__(self, path: Path) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = 1, 3
        self.session = onnxruntime.InferenceSession(
            path, options, providers=["CPUExecutionProvider"]
        )
        draw = np.random.default_rng(0)
        self.past = {
            port.name: draw.standard_normal((1, port.shape[1], ROWS, port.shape[3]), np.float32)
            for port in self.session.get_inputs()
            if port.name.startswith("past_")
        }

    def logits(
        self, tokens: np.ndarray, first: np.ndarray, choice: list[tuple[int, int]], whose: Any
    ) -> np.ndarray:
        """Return the logits of all tokens. ``choice`` lists pairs of a row and its request."""
        of_tokens = np.broadcast_to(np.int64(whose), tokens.shape)
        starts = np.searchsorted(of_tokens, of_tokens)
        feeds = self.past | {
            "input_ids": tokens[None],
            "position_ids": (np.arange(len(tokens)) - starts + first)[None],
            "score_rows": np.arange(len(tokens))[None],
            "cached_rows": np.array([row for row, _ in choice], np.int64),
            "cached_requests": np.array([request for _, request in choice], np.int64),
            "token_requests": of_tokens,
        }
        found: np.ndarray = self.session.run(["logits"], feeds)[0][0]
        return found


def write_fp32(source: Source, folder: Path, *, chooses_rows: bool) -> None:
    """Write the graph of a denoiser in fp32. It computes all experts, if the denoiser has any."""
    network = source.network
    traced = trace.trace_pass(network, "fp32")
    joined, layers = experts.spread(traced.model, network), network.quantisable()
    if chooses_rows:
        row_choice.choose_rows(traced)

    def read(name: str, dtype: np.dtype) -> Any:
        if name not in joined:
            return later(source.parameters, network, name, dtype)
        weight = f"{joined[name].layer}.weight"
        of_layer = functools.partial(source.parameters.read, weight, dtype)
        return experts.join(layers[joined[name].layer], of_layer)

    write.write_graph(traced, read, folder, lambda count: None)


@pytest.fixture(scope="module")
def fp32(tmp_path_factory: pytest.TempPathFactory) -> Graph:
    """The graph of a random denoiser in fp32, in which rounding hides no fault."""
    folder = tmp_path_factory.mktemp("graph")
    write_fp32(open_source(tiny()), folder, chooses_rows=True)
    return Graph(folder / "denoiser.onnx")


def test_padded_rows_change_nothing(fp32: Graph) -> None:
    draw = np.random.default_rng(1)
    for cached in range(301):
        tokens, rows = draw.integers(2, 150, 8), draw.permutation(ROWS)[:cached].tolist()
        read = [(row, 0) for row in rows]
        wanted = fp32.logits(tokens, np.int64(cached % 200), read, 0)
        for step in (8, 64):
            padded = read + [(0, -1)] * (-cached % step)
            found = fp32.logits(tokens, np.int64(cached % 200), padded, 0)
            np.testing.assert_allclose(
                found, wanted, atol=1e-6 * np.ptp(wanted[np.isfinite(wanted)])
            )


def test_a_request_sees_its_own_rows_alone(fp32: Graph) -> None:
    draw = np.random.default_rng(2)
    for _ in range(20):
        counts, lengths = draw.integers(0, 60, 3), draw.integers(1, 9, 3)
        rows = np.split(draw.permutation(ROWS)[: counts.sum()], np.cumsum(counts)[:-1])
        tokens = [draw.integers(2, 150, length) for length in lengths]
        choice = [(int(row), i) for i in range(3) for row in rows[i]]
        draw.shuffle(choice)
        whose = np.repeat(np.arange(3), lengths)
        found = fp32.logits(np.concatenate(tokens), np.repeat(counts, lengths), choice, whose)
        alone = [
            fp32.logits(tokens[i], counts[i], [(int(row), 0) for row in rows[i]], 0)
            for i in range(3)
        ]
        wanted = np.concatenate(alone)
        np.testing.assert_allclose(found, wanted, atol=1e-5 * np.ptp(wanted[np.isfinite(wanted)]))


def test_shared_passes_give_what_each_request_gets_alone(tmp_path: Path) -> None:
    folder = copy_of(gpu_bundle("fp16", "cuda"), tmp_path / "bundle")
    assert prompt_reuse_of(read_manifest(folder)).refusal == FULL_ATTENTION
    shutil.copy(folder / "device.onnx", folder / "denoiser.onnx")
    finish(folder, read_manifest(folder))
    with dlm_runtime.open(folder, engine="onnxruntime", threads=1) as bundle:
        check_shared(bundle, wishes(500))


# ---- Layers with a window ----


@pytest.fixture(scope="module")
def windows(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two bundles in fp32 of a denoiser with windows. The graph of the second one chooses rows."""
    folder = tmp_path_factory.mktemp("windows")
    # The runtime on a CPU needs layers whose keys have the same shape.
    own = {"2": {"head_dim": 16, "num_key_value_heads": 2}}
    config = diffusion_gemma_config(per_layer_config=own, sliding_window=20)
    source = open_source(write_checkpoint(folder / "checkpoint", config, seed=3))
    bundle = gpu_bundle("fp16", "cuda", source=folder / "checkpoint")
    made = folder / "plain", folder / "chooses"
    for each in made:
        copy_of(bundle, each)
        write_fp32(source, each, chooses_rows=each is made[1])
        manifest = read_manifest(each)
        manifest["loop"]["graph"]["cache_dtype"] = "float32"
        finish(each, manifest)
    return made


def test_masks_hide_rows_outside_the_window(windows: tuple[Path, Path]) -> None:
    """Passes of several requests equal passes of one request in the graph without the choice."""
    plain, chooses = (
        onnxruntime.InferenceSession(each / "denoiser.onnx", providers=["CPUExecutionProvider"])
        for each in windows
    )
    draw, window, longest, hidden = np.random.default_rng(0), 19, 2048, 64
    past = {
        port.name: draw.standard_normal((1, port.shape[1], ROWS, port.shape[3]), np.float32)
        for port in plain.get_inputs()
        if port.name.startswith("past_")
    }
    for _ in range(30):
        count = draw.integers(1, 4)
        cached, lengths = draw.integers(0, 60, count), draw.integers(1, 9, count)
        near = np.minimum(cached, window)
        chosen, of_window = (
            np.split(draw.permutation(ROWS)[: each.sum()], np.cumsum(each)[:-1])
            for each in (cached, near)
        )
        drafts = longest * draw.integers(0, 2, count)
        tokens = [
            {
                "input_ids": draw.integers(2, 150, length)[None],
                "position_ids": (first + draft + np.arange(length))[None],
                "score_rows": np.arange(length)[None],
                "conditioning": np.zeros((1, length, hidden), np.float32),
                "temperature": np.ones((1, length), np.float32),
            }
            for first, draft, length in zip(cached, drafts, lengths, strict=True)
        ]
        wanted = np.concatenate(
            [
                plain.run(
                    ["logits"],
                    given
                    | {
                        name: rows[:, :, of_window[i] if int(name[-1]) < 2 else chosen[i]]
                        for name, rows in past.items()
                    },
                )[0][0]
                for i, given in enumerate(tokens)
            ]
        )
        whose, padding = np.arange(count), draw.integers(0, 5)
        feeds = {name: np.concatenate([each[name] for each in tokens], 1) for name in tokens[0]}
        feeds["score_rows"] = np.arange(lengths.sum())[None]
        lists = {
            "cached_rows": (np.concatenate(chosen), 0),
            "cached_requests": (np.repeat(whose, cached), -1),
            "window_rows": (np.concatenate(of_window), 0),
            "window_requests": (np.repeat(whose, near), -1),
            "window_distances": (np.concatenate([np.arange(each, 0, -1) for each in near]), 0),
        }
        padded = {
            name: np.concatenate([numbers, np.full(padding, other)]).astype(np.int64)
            for name, (numbers, other) in lists.items()
        }
        padded["token_requests"] = np.repeat(whose, lengths)
        found = chooses.run(["logits"], past | feeds | padded)[0][0]
        np.testing.assert_allclose(found, wanted, atol=1e-5 * np.ptp(wanted[np.isfinite(wanted)]))


def test_requests_with_windows_share_passes_and_prompts(windows: tuple[Path, Path]) -> None:
    draw = random.Random(3)
    wanted = [
        {
            "tokens": [draw.randrange(2, 140) for _ in range(draw.randrange(1, 60))],
            "max_new_tokens": 8 * draw.randrange(1, 4),
            "steps_per_block": 6,
        }
        for _ in range(40)
    ]
    ids = [draw.randrange(2, 140) for _ in range(100)]
    parts = [{**wanted[0], "tokens": ids[:length]} for length in (100, 83, 64, 40)]
    with dlm_runtime.open(windows[0], engine="onnxruntime", threads=1) as bundle:
        alone = [bundle.generate(**each).tokens for each in (*wanted, *parts)]
    with dlm_runtime.open(windows[1], engine="onnxruntime", threads=1) as bundle:
        assert [bundle.generate(**each).tokens for each in (*wanted, *parts)] == alone
        with bundle.scheduler(max_running=16, max_tokens=512) as scheduler:
            jobs = [scheduler.submit(**each) for each in wanted]
            assert [job.result().tokens for job in jobs] == alone[: len(wanted)]
            assert scheduler.stats.shares > 8 * scheduler.stats.passes
        with bundle.scheduler(max_running=1, max_tokens=16) as scheduler:
            made = [scheduler.submit(**each).result() for each in parts]
            assert [each.tokens for each in made] == alone[len(wanted) :]
            assert [each.cached_tokens for each in made] == [0, 80, 64, 32]


# ---- On mocks of CUDA and of ONNX Runtime ----


def mock_bundle(folder: Path, *more: str, **loop: Any) -> Path:
    """Write a bundle whose graph chooses rows.

    ``more`` are more lines of the graph. ``loop`` changes the entry in the manifest.
    """
    made = bundle_of(folder, graph("chooses_rows", *more))
    manifest = json.loads((made / "manifest.json").read_text())
    manifest["loop"]["graph"]["ports"] |= {name: name for name in ROW_PORTS}
    manifest["loop"] |= loop
    (made / "manifest.json").write_text(json.dumps(manifest))
    return made


PROGRAM = """
import sys
sys.path.insert(0, {tests!r})
import dlm_runtime
from shared_requests import check_prompts, check_shared, wishes
with dlm_runtime.open(sys.argv[1], provider="cuda", cuda_graphs={graphs}) as bundle:
    {check}
    print(bundle.engine, "done", sep="\\n")
"""


def run_on_mocks(check: str, bundle: Path, sanitized: Path, graphs: bool = False) -> None:
    program = PROGRAM.format(tests=str(Path(__file__).parent), check=check, graphs=graphs)
    library = str(sanitized / "libmock_onnxruntime.so")
    engine, _ = in_python(program, bundle, sanitized, DLM_ONNXRUNTIME=library)
    assert engine == "onnxruntime 1.31.1 (CUDA, Mock GPU, SM 12.0)"


@needs_mocks
@pytest.mark.parametrize("graphs", [False, True])
def test_shared_passes_over_device_memory_give_what_each_request_gets_alone(
    tmp_path: Path, sanitized: Path, graphs: bool
) -> None:
    bundle = mock_bundle(tmp_path / "bundle")
    run_on_mocks("check_shared(bundle, wishes(500))", bundle, sanitized, graphs)


@needs_mocks
def test_prompts_are_reused_in_device_memory(tmp_path: Path, sanitized: Path) -> None:
    bundle = mock_bundle(tmp_path / "bundle", visible_block=8)
    run_on_mocks(f"check_prompts(bundle, {str(tmp_path / 'cache')!r})", bundle, sanitized)


@needs_mocks
def test_passes_of_one_shape_run_as_one_cuda_graph(tmp_path: Path, drive: Drive) -> None:
    bundle, graphs = mock_bundle(tmp_path / "bundle"), CUDA | {"cuda_graphs": 1}
    told = drive(bundle, cache="dual", given=21, new=24, rounds=3, **graphs)
    assert told.all_same()
    assert told.made("captured", 0) < told.counts[0]["nfe"] / 2
    assert told.made("captured", 2) == 0, "the third request has the shapes of the first"
    assert told.made("replayed", 2) == told.counts[2]["nfe"]
    assert drive(bundle, cache="dual", batch=3, max_batch=3, rounds=2, **graphs).all_same()
    # Canvases of different lengths use one block of memory, with other addresses in it.
    assert drive(bundle, cache="dual", cycle=7, rounds=9, alternate=1, **graphs).all_same()
    # Passes that return logits, and passes with guidance, are not captured.
    assert drive(bundle, logits=9, given=12, **graphs).made("captured") == 0


@needs_mocks
@pytest.mark.parametrize(
    ("options", "status", "sentence"),
    [
        ({"engine": "auto"}, "INVALID_ARGUMENT", 'is for provider "cuda", not for provider "cpu"'),
        (CUDA, "UNSUPPORTED", "CUDA graphs need a bundle that was built with --target cuda"),
    ],
)
def test_where_there_can_be_no_cuda_graphs_they_are_refused(
    tmp_path: Path, drive: Drive, options: dict[str, Any], status: str, sentence: str
) -> None:
    opened = drive(bundle_of(tmp_path / "bundle"), cuda_graphs=1, **options).opened
    assert opened[0] == status
    assert sentence in opened[1]


@needs_mocks
def test_a_cache_that_does_not_fit_says_what_to_set(tmp_path: Path, drive: Drive) -> None:
    bundle = mock_bundle(tmp_path / "bundle")
    told = drive(bundle, {"MOCK_CUDA_BYTES": "4096"}, cache="dual", batch=4, max_batch=4, **CUDA)
    status, message = told.rounds[0]
    assert status == "OUT_OF_MEMORY"
    assert "set a smaller cache_bytes of the scheduler" in message


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"cached_requests": None}, '"cached_requests" is missing'),
        ({"cached_rows": None}, "needs cached_rows"),
        ({"token_requests": "input_ids"}, "another port has the name"),
    ],
)
def test_a_manifest_with_some_of_the_ports_is_refused(
    tmp_path: Path, changes: dict[str, str | None], sentence: str
) -> None:
    bundle = mock_bundle(tmp_path / "bundle")
    manifest = json.loads((bundle / "manifest.json").read_text())
    ports = manifest["loop"]["graph"]["ports"] | changes
    kept = {name: port for name, port in ports.items() if port is not None}
    manifest["loop"]["graph"]["ports"] = kept
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(dlm_runtime.BundleError, match=sentence):
        dlm_runtime.open(bundle, engine="none")
