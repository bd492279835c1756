"""Embedding tables: one table for a tied head, rows looked up in its format, and tables kept in the
checkpoint's type.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from checkpoints import a2d_qwen3_config, fast_dllm_v2_config, sdar_config, write_checkpoint
from engine_bundles import SMALL
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from test_kernels import choices

import dlm_runtime
from dlm_calibration import metrics
from dlm_calibration.formats import FP16, QuantisedWeight, quantise_weight
from dlm_calibration.recipes import RecipeError
from dlm_export import families
from dlm_export.build import BuildOptions
from dlm_export.build import build as build_bundle
from dlm_export.graph import functions
from dlm_export.graph.body import DOMAIN
from dlm_export.judging.predictors import BundlePredictor, finite_logits
from dlm_export.judging.torch_predictor import TorchPredictor
from dlm_export.sources import open_source
from dlm_runtime import _native

VOCABULARY, HIDDEN = 100, 48


def table_of(group_size: int, seed: int) -> QuantisedWeight:
    """A head ``[HIDDEN, VOCABULARY]``; ``group_size`` 0: INT8."""
    w = np.random.default_rng(seed).normal(size=(HIDDEN, VOCABULARY)).astype(np.float32)
    if group_size == 0:
        return quantise_weight(w, "int8")
    return quantise_weight(w, "int4", group_size=group_size, scale_dtype=FP16, is_signed=True)


def lookup_model(weight: QuantisedWeight) -> bytes:
    """A model that looks up rows of a table; its one input is ``ids`` ``[B, T]``."""
    ids = ir.Value(name="ids", shape=ir.Shape(["B", "T"]), type=ir.TensorType(ir.DataType.INT64))
    if weight.group_size is None:
        name, attributes = "Int8Embedding", {}
        stored = {
            "panels": functions.panels(weight.codes),
            "scales": np.pad(weight.scales, (0, -VOCABULARY % functions.PANEL)),
        }
    else:
        name, attributes = "Int4Embedding", {"group_size": weight.group_size}
        scales = functions.panel_scales(weight.scales.T).astype(FP16)
        stored = {"panels": functions.int4_panels(weight.codes), "scales": scales}
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
    functions.declare(model, name)
    return ir.to_proto(model).SerializeToString()


def session_of(model: bytes, *, has_kernels: bool) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    if has_kernels:
        options.register_custom_ops_library(_native.library()._name)
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
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


@pytest.mark.parametrize("token", [-1, 128, 1 << 40])
def test_a_token_outside_the_table_is_refused(token: int, llada_bundle: Path) -> None:
    if choices(llada_bundle) == ["none"]:
        pytest.skip("this processor has no kernels")
    session = session_of(lookup_model(table_of(0, 0)), has_kernels=True)
    with pytest.raises(Exception, match="a token id has no row among the table's 128"):
        session.run(["y"], {"ids": np.array([[token]])})


@pytest.fixture(scope="module")
def tied_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = sdar_config(tie_word_embeddings=True)
    return write_checkpoint(tmp_path_factory.mktemp("tied"), config, dtype=torch.bfloat16)


@pytest.mark.parametrize("precision", ["fp32", "int8", "int4-rtn", "head in int4"])
def test_a_tied_bundle_holds_its_table_once_with_parity(
    tied_checkpoint: Path, tmp_path: Path, precision: str
) -> None:
    """The build itself compares every layer, or whole canvases in fp32, with torch, and fails if
    they differ.
    """
    recipe = precision
    if precision == "head in int4":
        recipe = str(tmp_path / "mine.toml")
        Path(recipe).write_text('[layers]\n"*" = "int8-dynamic"\nhead = "int4-g32-dynamic"\n')
    build_bundle(
        tied_checkpoint, tmp_path / "bundle", BuildOptions(precision=recipe, quantise=SMALL)
    )
    graph = ir.load(tmp_path / "bundle" / "denoiser.onnx").graph
    tables = {
        name: value
        for name, value in graph.initializers.items()
        if name.startswith(("embed", "head"))
    }
    codes = {name: value for name, value in tables.items() if not name.endswith("scales")}
    assert len(codes) == 1, list(tables)
    (table,) = codes.values()
    lookups = [node.op_type for node in graph if table in node.inputs]
    if precision == "fp32":
        assert table.dtype == ir.DataType.BFLOAT16
        assert sorted(lookups) == ["Gather", "Transpose"]
    else:
        kind = (
            "Int4" if "int4" in precision and precision != "int4-rtn" else "Int8"
        )  # int4 recipes hold the head in INT8
        assert sorted(lookups) == [f"{kind}Embedding", f"{kind}Linear"]


def test_an_untied_table_is_stored_as_in_the_checkpoint(tmp_path: Path) -> None:
    for dtype, stored in (
        (torch.bfloat16, ir.DataType.BFLOAT16),
        (torch.float16, ir.DataType.FLOAT16),
    ):
        source = write_checkpoint(tmp_path / str(dtype), sdar_config(), dtype=dtype)
        build_bundle(source, tmp_path / f"{dtype}.bundle", BuildOptions(precision="fp32"))
        initializers = ir.load(tmp_path / f"{dtype}.bundle" / "denoiser.onnx").graph.initializers
        assert initializers["embed.weight"].dtype == stored
        assert initializers["head.weight"].dtype == ir.DataType.FLOAT


def test_a_tied_table_has_the_format_of_its_head(tied_checkpoint: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text('embedding = "int8"\n')
    with pytest.raises(RecipeError, match=r'also the weight of its head: .* head = "int8-dynamic"'):
        build_bundle(tied_checkpoint, tmp_path / "bundle", BuildOptions(precision=str(recipe)))


def test_a_quantised_tied_bundle_generates_the_same_with_every_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, llada_bundle: Path
) -> None:
    source = write_checkpoint(tmp_path / "source", a2d_qwen3_config())
    build_bundle(
        source,
        tmp_path / "bundle",
        BuildOptions(precision="int8", check_parity=False, quantise=SMALL),
    )
    found = []
    for kernels in choices(llada_bundle):
        monkeypatch.setenv("DLM_KERNELS", kernels)
        with dlm_runtime.open(tmp_path / "bundle", threads=1) as bundle:
            found.append(bundle.logits([5, 6, 150, 150]))
    for logits in found[1:]:
        np.testing.assert_allclose(logits, found[0], atol=0.5)


def untied_twin(tied: Path, folder: Path) -> Path:
    """The same denoiser with the table stored twice: once to look tokens up in, once as the head."""
    config = json.loads((tied / "config.json").read_text()) | {"tie_word_embeddings": False}
    tensors = load_file(tied / "model.safetensors")
    (table,) = [name for name in tensors if name.endswith("embed_tokens.weight")]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    head = {"lm_head.weight": tensors[table].clone()}
    save_file(tensors | head, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def judged_increase(checkpoint: Path, folder: Path, precision: str) -> float:
    """How much the loss grows by quantising, in nats a masked position.

    The loss is that on text drawn from the denoiser in full precision: its mean increase is the
    divergence between the two, which needs no drawing.
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


# Formats in which the table is quantised, and such as leave it alone.
@pytest.mark.parametrize(
    ("family", "precision"),
    [
        *((sdar_config, precision) for precision in ("fp32", "int8", "int4", "int4-rtn", "fp8")),
        (sdar_config, "head in int4"),
        (a2d_qwen3_config, "int8"),
        (a2d_qwen3_config, "head in int4"),
        (fast_dllm_v2_config, "int8"),
        (fast_dllm_v2_config, "head in int4"),
    ],
)
def test_sharing_a_table_costs_as_much_as_rounding_its_rows_once(
    family: Callable[..., dict[str, Any]], precision: str, tmp_path: Path
) -> None:
    """A tied table rounds what is looked up as well, where an untied one looks up exact rows.

    The looked-up rows are one more operand with an error of the same relative size. They enter
    everything that follows, so here they cost up to 0.9 times as much as all other roundings
    together. A loss grows with the square of an error: rows that were twice as coarse as the head's
    format would cost four times as much, and exceed the limit of 1.5 times.
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
