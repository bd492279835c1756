"""Measure how much accuracy the demo denoiser loses with each quantisation recipe.

    python benchmarks/quantise.py [--recipes int8,int4,...] [--data examples/demo/heldout.jsonl] [--json FILE]

The script builds a bundle with each recipe, and calibrates it on the demo's calibration.jsonl. It
then compares the bundle with the denoiser in full precision, on held-out commands. Each bundle also
answers each of these commands. For each recipe, the script prints:

- the size of the bundle,
- the cross-entropy of masked tokens, for each mask ratio,
- the share of masked tokens for which the bundle and full precision predict the same token,
- the number of positions where the bundle and full precision would commit different tokens (flips),
- the mean number of passes, and the share of right answers.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from shapes import ROOT, machine

import dlm_runtime
from dlm_export.build import BuildOptions, QuantiseOptions, build_from
from dlm_export.judging.accuracy.effort import Effort
from dlm_export.judging.accuracy.run import JudgingOptions, judge_bundle
from dlm_export.judging.tuning.fit_in_build import fit_threshold
from dlm_export.opening import Opening
from dlm_export.progress import Silent
from dlm_export.quantising.samples import CalibrationOptions, load_data
from dlm_export.sources import open_source

sys.path.insert(0, str(ROOT / "examples" / "demo"))
from evaluate import evaluate

FITTED = 96  # number of calibration samples on which the threshold is fitted
CHECKPOINT = ROOT / "examples" / "demo-denoiser"
RECIPES = "int8,int8-static,int4,int4-rtn,int4-awq,fp8,nvfp4,nvfp4-weight,mixed,auto"


def measure(
    checkpoint: Path, name: str, data: Path, judged: int, extra: dict[str, Any]
) -> dict[str, Any]:
    """Build a bundle in one precision, and measure its accuracy on ``data``.

    The bundle answers every command twice: with the preset's threshold, and with a fitted
    threshold.
    """
    lines = [json.loads(line) for line in data.read_text().splitlines()]
    folder = ROOT / "build" / "benchmarks" / "-".join(["demo", name, *map(str, extra.values())])
    source = open_source(checkpoint)
    is_quantised = name not in ("fp32", "fp16")
    options = BuildOptions(
        precision=name,
        force=True,
        check_parity=False,
        quantise=QuantiseOptions(recipe_changes=extra),
    )
    report = build_from(source, folder, options)
    row: dict[str, Any] = {
        "precision": name,
        **extra,
        "bytes": sum(report.files_bytes[f] for f in report.files_bytes if "onnx" in f),
    }
    threshold = 0.9
    if is_quantised:
        judging = JudgingOptions(
            CalibrationOptions(data=data),
            Effort("full", judged),
            opening=Opening("onnxruntime", threads=1),
        )
        judgement = judge_bundle(folder, source, judging, Silent())
        found = judgement.as_dict()
        row |= {key: found[key] for key in ("buckets", "overall", "frontier", "noise_floor")}
        row["free_running"] = {
            k: v for k, v in found["free_running"].items() if not isinstance(v, list)
        }
        with dlm_runtime.open(folder) as bundle:
            own = load_data(source.network, source.path, bundle.tokenizer, CalibrationOptions())
            fitted = fit_threshold(
                source,
                bundle,
                own.calibration[:FITTED],
                "fast-dllm",
                0,
                lambda: None,
            )
        row["threshold"] = fitted.as_dict()
        threshold = fitted.refitted.threshold
    with dlm_runtime.open(folder) as bundle:
        for label, value in (("at_0.9", 0.9), ("at_fitted", threshold)):
            result = evaluate(bundle, lines, preset="fast-dllm", threshold=value)
            right = result["right"]["all"]
            row[label] = {
                "exact_match": sum(right) / len(right),
                "nfe": sum(result["nfe"]) / len(result["nfe"]),
            }
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipes", default=f"fp32,{RECIPES}")
    parser.add_argument("--data", type=Path, default=ROOT / "examples" / "demo" / "heldout.jsonl")
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT)
    parser.add_argument("--judged", type=int, default=600)
    parser.add_argument(
        "--embedding", choices=["int8", "fp8"], help="Also quantise the embedding table."
    )
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    extra = {} if arguments.embedding is None else {"embedding": arguments.embedding}
    rows = []
    for name in arguments.recipes.split(","):
        rows.append(
            measure(
                arguments.checkpoint,
                name,
                arguments.data,
                arguments.judged,
                {} if name in ("fp32", "fp16") else extra,
            )
        )
        row = rows[-1]
        line = f"{name:13} {row['bytes'] / 2**20:6.2f} MiB"
        if "overall" in row:
            overall, frontier = row["overall"], row["frontier"]
            threshold = row["threshold"]["refitted"]["threshold"]
            low, high = overall["ce_increase_interval"]
            line += (
                f" ce {overall['candidate_ce']:.5f} ({overall['ce_increase']:+.2%} [{low:+.2%}, {high:+.2%}]) "
                f"top1 {overall['top1']:.4f} flips {frontier['flips']}/{frontier['committed']} "
                f"jaccard {frontier['jaccard']:.4f} nfe x{row['free_running']['nfe_ratio']:.3f} fitted {threshold:g}"
            )
        for label in ("at_0.9", "at_fitted"):
            line += f" | {label} {row[label]['exact_match']:.2%} nfe {row[label]['nfe']:.2f}"
        print(line, flush=True)
        if "buckets" in row:
            print(
                "   by bucket "
                + " ".join(f"{b['mask_ratio']}:{b['ce_increase']:+.2%}" for b in row["buckets"]),
                flush=True,
            )
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
