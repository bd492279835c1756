"""Traced graphs that tests share.

In a tiny build, torch.onnx.export takes most of the time, and always returns the same graph.
"""

from __future__ import annotations

from dlm_export.graph import trace
from dlm_export.network.spec import NetworkSpec

_trace = trace.trace_pass
_traces: dict[tuple[NetworkSpec, str, bool, bool], trace.Graph] = {}


def trace_once(network: NetworkSpec, precision: str, *, is_plain: bool = False) -> trace.Graph:
    """Like ``trace_pass``, but traces each network and precision only once.

    Returns a copy of the graph. The caller may change the copy.
    """
    key = network, precision, is_plain
    if key not in _traces:
        _traces[key] = _trace(network, precision, is_plain=is_plain)
    return _traces[key].clone()
