"""Measure how much time a cache saves in a block-causal denoiser.

    python -m benchmarks.long.blocks [--precisions fp32,int8] [--depths 0,512,2048,8192] [--rounds 9]
        [--json FILE]

The script uses a denoiser with random weights and the layout of SDAR. Blocks have 32 tokens. First,
the script times a pass over one block with different numbers of cached tokens. More cached tokens
slow down only attention. Then the script times generations, alternately with `cache=block` and
`cache=none`. A block takes four passes. Both generations must give the same canvas, because this
cache is exact.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import dlm_runtime
from benchmarks.shapes import QUICKLY, built, machine, random_checkpoint
from benchmarks.timing import interleave, show

BLOCK, LONGEST, VOCABULARY = 32, 16_384, 32_000
SHAPE = {
    **{
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 64,
    },
    **{
        "intermediate_size": 2048,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": LONGEST,
        "block_size": BLOCK,
    },
    **{
        "mask_token_id": VOCABULARY - 1,
        "eos_token_id": VOCABULARY - 2,
        "pad_token_id": VOCABULARY - 2,
    },
}
GIVEN, NEW, PASSES_PER_BLOCK = 512, 128, 4


def bundle_of(precision: str, cache_dtype: str = "fp32") -> Path:
    """Return the bundle. The bundle is built once."""
    from checkpoints import sdar_config

    source = random_checkpoint("blocks", sdar_config(**SHAPE))
    name, chosen = f"blocks-{precision}", ("--precision", precision, *QUICKLY)
    if cache_dtype != "fp32":
        name, chosen = f"{name}-cache-{cache_dtype}", (*chosen, "--cache-dtype", cache_dtype)
    return built(source, name, *chosen)


def generate(bundle: dlm_runtime.Bundle, cache: str, canvases: dict[str, tuple[int, ...]]) -> float:
    """Return the seconds of one generation and store its canvas in ``canvases``."""
    given = [(i * 7919) % (VOCABULARY - 2) for i in range(GIVEN)]
    fields = {
        "cache": cache,
        "commit": "static",
        "steps_per_block": PASSES_PER_BLOCK,
        "stop": "none",
    }
    result = bundle.generate(tokens=given, new_tokens=NEW, preset="sdar", **fields)
    canvases[cache] = tuple(result.tokens)
    return result.timings["total"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--precisions", default="fp32,int8")
    parser.add_argument("--depths", default="0,512,2048,8192")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    result: dict[str, Any] = {"machine": machine(), "rounds": arguments.rounds}
    for precision in arguments.precisions.split(","):
        with dlm_runtime.open(bundle_of(precision), check_hashes=False) as bundle:

            def time_one(depth: int, bundle: dlm_runtime.Bundle = bundle) -> float:
                return bundle.time_passes(BLOCK, depth, BLOCK, 3)[-1]

            runs = {
                f"behind {depth} tokens": partial(time_one, int(depth))
                for depth in arguments.depths.split(",")
            }
            passes = interleave(runs, arguments.rounds)
            show(f"{precision}: a pass over {BLOCK} tokens", passes, next(iter(passes)))
            canvases: dict[str, tuple[int, ...]] = {}
            kinds = {
                cache: partial(generate, bundle, cache, canvases) for cache in ("block", "none")
            }
            whole = interleave(kinds, max(3, arguments.rounds // 3), warm_ups=1)
            show(
                f"{precision}: {GIVEN} given and {NEW} new tokens, {PASSES_PER_BLOCK} passes a block",
                whole,
                "none",
            )
            if precision == "fp32" and len(set(canvases.values())) != 1:
                raise SystemExit("the canvases with and without the cache are not equal")
            result[precision] = {"passes": passes, "generations": whole}
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
