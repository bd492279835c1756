"""Makes a graph store its embedding table only once, even if the head uses the table too.

A tied head multiplies by the embedding table, so the head and the lookup can use one initialiser.
In a traced graph, a tied head is ``MatMul(x, Transpose(table))``. When ONNX Runtime opens such a
graph, it stores the transposed table as a second copy in fp32. The functions in this module avoid
the second copy. TensorRT makes no second copy (measured with TensorRT-RTX 1.7.1), so graphs for
TensorRT are not changed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from dlm_export.graph import LAYER_KEY, operators
from dlm_export.graph.body import DOMAIN
from dlm_export.graph.edits import take_place
from dlm_export.graph.operators import TIED_HEADS
from dlm_export.graph.trace import Graph
from dlm_export.network.spec import EMBEDDING, HEAD


def hold_once(graph: Graph, dtype: ir.DataType) -> None:
    """Change a CPU graph so that the graph stores its embedding table once, in ``dtype``.

    A tied head is changed to use this table.

    For an fp32 graph, ``dtype`` is the checkpoint's type. For all other graphs, ``dtype`` is the
    graph's type. Each looked-up row is converted to the graph's type. A quantised table is not
    changed.
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
    """Change a GPU graph for ONNX Runtime so that its tied head uses the stored table.

    The new head is a Gemm operator, which accepts a transposed operand. Gemm has no batch axis, so
    the activations are reshaped before and after Gemm.
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
    """Return the MatMul of a tied head, or ``None`` if the head is not tied."""
    for node in graph.model.graph:
        if node.op_type == "MatMul" and node.metadata_props.get(LAYER_KEY) == HEAD:
            weight = node.inputs[1]
            transpose = None if weight is None else weight.producer()
            is_tied = transpose is not None and transpose.op_type == "Transpose"
            return node if is_tied else None
    return None


def _call_tied_head(graph: Graph, product: ir.Node, table: ir.Value, name: str) -> None:
    """Replace the MatMul with a call of a tied-head function.

    The tied head computes in fp32. In a graph of another type, the input of the head is therefore
    cast to fp32, and the result is cast back to the graph's type.
    """
    operators.declare(graph.model, name)
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
    """Replace the MatMul and the Transpose of a tied head with ``nodes``.

    The output of the last node replaces the output of the MatMul.
    """
    old, new, weight = product.outputs[0], nodes[-1].outputs[0], product.inputs[1]
    assert weight is not None
    graph.model.graph.insert_before(product, nodes)
    take_place(new, old)
    transpose = weight.producer()
    graph.model.graph.remove(product, safe=True)
    assert transpose is not None
    graph.model.graph.remove(transpose, safe=True)


def _widen_rows(graph: Graph, table: ir.Value, dtype: ir.DataType) -> None:
    """Store the table in ``dtype``, and add a Cast after each lookup of rows."""
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
