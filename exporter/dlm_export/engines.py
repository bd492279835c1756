"""The two TensorRTs that build and run engines: one record each.

``name`` is what the manifest, the native library and ``--builder`` call it; ``kind`` is what targets
call it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineBuilder:
    """``modules``: the Python packages, any of which will do; ``libraries``: those that run its
    engines, newest first.
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
    ("tensorrt_rtx", "tensorrt_rtx_bindings"),  # NVIDIA's whole package, or its bindings alone
    ("libtensorrt_rtx.so.1",),
)
ENGINE_BUILDERS = {builder.name: builder for builder in (TENSORRT, RTX)}
