"""Time a pass in the native runtime, in plain ONNX Runtime with the same graph, and in eager torch.

    python -m benchmarks.speed.passes [--size 134M] [--rounds 15] [--json FILE]

The script measures the native runtime and plain ONNX Runtime in precisions from fp32 to INT4, and
torch in fp32 and bf16. All of them run in one process, and take turns. A graph contains ONNX
functions. The native runtime replaces some of these functions with its own kernels. Plain ONNX
Runtime runs the operators of which the functions consist. generation.py compares whole generations,
also with llama.cpp.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch

import dlm_runtime
from benchmarks.shapes import bundle_of, checkpoint, machine
from benchmarks.speed.contestants import torch_pass
from benchmarks.timing import clocked, interleave, show
from dlm_export import families
from dlm_export.checkpoints.folder import Checkpoint
from dlm_export.families.base import Overrides

# For each pass: requests, computed tokens, cached tokens, and scored rows.
PASSES = (
    (1, 32, 224, 32),
    (1, 256, 0, 256),
    (1, 256, 0, 32),
    (4, 32, 224, 32),
    (8, 32, 224, 32),
)
PRECISIONS = ("fp32", "fp16", "int8", "int8-static", "int4-rtn")


def session(path: Path) -> onnxruntime.InferenceSession:
    """Open the graph with the same options as the native runtime."""
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.force_spinning_stop", "1")
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    return onnxruntime.InferenceSession(
        str(path / "denoiser.onnx"), options, providers=["CPUExecutionProvider"]
    )


def onnx_pass(
    engine: onnxruntime.InferenceSession, B: int, T: int, S: int, R: int
) -> Callable[[], Any]:
    """Return a function that runs the graph.

    As in the decoding loop, the graph returns the most likely tokens and their probabilities.
    """
    rng = np.random.default_rng(0)
    feeds = {
        "input_ids": rng.integers(0, 1000, (B, T)),
        "position_ids": np.tile(np.arange(S, S + T), (B, 1)),
        "score_rows": np.tile(np.arange(R), (B, 1)),
    }
    for port in engine.get_inputs():
        if port.name.startswith("past"):
            shape = (B, port.shape[1], S, port.shape[3])
            feeds[port.name] = rng.standard_normal(shape).astype(
                np.float16 if "16" in port.type else np.float32
            )
    return lambda: engine.run(["top_token", "top_prob"], feeds)


def native_pass(bundle: dlm_runtime.Bundle, B: int, T: int, S: int, R: int) -> Callable[[], float]:
    """Return a function that runs a pass and returns the seconds of the native runtime's engine."""
    return lambda: bundle.time_passes(T, S, R, 1, B)[0]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", default="134M")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    opened = Checkpoint(checkpoint(arguments.size))
    network = families.read_network(opened, Overrides())
    denoisers = {
        "torch fp32": families.load(families.open_weights(opened, network), network),
        "torch bf16": families.load(
            families.open_weights(opened, network), network, torch.bfloat16
        ),
    }
    folders = {precision: bundle_of(arguments.size, precision) for precision in PRECISIONS}
    engines = {f"onnxruntime {name}": session(folder) for name, folder in folders.items()}
    result: dict[str, Any] = {
        "machine": machine(),
        "size": arguments.size,
        "rounds": arguments.rounds,
        "passes": {},
    }
    with contextlib.ExitStack() as stack:
        bundles: dict[str, dlm_runtime.Bundle] = {}
        for name, folder in folders.items():
            bundles[f"native {name}"] = stack.enter_context(
                dlm_runtime.open(folder, check_hashes=False)
            )
        for B, T, S, R in PASSES:
            runs = {name: native_pass(bundle, B, T, S, R) for name, bundle in bundles.items()}
            runs |= {
                name: clocked(onnx_pass(engine, B, T, S, R)) for name, engine in engines.items()
            }
            runs |= {
                name: clocked(torch_pass(denoiser, B, T, S, R))
                for name, denoiser in denoisers.items()
            }
            result["passes"][f"B={B} T={T} S={S} R={R}"] = rows = interleave(runs, arguments.rounds)
            show(f"B = {B}, T = {T}, S = {S}, R = {R}", rows, "torch fp32")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
