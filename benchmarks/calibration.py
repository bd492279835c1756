"""Compare calibration on denoising states with calibration on clean text.

    python benchmarks/calibration.py [--recipes fp8,int8-static,nvfp4] [--judged 200] [--json FILE]

Both kinds of calibration use the same samples. A denoising state is a sample with masked tokens.
The script calibrates two denoisers: the demo, and the demo with outliers in its activations. To
make the outliers, the script multiplies eight channels in the output of every norm by 30. It
multiplies the weights that use these channels by 1/30, so the network computes the same function.
For each mask ratio, the script prints the loss of the quantised denoisers.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from shapes import ROOT, machine

import dlm_runtime
from dlm_export.build import BuildOptions, QuantiseOptions, build_from
from dlm_export.judging.accuracy.rounds import Effort
from dlm_export.judging.accuracy.run import JudgingOptions, judge_bundle
from dlm_export.opening import Opening
from dlm_export.progress import Silent
from dlm_export.quantising import numbers
from dlm_export.quantising.samples import CalibrationOptions
from dlm_export.sources import Source, open_source

CHECKPOINT = ROOT / "examples" / "demo-denoiser"
OUTLIERS, FACTOR = 8, 30.0


def with_outliers(source: Source) -> Source:
    """Make some channels of every norm's output ``FACTOR`` times larger.

    The weights that use these channels are divided by ``FACTOR``, so results stay the same.
    """
    c, rng = source.network, np.random.default_rng(0)
    folded = numbers.Folded(source.parameters, c)
    for i in range(len(c.layers)):
        for site in ("attention.q", "mlp.gate"):
            scales = np.ones(c.hidden_size, np.float32)
            scales[rng.choice(c.hidden_size, OUTLIERS, replace=False)] = 1 / FACTOR
            folded.fold(f"blocks.{i}.{site}", scales)
    return replace(source, parameters=folded)


def measure(
    source: Source, recipe: str, kind: str, data: Path, judged: int, seed: int
) -> dict[str, Any]:
    folder = ROOT / "build" / "benchmarks" / f"calibration-{recipe}-{kind}"
    quantise = QuantiseOptions(calibration=CalibrationOptions(source=kind, seed=seed))
    build_from(
        source,
        folder,
        BuildOptions(precision=recipe, force=True, check_parity=False, quantise=quantise),
    )
    judging = JudgingOptions(
        CalibrationOptions(data=data),
        Effort("full", judged),
        opening=Opening("onnxruntime", threads=1),
    )
    found = judge_bundle(folder, source, judging, Silent()).as_dict()
    with dlm_runtime.open(folder) as bundle:
        states = bundle.manifest["precision"]["calibration"]["states"]
    kept = {key: found[key] for key in ("buckets", "overall", "frontier")}
    return {"recipe": recipe, "states": states, "source": kind, "seed": seed} | kept


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipes", default="fp8,int8-static,nvfp4")
    parser.add_argument("--data", type=Path, default=ROOT / "examples" / "demo" / "heldout.jsonl")
    parser.add_argument("--judged", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    demo = open_source(CHECKPOINT)
    for name, source in (("demo", demo), ("demo with outliers", with_outliers(demo))):
        for recipe in arguments.recipes.split(","):
            for seed in range(arguments.seeds):
                for kind in ("denoising", "text"):
                    row = {"denoiser": name} | measure(
                        source, recipe, kind, arguments.data, arguments.judged, seed
                    )
                    rows.append(row)
                    overall, frontier = row["overall"], row["frontier"]
                    print(
                        f"{name:20} {recipe:12} {kind:10} seed {seed} ce {overall['ce_increase']:+.2%} "
                        f"top1 {overall['top1']:.4f} flips {frontier['flips']}/{frontier['committed']} | "
                        + " ".join(
                            f"{b['mask_ratio']}:{b['ce_increase']:+.2%}" for b in row["buckets"]
                        ),
                        flush=True,
                    )
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
