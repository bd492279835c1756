"""Describes the two variants of TensorRT: standard TensorRT and TensorRT-RTX.

Each variant can build and run engines. The manifest, the native library and ``--builder`` use the
``name`` of a variant. Targets use the ``kind`` of a variant.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineBuilder:
    """One TensorRT variant.

    ``modules`` lists the Python modules that can build engines. One of these modules is enough.
    ``libraries`` lists the shared libraries that can run engines of this variant, newest first.
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
    # The module of the complete package, and the module of the package with only the bindings.
    ("tensorrt_rtx", "tensorrt_rtx_bindings"),
    ("libtensorrt_rtx.so.1",),
)
ENGINE_BUILDERS = {builder.name: builder for builder in (TENSORRT, RTX)}
