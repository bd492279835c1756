"""Lets TensorRT compute attention with wide heads.

TensorRT computes each Attention node with one fused kernel. If it has no such kernel, the build
fails. With TensorRT-RTX 1.7.1, heads of 256 features can be built, and heads of 288 features cannot.
The attribute ``TRT_decomposable`` of TensorRT's parser allows several kernels instead.
"""

from __future__ import annotations

import onnx_ir as ir

from dlm_export.graph.parts import block_of
from dlm_export.graph.trace import Graph

FUSED_HEAD_SIZE = 256


def let_decompose(device: Graph) -> None:
    """Mark all Attention nodes whose heads are wider than ``FUSED_HEAD_SIZE``."""
    for node in device.model.graph:
        block = block_of(node)
        if node.op_type != "Attention" or block is None:
            continue
        if device.network.layers[block].attention.head_size > FUSED_HEAD_SIZE:
            node.attributes["TRT_decomposable"] = ir.AttrInt64("TRT_decomposable", 1)
