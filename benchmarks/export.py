"""Measure the time and peak memory of `dlm-export build` on random checkpoints.

    python benchmarks/export.py [--sizes 134M,1B] [--precisions fp32,fp16,fp32+parity,int8,nvfp4] [--json FILE]

Each build runs in a new process. Peak memory is the largest resident set of the process, including
mapped files. The script prints this memory divided by the size of the written weights, and divided
by the size of the parameters in fp16. Some quantised bundles need calibration data. A few random
ids are enough here, because the script measures only speed and memory.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from shapes import ROOT, build_command, checkpoint, machine
from watching import finished

CALIBRATION = ("--calib-samples", "8", "--calib-states", "4")


def measure(size: str, precision: str, check_parity: bool) -> dict[str, Any]:
    """Run one build and measure it.

    Returns the seconds of each stage, as reported by the build, and the peak resident memory in
    bytes, as reported by the kernel.
    """
    source = checkpoint(size)
    with tempfile.TemporaryDirectory(dir=ROOT / "build" / "benchmarks") as folder:
        output = Path(folder) / "bundle"
        options = ["--precision", precision, "--json", *CALIBRATION]
        verify = [] if check_parity else ["--no-verify"]
        text, row = finished(build_command(source, output, *options, *verify))
        report, peak = json.loads(text), row["peak_rss_bytes"]
        weights = (output / "denoiser.onnx.data").stat().st_size
        shutil.rmtree(output)
    return {
        "size": size,
        "parameters": report["parameters"],
        "precision": precision,
        "parity_checked": check_parity,
        "seconds": round(row["seconds"], 1),
        "stages_s": report["stages_s"],
        "weights_bytes": weights,
        "peak_rss_bytes": peak,
        "peak_over_weights": round(peak / weights, 2),
        "peak_over_fp16": round(peak / (2 * report["parameters"]), 2),
        "worst_relative": max(row["relative"] for row in report["parity"]["graph"])
        if check_parity
        else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", default="134M,1B")
    parser.add_argument("--precisions", default="fp32,fp16,fp32+parity,int8,nvfp4")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    for size in arguments.sizes.split(","):
        for named in arguments.precisions.split(","):
            precision, check_parity = named.removesuffix("+parity"), named.endswith("+parity")
            rows.append(measure(size, precision, check_parity))
            row = rows[-1]
            print(
                f"{size:>5} {precision} {'with' if check_parity else 'without'} parity check: {row['seconds']:6.1f} s, "
                f"peak {row['peak_rss_bytes'] / 2**20:7.0f} MiB, {row['peak_over_weights']:.2f} x weights, "
                f"{row['peak_over_fp16']:.2f} x fp16, {row['stages_s']}",
                flush=True,
            )
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
