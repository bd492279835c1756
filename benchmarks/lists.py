"""Compare the speed of different caches in a block-causal denoiser.

The script prints the passes (NFE), the milliseconds per request, and the tokens per second.

    python benchmarks/lists.py BUNDLE --data FILE.jsonl [--count 40] [--rounds 5] [--set threshold=0.85] [--json FILE]
    python benchmarks/lists.py BUNDLE --data FILE.jsonl --effort

Each line of the file has a `prompt`. All variants run the same requests, and take turns. The times
are medians and quartiles over the rounds. The script also prints how many canvases differ from
those of the first variant. With `--effort`, the variants are the bundle's effort levels. Some
levels also have a second variant with a different value of the policy field ``store``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from shapes import machine
from timing import cell, clocked, interleave

import dlm_runtime
from dlm_export.cli.values import policy_changes
from dlm_export.judging.tuning.effort_levels import LEVELS

WAYS: dict[str, dict[str, Any]] = {
    "block": {"cache": "block"},
    "block, store=open": {"cache": "block", "store": "open"},
    "none": {"cache": "none"},
    "block, sub-blocks of 8": {"cache": "block", "sub_block_length": 8},
    "block-dual, sub-blocks of 8": {"cache": "block-dual", "sub_block_length": 8},
}
STORED_OTHERWISE = (("high", "open"), ("medium", "pass"), ("low", "pass"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--preset", default="sdar")
    parser.add_argument("--new-tokens", type=int, default=192)
    parser.add_argument("--set", action="append", default=["threshold=0.85"], metavar="FIELD=VALUE")
    parser.add_argument("--effort", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    lines = arguments.data.read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines[: arguments.count]]
    ways, request = WAYS, {"new_tokens": arguments.new_tokens}
    if arguments.effort:
        ways = {level: {"effort": level} for level in reversed(LEVELS)}
        ways |= {
            f"{level}, store={way}": {"effort": level, "store": way}
            for level, way in STORED_OTHERWISE
        }
    else:
        request |= {"preset": arguments.preset} | policy_changes(arguments.set)
    with dlm_runtime.open(arguments.bundle) as bundle:

        def run(changes: dict[str, Any]) -> list[dlm_runtime.Generation]:
            return [bundle.generate(prompt=prompt, **request | changes) for prompt in prompts]

        made = {name: run(changes) for name, changes in ways.items()}
        times = interleave(
            {name: clocked(lambda changes=changes: run(changes)) for name, changes in ways.items()},
            arguments.rounds,
            0,
        )
    first, rows = next(iter(made.values())), {}
    for name, found in made.items():
        row = {key: value / len(prompts) for key, value in times[name].items()}
        tokens = sum(one.completion_tokens for one in found)
        rows[name] = row | {
            "nfe": sum(one.nfe for one in found) / len(found),
            "tokens_per_s": tokens / (row["median_ms"] * len(prompts) / 1e3),
            "unequal": sum(
                one.tokens != other.tokens for one, other in zip(found, first, strict=True)
            ),
        }
        told = rows[name]
        print(
            f"{name:28} NFE {told['nfe']:5.1f}  {cell(row)} ms  {told['tokens_per_s']:.0f} tokens/s  {told['unequal']} unequal"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
