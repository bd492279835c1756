"""Makes a graph store its embedding table only once, even if the head uses the table too.

A tied head multiplies by the embedding table, so the head and the lookup can use one initialiser.
In a traced graph, a tied head is ``MatMul(x, Transpose(table))``. When ONNX Runtime opens such a
graph, it stores the transposed table as a second copy in fp32. The functions in this module avoid
the second copy. TensorRT makes no second copy (measured with TensorRT-RTX 1.7.1), so graphs for
TensorRT are not changed.
"""

from __future__ import annotations

import functools

import numpy as np
import onnx_ir as ir

from dlm_export.graph import LAYER_KEY, operators
from dlm_export.graph.body import DOMAIN
from dlm_export.graph.edits import replace
from dlm_export.graph.experts import Operators
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
        name, wide = TIED_HEADS[dtype], ir.DataType.FLOAT
        operators.declare(graph.model, name)
        ops, x = Operators(graph.model.graph, product), product.inputs[0]
        is_wide = graph.element_type == wide  # the tied head computes in fp32
        x = x if is_wide else ops.add("Cast", x, to=wide, gives=wide)
        y = ops.add(name, x, table, gives=wide, domain=DOMAIN)
        if not is_wide:
            y = ops.add("Cast", y, to=graph.element_type, gives=graph.element_type)
        _replace(graph, product, y)
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
    ops = Operators(graph.model.graph, product)
    add = functools.partial(ops.add, gives=graph.element_type)
    size = functools.partial(ops.add, gives=ir.DataType.INT64)

    def ints(*values: int) -> ir.Value:
        return size("Constant", value=ir.tensor(np.array(values, np.int64)))

    y = add("Gemm", add("Reshape", x, ints(-1, inputs)), table, transB=1)
    shape = size("Concat", size("Shape", x, start=0, end=2), ints(rows), axis=0)
    _replace(graph, product, add("Reshape", y, shape))


def _product_of(graph: Graph) -> ir.Node | None:
    """Return the MatMul of a tied head, or ``None`` if the head is not tied."""
    for node in graph.model.graph:
        if node.op_type == "MatMul" and node.metadata_props.get(LAYER_KEY) == HEAD:
            weight = node.inputs[1]
            transpose = None if weight is None else weight.producer()
            is_tied = transpose is not None and transpose.op_type == "Transpose"
            return node if is_tied else None
    return None


def _replace(graph: Graph, product: ir.Node, new: ir.Value) -> None:
    """Replace the MatMul of a tied head with ``new``, and remove the Transpose of its table."""
    weight = product.inputs[1]
    assert weight is not None
    transpose = weight.producer()
    replace(graph.model.graph, product, new)
    assert transpose is not None
    graph.model.graph.remove(transpose, safe=True)


def _widen_rows(graph: Graph, table: ir.Value, dtype: ir.DataType) -> None:
    """Store the table in ``dtype``, and add a Cast after each lookup of rows."""
    wide = table.type
    lookups = [node for node, _ in table.uses() if node.op_type == "Gather"]
    table.type = ir.TensorType(dtype)
    for node in lookups:
        old = node.outputs[0]
        cast = ir.node("Cast", [old], {"to": graph.element_type})
        cast.metadata_props.update(node.metadata_props)
        new = cast.outputs[0]
        new.shape, new.type, old.type = old.shape, wide, ir.TensorType(dtype)
        old.replace_all_uses_with(new, replace_graph_outputs=True)
        cast.replace_input_with(0, old)
        graph.model.graph.insert_after(node, cast)
        new.name, old.name = old.name, f"{old.name}.stored"
