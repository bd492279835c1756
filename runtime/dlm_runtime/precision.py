"""Number formats and layer formats.

Each format is one record, and all other code uses these records.

A number format says how a number is stored, for example INT8 or FP8. A layer format says which
number formats a matrix multiplication uses for its weights and its activations. A layer format also
says which targets can run this multiplication. To add a format, add a record to this module, add
the format's arithmetic to ``dlm_calibration.precision_rounding``, and add the format's nodes to
``dlm_export.graph.quantise``. This module imports no other package, so that small devices can use
it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class NumberFormat:
    """A number format. It describes how numbers are stored.

    Args:
        code_type: The dtype of a stored code in numpy (with ml_dtypes).
        levels: The largest value that the format represents when the scale is 1.
        code_limits: The smallest and the largest code. Codes outside this range are clipped. If
            None, codes are looked up in a table.
        least_sm: A GPU can compute in the format if its compute capability is at least this number
            divided by 10. For example, 89 means 8.9.
        tensorrt: The names that TensorRT and TensorRT's inspector use for the format.
        is_simulated_on_cpu: True if a CPU cannot compute in the format. In this case, the CPU
            multiplies the quantised numbers in fp32.
    """

    name: str
    bits: int
    code_type: str
    levels: float
    code_limits: tuple[float, float] | None
    least_sm: int
    tensorrt: tuple[str, ...]
    is_simulated_on_cpu: bool = False


CUDA_BLOCK = 32
"""The number of weights that share a scale in the fast kernels of ONNX Runtime's CUDA provider."""

# TensorRT-RTX 1.7 does not compile INT4 for SM 7.5. TensorRT-RTX 1.7 does compile INT8 weights for
# SM 7.5, although NVIDIA's support matrix lists INT8 weights only for SM 8.6 and newer.
NUMBER_FORMATS = {
    each.name: each
    for each in (
        NumberFormat("int8", 8, "int8", 127, (-127, 127), 75, ("INT8",)),
        NumberFormat("int4", 4, "int4", 7, (-8, 7), 80, ("INT4",)),
        NumberFormat("fp8", 8, "float8_e4m3fn", 448, (-448, 448), 89, ("FP8", "E4M3"), True),
        NumberFormat("nvfp4", 4, "uint8", 6 * 448, None, 100, ("FP4", "E2M1"), True),
    )
}


@dataclass(frozen=True)
class LayerFormat:
    """A layer format. It describes how one matrix multiplication is computed.

    Args:
        weights, activations: Names of number formats. None means full precision.
        is_static: True if calibration determines the range of the activations. If False, each pass
            computes the range.
        group_size: Number of weights in a group, along the input dimension.
        next: Layer formats to try for a layer whose shape does not suit this format. The first
            format that suits the shape and the target is used, or ``HIGH`` if no format suits both
            the shape and the target.
        on_cuda: True if ONNX Runtime's CUDA provider has kernels for the format.
        untried: The reason why TensorRT does not use the format, although TensorRT could use it.
        auto: The kinds of target for which ``--precision auto`` tries the format.
    """

    weights: str | None = None
    activations: str | None = None
    is_static: bool = False
    group_size: int | None = None
    next: tuple[str, ...] = ()
    on_cuda: bool = False
    untried: str | None = None
    auto: tuple[str, ...] = ()

    @property
    def is_dynamic(self) -> bool:
        """True if each pass computes the range of the activations, separately for each row."""
        return self.activations is not None and not self.is_static

    @property
    def is_simulated_on_cpu(self) -> bool:
        """True if a CPU multiplies the quantised numbers in fp32, because it lacks the format."""
        return self.weights is not None and NUMBER_FORMATS[self.weights].is_simulated_on_cpu

    @property
    def least_sm(self) -> int:
        """The lowest compute capability with which TensorRT can compute this format, times 10."""
        return 0 if self.weights is None else NUMBER_FORMATS[self.weights].least_sm

    @property
    def not_in_tensorrt(self) -> str | None:
        """The reason why TensorRT does not compute this format, or None if it does."""
        if self.is_dynamic:
            return "TensorRT has no MatMulInteger, which quantises activations in each pass"
        return self.untried

    @property
    def is_int4_in_panels(self) -> bool:
        """True if the weights are INT4 and each pass quantises the activations.

        No engine has operators for INT4 weights with quantised activations. This project's kernels
        compute the product. If the kernels are switched off, ONNX Runtime computes it with the ONNX
        functions that the graph contains. The scales are stored as fp16 in every graph, because
        fp32 scales would be a large part of the file. The scales may be negative. TensorRT rejects
        negative scales, but TensorRT never computes this format.
        """
        return self.weights == "int4" and self.is_dynamic

    @property
    def suits_table(self) -> bool:
        """True if a CPU can read single rows of a matrix in this format.

        A pass looks up single rows in the embedding. If the output head and the embedding share one
        matrix, the format of this matrix must therefore suit a table.
        """
        return self.weights in (None, "fp8") or self.is_dynamic

    @property
    def block_size(self) -> int:
        """The number of weights that share a scale in ONNX Runtime's MatMulNBits."""
        return self.group_size or CUDA_BLOCK

    def slow_on_cuda(self, inputs: int, outputs: int) -> str | None:
        """Return the reason why the CUDA provider has no fast kernel for a weight matrix.

        The matrix ``[inputs, outputs]`` is INT4 or INT8. Without a fast kernel, each pass converts
        the whole matrix to fp16. If there is a fast kernel, the result is ``None``.

        Source: the message "This compact fpA_intB build supports" in
        libonnxruntime_providers_cuda.so of onnxruntime-gpu 1.31.1.
        """
        columns = 64 if self.weights == "int4" else 32
        if self.block_size != CUDA_BLOCK:
            return f"groups of {self.block_size} weights, not of {CUDA_BLOCK}"
        if inputs % CUDA_BLOCK:
            return f"{inputs} inputs, not a multiple of {CUDA_BLOCK}"
        return f"{outputs} outputs, not a multiple of {columns}" if outputs % columns else None

    def weight_bytes(self, inputs: int, outputs: int) -> int:
        """Return the size in bytes of a weight matrix ``[inputs, outputs]`` on disk.

        The size includes the scales. A matrix in full precision is stored as fp32.
        """
        elements = inputs * outputs
        if self.weights is None:
            return 4 * elements
        codes = (elements * NUMBER_FORMATS[self.weights].bits + 7) // 8
        if self.group_size is None:
            return codes + 4 * outputs
        groups = outputs * -(-inputs // self.group_size)
        if self.weights == "nvfp4":
            return codes + groups + 4
        return codes + (2 if self.is_int4_in_panels else 4) * groups


_ROWS = ("int8-dynamic", "int8-weight")
HIGH = "high"
FORMATS: dict[str, LayerFormat] = {
    HIGH: LayerFormat(),
    "nvfp4": LayerFormat(
        "nvfp4", "nvfp4", True, 16, next=("fp8", "int8-weight"), auto=("tensorrt",)
    ),
    "nvfp4-weight": LayerFormat("nvfp4", group_size=16, next=("int8-weight",)),
    "fp8": LayerFormat("fp8", "fp8", True, auto=("tensorrt",)),
    "int4-g32-dynamic": LayerFormat("int4", "int8", False, 32, next=_ROWS, auto=("cpu",)),
    "int4-g64-dynamic": LayerFormat("int4", "int8", False, 64, next=_ROWS),
    "int4-g128-dynamic": LayerFormat("int4", "int8", False, 128, next=_ROWS),
    "int4-g32": LayerFormat(
        "int4",
        group_size=32,
        next=("int8-weight", "int8-dynamic"),
        on_cuda=True,
        untried="groups of 32 weights are untried in TensorRT",
        auto=("cuda",),
    ),
    "int4-g64": LayerFormat(
        "int4",
        group_size=64,
        next=("int4-g32", "int8-weight", "int8-dynamic"),
        on_cuda=True,
        auto=("tensorrt",),
    ),
    "int4-g128": LayerFormat(
        "int4",
        group_size=128,
        next=("int4-g64", "int4-g32", "int8-weight", "int8-dynamic"),
        on_cuda=True,
    ),
    "int8-dynamic": LayerFormat("int8", "int8", next=("int8-weight",), auto=("cpu",)),
    "int8-static": LayerFormat("int8", "int8", True, next=("int8-dynamic",)),
    "int8-weight": LayerFormat(
        "int8", next=("int8-dynamic",), on_cuda=True, auto=("tensorrt", "cuda")
    ),
}
"""The layer formats. The keys are the names of the formats. The formats that ``--precision auto``
tries come first, and start with the cheapest format.
"""
