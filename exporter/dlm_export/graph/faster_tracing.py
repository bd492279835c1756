"""Makes tracing faster: torch.onnx parses only the operator definitions that a denoiser needs.

In every trace, torch.onnx parses the Python source of about 500 operator definitions. Parsing takes
a fifth of the tracing time, although a denoiser needs only a few dozen definitions.

If ``network.denoiser`` uses a new operator that torch.onnx defines, add the operator to
``OPERATORS``. Otherwise, torch either decomposes the operator, or raises an error that names the
operator.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Generator, Iterator

from onnxscript.function_libs.torch_lib import registration

OPERATORS = frozenset(
    f"aten::{name}"
    for name in (
        "_to_copy",
        "_unsafe_view",
        "abs",
        "add.Tensor",
        "amax",
        "amin",
        "any.dim",
        "arange",
        "cat",
        "clamp",
        "clone",
        "constant_pad_nd",
        "div.Tensor",
        "embedding",
        "eq.Tensor",
        "erf",
        "expand",
        "full",
        "gather",
        "ge.Scalar",
        "gelu",
        "gt.Scalar",
        "gt.Tensor",
        "layer_norm",
        "log",
        "logical_or",
        "matmul",
        "maximum",
        "minimum",
        "neg",
        "lt.Scalar",
        "squeeze.dim",
        "reciprocal",
        "mean.dim",
        "mul.Tensor",
        "permute",
        "pow.Tensor_Scalar",
        "remainder.Scalar",
        "rsqrt",
        "scalar_tensor",
        "scaled_dot_product_attention",
        "select.int",
        "sigmoid",
        "silu",
        "slice.Tensor",
        "softmax.int",
        "sub.Tensor",
        "sum.dim_IntList",
        "sym_size.int",
        "tanh",
        "topk",
        "transpose.int",
        "unsqueeze",
        "view",
        "where.ScalarOther",
        "where.self",
    )
)


class _Chosen(registration.Registry):
    """A registry of torch.onnx that contains only the operators that a trace needs."""

    def __init__(self, whole: registration.Registry) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._whole = whole

    def items(self) -> Generator[tuple[str, registration.OverloadedFunction], None, None]:
        """Yield the operators that torch.onnx may use, with their definitions.

        The result contains the operators in ``OPERATORS``, and all operators that do not belong to
        torch.
        """
        for name, found in self._whole.items():
            if not name.startswith("aten::") or name in OPERATORS:
                yield name, found


@contextlib.contextmanager
def few() -> Iterator[None]:
    """Return a context in which torch.onnx parses only the definitions of ``OPERATORS``."""
    # This import fills the default registry.
    importlib.import_module("onnxscript.function_libs.torch_lib.ops")
    whole = registration.default_registry
    registration.default_registry = _Chosen(whole)
    try:
        yield
    finally:
        registration.default_registry = whole
