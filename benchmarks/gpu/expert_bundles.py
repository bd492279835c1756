"""Build bundles for ``cuda`` with layers of released mixtures of experts, and compare them with torch.

    python -m benchmarks.gpu.expert_bundles [--models LLaDA-MoE,RND1] [--precisions int8,int4]

The build runs the operators of the bundle with ONNX Runtime's CPU provider. The table shows the
largest difference of a layer from equal inputs, and the difference of the logits of whole passes
over ten canvases: the median of the canvases and the largest. All differences are relative to the
range of the values. The last column is the share of positions whose most likely token is the same
as in torch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.gpu.expert_models import MODELS, checkpoint_of
from benchmarks.shapes import FOLDER, build_command, machine
from benchmarks.tables import table

# Attention is in INT8, so that the build compares the layers one by one.
FP16_EXPERTS = '[layers]\n"blocks.*.attention.*" = "int8-weight"\n'
PRECISIONS = {"fp16": "fp16", "int8": "bf16", "int4": "bf16"}
"""The type of activations for each precision of the experts."""


def compare(model: str, precision: str) -> list[str]:
    """Build a bundle, and return a row of the table."""
    source, activations = checkpoint_of(model, MODELS[model].few), PRECISIONS[precision]
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        recipe = Path(folder) / "fp16-experts.toml"
        recipe.write_text(FP16_EXPERTS)
        how = str(recipe) if precision == "fp16" else precision
        options = ("--target", "cuda", "--precision", how, "--activations", activations)
        nearest = ("--solver", "nearest", "--judge", "none", "--json")
        command = build_command(source, Path(folder) / "bundle", *options, *nearest)
        told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    parity: dict[str, Any] = json.loads(told)["parity"]
    apart = max(
        max(row["input_relative"], row["output_relative"] or 0)
        for row in parity["layers"]
        if not row["layer"].endswith(".router")
    )
    graph = parity["graph"]
    whole = [row["relative"] for row in graph]
    equal, rows = (sum(row[name] for row in graph) for name in ("argmax_equal", "rows"))
    passes = f"{statistics.median(whole):.4f}, {max(whole):.4f}"
    limit = f"{parity['tolerance']['relative']:g}"
    what = f"{precision}, in {activations}"
    return [model, what, f"{apart:.4f}", limit, passes, f"{equal / rows:.3f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS), help="models, with commas")
    parser.add_argument("--precisions", default=",".join(PRECISIONS), help="with commas")
    options = parser.parse_args()
    rows = []
    for model in options.models.split(","):
        for precision in options.precisions.split(","):
            rows.append(compare(model, precision))
            print(rows[-1], flush=True)
    print(machine()["processor"])
    head = ["model", "experts", "layer", "allowed", "whole passes", "equal tokens"]
    print(table(head, rows))


if __name__ == "__main__":
    main()
