"""The two TensorRT variants that build and run engines, one record each.

``name`` is used in the manifest, the native library and ``--builder``; ``kind`` is used by targets.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineBuilder:
    """``modules``: alternative Python packages; ``libraries``: run its engines, newest first."""

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
