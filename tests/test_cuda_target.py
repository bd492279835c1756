"""Bundles for any NVIDIA GPU through ONNX Runtime: what their graphs hold, what the CPU makes of them, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from engine_bundles import DEMO, dlm_export, gpu_bundle, read_manifest, refused

import dlm_runtime
from dlm_export.graph import cuda
from dlm_export.graph.trace import Graph, trace_pass
from dlm_export.sources import open_source
from dlm_export.targets import TargetError, find, find_all


@pytest.mark.parametrize(("precision", "element"), [("fp16", onnx.TensorProto.FLOAT16), ("bf16", onnx.TensorProto.BFLOAT16)])
def test_the_graph_for_the_device_computes_in_its_precision_by_operators_with_kernels(precision: str, element: int) -> None:
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


def test_the_graph_for_the_device_gives_on_the_cpu_what_the_judged_one_gives() -> None:
    folder = gpu_bundle("fp16", "cuda")
    ports = read_manifest(folder)["loop"]["graph"]["ports"]
    generator = np.random.default_rng(0)
    batch, tokens, cached, rows = 2, 9, 5, 4
    feeds = {
        "input_ids": generator.integers(0, 256, (batch, tokens)),
        "position_ids": np.tile(np.arange(cached, cached + tokens), (batch, 1)),
        "score_rows": generator.integers(0, tokens, (batch, rows)),
    }
    for layer in ports["layers"]:
        shape = (batch, layer["kv_heads"], cached, layer["head_size"])
        feeds |= {layer[kind]: generator.normal(size=shape).astype(np.float16) for kind in ("past_key", "past_value")}
    names = ["top_token", "top_prob", "logits", "present_key.0"]
    judged, device = (
        onnxruntime.InferenceSession(folder / name, providers=["CPUExecutionProvider"]).run(names, feeds)
        for name in ("denoiser.onnx", "device.onnx")
    )
    for name, one, other in zip(names, judged, device, strict=True):
        np.testing.assert_array_equal(one, other, err_msg=name)


def test_a_bundle_for_cuda_opens_on_the_cpu_when_asked_to_and_not_by_itself() -> None:
    folder = gpu_bundle("fp16", "cuda")
    with pytest.raises(dlm_runtime.RequestError, match='Open it with provider "cuda", or open it with engine "onnxruntime"'):
        dlm_runtime.open(folder)
    with pytest.raises(dlm_runtime.EngineError, match="has no CUDAExecutionProvider"):
        dlm_runtime.open(folder, provider="cuda")
    with dlm_runtime.open(folder, engine="onnxruntime") as bundle:
        assert bundle.is_on_cpu
        assert len(bundle.generate(tokens=[5, 17, 9], max_new_tokens=8).tokens) == 11


def test_a_build_proves_parity_and_leaves_nothing_to_be_built(tmp_path: Path) -> None:
    out = tmp_path / "bundle"
    result = dlm_export("build", DEMO, "--target", "cuda", "--precision", "fp16", "-o", out)
    assert result.exit_code == 0, result.output
    assert "Parity with our torch denoiser holds" in result.stdout
    assert "No engine for" not in result.stdout
    assert json.loads((out / "accuracy.json").read_text())["parity"]["precision"] == "fp16"
    refused(dlm_export("engine", out, "--target", "cuda"), 2, ["target cuda needs no engine"])


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (("--precision", "int8"), 2, "CUDA provider has no kernel for what its graph is written in): it runs fp16, bf16 and"),
        (("--precision", "nvfp4"), 2, "target cuda does not run nvfp4"),
        (("--precision", "auto"), 2, "target cuda does not run 'auto'"),
        (("--precision", "stored"), 2, "target cuda does not run 'stored'"),
        (("--precision", "fp32"), 2, "target cuda does not run 'fp32': it runs fp16, bf16"),
        (("--precision", "fp16", "--canvas", "64"), 2, "is for engines; --target is cuda"),
    ],
)
def test_what_the_provider_has_no_kernel_for_is_refused(tmp_path: Path, options: tuple[str, ...], code: int, says: str) -> None:
    result = dlm_export("build", DEMO, "--target", "cuda", *options, "-o", tmp_path / "bundle")
    refused(result, code, [says])
    assert not (tmp_path / "bundle").exists()


def test_cuda_is_a_target_of_its_own() -> None:
    for names in (["cuda", "cpu"], ["cuda", "rtx4090"]):
        with pytest.raises(TargetError, match="a bundle is for cpu, for cuda, or for GPUs by name; build two"):
            find_all(names)
    assert (find("cuda").is_gpu, find("cuda").sm, find("cpu").is_gpu) == (True, None, False)
    refused(dlm_export("plan", DEMO, "--targets", "cuda"), 2, ["target cuda is any GPU, of which nothing is known"])


def test_an_operator_without_a_kernel_is_refused_by_name() -> None:
    traced: Graph = trace_pass(open_source(DEMO, None).network, "fp16")
    cuda.check_operators(traced)
    nodes = traced.model.graph
    for op_type, domain in (("BitShift", ""), ("BitShift", ""), ("Int4Linear", "dlm_export")):
        nodes.append(ir.node(op_type, [nodes.inputs[0]], domain=domain))
    with pytest.raises(TargetError, match=r"no kernel for 2 BitShift, 1 dlm_export\.Int4Linear of this denoiser's graph"):
        cuda.check_operators(traced)
