"""Tests of mixtures of experts for the target ``cuda``: ONNX Runtime's operators MoE and QMoE."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from checkpoints import (
    diffusion_gemma_config,
    llada2_config,
    llada_moe_config,
    qwen3_moe_config,
    write_checkpoint,
)
from engine_bundles import SMALL, dlm_export
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_cases import slow_except

import dlm_runtime
from dlm_calibration.precision_rounding import FP32, quantise_weight
from dlm_calibration.precisions import FORMATS, HIGH
from dlm_export.build import BuildOptions, BuildReport, QuantiseOptions, build
from dlm_export.graph import LAYER_KEY, cuda_experts
from dlm_export.graph.body import DOMAIN
from dlm_export.graph.edits import initialiser
from dlm_export.graph.experts import StackPart
from dlm_export.graph.routed import MIXTURE
from dlm_export.graph.trace import Graph
from dlm_export.judging.accuracy.effort import Effort
from dlm_export.judging.parity.canvases import make_canvases, random_prompts
from dlm_export.judging.parity.verdict import TOLERANCES, ParityError, Tolerance
from dlm_export.network.experts import RoutedMLPs
from dlm_export.network.spec import ExpertsSpec, NetworkSpec
from dlm_export.sources import open_source

PATH = "blocks.0.mlp.experts"
CONFIGS: dict[str, Callable[[], dict[str, Any]]] = {
    "llada-moe": llada_moe_config,
    "llada2": llada2_config,
    "sdar-moe": lambda: qwen3_moe_config("SDARMoeForCausalLM", block_size=4),
    "rnd1": lambda: qwen3_moe_config("RND1LM"),
}


NETWORK: list[NetworkSpec] = []


def network_with(hidden: int, mlp: ExpertsSpec) -> NetworkSpec:
    """The description of a network with one layer, whose MLP is ``mlp``."""
    if not NETWORK:
        with tempfile.TemporaryDirectory() as folder:
            NETWORK.append(
                open_source(write_checkpoint(Path(folder) / "x", llada_moe_config())).network
            )
    layers = (replace(NETWORK[0].layers[0], mlp=mlp),)
    return replace(NETWORK[0], hidden_size=hidden, layers=layers)


def as_model(
    network: NetworkSpec, name: str, contents: Callable[[StackPart], np.ndarray]
) -> onnx.ModelProto:
    """Make a graph of the layer's mixture for ``cuda``, with experts in the format ``name``."""
    spec = network.layers[0].mlp
    assert isinstance(spec, ExpertsSpec)
    kinds = {"x": "FLOAT", "chosen": "INT64", "weights": "FLOAT"}
    last = {"x": network.hidden_size, "chosen": spec.active, "weights": spec.active}
    inputs = [
        ir.Value(
            name=kind,
            shape=ir.Shape(["B", "T", last[kind]]),
            type=ir.TensorType(ir.DataType[kinds[kind]]),
        )
        for kind in kinds
    ]
    graph = ir.Graph(inputs, [], nodes=[], opset_imports={"": 23, DOMAIN: 1}, name="mixture")
    (stacks,) = network.mixtures()
    held = [initialiser(graph, each.weight, each.shape, ir.DataType.FLOAT) for each in stacks]
    node = ir.node(MIXTURE, [*inputs, *held], domain=DOMAIN, metadata_props={LAYER_KEY: PATH})
    node.outputs[0].name = "y"
    node.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    graph.append(node)
    graph.outputs.append(node.outputs[0])
    model = ir.Model(graph, ir_version=10)
    formats = {each.path: name for each in stacks}
    parts = cuda_experts.replace_mixtures(Graph(model, network, torch.float32), formats)
    for of, part in parts.items():
        array = contents(part)
        assert array.shape == part.shape, of
        graph.initializers[of].const_value = ir.tensor(array, name=of)
    return ir.to_proto(model)


@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from([HIGH, "int8-weight", "int4-g32", "int4-g64"]),
    count=st.integers(2, 12),
    sizes=st.tuples(st.sampled_from([64, 128]), st.sampled_from([64, 192])),
    tokens=st.tuples(st.integers(1, 2), st.integers(1, 9)),
    power=st.integers(-6, 6),
    seed=st.integers(0, 2**32 - 1),
    data=st.data(),
)
def test_the_operators_compute_the_chosen_experts(
    name: str,
    count: int,
    sizes: tuple[int, int],
    tokens: tuple[int, int],
    power: int,
    seed: int,
    data: st.DataObject,
) -> None:
    hidden, size = sizes
    active = data.draw(st.integers(1, count))
    spec = ExpertsSpec(count, active, size)
    network = network_with(hidden, spec)
    assert network.suits_moe
    random, chosen = np.random.default_rng(seed), FORMATS[name]
    module = RoutedMLPs(spec, hidden)
    quantised = {}
    for role in ("gate", "up", "down"):
        stack = getattr(module, role)
        matrices = random.normal(0, 0.1, (count, stack.inputs, stack.outputs)).astype(FP32)
        if chosen.weights is not None:
            quantised[role] = [
                quantise_weight(matrix, chosen.weights, group_size=chosen.group_size)
                for matrix in matrices
            ]
            matrices = np.stack([each.dequantise() for each in quantised[role]])
        stack.weight = torch.nn.Parameter(torch.from_numpy(matrices), requires_grad=False)

    def contents(part: StackPart) -> np.ndarray:
        roles = [layer.rpartition(".")[2] for layer in cuda_experts.layers_of(part)]
        if chosen.weights is None:
            every = [
                [getattr(module, role).matrix(i).numpy() for role in roles] for i in range(count)
            ]
            return np.stack([cuda_experts.rows_of(each) for each in every])
        read = cuda_experts.scales_of if part.part.endswith("_scales") else cuda_experts.codes_of
        return np.stack([read([quantised[role][i] for role in roles]) for i in range(count)])

    model = as_model(network, name, contents)
    assert {node.op_type for node in model.graph.node} & {"MoE", "QMoE"} == {
        "MoE" if name == HIGH else "QMoE"
    }
    x = random.normal(0, 1, (*tokens, hidden)).astype(FP32)
    routes = random.permuted(np.tile(np.arange(count), (*tokens, 1)), axis=-1)[..., :active]
    weights = (2.0**power * random.uniform(0, 1, routes.shape) ** 6).astype(FP32)
    weights[..., : active // 3] = 0
    weights[0, 0] = 0  # a token whose experts all have the weight 0
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    (y,) = session.run(None, {"x": x, "chosen": routes, "weights": weights})
    wanted = module(*map(torch.from_numpy, (x, routes, weights))).numpy()
    np.testing.assert_allclose(y, wanted, rtol=0, atol=2e-5 * max(1e-9, np.abs(wanted).max()))


OPERATORS = {"fp16": "MoE", "bf16": "MoE", "int8": "QMoE", "int4": "QMoE"}
"""The operator for experts in each precision."""


@pytest.mark.parametrize(
    ("family", "precision"),
    slow_except(
        [("llada2", "fp16"), ("llada2", "int4"), ("sdar-moe", "int8")],
        [(family, precision) for family in CONFIGS for precision in OPERATORS],
    ),
)
def test_bundles_equal_torch_layer_by_layer(family: str, precision: str, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", CONFIGS[family](), seed=7)
    full = precision in ("fp16", "bf16")
    few = () if full else ("--judged", "2", "--calib-samples", "4", "--calib-states", "2")
    if precision == "int4":
        few += ("--activations", "bf16")
    out = tmp_path / "bundle"
    options = ("--target", "cuda", "--precision", precision, *few, "-o", out)
    result = dlm_export("build", checkpoint, *options)
    assert result.exit_code == 0, result.output
    assert "Parity with our torch denoiser holds" in result.stdout
    for file in ("denoiser.onnx", "device.onnx"):
        graph = onnx.load(out / file, load_external_data=False).graph
        found = {node.op_type for node in graph.node}
        assert OPERATORS[precision] in found, file
        assert not any(".experts.gate" in node.name for node in graph.node), "joined matrices"
    if full:
        with dlm_runtime.open(out, engine="onnxruntime") as bundle:
            assert len(bundle.generate(tokens=[5, 17, 9], max_new_tokens=8).tokens) == 11
    else:
        element = onnx.TensorProto.BFLOAT16 if precision == "int4" else onnx.TensorProto.FLOAT16
        (scales, *_) = (one for one in graph.initializer if one.name.endswith("fc1_scales"))
        assert scales.data_type == element
        told = dlm_export("inspect", out).stdout
        assert "fast kernels on CUDA" in told
        assert "a pass computes the chosen experts of a layer" in told


@pytest.fixture(scope="module")
def in_fp32(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray]:
    """A checkpoint of LLaDA2, and the logits of its bundle for CPUs in fp32."""
    folder = tmp_path_factory.mktemp("experts")
    checkpoint = write_checkpoint(folder / "checkpoint", llada2_config(), seed=7)
    return checkpoint, logits_of(built(checkpoint, folder / "bundle", "cpu", "fp32"))


def built(checkpoint: Path, output: Path, target: str, precision: str) -> BuildReport:
    """Build a bundle. Bundles in full precision are compared with torch in other tests."""
    is_full = precision in ("fp32", "fp16")
    changes = {} if is_full else {"solver": "nearest"}
    quantise = QuantiseOptions(effort=Effort("none"), recipe_changes=changes)
    options = BuildOptions((target,), precision, check_parity=not is_full, quantise=quantise)
    return build(checkpoint, output, options)


def logits_of(report: BuildReport) -> np.ndarray:
    """The bundle's logits on canvases that no other part of the build or of its checks used."""
    canvases = make_canvases(report.network, random_prompts(report.network, 1, 99), 99)
    with dlm_runtime.open(report.output, engine="onnxruntime") as bundle:
        return np.stack([bundle.logits(canvas.tokens.tolist()) for canvas in canvases])


def test_logits_in_fp16_equal_those_of_the_bundle_for_cpus(
    in_fp32: tuple[Path, np.ndarray], tmp_path: Path
) -> None:
    checkpoint, exact = in_fp32
    logits = logits_of(built(checkpoint, tmp_path / "bundle", "cuda", "fp16"))
    # Found: 1.7e-4. Single tokens differ by up to 9e-2, because two experts have almost equal scores
    # and fp16 chooses the other one.
    assert np.abs(logits - exact).mean() < 5e-4 * np.ptp(exact)
    assert (logits.argmax(-1) == exact.argmax(-1)).mean() > 0.98


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_quantised_logits_are_as_near_to_torch_as_those_of_the_bundle_for_cpus(
    precision: str, in_fp32: tuple[Path, np.ndarray], tmp_path: Path
) -> None:
    """Bundles for CPUs round activations to INT8, and bundles for ``cuda`` do not.

    So the two are not compared with each other. Each is compared with torch, which rounds the same
    weights and activations, and with the logits in fp32.
    """
    checkpoint, exact = in_fp32
    errors = {}
    # Found: 9.8e-3 and 7e-4 at most. A different choice between two experts may exceed this, so
    # three of the ten canvases may differ more.
    for target, limit in (("cpu", 2e-2), ("cuda", 2e-3)):
        report = built(checkpoint, tmp_path / target, target, precision)
        assert report.parity is not None
        assert sorted(row.relative for row in report.parity.graph)[6] < limit, target
        errors[target] = np.abs(logits_of(report) - exact).mean()
    assert errors["cuda"] < 1.1 * errors["cpu"]


def test_verify_says_that_only_the_layers_hold(
    in_fp32: tuple[Path, np.ndarray], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TOLERANCES, "fp16", Tolerance(1e-9, 1.0))
    built(in_fp32[0], tmp_path / "bundle", "cuda", "fp16")
    few = ("--count", "1", "--new-tokens", "4")
    result = dlm_export("verify", tmp_path / "bundle", "--checkpoint", in_fp32[0], *few)
    assert result.exit_code == 0, result.output
    assert "Holds at fp16, layer by layer: 1 mixture of experts" in result.stdout
    assert "Whole passes missed their limits" in result.stdout


def test_a_wrong_expert_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    joined = cuda_experts.codes_of
    monkeypatch.setattr(cuda_experts, "codes_of", lambda quantised: joined(quantised[::-1]))
    checkpoint = write_checkpoint(tmp_path / "checkpoint", llada2_config(), seed=7)
    options = BuildOptions(("cuda",), "int4", quantise=SMALL)
    with pytest.raises(ParityError, match=r"blocks\.1\.mlp\.experts \(int4-g32\)"):
        build(checkpoint, tmp_path / "bundle", options)


@pytest.mark.parametrize(
    ("config", "experts"),
    [
        (llada2_config(moe_intermediate_size=96), (16 * 96, 64)),
        (llada_moe_config(moe_router_enable_expert_bias=True), (8 * 64, 64)),
        (diffusion_gemma_config(), (8 * 64, 64)),
    ],
    ids=["96 features", "bias in the routing weights", "gelu"],
)
def test_experts_that_no_operator_can_compute_are_joined(
    config: dict[str, Any], experts: tuple[int, int], tmp_path: Path
) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", config)
    options = BuildOptions(
        ("cuda",), "int8", activations="fp16", check_parity=False, quantise=SMALL
    )
    report = build(checkpoint, tmp_path / "bundle", options)
    assert any("each pass computes all of them" in each for each in report.warnings)
    out = report.output
    graph = onnx.load(out / "device.onnx", load_external_data=False).graph
    shapes = {
        node.name: tuple(each.i for each in node.attribute if each.name in ("K", "N"))
        for node in graph.node
        if node.op_type == "MatMulNBits" and ".experts.down" in node.name
    }
    assert shapes
    assert set(shapes.values()) == {experts}
    assert not {node.op_type for node in graph.node} & {"MoE", "QMoE"}
    with dlm_runtime.open(out, engine="onnxruntime") as bundle:
        assert len(bundle.generate(tokens=[5, 17, 9], max_new_tokens=8).tokens) == 11
