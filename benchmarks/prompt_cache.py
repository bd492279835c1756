"""Measure how fast a prompt cache opens, and how much sooner requests get their first tokens.

    python benchmarks/prompt_cache.py [--tokens 2000] [--caches fp16,fp32] [--rounds 21] [--threads 2]
        [--json FILE]

A prompt cache is a file with the keys and values of a prompt. The script uses a denoiser with
random weights. Its cache has the shape of LLaDA2-mini's cache: 20 layers, 4 key heads of size 128,
and blocks of 32 tokens. The denoiser's other sizes are small, because they do not affect the size
of the cache.

Each round opens the file, which is already in the kernel's page cache. Then the script sends a
request whose prompt starts with the saved tokens, and measures the time until its first tokens are
decided. The script does so with and without the prompt cache. It prints medians, with the
smallest and the largest value, and whether both requests give the same canvas.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from shapes import QUICKLY, built, machine, random_checkpoint

import dlm_runtime
from dlm_runtime import Bundle

BLOCK, VOCABULARY, LONGEST = 32, 8_192, 4_096
SHAPE = {
    **{"hidden_size": 256, "num_hidden_layers": 20, "intermediate_size": 512},
    **{"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 128},
    **{"max_position_embeddings": LONGEST, "block_size": BLOCK},
}
ASKED: dict[str, Any] = {"preset": "sdar", "max_new_tokens": BLOCK, "stop": "none"}


def bundle_of(cache: str) -> Path:
    from checkpoints import sdar_config

    ids = {"vocab_size": VOCABULARY, "mask_token_id": VOCABULARY - 1}
    ends = {"eos_token_id": VOCABULARY - 2, "pad_token_id": VOCABULARY - 2}
    source = random_checkpoint("llada2-mini-cache", sdar_config(**SHAPE, **ids, **ends))
    options = ("--precision", "int8", "--cache-dtype", cache)
    return built(source, f"llada2-mini-cache-{cache}", *options, *QUICKLY)


def first_tokens(bundle: Bundle, prompt: list[int]) -> tuple[float, list[int]]:
    """Run a request. Returns the milliseconds until its first tokens, and its canvas."""
    began, first, canvas = time.perf_counter(), 0.0, []
    for event in bundle.stream(tokens=prompt, **ASKED):
        if not first and event.committed:
            first = time.perf_counter() - began
        canvas = list(event.canvas)
    return 1e3 * first, canvas


def measure(cache: str, wanted: argparse.Namespace, folder: Path) -> dict[str, Any]:
    path, file = bundle_of(cache), folder / f"{cache}.cache"
    rng = random.Random(1)
    tokens = [rng.randrange(10, VOCABULARY - 10) for _ in range(wanted.tokens)]
    prompt = tokens + [rng.randrange(10, VOCABULARY - 10) for _ in range(50)]
    opened, loaded, plain = [], [], []
    with dlm_runtime.open(path, threads=wanted.threads) as bundle:
        saved = bundle.save_prompt_cache(file, tokens=tokens)
    for _ in range(wanted.rounds):
        with (
            dlm_runtime.open(path, threads=wanted.threads) as bundle,
            dlm_runtime.open(path, threads=wanted.threads) as other,
        ):
            began = time.perf_counter()
            bundle.load_prompt_cache(file)
            opened.append(1e3 * (time.perf_counter() - began))
            loaded.append(first_tokens(bundle, prompt))
            plain.append(first_tokens(other, prompt))
    return {
        "cache": cache,
        "tokens": saved,
        "bytes": file.stat().st_size,
        "open_ms": opened,
        "first_tokens_ms": [ms for ms, _ in loaded],
        "first_tokens_without_ms": [ms for ms, _ in plain],
        "equal": all(one[1] == two[1] for one, two in zip(loaded, plain, strict=True)),
    }


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):8.2f} ({min(values):.2f}-{max(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--caches", default="fp16,fp32")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    wanted = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for cache in wanted.caches.split(","):
            row = measure(cache, wanted, Path(folder))
            rows.append(row)
            print(f"{cache}: {row['tokens']} tokens, {row['bytes'] / 2**20:.1f} MiB")
            print(f"  open, ms                   {spread(row['open_ms'])}")
            print(f"  first tokens, ms           {spread(row['first_tokens_ms'])}")
            print(f"  first tokens without, ms   {spread(row['first_tokens_without_ms'])}")
            print(f"  equal canvases             {row['equal']}")
    if wanted.json:
        wanted.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
