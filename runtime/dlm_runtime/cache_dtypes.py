"""The types in which keys and values can be stored in the cache."""

CACHE_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "int8": "int8"}
"""Maps each precision of the cache to the value of ``cache_dtype`` in the manifest."""
CPU_CACHES = ("fp32", "fp16", "int8")
"""The precisions of the cache that a build for CPUs offers."""
CACHE_ROWS = {"float32": (4, 0), "float16": (2, 0), "bfloat16": (2, 0), "int8": (1, 2)}
"""Maps each cache type, as the manifest names it, to two numbers: the bytes per element, and the
bytes of the scale of a row. A row is the key or value of one position in one head.
"""
ONNX_TYPES = {"float32": 1, "float16": 10, "bfloat16": 16, "int8": 3}
"""Maps each cache type to its number in ONNX (TensorProto.DataType)."""
