"""What ONNX Runtime's CUDA provider runs, of what device graphs are written in.

By ``docs/OperatorKernels.md`` of ONNX Runtime, and the kernels in
``libonnxruntime_providers_cuda.so`` of onnxruntime-gpu 1.31.1.
"""

from __future__ import annotations

from collections import Counter

from dlm_export.graph import MICROSOFT_DOMAIN
from dlm_export.graph.trace import Graph
from dlm_export.targets import TargetError

QUANTISED = (MICROSOFT_DOMAIN, "MatMulNBits")
"""INT8 and INT4 weights by fp16, bf16 and fp32, in blocks of 16 to 128."""

# Operators of opset 23 with kernels for fp16, bf16 and fp32, or here for integers alone; TopK and
# Log have none for bf16, and are of fp32 in every graph.
KERNELS = frozenset(
    [
        "Add",
        "Attention",
        "Cast",
        "Concat",
        "Constant",
        "Equal",
        "Expand",
        "Gather",
        "GatherElements",
        "Gemm",
        "Greater",
        "Log",
        "MatMul",
        "Mod",
        "Mul",
        "RMSNormalization",
        "ReduceMax",
        "ReduceSum",
        "Reshape",
        "RotaryEmbedding",
        "Shape",
        "Sigmoid",
        "Softmax",
        "Squeeze",
        "Sub",
        "TopK",
        "Transpose",
        "Unsqueeze",
    ]
)


def check_operators(graph: Graph) -> None:
    """TargetError that names operators without a kernel, which would be left to the CPU."""
    lacking: Counter[str] = Counter()
    for node in graph.model.graph:
        if (node.domain, node.op_type) != QUANTISED and (
            node.domain != "" or node.op_type not in KERNELS
        ):
            lacking[f"{node.domain}.{node.op_type}".lstrip(".")] += 1
    if lacking:
        listed = ", ".join(f"{count} {name}" for name, count in sorted(lacking.items()))
        raise TargetError(
            f"target cuda: ONNX Runtime's CUDA provider has no kernel for {listed} of this denoiser's graph"
        )
