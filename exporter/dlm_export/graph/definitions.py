"""Limits torch.onnx to the ONNX definitions that a denoiser's trace needs.

For every trace, torch.onnx parses the Python source of about 500 definitions, which takes a fifth
of the time; a denoiser needs a few dozen. If ``network.denoiser`` uses a new operator that has a
definition, add it to the list. Otherwise torch decomposes the operator or raises an error that
names it.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Generator, Iterator

from onnxscript.function_libs.torch_lib import registration

OPERATORS = frozenset(
    f"aten::{name}"
    for name in (
        *(
            "_to_copy",
            "_unsafe_view",
            "add.Tensor",
            "amax",
            "any.dim",
            "arange",
            "cat",
            "clone",
            "div.Tensor",
            "embedding",
        ),
        *(
            "eq.Tensor",
            "expand",
            "full",
            "gather",
            "gt.Tensor",
            "log",
            "matmul",
            "mean.dim",
            "mul.Tensor",
            "permute",
        ),
        *(
            "pow.Tensor_Scalar",
            "remainder.Scalar",
            "rsqrt",
            "scalar_tensor",
            "scaled_dot_product_attention",
            "select.int",
        ),
        *(
            "sigmoid",
            "silu",
            "slice.Tensor",
            "softmax.int",
            "sub.Tensor",
            "sum.dim_IntList",
            "sym_size.int",
            "topk",
        ),
        *("transpose.int", "unsqueeze", "view", "where.ScalarOther"),
    )
)


class _Chosen(registration.Registry):
    """The part of a torch.onnx registry that a trace needs."""

    def __init__(self, whole: registration.Registry) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._whole = whole

    def items(self) -> Generator[tuple[str, registration.OverloadedFunction], None, None]:
        """Yield the names and definitions of needed operators, and of all non-torch functions."""
        for name, found in self._whole.items():
            if not name.startswith("aten::") or name in OPERATORS:
                yield name, found


@contextlib.contextmanager
def few() -> Iterator[None]:
    """While open, torch.onnx sees only the needed definitions."""
    # This import fills the default registry.
    importlib.import_module("onnxscript.function_libs.torch_lib.ops")
    whole = registration.default_registry
    registration.default_registry = _Chosen(whole)
    try:
        yield
    finally:
        registration.default_registry = whole
