"""Measure how much time a block takes on long canvases, and how much memory a generation takes.

    python -m benchmarks.long.long [--lengths 4096,16384,32768] [--precisions fp32,int8] [--refresh 0,32,64] [--json FILE]

A small random denoiser fills the last 128 tokens of a canvas in blocks of 32, with four passes per
block and the dual cache. The first pass of a block is a pass over the whole canvas, or with
--refresh N a pass that begins at least N tokens before the block. Each run is a new process, whose
largest resident set is measured. A run may allocate at most --memory GiB. If a run needs more, the
table shows the error.

`limit s` is the time that the multiply-adds of the request's first pass would take alone. As in
first_pass.py, the script measures the speed of the processor just before each run.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.long.first_pass import multiply_adds, rate
from benchmarks.shapes import built, machine, quickly, random_checkpoint

NEW_TOKENS, BLOCK_LENGTH, PASSES_PER_BLOCK = 128, 32, 4
LONGEST, VOCABULARY = 65_536, 8_192
SHAPE = {"d_model": 256, "n_layers": 4, "n_heads": 4, "n_kv_heads": 4, "mlp_hidden_size": 704}


def bundle_of(precision: str) -> Path:
    """Return the bundle. The bundle is built once."""
    from checkpoints import llada_config

    ids = {"vocab_size": VOCABULARY, "embedding_size": VOCABULARY, "mask_token_id": VOCABULARY - 1}
    ends = {"eos_token_id": VOCABULARY - 2, "pad_token_id": VOCABULARY - 2}
    source = random_checkpoint(
        "long", llada_config(**SHAPE, **ids, **ends, max_sequence_length=LONGEST)
    )
    return built(source, f"long-{precision}", "--precision", precision, *quickly(precision))


def generate(path: Path, length: int, refresh: int, threads: int) -> dict[str, Any]:
    """Run one generation and time its steps.

    Returns the seconds of the generation's first pass. For all later blocks, returns the median ms
    of their first passes, and the median ms of their other passes. Also returns the memory in
    bytes.
    """
    import dlm_runtime
    from dlm_export.bundle.manifest import network_of
    from dlm_export.memory import peak_rss_bytes

    with dlm_runtime.open(path, threads=threads, check_hashes=False) as bundle:
        policy = bundle.policy(
            "llada",
            cache="dual",
            block_length=BLOCK_LENGTH,
            steps_per_block=PASSES_PER_BLOCK,
            stop="none",
        )
        given = [(i * 7919) % (VOCABULARY - 2) for i in range(length - NEW_TOKENS)]
        seconds, opened = [], peak_rss_bytes()
        began = time.perf_counter()
        fields = policy.with_fields({"refresh": refresh}).as_dict()
        for event in bundle.stream(tokens=given, new_tokens=NEW_TOKENS, **fields):
            seconds.append(time.perf_counter() - began)
            result, began = event.result, time.perf_counter()
        assert result is not None
        assert result.nfe == len(seconds) == NEW_TOKENS // BLOCK_LENGTH * PASSES_PER_BLOCK
    later = [
        seconds[at : at + PASSES_PER_BLOCK]
        for at in range(PASSES_PER_BLOCK, len(seconds), PASSES_PER_BLOCK)
    ]
    return {
        "first_pass_s": round(seconds[0], 3),
        "opening_ms": round(statistics.median(block[0] for block in later) * 1e3, 2),
        "other_ms": round(statistics.median(s for block in later for s in block[1:]) * 1e3, 2),
        "moving_ms": round(result.timings["cache"] * 1e3, 2),
        "cache_formula_bytes": network_of(bundle.manifest).cache_bytes(4) * length,
        "cache_bytes": result.cache_bytes,
        "opened_rss_bytes": opened,
        "peak_rss_bytes": peak_rss_bytes(),
    }


def first_pass_limit(path: Path, length: int, threads: int) -> float:
    """Return the seconds that the multiply-adds of a pass over the whole canvas take at least."""
    from dlm_export.bundle.manifest import network_of, read_manifest
    from dlm_export.planning import roofline

    manifest = read_manifest(path)
    formats = manifest["precision"].get("layers", {})
    linear, attention = multiply_adds(
        network_of(manifest), formats, length, BLOCK_LENGTH, length * length
    )
    fp32 = rate("fma", threads)
    return (
        linear / (roofline.measure(threads).int8_macs_per_s if formats else fp32) + attention / fp32
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", default="4096,16384,32768")
    parser.add_argument("--precisions", default="fp32,int8")
    parser.add_argument("--refresh", default="0,32,64")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--memory", type=float, default=8, help="GiB that a run may allocate.")
    parser.add_argument("--json", type=Path)
    # Arguments of the new process: BUNDLE LENGTH REFRESH.
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        resource.setrlimit(resource.RLIMIT_DATA, (int(arguments.memory * 2**30),) * 2)
        path, length, refresh = arguments.one
        print(json.dumps(generate(Path(path), int(length), int(refresh), arguments.threads)))
        return
    rows: list[dict[str, Any]] = []
    print(
        "canvas  precision  refresh  first pass s  limit s  opening ms  other ms  a block ms  moving ms  cache MiB  peak MiB"
    )
    for length in map(int, arguments.lengths.split(",")):
        for precision in arguments.precisions.split(","):
            for refresh in arguments.refresh.split(","):
                command = [
                    sys.executable,
                    "-m",
                    __spec__.name,
                    "--threads",
                    str(arguments.threads),
                    "--memory",
                    str(arguments.memory),
                ]
                command += ["--one", str(bundle_of(precision)), str(length), refresh]
                limit = first_pass_limit(bundle_of(precision), length, arguments.threads)
                done = subprocess.run(command, capture_output=True, text=True)
                row: dict[str, Any] = {
                    "length": length,
                    "precision": precision,
                    "refresh": int(refresh),
                    "limit_s": round(limit, 3),
                }
                label = f"{length:6}  {precision:9}  {refresh:>7}"
                if done.returncode:
                    row["failed"] = (
                        done.stderr.strip().splitlines()[-1]
                        if done.stderr.strip()
                        else f"exit {done.returncode}"
                    )
                    print(f"{label}  {row['failed']}", flush=True)
                else:
                    row |= json.loads(done.stdout)
                    block_ms = row["opening_ms"] + (PASSES_PER_BLOCK - 1) * row["other_ms"]
                    sizes = (row["cache_bytes"] / 2**20, row["peak_rss_bytes"] / 2**20)
                    times = f"{row['first_pass_s']:12.2f}  {limit:7.2f}  {row['opening_ms']:10.1f}"
                    print(
                        f"{label}  {times}  {row['other_ms']:8.1f}  {block_ms:10.1f}  {row['moving_ms']:9.2f}"
                        f"  {sizes[0]:9.1f}  {sizes[1]:8.1f}",
                        flush=True,
                    )
                rows.append(row)
    if arguments.json:
        arguments.json.write_text(
            json.dumps(
                {"machine": machine(), "memory_gib": arguments.memory, "rows": rows}, indent=1
            )
            + "\n"
        )


if __name__ == "__main__":
    main()
