"""Measure how long TensorRT-RTX takes to build engines without a GPU, and how much memory it needs.

The script also prints the sizes of the engines, and the formats that the audit finds in them.

    python benchmarks/engines.py [--sizes demo,134M] [--precisions
        fp16,bf16,int8,int4,fp8,nvfp4,mixed]
                                 [--targets rtx4090,rtx5090,gb10] [--json FILE]

For each precision, the script builds a bundle without engines. Then `dlm-export engine` builds each
engine in a separate process. Peak memory is the largest resident set of that process, including
mapped files. The script also prints the peak memory divided by the bytes of the bundle's weights.

The demo's bundles are calibrated on the demo's data. The build measures their accuracy in ONNX
Runtime, on 64 commands that calibration did not use. The random denoisers are used only to measure
the builder. They are calibrated on a few random ids, and their accuracy is not measured.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import Any

from shapes import DLM_EXPORT, built, checkpoint, machine
from watching import finished

from dlm_export import targets

FEW = ("--calib-samples", "8", "--calib-states", "4", "--no-verify")
JUDGED = 64
# Maps a precision to the target of its bundles. In all other precisions, the target is rtx4090.
LEAST_TARGET = {
    "nvfp4": "rtx5090",
    "mixed": "rtx5090",
}


def bundle(size: str, precision: str) -> Path:
    """Return a bundle with a device graph and no engine. The bundle is built once, under build/."""
    options = ["--target", LEAST_TARGET.get(precision, "rtx4090"), "--precision", precision]
    effort = ("--judge", "full", "--judged", str(JUDGED)) if size == "demo" else FEW
    name = f"engines-{size}-{precision}"
    return built(checkpoint(size), name, *options, "--no-engine", *effort)


def judged(folder: Path) -> dict[str, Any]:
    """Return the accuracy that a quantised bundle's accuracy.json contains."""
    path = folder / "accuracy.json"
    found = json.loads(path.read_text()).get("judgement") if path.is_file() else None
    if found is None:
        return {}
    return {
        "top1": found["overall"]["top1"],
        "flips": [found["frontier"]["flips"], found["frontier"]["committed"]],
        "task": found["free_running"]["task"]["candidate"],
        "reference_task": found["free_running"]["task"]["reference"],
    }


def measure(size: str, precision: str, target: str) -> dict[str, Any]:
    """Build one engine and measure it.

    Returns the run time of the process and of the builder in seconds, and the peak resident memory
    in bytes, as reported by the kernel.
    """
    folder = bundle(size, precision)
    options = ["--target", target, "--force", "--json"]
    text, row = finished([*DLM_EXPORT, "engine", str(folder), *options])
    entry, peak = json.loads(text)["engines"][target], row["peak_rss_bytes"]
    weights = (folder / "denoiser.onnx.data").stat().st_size
    engine = (folder / entry["file"]).stat().st_size
    return {
        "size": size,
        "precision": precision,
        "target": target,
        "builder": f"{entry['builder']} {entry['version']}",
        "seconds": round(row["seconds"], 1),
        "build_s": entry["seconds"],
        "weights_bytes": weights,
        "engine_bytes": engine,
        "engine_over_weights": round(engine / weights, 2),
        "peak_rss_bytes": peak,
        "peak_over_weights": round(peak / weights, 2),
        "device_bytes": entry["audit"]["device_bytes"],
        "audit": entry["audit"]["method"],
        "held": dict(Counter(entry["audit"]["layers"].values())),
        "fallbacks": len(entry["audit"]["fallbacks"]),
        "graph": entry["built_from"],
        **judged(folder),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", default="demo,134M")
    parser.add_argument("--precisions", default="fp16,bf16,int8,int4,fp8,nvfp4,mixed")
    parser.add_argument("--targets", default="rtx4090,rtx5090,gb10")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    for size in arguments.sizes.split(","):
        for precision in arguments.precisions.split(","):
            for target in arguments.targets.split(","):
                if precision not in targets.find(target).precisions:
                    print(
                        f"{size:>5} {precision:>6} {target}: not a precision of this target",
                        flush=True,
                    )
                    continue
                rows.append(row := measure(size, precision, target))
                sizes = [
                    row[name] / 2**20
                    for name in ("weights_bytes", "engine_bytes", "peak_rss_bytes")
                ]
                print(
                    f"{size:>5} {precision:>6} {target:>8}: {row['build_s']:6.1f} s, weights {sizes[0]:7.1f} MiB, "
                    f"engine {sizes[1]:7.1f} MiB, peak {sizes[2]:7.0f} MiB ({row['peak_over_weights']:.2f} x weights), "
                    f"held {row['held']}, {row['fallbacks']} fallbacks"
                    + (
                        f", top-1 {row['top1']:.4f}, flips {row['flips']}, right {row['task']:.3f}"
                        if "top1" in row
                        else ""
                    ),
                    flush=True,
                )
    if arguments.json:
        named = machine() | {"tensorrt_rtx": metadata.version("tensorrt-rtx-cu13-bindings")}
        arguments.json.write_text(json.dumps({"machine": named, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
