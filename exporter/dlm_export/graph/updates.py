"""Replaces the function for low-rank updates with standard operators, in graphs for engines."""

from __future__ import annotations

import functools

import onnx_ir as ir

from dlm_export.graph.body import DOMAIN
from dlm_export.graph.edits import replace
from dlm_export.graph.experts import Operators
from dlm_export.graph.operators import DRAFT_UPDATE


def select_rows(model: ir.Model) -> None:
    """Replace each call of ``DraftUpdate`` in a model.

    On a CPU, the function multiplies only the updated rows. The number of these rows depends on the
    data, and engines for GPUs need sizes that depend on the shapes of inputs only. The new operators
    multiply all rows, and then select the updated ones.
    """
    graph = model.graph
    for node in list(graph):
        if node.op_type != DRAFT_UPDATE or node.domain != DOMAIN:
            continue
        x, y, is_updated, a, b = node.inputs
        dtype = node.outputs[0].dtype
        assert dtype is not None
        op = functools.partial(Operators(graph, node).add, gives=dtype)
        update = op("MatMul", op("MatMul", x, a), b)
        replace(graph, node, op("Where", is_updated, op("Add", y, update), y))
    model.functions.pop((DOMAIN, DRAFT_UPDATE, ""), None)
