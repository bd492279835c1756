"""Compare this project's loop with PyTorch on one GPU, with a denoiser of LLaDA-8B's shape.

    python benchmarks/gpu/run.py --wheel onnxruntime_gpu-1.31.1-*.whl --json gpu.json     # on an H100 or H200, in one go
    python benchmarks/gpu/run.py --layers 8 --precision fp16 --json gpu.json
    python benchmarks/gpu/run.py --device cpu --tiny --json rehearsal.json                # no GPU: the same steps on a CPU

This project's loop uses the CUDA provider of ONNX Runtime. Install this project with its export
extra, and PyTorch for CUDA. --wheel replaces the installed ONNX Runtime with a wheel file. The
dependencies of the wheel are not installed, so ONNX Runtime uses the NVIDIA libraries of PyTorch.

The weights are random, so confidences mean nothing. The loops therefore commit a fixed number of
tokens per pass and never stop early. Each contestant runs in a separate process. The script prints:

- the time of a generation: the median of the rounds after one warm-up;
- the memory: on a GPU, the process's GPU memory (nvidia-smi); on a CPU, its largest resident set;
- "equal": the share of positions where eager PyTorch generated the same token.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

LAYERS = 32
TINY = {
    "d_model": 128,
    "n_heads": 4,
    "n_kv_heads": 4,
    "mlp_hidden_size": 256,
    "max_sequence_length": 256,
}
NATIVE = "native"
TORCH = ("torch-eager", "torch-compile", "torch-cudagraphs")
Generate = Callable[[list[int], int, dict[str, Any]], tuple[list[int], int]]
"""Takes the given tokens, the number of tokens to fill and the fields of a policy. Returns the
canvas and the number of passes.
"""


# ---- A contestant in a separate process ----


def native(options: argparse.Namespace) -> tuple[Generate, str]:
    """Return a function that generates with the native loop."""
    import dlm_runtime

    bundle = dlm_runtime.open(
        options.bundle, engine="onnxruntime", provider=options.device, check_hashes=False
    )

    def generate(tokens: list[int], new: int, policy: dict[str, Any]) -> tuple[list[int], int]:
        done = bundle.generate(tokens=tokens, max_new_tokens=new, **policy)
        return done.tokens, done.nfe

    return generate, bundle.engine


def in_torch(options: argparse.Namespace) -> tuple[Generate, str]:
    """Return a function that generates with the reference loop.

    The layers of the denoiser run eagerly, or are compiled with or without CUDA graphs.
    """
    import torch

    from dlm_export import families
    from dlm_export.checkpoints.folder import Checkpoint
    from dlm_export.families.base import Overrides
    from dlm_export.network import reference
    from dlm_runtime.policy import Policy

    opened = Checkpoint(options.checkpoint)
    network = families.read_network(opened, Overrides())
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[options.precision]
    denoiser = families.load(families.open_weights(opened, network), network, dtype).to(
        options.device
    )
    if options.contestant != "torch-eager":
        mode = "reduce-overhead" if options.contestant == "torch-cudagraphs" else None
        torch._dynamo.config.recompile_limit = 256
        compiled = torch.compile(denoiser.hidden, dynamic=False, mode=mode)

        def hidden(*arguments: Any) -> Any:
            # A replay of a CUDA graph overwrites the results of the previous replay. The loop still
            # needs some of these results.
            torch.compiler.cudagraph_mark_step_begin()
            features, presents = compiled(*arguments)
            return features.clone(), [(keys.clone(), values.clone()) for keys, values in presents]

        denoiser.hidden = hidden  # type: ignore[method-assign]

    def generate(tokens: list[int], new: int, policy: dict[str, Any]) -> tuple[list[int], int]:
        done = reference.generate(denoiser, tokens, Policy(**policy), new)
        return done.tokens, done.nfe

    return generate, f"torch {torch.__version__}, {options.precision}"


def memory_bytes(device: str) -> int | None:
    """Return this process's GPU memory in bytes, or on a CPU its largest resident set."""
    if device == "cpu":
        status = Path("/proc/self/status").read_text()
        return next(
            int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:")
        )
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    told = subprocess.run(query, check=True, capture_output=True, text=True).stdout
    held = dict(line.split(", ") for line in told.splitlines() if line.split(", ")[-1].isdigit())
    # In a container, the driver may list this process with a different id. If only one process uses
    # the GPU, that process must be this process.
    own = held.get(str(os.getpid())) or (next(iter(held.values())) if len(held) == 1 else None)
    return None if own is None else int(own) << 20


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of one contestant for each loop."""
    generate, engine = (native if options.contestant == NATIVE else in_torch)(options)
    given, loops = [5 + 7 * i % 97 for i in range(options.prompt)], {}
    for cache in ("none", "dual"):
        block = min(options.block, options.new)
        policy = {"cache": cache, "commit": "static", "block_length": block, "stop": "none"}
        policy["steps_per_block"] = max(1, block // options.tokens_per_pass)
        seconds = []
        for _ in range(1 + options.rounds):
            began = time.perf_counter()
            canvas, nfe = generate(given, options.new, policy)
            seconds.append(time.perf_counter() - began)
        median = statistics.median(seconds[1:])
        loops[cache] = {
            "seconds": median,
            "first_s": seconds[0],
            "nfe": nfe,
            "tokens_per_s": options.new / median,
            "ms_per_pass": 1e3 * median / nfe,
            "canvas": canvas,
        }
    return {
        "contestant": options.contestant,
        "engine": engine,
        "loops": loops,
        "memory_bytes": memory_bytes(options.device),
    }


# ---- The whole run ----


def run(command: list[str]) -> str:
    """Run a command and return its output. Exits if the command fails."""
    print("$", " ".join(command), file=sys.stderr)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"exit {done.returncode}: {' '.join(command)}")
    return done.stdout


def install(wheel: Path) -> None:
    pip = [sys.executable, "-m", "pip"]
    run([*pip, "uninstall", "-y", "onnxruntime", "onnxruntime-gpu"])
    run([*pip, "install", "--no-deps", str(wheel)])


def prepare(options: argparse.Namespace, work: Path) -> tuple[Path, Path]:
    """Return the checkpoint and its bundle. Files from an earlier run are reused."""
    import real_size

    checkpoint, bundle = work / "checkpoint", work / f"bundle-{options.precision}"
    if not (checkpoint / "model.safetensors.index.json").is_file():
        shape = (
            TINY | {"n_layers": 2}
            if options.tiny
            else real_size.REAL | {"n_layers": options.layers}
        )
        ids = {} if options.tiny else real_size.IDS
        real_size.write_checkpoint(
            checkpoint, real_size.llada_config(**shape, **ids), has_data=True
        )
    if not (bundle / "manifest.json").is_file():
        build = [
            sys.executable,
            "-m",
            "dlm_export.cli",
            "build",
            str(checkpoint),
            "--target",
            "cuda",
        ]
        # A denoiser in fp32 would need twice the memory.
        verify = [] if options.tiny else ["--no-verify"]
        run([*build, "--precision", options.precision, *verify, "-o", str(bundle)])
    return checkpoint, bundle


def compare(options: argparse.Namespace, checkpoint: Path, bundle: Path) -> list[dict[str, Any]]:
    """Return a row for each contestant and loop.

    If a contestant fails, the row contains the reason instead of figures.
    """
    rows, eager = [], {}
    for contestant in options.contestants:
        command = [
            sys.executable,
            __file__,
            "--contestant",
            contestant,
            "--checkpoint",
            str(checkpoint),
            "--bundle",
            str(bundle),
        ]
        for name in ("device", "precision", "prompt", "new", "block", "tokens_per_pass", "rounds"):
            command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"exit {done.returncode}"]
            rows.append({"contestant": contestant, "failed": lines[-1]})
            print(f"{contestant}: {lines[-1]}", file=sys.stderr)
            continue
        told = json.loads(done.stdout)
        for cache, figures in told.pop("loops").items():
            canvas = figures.pop("canvas")[-options.new :]
            if contestant == "torch-eager":
                eager[cache] = canvas
            rows.append({**told, "cache": cache, **figures, "canvas": canvas})
    for row in rows:
        other, canvas = eager.get(row.get("cache", "")), row.pop("canvas", None)
        if other is not None and canvas is not None:
            row["equal"] = sum(one == two for one, two in zip(canvas, other, strict=True)) / len(
                other
            )
    return rows


def machine(device: str) -> dict[str, Any]:
    """Return the hardware and the versions of the measurement."""
    from dlm_export.machine import this_machine

    found = {name: value for name, value in this_machine().items() if name != "onnxruntime_library"}
    if device != "cpu":
        query = [
            "nvidia-smi",
            "--query-gpu=name,driver_version,memory.total",
            "--format=csv,noheader",
        ]
        found["gpu"] = run(query).strip()
    return found


def show(rows: list[dict[str, Any]]) -> None:
    print(
        f"{'contestant':18} {'cache':6} {'tokens/s':>9} {'ms a pass':>10} {'passes':>7} {'GiB':>6} {'equal':>6}"
    )
    for row in rows:
        if "failed" in row:
            print(f"{row['contestant']:18} {row['failed']}")
            continue
        memory = "-" if row["memory_bytes"] is None else f"{row['memory_bytes'] / 2**30:.2f}"
        equal = f"{row['equal']:.2f}" if "equal" in row else "-"
        figures = f"{row['tokens_per_s']:9.1f} {row['ms_per_pass']:10.2f} {row['nfe']:7}"
        print(f"{row['contestant']:18} {row['cache']:6} {figures} {memory:>6} {equal:>6}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--wheel", type=Path, help="wheel of onnxruntime-gpu to install first")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument(
        "--tiny", action="store_true", help="a network of a few layers, to rehearse with"
    )
    parser.add_argument("--layers", type=int, default=LAYERS, help="layers of the 8 B shape")
    parser.add_argument("--precision", choices=["bf16", "fp16"], default="bf16")
    parser.add_argument("--prompt", type=int, default=128, help="tokens given")
    parser.add_argument("--new", type=int, default=128, help="tokens to fill")
    parser.add_argument("--block", type=int, default=32, help="tokens of a block")
    parser.add_argument("--tokens-per-pass", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--contestants",
        type=lambda text: text.split(","),
        help="contestants, with commas, such as native,torch-eager",
    )
    parser.add_argument("--work", type=Path, help="folder that keeps the checkpoint and the bundle")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--contestant", choices=[NATIVE, *TORCH], help=argparse.SUPPRESS)
    parser.add_argument("--checkpoint", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--bundle", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contestants is None:
        options.contestants = [NATIVE, *(TORCH if options.device == "cuda" else TORCH[:1])]
    if unknown := {*options.contestants} - {NATIVE, *TORCH}:
        parser.error(
            f"--contestants: {', '.join(sorted(unknown))}: of {', '.join([NATIVE, *TORCH])}"
        )
    return options


def main() -> int:
    options = parse()
    if options.contestant:
        print(json.dumps(measure(options)))
        return 0
    if options.wheel:
        install(options.wheel)
    with tempfile.TemporaryDirectory() as temporary:
        work = options.work or Path(temporary)
        checkpoint, bundle = prepare(options, work)
        rows = compare(options, checkpoint, bundle)
    show(rows)
    if options.json:
        request = {
            name: getattr(options, name)
            for name in ("precision", "prompt", "new", "block", "tokens_per_pass", "rounds")
        }
        shape = "tiny" if options.tiny else f"LLaDA-8B's, {options.layers} layers"
        told = {
            "machine": machine(options.device),
            "shape": shape,
            "request": request,
            "rows": rows,
        }
        options.json.write_text(json.dumps(told, indent=1) + "\n")
    return 1 if any("failed" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
