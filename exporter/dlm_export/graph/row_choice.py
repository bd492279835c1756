"""Lets a pass of a graph for GPUs choose cached rows, and compute several requests at once.

The inputs ``past_key.i`` and ``past_value.i`` then contain the rows of all requests, and more inputs
select the rows that the pass reads. The table in ``graph`` describes these inputs. Some of the
selected rows may belong to no request, so a caller can round their number up. CUDA graphs need few
different shapes.

A token attends only to the rows of the same request. Graphs for CPUs reach the same with the input
``segments``, which their kernels read. The operators of ONNX Runtime's CUDA provider take a mask
instead.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from dlm_export.graph import CACHED_REQUESTS, CACHED_ROWS, LAYER_KEY, TOKEN_REQUESTS
from dlm_export.graph.trace import Graph


def choose_rows(graph: Graph) -> None:
    """Add the inputs for the choice of rows to a graph with Attention operators.

    The network must have no cached layers with a window, because such layers store other rows.
    """
    assert graph.network.cache_window is None
    main = graph.model.graph
    attentions = [node for node in main if node.op_type == "Attention"]
    past = [value for value in main.inputs if str(value.name).startswith("past_")]
    rows, requests, of_tokens = (
        ir.Value(name=name, shape=ir.Shape([axis]), type=ir.TensorType(ir.DataType.INT64))
        for name, axis in ((CACHED_ROWS, "C"), (CACHED_REQUESTS, "C"), (TOKEN_REQUESTS, "T"))
    )
    main.inputs.extend((rows, requests, of_tokens))
    nodes: list[ir.Node] = []

    def add(op_type: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
        metadata = {LAYER_KEY: "pass"}
        nodes.append(ir.node(op_type, list(inputs), attributes, metadata_props=metadata))
        return nodes[-1].outputs[0]

    def constant(value: Any) -> ir.Value:
        return add("Constant", value=ir.tensor(np.asarray(value)))

    for name, table in main.initializers.items():
        if name.startswith("rotary."):
            # ONNX Runtime refuses passes with more tokens than the table has rows. Two canvases fit
            # into the longer table. ONNX Runtime makes this table when it opens the graph.
            longer = add("Concat", table, table, axis=0)
            table.replace_all_uses_with(longer)
            for i in range(2):
                nodes[-1].replace_input_with(i, table)
    for value in past:
        chosen = add("Gather", value, rows, axis=2)
        value.replace_all_uses_with(chosen)
        nodes[-1].replace_input_with(0, value)
    of_keys = add("Concat", requests, of_tokens, axis=0)
    is_own = add("Equal", add("Unsqueeze", of_tokens, constant(np.array([1]))), of_keys)
    is_own = add("Unsqueeze", is_own, constant(np.array([0, 1])))
    dtype = graph.element_type
    # The number is finite, because the softmax of a tile with only minus infinity would be NaN in
    # some kernels.
    hidden, seen = (constant(np.array(number, dtype.numpy())) for number in (dtype.min, 0))
    main.insert_before(next(iter(main)), nodes)
    masks: dict[ir.Value | None, ir.Value] = {}
    for node in attentions:
        mask = node.inputs[3] if len(node.inputs) > 3 else None
        if mask not in masks:
            nodes.clear()
            masks[mask] = add("Where", is_own, seen if mask is None else mask, hidden)
            main.insert_before(node, nodes)
        node.resize_inputs(max(len(node.inputs), 4))
        node.replace_input_with(3, masks[mask])
