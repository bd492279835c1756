"""Tests of embedding tables.

The tests cover tables that are also the output head (tied heads), lookups in all formats, and
tables in the number type of the checkpoint.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from checkpoints import a2d_qwen3_config, fast_dllm_v2_config, sdar_config, write_checkpoint
from click.testing import CliRunner
from engine_bundles import SMALL, gpu_bundle, read_manifest
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


def lookup_model(weight: QuantisedWeight) -> bytes:
    """Return an ONNX model that looks up rows of a table. Its only input is ``ids`` ``[B, T]``."""
    ids = ir.Value(name="ids", shape=ir.Shape(["B", "T"]), type=ir.TensorType(ir.DataType.INT64))
    if weight.group_size is None:
        name, attributes = "Int8Embedding", {}
        stored = {
            "panels": operators.panels(weight.codes),
            "scales": np.pad(weight.scales, (0, -VOCABULARY % operators.PANEL)),
        }
    else:
        name, attributes = "Int4Embedding", {"group_size": weight.group_size}
        scales = operators.panel_scales(weight.scales.T).astype(FP16)
        stored = {"panels": operators.int4_panels(weight.codes), "scales": scales}
    held = [
        ir.Value(name=key, const_value=ir.tensor(value, name=key)) for key, value in stored.items()
    ]
    node = ir.node(name, [ids, *held], attributes, domain=DOMAIN)
    node.outputs[0].name, node.outputs[0].type = "y", ir.TensorType(ir.DataType.FLOAT)
    graph = ir.Graph(
        [ids],
        node.outputs,
        nodes=[node],
        initializers=held,
        opset_imports={"": 23, DOMAIN: 1},
        name="lookup",
    )
    model = ir.Model(graph, ir_version=10)
    operators.declare(model, name)
    return ir.to_proto(model).SerializeToString()


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


@pytest.mark.parametrize("token", [-1, 128])
def test_a_token_outside_the_table_is_refused(token: int, llada_bundle: Path) -> None:
    if choices(llada_bundle) == ["none"]:
        pytest.skip("this processor has no kernels")
    session = session_of(lookup_model(table_of(0, 0)), has_kernels=True)
    with pytest.raises(Exception, match="a token id is outside the 128 rows of the table"):
        session.run(["y"], {"ids": np.array([[token]])})


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
    stored = {"table": table if scales is None else table.view(np.uint8)}
    if scales is not None:
        stored["scales"] = scales
    held = [
        ir.Value(name=key, const_value=ir.tensor(value, name=key)) for key, value in stored.items()
    ]
    name = TIED_HEADS[ir.DataType.from_numpy(table.dtype)] if scales is None else FP8_TIED_HEAD
    node = ir.node(name, [x, *held], domain=DOMAIN)
    node.outputs[0].name, node.outputs[0].type = "y", ir.TensorType(ir.DataType.FLOAT)
    graph = ir.Graph(
        [x],
        node.outputs,
        nodes=[node],
        initializers=held,
        opset_imports={"": 23, DOMAIN: 1},
        name="head",
    )
    model = ir.Model(graph, ir_version=10)
    operators.declare(model, name)
    return ir.to_proto(model).SerializeToString()


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


@pytest.mark.parametrize("inputs", [33])
def test_activations_of_another_size_than_the_tables_rows_are_refused(
    inputs: int, llada_bundle: Path
) -> None:
    if choices(llada_bundle) == ["none"]:
        pytest.skip("this processor has no kernels")
    session = session_of(head_model(np.ones((40, 32), np.float16), None), has_kernels=True)
    with pytest.raises(Exception, match=f"the table does not have rows of {inputs}"):
        session.run(["y"], {"x": np.ones((1, 2, inputs), np.float32)})


@pytest.fixture(scope="module")
def tied_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = sdar_config(tie_word_embeddings=True)
    return write_checkpoint(tmp_path_factory.mktemp("tied"), config, dtype=torch.bfloat16)


RECIPES = {
    "head in int4": '[layers]\n"*" = "int8-dynamic"\nhead = "int4-g32-dynamic"\n',
    "head in fp8": '[layers]\n"*" = "int8-dynamic"\nhead = "fp8"\n',
}


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
    tied_checkpoint: Path, tmp_path: Path, precision: str, stored: str, users: list[str]
) -> None:
    """The build fails if the results of a layer differ from torch.

    In fp32, the build also compares whole canvases.
    """
    recipe = precision
    if precision in RECIPES:
        recipe = str(tmp_path / "mine.toml")
        Path(recipe).write_text(RECIPES[precision])
    build_bundle(
        tied_checkpoint, tmp_path / "bundle", BuildOptions(precision=recipe, quantise=SMALL)
    )
    graph = ir.load(tmp_path / "bundle" / "denoiser.onnx").graph
    tables = {
        name: value
        for name, value in graph.initializers.items()
        if name.startswith(("embed", "head"))
    }
    codes = {
        name: value for name, value in tables.items() if not name.endswith(("scales", "scale"))
    }
    assert len(codes) == 1, list(tables)
    (table,) = codes.values()
    assert table.dtype == ir.DataType[stored]
    assert sorted(node.op_type for node in graph if table in node.inputs) == users
    manifest = read_manifest(tmp_path / "bundle")
    told = manifest["precision"].get("embedding_dtype")
    assert told == {"BFLOAT16": "bfloat16", "FLOAT16": "float16"}.get(stored)


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
    recipe = precision
    if precision in RECIPES:
        recipe = str(tmp_path / "mine.toml")
        Path(recipe).write_text(RECIPES[precision])
    options = BuildOptions(precision=recipe, check_parity=False, quantise=SMALL)
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


def test_rotary_tables_are_stored_once_for_all_layers_and_as_long_as_the_canvas(
    tmp_path: Path,
) -> None:
    source = write_checkpoint(tmp_path / "source", sdar_config(num_hidden_layers=3))
    for name, options in {
        "cpu": BuildOptions(precision="fp32", check_parity=False),
        "cuda": BuildOptions(("cuda",), "fp16", check_parity=False),
    }.items():
        build_bundle(source, tmp_path / name, options)
        for file in (tmp_path / name).glob("*.onnx"):
            graph = ir.load(file).graph
            rotary = {
                key: value for key, value in graph.initializers.items() if key.startswith("rotary.")
            }
            assert sorted(rotary) == ["rotary.0.cos", "rotary.0.sin"]
            assert {value.shape[0] for value in rotary.values()} == {256}  # type: ignore[index]
            readers = [node for node in graph if rotary["rotary.0.cos"] in node.inputs]
            assert len(readers) == (3 if name == "cpu" else 6)  # else, q and k have separate nodes


def test_a_tied_table_has_the_format_of_its_head(tied_checkpoint: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text('embedding = "int8"\n')
    with pytest.raises(RecipeError, match=r'also the weight of its head: .* head = "int8-dynamic"'):
        build_bundle(tied_checkpoint, tmp_path / "bundle", BuildOptions(precision=str(recipe)))


@pytest.mark.parametrize("table", ["fp8"])
def test_auto_chooses_the_format_of_a_tied_table(
    tied_checkpoint: Path, tmp_path: Path, table: str
) -> None:
    """All formats meet the loss budget, so the build chooses the smallest format.

    The build then judges the bundle against full precision.
    """
    quantise = replace(
        SMALL, budgets=Budgets(max_ce_increase=10.0), auto=AutoOptions(formats=(table,))
    )
    options = BuildOptions(precision="auto", quantise=quantise)
    build_bundle(tied_checkpoint, tmp_path / "bundle", options)
    manifest = read_manifest(tmp_path / "bundle")
    assert manifest["precision"]["layers"]["head"] == table
    graph = ir.load(tmp_path / "bundle" / "denoiser.onnx").graph
    assert "embed.weight" not in graph.initializers


def test_inspect_tells_where_a_tied_table_lies_and_counts_it_once(
    tied_checkpoint: Path, tmp_path: Path
) -> None:
    network = open_source(tied_checkpoint).network
    shown = CliRunner().invoke(main, ["inspect", str(tied_checkpoint), "--json"])
    memory = json.loads(shown.stdout)["memory"]
    table = network.vocab_size * network.hidden_size
    count = network.parameter_count()
    assert memory["fp32"]["weights_bytes"] == 4 * (count - table) + 2 * table
    assert memory["fp16"]["weights_bytes"] == 2 * count
    for precision, stored in (("fp32", "bfloat16"), ("int8", "int8-dynamic")):
        options = BuildOptions(precision=precision, check_parity=False, quantise=SMALL)
        build_bundle(tied_checkpoint, tmp_path / precision, options)
        shown = CliRunner().invoke(main, ["inspect", str(tmp_path / precision)])
        told = f"embedding table in {stored}, stored once: the head multiplies by it"
        assert told in shown.stdout


# ---- GPUs ----


def test_an_engine_of_a_tied_denoiser_holds_the_table_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx_bindings")
    hidden, sizes = 64, []
    for rows in (20_000, 60_000):
        config = sdar_config(tie_word_embeddings=True, vocab_size=rows, hidden_size=hidden)
        source = write_checkpoint(tmp_path / f"{rows}", config, dtype=torch.bfloat16)
        folder = gpu_bundle("fp16", "rtx5090", source=source, engines=True)
        (file,) = (folder / "engines").iterdir()
        sizes.append(file.stat().st_size)
    more = 2 * 40_000 * hidden  # bytes of the table in fp16; two copies would need twice as much
    assert 0.95 * more < sizes[1] - sizes[0] < 1.1 * more


def test_onnxruntime_on_a_gpu_multiplies_by_the_table_as_it_is_stored(
    tied_checkpoint: Path,
) -> None:
    folder = gpu_bundle("fp16", "cuda", source=tied_checkpoint)
    graph = ir.load(folder / "device.onnx").graph
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
            ["logits"], feeds
        )[0]
        for name in ("denoiser.onnx", "device.onnx")
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


@pytest.mark.parametrize(
    ("family", "precision"),
    [
        (sdar_config, "int8"),
        (a2d_qwen3_config, "head in int4"),
        (fast_dllm_v2_config, "int4-rtn"),
    ],
)
def test_sharing_a_table_costs_as_much_as_rounding_its_rows_once(
    family: Callable[..., dict[str, Any]], precision: str, tmp_path: Path
) -> None:
    """If the table is tied, the embedding rows are rounded. Otherwise, they are exact.

    Rounding the rows increases the loss by up to 0.9 times the increase from all other roundings.
    The test allows 1.5 times. The increase grows with the square of the rounding error. If the rows
    were rounded twice as coarsely, the increase would be four times as large and exceed this limit.
    """
    recipe = precision
    if precision == "head in int4":
        recipe = str(tmp_path / "mine.toml")
        Path(recipe).write_text('[layers]\n"*" = "int4-g32-dynamic"\n')
    config = family(tie_word_embeddings=True, mask_token_id=150)
    tied = write_checkpoint(tmp_path / "tied", config)
    untied = untied_twin(tied, tmp_path / "untied")
    shared = judged_increase(tied, tmp_path / "tied.bundle", recipe)
    apart = judged_increase(untied, tmp_path / "untied.bundle", recipe)
    print(f"{precision}: {shared:.3g} nats shared, {apart:.3g} apart")
    assert shared <= 2.5 * apart + 1e-6
