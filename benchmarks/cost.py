"""Measure how much time and memory the build of a quantised bundle takes, stage by stage.

    python benchmarks/cost.py [--layers 4,8,16] [--samples 8,32] [--precision nvfp4] [--json FILE]
    python benchmarks/cost.py --size 1B --layers 16 --samples 128 --states-per-sample 8 --beside OTHER/bin/dlm-export \
        --beside-samples 2 [--json FILE]

The script builds bundles from random checkpoints in the layout of LLaDA, with different numbers of
layers and calibration states. By default, GPTQ rounds the weights. --solver selects another method.

``--beside`` also builds each checkpoint with another installed version of dlm-export. The two
versions take turns. If the other version would take hours, pass --beside-samples to give it fewer
samples. Then compare the seconds per calibration state instead of the total seconds.

The script prints the peak resident memory of a build, with and without mapped files.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from shapes import DLM_EXPORT, ROOT, SHAPES, checkpoint, machine
from watching import finished


def build(
    program: list[str], source: Path, arguments: argparse.Namespace, samples: int, extra: list[str]
) -> dict[str, Any]:
    """Run one build. Returns the seconds of each stage, and the peak memory in bytes."""
    with tempfile.TemporaryDirectory(dir=ROOT / "build" / "benchmarks") as folder:
        output = Path(folder) / "bundle"
        command = [
            *program,
            "build",
            str(source),
            "-o",
            str(output),
            "--precision",
            arguments.precision,
            "--json",
        ]
        command += ["--solver", arguments.solver, "--calib-samples", str(samples)]
        command += ["--calib-states", str(arguments.states_per_sample), *extra]
        text, moved = finished(command)
        shutil.rmtree(output)
    report = json.loads(text)
    return {"parameters": report["parameters"], "stages_s": report["stages_s"], **moved}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=list(SHAPES), default="134M", help="Width of the layers.")
    parser.add_argument("--layers", default="4,8,16")
    parser.add_argument("--samples", default="8,32")
    parser.add_argument("--states-per-sample", type=int, default=8)
    parser.add_argument("--precision", default="nvfp4")
    parser.add_argument("--solver", default="gptq")
    parser.add_argument("--judge", default="none", help="How to judge; none only builds.")
    parser.add_argument("--beside", type=Path, help="dlm-export of another installation.")
    parser.add_argument("--beside-samples", type=int, default=4)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    judging = ["--no-verify"] if arguments.judge == "none" else ["--judge", arguments.judge]
    rows = []
    for layers in map(int, arguments.layers.split(",")):
        source = checkpoint(arguments.size, layers)
        for samples in map(int, arguments.samples.split(",")):
            contestants = [("here", DLM_EXPORT, samples, judging)]
            if arguments.beside is not None:
                contestants.append(
                    ("beside", [str(arguments.beside)], arguments.beside_samples, ["--no-verify"])
                )
            for name, program, count, extra in contestants:
                row = {
                    "version": name,
                    "layers": layers,
                    "samples": count,
                    "states": count * arguments.states_per_sample,
                }
                row |= build(program, source, arguments, count, extra)
                stages = row["stages_s"]
                row["seconds_a_state"] = (stages["make states"] + stages["calibrate"]) / row[
                    "states"
                ]
                rows.append(row)
                print(
                    f"{name:7} {layers:3} layers {row['states']:5} states: {row['seconds']:7.1f} s, "
                    f"{row['seconds_a_state']:.3f} s a state, peak {row['peak_rss_bytes'] / 2**20:.0f} MiB, "
                    f"{row['peak_anonymous_bytes'] / 2**20:.0f} its own; {stages}",
                    flush=True,
                )
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
