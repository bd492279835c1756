"""Compare caches in fp32, fp16 and INT8: their memory, their speed, and the loss of accuracy.

    python benchmarks/caches.py [--lengths 4096,16384] [--passes 32,4096,32;4,4096,4] [--rounds 7]
        [--json FILE]

The script measures memory and speed with random denoisers that have two layers and int8 weights.
Each head has 128 features. The denoiser for memory has 4 heads, and the denoiser for speed has 16
heads. For each length of the canvas, the script measures the memory of a new process after two
passes over one block. The script also computes the memory with a formula: a cached token has 2 *
layers * kv_heads rows. A row is the key or the value of one head. To compare the speed of the
caches, the script times a pass with each cache in turn, in one process. To measure the loss, the
script builds the demo with each cache. In these builds, only the cache is rounded.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from shapes import DEMO, QUICKLY, built, machine, random_checkpoint
from timing import cell, interleave

CACHES = ("fp32", "fp16", "int8")
BLOCK_LENGTH, LONGEST, VOCABULARY = 32, 32_768, 8_192
HEADS = {"memory": 4, "passes": 16}


def bundle_of(purpose: str, cache: str) -> Path:
    """Return the bundle of a random denoiser. ``purpose`` is a key of ``HEADS``."""
    from checkpoints import llada_config

    heads = HEADS[purpose]
    ids = {"vocab_size": VOCABULARY, "embedding_size": VOCABULARY, "mask_token_id": VOCABULARY - 1}
    ends = {"eos_token_id": VOCABULARY - 2, "pad_token_id": VOCABULARY - 2}
    shape = {
        "d_model": 128 * heads,
        "n_layers": 2,
        "n_heads": heads,
        "n_kv_heads": heads,
        "mlp_hidden_size": 64 * heads,
    }
    source = random_checkpoint(
        f"caches-{purpose}", llada_config(**shape, **ids, **ends, max_sequence_length=LONGEST)
    )
    return built(
        source, f"caches-{purpose}-{cache}", "--precision", "int8", *QUICKLY, "--cache-dtype", cache
    )


def held(folder: str, cache: str, length: int, threads: int) -> dict[str, int]:
    """Return the process's peak memory and the size of the cache in bytes.

    The size is returned twice: as a formula predicts it, and as the runtime counts it.
    """
    import dlm_runtime
    from dlm_export.bundle.manifest import network_of
    from dlm_export.graph import CACHE_DTYPES
    from dlm_export.network.spec import CACHE_ROWS
    from dlm_export.planning.bench import peak_rss_bytes

    with dlm_runtime.open(folder, threads=threads, check_hashes=False) as bundle:
        fields: dict[str, Any] = {
            "cache": "dual",
            "block_length": BLOCK_LENGTH,
            "steps_per_block": 2,
            "stop": "none",
        }
        given = [(i * 7919) % (VOCABULARY - 2) for i in range(length - BLOCK_LENGTH)]
        done = bundle.generate(tokens=given, new_tokens=BLOCK_LENGTH, **fields)
        formula = network_of(bundle.manifest).cache_bytes(*CACHE_ROWS[CACHE_DTYPES[cache]]) * length
    return {
        "formula_bytes": formula,
        "cache_bytes": done.cache_bytes,
        "peak_rss_bytes": peak_rss_bytes(),
    }


def timed(sizes: tuple[int, int, int], rounds: int, threads: int) -> dict[str, dict[str, float]]:
    """Time a pass with each cache, in turns.

    Each time is the shortest of ten passes. Filling the cache can slow the first of the ten.
    """
    import dlm_runtime

    opened = {
        cache: dlm_runtime.open(bundle_of("passes", cache), threads=threads, check_hashes=False)
        for cache in CACHES
    }
    return interleave(
        {cache: lambda b=b: min(b.time_passes(*sizes, 10)) for cache, b in opened.items()},
        rounds,
        warm_ups=1,
    )


def lost() -> dict[str, Any]:
    """Return the accuracy that the demo loses if its cache is rounded, read from accuracy.json."""
    found = {}
    for cache in CACHES[1:]:
        arguments = ("--precision", "fp32", "--cache-dtype", cache, "--judged", "64")
        bundle = built(DEMO, f"demo-cache-{cache}", *arguments)
        found[cache] = json.loads((bundle / "accuracy.json").read_text())["cache"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--lengths", default="4096,16384", help="lengths of canvases, with commas; empty: none"
    )
    parser.add_argument(
        "--passes", default="32,4096,32;4,4096,4", help="passes as T,S,R, with semicolons"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--json", type=Path)
    # The script calls itself with this option, to measure in a new process.
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        folder, cache, length = arguments.one
        print(json.dumps(held(folder, cache, int(length), arguments.threads)))
        return
    told: dict[str, Any] = {
        "machine": machine(),
        "heads": HEADS,
        "memory": [],
        "passes": [],
        "demo": lost(),
    }
    for cache, found in told["demo"].items():
        for name in ("prefix", "dual"):
            masked, frontier = found[name]["masked"], found[name]["frontier"]
            flips = f"{frontier['flips']} of {frontier['committed']} commits flip"
            print(
                f"demo {cache} {name:6}  cross-entropy {masked['ce_increase']:+.4%}, top-1 {masked['top1']:.3%}, {flips}"
            )
    for length in map(int, filter(None, arguments.lengths.split(","))):
        for cache in CACHES:
            # The new process does not import the exporter, because the exporter's memory must not
            # be measured.
            one = [
                "--one",
                str(bundle_of("memory", cache)),
                cache,
                str(length),
            ]
            command = [sys.executable, __file__, "--threads", str(arguments.threads), *one]
            row = json.loads(
                subprocess.run(command, check=True, capture_output=True, text=True).stdout
            )
            told["memory"].append({"cache": cache, "length": length} | row)
            sizes = ", ".join(
                f"{name.removesuffix('_bytes')} {value / 2**20:.1f} MiB"
                for name, value in row.items()
            )
            print(f"{length:6} tokens  {cache}  {sizes}", flush=True)
    for text in arguments.passes.split(";"):
        tokens, cached, rows = map(int, text.split(","))
        found = timed((tokens, cached, rows), arguments.rounds, arguments.threads)
        told["passes"].append({"tokens": tokens, "cached": cached, "rows": rows, "caches": found})
        for cache, row in found.items():
            print(f"T {tokens}, S {cached}, R {rows}  {cache}  {cell(row)} ms", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
