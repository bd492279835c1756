"""The embedding table of a graph: kept in the checkpoint's type, and stored once if the head is
tied.

A traced tied head is ``MatMul(x, Transpose(table))``. ONNX Runtime would fold the transposed table
into an fp32 copy when it opens the graph. TensorRT does not: its engines hold one table (measured
with TensorRT-RTX 1.7.1), so graphs for it keep the two operators.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from dlm_export.graph import LAYER_KEY, functions
from dlm_export.graph.body import DOMAIN
from dlm_export.graph.edits import take_place
from dlm_export.graph.tied import TIED_HEADS
from dlm_export.graph.trace import Graph
from dlm_export.network.spec import EMBEDDING, HEAD


def hold_once(graph: Graph, dtype: ir.DataType) -> None:
    """Store a CPU graph's table in ``dtype`` and let a tied head multiply by it, in place.

    ``dtype`` is the checkpoint's type for an fp32 graph, otherwise the graph's own. Looked-up rows
    are converted to the graph's type. A quantised table stays as it is.
    """
    table = graph.model.graph.initializers.get(EMBEDDING)
    if table is None:
        return
    product = _product_of(graph)
    if product is not None:
        _call_tied_head(graph, product, table, TIED_HEADS[dtype])
    if table.dtype != dtype:
        _widen_rows(graph, table, dtype)


def multiply_transposed(graph: Graph) -> None:
    """Let a tied head of a graph for ONNX Runtime on a GPU read the stored table, in place.

    Gemm accepts a transposed operand, but no batch axis.
    """
    product = _product_of(graph)
    if product is None:
        return
    table, x = graph.model.graph.initializers[EMBEDDING], product.inputs[0]
    assert table.shape is not None
    rows, inputs = (int(size) for size in table.shape)  # type: ignore[arg-type]
    nodes: list[ir.Node] = []

    def add(op_type: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
        metadata = dict(product.metadata_props)
        nodes.append(ir.node(op_type, list(inputs), attributes, metadata_props=metadata))
        return nodes[-1].outputs[0]

    def ints(*values: int) -> ir.Value:
        return add("Constant", value=ir.tensor(np.array(values, np.int64)))

    y = add("Gemm", add("Reshape", x, ints(-1, inputs)), table, transB=1)
    shape = add("Concat", add("Shape", x, start=0, end=2), ints(rows), axis=0)
    add("Reshape", y, shape)
    _replace(graph, product, nodes)


def _product_of(graph: Graph) -> ir.Node | None:
    """The MatMul of a tied head by the transposed table, else ``None``."""
    for node in graph.model.graph:
        if node.op_type == "MatMul" and node.metadata_props.get(LAYER_KEY) == HEAD:
            weight = node.inputs[1]
            transpose = None if weight is None else weight.producer()
            is_tied = transpose is not None and transpose.op_type == "Transpose"
            return node if is_tied else None
    return None


def _call_tied_head(graph: Graph, product: ir.Node, table: ir.Value, name: str) -> None:
    """Replace the product with a call; an fp16 graph is cast to fp32 for it, and back."""
    functions.declare(graph.model, name)
    metadata = dict(product.metadata_props)
    nodes, x = [], product.inputs[0]
    assert x is not None
    is_wide = graph.element_type == ir.DataType.FLOAT
    if not is_wide:
        nodes.append(_cast(x, ir.DataType.FLOAT, metadata))
        x = nodes[-1].outputs[0]
    nodes.append(ir.node(name, [x, table], domain=DOMAIN, metadata_props=metadata))
    if not is_wide:
        nodes.append(_cast(nodes[-1].outputs[0], graph.element_type, metadata))
    _replace(graph, product, nodes)


def _cast(value: ir.Value, to: ir.DataType, metadata: dict[str, str]) -> ir.Node:
    return ir.node("Cast", [value], {"to": to}, metadata_props=metadata)


def _replace(graph: Graph, product: ir.Node, nodes: list[ir.Node]) -> None:
    """Replace a tied head's product with ``nodes``; the last one gives the result."""
    old, new, weight = product.outputs[0], nodes[-1].outputs[0], product.inputs[1]
    assert weight is not None
    graph.model.graph.insert_before(product, nodes)
    take_place(new, old)
    transpose = weight.producer()
    graph.model.graph.remove(product, safe=True)
    assert transpose is not None
    graph.model.graph.remove(transpose, safe=True)


def _widen_rows(graph: Graph, table: ir.Value, dtype: ir.DataType) -> None:
    """Store the table in ``dtype``; a Cast follows each lookup."""
    wide = table.type
    lookups = [node for node, _ in table.uses() if node.op_type == "Gather"]
    table.type = ir.TensorType(dtype)
    for node in lookups:
        old = node.outputs[0]
        cast = _cast(old, graph.element_type, dict(node.metadata_props))
        new = cast.outputs[0]
        new.shape, new.type, old.type = old.shape, wide, ir.TensorType(dtype)
        old.replace_all_uses_with(new, replace_graph_outputs=True)
        cast.replace_input_with(0, old)
        graph.model.graph.insert_after(node, cast)
        new.name, old.name = old.name, f"{old.name}.stored"
