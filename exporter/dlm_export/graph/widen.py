"""Changes bf16 graphs so that ONNX Runtime can run these graphs on CPUs with its fp32 kernels."""

from __future__ import annotations

import onnx_ir as ir

from dlm_export.graph import LAYER_KEY
from dlm_export.graph.trace import Graph

_MOVES = (
    "Cast",
    "Concat",
    "Constant",
    "Expand",
    "Gather",
    "GatherElements",
    "Reshape",
    "Shape",
    "Transpose",
    "Unsqueeze",
)


def compute_in_fp32(graph: Graph) -> None:
    """Change a bf16 graph so that the graph computes in fp32, and rounds every result to bf16.

    Parameters, inputs and outputs of the graph stay in bf16. Operators that only move values also
    stay in bf16.
    """
    wide: dict[ir.Value, ir.Value] = {}
    nodes = graph.model.graph

    def cast(value: ir.Value, to: ir.DataType, layer: str) -> ir.Node:
        made = ir.node("Cast", [value], {"to": to}, metadata_props={LAYER_KEY: layer})
        made.outputs[0].type = ir.TensorType(to)
        return made

    for node in list(nodes):
        if node.op_type in _MOVES:
            continue
        layer = node.metadata_props[LAYER_KEY]
        for i, value in enumerate(node.inputs):
            if value is None or value.dtype != ir.DataType.BFLOAT16:
                continue
            if value not in wide:
                widening = cast(value, ir.DataType.FLOAT, layer)
                nodes.insert_before(node, widening)
                wide[value] = widening.outputs[0]
            node.replace_input_with(i, wide[value])
        for value in node.outputs:
            if value.dtype != ir.DataType.BFLOAT16:
                continue
            rounding = cast(value, ir.DataType.BFLOAT16, layer)
            result = rounding.outputs[0]
            name, result.shape = value.name, value.shape
            value.replace_all_uses_with(result, replace_graph_outputs=True)
            rounding.replace_input_with(0, value)
            nodes.insert_after(node, rounding)
            value.type = ir.TensorType(ir.DataType.FLOAT)
            value.name, result.name = f"{name}.fp32", name
