"""Changes a CPU graph so that its attention caches keys and values in fp16 or INT8."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from dlm_export.graph import LAYER_KEY, operators
from dlm_export.graph.attention import ATTENTION, STORED
from dlm_export.graph.body import DOMAIN
from dlm_export.graph.trace import Graph
from dlm_runtime.cache_dtypes import CACHE_ROWS
from dlm_runtime.errors import DlmError, ExitCode

_TYPES = {
    "float32": ir.DataType.FLOAT,
    "float16": ir.DataType.FLOAT16,
    "bfloat16": ir.DataType.BFLOAT16,
    "int8": ir.DataType.INT8,
}


class CacheError(DlmError):
    """Raised if a graph's attention cannot store keys and values in the requested type."""

    exit_code = ExitCode.WRONG_INPUT


def row_of(cache_dtype: str, head_size: int) -> tuple[ir.DataType, int]:
    """Return the element type and the number of elements of one cached row (a key or a value)."""
    element_bytes, scale_bytes = CACHE_ROWS[cache_dtype]
    return _TYPES[cache_dtype], head_size + scale_bytes // element_bytes


def store_as(traced: Graph, plain: Mapping[str, str], cache_dtype: str) -> None:
    """Change the type in which a fused graph caches keys and values.

    This function changes the attention functions and the inputs and outputs of the cache. The keys
    of ``plain`` are the modules that ``fuse`` could not replace with a kernel, and the values are
    the reasons (see ``Fused``). Raises CacheError if ``plain`` contains the attention of a layer.
    """
    model = traced.model
    for node in list(model.graph):
        if node.op_type == "Attention":
            path = node.metadata_props[LAYER_KEY]
            raise CacheError(
                f"--cache-dtype: the attention of {path} was not fused ({plain[path]}), so its cache cannot be stored "
                f"in another type. Omit --cache-dtype."
            )
        if node.op_type in ATTENTION and node.domain == DOMAIN:
            node.op_type = f"{STORED[cache_dtype]}{node.op_type}"
            operators.declare(model, node.op_type)
            for value in (*node.inputs[3:5], *node.outputs[1:]):
                assert value is not None
                assert value.shape is not None
                head_size = value.shape[3]
                assert isinstance(head_size, int)
                dtype, width = row_of(cache_dtype, head_size)
                value.type, value.shape = ir.TensorType(dtype), ir.Shape([*value.shape[:3], width])
    for name in ATTENTION:
        model.functions.pop((DOMAIN, name, ""), None)
