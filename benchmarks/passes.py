"""Milliseconds a pass: the graph in ONNX Runtime, fp32 to INT4, against eager torch in fp32 and bf16, in one interleaved run.

    python benchmarks/passes.py [--size 134M] [--rounds 15] [--json FILE]

Also whole generations: the native runtime against the reference loop in torch, same policy, same cache, equal NFE.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from shapes import ROOT, checkpoint, machine

import dlm_runtime
from dlm_export import families, reference
from dlm_export.checkpoint import Checkpoint
from dlm_export.denoiser import Denoiser
from dlm_export.families.base import Overrides

PASSES = ((32, 224, 32), (256, 0, 256), (256, 0, 32))  # (T, S, R)
PRECISIONS = ("fp32", "fp16", "int8", "int8-all", "int8-static", "int4-rtn")
GENERATED = ("fp32", "int8", "int8-all")


def bundle_of(size: str, precision: str) -> Path:
    """Build the bundle of a size once."""
    path = ROOT / "build" / "benchmarks" / f"bundle-{size}-{precision}"
    if not path.is_dir():
        arguments = [str(checkpoint(size)), "-o", str(path), "--precision", precision, "--no-verify"]
        arguments += ["--calib-samples", "4", "--calib-states", "4"]  # ranges do not change what a pass costs
        subprocess.run([sys.executable, "-m", "dlm_export.cli", "build", *arguments], check=True, stdout=subprocess.DEVNULL)
    return path


def session(path: Path) -> onnxruntime.InferenceSession:
    """The graph with the options that the native runtime sets."""
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.force_spinning_stop", "1")
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    return onnxruntime.InferenceSession(str(path / "denoiser.onnx"), options, providers=["CPUExecutionProvider"])


def onnx_pass(engine: onnxruntime.InferenceSession, T: int, S: int, R: int) -> Callable[[], Any]:
    """A pass of the graph that fetches what the loop fetches: the best tokens and their probabilities."""
    rng = np.random.default_rng(0)
    feeds = {
        "input_ids": rng.integers(0, 1000, (1, T)),
        "position_ids": np.arange(S, S + T)[None],
        "score_rows": np.arange(R)[None],
    }
    for port in engine.get_inputs():
        if port.name.startswith("past"):
            shape = (1, port.shape[1], S, port.shape[3])
            feeds[port.name] = rng.standard_normal(shape).astype(np.float16 if "16" in port.type else np.float32)
    return lambda: engine.run(["top_token", "top_prob"], feeds)


def torch_pass(denoiser: Denoiser, T: int, S: int, R: int) -> Callable[[], Any]:
    """The same pass in eager torch: body, scored rows, head, softmax and the two best."""
    c, dtype = denoiser.capabilities, denoiser.final_norm.weight.dtype
    ids, positions, rows = torch.randint(0, 1000, (1, T)), torch.arange(S, S + T)[None], torch.arange(R)
    shape = (1, c.kv_heads, S, c.head_size)
    past = [(torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)) for _ in range(c.layers)] if S else None

    def run() -> Any:
        features, _ = denoiser.hidden(ids, positions, past)
        logits = denoiser.project(features[:, rows]).float()
        logits[..., c.mask_token_id] = -torch.inf
        return logits.softmax(-1).topk(2)

    return run


def interleave(runs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, dict[str, float]]:
    """Run each in turn, ``rounds`` times after two warm-ups; median and quartiles in ms."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 2):
        for name, run in runs.items():
            began = time.perf_counter()
            run()
            if number >= 2:
                times[name].append((time.perf_counter() - began) * 1e3)
    out = {}
    for name, values in times.items():
        low, median, high = statistics.quantiles(values, n=4)
        out[name] = {"median_ms": round(median, 2), "q1_ms": round(low, 2), "q3_ms": round(high, 2)}
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="134M")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    opened = Checkpoint(checkpoint(arguments.size))
    capabilities = families.read_capabilities(opened, Overrides())
    fp32 = families.load(families.Weights(opened, capabilities), capabilities)
    bf16 = families.load(families.Weights(opened, capabilities), capabilities, torch.bfloat16)
    engines = {f"onnxruntime {p}": session(bundle_of(arguments.size, p)) for p in PRECISIONS}
    result: dict[str, Any] = {"machine": machine(), "size": arguments.size, "rounds": arguments.rounds, "passes": {}}
    with torch.inference_mode():
        for T, S, R in PASSES:
            runs = {name: onnx_pass(engine, T, S, R) for name, engine in engines.items()}
            runs |= {"torch fp32": torch_pass(fp32, T, S, R), "torch bf16": torch_pass(bf16, T, S, R)}
            result["passes"][f"T={T} S={S} R={R}"] = rows = interleave(runs, arguments.rounds)
            show(f"T = {T}, S = {S}, R = {R}", rows, "torch fp32")
        del engines
        prompt = np.random.default_rng(1).integers(0, 1000, 128).tolist()
        with contextlib.ExitStack() as opened:
            bundles = {
                name: opened.enter_context(dlm_runtime.open(bundle_of(arguments.size, name), check_hashes=False))
                for name in GENERATED
            }
            policy = bundles["fp32"].policy("llada", cache="dual", stop="none")
            fields = policy.as_dict()

            def native(name: str) -> Callable[[], object]:
                return lambda: bundles[name].generate(tokens=prompt, max_new_tokens=64, **fields)

            runs = {f"native runtime {name}": native(name) for name in GENERATED}
            runs |= {
                "reference loop, torch fp32": lambda: reference.generate(fp32, prompt, policy, 64),
                "reference loop, torch bf16": lambda: reference.generate(bf16, prompt, policy, 64),
            }
            result["generation"] = rows = interleave(runs, max(3, arguments.rounds // 5))
            show("128 given, 64 new tokens, blocks of 32, static, dual cache: 64 passes", rows, "reference loop, torch fp32")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


def show(title: str, rows: dict[str, dict[str, float]], baseline: str) -> None:
    """Print medians, quartiles and the ratio to the baseline of the same run."""
    print(title)
    for name, row in rows.items():
        ratio = rows[baseline]["median_ms"] / row["median_ms"]
        print(f"  {name:28} {row['median_ms']:9.1f} ms  ({row['q1_ms']:.1f} .. {row['q3_ms']:.1f})  {ratio:.2f} x", flush=True)


if __name__ == "__main__":
    main()
