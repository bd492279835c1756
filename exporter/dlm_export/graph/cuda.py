"""Prepares device graphs for ONNX Runtime's CUDA provider.

The list of operators that the provider can run is based on ``docs/OperatorKernels.md`` of ONNX Runtime, and on the kernels in
``libonnxruntime_providers_cuda.so`` of onnxruntime-gpu 1.31.1.
"""

from __future__ import annotations

from collections import Counter

import onnx_ir as ir

from dlm_export.graph import MICROSOFT_DOMAIN
from dlm_export.graph.trace import Graph
from dlm_export.targets import TargetError

QUANTISED = (MICROSOFT_DOMAIN, "MatMulNBits")
"""The operator that multiplies fp16, bf16 or fp32 activations by INT8 or INT4 weights.

Each scale of the weight belongs to a group of 16 to 128 inputs of one column.
"""
MIXTURES = frozenset([(MICROSOFT_DOMAIN, "MoE"), (MICROSOFT_DOMAIN, "QMoE")])
"""The operators that compute mixtures of experts (see ``cuda_experts``)."""

# Operators of opset 23 that have CUDA kernels for all types to which our graphs apply them. Most of
# these operators have kernels for fp16, bf16 and fp32. Our graphs apply the remaining operators to
# integers only.
KERNELS = frozenset(
    [
        "Abs",
        "Add",
        "And",
        "Attention",
        "Cast",
        "CastLike",
        "Concat",
        "Constant",
        "Div",
        "Equal",
        "Exp",
        "Expand",
        "Floor",
        "Gather",
        "GatherElements",
        "Gelu",
        "Gemm",
        "Greater",
        "GreaterOrEqual",
        "LayerNormalization",
        "Less",
        "LessOrEqual",
        "Log",
        "MatMul",
        "Min",
        "Mod",
        "Mul",
        "Neg",
        "Or",
        "Pow",
        "RMSNormalization",
        "Range",
        "Reciprocal",
        "ReduceMax",
        "ReduceMean",
        "ReduceMin",
        "ReduceSum",
        "Reshape",
        "RotaryEmbedding",
        "Shape",
        "Sigmoid",
        "Slice",
        "Softmax",
        "Sqrt",
        "Squeeze",
        "Sub",
        "Tanh",
        "TopK",
        "Transpose",
        "Unsqueeze",
        "Where",
    ]
)

_NOT_IN_BF16 = frozenset(["Log", "Pow", "ReduceMean", "Sqrt", "Tanh", "TopK"])
"""The operators of ``KERNELS`` that have kernels for fp16 and fp32, but none for bf16."""

SIZES = "sizes"
"""The module path in the names of nodes that only compute sizes of tensors.

ONNX Runtime runs such nodes on the CPU, even if the provider has kernels for them. The runtime
accepts this for nodes with such names.
"""

# Operators that compute sizes from sizes.
_ON_SIZES = frozenset(
    ["Add", "Cast", "Concat", "Div", "Gather", "Mul", "Reshape", "Squeeze", "Sub", "Unsqueeze"]
)


def size_nodes(model: ir.Model) -> set[ir.Node]:
    """Return the nodes that only compute sizes of tensors."""
    found: set[ir.Node] = set()

    def is_constant(value: ir.Value) -> bool:
        maker = value.producer()
        return value.is_initializer() or (maker is not None and maker.op_type == "Constant")

    for node in model.graph:
        if node.op_type == "Shape":
            found.add(node)
        elif node.op_type in _ON_SIZES and node.domain == "":
            read = [value for value in node.inputs if value is not None and not is_constant(value)]
            if read and all(value.producer() in found for value in read):
                found.add(node)
    return found


def check_operators(graph: Graph) -> None:
    """Check that the CUDA provider has a kernel for every operator of the graph.

    Without a CUDA kernel, ONNX Runtime would run the operator on the CPU. Raises TargetError, which
    names the operators that have no kernel.
    """
    lacking: Counter[str] = Counter()
    for node in graph.model.graph:
        is_known = node.domain == "" and node.op_type in KERNELS
        if not is_known and (node.domain, node.op_type) not in {QUANTISED, *MIXTURES}:
            lacking[f"{node.domain}.{node.op_type}".lstrip(".")] += 1
        elif node.op_type in _NOT_IN_BF16 and node.outputs[0].dtype == ir.DataType.BFLOAT16:
            lacking[f"{node.op_type} in bf16"] += 1
    if lacking:
        listed = ", ".join(f"{count} {name}" for name, count in sorted(lacking.items()))
        raise TargetError(
            f"target cuda: ONNX Runtime's CUDA provider has no kernel for {listed} in this denoiser's graph"
        )
