"""Tests of caches that store keys and values in fp16 or INT8: the encoding of rows, the kernels,
whole generations compared with torch, and errors.

runtime/native/tests/kernels_test.cc compares the kernels alone with plain loops.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from click.testing import CliRunner
from conftest import DEMO_CHECKPOINT
from denoisers import load
from engine_bundles import SMALL
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import helper
from test_fuse import _network
from test_kernels import kernels  # noqa: F401
from test_parity import LOOPS

import dlm_runtime
from dlm_export.build import BuildOptions, QuantiseOptions, build
from dlm_export.cli import main
from dlm_export.cli.building import print_cache
from dlm_export.graph import cache_dtypes, fuse, operators, trace
from dlm_export.graph.attention import BLOCK, DRAFT, NORMED, WINDOW
from dlm_export.graph.body import DOMAIN, Body
from dlm_export.judging.accuracy.effort import Effort
from dlm_export.network import reference
from dlm_export.network.cache_dtypes import read_back
from dlm_runtime import BundleError
from dlm_runtime.abi import native as _native
from dlm_runtime.cache_dtypes import CACHE_DTYPES

CALLS = {
    "float32": "CachedAttention",
    "float16": "Fp16CachedAttention",
    "int8": "Int8CachedAttention",
}
NUMPY = {"float32": np.float32, "float16": np.float16, "int8": np.int8}
# The allowed difference between kernels and functions. The exponentials of the kernels' softmax
# have errors up to 2e-7, and the kernels add some hundred numbers in another order.
TOLERANCE = 2e-5
UNJUDGED = QuantiseOptions(effort=Effort("none"))


def _model(
    op_type: str, kinds: list[int], outputs: list[int], **attributes: float
) -> onnx.ModelProto:
    """Return a graph that consists of one function call.

    ``kinds`` and ``outputs`` contain the element types of the call's inputs and outputs.
    """
    names, made = [f"i{i}" for i in range(len(kinds))], [f"o{i}" for i in range(len(outputs))]
    call = helper.make_node(op_type, names, made, domain=DOMAIN, **attributes)
    ports = [
        [helper.make_tensor_value_info(*port, None) for port in zip(*side, strict=True)]
        for side in ((names, kinds), (made, outputs))
    ]
    body = ir.to_proto(operators._DEFINITIONS[op_type]())
    imports = [helper.make_opsetid("", 23), helper.make_opsetid(DOMAIN, 1)]
    return helper.make_model(
        helper.make_graph([call], "g", *ports),
        functions=[body],
        opset_imports=imports,
        ir_version=10,
    )


def _run(model: onnx.ModelProto, feeds: list[np.ndarray], *, by_kernels: bool) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    if by_kernels:
        options.register_custom_ops_library(_native.library()._name)
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    found: list[np.ndarray] = session.run(None, {f"i{i}": value for i, value in enumerate(feeds)})
    return found


def _stored(rows: np.ndarray, cache_dtype: str) -> np.ndarray:
    """Convert rows ``[.., D]`` with numpy to the form in which the cache must store them.

    For INT8, each row gets the smallest scale for which no code exceeds 127.
    """
    if cache_dtype != "int8":
        return rows.astype(NUMPY[cache_dtype])
    out = np.zeros((*rows.shape[:-1], rows.shape[-1] + 2), np.int8)
    m, e = np.meshgrid(np.arange(-128, 128), np.arange(-128, 127), indexing="ij")
    scales = np.ldexp((128.0 + m), e + 1)
    for at in np.ndindex(rows.shape[:-1]):
        row = rows[at]
        if not np.isfinite(row).all():
            out[at][-1] = 127
            continue
        wanted = np.float32(max(np.abs(row).max(), 1e-30)) / np.float32(127)
        # A scale is a mantissa times a power of two. Only mantissas from 128 on are used, because a
        # scale with a smaller mantissa can be written with a larger mantissa and a lower exponent.
        enough = np.where((scales >= wanted) & (m >= 0), scales, np.inf)
        best = np.unravel_index(enough.argmin(), enough.shape)
        codes = np.round(row / np.float32(scales[best]))
        out[at] = [*codes, m[best], e[best]]
    return out


def _read(stored: np.ndarray, cache_dtype: str) -> np.ndarray:
    if cache_dtype != "int8":
        return stored.astype(np.float32)
    wide = stored.astype(np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        power = np.where(
            wide[..., -1:] == 127,
            np.inf,
            np.ldexp(np.float32(1), stored[..., -1:].astype(np.int32) + 1),
        )
        return (wide[..., :-2] * ((128 + wide[..., -2:-1]) * power)).astype(np.float32)


# ---- The encoding ----

ROWS = st.lists(
    st.lists(st.floats(width=32, allow_subnormal=False), min_size=6, max_size=6),
    min_size=1,
    max_size=4,
)


@settings(max_examples=60)
@given(rows=ROWS, power=st.integers(-110, 110), spread=st.integers(0, 9))
def test_int8_rows_are_what_numpy_says(rows: list[list[float]], power: int, spread: int) -> None:
    """The rows contain arbitrary floats, and floats around every power of two.

    Near a power of two, the exponent of a row's scale changes.
    """
    near = np.random.default_rng(spread).uniform(-1, 1, (8, 6)).astype(np.float32)
    near[:, 0] = np.float32(127 * 255) * (
        1 + np.arange(-4, 4, dtype=np.float32) * np.float32(2**-23)
    )
    near[:, 1:] *= 127 * 255
    x = np.concatenate([np.array(rows, np.float32), near * np.float32(2.0**power)])
    # For rows with larger numbers, 127 times the scale would not be a finite float, so larger
    # numbers count as infinite.
    x[np.abs(x) > 3.3e38] = np.inf
    body = Body("Rows", "x")
    stored = cache_dtypes._store_int8(body, body.inputs[0])
    function = body.function({"stored": stored, "read": cache_dtypes._read_int8(body, stored)})
    definitions = operators._DEFINITIONS | {"Rows": lambda: function}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operators, "_DEFINITIONS", definitions)
        model = _model(
            "Rows", [onnx.TensorProto.FLOAT], [onnx.TensorProto.INT8, onnx.TensorProto.FLOAT]
        )
    found, back = _run(model, [x], by_kernels=False)
    np.testing.assert_array_equal(found, _stored(x, "int8"))
    np.testing.assert_array_equal(back, _read(found, "int8"))
    np.testing.assert_array_equal(read_back(torch.from_numpy(x), "int8").numpy(), back)
    amax = np.abs(x).max(-1, keepdims=True)
    is_finite = np.isfinite(amax[:, 0])
    assert np.isnan(back[~is_finite]).all()
    # The largest rounding error is half a step. Because scales are rounded up, a step is at most (1
    # + 1/128) / 127 of the row's largest number.
    step = np.maximum(amax, np.float32(1e-30))[is_finite] / 127 * (1 + 1 / 128)
    assert (np.abs(back - x)[is_finite] <= 0.5001 * step).all()


@pytest.mark.parametrize("cache_dtype", ["float16", "bfloat16", "float32"])
def test_other_rows_are_rounded_by_number(cache_dtype: str) -> None:
    x = torch.tensor([[1.0, 1 + 2**-11, 1 + 2**-9, -torch.inf, torch.nan, 70000.0]])
    found = read_back(x, cache_dtype)
    assert found.dtype == x.dtype
    np.testing.assert_array_equal(found, x.to(getattr(torch, cache_dtype)).float())


# ---- Functions and kernels ----


def _pass(
    rng: np.random.Generator,
    cache_dtype: str,
    B: int,
    T: int,
    S: int,
    H: int,
    G: int,
    D: int,
    rotary_size: int = 0,
) -> list[np.ndarray]:
    """Make the inputs of a call of an attention function.

    The rotary embedding only rotates by angles that need no rounding, so kernel and function must
    store the same keys. The positions are in random order.
    """
    q, k, v = (rng.normal(size=(B, T, heads * D)).astype(np.float32) for heads in (2 * H, G, G))
    past = [
        _stored(rng.normal(size=(B, G, S, D)).astype(np.float32), cache_dtype) for _ in range(2)
    ]
    angles = rng.integers(0, 4, (50, (rotary_size or D) // 2))
    tables = [np.array(values, np.float32)[angles] for values in ([1, 0, -1, 0], [0, 1, 0, -1])]
    return [
        q[..., : H * D],
        k,
        v,
        *past,
        rng.integers(0, 50, (B, T)),
        *tables,
        np.zeros((0, 4), np.int64),
    ]


def _segments(rng: np.random.Generator, tokens: int, cached: int) -> np.ndarray:
    """Make the segments of several requests whose tokens are in one row.

    A segment names a range of tokens and a range of cached rows that these tokens see. A request
    may have several ranges of cached rows.
    """
    firsts = np.array(
        [0, *sorted(rng.choice(np.arange(1, tokens), min(2, tokens - 1), replace=False))], np.int64
    )
    found: list[list[int]] = []
    for first, count in zip(firsts, np.diff([*firsts, tokens]), strict=True):
        # The ranges of cached rows of one request do not overlap.
        cuts = sorted(rng.integers(0, cached + 1, 2 * int(rng.integers(1, 4))))
        for start, end in zip(cuts[::2], cuts[1::2], strict=True):
            found.append([start, end - start, first, count])
    return np.array(found, np.int64)


def _call(
    cache_dtype: str,
    heads: int,
    kv_heads: int,
    rotary_size: int = 0,
    visible_block: int | None = None,
    epsilon: float | None = None,
    window: int | None = None,
    has_drafts: bool = False,
) -> onnx.ModelProto:
    kind, F = helper.np_dtype_to_tensor_dtype(np.dtype(NUMPY[cache_dtype])), onnx.TensorProto.FLOAT
    kinds = [F, F, F, kind, kind, onnx.TensorProto.INT64, F, F, onnx.TensorProto.INT64]
    name, settings = CALLS[cache_dtype], dict[str, Any]()
    settings |= {"heads": heads, "kv_heads": kv_heads, "rotary_size": rotary_size}
    if visible_block is not None:
        name = name.replace("Cached", f"{BLOCK}Cached")
        settings["visible_block"] = visible_block
    if has_drafts:
        name = name.replace("Cached", f"{DRAFT}Cached")
    if window is not None:
        name = name.replace("Cached", f"{WINDOW}Cached")
        settings["window"] = window
    if epsilon is not None:
        name = name.replace("Cached", f"{NORMED}Cached")
        settings["epsilon"] = epsilon
        kinds += [F, F]
    return _model(name, kinds, [F, kind, kind], **settings)


SHAPES = st.tuples(
    st.integers(1, 2),
    st.integers(1, 40),
    st.integers(0, 90),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from([2, 6, 16, 40, 128]),
)


@pytest.mark.parametrize("kind", ["plain", "normed", "window", "draft"])
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    cache_dtype=st.sampled_from([*CALLS]),
    shape=SHAPES,
    seed=st.integers(0, 99),
    visible_block=st.none() | st.integers(1, 60),
    part=st.sampled_from([1, 2, 4]),
    window=st.integers(1, 60),
    is_draft=st.booleans(),
)
def test_kernels_attend_as_the_functions_say(
    kernels: str,  # noqa: F811
    kind: str,
    cache_dtype: str,
    shape: tuple[int, ...],
    seed: int,
    visible_block: int | None,
    part: int,
    window: int,
    is_draft: bool,
) -> None:
    """Each native kernel gives the same results as the ONNX function that it replaces.

    The test uses block-causal and full attention, rotation of a ``part`` of each head, several
    requests in one row, norms of queries and keys, windows, and draft passes.
    """
    B, T, S, G, group, D = shape
    how: dict[str, Any] = {"visible_block": visible_block}
    if kind == "plain":
        how["rotary_size"] = max(2, D // part // 2 * 2) if part > 1 else 0
    elif kind == "normed":
        how["epsilon"] = 1e-3
    else:
        how = {"window": window} if kind == "window" else {"has_drafts": True}
    rng = np.random.default_rng(seed)
    cached = 0 if kind == "window" else S
    feeds = _pass(rng, cache_dtype, B, T, cached, G * group, G, D, how.get("rotary_size", 0))
    if B == 1 and kind != "normed":
        feeds[-1] = _segments(rng, T, cached)
    if kind == "normed":
        feeds += [rng.normal(size=D).astype(np.float32) for _ in range(2)]
    if kind == "draft" and is_draft:
        feeds[5] += len(feeds[6])  # the number of positions in the rotary tables
    model = _call(cache_dtype, G * group, G, **how)
    by_function, by_kernel = (_run(model, feeds, by_kernels=choice) for choice in (False, True))
    tolerance = TOLERANCE
    if kind == "normed":
        # The kernel and the function compute norms with sums in different orders. A stored key may
        # therefore be rounded to the next code, which is about a hundredth of the row's range away.
        # If a pass reads its own keys after they were rounded, the different code also changes the
        # result.
        keys, expected = (_read(found[1], cache_dtype) for found in (by_kernel, by_function))
        is_exact = cache_dtype == "float32"
        step = TOLERANCE if is_exact else np.abs(expected).max(-1, keepdims=True) / 100
        assert (np.abs(keys - expected) <= step + TOLERANCE).all()
        if visible_block is not None and np.abs(keys - expected).max() > TOLERANCE:
            tolerance = {"float16": 5e-3, "int8": 5e-2}.get(cache_dtype, TOLERANCE)
    else:
        np.testing.assert_array_equal(by_kernel[1], by_function[1])
    np.testing.assert_allclose(by_kernel[0], by_function[0], atol=tolerance)
    np.testing.assert_array_equal(by_kernel[2], by_function[2])


def test_a_window_over_cached_rows_is_refused(kernels: str) -> None:  # noqa: F811
    feeds = _pass(np.random.default_rng(0), "float32", 1, 3, 5, 2, 2, 16)
    with pytest.raises(
        onnxruntime.capi.onnxruntime_pybind11_state.InvalidArgument,
        match="attention in a window, which cannot use a cache: choose a policy with cache = none",
    ):
        _run(_call("float32", 2, 2, window=4), feeds, by_kernels=True)


@pytest.mark.parametrize("cache_dtype", CALLS)
@pytest.mark.parametrize("by_kernels", [False, True])
def test_full_attention_reads_new_rows_as_computed_and_stores_them_rounded(
    cache_dtype: str, by_kernels: bool
) -> None:
    feeds = _pass(np.random.default_rng(1), cache_dtype, 1, 5, 0, 2, 2, 16)
    exact = _run(
        _call("float32", 2, 2),
        [*feeds[:3], *[np.zeros((1, 2, 0, 16), np.float32)] * 2, *feeds[5:]],
        by_kernels=by_kernels,
    )
    found = _run(_call(cache_dtype, 2, 2), feeds, by_kernels=by_kernels)
    np.testing.assert_array_equal(found[0], exact[0])
    for stored, computed in zip(found[1:], exact[1:], strict=True):
        np.testing.assert_array_equal(stored, _stored(computed, cache_dtype))


@pytest.mark.parametrize("cache_dtype", CALLS)
@pytest.mark.parametrize("by_kernels", [False, True])
def test_block_causal_passes_read_new_rows_as_the_cache_stores_them(
    cache_dtype: str, by_kernels: bool
) -> None:
    feeds = _pass(np.random.default_rng(4), cache_dtype, 1, 12, 0, 2, 2, 16)
    feeds[6], feeds[7] = np.ones_like(feeds[6]), np.zeros_like(feeds[7])  # no rotation
    found = _run(_call(cache_dtype, 2, 2, visible_block=4), feeds, by_kernels=by_kernels)
    rounded = [
        _read(rows, cache_dtype).transpose(0, 2, 1, 3).reshape(feeds[1].shape) for rows in found[1:]
    ]
    nothing = [np.zeros((1, 2, 0, 16), np.float32)] * 2
    expected = _run(
        _call("float32", 2, 2, visible_block=4),
        [feeds[0], *rounded, *nothing, *feeds[5:]],
        by_kernels=by_kernels,
    )
    np.testing.assert_array_equal(found[0], expected[0])
    assert cache_dtype == "float32" or (rounded[1] != feeds[2]).any()


@pytest.mark.parametrize("cache_dtype", CALLS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("by_kernels", [False, True])
def test_what_is_not_finite_in_a_cached_row_reaches_every_result(
    cache_dtype: str, bad: float, by_kernels: bool
) -> None:
    feeds = _pass(np.random.default_rng(2), cache_dtype, 1, 3, 9, 2, 1, 8)
    rows = np.random.default_rng(3).normal(size=(1, 1, 9, 8)).astype(np.float32)
    rows[0, 0, 4, 3] = bad
    feeds[4] = _stored(rows, cache_dtype)
    y = _run(_call(cache_dtype, 2, 1), feeds, by_kernels=by_kernels)[0].reshape(3, 2, 8)
    assert not np.isfinite(y[:, :, 3]).any()
    others = np.delete(y, 3, axis=-1)
    assert np.isnan(others).all() if cache_dtype == "int8" else np.isfinite(others).all()


def test_a_call_of_another_row_size_is_refused(kernels: str) -> None:  # noqa: F811
    for cache_dtype, wrong in (("int8", 0), ("int8", 4), ("float16", 2)):
        feeds = _pass(np.random.default_rng(0), cache_dtype, 1, 3, 5, 2, 2, 16)
        feeds[3:5] = [np.zeros((1, 2, 5, 16 + wrong), NUMPY[cache_dtype])] * 2
        with pytest.raises(
            onnxruntime.capi.onnxruntime_pybind11_state.InvalidArgument,
            match="heads do not match",
        ):
            _run(_call(cache_dtype, 2, 2), feeds, by_kernels=True)


# ---- Whole loops ----

BUILT = [("llada", "int8"), ("dream", "fp16")]


@pytest.fixture(scope="module")
def checkpoints(llada_checkpoint: Path, dream_checkpoint: Path) -> dict[str, Path]:
    """A checkpoint with as many key and value heads as query heads, and one with half as many."""
    return {"llada": llada_checkpoint, "dream": dream_checkpoint}


@pytest.fixture(scope="module")
def built(
    checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Return a bundle of each checkpoint. Each build compares the bundle with torch."""
    folder = tmp_path_factory.mktemp("caches")
    for name, cache in BUILT:
        options = BuildOptions(cache_dtype=cache, quantise=UNJUDGED)
        build(checkpoints[name], folder / name, options)
    return {name: folder / name for name, _ in BUILT}


CACHED = [name for name, fields in LOOPS.items() if "cache" in name or "dream-block" in name]


@pytest.mark.parametrize(("name", "cache"), BUILT)
def test_both_loops_write_the_same_over_a_rounded_cache(
    checkpoints: dict[str, Path], built: dict[str, Path], name: str, cache: str
) -> None:
    """A number almost halfway between two codes may get different codes in the native loop and in
    torch.

    The test therefore allows one canvas in twenty to differ.
    """
    denoiser, equal = load(checkpoints[name]), 0
    cache_dtype = CACHE_DTYPES[cache]
    with dlm_runtime.open(built[name], threads=1) as bundle:
        assert bundle.manifest["loop"]["graph"]["cache_dtype"] == cache_dtype
        for loop in CACHED:
            fields = dict(LOOPS[loop])
            policy = bundle.policy(fields.pop("preset")).with_fields(
                {n: v for n, v in fields.items() if n != "steps"}
            )
            ours = bundle.generate(
                tokens=[3, 1, 4, 1, 5],
                max_new_tokens=24,
                steps=fields.get("steps", 0),
                **policy.as_dict(),
            )
            rest = ([3, 1, 4, 1, 5], policy, 24, fields.get("steps", 0))
            wanted = reference.generate(denoiser, *rest, cache_dtype=cache_dtype)
            equal += (ours.tokens, ours.nfe) == (wanted.tokens, wanted.nfe)
            if policy.cache != "none":
                kv_heads = denoiser.network.layers[0].attention.kv_heads
                row = {"fp16": 2 * 16, "int8": 16 + 2}[cache]
                # With classifier-free guidance, there is a second canvas, whose prompt is masked,
                # with its own cache.
                canvases = 2 if policy.cfg_scale else 1
                assert ours.cache_bytes == canvases * 2 * 2 * kv_heads * row * len(ours.tokens)
    assert equal >= 0.95 * len(CACHED)


def test_a_quantised_bundle_takes_a_rounded_cache(llada_checkpoint: Path, tmp_path: Path) -> None:
    build(
        llada_checkpoint,
        tmp_path / "b",
        BuildOptions(precision="int8", cache_dtype="int8", quantise=SMALL),
    )
    with dlm_runtime.open(tmp_path / "b", threads=1) as bundle:
        assert bundle.manifest["kernels"]["calls"]["Int8CachedAttention"] == 2
        assert (
            bundle.generate(tokens=[1, 2], max_new_tokens=16, cache="dual").cache_bytes
            == 2 * 2 * 4 * 18 * 18
        )


# ---- Bytes per token ----


def test_inspect_and_plan_tell_what_a_token_takes(
    built: dict[str, Path], llada_checkpoint: Path
) -> None:
    rows = 2 * 2 * 4  # rows per token: keys and values, 2 layers, 4 heads
    sizes = {"fp32": rows * 16 * 4, "fp16": rows * 16 * 2, "int8": rows * 18}

    def told(*arguments: str) -> str:
        done = CliRunner().invoke(main, list(arguments))
        assert done.exit_code == 0, done.output
        return done.output

    assert (
        json.loads(told("inspect", str(llada_checkpoint), "--json"))["cache_bytes_per_token"]
        == sizes
    )
    planned = json.loads(told("plan", str(built["llada"]), "--targets", "cpu", "--json"))
    assert list(planned["cache_bytes_per_token"].values()) == [sizes]
    line = "a token on a CPU, by --cache-dtype: fp32 1.0 KiB, fp16 512 B, int8 288 B"
    assert line in told("inspect", str(llada_checkpoint))
    assert line in told("plan", str(built["llada"]), "--targets", "cpu")
    assert "int8 cache, 288 B a token" in told("inspect", str(built["llada"]))


# ---- Errors ----


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--cache-dtype", "int8", "--target", "rtx5090"), "--cache-dtype is for CPUs; on a GPU"),
        (
            (
                "--cache-dtype",
                "int4",
            ),
            "'int4' is not one of",
        ),
        (
            ("--cache-dtype", "int8", "--precision", "fp16"),
            "--cache-dtype int8 is for graphs that compute in fp32",
        ),
        (("--cache-dtype", "fp32", "--precision", "fp16"), "keeps keys and values in fp16"),
        (("--cache-dtype", "int8", "--plain-graph"), "--plain-graph is for GPUs"),
    ],
)
def test_a_cache_that_is_not_to_be_had_is_refused(
    llada_checkpoint: Path, tmp_path: Path, arguments: tuple[str, ...], sentence: str
) -> None:
    done = CliRunner().invoke(
        main, ["build", str(llada_checkpoint), "-o", str(tmp_path / "b"), *arguments]
    )
    assert done.exit_code == 2
    assert sentence in " ".join(done.output.split())
    assert not (tmp_path / "b").exists()


def test_a_plain_graph_takes_no_rounded_cache(llada_checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(
        dlm_runtime.DlmError,
        match="needs one of dlm-export's own operators, which --plain-graph excludes",
    ):
        build(llada_checkpoint, tmp_path / "b", BuildOptions(plain_graph=True, cache_dtype="int8"))


def test_attention_that_has_no_kernel_takes_no_rounded_cache(llada_checkpoint: Path) -> None:
    traced = trace.trace_pass(_network(llada_checkpoint), "fp32")
    node = next(node for node in traced.model.graph if node.op_type == "Attention")
    node.attributes["is_causal"] = ir.AttrInt64("is_causal", 1)
    with pytest.raises(
        fuse.CacheError,
        match=r"blocks\.0\.attention was not fused.*is_causal = 1.*Omit --cache-dtype",
    ):
        fuse.fuse(traced, "int8")


@pytest.mark.parametrize("claimed", ["float32", "float16"])
def test_a_manifest_that_lies_about_the_cache_is_refused(
    built: dict[str, Path], tmp_path: Path, claimed: str
) -> None:
    bundle = Path(shutil.copytree(built["llada"], tmp_path / "b"))
    manifest: dict[str, Any] = json.loads((bundle / "manifest.json").read_text())
    manifest["loop"]["graph"]["cache_dtype"] = claimed
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(
        BundleError,
        match=r'"past_key.0" is int8 \[any, 4, any, 18\], but the manifest makes it float',
    ):
        dlm_runtime.open(bundle)


def test_int8_rows_are_for_no_gpu(built: dict[str, Path], tmp_path: Path) -> None:
    bundle = Path(shutil.copytree(built["llada"], tmp_path / "b"))
    manifest: dict[str, Any] = json.loads((bundle / "manifest.json").read_text())
    manifest["loop"]["graph"]["device_file"] = "denoiser.onnx"
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(
        BundleError,
        match=r"cache_dtype: int8 keys and values are for CPUs, but the bundle has a device_file",
    ):
        dlm_runtime.open(bundle)


# ---- The loss from rounding ----


@pytest.mark.slow
def test_what_a_rounded_cache_costs_is_told(demo_losses: dict[str, dict[str, Any]]) -> None:
    """The build compares passes that read rounded cache rows with passes that read exact rows.

    The loss from an INT8 cache must be larger than the loss from an fp16 cache. Both losses must be
    small.
    """
    for cache in ("prefix", "dual"):
        fp16, int8 = (demo_losses[name][cache]["masked"]["kl_mean"] for name in ("fp16", "int8"))
        assert 0 < fp16 < int8 < 0.01
        frontier = demo_losses["int8"][cache]["frontier"]
        assert frontier["committed"] > 0
        assert frontier["flip_rate"] < 0.05


@pytest.fixture(scope="module")
def demo_losses(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Return the member ``cache`` of the demo's accuracy.json, for each type of cache."""
    folder, found = tmp_path_factory.mktemp("demo"), {}
    for cache in ("fp16", "int8"):
        report = build(DEMO_CHECKPOINT, folder / cache, BuildOptions(cache_dtype=cache))
        found[cache] = json.loads((folder / cache / "accuracy.json").read_text())["cache"]
        assert found[cache] == report.cache
        assert found[cache]["cache_dtype"] == CACHE_DTYPES[cache]
    return found


def test_the_cost_of_a_rounded_block_cache_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """Block-causal networks have another kind of cache than the demo."""
    masked = {"ce_increase": 0.01, "top1": 0.5}
    frontier = {"flips": 2, "committed": 9}
    print_cache(
        {
            "cache_dtype": "int8",
            "samples": 3,
            "block": {"masked": masked, "frontier": frontier},
        }
    )
    found = capsys.readouterr().out
    assert "Loss from the int8 cache alone, on 3 samples:" in found
    assert re.search(r"block +\+1\.000% +50\.00% +2 of 9", found)


# ---- Long passes ----


@pytest.mark.parametrize("name", ["Int8Linear2", "Int8GatedLinear"])
@pytest.mark.parametrize("rows", [513, 1100])
def test_rows_of_a_long_pass_do_not_depend_on_each_other(
    kernels: str,  # noqa: F811
    name: str,
    rows: int,
) -> None:
    """The kernels of linear layers run a long pass in parts of at most 512 rows."""
    rng, inputs, columns = np.random.default_rng(rows), 64, 40
    x = rng.normal(size=(1, rows, inputs)).astype(np.float32)
    feeds = []
    for _ in range(2):
        codes = rng.integers(-127, 128, (inputs, columns)).astype(np.int8)
        scales = np.zeros(operators.padded(columns), np.float32)
        scales[:columns] = rng.uniform(1e-4, 1e-3, columns)
        feeds += [operators.panels(codes), scales]
    F, C = onnx.TensorProto.FLOAT, onnx.TensorProto.UINT8
    model = _model(
        name, [F, C, F, C, F], [F] * (2 if name == "Int8Linear2" else 1), columns=[columns] * 2
    )
    whole = _run(model, [x, *feeds], by_kernels=True)
    for start in range(0, rows, 100):
        part = _run(model, [x[:, start : start + 100], *feeds], by_kernels=True)
        for ours, theirs in zip(whole, part, strict=True):
            np.testing.assert_array_equal(ours[:, start : start + 100], theirs)
    for ours, theirs in zip(whole, _run(model, [x, *feeds], by_kernels=False), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
