"""The two TensorRT variants that can build and run engines.

The manifest, the native library and ``--builder`` refer to a variant by its ``name``; targets refer
to it by its ``kind``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineBuilder:
    """One TensorRT variant.

    ``modules`` are the Python packages that can build engines; any one of them is enough.
    ``libraries`` are the shared libraries that can run its engines, newest first.
    """

    name: str
    kind: str
    title: str
    modules: tuple[str, ...]
    libraries: tuple[str, ...]


TENSORRT = EngineBuilder(
    "tensorrt",
    "tensorrt",
    "TensorRT",
    ("tensorrt",),
    ("libnvinfer.so.11", "libnvinfer.so.10"),
)
RTX = EngineBuilder(
    "tensorrt_rtx",
    "rtx",
    "TensorRT-RTX",
    ("tensorrt_rtx", "tensorrt_rtx_bindings"),  # NVIDIA's whole package, or only its bindings
    ("libtensorrt_rtx.so.1",),
)
ENGINE_BUILDERS = {builder.name: builder for builder in (TENSORRT, RTX)}
