"""Tests of ``repeat``, which makes a graph from one traced layer of each kind.

``repeat`` copies the traced layers for all other layers. The graph must equal a graph for which
torch traced all layers.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import replace
from typing import Any

import onnx_ir as ir
import pytest
from networks import make_network
from traces import trace_once

from dlm_export.graph import LAYER_KEY, faster_tracing, repeat
from dlm_export.graph.trace import Graph, trace_pass
from dlm_export.network.spec import (
    AttentionSpec,
    ExpertsSpec,
    LayerSpec,
    MlpSpec,
    NetworkSpec,
    Rope,
    RouterSpec,
)


def mixed() -> NetworkSpec:
    """A network with two kinds of layers. Neighbouring layers are of different kinds."""
    turned = AttentionSpec(4, 2, 8, Rope(1e4, 0.5), qk_norm=True, qkv_bias=True, out_bias=True)
    seeing = AttentionSpec(2, 2, 12, Rope(1e5), visibility="block", block_length=4)
    one = LayerSpec(turned, MlpSpec(20), 1e-6)
    two = LayerSpec(seeing, MlpSpec(24), 1e-5, ("attention_norm", "mlp_norm", "mlp_out_norm"))
    return make_network(layers=(one, two, one), tied_head=True)


def others() -> tuple[LayerSpec, ...]:
    """A layer without rotary positions, and two layers of experts, one for each kind of router."""
    still = AttentionSpec(2, 1, 12, None, visibility="causal")
    attention = AttentionSpec(2, 2, 12, Rope(1e5))
    grouped = RouterSpec(
        "sigmoid", bias="choice", renormalise=True, scale=2.5, groups=2, active_groups=1
    )
    mixtures = (ExpertsSpec(2, 1, 12), ExpertsSpec(4, 2, 8, shared_size=8, router=grouped))
    plain = LayerSpec(still, MlpSpec(20), 1e-6, ("attention_out_norm", "mlp_norm"))
    return plain, *(LayerSpec(attention, mlp, 1e-6) for mlp in mixtures)


MIXED = mixed()
EVERY = replace(MIXED, layers=(*MIXED.layers, *others()))


def described(graph: ir.Graph) -> dict[str, Any]:
    """Return a description of a graph that can be compared with other graphs.

    The names of intermediate results are replaced by numbers.
    """
    number = {value: i for i, value in enumerate(value for node in graph for value in node.outputs)}

    def port(value: ir.Value | None) -> Any:
        if value is None or value in number:
            return value if value is None else number[value]
        return value.name

    def held(value: ir.Value) -> Any:
        tensor = value.const_value
        return (
            value.name,
            value.type,
            value.shape,
            None if tensor is None else tensor.numpy().tolist(),
        )

    def attribute(found: ir.Attr) -> Any:
        return (
            found.value.numpy().tolist() if found.type == ir.AttributeType.TENSOR else found.value
        )

    return {
        "inputs": [held(value) for value in graph.inputs],
        "outputs": [(*held(value), port(value)) for value in graph.outputs],
        "initialisers": [held(value) for value in graph.initializers.values()],
        "opsets": dict(graph.opset_imports),
        "nodes": [
            (
                node.domain,
                node.op_type,
                node.metadata_props,
                {name: (found.type, attribute(found)) for name, found in node.attributes.items()},
                [port(value) for value in node.inputs],
                [(value.type, value.shape) for value in node.outputs],
            )
            for node in graph
        ],
    }


@functools.cache
def whole(precision: str, is_plain: bool, /) -> Graph:
    """The graph of ``MIXED`` for which torch traced all layers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(repeat, "kinds", lambda network: list(range(len(network.layers))))
        return trace_pass(MIXED, precision, is_plain=is_plain)


@pytest.mark.parametrize(
    ("precision", "is_plain"),
    [("fp32", False), pytest.param("bf16", True, marks=pytest.mark.slow)],
)
def test_repeated_layers_are_the_traced_ones(precision: str, is_plain: bool) -> None:
    assert repeat.kinds(MIXED) == [0, 1, 0]
    found = trace_once(MIXED, precision, is_plain=is_plain).model.graph
    names = [value.name for node in found for value in node.outputs]
    assert len(set(names)) == len(names)
    wanted = described(whole(precision, is_plain).model.graph)
    for name, part in described(found).items():
        assert part == wanted[name], name


@pytest.mark.parametrize(
    ("reader", "read", "told"),
    [
        (
            "blocks.1.mlp_norm",
            "blocks.0.mlp",
            r"only the residual stream, found \['blocks\.0\.add\w*', 'blocks\.0\.mul\w*'\]",
        ),
        (
            "final_norm",
            "blocks.0.mlp",
            r"a node outside the layers reads blocks\.0\.mul\w*, which is not its own, the stream",
        ),
        (
            "blocks.1.mlp_norm",
            "embed",
            "layer 1 reads embedding, which is not its own, the stream, or shared",
        ),
        ("blocks.1.mlp_norm", "blocks.0.mlp_norm.weight", r"layer 1 reads blocks\.0\.mlp_norm"),
    ],
)
def test_layers_that_meet_elsewhere_are_refused(reader: str, read: str, told: str) -> None:
    graph = whole("fp32", False).clone().model.graph
    # For each path, the last node with this path.
    by_path = {node.metadata_props[LAYER_KEY]: node for node in graph}
    source = by_path[read].outputs[0] if read in by_path else graph.initializers[read]
    by_path[reader].replace_input_with(1, source)
    with pytest.raises(AssertionError, match=told):
        repeat.repeat(graph, [0, 1, 2, 2])


@pytest.mark.slow
@pytest.mark.parametrize("is_plain", [False, True])
def test_the_definitions_that_a_trace_sees_give_the_graph_that_all_of_them_give(
    is_plain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = described(trace_once(EVERY, "bf16", is_plain=is_plain).model.graph)
    monkeypatch.setattr(faster_tracing, "few", contextlib.nullcontext)
    assert described(trace_pass(EVERY, "bf16", is_plain=is_plain).model.graph) == few


@pytest.mark.parametrize("is_plain", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_layers_that_turn_alike_read_one_rotary_table(is_plain: bool) -> None:
    """Layers with the same rotary embedding share one table. Other layers have separate tables."""
    graph = trace_once(MIXED, "fp32", is_plain=is_plain).model.graph
    shapes = {
        name: tuple(value.shape or ())
        for name, value in graph.initializers.items()
        if name.startswith("rotary.")
    }
    half_of_8, whole_of_12 = (MIXED.max_canvas_length, 2), (MIXED.max_canvas_length, 6)
    assert shapes == {
        "rotary.0.cos": half_of_8,
        "rotary.0.sin": half_of_8,
        "rotary.1.cos": whole_of_12,
        "rotary.1.sin": whole_of_12,
    }
