"""Traced graphs that tests share.

torch.onnx.export takes most of the time of building a tiny denoiser. Its result only depends on the
number type and on those parts of the network that the traced layers compute with, which are the
same in many families. Tests therefore store the results in files and read them again, also in later
test runs.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import sys
import threading
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import onnx_ir as ir
import torch

import dlm_export
from dlm_export.graph import trace
from dlm_export.network.spec import NetworkSpec

FOLDER = Path(__file__).parent.parent / "build" / "test-traces"
STACK_BYTES = 512 << 20
PACKAGES = ("torch", "onnx", "onnx-ir", "onnxscript")
# The fields of a network that change nothing in the layers.
UNTRACED: dict[str, Any] = {
    "family": "",
    "architecture": "",
    "shift": 0,
    "eos_token_ids": (),
    "pad_token_id": None,
    "noise": "absorbing",
    "unused_tokens": (),
    "adapter": None,
}

_trace, _export = trace.trace_pass, torch.onnx.export
_models: dict[str, ir.Model] = {}


def _code() -> bytes:
    """Return a hash of the source code and package versions on which traced graphs depend."""
    found = hashlib.sha256(" ".join(version(name) for name in PACKAGES).encode())
    package = Path(dlm_export.__file__).parent
    for folder in ("graph", "network"):
        for path in sorted((package / folder).glob("*.py")):
            found.update(path.read_bytes())
    return found.digest()


CODE = _code()


def trace_once(network: NetworkSpec, precision: str, *, is_plain: bool = False) -> trace.Graph:
    """Like ``trace_pass``, but export equal layers only once in each precision."""
    with mock.patch("torch.onnx.export", _export_once):
        return _trace(network, precision, is_plain=is_plain)


def _export_once(module: trace.Pass, *arguments: Any, **options: Any) -> SimpleNamespace:
    denoiser = module.denoiser
    network = replace(denoiser.network, **UNTRACED)
    if not network.has_masks_last:
        network = replace(network, mask_token_id=0)
    key = repr((network, denoiser.embed.weight.dtype, denoiser.is_plain))
    name = hashlib.sha256(CODE + key.encode()).hexdigest()
    path = FOLDER / f"{name}.pickle"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        written = path.with_suffix(f".{os.getpid()}")
        written.write_bytes(_dumped(_export(module, *arguments, **options).model))
        written.replace(path)
    if name not in _models:
        _models[name] = pickle.loads(path.read_bytes())
    return SimpleNamespace(model=_models[name].clone())


def _dumped(model: ir.Model) -> bytes:
    """Pickle a model without torch's objects. A thread with a large stack does this, because pickle
    follows each node to the next one, and a graph has thousands of nodes.
    """
    model = model.clone()  # torch's values become plain ones
    values = [*model.graph.inputs, *model.graph.initializers.values()]
    for node in model.graph:
        node.meta.clear()
        values += node.outputs
    for value in values:
        value.meta.clear()
        if value.const_value is not None and value.const_value.raw.is_meta:
            value.const_value = None
    done: list[bytes] = []
    limit, size = sys.getrecursionlimit(), threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=lambda: done.append(pickle.dumps(model)))
    try:
        sys.setrecursionlimit(1_000_000)
        thread.start()
        thread.join()
    finally:
        sys.setrecursionlimit(limit)
        threading.stack_size(size)
    return done[0]
