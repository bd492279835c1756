"""Traced graphs that tests share.

In a build of a tiny denoiser, torch.onnx.export takes most of the time. For the same network and
precision, it always returns the same graph.
"""

from __future__ import annotations

from dlm_export.graph import trace
from dlm_export.network.spec import NetworkSpec

_trace = trace.trace_pass
_traces: dict[tuple[NetworkSpec, str, bool, bool], trace.Graph] = {}


def trace_once(network: NetworkSpec, precision: str, *, is_plain: bool = False) -> trace.Graph:
    """Return the result of ``trace_pass``, but trace each network in each precision only once.

    The result is a copy of the stored graph, so the caller may change it.
    """
    key = network, precision, is_plain
    if key not in _traces:
        _traces[key] = _trace(network, precision, is_plain=is_plain)
    return _traces[key].clone()
