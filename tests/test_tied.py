"""Tests of embedding tables.

The tests cover tables that are also the output head (tied heads), lookups in all formats, and
tables in the number type of the checkpoint.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from checkpoints import sdar_config, write_checkpoint
from click.testing import CliRunner
from engine_bundles import SMALL, gpu_bundle, read_manifest, row_inputs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from slow_cases import slow_except
from test_kernels import choices
from torch_side import TorchPredictor

import dlm_runtime
from dlm_calibration import metrics
from dlm_calibration.precision_rounding import FP16, QuantisedWeight, quantise_weight
from dlm_calibration.precisions import RecipeError
from dlm_export import families
from dlm_export.build import BuildOptions
from dlm_export.build import build as build_bundle
from dlm_export.cli import main
from dlm_export.graph import operators
from dlm_export.graph.body import DOMAIN
from dlm_export.graph.operators import FP8_TIED_HEAD, TIED_HEADS
from dlm_export.judging.accuracy.verdict import Budgets
from dlm_export.judging.precision_search.search import AutoOptions
from dlm_export.judging.sides.bundle import BundlePredictor
from dlm_export.judging.sides.side import finite_logits
from dlm_export.sources import open_source
from dlm_runtime.abi import native as _native

VOCABULARY, HIDDEN = 100, 48


def table_of(group_size: int, seed: int) -> QuantisedWeight:
    """Return a random quantised table ``[HIDDEN, VOCABULARY]``, the shape of an output head.

    The format is INT8 if ``group_size`` is 0, otherwise INT4.
    """
    w = np.random.default_rng(seed).normal(size=(HIDDEN, VOCABULARY)).astype(np.float32)
    if group_size == 0:
        return quantise_weight(w, "int8")
    return quantise_weight(w, "int4", group_size=group_size, scale_dtype=FP16, is_signed=True)


def model_of(
    name: str,
    port: ir.Value,
    held: dict[str, np.ndarray],
    attributes: dict[str, int] | None = None,
) -> bytes:
    """Return an ONNX model with one call. Its output is ``y``."""
    initializers = [
        ir.Value(name=key, const_value=ir.tensor(value, name=key)) for key, value in held.items()
    ]
    node = ir.node(name, [port, *initializers], attributes, domain=DOMAIN)
    node.outputs[0].name, node.outputs[0].type = "y", ir.TensorType(ir.DataType.FLOAT)
    graph = ir.Graph(
        [port],
        node.outputs,
        nodes=[node],
        initializers=initializers,
        opset_imports={"": 23, DOMAIN: 1},
        name="call",
    )
    model = ir.Model(graph, ir_version=10)
    operators.declare(model, name)
    return ir.to_proto(model).SerializeToString()


def lookup_model(weight: QuantisedWeight) -> bytes:
    """Return an ONNX model that looks up rows of a table. Its only input is ``ids`` ``[B, T]``."""
    ids = ir.Value(name="ids", shape=ir.Shape(["B", "T"]), type=ir.TensorType(ir.DataType.INT64))
    if weight.group_size is None:
        scales = np.pad(weight.scales, (0, -VOCABULARY % operators.PANEL))
        held = {"panels": operators.panels(weight.codes), "scales": scales}
        return model_of("Int8Embedding", ids, held)
    scales = operators.panel_scales(weight.scales.T).astype(FP16)
    held = {"panels": operators.int4_panels(weight.codes), "scales": scales}
    return model_of("Int4Embedding", ids, held, {"group_size": weight.group_size})


def session_of(model: bytes, *, has_kernels: bool) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    if has_kernels:
        options.register_custom_ops_library(_native.library()._name)
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), group_size=st.sampled_from([0, 8, 32, 40, 128]), seed=st.integers(0, 99))
def test_a_looked_up_row_is_a_column_of_the_head(
    monkeypatch: pytest.MonkeyPatch,
    llada_bundle: Path,
    data: st.DataObject,
    group_size: int,
    seed: int,
) -> None:
    weight = table_of(group_size, seed)
    shape = data.draw(st.tuples(st.integers(1, 3), st.integers(1, 70)))
    ids = np.random.default_rng(seed).integers(0, VOCABULARY, shape)
    expected = weight.dequantise().T[ids]
    model = lookup_model(weight)
    np.testing.assert_array_equal(
        session_of(model, has_kernels=False).run(["y"], {"ids": ids})[0], expected
    )
    for kernels in choices(llada_bundle):
        monkeypatch.setenv("DLM_KERNELS", kernels)
        np.testing.assert_array_equal(
            session_of(model, has_kernels=True).run(["y"], {"ids": ids})[0], expected
        )


def test_inputs_that_do_not_fit_the_table_are_refused(llada_bundle: Path) -> None:
    if choices(llada_bundle) == ["none"]:
        pytest.skip("this processor has no kernels")
    session = session_of(lookup_model(table_of(0, 0)), has_kernels=True)
    for token in (-1, 128):
        with pytest.raises(Exception, match="a token id is outside the 128 rows of the table"):
            session.run(["y"], {"ids": np.array([[token]])})
    session = session_of(head_model(np.ones((40, 32), np.float16), None), has_kernels=True)
    with pytest.raises(Exception, match="the table does not have rows of 33"):
        session.run(["y"], {"x": np.ones((1, 2, 33), np.float32)})


TABLES = {
    "fp32": np.dtype(np.float32),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "fp16": np.dtype(np.float16),
    "fp8": np.dtype(ml_dtypes.float8_e4m3fn),
}
HEAD_TOLERANCE = 2e-6
"""A few hundred fp32 products are added in another order. The tolerance is relative to the sum of
their magnitudes.
"""


def head_model(table: np.ndarray, scales: np.ndarray | None) -> bytes:
    """Return an ONNX model that multiplies ``x`` ``[B, T, K]`` by the rows of a table."""
    x = ir.Value(name="x", shape=ir.Shape(["B", "T", None]), type=ir.TensorType(ir.DataType.FLOAT))
    if scales is None:
        return model_of(TIED_HEADS[ir.DataType.from_numpy(table.dtype)], x, {"table": table})
    return model_of(FP8_TIED_HEAD, x, {"table": table.view(np.uint8), "scales": scales})


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), kind=st.sampled_from(list(TABLES)), seed=st.integers(0, 99))
def test_kernels_multiply_by_a_table_as_its_function_does(
    monkeypatch: pytest.MonkeyPatch,
    llada_bundle: Path,
    data: st.DataObject,
    kind: str,
    seed: int,
) -> None:
    batch, tokens, inputs, rows = data.draw(
        st.tuples(st.integers(1, 2), st.integers(0, 20), st.integers(1, 200), st.integers(1, 300))
    )
    rng = np.random.default_rng(seed)
    table = rng.normal(size=(rows, inputs)).astype(TABLES[kind])
    scales = rng.normal(size=(rows, 1)).astype(np.float32) if kind == "fp8" else None
    x = rng.normal(size=(batch, tokens, inputs)).astype(np.float32)
    wide = table.astype(np.float64) * (1 if scales is None else scales.astype(np.float64))
    expected, sizes = x @ wide.T, np.abs(x).astype(np.float64) @ np.abs(wide).T
    model = head_model(table, scales)
    found = [session_of(model, has_kernels=False).run(["y"], {"x": x})[0]]
    for kernels in choices(llada_bundle):
        monkeypatch.setenv("DLM_KERNELS", kernels)
        found.append(session_of(model, has_kernels=True).run(["y"], {"x": x})[0])
    for y in found:
        assert y.shape == expected.shape
        assert (np.abs(y - expected) <= HEAD_TOLERANCE * sizes).all()


@pytest.fixture(scope="module")
def tied_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = sdar_config(tie_word_embeddings=True)
    return write_checkpoint(tmp_path_factory.mktemp("tied"), config, dtype=torch.bfloat16)


RECIPES = {
    "head in int4": '"*" = "int8-dynamic"\nhead = "int4-g32-dynamic"',
    "head in fp8": '"*" = "int8-dynamic"\nhead = "fp8"',
    "all in int4": '"*" = "int4-g32-dynamic"',
}


def recipe(precision: str, folder: Path) -> str:
    """Return a precision for a build. A recipe of ``RECIPES`` is written to a file."""
    if precision not in RECIPES:
        return precision
    (folder / "mine.toml").write_text(f"[layers]\n{RECIPES[precision]}\n")
    return str(folder / "mine.toml")


@pytest.fixture(scope="module")
def tied(tied_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function that builds the bundle of a precision. The build fails if the results of a layer
    differ from torch. In fp32, the build also compares whole canvases.
    """

    @functools.cache
    def make(precision: str) -> Path:
        folder = tmp_path_factory.mktemp("tied")
        options = BuildOptions(precision=recipe(precision, folder), quantise=SMALL)
        build_bundle(tied_checkpoint, folder / "bundle", options)
        return folder / "bundle"

    return make


STORED: list[tuple[str, str, list[str]]] = [
    ("fp32", "BFLOAT16", ["Bf16TiedHead", "Gather"]),
    ("fp16", "FLOAT16", ["Fp16TiedHead", "Gather"]),
    ("fp8", "BFLOAT16", ["Bf16TiedHead", "Gather"]),
    ("nvfp4-weight", "BFLOAT16", ["Bf16TiedHead", "Gather"]),
    ("int8", "UINT8", ["Int8Embedding", "Int8Linear"]),
    # int4 recipes store the table in INT8
    ("int4-rtn", "UINT8", ["Int8Embedding", "Int8Linear"]),
    ("head in int4", "UINT8", ["Int4Embedding", "Int4Linear"]),
    ("head in fp8", "UINT8", ["Fp8TiedHead", "Gather"]),
]


@pytest.mark.parametrize(
    ("precision", "stored", "users"),
    slow_except(STORED[:1] + STORED[-3:], STORED),
)
def test_a_tied_bundle_holds_its_table_once_with_parity(
    tied: Callable[[str], Path], precision: str, stored: str, users: list[str]
) -> None:
    bundle = tied(precision)
    graph = ir.load(bundle / "denoiser.onnx").graph
    names = [name for name in graph.initializers if name.startswith(("embed", "head"))]
    (name,) = (name for name in names if not name.endswith(("scales", "scale")))
    table = graph.initializers[name]
    assert table.dtype == ir.DataType[stored]
    assert sorted(node.op_type for node in graph if table in node.inputs) == users
    told = read_manifest(bundle)["precision"].get("embedding_dtype")
    assert told == {"BFLOAT16": "bfloat16", "FLOAT16": "float16"}.get(stored)


def test_inspect_tells_where_a_tied_table_lies_and_counts_it_once(
    tied_checkpoint: Path, tied: Callable[[str], Path]
) -> None:
    network = open_source(tied_checkpoint).network
    shown = CliRunner().invoke(main, ["inspect", str(tied_checkpoint), "--json"])
    memory = json.loads(shown.stdout)["memory"]
    table = network.vocab_size * network.hidden_size
    count = network.parameter_count()
    assert memory["fp32"]["weights_bytes"] == 4 * (count - table) + 2 * table
    assert memory["fp16"]["weights_bytes"] == 2 * count
    for precision, stored in (("fp32", "bfloat16"), ("int4-rtn", "int8-dynamic")):
        shown = CliRunner().invoke(main, ["inspect", str(tied(precision))])
        told = f"embedding table in {stored}, stored once: the head multiplies by it"
        assert told in shown.stdout


def check_rotary_tables(graph: ir.Graph, readers: int) -> None:
    """All layers read one pair of tables, as long as the canvas."""
    rotary = {key: value for key, value in graph.initializers.items() if key.startswith("rotary.")}
    assert sorted(rotary) == ["rotary.0.cos", "rotary.0.sin"]
    assert {value.shape[0] for value in rotary.values()} == {256}  # type: ignore[index]
    assert sum(rotary["rotary.0.cos"] in node.inputs for node in graph) == readers


def test_rotary_tables_are_stored_once_for_all_layers(tied: Callable[[str], Path]) -> None:
    check_rotary_tables(ir.load(tied("fp32") / "denoiser.onnx").graph, 2)


_OPENED = """
import sys
import dlm_runtime

def anonymous() -> int:
    lines = open("/proc/self/smaps_rollup").read().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Anonymous:"))

before = anonymous()
with dlm_runtime.open(sys.argv[1], threads=1) as bundle:
    bundle.logits([5, 6, 7])
    print(anonymous() - before)
"""


@pytest.mark.parametrize(
    "precision", slow_except(["int8"], ["fp32", "fp16", "int8", "head in fp8"])
)
def test_opening_a_tied_bundle_makes_no_copy_of_its_table(
    tmp_path: Path, llada_bundle: Path, precision: str
) -> None:
    if choices(llada_bundle) == ["none"]:
        pytest.skip("this processor has no kernels")
    if not Path("/proc/self/smaps_rollup").is_file():
        pytest.skip("this system does not say what memory is anonymous")
    rows, hidden = 60_000, 256
    config = sdar_config(tie_word_embeddings=True, vocab_size=rows, hidden_size=hidden)
    source = write_checkpoint(tmp_path / "source", config, dtype=torch.bfloat16)
    options = BuildOptions(
        precision=recipe(precision, tmp_path), check_parity=False, quantise=SMALL
    )
    build_bundle(source, tmp_path / "bundle", options)
    out = subprocess.run(
        [sys.executable, "-c", _OPENED, str(tmp_path / "bundle")],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    # An opened bundle uses 10 MiB of memory, whatever the size of the table. A copy of the INT8
    # codes would take another 15 MiB, and a copy of the table in fp32 would take 59 MiB.
    assert int(out) < (10 << 20) + rows * hidden // 2


def test_a_tied_table_has_the_format_of_its_head(tied_checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('embedding = "int8"\n')
    with pytest.raises(RecipeError, match=r'also the weight of its head: .* head = "int8-dynamic"'):
        build_bundle(tied_checkpoint, tmp_path / "bundle", BuildOptions(precision=str(path)))


def test_auto_chooses_the_format_of_a_tied_table(tied_checkpoint: Path, tmp_path: Path) -> None:
    """All formats meet the loss budget, so the build chooses the smallest format.

    The build then judges the bundle against full precision.
    """
    quantise = replace(
        SMALL, budgets=Budgets(max_ce_increase=10.0), auto=AutoOptions(formats=("fp8",))
    )
    options = BuildOptions(precision="auto", quantise=quantise)
    build_bundle(tied_checkpoint, tmp_path / "bundle", options)
    manifest = read_manifest(tmp_path / "bundle")
    assert manifest["precision"]["layers"]["head"] == "fp8"
    graph = ir.load(tmp_path / "bundle" / "denoiser.onnx").graph
    assert "embed.weight" not in graph.initializers


def test_onnxruntime_on_a_gpu_multiplies_by_the_table_as_it_is_stored(
    tied_checkpoint: Path,
) -> None:
    folder = gpu_bundle("fp16", "cuda", source=tied_checkpoint)
    graph = ir.load(folder / "device.onnx").graph
    check_rotary_tables(graph, 1)  # a node that joins two copies of the table
    table = graph.initializers["embed.weight"]
    assert sorted(node.op_type for node in graph if table in node.inputs) == ["Gather", "Gemm"]
    rng = np.random.default_rng(0)
    feeds = {
        "input_ids": rng.integers(0, 150, (2, 9)),
        "position_ids": np.tile(np.arange(9), (2, 1)),
        "score_rows": rng.integers(0, 9, (2, 4)),
    }
    for layer in read_manifest(folder)["loop"]["graph"]["ports"]["layers"]:
        shape = (2, layer["kv_heads"], 0, layer["head_size"])
        feeds |= {layer[kind]: np.zeros(shape, np.float16) for kind in ("past_key", "past_value")}
    judged, device = (
        onnxruntime.InferenceSession(folder / name, providers=["CPUExecutionProvider"]).run(
            ["logits"], feeds | more
        )[0]
        for name, more in (("denoiser.onnx", {}), ("device.onnx", row_inputs(9, 0)))
    )
    # On the CPU, ONNX Runtime's Gemm adds in fp16, but its MatMul adds in fp32.
    np.testing.assert_allclose(device, judged, atol=0.01 * np.abs(judged).max())


def untied_twin(tied: Path, folder: Path) -> Path:
    """Write a checkpoint of the same denoiser that stores the table twice.

    One copy is the embedding, and the other copy is the output head.
    """
    config = json.loads((tied / "config.json").read_text()) | {"tie_word_embeddings": False}
    tensors = load_file(tied / "model.safetensors")
    (table,) = [name for name in tensors if name.endswith("embed_tokens.weight")]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    head = {"lm_head.weight": tensors[table].clone()}
    save_file(tensors | head, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def judged_increase(checkpoint: Path, folder: Path, precision: str) -> float:
    """Return how much quantising increases the loss, in nats per masked position.

    The result is the mean Kullback-Leibler divergence between the predictions of the full-precision
    and the quantised denoiser. It equals the mean increase of the loss on texts that are sampled
    from the full-precision denoiser.
    """
    options = BuildOptions(precision=precision, check_parity=False, quantise=SMALL)
    build_bundle(checkpoint, folder, options)
    source = open_source(checkpoint)
    reference = TorchPredictor(families.load(source.parameters, source.network), "reference")
    rng, mask, found = np.random.default_rng(5), source.network.mask_token_id, []
    with dlm_runtime.open(folder, threads=1) as bundle:
        for share in (0.3, 0.6, 0.9):
            canvas = rng.integers(0, 100, 64)
            positions = np.flatnonzero(rng.random(64) < share)
            canvas[positions] = mask
            sides = (reference, BundlePredictor(bundle, "bundle"))
            rows = [finite_logits(side, canvas, positions) for side in sides]
            found.append(
                metrics.divergence(*(metrics.log_probabilities(row, mask) for row in rows))
            )
    return float(np.concatenate(found).mean())


@pytest.mark.parametrize("precision", ["int8", "all in int4"])
def test_sharing_a_table_costs_as_much_as_rounding_its_rows_once(
    precision: str, tmp_path: Path
) -> None:
    """If the table is tied, the embedding rows are rounded. Otherwise, they are exact.

    Rounding the rows increases the loss by up to 0.9 times the increase from all other roundings.
    The test allows 1.5 times. The increase grows with the square of the rounding error. If the rows
    were rounded twice as coarsely, the increase would be four times as large and exceed this limit.
    """
    tied = write_checkpoint(tmp_path / "tied", sdar_config(tie_word_embeddings=True))
    untied = untied_twin(tied, tmp_path / "untied")
    asked = recipe(precision, tmp_path)
    shared = judged_increase(tied, tmp_path / "tied.bundle", asked)
    apart = judged_increase(untied, tmp_path / "untied.bundle", asked)
    assert shared <= 2.5 * apart + 1e-6
