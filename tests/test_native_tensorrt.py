"""Tests of the TensorRT engine without a GPU.

The tests use mock CUDA and TensorRT libraries (runtime/native/tests) and sanitizers. They do not
run the real TensorRT, but the runtime's TensorRT code is compiled with NVIDIA's headers.

The program cannot read the "device" memory of the mocks. The mocks check every address, and run the
work on a CUDA stream only when the program waits for the stream. A mock denoiser computes its
results from every byte that a pass reads. The tests compare its canvas with the canvas of the same
denoiser in ``from_callback``. The canvases are equal only if every byte was copied to the right
place.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from test_native import HAS_MOCKS, HAS_TENSORRT, run, sanitized, tool  # noqa: F401

from dlm_runtime.abi.native import tensorrt_libraries

VERSION = "10.14.1.48"
VOCABULARY, MASK, TOP_K = 50, 49, 2
LAYERS = ((3, 4), (3, 4))  # for each layer: (number of key and value heads, head size)
MIXED = ((3, 4), (1, 16), (3, 4), (2, 2))
CANVAS, BLOCK = 64, 32
WIDTH, WINDOW = 5, 3  # of the denoiser with self-conditioning
# The policy of this denoiser: 6 passes over each block of 8 random tokens.
NOISE = {"cache": "block", "remask": "noise", "commit": "entropy_bound", "score": "entropy"}
NOISE |= {"block": "8", "steps": "6"}
PORTS = (
    "input_ids",
    "position_ids",
    "score_rows",
    "top_token",
    "top_prob",
    "top_log_odds",
    "entropy",
    "logits",
)
CONDITIONING_PORTS = ("conditioning", "temperature", "next_conditioning")
LAYER_PORTS = ("past_key", "past_value", "present_key", "present_value")
TYPES = {"float32": 0, "float16": 1, "bfloat16": 7}  # the numbers of nvinfer1::DataType

pytestmark = pytest.mark.skipif(
    not (HAS_TENSORRT and HAS_MOCKS),
    reason="TensorRT's or CUDA's headers are not installed: pip install kernel-lens==2.0.1 nvidia-cuda-runtime",
)


def profiles(block: int = BLOCK, canvas: int = CANVAS) -> dict[str, dict[str, list[int]]]:
    rows = [1, 8, block]
    return {
        "prefill": {"tokens": [1, 32, canvas], "cached": [0, 0, 0], "rows": rows},
        "block": {"tokens": [1, 16, block], "cached": [0, 32, canvas], "rows": rows},
    }


def plan(
    sizes: dict[str, dict[str, list[int]]],
    cache: str = "float16",
    *more: str,
    layers: tuple[tuple[int, int], ...] = LAYERS,
    conditioning: int = 0,
) -> str:
    """Return the content of an engine file for the mock TensorRT library."""
    mask = VOCABULARY if conditioning else MASK
    lines = ["mock-engine", f"denoiser {VOCABULARY} {mask} {TOP_K} {TYPES[cache]}"]
    lines += [f"layer {kv_heads} {head_size}" for kv_heads, head_size in layers]
    lines += [f"conditioning {conditioning}"] if conditioning else []
    for profile in sizes.values():
        lines.append(
            "profile "
            + " ".join(str(n) for name in ("tokens", "cached", "rows") for n in profile[name])
        )
    return "\n".join([*lines, *more]) + "\n"


def _sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def write_bundle(
    folder: Path,
    engines: dict[str, dict[str, Any]] | None = None,
    cache: str = "float16",
    shift: int = 0,
    layers: tuple[tuple[int, int], ...] = LAYERS,
    names: Callable[[str], str] = str,
    graphs: tuple[str, str] = ("judged", "device"),
    conditioning: int = 0,
    longest: int = 256,
) -> Path:
    """Write a bundle with only the fields that the native reader needs.

    ``engines`` maps targets to changes of the engine's entry in the manifest. The key "plan" sets
    the content of the engine file. ``names`` renames inputs and outputs. ``graphs`` are the
    contents of denoiser.onnx and denoiser.device.onnx, which a TensorRT engine never reads. If
    ``conditioning`` is above 0, the denoiser starts from random tokens, has self-conditioning of
    this width, and all its layers except the last have a window. ``longest`` is the length of the
    longest canvas.
    """
    folder.mkdir(exist_ok=True)
    judged, device = (text.encode() for text in graphs)
    contents = {
        "denoiser.onnx": judged,
        "denoiser.device.onnx": device,
        "denoiser.onnx.data": b"weights",
    }
    entries = {}
    for target, changes in ({"rtx5090": {}} if engines is None else engines).items():
        sizes = changes.get("profiles", profiles())
        name = f"engines/{target}.engine"
        usual = plan(sizes, cache, layers=layers, conditioning=conditioning)
        contents[name] = changes.get("plan", usual).encode()
        entry = {
            "file": name,
            "builder": "tensorrt",
            "version": VERSION,
            "sm": [120],
            "built_from": {
                "judged": _sha(contents["denoiser.onnx"]),
                "device": _sha(contents["denoiser.device.onnx"]),
                "weights": _sha(contents["denoiser.onnx.data"]),
            },
            "profiles": sizes,
        }
        entry |= {key: value for key, value in changes.items() if key != "plan"}
        seal = json.dumps(entry, sort_keys=True, separators=(",", ":")).encode()
        entries[target] = entry | {"seal": _sha(seal)}
    (folder / "engines").mkdir(exist_ok=True)
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    own = PORTS + (CONDITIONING_PORTS if conditioning else ())
    ports: dict[str, Any] = {name: names(name) for name in own}
    ports["layers"] = [
        {
            "kv_heads": kv_heads,
            "head_size": head_size,
            **({"window": WINDOW} if conditioning and i < len(layers) - 1 else {}),
            **{kind: names(f"{kind}.{i}") for kind in LAYER_PORTS},
        }
        for i, (kv_heads, head_size) in enumerate(layers)
    ]
    graph = {
        "file": "denoiser.onnx",
        "device_file": "denoiser.device.onnx",
        "simulated": False,
        "top_k": TOP_K,
    }
    loop = {
        "vocab_size": VOCABULARY,
        "mask_token_id": MASK,
        "eos_token_ids": [],
        "max_canvas_length": longest,
        "shift": shift,
    }
    if conditioning:
        loop |= {"mask_token_id": VOCABULARY, "noise": "uniform", "conditioning_size": conditioning}
        loop |= {"visible_block": 1, "draft_block": 8}
    loop |= {
        "graph": graph | {"cache_dtype": cache, "ports": ports},
        "presets": {"llada": {}},
        "default_preset": "llada",
    }
    files = {
        name: {"bytes": len(content), "sha256": _sha(content)} for name, content in contents.items()
    }
    manifest = {"schema_version": 2, "loop": loop | {"engines": entries}, "files": files}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return write_bundle(tmp_path / "bundle")


@dataclass(frozen=True)
class Told:
    """The output of the program device_driver.

    ``opened`` is (status, message) of opening the bundle. ``rounds`` contains (status, message) of
    each request. ``log`` contains the lines of the log.
    ``counts`` contains the total number of calls of each mock function after each round.
    """

    opened: tuple[str, str]
    rounds: list[tuple[str, str]]
    counts: list[dict[str, int]]
    log: list[str]

    def all_same(self) -> bool:
        return bool(self.rounds) and all(answer == ("OK", "same") for answer in self.rounds)

    def made(self, call: str, round: int = -1) -> int:
        """Return how often the mock function ``call`` was called in the given round."""
        rounds = range(len(self.counts))
        before = self.counts[rounds[round] - 1] if rounds[round] > 0 else {}
        return self.counts[round].get(call, 0) - before.get(call, 0)


Drive = Callable[..., Told]


@pytest.fixture
def drive(sanitized: Path, tmp_path: Path) -> Drive:  # noqa: F811
    def drive(bundle: Path, variables: dict[str, str] | None = None, **options: object) -> Told:
        """Run device_driver. The environment variables in ``variables`` can make the mocks fail.

        The program must exit with 0, and the sanitizers must find no leak and no invalid access.
        """
        variable = {
            "DLM_CUDA_LIBRARY": "mock_cuda",
            "DLM_NVRTC": "mock_cuda",
            "DLM_TENSORRT": "mock_nvinfer",
            "DLM_ONNXRUNTIME": "mock_onnxruntime",
            # The mock of ONNX Runtime does not call this library.
            "DLM_TENSORRT_RTX_PROVIDER": "mock_cuda",
        }
        mocks = {name: str(sanitized / f"lib{mock}.so") for name, mock in variable.items()}
        arguments = [f"{key}={value}" for key, value in options.items()]
        environment = mocks | {"ASAN_OPTIONS": "detect_leaks=1", "XDG_CACHE_HOME": str(tmp_path)}
        environment |= variables or {}
        done = run(sanitized / "device_driver", bundle, *arguments, **environment)
        assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
        lines = done.stdout.splitlines()

        def answers(kind: str) -> list[tuple[str, str]]:
            found = [re.fullmatch(rf"{kind} (\w+) ?(.*)", line) for line in lines]
            return [(match[1], match[2]) for match in found if match]

        counts = [
            dict(pair.split("=") for pair in line.split()[1:])
            for line in lines
            if line.startswith("counts ")
        ]
        told = Told(
            answers("open")[0],
            answers("round"),
            [{key: int(n) for key, n in count.items()} for count in counts],
            [line[4:] for line in lines if line.startswith("log ")],
        )
        assert lines[-1] == "live 0", "something of CUDA's was not given back"
        for forbidden in ("bad_access", "stale_graph"):
            assert not any(count.get(forbidden) for count in told.counts), forbidden
        return told

    return drive


# ---- The same passes, the same canvases ----


def shown(layers: tuple[tuple[int, int], ...]) -> str:
    """The layers of a bundle, for the callback engine."""
    return ",".join(f"{kv_heads}x{head_size}" for kv_heads, head_size in layers)


@pytest.mark.parametrize(
    ("made", "options"),
    [
        ({}, {"cache": "none", "commit": "threshold", "new": 30, "block": 32}),
        ({}, {"cache": "none", "given": 0, "new": 40, "block": 16}),
        ({}, {"cache": "prefix", "infill": 1, "given": 8}),
        ({}, {"cache": "prefix", "refresh": 9, "given": 3, "new": 24, "block": 7}),
        (
            {},
            {"cache": "dual", "score": "entropy", "commit": "entropy_bound", "given": 1, "new": 3},
        ),
        ({}, {"cache": "dual", "given": 40, "new": 24, "block": 24}),
        ({}, {"cache": "dual", "given": 1, "new": 1}),
        ({}, {"cache": "dual", "refresh": 1}),
        ({}, {"cache": "dual", "refresh": 8, "infill": 1, "given": 17}),
        ({}, {"cache": "dual", "threads": 4}),
        ({"cache": "float32"}, {"cache": "dual"}),
        ({"cache": "float16", "shift": 1}, {"cache": "dual"}),
        ({"cache": "bfloat16", "shift": 1}, {"cache": "dual"}),
        ({"layers": MIXED}, {"cache": "prefix", "layers": shown(MIXED)}),
        ({"layers": MIXED}, {"cache": "dual", "refresh": 9, "infill": 1, "layers": shown(MIXED)}),
        ({"conditioning": WIDTH}, NOISE),
        ({"conditioning": WIDTH}, NOISE | {"given": 0}),
        ({"conditioning": WIDTH}, NOISE | {"new": 21}),
        ({"conditioning": WIDTH}, NOISE | {"threads": 3}),
    ],
    ids=str,
)
def test_canvases_are_those_of_the_callback_engine(
    tmp_path: Path, drive: Drive, made: dict[str, Any], options: dict[str, Any]
) -> None:
    """In the callback engine, the loop passes self-conditioning on in host memory."""
    told = drive(write_bundle(tmp_path / "bundle", **made), rounds=3, **options)
    assert told.opened[0] == "OK"
    assert "tensorrt 10.14.1.48 (Mock GPU, SM 12.0, engine rtx5090)" in told.opened[1]
    assert len(told.rounds) == 3 * options.get("threads", 1)
    assert told.all_same(), told.rounds


def test_ports_are_found_by_the_names_that_the_manifest_gives_them(
    tmp_path: Path, drive: Drive
) -> None:
    # Exchange the names of the engine's inputs and outputs. The runtime must use the names in the
    # manifest, not the usual names or the order.
    everything = [*PORTS, *(f"{kind}.{i}" for kind in LAYER_PORTS for i in range(len(LAYERS)))]
    called = dict(zip(everything, reversed(everything), strict=True))
    lines = [f"rename {name} {name}!" for name in called] + [
        f"rename {name}! {other}" for name, other in called.items()
    ]
    file = plan(profiles(), "float16", *lines)
    bundle = write_bundle(
        tmp_path / "bundle", {"rtx5090": {"plan": file}}, names=called.__getitem__
    )
    for cache in ("none", "dual"):
        assert drive(bundle, cache=cache, rounds=3).all_same()


@pytest.mark.parametrize("rows", [1, 32, 50])
def test_logits_are_copied_whole_and_in_as_many_passes_as_the_engine_needs(
    bundle: Path, drive: Drive, rows: int
) -> None:
    told = drive(bundle, logits=rows, given=51)
    assert told.all_same()
    passes = 1 if rows <= BLOCK else 2
    assert told.made("pageable_copies") == passes


# ---- Self-conditioning ----


@pytest.fixture
def conditioned(tmp_path: Path) -> Path:
    return write_bundle(tmp_path / "bundle", conditioning=WIDTH)


def test_self_conditioning_stays_on_the_device(conditioned: Path, drive: Drive) -> None:
    told = drive(conditioned, rounds=3, **NOISE)
    # One pass stores the prompt of 5 tokens, 3 blocks take 6 passes each, and 2 blocks are stored.
    assert told.counts[0]["nfe"] == 1 + 3 * 6 + 2
    queued = told.made("enqueueV3", 0)
    # A pass copies ids, positions, scored rows and temperatures to the device. Back come tokens,
    # probabilities, log odds and entropies.
    assert told.made("cuMemcpyHtoDAsync", 0) == 4 * queued
    assert told.made("cuMemcpyDtoHAsync", 0) == 4 * queued
    copied, cleared = (told.made(call, 0) for call in ("cuMemcpyDtoDAsync", "cuMemsetD8Async"))
    assert copied + cleared == queued
    assert min(copied, cleared) > 0
    # From the third request on, all passes replay CUDA graphs.
    assert told.made("enqueueV3", 2) == 0
    assert told.made("cuStreamSynchronize", 2) == told.made("cuGraphLaunch", 2) == 21
    assert told.counts[2].get("pageable_copies", 0) == 0


def test_a_long_prompt_is_stored_in_one_pass_although_layers_have_a_window(
    tmp_path: Path, drive: Drive
) -> None:
    sizes = profiles(canvas=640)
    engines = {"rtx5090": {"profiles": sizes}}
    bundle = write_bundle(tmp_path / "bundle", engines, conditioning=WIDTH, longest=700)
    told = drive(bundle, given=600, new=16, **NOISE)
    assert told.all_same(), told.rounds
    assert told.counts[0]["nfe"] == 1 + 2 * 6 + 1


# ---- The work of a pass ----


def test_a_pass_waits_once_and_logits_stay_on_the_device(bundle: Path, drive: Drive) -> None:
    told = drive(bundle, cache="dual", rounds=3)
    for round in (1, 2):
        assert told.made("cuStreamSynchronize", round) == told.counts[round]["nfe"] > 0
        assert told.made("pageable_copies", round) == 0


def test_everything_is_allocated_when_the_session_opens(bundle: Path, drive: Drive) -> None:
    told = drive(bundle, cache="dual", rounds=4, threads=3)
    for call in ("cuMemAlloc", "cuMemHostAlloc", "cuStreamCreate"):
        assert [count[call] for count in told.counts] == [3] * 4, call


def test_kept_rows_are_moved_on_the_device_by_two_copies_a_tensor(
    bundle: Path, drive: Drive
) -> None:
    told = drive(bundle, cache="dual", given=5, new=24, block=8)
    # There are three blocks. Cached keys and values are copied aside for each block. They are
    # copied back after each block except the last.
    assert told.made("cuMemcpy2DAsync") == (2 + 2 + 1) * 2 * len(LAYERS)
    row_bytes = (
        2 * 2 * sum(kv_heads * head_size for kv_heads, head_size in LAYERS)
    )  # bytes of the keys and values in float16
    assert told.counts[0]["cache_bytes"] == row_bytes * (29 + 21)
    # With ``refresh``, the first pass of a block also computes 8 positions before the block. Cached
    # rows are first copied aside. Then some of them are copied back around the computed rows.
    told = drive(bundle, cache="dual", given=5, new=24, block=8, refresh=8)
    first, second, third = 2, (1 + 2) + (1 + 3), (1 + 1) + (1 + 2)
    assert told.made("cuMemcpy2DAsync") == (first + second + third) * 2 * len(LAYERS)
    assert drive(bundle, cache="none").counts[0].get("cuMemcpy2DAsync", 0) == 0


def test_a_pass_is_captured_when_it_comes_again_and_replayed_from_then_on(
    bundle: Path, drive: Drive
) -> None:
    told = drive(bundle, cache="dual", given=5, new=24, block=8, rounds=3)
    # Passes have two sizes: 3 full passes (29 tokens, 0 cached, 8 scored rows) and 21 cached passes
    # (8 tokens, 21 cached, 8 scored rows).
    assert told.made("cuStreamBeginCapture", 0) == told.made("cuGraphInstantiateWithFlags", 0) == 2
    assert told.made("cuGraphLaunch", 0) == 24 - 2 * 2
    assert told.made("createExecutionContext", 0) == 2 + 2
    for round in (1, 2):
        assert told.made("cuGraphLaunch", round) == told.counts[round]["nfe"] == 24
        assert told.made("enqueueV3", round) == told.made("createExecutionContext", round) == 0


def test_rows_are_rounded_so_that_few_graphs_exist(bundle: Path, drive: Drive) -> None:
    # The passes of a block of 32 tokens score 32, 31, ... 1 rows. The runtime rounds the number of
    # rows up to one of four sizes, and captures one CUDA graph per size.
    told = drive(bundle, cache="none", given=8, new=32, block=32, rounds=2)
    assert told.all_same()
    assert told.counts[0]["nfe"] == 32
    assert told.counts[1]["cuStreamBeginCapture"] == 4
    assert told.made("enqueueV3", 1) == 0


def test_at_most_32_graphs_are_kept_and_a_dropped_one_is_made_again(
    bundle: Path, drive: Drive
) -> None:
    few = drive(bundle, given=2, new=2, block=4, cycle=30, rounds=60)
    assert few.all_same()
    # The second time around, all are known.
    assert few.counts[59]["enqueueV3"] == few.counts[29]["enqueueV3"]
    many = drive(bundle, given=2, new=2, block=4, cycle=40, rounds=80)
    assert many.all_same()
    assert many.counts[79]["createExecutionContext"] == 2 + 2 * 40
    kept = [
        count["createExecutionContext"] - count.get("cuGraphExecDestroy", 0)
        for count in many.counts
    ]
    assert max(kept) == 2 + 32
    # Passes of one size alternate with passes of 39 other sizes. Although few CUDA graphs are kept,
    # the graph of the frequent size must not be discarded and captured again.
    mixed = drive(bundle, given=2, new=2, block=4, cycle=40, alternate=1, rounds=80)
    assert mixed.counts[79]["createExecutionContext"] == 2 + 40


@pytest.mark.parametrize(
    "call",
    [
        "cuStreamBeginCapture:*",
        "cuStreamEndCapture:*",
        "cuGraphInstantiateWithFlags:*",
        "enqueueV3:3",
        "cuMemcpyHtoDAsync:7",
    ],
)
def test_a_pass_that_cannot_be_captured_runs_without(bundle: Path, drive: Drive, call: str) -> None:
    told = drive(bundle, {"MOCK_CUDA_FAIL": call}, cache="none", given=8, new=8, block=8, rounds=2)
    assert told.all_same(), told.rounds
    assert told.counts[1].get("cuGraphLaunch", 0) == 0
    assert told.made("cuStreamBeginCapture", 1) == 0, "tried again"
    assert told.made("enqueueV3", 1) == told.counts[1]["nfe"]


# ---- Failures while it runs ----


FAILED = "failed: CUDA_ERROR_LAUNCH_FAILED (719)"


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        ("cuMemAlloc:1", "CUDA: cuMemAlloc of "),
        ("cuMemHostAlloc:1", "CUDA: cuMemHostAlloc of "),
        ("cuStreamCreate:1", "CUDA: cuStreamCreate failed: CUDA_ERROR_OUT_OF_MEMORY (2)"),
        ("createExecutionContext:2", "TensorRT: createExecutionContext failed"),
        (
            "setOptimizationProfileAsync:1",
            "TensorRT: setOptimizationProfileAsync failed: the profile is bad",
        ),
        ("setInputShape:1", 'TensorRT: setInputShape("input_ids") failed: the shape is bad'),
        ("enqueueV3:1", "TensorRT: enqueueV3 failed: the kernel is bad"),
        ("cuStreamSynchronize:2", f"CUDA: cuStreamSynchronize {FAILED}"),
        ("cuMemcpyHtoDAsync:2", f"CUDA: cuMemcpyHtoDAsync {FAILED}"),
        ("cuMemcpyDtoHAsync:1", "CUDA: cuMemcpyDtoHAsync failed"),
        ("cuMemcpy2DAsync:1", "CUDA: cuMemcpy2DAsync failed"),
        ("cuGraphLaunch:1", "CUDA: cuGraphLaunch failed"),
        ("createExecutionContext:3", "TensorRT: createExecutionContext failed"),
        ("cuCtxPushCurrent:3", "CUDA: cuCtxPushCurrent failed"),
        ("cuMemcpyDtoDAsync:2", "CUDA: cuMemcpyDtoDAsync failed"),
        ("cuMemsetD8Async:2", "CUDA: cuMemsetD8Async failed"),
    ],
)
def test_a_failing_call_ends_the_request_with_its_name_and_the_session_goes_on(
    tmp_path: Path, drive: Drive, call: str, sentence: str
) -> None:
    """The last two calls are those for self-conditioning. A failed request leaves none of it."""
    is_conditioned = call.startswith(("cuMemcpyDtoD", "cuMemset"))
    bundle = write_bundle(tmp_path / "bundle", conditioning=WIDTH if is_conditioned else 0)
    options = NOISE if is_conditioned else {"cache": "dual"}
    told = drive(bundle, {"MOCK_CUDA_FAIL": call}, rounds=3, **options)
    failed = [answer for answer in told.rounds if answer[0] == "ENGINE_FAILED"]
    assert failed, told.rounds
    assert sentence in failed[0][1]
    opens = ("cuStreamCreate", "createExecutionContext:2", "setOptimization")
    if "Alloc" not in call and not call.startswith(opens):
        assert len(failed) == 1
        assert told.rounds[-1] == ("OK", "same")


def test_probabilities_that_are_not_finite_end_the_request(tmp_path: Path, drive: Drive) -> None:
    bundle = write_bundle(
        tmp_path / "bundle", {"rtx5090": {"plan": plan(profiles(), "float16", "nan")}}
    )
    for options in ({}, {"logits": 1}):
        ((status, message),) = drive(bundle, **options).rounds
        assert status == "ENGINE_FAILED"
        assert "not finite" in message


def test_an_error_that_stopped_nothing_is_not_the_reason_of_a_later_failure(
    tmp_path: Path, drive: Drive
) -> None:
    bundle = write_bundle(
        tmp_path / "bundle", {"rtx5090": {"plan": plan(profiles(), "float16", "chatty")}}
    )
    told = drive(bundle, {"MOCK_CUDA_FAIL": "createExecutionContext:3"}, rounds=2)
    assert told.rounds == [
        ("ENGINE_FAILED", "TensorRT: createExecutionContext failed"),
        ("OK", "same"),
    ]


# ---- Requests that do not fit ----


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"given": 40, "new": 25}, "a pass of 65 tokens over 0 cached ones that scores 8 rows"),
        (
            {"given": 5, "new": 40, "block": 40},
            "a pass of 45 tokens over 0 cached ones that scores 40 rows",
        ),
        (
            {"cache": "prefix", "given": 5, "new": 40},
            "a pass of 40 tokens over 5 cached ones that scores 7 rows",
        ),
        (
            {"cache": "dual", "refresh": 25, "given": 30, "new": 24},
            "a pass of 33 tokens over 21 cached ones that scores 8 rows",
        ),
        ({"logits": 3, "given": 65}, "a pass over the whole canvas has 65 tokens"),
    ],
)
def test_a_request_that_cannot_fit_is_refused_before_any_pass(
    bundle: Path, drive: Drive, options: dict[str, Any], sentence: str
) -> None:
    told = drive(bundle, **options)
    ((status, message),) = told.rounds
    assert status == "INVALID_ARGUMENT"
    assert sentence in message
    limits = (
        "passes of 1..64 tokens that score up to 32 rows, and passes of 1..32 tokens over 0..64"
    )
    assert limits in message
    assert "--canvas" in message
    if options.get("cache") == "prefix":
        assert 'choose cache = "dual"' in message
    advice = "choose a smaller refresh or block_length, or refresh = 0"
    assert (advice in message) == ("refresh" in options)
    assert told.counts[0].get("enqueueV3", 0) == 0


def test_requests_of_a_batch_run_one_by_one_or_are_refused(bundle: Path, drive: Drive) -> None:
    assert drive(bundle, cache="dual", batch=3, max_batch=1).all_same()
    told = drive(bundle, cache="dual", batch=3, max_batch=2)
    ((status, message),) = told.rounds
    assert status == "UNSUPPORTED"
    assert "a pass of 2 requests, but the engine takes at most 1: set max_batch = 1" in message
    assert told.counts[0].get("enqueueV3", 0) == 0


# ---- The choice of engine, library and device ----


def opening(
    drive: Drive, bundle: Path, variables: dict[str, str] | None = None, engine: str = "tensorrt"
) -> tuple[str, str]:
    return drive(bundle, variables, engine=engine).opened


def test_the_engine_that_fits_is_taken_and_auto_takes_it_too(tmp_path: Path, drive: Drive) -> None:
    bundle = write_bundle(
        tmp_path / "bundle",
        {
            "rtx4090": {"sm": [89]},
            "rtx5090-rtx": {"builder": "tensorrt_rtx", "version": "1.7.1.116"},
            "old": {"version": "10.3.0.30"},
            "rtx5090": {},
        },
    )
    for engine in ("tensorrt", "auto"):
        assert "engine rtx5090)" in opening(drive, bundle, engine=engine)[1]
    assert "engine rtx4090)" in opening(drive, bundle, {"MOCK_CUDA_SM": "89"})[1]
    assert "engine old)" in opening(drive, bundle, {"MOCK_TRT_VERSION": "10.3.0.30"})[1]
    status, message = opening(drive, bundle, {"MOCK_CUDA_SM": "110"})
    assert status == "UNSUPPORTED"
    assert "rtx4090: built for SM 8.9, this device is SM 11.0; rtx5090-rtx: built for" in message
    assert f"dlm-export engine {bundle} --target sm110" in message
    status, message = opening(drive, bundle, {"MOCK_TRT_VERSION": "10.14.1.49"})
    assert status == "UNSUPPORTED"
    here = "the library here is tensorrt 10.14.1.49"
    assert f"rtx5090-rtx: built by tensorrt_rtx 1.7.1.116, {here}" in message
    assert f"rtx5090: built by tensorrt 10.14.1.48, {here}" in message


def test_the_lean_runtime_only_runs_version_compatible_engines(
    tmp_path: Path,
    drive: Drive,
    sanitized: Path,  # noqa: F811
) -> None:
    # The runtime opens libnvinfer_lean if it does not find libnvinfer.
    (tmp_path / "libnvinfer_lean.so.10").symlink_to(sanitized / "libmock_nvinfer_lean.so")
    lean = {"DLM_TENSORRT": "", "LD_LIBRARY_PATH": f"{tmp_path}:{sanitized}"}
    bundle = write_bundle(tmp_path / "bundle")
    status, message = opening(drive, bundle, lean)
    assert status == "UNSUPPORTED"
    assert "rtx5090: the library here is TensorRT's lean runtime (libnvinfer_lean)" in message
    write_bundle(bundle, {"rtx5090": {}, "lean": {"version_compatible": True}})
    assert "engine lean)" in opening(drive, bundle, lean)[1]
    assert "engine rtx5090)" in opening(drive, bundle)[1]
    (tmp_path / "libnvinfer.so.10").symlink_to(sanitized / "libmock_nvinfer.so")
    assert "engine rtx5090)" in opening(drive, bundle, lean)[1]


def test_nvidias_lean_runtime_of_another_major_version_is_refused(
    bundle: Path, drive: Drive
) -> None:
    """Calls of TensorRT 10's C++ classes would crash in TensorRT 11."""
    path = tensorrt_libraries().get("tensorrt", "")
    if "lean.so.11" not in path:
        pytest.skip("tensorrt-lean-cu13-libs 11 is not installed")
    status, message = opening(drive, bundle, {"DLM_TENSORRT": path})
    assert status == "ENGINE_MISSING"
    assert re.search(r"lean\.so\.11 is TensorRT 11\.\d+\.\d+\.\d+, but this build", message)


def test_no_engine_is_deserialised_before_it_is_known_to_fit(bundle: Path, drive: Drive) -> None:
    # The engine file is invalid, but the device or the TensorRT version must be checked before the
    # file is read.
    write_bundle(bundle, {"rtx5090": {"plan": "nonsense"}})
    assert "this device is SM 8.7" in opening(drive, bundle, {"MOCK_CUDA_SM": "87"})[1]
    older = opening(drive, bundle, {"MOCK_TRT_VERSION": "10.0.0.6"})[1]
    assert "the library here is tensorrt 10.0.0.6" in older


def test_a_bundle_without_engines_says_how_to_build_one(tmp_path: Path, drive: Drive) -> None:
    status, message = opening(drive, write_bundle(tmp_path / "bundle", {}))
    assert status == "UNSUPPORTED"
    assert "has no TensorRT engine" in message
    assert f"dlm-export engine {tmp_path / 'bundle'} --target" in message


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        (
            "DLM_CUDA_LIBRARY",
            "/no/such/libcuda",
            "the CUDA driver from $DLM_CUDA_LIBRARY: /no/such",
        ),
        ("DLM_CUDA_LIBRARY", "libm.so.6", "has no cuInit"),
        ("MOCK_CUDA_DEVICES", "0", "finds no device"),
        (
            "DLM_TENSORRT",
            "/no/such/libnvinfer",
            "cannot load TensorRT from $DLM_TENSORRT: /no/such",
        ),
        ("DLM_TENSORRT", "libm.so.6", "is not TensorRT: it has no getInferLibMajorVersion"),
        ("DLM_TENSORRT", "", "tried libnvinfer.so.10, libnvinfer_lean.so.10 ("),
        ("MOCK_TRT_VERSION", "11.0.0.1", "this build of libdlm_runtime is for TensorRT 10"),
        ("MOCK_TRT_VERSION", "1.7.1.116", "is TensorRT 1.7.1.116, but this build"),
        ("MOCK_CUDA_FAIL", "cuInit:1", "cuInit failed: CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"),
        ("MOCK_CUDA_FAIL", "cuDevicePrimaryCtxRetain:1", "Retain failed: CUDA_ERROR_OUT_OF_MEMORY"),
        ("MOCK_CUDA_FAIL", "cuCtxPushCurrent:1", "CUDA: cuCtxPushCurrent failed"),
        ("MOCK_CUDA_FAIL", "createInferRuntime:1", "createInferRuntime failed: CUDA initiali"),
        ("MOCK_CUDA_FAIL", "deserializeCudaEngine:1", "magic tag does not match second line. If"),
    ],
)
def test_a_failure_while_opening_is_named_and_leaves_nothing_behind(
    bundle: Path, drive: Drive, name: str, value: str, sentence: str
) -> None:
    status, message = opening(drive, bundle, {"LD_LIBRARY_PATH": "/nowhere", name: value})
    assert status == ("ENGINE_FAILED" if name == "MOCK_CUDA_FAIL" else "ENGINE_MISSING")
    assert sentence in message
    assert name == "MOCK_CUDA_FAIL" or "onnxruntime" in message


# ---- Engine files that are not what the manifest says ----


def test_a_truncated_engine_file_is_refused_by_its_size(bundle: Path, drive: Drive) -> None:
    path = bundle / "engines" / "rtx5090.engine"
    path.write_bytes(path.read_bytes()[:-1])
    status, message = opening(drive, bundle)
    assert status == "BAD_BUNDLE"
    assert "rtx5090.engine: " in message
    assert "truncated" in message


NOT_LOADED = "TensorRT 10.14.1.48 cannot load it: the plan's magic tag does not match"
PLANS: list[tuple[str, str]] = [
    ("", NOT_LOADED),
    ("not an engine", NOT_LOADED),
    ("mock-engine\ndenoiser 2", NOT_LOADED),
    *(
        (plan(profiles(), "float16", line), sentence)
        for line, sentence in (
            ("without past_value.1", 'the input "past_value.1" is missing'),
            ("without logits", 'the output "logits" is missing'),
            ("without entropy", 'the output "entropy" is missing'),
            ("rename past_key.1 key", 'the input "key" is not known to this runtime'),
            ("extra confidence", 'the output "confidence" is not known to this runtime'),
            (
                "type top_prob 1",
                'the output "top_prob" is float16 [any, any, 2], but the manifest makes it float',
            ),
            (
                "type past_key.0 0",
                'the input "past_key.0" is float [any, 3, any, 4], but the manifest makes it float16',
            ),
            ("type top_token 9", 'the output "top_token" is undefined'),
            ("host score_rows", 'the input "score_rows" must be in device memory'),
            ("profile 1 1 1 0 0 0 1 1 1", "has 3 profiles instead of 2"),
        )
    ),
    *(
        (plan(profiles(), "float16", line, conditioning=WIDTH), sentence)
        for line, sentence in (
            ("without next_conditioning", 'the output "next_conditioning" is missing'),
            ("without temperature", 'the input "temperature" is missing'),
            ("type conditioning 1", 'the input "conditioning" is float16 [any, any, 5], but'),
        )
    ),
    *(
        (plan(profiles() | {"block": profiles()["block"] | changes}), sentence)
        for changes, sentence in (
            ({"cached": [1, 32, 64]}, 'the smallest "past_key.0" of profile 1'),
            ({"rows": [1, 8, 33]}, 'the largest "score_rows" of profile 1'),
        )
    ),
    (plan(profiles(block=16)), 'the largest "score_rows" of profile 0'),
    (plan(profiles(canvas=128)), 'the largest "input_ids" of profile 0'),
]


@pytest.mark.parametrize(("text", "sentence"), PLANS, ids=lambda value: value[-40:])
def test_an_engine_that_is_not_what_the_manifest_says_is_refused(
    tmp_path: Path, drive: Drive, text: str, sentence: str
) -> None:
    """The message for an engine that TensorRT cannot load contains the command that builds it."""
    width = WIDTH if "conditioning" in text else 0
    engines = {"rtx5090": {"plan": text}}
    bundle = write_bundle(tmp_path / "bundle", engines, conditioning=width)
    status, message = opening(drive, bundle)
    assert status == ("ENGINE_FAILED" if sentence == NOT_LOADED else "BAD_BUNDLE")
    assert "rtx5090.engine: " in message
    assert sentence in message
    if sentence == NOT_LOADED:
        assert f"dlm-export engine {bundle} --target rtx5090 --force" in message


def test_an_engine_of_an_edited_entry_or_another_graph_is_refused_before_the_driver_is_asked(
    bundle: Path, drive: Drive
) -> None:
    missing = {"DLM_CUDA_LIBRARY": "/no/such/libcuda.so.1"}
    manifest = json.loads((bundle / "manifest.json").read_text())
    manifest["loop"]["engines"]["rtx5090"]["sm"] = [89, 120]
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    status, message = opening(drive, bundle, missing)
    assert status == "BAD_BUNDLE"
    assert "loop.engines.rtx5090: was edited after it was written" in message
    graph = {"judged": "0" * 64, "device": _sha(b"device"), "weights": _sha(b"weights")}
    write_bundle(bundle, {"rtx5090": {"built_from": graph}})
    status, message = opening(drive, bundle, missing)
    assert status == "BAD_BUNDLE"
    assert "was built from a graph other than this bundle's denoiser.onnx" in message


# ---- From Python ----


def in_python(program: str, bundle: Path, sanitized: Path, **variables: str) -> tuple[str, str]:  # noqa: F811
    """Run a Python program with the sanitized library. Returns the two lines that it prints."""
    # AddressSanitizer finds the function that throws exceptions only if libstdc++ is loaded too.
    preloaded = [
        run(tool("gcc"), f"-print-file-name={name}").stdout.strip()
        for name in ("libasan.so", "libstdc++.so")
    ]
    done = run(
        *(sys.executable, "-c", program, bundle),
        DLM_RUNTIME_LIBRARY=str(sanitized / "libdlm_runtime.so"),
        DLM_CUDA_LIBRARY=str(sanitized / "libmock_cuda.so"),
        LD_PRELOAD=" ".join(preloaded),
        ASAN_OPTIONS="detect_leaks=0",
        **variables,
    )
    assert done.returncode == 0, done.stderr
    engine, tokens = done.stdout.splitlines()
    return engine, tokens


PROGRAM = """
import sys
import dlm_runtime
with dlm_runtime.open(sys.argv[1]) as bundle:
    print(bundle.engine)
    print(bundle.generate(tokens=[1, 2, 3], max_new_tokens=8, block_length=4, cache="dual").tokens)
"""


def test_python_finds_the_installed_tensorrt_for_a_bundle_with_engines(
    bundle: Path,
    sanitized: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    package = tmp_path / "site" / "tensorrt_libs"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "libnvinfer.so.10").symlink_to(sanitized / "libmock_nvinfer.so")
    engine, tokens = in_python(PROGRAM, bundle, sanitized, PYTHONPATH=str(package.parent))
    assert engine == "tensorrt 10.14.1.48 (Mock GPU, SM 12.0, engine rtx5090)"
    assert len(json.loads(tokens)) == 11


# ---- A library without TensorRT ----


def test_a_library_without_tensorrt_says_how_it_is_compiled(bundle: Path) -> None:
    import dlm_runtime

    for engine in ("tensorrt", "auto"):
        with pytest.raises(dlm_runtime.DlmError) as caught:
            dlm_runtime.open(bundle, engine=engine)
        if "no TensorRT" not in str(caught.value):
            pytest.skip("this environment's own libdlm_runtime has TensorRT")
        assert isinstance(caught.value, dlm_runtime.RequestError)
        assert "-DDLM_TENSORRT_INCLUDE_DIR=" in str(caught.value)
        assert 'engine "onnxruntime"' in str(caught.value)
