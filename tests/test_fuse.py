"""Tests of ``fuse``, which replaces several operators of a graph by one call of this project's
operators.

A fused graph must compute the same numbers. Parts of a graph that ``fuse`` does not recognise must
stay unchanged.
"""

from __future__ import annotations

import functools
import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from checkpoints import a2d_qwen3_config, write_checkpoint
from click.testing import CliRunner
from engine_bundles import SMALL
from onnx.reference import ReferenceEvaluator
from reference_ops import GatherElements
from traces import trace_once

from dlm_export import families, graph
from dlm_export.build import BuildOptions, build
from dlm_export.checkpoints.folder import Checkpoint
from dlm_export.cli import main
from dlm_export.families.base import Overrides
from dlm_export.graph import LAYER_KEY, fuse, operators, quantise, trace
from dlm_export.graph.body import DOMAIN
from dlm_export.network.spec import NetworkSpec

Build = Callable[[str, str, bool], Path]


@pytest.fixture(scope="module")
def built(llada_checkpoint: Path, dream_checkpoint: Path) -> Iterator[Build]:
    """A function that builds the bundle of a family in a precision, with or without fusing.

    Each bundle is built once, and tests must not change it.
    """
    with tempfile.TemporaryDirectory() as folder:
        normed = write_checkpoint(Path(folder) / "checkpoint", a2d_qwen3_config(), seed=7)
        checkpoints = {"llada": llada_checkpoint, "dream": dream_checkpoint, "a2d": normed}

        @functools.cache
        def make(family: str, precision: str, is_fused: bool) -> Path:
            output = Path(folder) / f"{family}-{precision}-{is_fused}"
            with pytest.MonkeyPatch.context() as patch:
                if not is_fused:
                    patch.setattr(fuse, "fuse", lambda *_: None)
                options = BuildOptions(precision=precision, check_parity=False, quantise=SMALL)
                build(checkpoints[family], output, options)
            return output

        yield make


def _network(checkpoint: Path) -> NetworkSpec:
    return families.read_network(Checkpoint(checkpoint), Overrides())


def _calls(model: onnx.ModelProto) -> Counter[str]:
    """Count, by operator type, the nodes of the domain ``dlm_export`` and the nodes that fusing
    replaces.
    """
    replaced = {"Attention", "RotaryEmbedding", "Softmax", "TopK", "Sigmoid"}
    return Counter(
        node.op_type
        for node in model.graph.node
        if node.domain == DOMAIN or node.op_type in replaced
    )


def _load(bundle: Path) -> onnx.ModelProto:
    return onnx.load(bundle / graph.GRAPH_FILE)


def _feeds(model: onnx.ModelProto, T: int = 7, S: int = 5, R: int = 3) -> dict[str, np.ndarray]:
    """Return the inputs of a pass over two canvases.

    The positions of the cached rows are in random order.
    """
    rng = np.random.default_rng(4)
    feeds = {
        "input_ids": rng.integers(0, 150, (2, T)),
        "position_ids": np.stack([rng.permutation(S + T)[:T] for _ in range(2)]),
        "score_rows": rng.integers(0, T, (2, R)),
    }
    for port in model.graph.input[3:]:
        if port.name == graph.SEGMENTS:  # this input is optional
            continue
        heads, size = (port.type.tensor_type.shape.dim[i].dim_value for i in (1, 3))
        feeds[port.name] = rng.standard_normal((2, heads, S, size)).astype(np.float32)
    return feeds


def _in_onnxruntime(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    names = [port.name for port in session.get_outputs()]
    return dict(zip(names, session.run(names, _feeds(model)), strict=True))


def _in_reference(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    names = [port.name for port in model.graph.output]
    evaluator = ReferenceEvaluator(model, new_ops=[GatherElements])
    return dict(zip(names, evaluator.run(names, _feeds(model)), strict=True))


def _check_same(
    before: dict[str, np.ndarray], after: dict[str, np.ndarray], tolerance: float
) -> None:
    assert list(before) == list(after)
    for name, value in before.items():
        assert value.dtype == after[name].dtype
        np.testing.assert_allclose(after[name], value, rtol=0, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("family", ["dream", "a2d"])
@pytest.mark.parametrize("precision", ["fp32", "int8", "int4-rtn"])
def test_a_graph_computes_the_same_fused(built: Build, family: str, precision: str) -> None:
    before, after = (_load(built(family, precision, is_fused)) for is_fused in (False, True))
    # ONNX Runtime replaces each call by the operators of its function. The two graphs therefore
    # only differ in the order in which numbers are added. The tolerance is for fp32 logits around
    # 10.
    _check_same(_in_onnxruntime(before), _in_onnxruntime(after), 2e-5)
    _check_same(_in_reference(before), _in_reference(after), 0)


@pytest.mark.parametrize("family", ["dream"])
def test_every_layer_of_a_graph_is_fused(built: Build, family: str) -> None:
    layers = 2
    assert _calls(_load(built(family, "fp32", True))) == {
        "CachedAttention": layers,
        "AddNorm": 2 * layers,  # one before the MLP, and one before the next layer or the head
        "Candidates": 1,
        "Sigmoid": layers,
    }
    assert _calls(_load(built(family, "int8", True))) == {
        "CachedAttention": layers,
        "AddNorm": 2 * layers,  # one before the MLP, and one before the next layer or the head
        "Candidates": 1,
        "Int8Linear3": layers,  # q, k and v together
        "Int8GatedLinear": layers,
        "Int8Linear": 2 * layers + 1,  # each layer's attention output and MLP output, and the head
    }
    assert _calls(_load(built(family, "int4-rtn", True))) == {
        "CachedAttention": layers,
        "AddNorm": 2 * layers,  # one before the MLP, and one before the next layer or the head
        "Candidates": 1,
        "Int4Linear3": layers,
        "Int4GatedLinear": layers,
        "Int4Linear": 2 * layers,
        "Int8Linear": 1,  # the output head
    }
    assert _calls(_load(built(family, "int8", False))) == {
        "Attention": layers,
        "RotaryEmbedding": 2 * layers,
        "Sigmoid": layers,
        "Softmax": 1,
        "TopK": 1,
        "Int8Linear": 7 * layers + 1,
    }


def test_attention_in_fp16_stays_as_it_is(llada_checkpoint: Path) -> None:
    traced = trace_once(_network(llada_checkpoint), "fp16")
    before = Counter(node.op_type for node in traced.model.graph)
    fused = fuse.fuse(traced)
    after = Counter(node.op_type for node in traced.model.graph)
    assert fused.plain == {f"blocks.{i}.attention": "the kernel computes in fp32" for i in range(2)}
    assert fused.calls == {"Candidates": 1}
    assert after["CachedAttention"] == 0
    assert after["Attention"] == before["Attention"] == 2
    assert after["RotaryEmbedding"] == before["RotaryEmbedding"] == 4
    assert after["Candidates"] == 1  # it reads the logits, which are fp32


# ---- Graphs with an unexpected form ----


def _unfused(bundle: Path, checkpoint: Path) -> trace.Graph:
    """Return the graph of a bundle as it is before ``fuse``, with its weights."""
    return trace.Graph(ir.from_proto(_load(bundle)), _network(checkpoint), torch.float32)


def _check_fused(traced: trace.Graph, **plain: str) -> Counter[str]:
    """Fuse a graph that the test has changed, and check the result.

    The fused graph must compute the same results as the changed graph. Returns how often the fused
    graph calls each function.

    ``plain`` lists the modules whose operators must not be fused. A key is the path of a module,
    with _ instead of each dot. The value is the start of the reason that ``fuse`` must report.
    """
    before = ir.to_proto(traced.model)
    fused = fuse.fuse(traced)
    after = ir.to_proto(traced.model)
    _check_same(_in_onnxruntime(before), _in_onnxruntime(after), 2e-5)
    calls = _calls(after)
    assert {layer.replace(".", "_") for layer in fused.plain} == plain.keys()
    for layer, reason in fused.plain.items():
        assert reason.startswith(plain[layer.replace(".", "_")])
    assert fused.calls == {
        name: count for name, count in calls.items() if name in operators.KERNELS
    }
    return calls


def _nodes(traced: trace.Graph, op_type: str) -> list[ir.Node]:
    return [node for node in traced.model.graph if node.op_type == op_type]


def test_a_gate_that_others_see_is_not_hidden(built: Build, llada_checkpoint: Path) -> None:
    traced = _unfused(built("llada", "int8", False), llada_checkpoint)
    sigmoid = _nodes(traced, "Sigmoid")[0]
    seen = ir.node("Relu", sigmoid.inputs).outputs[0]
    seen.name, seen.type, seen.shape = (
        "seen",
        ir.TensorType(ir.DataType.FLOAT),
        ir.Shape(["B", "T", 96]),
    )
    traced.model.graph.insert_after(sigmoid, seen.producer())
    traced.model.graph.outputs.append(seen)
    calls = _check_fused(traced, blocks_0_mlp="gate and up are not used for silu(gate) * up")
    assert (calls["Int8GatedLinear"], calls["Int8Linear2"], calls["Sigmoid"]) == (1, 1, 1)


def test_a_product_of_a_gate_and_something_else_is_not_taken_for_a_gated_layer(
    built: Build, llada_checkpoint: Path
) -> None:
    traced = _unfused(built("llada", "int8", False), llada_checkpoint)
    silu = next(node for node, _ in _nodes(traced, "Sigmoid")[0].outputs[0].uses())
    product = next(node for node, _ in silu.outputs[0].uses())
    up = next(i for i, value in enumerate(product.inputs) if value is not silu.outputs[0])
    # SiLU's output is now multiplied by itself, and no node uses the output of `up`.
    product.replace_input_with(up, silu.outputs[0])
    assert _check_fused(traced, blocks_0_mlp="gate and up are not used")["Int8GatedLinear"] == 1


def test_attention_with_a_mask_keeps_it(built: Build, llada_checkpoint: Path) -> None:
    traced = _unfused(built("llada", "fp32", False), llada_checkpoint)
    attention = _nodes(traced, "Attention")[0]
    mask = ir.Value(
        name="mask",
        const_value=ir.tensor(
            np.tile(np.where(np.arange(12) == 3, -np.inf, 0).astype(np.float32), (7, 1))
        ),
    )
    traced.model.graph.initializers["mask"] = mask
    attention.resize_inputs(4)
    attention.replace_input_with(3, mask)
    calls = _check_fused(traced, blocks_0_attention="the mask")
    assert (calls["Attention"], calls["CachedAttention"]) == (1, 1)


def test_attention_whose_queries_turn_by_other_positions_stays(
    built: Build, llada_checkpoint: Path
) -> None:
    traced = _unfused(built("llada", "fp32", False), llada_checkpoint)
    turned = _nodes(traced, "RotaryEmbedding")[0]
    positions = turned.inputs[3]
    assert positions is not None
    one = ir.node("Constant", [], {"value": ir.tensor(np.int64(1))})
    later = ir.node("Add", [positions, one.outputs[0]])
    traced.model.graph.insert_before(turned, [one, later])
    turned.replace_input_with(3, later.outputs[0])
    calls = _check_fused(
        traced, blocks_0_attention="queries and keys are rotated by different positions"
    )
    assert (calls["Attention"], calls["CachedAttention"]) == (1, 1)


@pytest.mark.parametrize(
    ("op_type", "name", "value"),
    [
        ("Attention", "scale", 0.5),
        ("RotaryEmbedding", "interleaved", 1),
    ],
)
def test_attention_with_a_setting_that_the_kernel_does_not_know_keeps_it(
    built: Build, llada_checkpoint: Path, op_type: str, name: str, value: float
) -> None:
    traced = _unfused(built("llada", "fp32", False), llada_checkpoint)
    for node in _nodes(traced, op_type)[: {"Attention": 1, "RotaryEmbedding": 2}[op_type]]:
        node.attributes[name] = ir.Attr(
            name, ir.AttributeType.INT if isinstance(value, int) else ir.AttributeType.FLOAT, value
        )
    calls = _check_fused(traced, blocks_0_attention=f"{op_type} with {name} = {value:g}")
    assert (calls["Attention"], calls["CachedAttention"]) == (1, 1)


def test_norms_of_queries_and_keys_go_into_attention(built: Build) -> None:
    model = _load(built("a2d", "fp32", True))
    calls = _calls(model)
    layers = a2d_qwen3_config()["num_hidden_layers"]
    assert (calls["NormedCachedAttention"], calls["AddNorm"]) == (layers, 2 * layers)
    # Only the first norm of the network is not fused.
    assert [node.op_type for node in model.graph.node].count("RMSNormalization") == 1


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("epsilon", 0.5, "the norms of queries and keys differ in epsilon"),
        ("axis", 3, "heads are not cut from one product"),
    ],
)
def test_heads_that_are_normed_in_another_way_keep_their_operators(
    built: Build, name: str, value: float, reason: str
) -> None:
    bundle = built("a2d", "fp32", False)
    checkpoint = bundle.parent / "checkpoint"
    traced = _unfused(bundle, checkpoint)
    norm = next(
        node
        for node in _nodes(traced, "RMSNormalization")
        if ".q_norm" in node.metadata_props[LAYER_KEY]
    )
    kind = ir.AttributeType.INT if isinstance(value, int) else ir.AttributeType.FLOAT
    norm.attributes[name] = ir.Attr(name, kind, value)
    calls = _check_fused(traced, blocks_0_attention=reason)
    layers = a2d_qwen3_config()["num_hidden_layers"]
    assert (calls["Attention"], calls["NormedCachedAttention"]) == (1, layers - 1)


def test_a_bias_before_a_norm_is_not_taken_for_a_sum(built: Build, llada_checkpoint: Path) -> None:
    traced = _unfused(built("llada", "fp32", False), llada_checkpoint)
    norm = _nodes(traced, "RMSNormalization")[0]
    bias = ir.node("Constant", [], {"value": ir.tensor(np.ones(64, np.float32))})
    moved = ir.node(
        "Add", [norm.inputs[0], bias.outputs[0]], metadata_props=dict(norm.metadata_props)
    )
    traced.model.graph.insert_before(norm, [bias, moved])
    norm.replace_input_with(0, moved.outputs[0])
    assert _check_fused(traced)["AddNorm"] == 4


def test_queries_and_keys_that_turn_by_different_parts_stay(llada_checkpoint: Path) -> None:
    traced = trace_once(_network(llada_checkpoint), "fp32")
    node = _nodes(traced, "RotaryEmbedding")[0]
    node.attributes["rotary_embedding_dim"] = ir.AttrInt64("rotary_embedding_dim", 8)
    fused = fuse.fuse(traced)
    assert fused.plain == {
        "blocks.0.attention": "queries and keys are rotated by different positions or tables"
    }
    assert fused.calls == {"CachedAttention": 1, "AddNorm": 4, "Candidates": 1}


def test_candidates_of_other_logits_than_those_returned_stay(
    built: Build, llada_checkpoint: Path
) -> None:
    traced = _unfused(built("llada", "fp32", False), llada_checkpoint)
    masked = _nodes(traced, "TopK")[0].inputs[0]
    assert masked is not None
    add = masked.producer()
    assert add is not None
    two = ir.node("Constant", [], {"value": ir.tensor(np.float32(2))})
    sharper = ir.node("Mul", [add.inputs[0], two.outputs[0]])
    traced.model.graph.insert_before(add, [two, sharper])
    add.replace_input_with(0, sharper.outputs[0])
    assert (
        _check_fused(traced, **{"pass": "candidates do not come from the returned logits"})[
            "Candidates"
        ]
        == 0
    )


def test_an_int8_layer_without_its_neighbours_is_named(llada_checkpoint: Path) -> None:
    traced = trace_once(_network(llada_checkpoint), "fp32")
    alone = ("blocks.0.attention.q", "blocks.1.mlp.up")
    formats = dict.fromkeys(
        (*alone, "blocks.0.mlp.gate", "blocks.0.mlp.up", "blocks.1.attention.out"), "int8-dynamic"
    )
    quantise.rewrite(traced, formats, {})
    fused = fuse.fuse(traced)
    assert fused.plain == dict.fromkeys(alone, "the only INT8 layer over its input")
    assert fused.calls == {
        "CachedAttention": 2,
        "AddNorm": 4,
        "Int8Linear": 3,
        "Int8GatedLinear": 1,
        "Candidates": 1,
    }


def test_layers_are_put_together_with_those_of_their_own_groups(llada_checkpoint: Path) -> None:
    traced = trace_once(_network(llada_checkpoint), "fp32")
    chosen = {"q": "int4-g32-dynamic", "k": "int4-g64-dynamic", "v": "int4-g32-dynamic"}
    quantise.rewrite(
        traced, {f"blocks.0.attention.{layer}": name for layer, name in chosen.items()}, {}
    )
    fused = fuse.fuse(traced)
    assert fused.plain == {"blocks.0.attention.k": "the only INT4 layer over its input"}
    assert fused.calls == {
        "CachedAttention": 2,
        "AddNorm": 4,
        "Int4Linear": 1,
        "Int4Linear2": 1,
        "Candidates": 1,
    }
    sizes = {
        node.op_type: node.attributes.get_int("group_size")
        for node in traced.model.graph
        if "Int4" in node.op_type
    }
    assert sizes == {"Int4Linear": 64, "Int4Linear2": 32}


def test_what_keeps_plain_operators_is_said_by_the_build_and_by_inspect(
    llada_checkpoint: Path, tmp_path: Path
) -> None:
    bundle, run = str(tmp_path / "bundle"), CliRunner().invoke
    options = ["-o", bundle, "--precision", "fp16", "--no-verify"]
    told = run(main, ["build", str(llada_checkpoint), *options])
    words = "Native kernels: 1 Candidates\nPlain operators: 2 blocks.N.attention (the kernel computes in fp32)\n"
    assert words in told.output
    assert words in run(main, ["inspect", bundle]).output
    kernels = {
        "calls": {"Candidates": 1},
        "plain": {f"blocks.{i}.attention": "the kernel computes in fp32" for i in range(2)},
    }
    assert json.loads(run(main, ["inspect", bundle, "--json"]).output)["kernels"] == kernels
    report = build(llada_checkpoint, tmp_path / "fp32", BuildOptions(check_parity=False))
    assert report.as_dict()["kernels"] == {
        "calls": {"CachedAttention": 2, "AddNorm": 4, "Candidates": 1},
        "plain": {},
    }
