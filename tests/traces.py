"""Traced graphs that tests share.

torch.onnx.export takes most of the time of building a tiny denoiser. Its result only depends on the
network and the precision. Tests therefore store graphs in files and read them again, also in later
test runs. ``python tests/traces.py ARGUMENTS`` runs the command ``dlm-export`` with stored graphs.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import sys
import threading
from importlib.metadata import version
from pathlib import Path

import dlm_export
from dlm_export.graph import trace
from dlm_export.network.spec import NetworkSpec

FOLDER = Path(__file__).parent.parent / "build" / "test-traces"
STACK_BYTES = 512 << 20
PACKAGES = ("torch", "onnx", "onnx-ir", "onnxscript")

_trace = trace.trace_pass
_traces: dict[tuple[NetworkSpec, str, bool], trace.Graph] = {}


def _code() -> bytes:
    """Return a hash of the source code and package versions on which traced graphs depend."""
    found = hashlib.sha256(" ".join(version(name) for name in PACKAGES).encode())
    package = Path(dlm_export.__file__).parent
    for folder in ("graph", "network"):
        for path in sorted((package / folder).rglob("*.py")):
            found.update(path.read_bytes())
    return found.digest()


CODE = _code()


def trace_once(network: NetworkSpec, precision: str, *, is_plain: bool = False) -> trace.Graph:
    """Like ``trace_pass``, but trace each network only once in each precision.

    The result is a copy of the stored graph, so the caller may change it.
    """
    key = network, precision, is_plain
    if key not in _traces:
        name = hashlib.sha256(CODE + repr(key).encode()).hexdigest()
        _traces[key] = _read_or_trace(FOLDER / f"{name}.pickle", *key)
    return _traces[key].clone()


def _read_or_trace(path: Path, network: NetworkSpec, precision: str, is_plain: bool) -> trace.Graph:
    """Return the graph in the file ``path``. If there is no such file, trace and write the graph."""
    if path.is_file():
        found: trace.Graph = pickle.loads(path.read_bytes())
        return found
    found = _trace(network, precision, is_plain=is_plain)
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_suffix(f".{os.getpid()}")
    written.write_bytes(_dumped(found))
    written.replace(path)
    return found


def _dumped(graph: trace.Graph) -> bytes:
    """Pickle a graph. A thread with a large stack does this, because pickle follows each node to
    the next one, and a graph has thousands of nodes.
    """
    done: list[bytes] = []
    limit, size = sys.getrecursionlimit(), threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=lambda: done.append(pickle.dumps(graph)))
    try:
        sys.setrecursionlimit(1_000_000)
        thread.start()
        thread.join()
    finally:
        sys.setrecursionlimit(limit)
        threading.stack_size(size)
    return done[0]


if __name__ == "__main__":
    from dlm_export.cli import main

    trace.trace_pass = trace_once
    main()
