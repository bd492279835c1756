"""Compare the speed and memory of three denoisers, one of which is a mixture of experts.

The second denoiser has no experts, and has as many parameters as the mixture uses for a token. The
third denoiser is the same mixture, but it computes all experts for every token.

    python benchmarks/mixtures.py [--layers 8] [--precision int8] [--rounds 9] [--json FILE]

The mixture has about a billion random parameters in the layout of LLaDA-MoE, and uses 8 of 64
experts per token. The script times passes of the three denoisers in one process, and alternates
between the denoisers. It compares the times with the shortest times that are possible according to
the roofline model. The roofline model uses rates of the machine, which the script measures as
``dlm-export bench`` does.

For each denoiser, the script measures the memory of a new process at two times: first after a
single pass of one token, and then after passes of 1, 4, 32 and 256 tokens. After the first pass,
memory does not yet contain the experts that the token did not use.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

from shapes import QUICKLY, built, machine, random_checkpoint
from timing import interleave, show
from watching import figures

import dlm_runtime
from dlm_export.bundle.manifest import network_of
from dlm_export.planning import roofline

ACTIVE, COUNT, SIZE, VOCABULARY = 8, 64, 512, 32_000
SHAPE = {
    **{"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 16},
    **{
        "num_experts": COUNT,
        "expert_intermediate_size": SIZE,
        "dense_intermediate_size": ACTIVE * SIZE,
    },
    **{"vocab_size": VOCABULARY, "max_position_embeddings": 4096},
    **{
        "mask_token_id": VOCABULARY - 1,
        "eos_token_id": VOCABULARY - 2,
        "pad_token_id": VOCABULARY - 2,
    },
}
KINDS = {
    f"{ACTIVE} of {COUNT} experts": (ACTIVE, 1),
    "dense, active size": (ACTIVE, 0),
    "all experts": (COUNT, 1),
}
"""For each denoiser, the number of experts per token, and 1 if the layers have experts."""
# For each pass: computed tokens, cached tokens, and scored rows.
PASSES = ((1, 255, 1), (4, 252, 4), (32, 224, 32), (256, 0, 256))


def bundle_of(kind: str, layers: int, precision: str) -> Path:
    """Return the bundle of one of the three denoisers. The bundle is built once.

    The two denoisers with experts have the same weights.
    """
    from checkpoints import llada_moe_config

    active, has_experts = KINDS[kind]
    shape = SHAPE | {
        "num_hidden_layers": layers,
        "moe_layer_freq": [has_experts] * layers,
        "num_experts_per_tok": active,
    }
    name = f"{kind.replace(' ', '-').replace(',', '')}-{layers}"
    source = random_checkpoint(name, llada_moe_config(**shape), shards=4)
    return built(source, f"{name}-{precision}", "--precision", precision, *QUICKLY)


def memory(path: Path) -> dict[str, int]:
    """Return the bytes of this process's memory after passes: anonymous memory and mapped files.

    Also returns the bytes of mapped files after a single pass of one token.
    """
    with dlm_runtime.open(path, check_hashes=False) as bundle:
        bundle.time_passes(1, 0, 1, 1)
        few = figures(Path("/proc/self/status"))["RssFile"]
        for T, S, R in PASSES:
            bundle.time_passes(T, S, R, 2)
        found = figures(Path("/proc/self/status"))
    return {"own": found["RssAnon"], "mapped": found["RssFile"], "mapped_behind_one_token": few}


def limits(path: Path, rates: roofline.Rates) -> dict[tuple[int, int, int], tuple[float, int]]:
    """Return the shortest possible seconds of each pass, and the bytes of weights that the pass
    reads.

    The seconds come from the roofline model.
    """
    manifest = json.loads((path / "manifest.json").read_text())
    network, layers = network_of(manifest), manifest["precision"].get("layers", {})
    work = {size: roofline.work_of(network, layers, *size) for size in PASSES}
    return {size: (roofline.limit_s(done, rates), done.weight_bytes) for size, done in work.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--precision", default="int8")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--memory-of", type=Path, help=argparse.SUPPRESS)  # for the new process
    arguments = parser.parse_args()
    if arguments.memory_of:
        print(json.dumps(memory(arguments.memory_of)))
        return
    folders = {kind: bundle_of(kind, arguments.layers, arguments.precision) for kind in KINDS}
    result: dict[str, Any] = {
        "machine": machine(),
        "layers": arguments.layers,
        "memory": {},
        "passes": {},
    }
    for kind, folder in folders.items():
        told = subprocess.run(
            [sys.executable, __file__, "--memory-of", str(folder)],
            check=True,
            capture_output=True,
            text=True,
        )
        held = result["memory"][kind] = json.loads(told.stdout)
        print(
            f"{kind}: {held['own'] / 2**20:.0f} MiB of its own, {held['mapped'] / 2**20:.0f} MiB mapped,",
            end=" ",
        )
        print(f"{held['mapped_behind_one_token'] / 2**20:.0f} MiB behind passes of one token")
    rates = roofline.measure(0).rates()
    bounds = {kind: limits(folder, rates) for kind, folder in folders.items()}
    with contextlib.ExitStack() as stack:
        opened = {
            kind: stack.enter_context(dlm_runtime.open(folder, check_hashes=False))
            for kind, folder in folders.items()
        }
        for size in PASSES:

            def time_one(bundle: dlm_runtime.Bundle, size: tuple[int, int, int]) -> float:
                return bundle.time_passes(*size, 1)[0]

            rows = interleave(
                {kind: partial(time_one, bundle, size) for kind, bundle in opened.items()},
                arguments.rounds,
            )
            T, S, R = size
            show(f"T = {T}, S = {S}, R = {R}", rows, next(iter(KINDS)))
            for kind, row in rows.items():
                seconds, touched = bounds[kind][size]
                row |= {
                    "limit_ms": seconds * 1e3,
                    "touched_bytes": touched,
                    "times_limit": row["median_ms"] / seconds / 1e3,
                }
                least = f"{seconds * 1e3:.1f} ms, {touched / 2**20:.0f} MiB touched"
                print(f"  {kind:28} limit {least}: {row['times_limit']:.2f} times")
            result["passes"][f"T={T} S={S} R={R}"] = rows
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
