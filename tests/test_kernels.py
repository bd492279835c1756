"""Tests of this project's ONNX operators (domain ``dlm_export``).

A graph contains an ONNX function that defines each operator. The runtime replaces the functions by
native kernels. Functions and kernels must give the same results, and graphs with wrong functions
must be rejected.

These tests load the native library, so a crash of the library ends the test run.
runtime/native/tests/kernels_test.cc compares the kernels with plain C++ loops.
"""

from __future__ import annotations

import functools
import platform
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from engine_bundles import SMALL, read_manifest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from test_native import REPOSITORY, SANITIZE, SOURCE, compile_c, run, sanitized, succeed, tool  # noqa: F401

import dlm_runtime
from dlm_calibration.precision_rounding import FP16, quantise_weight
from dlm_export.build import BuildOptions
from dlm_export.build import build as build_bundle
from dlm_export.bundle.folder import finish
from dlm_export.graph import operators
from dlm_export.graph.body import DOMAIN
from dlm_runtime import RequestError
from dlm_runtime.abi import native as _native

SETS = ("amx-int8", "avx512-vnni", "avx-vnni", "avx2", "neon-dotprod")
# Dream has grouped queries and biases, unlike LLaDA. The NVFP4 bundle quantises only weights,
# because no kernel can round activations to NVFP4.
BUNDLES = (
    "llada-fp32",
    "dream-fp32",
    "llada-int8",
    "dream-int8",
    "llada-int4",
    "dream-nvfp4",
)
BY_ROWS = ("int8", "int4")  # precisions with one scale per row of activations
GRAPH = "denoiser.onnx"
# Maximum number of tokens in a pass of these tests. ONNX's reference implementation of Gather calls
# numpy.choose, which accepts at most 64 arrays.
LONGEST = 60
# Limit for the difference between logits of kernels and of ONNX functions. Kernels add numbers in
# another order, and their exponentials have errors up to 2e-7. For logits around 10, the largest
# observed difference was 5e-6.
TOLERANCE = 1e-4
# In INT8 and INT4, a small difference of an activation can change its quantised value by one code,
# which changes the inputs of all later layers. The largest observed difference of a logit was 0.1,
# and half of the rows differed by less than 0.01. Products that saturate would cause a difference
# of 3.
INT8_TOLERANCE, INT8_MEDIAN = 0.5, 0.05


@pytest.fixture(scope="session")
def quantised_bundles(
    llada_checkpoint: Path, dream_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    recipes = {"int8": "int8", "int4": "int4-rtn", "nvfp4": "nvfp4-weight"}
    checkpoints = {"llada": llada_checkpoint, "dream": dream_checkpoint}
    built = {}
    for name in BUNDLES[2:]:
        family, precision = name.split("-")
        built[name] = tmp_path_factory.mktemp(precision) / family
        options = BuildOptions(precision=recipes[precision], check_parity=False, quantise=SMALL)
        build_bundle(checkpoints[family], built[name], options)
    return built


@pytest.fixture(scope="session")
def bundles(
    llada_bundle: Path, dream_bundle: Path, quantised_bundles: dict[str, Path]
) -> dict[str, Path]:
    """The bundles of ``BUNDLES``. Tests must not change them."""
    return {"llada-fp32": llada_bundle, "dream-fp32": dream_bundle, **quantised_bundles}


def choices(bundle: Path) -> list[str]:
    """Return the values of the variable DLM_KERNELS that are allowed on this processor.

    The values are parsed from the error message for an invalid value.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DLM_KERNELS", "abacus")
        with pytest.raises(RequestError, match='DLM_KERNELS is "abacus"') as refused:
            dlm_runtime.open(bundle)
    return str(refused.value).partition("choose one of ")[2].split(", ")


@pytest.fixture(params=SETS)
def kernels(
    request: pytest.FixtureRequest, llada_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> str:
    """Run the test once with each kernel set that this processor supports."""
    if request.param not in choices(llada_bundle):
        pytest.skip(f"this processor has no {request.param}")
    monkeypatch.setenv("DLM_KERNELS", request.param)
    return str(request.param)


@functools.cache
def _evaluator(bundle: Path) -> ReferenceEvaluator:
    return ReferenceEvaluator(onnx.load(bundle / GRAPH))


def feeds_of(bundle: Path, tokens: list[int], rows: list[int]) -> dict[str, np.ndarray]:
    """Return the inputs of the graph for one full pass."""
    layers = read_manifest(bundle)["loop"]["graph"]["ports"]["layers"]
    feeds = {
        "input_ids": np.array([tokens]),
        "position_ids": np.arange(len(tokens))[None],
        "score_rows": np.array([rows]),
    }
    for layer in layers:
        cache = np.zeros((1, layer["kv_heads"], 0, layer["head_size"]), np.float32)
        feeds |= {layer["past_key"]: cache, layer["past_value"]: cache}
    return feeds


def logits_of_functions(bundle: Path, tokens: list[int], rows: list[int]) -> np.ndarray:
    """Compute logits ``[R, V]`` with the ONNX functions that define the operators, without kernels.

    ONNX's reference implementation evaluates the functions. ONNX Runtime is not used, because its
    INT8 products saturate on processors without VNNI.
    """
    return np.asarray(_evaluator(bundle).run(["logits"], feeds_of(bundle, tokens, rows))[0])[0]


def check_logits(name: str, got: np.ndarray, expected: np.ndarray) -> None:
    assert np.abs(got - expected).max() < (INT8_TOLERANCE if name.endswith(BY_ROWS) else TOLERANCE)


# ---- Functions and kernels ----


@pytest.mark.parametrize("name", BUNDLES)
def test_kernels_compute_what_the_functions_in_the_graph_say(
    bundles: dict[str, Path], name: str, kernels: str
) -> None:
    bundle, rng = bundles[name], np.random.default_rng(7)
    with dlm_runtime.open(bundle, threads=1) as opened:
        for length in (1, 2, 9, 32, LONGEST):
            tokens = rng.integers(0, opened.vocab_size, length).tolist()
            got, expected = (
                opened.logits(tokens),
                logits_of_functions(bundle, tokens, list(range(length))),
            )
            check_logits(name, got, expected)
            assert np.median(np.abs(got - expected)) < INT8_MEDIAN
            agreeing = (got.argmax(-1) == expected.argmax(-1)).mean()
            assert agreeing == 1 or (name.endswith(BY_ROWS) and agreeing > 0.9)


@settings(max_examples=12, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_shape_of_a_pass_fits_the_kernels(
    bundles: dict[str, Path], kernels: str, data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from(BUNDLES))
    with dlm_runtime.open(bundles[name], threads=data.draw(st.sampled_from([1, 2]))) as opened:
        tokens = data.draw(
            st.lists(st.integers(0, opened.vocab_size - 1), min_size=1, max_size=LONGEST)
        )
        rows = data.draw(
            st.lists(st.integers(0, len(tokens) - 1), min_size=1, max_size=len(tokens))
        )
        check_logits(
            name, opened.logits(tokens, rows), logits_of_functions(bundles[name], tokens, rows)
        )
        cached = data.draw(st.integers(0, 100))
        assert len(opened.time_passes(len(tokens), cached, len(rows), 1)) == 1


@pytest.mark.parametrize("name", BUNDLES)
def test_number_of_threads_does_not_change_a_bit(
    bundles: dict[str, Path], name: str, kernels: str
) -> None:
    tokens = np.random.default_rng(3).integers(0, 150, 90).tolist()
    found = []
    for threads in (1, 2, 3):
        with dlm_runtime.open(bundles[name], threads=threads) as opened:
            found.append(opened.logits(tokens))
    if not name.endswith(BY_ROWS):  # ONNX Runtime's own products depend on the threads
        assert np.abs(found[0] - found[1]).max() < TOLERANCE
    else:
        assert (found[0] == found[1]).all()
        assert (found[0] == found[2]).all()


# ---- DLM_KERNELS ----


def test_fastest_kernels_are_taken_unless_others_are_named(
    llada_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = choices(llada_bundle)
    assert known[-1] == "none"
    assert set(known[:-1]) <= set(SETS)
    for name, found in [(name, name) for name in known] + [("", known[0]), (None, known[0])]:
        if name is None:
            monkeypatch.delenv("DLM_KERNELS", raising=False)
        else:
            monkeypatch.setenv("DLM_KERNELS", name)
        with dlm_runtime.open(llada_bundle) as opened:
            assert opened.engine.endswith("(CPU)" if found == "none" else f"(CPU, {found})")


@pytest.mark.parametrize("name", ["abacus", "AVX2", "avx2 ", "avx512-vnni,none", "x" * 10_000])
def test_kernels_that_the_processor_does_not_have_are_refused(
    llada_bundle: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = choices(llada_bundle)
    monkeypatch.setenv("DLM_KERNELS", name)
    with pytest.raises(RequestError) as refused:
        dlm_runtime.open(llada_bundle)
    assert str(refused.value).startswith(
        f'DLM_KERNELS is "{name[:40]}", kernels that this processor does not have; choose one'
    )
    assert str(refused.value).endswith(", ".join(known))
    monkeypatch.setenv("DLM_KERNELS", next(name for name in SETS if name not in known))
    with pytest.raises(
        RequestError,
        match=r"kernels that (this processor does not have|do not run here: .*); choose one of",
    ):
        dlm_runtime.open(llada_bundle)


def test_what_amx_lacks_is_named(llada_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "amx-int8" in choices(llada_bundle) or platform.machine() != "x86_64":
        pytest.skip("nothing is lacking, or everything")
    flags = next(
        line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")
    ).split()
    missing = [name for name in ("amx_tile", "amx_int8", "avx512_vnni") if name not in flags]
    known = {"amx_tile": "amx-tile", "amx_int8": "amx-int8", "avx512_vnni": "AVX-512 with VNNI"}
    reason = f"the processor has no {known[missing[0]]}" if missing else ".*(AMX|tried|compiler).*"
    monkeypatch.setenv("DLM_KERNELS", "amx-int8")
    with pytest.raises(
        RequestError,
        match=f'"amx-int8", kernels that do not run here: {reason}; choose one of .*none$',
    ):
        dlm_runtime.open(llada_bundle)


# ---- Graphs with wrong functions ----

Edit = Callable[[onnx.ModelProto], None]


def _node(model: onnx.ModelProto, op_type: str) -> onnx.NodeProto:
    return next(node for node in model.graph.node if node.op_type == op_type)


def _attribute(op_type: str, name: str, value: object) -> Edit:
    """Return an edit of a graph that changes an attribute of a node.

    The value None removes the attribute.
    """

    def edit(model: onnx.ModelProto) -> None:
        node = _node(model, op_type)
        kept = [attribute for attribute in node.attribute if attribute.name != name]
        del node.attribute[:]
        # ONNX cannot infer the attribute type from an empty list.
        kind = onnx.AttributeProto.INTS if isinstance(value, list) else None
        node.attribute.extend(
            kept if value is None else [*kept, helper.make_attribute(name, value, attr_type=kind)]
        )

    return edit


def _replaced(op_type: str, index: int, array: np.ndarray) -> Edit:
    """Return an edit of a graph that replaces an input of a node by a constant."""

    def edit(model: onnx.ModelProto) -> None:
        model.graph.initializer.append(numpy_helper.from_array(array, f"lie {index}"))
        _node(model, op_type).input[index] = f"lie {index}"

    return edit


def _reshaped(op_type: str, index: int, *dims: int) -> Edit:
    """Return an edit of a graph that changes an initialiser's shape, but not its bytes."""

    def edit(model: onnx.ModelProto) -> None:
        name = _node(model, op_type).input[index]
        tensor = next(tensor for tensor in model.graph.initializer if tensor.name == name)
        assert np.prod(dims) == np.prod(tensor.dims)
        del tensor.dims[:]
        tensor.dims.extend(dims)

    return edit


def _both(*edits: Edit) -> Edit:
    def edit(model: onnx.ModelProto) -> None:
        for one in edits:
            one(model)

    return edit


def _panels(*dims: int) -> Edit:
    return _replaced("Int8Linear", 1, np.zeros(dims, np.uint8))


def _cut(op_type: str, index: int, *shape: int) -> Edit:
    return _replaced(op_type, index, np.ones(shape, np.float32))


def _attend_by(name: str, attribute: str, value: object, *weights: np.ndarray) -> Edit:
    """Return an edit. It replaces the operator of all attention nodes of a graph by ``name``.

    The new nodes have the attribute ``attribute`` with the given value (no attribute if None), and
    ``weights`` as additional inputs.
    """

    def edit(model: onnx.ModelProto) -> None:
        model.graph.initializer.extend(
            numpy_helper.from_array(array, f"weight {i}") for i, array in enumerate(weights)
        )
        for node in model.graph.node:
            if node.op_type == "CachedAttention":
                node.op_type = name
                if value is not None:
                    node.attribute.append(helper.make_attribute(attribute, value))
                node.input.extend(f"weight {i}" for i in range(len(weights)))
        model.functions.append(ir.to_proto(operators._DEFINITIONS[name]()))

    return edit


def _by_blocks(length: object) -> Edit:
    """Return an edit that replaces attention by block-causal attention."""
    return _attend_by("BlockCachedAttention", "visible_block", length)


def _by_window(window: object) -> Edit:
    """Return an edit that replaces attention by windowed attention."""
    return _attend_by(WINDOWED, "window", window)


def _by_norms(epsilon: object, *shapes: tuple[int, ...]) -> Edit:
    """Return an edit that replaces attention by attention that normalises queries and keys.

    All weights of the norms are 1. ``shapes`` are the shapes of the weights.
    """
    weights = [np.ones(shape, np.float32) for shape in shapes]
    return _attend_by(NORMED, "epsilon", epsilon, *weights)


GATE, MERGED, INT4, NVFP4 = "Int8GatedLinear", "Int8Linear3", "Int4Linear", "NVFP4Linear"
INT8, ATTENTION = "Int8Linear", "CachedAttention"
NORMED, WINDOWED = "NormedCachedAttention", "WindowCachedAttention"
LIES: dict[str, tuple[str, Edit]] = {
    "more columns than panels": (INT8, _attribute(INT8, "columns", [65])),
    "no columns": (INT8, _attribute(INT8, "columns", [0])),
    "columns beyond all memory": (INT8, _attribute(INT8, "columns", [(1 << 63) - 1])),
    "two numbers of columns": (INT8, _attribute(INT8, "columns", [64, 64])),
    "columns missing": (INT8, _attribute(INT8, "columns", None)),
    "a third of other columns": (MERGED, _attribute(MERGED, "columns", [64, 64, 30])),
    "gate and up differ": (GATE, _attribute(GATE, "columns", [96, 95])),
    "panels in another order": (INT8, _reshaped(INT8, 1, 16, 2, 32, 4)),
    "panels of 16 columns": (INT8, _reshaped(INT8, 1, 4, 16, 16, 4)),
    "panels in a row": (INT8, _reshaped(INT8, 1, 2 * 16 * 32 * 4)),
    "panels of nothing": (INT8, _panels(2, 0, 32, 4)),
    "panels of another number": (INT8, _replaced(INT8, 1, np.zeros((2, 16, 32, 4), np.int8))),
    "scales too few": (INT8, _cut(INT8, 2, 32)),
    "an input of another width": (INT8, _cut(INT8, 0, 1, 3, 68)),
    "an odd input": (INT8, _cut(INT8, 0, 1, 3, 62)),
    "an input and panels of no width": (INT8, _both(_cut(INT8, 0, 1, 3, 0), _panels(2, 0, 32, 4))),
    "sums beyond 32 bits": (
        INT8,
        _both(_cut(INT8, 0, 1, 1, 132_112), _panels(2, 132_112 // 4, 32, 4)),
    ),
    "an input that is one number": (INT8, _cut(INT8, 0)),
    "fewer INT4 columns than panels": (INT4, _attribute(INT4, "columns", [32])),
    "INT4 columns of one of three": ("Int4Linear3", _attribute("Int4Linear3", "columns", [64])),
    "groups of no inputs": (INT4, _attribute(INT4, "group_size", 0)),
    "groups of an odd number": (INT4, _attribute(INT4, "group_size", 12)),
    "groups of twice as many inputs": (INT4, _attribute(INT4, "group_size", 64)),
    "groups beyond all inputs": (INT4, _attribute(INT4, "group_size", (1 << 63) - 8)),
    "group size missing": (INT4, _attribute(INT4, "group_size", None)),
    "INT4 panels as those of INT8": (INT4, _replaced(INT4, 1, np.zeros((2, 16, 32, 4), np.uint8))),
    "INT4 scales as those of INT8": (INT4, _cut(INT4, 2, 64)),
    "INT4 scales in another order": (INT4, _cut(INT4, 2, 2, 32, 2)),
    "an INT4 input of another width": (INT4, _cut(INT4, 0, 1, 3, 72)),
    "an INT4 input of half a byte's": (INT4, _cut(INT4, 0, 1, 3, 60)),
    "fewer NVFP4 columns than panels": (NVFP4, _attribute(NVFP4, "columns", [32])),
    "NVFP4 columns beyond all memory": (NVFP4, _attribute(NVFP4, "columns", [(1 << 63) - 1])),
    "NVFP4 panels of another width": (NVFP4, _reshaped(NVFP4, 1, 4, 64, 8)),
    "NVFP4 scales in another order": (NVFP4, _reshaped(NVFP4, 2, 4, 2, 32)),
    "an NVFP4 scale for each panel": (NVFP4, _cut(NVFP4, 3, 2)),
    "an NVFP4 input of another width": (NVFP4, _cut(NVFP4, 0, 1, 3, 48)),
    "an NVFP4 input that groups do not divide": (NVFP4, _cut(NVFP4, 0, 1, 3, 60)),
    "heads that kv_heads do not divide": (ATTENTION, _attribute(ATTENTION, "kv_heads", 3)),
    "no heads": (ATTENTION, _attribute(ATTENTION, "heads", 0)),
    "heads beyond all memory": (ATTENTION, _attribute(ATTENTION, "heads", 1 << 62)),
    "heads missing": (ATTENTION, _attribute(ATTENTION, "heads", None)),
    "twice the heads": (ATTENTION, _attribute(ATTENTION, "heads", 8)),
    "tables of too few rows": (
        ATTENTION,
        _both(_cut(ATTENTION, 6, 2, 8), _cut(ATTENTION, 7, 2, 8)),
    ),
    "tables of nothing": (ATTENTION, _both(_cut(ATTENTION, 6, 256, 0), _cut(ATTENTION, 7, 256, 0))),
    "cos of another head size": (ATTENTION, _cut(ATTENTION, 6, 256, 4)),
    "cos in a row": (ATTENTION, _cut(ATTENTION, 6, 2048)),
    "keys of another length": (ATTENTION, _cut(ATTENTION, 1, 1, 2, 64)),
    "past values of other rows": (ATTENTION, _cut(ATTENTION, 4, 1, 4, 7, 16)),
    "positions behind the tables": (ATTENTION, _replaced(ATTENTION, 5, np.array([[0, 1, 256]]))),
    "positions before the tables": (ATTENTION, _replaced(ATTENTION, 5, np.array([[0, -1, 2]]))),
    "positions of another shape": (ATTENTION, _replaced(ATTENTION, 5, np.array([[0, 1]]))),
    "segments of two numbers": (ATTENTION, _replaced(ATTENTION, 8, np.array([[0, 3]]))),
    "segments of fewer tokens": (ATTENTION, _replaced(ATTENTION, 8, np.array([[0, 0, 0, 1]]))),
    "segments beyond what is cached": (
        ATTENTION,
        _replaced(ATTENTION, 8, np.array([[0, 1 << 40, 0, 3]])),
    ),
    "blocks of no tokens": ("BlockCachedAttention", _by_blocks(0)),
    "blocks beyond all positions": ("BlockCachedAttention", _by_blocks(1 << 40)),
    "blocks missing": ("BlockCachedAttention", _by_blocks(None)),
    "a window of no tokens": (WINDOWED, _by_window(0)),
    "a window beyond all positions": (WINDOWED, _by_window(1 << 40)),
    "a window missing": (WINDOWED, _by_window(None)),
    "norms of another head size": (NORMED, _by_norms(1e-5, (16,), (8,))),
    "norms of each head": (NORMED, _by_norms(1e-5, (4, 16), (4, 16))),
    "norms of a negative epsilon": (NORMED, _by_norms(-1.0, (16,), (16,))),
    "norms without epsilon": (NORMED, _by_norms(None, (16,), (16,))),
    "a sum of another shape": ("AddNorm", _cut("AddNorm", 1, 1, 1, 64)),
    "a sum of numbers": ("AddNorm", _both(_cut("AddNorm", 0), _cut("AddNorm", 1))),
    "a sum's norm of another width": ("AddNorm", _cut("AddNorm", 2, 65)),
    "a sum's norm without epsilon": ("AddNorm", _attribute("AddNorm", "epsilon", None)),
    "a sum's norm of a negative epsilon": ("AddNorm", _attribute("AddNorm", "epsilon", -1.0)),
    "more turned than a head has": (
        ATTENTION,
        _both(_cut(ATTENTION, 6, 256, 9), _cut(ATTENTION, 7, 256, 9)),
    ),
    "a bias of another vocabulary": ("Candidates", _cut("Candidates", 1, 159)),
    "a bias for each row": ("Candidates", _cut("Candidates", 1, 1, 160)),
    "logits of one token": ("Candidates", _cut("Candidates", 0, 1, 3, 1)),
    "logits in a table": ("Candidates", _cut("Candidates", 0, 3, 160)),
}


def write_lie(name: str, honest: Path, folder: Path) -> Path:
    """Copy a bundle to ``folder`` with a wrong graph. The manifest lists the wrong graph's hash."""
    bundle = Path(shutil.copytree(honest, folder))
    model = onnx.load(bundle / GRAPH, load_external_data=False)
    LIES[name][1](model)
    onnx.save(model, bundle / GRAPH)
    manifest = read_manifest(bundle)
    del manifest["files"]
    finish(bundle, manifest)
    return bundle


# ---- Under sanitizers ----


@pytest.fixture(scope="session")
def opened(sanitized: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[str]]:  # noqa: F811
    """Run a request with each of the given bundles in one program, and return one line for each."""
    source = Path(__file__).with_name("open_bundles.c")
    program = compile_c(
        tmp_path_factory.mktemp("open") / "open_bundles", source, sanitized, *SANITIZE
    )

    def opened(*bundles: Path, **variables: str) -> list[str]:
        arguments = [part for bundle in bundles for part in ("onnxruntime", bundle)]
        return succeed(program, *arguments, ASAN_OPTIONS="detect_leaks=1", **variables).splitlines()

    return opened


@pytest.mark.parametrize("arguments", [[], pytest.param(["all"], marks=pytest.mark.slow)])
def test_kernels_agree_with_plain_loops_under_sanitizers(
    sanitized: Path,  # noqa: F811
    arguments: list[str],
) -> None:
    out = succeed(sanitized / "kernels_test", *arguments)
    assert re.search(r"^[1-9]\d* passed, 0 failed$", out, flags=re.MULTILINE)


def test_graphs_that_lie_are_refused_by_their_operators(
    opened: Callable[..., list[str]], bundles: dict[str, Path], tmp_path: Path
) -> None:
    honest = {NVFP4: "dream-nvfp4", INT4: "llada-int4", "Int4Linear3": "llada-int4"}
    lies = [
        write_lie(name, bundles[honest.get(LIES[name][0], "llada-int8")], tmp_path / str(number))
        for number, name in enumerate(LIES)
    ]
    wrong = [
        f"{name}: {line}"
        for name, line in zip(LIES, opened(*lies), strict=True)
        if not line.startswith(("ENGINE_FAILED\t", "BAD_BUNDLE\t")) or LIES[name][0] not in line
    ]
    assert not wrong, "\n".join(wrong)


def test_passes_of_the_kernels_are_clean_under_sanitizers(
    opened: Callable[..., list[str]], bundles: dict[str, Path], kernels: str
) -> None:
    lines = opened(*bundles.values(), DLM_KERNELS=kernels)
    assert lines == ["OK\t"] * len(bundles)


# ---- Panels ----


@settings(max_examples=200)
@given(groups=st.integers(1, 20), columns=st.integers(1, 100), seed=st.integers(0, 9))
def test_panels_hold_every_code_where_the_functions_look_for_it(
    groups: int, columns: int, seed: int
) -> None:
    codes = np.random.default_rng(seed).integers(-128, 128, (4 * groups, columns)).astype(np.int8)
    panels = operators.panels(codes)
    assert panels.shape == (operators.padded(columns) // 32, groups, 32, 4)
    # Reorder the codes from panels (the layout that kernels read) to a matrix, as the ONNX function
    # Int8Linear does.
    whole = panels.transpose(0, 2, 1, 3).reshape(-1, 4 * groups).T.astype(np.int32) - 128
    assert (whole[:, :columns] == codes).all()
    assert (whole[:, columns:] == 0).all()


def _by_definition(
    name: str, columns: int, given: dict[str, np.ndarray], **attributes: int
) -> np.ndarray:
    """Compute a quantised linear layer with the ONNX function that defines it."""
    call = helper.make_node(
        name, list(given), ["y"], domain=DOMAIN, columns=[columns], **attributes
    )
    kinds = [helper.np_dtype_to_tensor_dtype(value.dtype) for value in given.values()]
    ports = [
        helper.make_tensor_value_info(port, kind, None)
        for port, kind in zip(given, kinds, strict=True)
    ]
    graph = helper.make_graph(
        [call], "g", ports, [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)]
    )
    body = ir.to_proto(operators._DEFINITIONS[name]())
    imports = [helper.make_opsetid("", 23), helper.make_opsetid(DOMAIN, 1)]
    model = helper.make_model(graph, functions=[body], opset_imports=imports)
    return np.asarray(ReferenceEvaluator(model).run(["y"], given)[0])


@settings(max_examples=100)
@given(groups=st.integers(1, 6), columns=st.integers(1, 100), seed=st.integers(0, 9))
def test_nvfp4_panels_hold_every_code_and_scale_where_the_function_looks_for_them(
    groups: int, columns: int, seed: int
) -> None:
    w = np.random.default_rng(seed).normal(size=(16 * groups, columns)).astype(np.float32)
    weight = quantise_weight(w, "nvfp4")
    panels, scales = operators.nvfp4_panels(weight.codes), operators.panel_scales(weight.scales)
    x = np.eye(16 * groups, dtype=np.float32)
    given = {
        "x": x,
        "panels": panels,
        "scales": scales,
        "global_scale": np.asarray(weight.global_scale),
    }
    assert np.array_equal(_by_definition(NVFP4, columns, given), weight.dequantise())


@settings(max_examples=100)
@given(
    pairs=st.integers(1, 20),
    columns=st.integers(1, 100),
    group_size=st.sampled_from([8, 24, 32, 128]),
    seed=st.integers(0, 9),
)
def test_int4_panels_hold_every_code_and_scale_where_the_function_looks_for_them(
    pairs: int, columns: int, group_size: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    w = rng.normal(size=(8 * pairs, columns)).astype(np.float32)
    weight = quantise_weight(w, "int4", group_size=group_size, scale_dtype=FP16, is_signed=True)
    # Random codes include -8, which quantising never gives.
    weight.codes[...] = rng.integers(-8, 8, weight.codes.shape)
    panels, scales = (
        operators.int4_panels(weight.codes),
        operators.panel_scales(weight.scales.T).astype(FP16),
    )
    x = 127 * np.eye(8 * pairs, dtype=np.float32)
    found = _by_definition(
        INT4, columns, {"x": x, "panels": panels, "scales": scales}, group_size=group_size
    )
    assert np.array_equal(found, 127 * weight.dequantise())


@pytest.mark.parametrize("name", BUNDLES)
def test_a_session_of_the_callers_own_runs_a_graph_by_the_same_kernels(
    bundles: dict[str, Path], name: str, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program can load this project's operators into its own ONNX Runtime session.

    A session with these operators and this project's runtime must give exactly equal results, with
    and without kernels.
    """
    tokens = list(range(12))
    for chosen in (kernels, "none"):
        monkeypatch.setenv("DLM_KERNELS", chosen)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = 1, 4
        options.register_custom_ops_library(_native.library()._name)
        session = onnxruntime.InferenceSession(
            bundles[name] / GRAPH, options, providers=["CPUExecutionProvider"]
        )
        found = np.asarray(session.run(["logits"], feeds_of(bundles[name], tokens, tokens))[0])[0]
        with dlm_runtime.open(bundles[name], threads=1) as opened:
            np.testing.assert_array_equal(found, opened.logits(tokens))
