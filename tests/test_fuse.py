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
Edit = Callable[[trace.Graph], None]


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


@pytest.mark.parametrize(
    ("family", "precision"),
    [("dream", "fp32"), ("dream", "int8"), ("dream", "int4-rtn"), ("a2d", "fp32")],
)
def test_a_graph_computes_the_same_fused(built: Build, family: str, precision: str) -> None:
    before, after = (_load(built(family, precision, is_fused)) for is_fused in (False, True))
    # ONNX Runtime replaces each call by the operators of its function. The two graphs therefore
    # only differ in the order in which numbers are added. The tolerance is for fp32 logits around
    # 10.
    _check_same(_in_onnxruntime(before), _in_onnxruntime(after), 2e-5)
    _check_same(_in_reference(before), _in_reference(after), 0)


def test_every_layer_of_a_graph_is_fused(built: Build) -> None:
    layers = 2
    # There is one norm before the MLP, and one before the next layer or the head.
    alike = {"CachedAttention": layers, "AddNorm": 2 * layers, "Candidates": 1}
    assert _calls(_load(built("dream", "fp32", True))) == {**alike, "Sigmoid": layers}
    assert _calls(_load(built("dream", "int8", True))) == {
        **alike,
        "Int8Linear3": layers,  # q, k and v together
        "Int8GatedLinear": layers,
        "Int8Linear": 2 * layers + 1,  # each layer's attention output and MLP output, and the head
    }
    assert _calls(_load(built("dream", "int4-rtn", True))) == {
        **alike,
        "Int4Linear3": layers,
        "Int4GatedLinear": layers,
        "Int4Linear": 2 * layers,
        "Int8Linear": 1,  # the output head
    }
    assert _calls(_load(built("dream", "int8", False))) == {
        "Attention": layers,
        "RotaryEmbedding": 2 * layers,
        "Sigmoid": layers,
        "Softmax": 1,
        "TopK": 1,
        "Int8Linear": 7 * layers + 1,
    }
    normed = _load(built("a2d", "fp32", True))
    assert _calls(normed)["NormedCachedAttention"] == a2d_qwen3_config()["num_hidden_layers"]
    # Only the first norm of the network is not fused.
    assert [node.op_type for node in normed.graph.node].count("RMSNormalization") == 1


# ---- Graphs with an unexpected form ----


def _nodes(traced: trace.Graph, op_type: str) -> list[ir.Node]:
    return [node for node in traced.model.graph if node.op_type == op_type]


def see_a_gate(traced: trace.Graph) -> None:
    sigmoid = _nodes(traced, "Sigmoid")[0]
    seen = ir.node("Relu", sigmoid.inputs).outputs[0]
    seen.name, seen.type = "seen", ir.TensorType(ir.DataType.FLOAT)
    seen.shape = ir.Shape(["B", "T", 96])
    traced.model.graph.insert_after(sigmoid, seen.producer())
    traced.model.graph.outputs.append(seen)


def square_a_gate(traced: trace.Graph) -> None:
    """SiLU's output is multiplied by itself, and no node uses the output of ``up``."""
    silu = next(node for node, _ in _nodes(traced, "Sigmoid")[0].outputs[0].uses())
    product = next(node for node, _ in silu.outputs[0].uses())
    up = next(i for i, value in enumerate(product.inputs) if value is not silu.outputs[0])
    product.replace_input_with(up, silu.outputs[0])


def mask_attention(traced: trace.Graph) -> None:
    attention = _nodes(traced, "Attention")[0]
    rows = np.tile(np.where(np.arange(12) == 3, -np.inf, 0).astype(np.float32), (7, 1))
    mask = ir.Value(name="mask", const_value=ir.tensor(rows))
    traced.model.graph.initializers["mask"] = mask
    attention.resize_inputs(4)
    attention.replace_input_with(3, mask)


def change_input(
    traced: trace.Graph, node: ir.Node, index: int, op_type: str, operand: np.generic | np.ndarray
) -> None:
    """Compute an input of a node from the input and a constant."""
    constant = ir.node("Constant", [], {"value": ir.tensor(operand)})
    props = dict(node.metadata_props)
    moved = ir.node(op_type, [node.inputs[index], constant.outputs[0]], metadata_props=props)
    traced.model.graph.insert_before(node, [constant, moved])
    node.replace_input_with(index, moved.outputs[0])


def turn_queries_by_other_positions(traced: trace.Graph) -> None:
    change_input(traced, _nodes(traced, "RotaryEmbedding")[0], 3, "Add", np.int64(1))


def add_a_bias_before_a_norm(traced: trace.Graph) -> None:
    change_input(traced, _nodes(traced, "RMSNormalization")[0], 0, "Add", np.ones(64, np.float32))


def sharpen_candidates(traced: trace.Graph) -> None:
    masked = _nodes(traced, "TopK")[0].inputs[0]
    assert masked is not None
    add = masked.producer()
    assert add is not None
    change_input(traced, add, 0, "Mul", np.float32(2))


def setting(op_type: str, count: int, name: str, value: float) -> Edit:
    """Set an attribute of the first nodes of a type. RMSNormalization is that of the queries."""

    def change(traced: trace.Graph) -> None:
        nodes = _nodes(traced, op_type)
        if op_type == "RMSNormalization":
            nodes = [node for node in nodes if ".q_norm" in node.metadata_props[LAYER_KEY]]
        kind = ir.AttributeType.INT if isinstance(value, int) else ir.AttributeType.FLOAT
        for node in nodes[:count]:
            node.attributes[name] = ir.Attr(name, kind, value)

    return change


GATE = {"blocks.0.mlp": "gate and up are not used for silu(gate) * up"}
KEPT = {"Attention": 1, "CachedAttention": 1}
NORMED = {"Attention": 1, "NormedCachedAttention": a2d_qwen3_config()["num_hidden_layers"] - 1}
FORMS: dict[str, tuple[str, str, Edit, dict[str, str], dict[str, int]]] = {
    "a gate that others see": (
        *("llada", "int8", see_a_gate, GATE),
        {"Int8GatedLinear": 1, "Int8Linear2": 1, "Sigmoid": 1},
    ),
    "gate times gate": ("llada", "int8", square_a_gate, GATE, {"Int8GatedLinear": 1}),
    "mask": ("llada", "fp32", mask_attention, {"blocks.0.attention": "the mask"}, KEPT),
    "positions": (
        *("llada", "fp32", turn_queries_by_other_positions),
        {"blocks.0.attention": "queries and keys are rotated by different positions"},
        KEPT,
    ),
    "scale": (
        *("llada", "fp32", setting("Attention", 1, "scale", 0.5)),
        {"blocks.0.attention": "Attention with scale = 0.5"},
        KEPT,
    ),
    "interleaved": (
        *("llada", "fp32", setting("RotaryEmbedding", 2, "interleaved", 1)),
        {"blocks.0.attention": "RotaryEmbedding with interleaved = 1"},
        KEPT,
    ),
    "epsilon": (
        *("a2d", "fp32", setting("RMSNormalization", 1, "epsilon", 0.5)),
        {"blocks.0.attention": "the norms of queries and keys differ in epsilon"},
        NORMED,
    ),
    "axis": (
        *("a2d", "fp32", setting("RMSNormalization", 1, "axis", 3)),
        {"blocks.0.attention": "heads are not cut from one product"},
        NORMED,
    ),
    "bias": ("llada", "fp32", add_a_bias_before_a_norm, {}, {"AddNorm": 4}),
    "candidates": (
        *("llada", "fp32", sharpen_candidates),
        {"pass": "candidates do not come from the returned logits"},
        {"Candidates": 0},
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_part_of_another_form_keeps_its_operators(
    built: Build, llada_checkpoint: Path, name: str
) -> None:
    """The fused graph computes the same as the edited graph, and the reason is reported."""
    family, precision, edit, plain, counts = FORMS[name]
    bundle = built(family, precision, False)
    checkpoint = llada_checkpoint if family == "llada" else bundle.parent / "checkpoint"
    traced = trace.Graph(ir.from_proto(_load(bundle)), _network(checkpoint), torch.float32)
    edit(traced)
    before = ir.to_proto(traced.model)
    fused = fuse.fuse(traced)
    after = ir.to_proto(traced.model)
    _check_same(_in_onnxruntime(before), _in_onnxruntime(after), 2e-5)
    assert fused.plain.keys() == plain.keys()
    assert all(reason.startswith(plain[path]) for path, reason in fused.plain.items())
    calls = _calls(after)
    assert fused.calls == {key: count for key, count in calls.items() if key in operators.KERNELS}
    assert {key: calls[key] for key in counts} == counts
    assert fused.has_segments == (calls["Attention"] == 0)


def test_queries_and_keys_that_turn_by_different_parts_stay(llada_checkpoint: Path) -> None:
    traced = trace_once(_network(llada_checkpoint), "fp32")
    setting("RotaryEmbedding", 1, "rotary_embedding_dim", 8)(traced)
    fused = fuse.fuse(traced)
    assert fused.plain == {
        "blocks.0.attention": "queries and keys are rotated by different positions or tables"
    }
    assert fused.calls == {"CachedAttention": 1, "AddNorm": 4, "Candidates": 1}


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
    llada_checkpoint: Path, llada_bundle: Path, tmp_path: Path
) -> None:
    bundle, run = tmp_path / "bundle", CliRunner().invoke
    options = ["-o", str(bundle), "--precision", "fp16", "--no-verify"]
    told = run(main, ["build", str(llada_checkpoint), *options])
    words = "Native kernels: 1 Candidates\nPlain operators: 2 blocks.N.attention (the kernel computes in fp32)\n"
    assert words in told.output
    assert words in run(main, ["inspect", str(bundle)]).output
    for path, calls, plain in (
        (bundle, {"Candidates": 1}, {0, 1}),
        (llada_bundle, {"CachedAttention": 2, "AddNorm": 4, "Candidates": 1}, set()),
    ):
        reasons = {f"blocks.{i}.attention": "the kernel computes in fp32" for i in plain}
        found = json.loads(run(main, ["inspect", str(path), "--json"]).output)["kernels"]
        assert found == {"calls": calls, "plain": reasons}
        made = _calls(_load(path))
        assert (made["Attention"], made["RotaryEmbedding"]) == (len(plain), 2 * len(plain))
        assert {name: made[name] for name in calls} == calls
