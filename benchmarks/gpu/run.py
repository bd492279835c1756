"""Compare this project's loop with PyTorch on one GPU, with a denoiser of LLaDA-8B's shape.

    python -m benchmarks.gpu.run --json gpu.json                             # on an H100 or H200
    python -m benchmarks.gpu.run --layers 8 --contestants native-int4-graphs,torch-eager --json gpu.json
    python -m benchmarks.gpu.run --device cpu --tiny --json rehearsal.json   # no GPU: the same steps on a CPU

This project's loop uses the CUDA provider of ONNX Runtime. Install this project with its export
extra, PyTorch for CUDA, and onnxruntime-gpu instead of onnxruntime.

The weights are random, so confidences mean nothing. The loops therefore commit a fixed number of
tokens per pass and never stop early. Each contestant runs in a separate process. The script prints:

- the time of a generation: the median of the rounds after one warm-up;
- "pass": the median time of a single pass, without the loop: over the whole canvas without a cache,
  and over a block that reads the cached rows of the rest of the canvas. The file of --json also has
  the times of passes of 4, 8, 32 and 256 tokens (PASS_TOKENS) over the same canvas;
- "floor": the time in which PyTorch adds up as many bytes as the bundle's weights have, which is the
  shortest possible time of a pass;
- "J/token": the energy of the GPU per new token, if nvidia-ml-py can read it;
- the memory: on a GPU, the process's GPU memory (nvidia-smi); on a CPU, its largest resident set;
- "equal": the share of positions where eager PyTorch generated the same token.

The file of --json also has ONNX Runtime's profile of a pass over a block, without CUDA graphs: the
nodes and, if the wheel can observe the GPU, the kernels that take the most time. With --work, the
complete profile stays in that folder.
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
from typing import Any, NamedTuple

from dlm_export.cli.printing import shown
from dlm_export.planning.energy import meter_of

LAYERS = 32
TINY = {
    "d_model": 128,
    "n_heads": 4,
    "n_kv_heads": 4,
    "mlp_hidden_size": 256,
    "max_sequence_length": 256,
}
PRECISIONS = ("fp16", "bf16", "int8", "int4")
GRAPHS = "-graphs"  # the end of the names of contestants that run passes as CUDA graphs
NATIVE = tuple(f"native-{precision}{end}" for precision in PRECISIONS for end in ("", GRAPHS))
TORCH = ("torch-eager", "torch-compile", "torch-cudagraphs")  # in bf16
PASSES = 20  # number of single passes of each size that are timed
PASS_TOKENS = (4, 8, 32, 256)
WARM_PASSES = 3  # single passes before the passes that are timed
PROFILE_ROWS = 20
FLOATS = {"tensor(float16)": 10, "tensor(bfloat16)": 16}  # the numbers of ONNX's data types


class Contestant(NamedTuple):
    """The functions of a contestant.

    - ``generate`` takes the given tokens, the number of tokens to fill, the fields of a policy and
      the number of requests that run together. Returns the canvas of the first request and the
      number of passes.
    - ``time_passes`` takes the tokens of a pass and its cached tokens. Predicts all tokens of the
      pass. Returns seconds.
    """

    generate: Callable[[list[int], int, dict[str, Any], int], tuple[list[int], int]]
    time_passes: Callable[[int, int], list[float]]
    engine: str


# ---- A contestant in a separate process ----


def native(options: argparse.Namespace) -> Contestant:
    import dlm_runtime

    bundle = dlm_runtime.open(
        options.bundle,
        engine="onnxruntime",
        provider=options.device,
        check_hashes=False,
        cuda_graphs=options.contestant.endswith(GRAPHS) and options.device == "cuda",
    )

    def generate(
        tokens: list[int], new: int, policy: dict[str, Any], batch: int
    ) -> tuple[list[int], int]:
        if batch == 1:
            done = bundle.generate(tokens=tokens, new_tokens=new, **policy)
        else:
            done = bundle.generate_batch(
                tokens=[tokens] * batch, new_tokens=new, max_batch=batch, **policy
            )[0]
        return done.tokens, done.nfe

    def time_passes(tokens: int, cached: int) -> list[float]:
        rows = min(tokens, options.block)
        bundle.time_passes(tokens, cached, rows, WARM_PASSES)
        return bundle.time_passes(tokens, cached, rows, PASSES)

    return Contestant(generate, time_passes, bundle.engine)


class Replayed:
    """Runs passes of the same size as one CUDA graph.

    The results of a pass are valid until the next pass of the same size.
    """

    def __init__(self, hidden: Callable[..., Any]) -> None:
        self.hidden = hidden
        self.graphs: dict[tuple[int, int], Any] = {}

    def __call__(self, ids: Any, positions: Any, past: Any, *more: Any) -> Any:
        import torch

        given = [ids, positions, *(tensor for pair in past or () for tensor in pair)]
        key = (ids.shape[1], past[0][0].shape[2] if past else 0)
        if key not in self.graphs:
            held = [tensor.clone() for tensor in given]
            pairs = list(zip(held[2::2], held[3::2], strict=True)) or None
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    self.hidden(held[0], held[1], pairs, *more)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                results = self.hidden(held[0], held[1], pairs, *more)
            self.graphs[key] = graph, held, results
        graph, held, results = self.graphs[key]
        torch._foreach_copy_(held, given)
        graph.replay()
        return results


def in_torch(options: argparse.Namespace) -> Contestant:
    """Return the reference loop, for one request at a time.

    The layers of the denoiser run eagerly, or are compiled with or without CUDA graphs.
    """
    import torch

    from dlm_export import families
    from dlm_export.checkpoints.folder import Checkpoint
    from dlm_export.families.base import Overrides
    from dlm_export.network import denoiser as network_module
    from dlm_export.network import reference
    from dlm_runtime.policy import Policy

    opened = Checkpoint(options.checkpoint)
    network = families.read_network(opened, Overrides())
    denoiser = families.load(families.open_weights(opened, network), network, torch.bfloat16).to(
        options.device
    )
    if options.contestant != "torch-eager":
        # Dynamo cannot trace the search for a layer's rotary table.
        network_module.turns_of = torch._dynamo.disable(network_module.turns_of)
        torch._dynamo.config.recompile_limit = 256
        compiled = torch.compile(denoiser.hidden, dynamic=False)
        denoiser.hidden = (  # type: ignore[method-assign]
            Replayed(compiled) if options.contestant == "torch-cudagraphs" else compiled
        )

    def generate(
        tokens: list[int], new: int, policy: dict[str, Any], batch: int
    ) -> tuple[list[int], int]:
        done = reference.generate(denoiser, tokens, Policy(**policy), new)
        return done.tokens, done.nfe

    @torch.no_grad()
    def time_passes(tokens: int, cached: int) -> list[float]:
        device, seconds = options.device, []
        ids = torch.arange(tokens, device=device)[None] % 100
        positions = torch.arange(cached, cached + tokens, device=device)[None]
        past = None
        if cached:
            past = [
                tuple(
                    torch.randn(
                        1,
                        layer.attention.kv_heads,
                        cached,
                        layer.attention.head_size,
                        device=device,
                        dtype=torch.bfloat16,
                    )
                    for _ in range(2)
                )
                for layer in network.layers
            ]
        for _ in range(WARM_PASSES + PASSES):
            began = time.perf_counter()
            features, _ = denoiser.hidden(ids, positions, past, "float32", None)
            denoiser.project(features[0, : options.block]).float().softmax(-1).max(-1)[0].cpu()
            seconds.append(time.perf_counter() - began)
        return seconds[WARM_PASSES:]

    return Contestant(generate, time_passes, f"torch {torch.__version__}, bf16")


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


def floor_ms(options: argparse.Namespace) -> float | None:
    """Return the median time in which torch adds up as many bytes as the weights have."""
    import torch

    size = (options.bundle / "denoiser.onnx.data").stat().st_size
    if options.device == "cuda" and size > 0.4 * torch.cuda.mem_get_info()[0]:
        return None
    weights = torch.zeros(size // 4, dtype=torch.int32, device=options.device)
    seconds = []
    for _ in range(PASSES):
        began = time.perf_counter()
        weights.sum(dtype=torch.int64).item()
        seconds.append(time.perf_counter() - began)
    return 1e3 * statistics.median(seconds)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of one contestant for each loop."""
    began = time.perf_counter()
    is_native = options.contestant in NATIVE
    contestant = (native if is_native else in_torch)(options)
    opened = time.perf_counter() - began
    given, loops = [5 + 7 * i % 97 for i in range(options.prompt)], []
    length, block = options.prompt + options.new, min(options.block, options.new)
    meter = meter_of(0 if options.device == "cuda" else None)
    for cache in ("none", "dual"):
        policy = {"cache": cache, "commit": "static", "block_length": block, "stop": "none"}
        policy["steps_per_block"] = max(1, block // options.tokens_per_pass)
        sizes = (length, 0) if cache == "none" else (block, length - block)
        passes = statistics.median(contestant.time_passes(*sizes))
        for batch in options.batches if is_native else [1]:
            seconds, joules = [], 0.0
            for number in range(1 + options.rounds):
                if meter is not None and number == 1:
                    joules = meter.joules()
                began = time.perf_counter()
                canvas, nfe = contestant.generate(given, options.new, policy, batch)
                seconds.append(time.perf_counter() - began)
            median = statistics.median(seconds[1:])
            loops.append(
                {
                    "cache": cache,
                    "batch": batch,
                    "seconds": median,
                    "lowest_s": min(seconds[1:]),
                    "highest_s": max(seconds[1:]),
                    "first_s": seconds[0],
                    "nfe": nfe,
                    "tokens_per_s": batch * options.new / median,
                    "ms_per_pass": 1e3 * median / nfe,
                    "single_pass_ms": 1e3 * passes,
                    "joules_per_token": None
                    if meter is None
                    else (meter.joules() - joules) / (options.rounds * batch * options.new),
                    "memory_bytes": memory_bytes(options.device),
                    "canvas": canvas[-options.new :],
                }
            )
    return {
        "contestant": options.contestant,
        "engine": contestant.engine,
        "open_s": opened,
        "pass_ms": {
            tokens: 1e3 * statistics.median(contestant.time_passes(tokens, length - tokens))
            for tokens in PASS_TOKENS
            if tokens <= length
        },
        "loops": loops,
        "floor_ms": floor_ms(options) if is_native else None,
    }


def profile(options: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Return the nodes and the kernels that take the most time in a pass over a block.

    The keys are ONNX Runtime's categories. "Node" has the times by operator and provider. On a GPU,
    this is only the time to start the kernels. "Kernel" has the times on the GPU by operator and
    kernel.
    """
    import numpy as np
    import onnxruntime as ort

    from dlm_runtime.providers import load_libraries

    settings, is_gpu = ort.SessionOptions(), options.device == "cuda"
    settings.enable_profiling = True
    settings.profile_file_prefix = str(options.bundle.parent / "profile")
    settings.add_session_config_entry(
        "ep.cuda.fpa_intb_gemm", "1"
    )  # the native library sets it too
    if is_gpu:
        load_libraries()
    provider = ("CUDAExecutionProvider", {"use_tf32": "0"}) if is_gpu else "CPUExecutionProvider"
    graph = options.bundle / ("device.onnx" if is_gpu else "denoiser.onnx")
    session = ort.InferenceSession(graph, settings, [provider])
    block = min(options.block, options.new)
    cached = options.prompt + options.new - block
    sizes = {"B": 1, "T": block, "R": block, "S": cached, "C": cached}
    binding = session.io_binding()
    for port in session.get_inputs():
        shape = [sizes.get(size, size) for size in port.shape]
        if port.type in FLOATS:
            value = ort.OrtValue.ortvalue_from_shape_and_type(
                shape, FLOATS[port.type], options.device
            )
        else:
            numbers = np.zeros if port.name.endswith("requests") else np.arange
            value = ort.OrtValue.ortvalue_from_numpy(
                numbers(shape[-1], dtype=np.int64).reshape(shape)
            )
        binding.bind_ortvalue_input(port.name, value)
    for port in session.get_outputs():
        binding.bind_output(port.name, options.device)
    for _ in range(WARM_PASSES + PASSES):
        session.run_with_iobinding(binding)
    events = json.loads(Path(session.end_profiling()).read_text())
    began = sorted(event["ts"] for event in events if event["name"] == "model_run")[WARM_PASSES]
    spent: dict[str, dict[tuple[str, str], float]] = {"Node": {}, "Kernel": {}}
    for event in events:
        category, name, more = event["cat"], event["name"], event.get("args", {})
        is_work = category == "Kernel" or name.endswith("_kernel_time")
        if category in spent and is_work and event["ts"] >= began:
            key = (more.get("op_name", ""), more["provider"] if category == "Node" else name)
            spent[category][key] = spent[category].get(key, 0) + event["dur"] / PASSES
    return {
        category: [
            {"operator": operator, "by": by, "us_per_pass": round(duration, 1)}
            for (operator, by), duration in sorted(found.items(), key=lambda item: -item[1])
        ][:PROFILE_ROWS]
        for category, found in spent.items()
    }


# ---- The whole run ----


def run(command: list[str]) -> str:
    """Run a command and return its output. Exits if the command fails."""
    print("$", " ".join(command), file=sys.stderr)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"exit {done.returncode}: {' '.join(command)}")
    return done.stdout


def prepare(options: argparse.Namespace, work: Path) -> Path:
    """Write the checkpoint, unless an earlier run wrote it, and return its folder."""
    from benchmarks.speed import real_size

    checkpoint = work / "checkpoint"
    if not (checkpoint / "model.safetensors.index.json").is_file():
        released = real_size.MODELS["llada-8b"].config
        config = (
            real_size.llada_config(**TINY, n_layers=2) if options.tiny else released(options.layers)
        )
        real_size.write_checkpoint(checkpoint, config, has_data=True)
    return checkpoint


def build(work: Path, checkpoint: Path, contestant: str) -> Path:
    """Build a contestant's bundle, unless an earlier run built it, and return its folder."""
    precision = contestant.removeprefix("native-").removesuffix(GRAPHS)
    bundle = work / f"bundle-{precision}"
    if not (bundle / "manifest.json").is_file():
        command = [sys.executable, "-m", "dlm_export.cli", "build", str(checkpoint)]
        command += ["--target", "cuda", "--precision", precision, "--no-verify"]
        # The weights are random, so calibration and judging would only cost time.
        if precision.startswith("int"):
            command += ["--solver", "nearest", "--judge", "none"]
        run([*command, "-o", str(bundle)])
    return bundle


def ask(
    options: argparse.Namespace, work: Path, checkpoint: Path, contestant: str, *more: str
) -> dict[str, Any]:
    """Run a contestant in a separate process, and return what it prints.

    If the contestant fails, the result contains the reason instead.
    """
    command = [sys.executable, "-m", __spec__.name, "--contestant", contestant]
    command += ["--checkpoint", str(checkpoint), "--device", options.device]
    if contestant in NATIVE:
        bundle = build(work, checkpoint, contestant)
        command += ["--bundle", str(bundle)]
    for name in ("prompt", "new", "block", "tokens_per_pass", "rounds"):
        command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    command += ["--batches", ",".join(map(str, options.batches)), *more]
    print("measure", contestant, *more, file=sys.stderr, flush=True)
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        print(done.stderr, file=sys.stderr, flush=True)
        lines = done.stderr.strip().splitlines() or [f"exit {done.returncode}"]
        return {"contestant": contestant, "failed": lines[-1]}
    return dict(json.loads(done.stdout))


def compared(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Replace the canvas of each row with the share of tokens that eager PyTorch generated, too."""
    eager = {
        row["cache"]: row["canvas"]
        for row in rows
        if row["contestant"] == TORCH[0] and "canvas" in row
    }
    found = []
    for row in rows:
        kept = {name: value for name, value in row.items() if name != "canvas"}
        if row.get("cache") in eager:
            pairs = zip(row["canvas"], eager[row["cache"]], strict=True)
            kept["equal"] = statistics.fmean(one == two for one, two in pairs)
        found.append(kept)
    return found


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
        f"{'contestant':20} {'cache':6} {'batch':>5} {'tokens/s':>9} {'ms a pass':>10} {'passes':>7} {'pass':>8}"
        f" {'floor':>7} {'J/token':>8} {'GiB':>6} {'equal':>6}"
    )
    for row in rows:
        if "failed" in row:
            print(f"{row['contestant']:20} {row['failed']}")
            continue
        memory = "-" if row["memory_bytes"] is None else f"{row['memory_bytes'] / 2**30:.2f}"
        equal = f"{row['equal']:.2f}" if "equal" in row else "-"
        figures = f"{row['tokens_per_s']:9.1f} {row['ms_per_pass']:10.2f} {row['nfe']:7}"
        figures += f" {row['single_pass_ms']:8.2f}"
        figures += f" {shown(row['floor_ms'], '.2f'):>7} {shown(row['joules_per_token'], '.3g'):>8}"
        print(
            f"{row['contestant']:20} {row['cache']:6} {row['batch']:5} {figures} {memory:>6} {equal:>6}",
            flush=True,
        )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument(
        "--tiny", action="store_true", help="a network of a few layers, to rehearse with"
    )
    parser.add_argument("--layers", type=int, default=LAYERS, help="layers of the 8 B shape")
    parser.add_argument("--prompt", type=int, default=128, help="tokens given")
    parser.add_argument("--new", type=int, default=128, help="tokens to fill")
    parser.add_argument("--block", type=int, default=32, help="tokens of a block")
    parser.add_argument("--tokens-per-pass", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--batches",
        type=lambda text: [int(number) for number in text.split(",")],
        default=[1],
        help="requests that run together in this project's loop, with commas, such as 1,8",
    )
    parser.add_argument(
        "--contestants",
        type=lambda text: text.split(","),
        default=[*NATIVE, *TORCH],
        help="contestants, with commas, such as native-fp16,torch-eager",
    )
    parser.add_argument("--work", type=Path, help="folder that keeps the checkpoint and bundles")
    parser.add_argument(
        "--build-only", action="store_true", help="with --work: build the bundles and stop"
    )
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--contestant", choices=[*NATIVE, *TORCH], help=argparse.SUPPRESS)
    parser.add_argument("--profile", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--checkpoint", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--bundle", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := {*options.contestants} - {*NATIVE, *TORCH}:
        parser.error(
            f"--contestants: {', '.join(sorted(unknown))}: of {', '.join([*NATIVE, *TORCH])}"
        )
    return options


def main() -> int:
    options = parse()
    if options.contestant:
        print(json.dumps((profile if options.profile else measure)(options)))
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        work = options.work or Path(temporary)
        checkpoint = prepare(options, work)
        if options.build_only:
            for contestant in options.contestants:
                if contestant in NATIVE:
                    build(work, checkpoint, contestant)
            return 0
        request = {
            name: getattr(options, name)
            for name in ("prompt", "new", "block", "tokens_per_pass", "rounds")
        }
        told = {
            "machine": machine(options.device),
            "shape": "tiny" if options.tiny else f"LLaDA-8B's, {options.layers} layers",
            "request": request,
        }
        measured: list[dict[str, Any]] = []
        profiles: dict[str, dict[str, Any]] = {}

        def save() -> list[dict[str, Any]]:
            """Write the results so far, so that a run that is stopped early leaves them."""
            rows = compared(measured)
            if options.json:
                found = {**told, "rows": rows, "profiles": profiles}
                options.json.write_text(json.dumps(found, indent=1) + "\n")
            return rows

        for contestant in options.contestants:
            answer = ask(options, work, checkpoint, contestant)
            measured += [{**answer, **loop} for loop in answer.pop("loops", [{}])]
            rows = save()
        for contestant in options.contestants:
            if contestant in NATIVE and not contestant.endswith(GRAPHS):
                profiles[contestant] = ask(options, work, checkpoint, contestant, "--profile")
                save()
    show(rows)
    return 1 if any("failed" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
