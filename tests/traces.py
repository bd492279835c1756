"""Traces that tests share. Most of the time of a tiny build is spent in torch.onnx.export, which
always gives the same graph.
"""

from __future__ import annotations

from dlm_export.graph import trace
from dlm_export.network.spec import NetworkSpec

_trace = trace.trace_pass
_traces: dict[tuple[NetworkSpec, str, bool, bool], trace.Graph] = {}


def trace_once(network: NetworkSpec, precision: str, *, is_plain: bool = False) -> trace.Graph:
    """``trace_pass``, which runs once for each network and precision. Returns a copy of the graph,
    which the caller may change.
    """
    key = network, precision, is_plain
    if key not in _traces:
        _traces[key] = _trace(network, precision, is_plain=is_plain)
    return _traces[key].clone()
