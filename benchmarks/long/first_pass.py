"""Measure the time and memory of long prompts: for computing a prompt, and for the passes after it.

    python -m benchmarks.long.first_pass prompts [--lengths 4096,16384,32768,65536,131072]
        [--caches fp32] [--part 512] [--threads N] [--rounds 1] [--json FILE]
    python -m benchmarks.long.first_pass llama [--lengths ...] [--types Q8_0,F16] [--limit 600]
        [--threads N] [--rounds 1] [--json FILE]

The denoiser has the layout of SDAR (12 layers, hidden size 768, 12 query heads and 4
key heads of size 64, blocks of 32 tokens), random int8 weights, and canvases of up to 131,104
tokens. Each run is a new process.

`prompts` runs one request. Its prompt has the given length, and it generates one block of 32
tokens. With `--part N`, a scheduler computes the prompt in passes of at most N tokens, as
`dlm-export serve` does. With `--part 0`, a session computes the prompt in a single pass, as
`Bundle.generate` does. Two tables are printed:

- The first table shows the milliseconds until the prompt is stored, and the process's peak memory
  (VmHWM). It compares the milliseconds with a limit: the time that the multiply-adds alone would
  take. Attention needs multiply-adds for each pair of a query and a key that the query attends to.
  The table also compares the peak memory with the memory that `formula_bytes` computes.
- The second table shows the passes over the block, which read the cache of the prompt. `reading` is
  the time to read as many bytes as the cache has. `arithmetic` is the time of the multiply-adds.

To compute the limit, `reading` and `arithmetic`, the script measures the speed of the processor
with the same number of threads. It measures int8 matrix products in ONNX Runtime
(`dlm_export.planning.roofline`). The program `rates.c` measures fp32 multiply-adds, and the speed
of reading an array as large as the cache.

`llama` measures the time that llama.cpp takes for prompts of the lengths in `--lengths`. The
network is a Qwen3 with causal attention. It has the shape and the weights of the denoiser.
llama.cpp runs with flash attention, a cache in fp16, and its default batch of 512 tokens. Needs
benchmarks/requirements.txt.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.shapes import ROOT, built, machine, quickly, random_checkpoint
from benchmarks.tables import MIB, table

BLOCK, VOCABULARY = 32, 32_000
LONGEST = 131_072 + BLOCK
SHAPE = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 2048,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": LONGEST,
    "block_size": BLOCK,
    "mask_token_id": VOCABULARY - 1,
    "eos_token_id": VOCABULARY - 2,
    "pad_token_id": VOCABULARY - 2,
}
PASSES = 8  # number of passes over the block
LENGTHS = "4096,16384,32768,65536,131072"


def checkpoint() -> Path:
    """Return the checkpoint that all measurements use. The first call writes the checkpoint."""
    from checkpoints import sdar_config

    return random_checkpoint("first-pass", sdar_config(**SHAPE))


def bundle_of(cache: str) -> Path:
    """Return the int8 bundle whose cache has the type ``cache``. The bundle is built once."""
    options = ("--precision", "int8", "--cache-dtype", cache, *quickly("int8"))
    return built(checkpoint(), f"first-pass-int8-{cache}", *options)


def prompt_of(length: int) -> list[int]:
    return [(i * 7919) % (VOCABULARY - 2) for i in range(length)]


# ---- A run in a new process ----


def process_bytes(weights: str) -> int:
    """Return this process's resident memory in bytes, without the pages of the file ``weights``."""
    total, is_weights = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, value = line.partition(" ")
        if not name.endswith(":"):  # the first line of a mapping ends with the name of its file
            is_weights = line.endswith(weights)
        elif name == "Rss:" and not is_weights:
            total += int(value.split()[0]) << 10
    return total


def run_ours(folder: str, length: int, part: int, threads: int) -> dict[str, Any]:
    """Run one request and measure it.

    Returns seconds: for all passes over the prompt together, and for each pass over the block. Also
    returns the process's memory in bytes, after opening the bundle and at the peak.
    """
    import dlm_runtime
    from dlm_export.memory import peak_rss_bytes

    with dlm_runtime.open(folder, threads=threads, check_hashes=False) as bundle:
        opened = process_bytes("denoiser.onnx.data")
        asked: dict[str, Any] = {
            "tokens": prompt_of(length),
            "new_tokens": BLOCK,
            "preset": "sdar",
            "commit": "static",
            "steps_per_block": PASSES,
            "stop": "none",
        }
        ends = []
        with contextlib.ExitStack() as stack:
            if part:
                scheduler = stack.enter_context(bundle.scheduler(max_tokens=part))
                events = iter(scheduler.submit(events=True, **asked))
            else:
                events = bundle.stream(**asked)
            for event in events:
                ends.append(time.perf_counter())
                result = event.result
        assert result is not None
        ends = ends[-PASSES - 1 :]  # the times when the prompt and each pass over the block ended
        return {
            "prompt_s": result.timings["prefill"],
            "passes": result.nfe - PASSES,
            "block_s": [later - earlier for earlier, later in itertools.pairwise(ends)],
            "opened_bytes": opened,
            "peak_bytes": peak_rss_bytes(),
        }


def run_theirs(path: str, length: int, threads: int) -> dict[str, Any]:
    """Compute one prompt in llama.cpp. Returns the seconds and the process's peak memory."""
    from benchmarks.llama import Llama
    from dlm_export.memory import peak_rss_bytes

    llama = Llama(Path(path), threads, is_causal=True)
    seconds = llama.time_prompt(prompt_of(length))
    return {"prompt_s": seconds, "peak_bytes": peak_rss_bytes()}


def in_new_process(limit_s: float | None, *arguments: object) -> dict[str, Any] | None:
    """Run this script with ``arguments`` in a new process, and return the JSON that it prints.
    Returns None if the process is still running after ``limit_s`` seconds.
    """
    command = [sys.executable, "-m", __spec__.name, *map(str, arguments)]
    try:
        done = subprocess.run(
            command, check=True, stdout=subprocess.PIPE, text=True, timeout=limit_s
        )
    except subprocess.TimeoutExpired:
        return None
    found: dict[str, Any] = json.loads(done.stdout)
    return found


# ---- Limits and formulas ----


def rate(*arguments: object) -> float:
    """Compile ``rates.c``, run it with ``arguments``, and return the rate that it measures."""
    source, program = (
        ROOT / "benchmarks" / "long" / "rates.c",
        ROOT / "build" / "benchmarks" / "rates",
    )
    program.parent.mkdir(parents=True, exist_ok=True)
    options = ["-O3", "-march=native", "-std=c11", "-ffp-contract=fast"]
    if os.uname().machine == "x86_64":
        options.append("-mprefer-vector-width=512")
    subprocess.run(["cc", *options, source, "-o", program, "-lpthread"], check=True)
    command = [str(program), *map(str, arguments)]
    return float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def visible_pairs(length: int) -> int:
    """Return the number of pairs of a query and a key that the query attends to.

    The prompt consists of whole blocks. A query attends to its own block and all earlier blocks.
    """
    blocks = length // BLOCK
    return BLOCK * BLOCK * blocks * (blocks + 1) // 2


def multiply_adds(network: Any, formats: dict[str, str], tokens: int, rows: int, pairs: int) -> Any:
    """Return the multiply-adds of a pass in the linear layers and in attention.

    Attention needs two multiply-adds for each pair and each feature of the heads.
    """
    from dlm_export.planning.roofline import Costs

    macs = Costs(network, formats).work(tokens, 0, rows).macs
    linear = sum(count for kind, count in macs.items() if not kind.startswith("attention."))
    features = sum(layer.attention.heads * layer.attention.head_size for layer in network.layers)
    return linear, 2 * features * pairs


def formula_bytes(
    network: Any, opened: int, weights: int, cache_row: int, length: int, part: int
) -> dict[str, int]:
    """Return the terms of the expected peak memory of the process, in bytes.

    - ``process``: the memory after the bundle was opened, without the mapped weights. This memory
      contains Python, numpy, ONNX Runtime and the graph.
    - ``weights``: the size of the file of weights. The file is mapped. The process reads all pages
      of the file, except the rows of the rotary tables after the last position of the canvas.
    - ``cache``: keys and values of all tokens of the canvas, in all layers.
    - ``new_rows``: the keys and values of the tokens of a pass. A scheduler first writes them to
      this memory and then to the cache. A session writes them to the cache directly.
    - ``arrays``: the fp32 arrays of a pass. They take most memory during the last matrix product of
      a layer's MLP. For each token, they are then the residual stream and the output (d_model
      each), and the product of gate and up (mlp_size).
    - ``kept``: the fp32 arrays of attention: queries, keys, values and the result. They are no
      longer needed in the MLP, but ONNX Runtime's allocator keeps their memory. The product of gate
      and up does not fit into any of these pieces, so the allocator takes new memory for it.
    - ``codes``: the int8 codes of the product. The kernels reserve two bytes per element and eight
      bytes per row, and quantise at most 512 rows at a time.
    - ``logits``: the fp32 logits of one block.
    """
    mlp = max(layer.mlp.size for layer in network.layers)
    d, attention = network.hidden_size, network.layers[0].attention
    heads = 2 * (attention.heads + attention.kv_heads) * attention.head_size
    canvas = length + BLOCK
    unused = (network.max_canvas_length - canvas) * sum(t.size for t in network.rotary_tables())
    tokens = min(part, length) if part else length
    return {
        "process": opened,
        "weights": weights - 4 * unused,
        "cache": cache_row * canvas,
        "new_rows": cache_row * tokens if part else 0,
        "arrays": tokens * 4 * (2 * d + mlp),
        "kept": tokens * 4 * heads,
        "codes": min(tokens, 512) * (2 * mlp + 8),
        "logits": 4 * BLOCK * network.vocab_size,
    }


# ---- The two commands ----


def spread_ms(seconds: Sequence[float]) -> str:
    """Return the median in ms as text, with the range if there are several values."""
    ms = sorted(1e3 * s for s in seconds)
    digits = 0 if ms[0] >= 100 else 1
    middle = f"{statistics.median(ms):.{digits}f}"
    return middle if len(ms) == 1 else f"{middle} ({ms[0]:.{digits}f}-{ms[-1]:.{digits}f})"


def measure_prompts(wanted: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure every cache with every length, and return one row per measurement."""
    from dlm_export.bundle.manifest import network_of, read_manifest
    from dlm_export.planning import roofline
    from dlm_runtime.cache_dtypes import CACHE_DTYPES, CACHE_ROWS

    rows = []
    for cache in wanted.caches:
        folder = bundle_of(cache)
        manifest = read_manifest(folder)
        network, formats = network_of(manifest), manifest["precision"]["layers"]
        weights = (folder / "denoiser.onnx.data").stat().st_size
        cache_row = network.cache_bytes(*CACHE_ROWS[CACHE_DTYPES[cache]])
        for length in wanted.lengths:
            products = roofline.measure(wanted.threads)
            fma = rate("fma", wanted.threads)
            read = rate("read", wanted.threads, cache_row * length)
            one = ("--one", folder, length, wanted.part, wanted.threads)
            runs = [in_new_process(None, *one) for _ in range(wanted.rounds)]
            linear, attention = multiply_adds(network, formats, length, 1, visible_pairs(length))
            prompt_limit = linear / products.int8_macs_per_s + attention / fma
            linear, attention = multiply_adds(
                network, formats, BLOCK, BLOCK, BLOCK * (length + BLOCK)
            )
            block_limit = linear / products.int8_macs_per_s_32_rows + attention / fma
            rows.append(
                {
                    "cache": cache,
                    "length": length,
                    "part": wanted.part,
                    "rates": {
                        "int8_macs_per_s": products.int8_macs_per_s,
                        "int8_macs_per_s_32_rows": products.int8_macs_per_s_32_rows,
                        "fp32_macs_per_s": fma,
                        "read_bytes_per_s": read,
                    },
                    "prompt_limit_s": prompt_limit,
                    "block_limit_s": block_limit,
                    "cache_read_s": cache_row * length / read,
                    "cache_bytes": cache_row * length,
                    "runs": runs,
                    "formula": formula_bytes(
                        network, runs[0]["opened_bytes"], weights, cache_row, length, wanted.part
                    ),
                }
            )
            print(
                f"{cache}, {length} tokens: {spread_ms([r['prompt_s'] for r in runs])} ms",
                file=sys.stderr,
            )
    return rows


def prompts_tables(rows: Sequence[dict[str, Any]]) -> str:
    """Return the two tables of ``prompts``, in Markdown."""
    first, later = [], []
    for row in rows:
        label = [row["cache"], f"{row['length']:,}"]
        seconds = [run["prompt_s"] for run in row["runs"]]
        peak = statistics.median(run["peak_bytes"] for run in row["runs"])
        expected = sum(row["formula"].values())
        first.append(
            [
                *label,
                str(row["runs"][0]["passes"]),
                spread_ms(seconds),
                f"{1e3 * row['prompt_limit_s']:.0f}",
                f"{statistics.median(seconds) / row['prompt_limit_s']:.2f}",
                f"{peak / MIB:.0f}",
                f"{expected / MIB:.0f}",
                f"{peak / expected:.3f}",
            ]
        )
        passes = [s for run in row["runs"] for s in run["block_s"]]
        median, reading, limit = (
            statistics.median(passes),
            row["cache_read_s"],
            row["block_limit_s"],
        )
        later.append(
            [
                *label,
                f"{row['cache_bytes'] / MIB:.0f}",
                spread_ms(passes),
                f"{1e3 * reading:.2f}",
                f"{median / reading:.2f}",
                f"{1e3 * limit:.1f}",
                f"{median / limit:.2f}",
            ]
        )
    memory = ["peak memory, MiB", "formula, MiB", "peak over formula"]
    prompt = [
        "cache",
        "tokens",
        "passes",
        "first pass, ms",
        "limit, ms",
        "time over limit",
        *memory,
    ]
    reading = ["reading, ms", "pass over reading", "arithmetic, ms", "pass over arithmetic"]
    block = ["cache", "cached tokens", "cache, MiB", f"pass over {BLOCK} tokens, ms", *reading]
    return f"{table(prompt, first)}\n{table(block, later)}"


def measure_llama(wanted: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure every type with every length in llama.cpp, and return one row per measurement.

    If a run takes longer than the limit, ``runs`` is empty, and longer prompts are not tried.
    """
    from benchmarks.gguf_files import gguf_of

    rows: list[dict[str, Any]] = []
    for kind in wanted.types:
        path = gguf_of("first-pass", kind, checkpoint())
        for length in wanted.lengths:
            one = ("--one-llama", path, length, wanted.threads)
            runs: list[dict[str, Any]] = []
            while len(runs) < wanted.rounds:
                run = in_new_process(wanted.limit, *one)
                if run is None:
                    break
                runs.append(run)
            is_complete = len(runs) == wanted.rounds
            rows.append({"type": kind, "length": length, "runs": runs if is_complete else []})
            if not is_complete:
                break
    return rows


def llama_table(rows: Sequence[dict[str, Any]], limit_s: float) -> str:
    """Return the table of ``llama``, in Markdown."""
    lines = []
    for row in rows:
        ms, peak = f"more than {limit_s:.0f} s", ""
        if row["runs"]:
            ms = spread_ms([run["prompt_s"] for run in row["runs"]])
            peak = f"{statistics.median(run['peak_bytes'] for run in row['runs']) / MIB:.0f}"
        lines.append([f"llama.cpp {row['type']}", f"{row['length']:,}", ms, peak])
    return table(["", "tokens", "prompt, ms", "peak memory, MiB"], lines)


def main() -> None:
    if sys.argv[1:2] == ["--one"]:  # arguments of the new process: FOLDER LENGTH PART THREADS
        folder, *numbers = sys.argv[2:]
        print(json.dumps(run_ours(folder, *map(int, numbers))))
        return
    if sys.argv[1:2] == ["--one-llama"]:  # arguments of the new process: FILE LENGTH THREADS
        path, *numbers = sys.argv[2:]
        print(json.dumps(run_theirs(path, *map(int, numbers))))
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    prompts, llama = commands.add_parser("prompts"), commands.add_parser("llama")
    for command in (prompts, llama):
        command.add_argument(
            "--lengths", default=LENGTHS, help="tokens of the prompts, with commas"
        )
        command.add_argument("--threads", type=int, default=os.cpu_count())
        command.add_argument("--rounds", type=int, default=1, help="runs of each kind and length")
        command.add_argument("--json", type=Path)
    prompts.add_argument("--caches", default="fp32", help="of fp32, fp16 and int8, with commas")
    prompts.add_argument("--part", type=int, default=512, help="tokens of a pass; 0: all at once")
    llama.add_argument("--types", default="Q8_0,F16", help="types of llama.cpp, with commas")
    llama.add_argument("--limit", type=float, default=600, help="seconds of a run")
    wanted = parser.parse_args()
    wanted.lengths = list(map(int, wanted.lengths.split(",")))
    if any(length % BLOCK or not 0 < length < LONGEST for length in wanted.lengths):
        parser.error(f"--lengths: give multiples of {BLOCK} that are less than {LONGEST}")
    if wanted.command == "prompts":
        wanted.caches = wanted.caches.split(",")
        rows = measure_prompts(wanted)
        print(prompts_tables(rows), end="")
        facts = {}
    else:
        from benchmarks.llama import facts as facts_of

        wanted.types = wanted.types.split(",")
        rows = measure_llama(wanted)
        print(llama_table(rows, wanted.limit), end="")
        facts = facts_of()
    if wanted.json:
        found = {"machine": machine() | facts, "threads": wanted.threads, "rows": rows}
        wanted.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
