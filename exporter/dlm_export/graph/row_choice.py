"""Lets a pass of a graph for GPUs choose cached rows, and compute several requests at once.

The inputs ``past_key.i`` and ``past_value.i`` then contain the rows of all requests, and more inputs
select the rows that the pass reads. The table in ``graph`` describes these inputs. Some of the
selected rows may belong to no request, so a caller can round their number up. CUDA graphs need few
different shapes.

A token attends only to the rows of the same request. Graphs for CPUs reach the same with the input
``segments``, which their kernels read. The operators of ONNX Runtime's CUDA provider take a mask
instead. In layers with a window, the mask also hides the rows that are too far away. The caller
passes the distance of each selected row of these layers, because their rows may be in any order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common as passes

from dlm_export.graph import (
    CACHED_REQUESTS,
    CACHED_ROWS,
    LAYER_KEY,
    TOKEN_REQUESTS,
    WINDOW_DISTANCES,
    WINDOW_REQUESTS,
    WINDOW_ROWS,
)
from dlm_export.graph.parts import block_of
from dlm_export.graph.trace import Graph

_FARTHEST = np.iinfo(np.int64).max


def choose_rows(graph: Graph) -> None:
    """Add the inputs for the choice of rows to a graph with Attention operators."""
    _Writer(graph).write()


class _Writer:
    def __init__(self, graph: Graph) -> None:
        self.graph, self.main, self.network = graph, graph.model.graph, graph.network
        self.nodes: list[ir.Node] = []

    def write(self) -> None:
        main = self.main
        attentions = [node for node in main if node.op_type == "Attention"]
        past = [value for value in main.inputs if str(value.name).startswith("past_")]
        rows = self.input(CACHED_ROWS, "C")
        requests = self.input(CACHED_REQUESTS, "C")
        self.of_tokens = self.input(TOKEN_REQUESTS, "T")
        windows = self.network.cache_windows()
        window_rows, window_mask = None, None
        if self.network.cache_window is not None:
            window_rows = self.input(WINDOW_ROWS, "D")
            window_requests = self.input(WINDOW_REQUESTS, "D")
            distances = self.input(WINDOW_DISTANCES, "D")
        for name, table in main.initializers.items():
            if name.startswith("rotary."):
                # ONNX Runtime refuses passes with more tokens than the table has rows. Two canvases
                # fit into the longer table. ONNX Runtime makes this table when it opens the graph.
                self.replace(table, self.add("Concat", table, table, axis=0), 2)
        for value in past:
            has_window = windows[int(str(value.name).rpartition(".")[2])] is not None
            chosen = window_rows if has_window else rows
            self.replace(value, self.add("Gather", value, chosen, axis=2), 1)
        is_own = self.unsqueeze(self.is_own(self.of_keys(requests)), 0, 1)
        if window_rows is not None:
            is_own_key = self.is_own(self.of_keys(window_requests))
            window_mask = self.window_mask(is_own_key, distances)
        main.insert_before(next(iter(main)), self.nodes)
        masks: dict[ir.Value | None, ir.Value] = {}
        for node in attentions:
            layer = block_of(node)
            assert layer is not None
            mask = node.inputs[3] if len(node.inputs) > 3 else None
            if mask not in masks:
                self.nodes.clear()
                if windows[layer] is not None and window_mask is not None:
                    masks[mask] = window_mask
                else:
                    masks[mask] = self.masked(is_own, mask)
                main.insert_before(node, self.nodes)
            node.resize_inputs(max(len(node.inputs), 4))
            node.replace_input_with(3, masks[mask])
        passes.RemoveUnusedNodesPass()(self.graph.model)

    def input(self, name: str, axis: str) -> ir.Value:
        kind = ir.TensorType(ir.DataType.INT64)
        self.main.inputs.append(ir.Value(name=name, shape=ir.Shape([axis]), type=kind))
        return self.main.inputs[-1]

    def add(self, op_type: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
        metadata = {LAYER_KEY: "pass"}
        self.nodes.append(ir.node(op_type, list(inputs), attributes, metadata_props=metadata))
        return self.nodes[-1].outputs[0]

    def replace(self, old: ir.Value, new: ir.Value, inputs: int) -> None:
        """Replace ``old`` everywhere but in the first inputs of the last node, which made ``new``."""
        old.replace_all_uses_with(new)
        for i in range(inputs):
            self.nodes[-1].replace_input_with(i, old)

    def constant(self, value: Any) -> ir.Value:
        return self.add("Constant", value=ir.tensor(np.asarray(value)))

    def unsqueeze(self, value: ir.Value, *axes: int) -> ir.Value:
        return self.add("Unsqueeze", value, self.constant(np.array(axes, np.int64)))

    def is_own(self, requests: ir.Value) -> ir.Value:
        """Return whether each of N requests is that of a token, bool ``[T, N]``."""
        return self.add("Equal", self.unsqueeze(self.of_tokens, 1), requests)

    def of_keys(self, requests: ir.Value) -> ir.Value:
        """Return the requests of cached rows, and then those of the new tokens."""
        return self.add("Concat", requests, self.of_tokens, axis=0)

    def masked(self, is_visible: ir.Value, mask: ir.Value | None) -> ir.Value:
        """Return the additive mask ``mask`` where ``is_visible`` is true, and hide all other keys.

        The number for hidden keys is finite, because the softmax of a tile with only minus infinity
        would be NaN in some kernels.
        """
        dtype = self.graph.element_type
        hidden, seen = (self.constant(np.array(each, dtype.numpy())) for each in (dtype.min, 0))
        return self.add("Where", is_visible, seen if mask is None else mask, hidden)

    def window_mask(self, is_own: ir.Value, distances: ir.Value) -> ir.Value:
        """Return the mask of layers with a window, ``[B, 1, T, rows + T]``.

        See ``network.denoiser.hiding`` for networks with draft passes and a window. Here, the
        first position of a pass is that of the token's own request.
        """
        longest = self.constant(np.array(self.network.max_canvas_length))
        (positions,) = (each for each in self.main.inputs if each.name == "position_ids")
        is_draft = self.add("GreaterOrEqual", positions, longest)
        places = self.add("Mod", positions, longest)
        # Tokens of other requests get a number that is larger than all positions.
        farthest = self.constant(np.array(_FARTHEST))
        is_own_token = self.is_own(self.of_tokens)
        new = self.add("Where", is_own_token, self.unsqueeze(places, 1), farthest)
        begin = self.add("ReduceMin", new, self.constant(np.array([2])), keepdims=0)
        first = self.unsqueeze(self.add("Where", is_draft, begin, places), 2)
        last = self.unsqueeze(self.add("Where", is_draft, longest, places), 2)
        cached = self.add("Sub", self.unsqueeze(begin, 2), distances)
        keys = self.add("Concat", cached, new, axis=2)
        window = self.constant(np.array(self.network.cache_window))
        is_near = self.add("LessOrEqual", self.add("Sub", first, keys), window)
        is_before = self.add("LessOrEqual", keys, last)
        is_seen = self.add("And", self.add("And", is_near, is_before), is_own)
        return self.masked(self.unsqueeze(is_seen, 1), None)
