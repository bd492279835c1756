"""Tests of bundles for the target ``cuda``: their graphs, their results on the CPU, and errors."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import onnx
import onnxruntime
import pytest
from checkpoints import (
    modern_bert_config,
    roberta_config,
    sdar_config,
    write_checkpoint,
)
from engine_bundles import dlm_export, gpu_bundle, read_manifest, refused, row_inputs, tiny
from hypothesis import strategies as st

import dlm_runtime
from dlm_calibration.precision_rounding import quantise_weight
from dlm_export.building.writing import part_of
from dlm_export.bundle.manifest import network_of
from dlm_export.graph import cuda, operators
from dlm_export.graph.quantise import Part
from dlm_export.graph.write import data_bytes
from dlm_runtime.precision import CUDA_BLOCK, FORMATS


@pytest.mark.parametrize(
    ("precision", "element"),
    [("fp16", onnx.TensorProto.FLOAT16), ("bf16", onnx.TensorProto.BFLOAT16)],
)
def test_the_graph_for_the_device_computes_in_its_precision_by_operators_with_kernels(
    precision: str, element: int
) -> None:
    folder = gpu_bundle(precision, "cuda")
    graph = onnx.load(folder / "device.onnx", load_external_data=False)
    assert {node.op_type for node in graph.graph.node} <= cuda.KERNELS
    assert not graph.functions
    assert [(opset.domain, opset.version) for opset in graph.opset_import] == [("", 23)]
    weights = [value for value in graph.graph.initializer if value.name.endswith(".weight")]
    assert {value.data_type for value in weights} == {element}
    manifest = read_manifest(folder)
    assert manifest["targets"] == ["cuda"]
    assert manifest["loop"]["graph"]["device_file"] == "device.onnx"
    assert "engines" not in manifest["loop"]


def test_nodes_that_only_compute_sizes_are_named_for_it(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "sdar", sdar_config(tie_word_embeddings=True))
    path = gpu_bundle("fp16", "cuda", source=checkpoint) / "device.onnx"
    graph = onnx.load(path, load_external_data=False).graph
    by_sizes = {node.name: node for node in graph.node if node.name.startswith("sizes/")}
    # The attention mask needs the numbers of cached and new tokens.
    assert {node.op_type for node in by_sizes.values()} >= {"Shape", "Squeeze", "Concat"}
    sizes = {name for node in by_sizes.values() for name in node.output}
    for node in by_sizes.values():
        constants = {value.name for value in graph.initializer}
        constants |= {one.output[0] for one in graph.node if one.op_type == "Constant"}
        assert node.op_type == "Shape" or set(node.input) <= sizes | constants
    kept = [node for node in graph.node if node.op_type == "Concat" and node.name not in by_sizes]
    assert kept, "keys and values are joined on the device"


QUANTISED = {"int8": (8, 32), "int4": (4, 32), "int4-g128": (4, 128)}
"""The bits and the block size of the layers in each precision."""


@pytest.mark.parametrize(
    ("precision", "activations"), [("int8", "fp16"), ("int4", None), ("int4-g128", "fp16")]
)
def test_weights_of_few_bits_are_multiplied_by_the_operator_that_has_kernels(
    precision: str, activations: str | None
) -> None:
    """By default, activations are in bf16, as the checkpoint is."""
    folder = gpu_bundle(precision, "cuda", activations=activations)
    graph = onnx.load(folder / "device.onnx", load_external_data=False).graph
    assert {node.op_type for node in graph.node} <= {*cuda.KERNELS, cuda.QUANTISED[1]}
    quantised = [node for node in graph.node if (node.domain, node.op_type) == cuda.QUANTISED]
    layers = read_manifest(folder)["precision"]["layers"]
    held = {name: format for name, format in layers.items() if format != "high"}
    assert len(quantised) == len(held)
    stored = {value.name: value for value in graph.initializer}
    for node in quantised:
        told = {attribute.name: attribute.i for attribute in node.attribute}
        asked = {"int8": "int8-weight", "int4": "int4-g32"}.get(precision, precision)
        if held[node.name.rsplit("/", 1)[0]] == asked:
            assert (told["bits"], told["block_size"]) == QUANTISED[precision]
        blocks, scales = (stored[name] for name in node.input[1:])
        count = -(-told["K"] // told["block_size"])
        assert tuple(blocks.dims) == (told["N"], count, told["block_size"] * told["bits"] // 8)
        element = {"fp16": onnx.TensorProto.FLOAT16, None: onnx.TensorProto.BFLOAT16}[activations]
        assert (tuple(scales.dims), scales.data_type) == ((told["N"], count), element)
    expected = data_bytes(network_of(read_manifest(folder)), activations or "bf16", held)
    assert 0.4 * expected < (folder / "denoiser.onnx.data").stat().st_size <= expected


def masked_model(config: dict[str, Any]) -> Path:
    """Build a masked language model in fp16. Its graph has operators that other graphs lack."""
    with tempfile.TemporaryDirectory() as folder:
        return gpu_bundle("fp16", "cuda", source=write_checkpoint(Path(folder) / "model", config))


@pytest.mark.parametrize(
    "made",
    [
        lambda: gpu_bundle("fp16", "cuda"),
        lambda: gpu_bundle("int4-g128", "cuda", activations="fp16"),
        lambda: masked_model(roberta_config()),
        pytest.param(lambda: masked_model(modern_bert_config()), marks=pytest.mark.slow),
    ],
    ids=["fp16", "int4-g128", "RoBERTa", "ModernBERT"],
)
def test_the_graph_for_the_device_gives_on_the_cpu_what_the_judged_one_gives(
    made: Callable[[], Path],
) -> None:
    folder = made()
    ports = read_manifest(folder)["loop"]["graph"]["ports"]
    generator = np.random.default_rng(0)
    batch, tokens, cached, rows = 2, 9, 5, 4
    feeds = {
        "input_ids": generator.integers(0, 150, (batch, tokens)),
        "position_ids": np.tile(np.arange(cached, cached + tokens), (batch, 1)),
        "score_rows": generator.integers(0, tokens, (batch, rows)),
    }
    for layer in ports["layers"]:
        shape = (batch, layer["kv_heads"], cached, layer["head_size"])
        feeds |= {
            layer[kind]: generator.normal(size=shape).astype(np.float16)
            for kind in ("past_key", "past_value")
        }
    names = ["top_token", "top_prob", "top_log_odds", "logits", "present_key.0"]
    judged, device = (
        onnxruntime.InferenceSession(folder / name, providers=["CPUExecutionProvider"]).run(
            names, feeds | more
        )
        for name, more in (("denoiser.onnx", {}), ("device.onnx", row_inputs(tokens, cached)))
    )
    # A tied head is a MatMul in the judged graph and a Gemm in the other, which round differently.
    tolerance = 2.0**-8 if network_of(read_manifest(folder)).tied_head else 0
    for name, one, other in zip(names, judged, device, strict=True):
        np.testing.assert_allclose(one, other, 0, tolerance * np.ptp(one), err_msg=name)


def test_a_bundle_for_cuda_opens_on_the_cpu_when_asked_to_and_not_by_itself() -> None:
    folder = gpu_bundle("fp16", "cuda")
    with pytest.raises(
        dlm_runtime.RequestError,
        match='Open it with provider "cuda", or run it on the CPU with engine "onnxruntime"',
    ):
        dlm_runtime.open(folder)
    with pytest.raises(dlm_runtime.EngineError, match="has no CUDAExecutionProvider"):
        dlm_runtime.open(folder, provider="cuda")
    with dlm_runtime.open(folder, engine="onnxruntime") as bundle:
        assert bundle.is_on_cpu
        assert len(bundle.generate(tokens=[5, 17, 9], max_new_tokens=8).tokens) == 11


@hypothesis.settings(max_examples=30)
@hypothesis.given(
    inputs=st.integers(1, 200),
    columns=st.integers(1, 40),
    size=st.sampled_from([None, 32, 64, 128]),
    seed=st.integers(0, 2**32 - 1),
)
def test_blocks_hold_every_code_where_the_operator_looks_for_it(
    inputs: int, columns: int, size: int | None, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    matrix = generator.normal(0, 1, (inputs, columns)).astype(np.float32)
    weight = quantise_weight(matrix, "int8" if size is None else "int4", group_size=size)
    bits, length = operators.BITS[weight.format], size or CUDA_BLOCK
    read = part_of(weight, Part("layer", "blocks"))
    blocks = np.concatenate([read[(slice(i, i + 3),)] for i in range(0, columns, 3)])
    scales = np.asarray(part_of(weight, Part("layer", "block_scales")))
    x = generator.normal(0, 1, (3, inputs)).astype(np.float32)
    node = onnx.helper.make_node(
        "MatMulNBits",
        ["x", "b", "s"],
        ["y"],
        domain="com.microsoft",
        K=inputs,
        N=columns,
        bits=bits,
        block_size=length,
    )
    values = [
        onnx.numpy_helper.from_array(np.ascontiguousarray(array), name)
        for name, array in (("b", blocks), ("s", scales))
    ]
    shapes = {"x": [3, inputs], "y": [3, columns]}
    ports = [
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)
        for name, shape in shapes.items()
    ]
    imports = [onnx.helper.make_opsetid("", 23), onnx.helper.make_opsetid("com.microsoft", 1)]
    graph = onnx.helper.make_graph([node], "product", ports[:1], ports[1:], values)
    model = onnx.helper.make_model(graph, opset_imports=imports, ir_version=10).SerializeToString()
    (y,) = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"]).run(
        None, {"x": x}
    )
    np.testing.assert_allclose(y, x @ weight.dequantise(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("precision", ["fp16", "int4"])
def test_a_build_is_judged_by_the_operators_that_the_device_runs(
    precision: str, tmp_path: Path
) -> None:
    out = tmp_path / "bundle"
    few = ("--judged", "4", "--calib-samples", "4", "--calib-states", "2")
    is_quantised = precision == "int4"
    options = ("--precision", precision, *(few if is_quantised else ()), "-o", out)
    result = dlm_export("build", tiny(), "--target", "cuda", *options)
    assert result.exit_code == 0, result.output
    assert "Parity with our torch denoiser holds" in result.stdout
    assert "No engine for" not in result.stdout
    assert ("judgement" in json.loads((out / "accuracy.json").read_text())) == is_quantised
    graph = onnx.load(out / "denoiser.onnx", load_external_data=False).graph
    held = read_manifest(out)["precision"].get("layers", {}).values()
    products = [node for node in graph.node if node.op_type == "MatMulNBits"]
    assert len(products) == sum(name != "high" for name in held)
    refused(dlm_export("engine", out, "--target", "cuda"), 2, ["target cuda needs no engine"])


def fast_products(graph: onnx.GraphProto, columns: int) -> str:
    """Count the products whose matrices have fast kernels, as ``inspect`` prints the count."""
    products = [node for node in graph.node if node.op_type == "MatMulNBits"]
    sizes = [{one.name: one.i for one in node.attribute} for node in products]
    fast = sum(size["K"] % 32 == 0 and size["N"] % columns == 0 for size in sizes)
    return f"fast kernels on CUDA: {fast} of {len(products)} quantised layers"


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (
            ("--precision", "fp8"),
            2,
            "CUDA provider has no kernel for operators of its graph): it runs fp16, bf16",
        ),
        (("--precision", "fp16", "--canvas", "64"), 2, "is for engines; --target is cuda"),
    ],
)
def test_what_the_provider_has_no_kernel_for_is_refused(
    tmp_path: Path, options: tuple[str, ...], code: int, says: str
) -> None:
    result = dlm_export("build", tiny(), "--target", "cuda", *options, "-o", tmp_path / "bundle")
    refused(result, code, [says])
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize("precision", ["int4", "int8"])
def test_a_tied_table_is_stored_once_and_looked_up_in_the_format_of_the_head(
    precision: str, tmp_path: Path
) -> None:
    checkpoint = write_checkpoint(tmp_path / "tied", sdar_config(tie_word_embeddings=True))
    out = tmp_path / "bundle"
    options = ("--precision", precision, "--calib-samples", "2", "--calib-states", "2")
    result = dlm_export("build", checkpoint, "--target", "cuda", *options, "-o", out)
    assert result.exit_code == 0, result.output
    assert "160 outputs, not a multiple of 64" in result.output or precision == "int8"
    assert "Parity with our torch denoiser holds" in result.stdout
    graph = onnx.load(out / "device.onnx", load_external_data=False).graph
    users = [node.op_type for node in graph.node if "head.weight.blocks" in node.input]
    assert sorted(users) == ["Gather", "MatMulNBits"]
    assert not {"embed.weight", "head.weight"} & {value.name for value in graph.initializer}
    told = dlm_export("inspect", out).stdout
    assert fast_products(graph, 64 if precision == "int4" else 32) in told


@pytest.mark.parametrize(
    ("name", "vocabulary", "widths"),
    [
        ("LLaDA-8B", 126464, (4096, 12288)),
        ("Dream-7B", 152064, (3584, 18944, 512)),
        ("SDAR-1.7B", 151936, (2048, 6144, 1024)),
        ("Fast-dLLM v2 7B", 152064, (3584, 18944, 512)),
        ("Fast-dLLM v2 1.5B", 151936, (1536, 8960, 256)),
    ],
)
@pytest.mark.parametrize("format", ["int4-g32", "int8-weight"])
def test_all_matrices_of_released_sizes_have_fast_kernels(
    name: str, vocabulary: int, widths: tuple[int, ...], format: str
) -> None:
    hidden = widths[0]
    shapes = [(hidden, vocabulary), *((hidden, w) for w in widths), *((w, hidden) for w in widths)]
    assert [FORMATS[format].slow_on_cuda(*shape) for shape in shapes] == [None] * len(shapes), name
    assert FORMATS["int4-g64"].slow_on_cuda(hidden, hidden) == "groups of 64 weights, not of 32"
