"""Describes the two variants of TensorRT: standard TensorRT and TensorRT-RTX.

The manifest, the native library and ``--builder`` identify a variant by its ``name``. Targets
identify a variant by its ``kind``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineBuilder:
    """One TensorRT variant.

    ``modules`` lists the Python modules that can build engines. A machine needs only one of them.
    ``libraries`` lists the shared libraries that can run engines of this variant, best first.
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
    ("libnvinfer.so.11", "libnvinfer.so.10", "libnvinfer_lean.so.11", "libnvinfer_lean.so.10"),
)
RTX = EngineBuilder(
    "tensorrt_rtx",
    "rtx",
    "TensorRT-RTX",
    # The module of the complete package, and the module of the package with only the bindings.
    ("tensorrt_rtx", "tensorrt_rtx_bindings"),
    ("libtensorrt_rtx.so.1",),
)
ENGINE_BUILDERS = {builder.name: builder for builder in (TENSORRT, RTX)}
