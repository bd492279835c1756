"""Measure the accuracy of three antibody language models in each precision.

    pip install --no-deps antiberty==0.1.3 sapiens==1.0.5 anarci==2026.2.13.2
    python benchmarks/antibodies.py [--precisions fp32,int8,...] [--json FILE]

The script tests the models on the germline V genes of human antibodies, from the package
``anarci``. It uses the first allele of each gene. Half of the genes calibrate the models. The
script measures accuracy on the other half. The training data of the models contains antibodies made
from these genes. The models have therefore seen similar sequences.

The script masks different shares of the residues (amino acids). For each share, it prints how many
masked residues a model predicts correctly, and the cross-entropy, with bootstrap intervals.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from shapes import ROOT, machine

import dlm_runtime
from dlm_calibration import metrics
from dlm_export.build import BuildOptions, QuantiseOptions, build
from dlm_export.quantising.samples import CalibrationOptions

sys.path.insert(0, str(ROOT / "examples"))
from residues import ANTIBODY_MODELS, package_folder, write_model

OUTPUT = ROOT / "build" / "benchmarks" / "antibodies"
SAMPLES = 24  # number of sequences for calibration
RATIOS = (0.15, 0.5, 0.85)
PRECISIONS = "fp32,int8,int8-static,int4,fp8"
CHAINS = {"antiberty": "HKL", "sapiens-heavy": "H", "sapiens-light": "KL"}


def germlines(package: Path, chains: str) -> list[str]:
    """Return the V genes of human antibodies: one amino-acid sequence per gene, without gaps."""
    tree = ast.parse((package / "germlines.py").read_text())
    values = [node.value for node in tree.body if isinstance(node, ast.Assign)]
    genes = next(found for value in values if "V" in (found := ast.literal_eval(value)))["V"]
    return [
        residues.replace("-", "")
        for chain in chains
        for name, residues in genes[chain]["human"].items()
        if name.endswith("*01")
    ]


def masked(ids: list[int], mask_token_id: int, ratio: float, seed: int) -> tuple[list[int], Any]:
    """Mask a share of the residues of a sequence. Returns the canvas and the masked positions."""
    rng = np.random.default_rng(seed)
    count = max(1, round(ratio * (len(ids) - 2)))
    rows = np.sort(rng.choice(np.arange(1, len(ids) - 1), count, replace=False))
    canvas = list(ids)
    for row in rows:
        canvas[row] = mask_token_id
    return canvas, rows


def logits_of(folder: Path, canvases: list[tuple[list[int], Any]]) -> list[Any]:
    """Return the logits at the masked positions of each canvas."""
    with dlm_runtime.open(folder) as bundle:
        return [bundle.logits(canvas, rows.tolist()) for canvas, rows in canvases]


def judge(
    reference: list[Any], found: list[Any], truth: list[Any], mask_token_id: int
) -> dict[str, Any]:
    """Compare a precision's logits with the reference's logits and with the true residues."""
    parts = [
        metrics.compare_rows(*each, mask_token_id)
        for each in zip(reference, found, truth, strict=True)
    ]
    whose = np.repeat(np.arange(len(parts)), [len(each) for each in truth])
    row = metrics.summarise(metrics.Rows.join(parts), whose, len(parts), seed=0)
    hits = []
    for logits, true in zip(found, truth, strict=True):
        allowed = logits.copy()
        allowed[:, mask_token_id] = -np.inf
        hits.append((allowed.argmax(1) == true).sum())
    counts = np.array([len(each) for each in truth], np.float64)
    right = np.array(hits, np.float64)
    nats = np.array([part.candidate_ce.sum() for part in parts])
    return row | {
        "recovery": right.sum() / counts.sum(),
        "recovery_interval": metrics.ratio_interval(right, counts, seed=0),
        "ce_interval": metrics.ratio_interval(nats, counts, seed=0),
    }


def judge_model(
    name: str, checkpoint: Path, sequences: list[str], precisions: list[str]
) -> list[dict[str, Any]]:
    """Build a bundle for each precision, and compare each bundle with the first one."""
    data = OUTPUT / f"{name}.jsonl"
    data.write_text("".join(json.dumps({"text": each}) + "\n" for each in sequences[1::2]))
    rows: list[dict[str, Any]] = []
    reference: dict[float, list[Any]] = {}
    for precision in precisions:
        folder = OUTPUT / f"{name}-{precision}"
        calibration = CalibrationOptions(data, samples=SAMPLES)
        options = QuantiseOptions(calibration=calibration)
        report = build(
            checkpoint,
            folder,
            BuildOptions(precision=precision, force=True, check_parity=False, quantise=options),
        )
        size = sum(size for file, size in report.files_bytes.items() if "onnx" in file)
        with dlm_runtime.open(folder) as bundle:
            mask, tokenizer = bundle.mask_token_id, bundle.tokenizer
            assert tokenizer is not None
            encoded = [tokenizer.encode(each) for each in sequences[::2]]
        for ratio in RATIOS:
            canvases = [masked(ids, mask, ratio, seed) for seed, ids in enumerate(encoded)]
            truth = [np.array(ids)[rows] for ids, (_, rows) in zip(encoded, canvases, strict=True)]
            found = logits_of(folder, canvases)
            row = judge(reference.setdefault(ratio, found), found, truth, mask)
            about = {"model": name, "precision": precision, "ratio": ratio, "bytes": size}
            rows.append(about | {"sequences": len(encoded)} | row)
    return rows


def show(row: dict[str, Any]) -> None:
    low, high = row["recovery_interval"]
    first, last = row["ce_interval"]
    print(
        f"{row['model']:14} {row['precision']:12} {row['bytes'] / 2**20:6.2f} MiB  {row['ratio']:4.0%} masked  "
        f"recovery {row['recovery']:.3f} ({low:.3f} .. {high:.3f})  "
        f"CE {row['candidate_ce']:.3f} ({first:.3f} .. {last:.3f}) {row['ce_increase']:+.2%}  top-1 {row['top1']:.3f}",
        flush=True,
    )


def run(title: str | None, models: str, sequences_of: Callable[[str], list[str]]) -> None:
    """Run a benchmark of this kind with its command line.

    ``title`` is the help text, ``models`` the default of ``--models``, and ``sequences_of`` takes
    the name of a model and returns the sequences to test the model on.
    """
    parser = argparse.ArgumentParser(
        description=title, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--precisions", default=PRECISIONS, help="The first is the reference.")
    parser.add_argument("--models", default=models)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    OUTPUT.mkdir(parents=True, exist_ok=True)
    rows = []
    for name in arguments.models.split(","):
        checkpoint = write_model(name, OUTPUT / name)
        precisions = arguments.precisions.split(",")
        for row in judge_model(name, checkpoint, sequences_of(name), precisions):
            rows.append(row)
            show(row)
    if arguments.json:
        about = {"machine": machine(), "rows": rows}
        arguments.json.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    run(
        __doc__,
        ",".join(ANTIBODY_MODELS),
        lambda name: germlines(package_folder("anarci"), CHAINS[name]),
    )
