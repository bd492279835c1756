"""Build engines for layers of released mixtures of experts, and measure the builds.

    python -m benchmarks.gpu.expert_engines [--models LLaDA-MoE,RND1] [--layers 1]

The layers have the released widths, heads and experts, and random weights. The vocabulary has 1024
tokens. TensorRT-RTX builds the engines, without a GPU. The table shows the seconds and the highest
anonymous memory of ``dlm-export engine``, and the size of the engine. The last columns are for all
layers: the size of the engine, the memory (both extrapolated), and the memory that ``dlm-export
build`` estimates.

    python -m benchmarks.gpu.expert_engines --plan

This command prints the times of passes that ``dlm-export plan`` predicts for the whole models.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path

from benchmarks.gpu.expert_models import MODELS, checkpoint_of
from benchmarks.shapes import DLM_EXPORT, built, machine, quickly
from benchmarks.speed.watching import watched
from benchmarks.tables import table
from dlm_export.bundle.manifest import network_of, read_manifest
from dlm_export.planning.roofline import Costs
from dlm_export.tensorrt.estimate import Limits, estimate

# The import of shapes adds the tests' folder to the path.
from checkpoints import write_headers  # isort: skip

DEVICES = "rtx4090,rtx5090,h100,b200,thor,agx-orin"
BUNDLES = {"int4": ("rtx4090", "rtx5090"), "fp8": ("rtx4090",), "nvfp4": ("rtx5090",)}
"""The targets of the bundle in each precision."""
FURTHER = {"int4": 2.7, "fp8": 1.7, "nvfp4": 2.15}
"""Bytes of memory for each further byte of weights (docs/benchmarks/gpus.md)."""


def measure(model: str, layers: int) -> list[list[str]]:
    """Build the bundles and engines of a model. Returns a row of the table for each engine."""
    source, every = checkpoint_of(model, layers), MODELS[model].layers
    rows = []
    for precision, targets in BUNDLES.items():
        options = ("--target", ",".join(targets), "--precision", precision, "--solver", "nearest")
        name = f"{source.name}-{precision}"
        bundle = built(source, name, *options, *quickly(precision), "--no-engine")
        manifest = read_manifest(bundle)
        network = network_of(manifest)
        formats, limits = manifest["precision"]["layers"], Limits(network.max_canvas_length, 32)
        whole = Costs(network, formats, 2).weight_bytes * every // layers
        estimated = estimate(network, whole, limits, formats.values()).host / 1e9
        for target in targets:
            command = [*DLM_EXPORT, "engine", str(bundle), "--target", target, "--force", "--json"]
            text, spent = watched(command)
            assert spent["exit"] == 0, (name, target)
            entry = json.loads(text)["engines"][target]
            size = (bundle / entry["file"]).stat().st_size / 1e9
            memory = spent["peak_anonymous_bytes"] / 1e9
            all_layers = size * every / layers
            further = FURTHER[precision] * (all_layers - size)
            numbers = (memory, size, all_layers, memory + further, estimated)
            cells = [f"{number:.2f}" for number in (entry["seconds"], *numbers)]
            rows.append([model, precision, target, str(layers), *cells])
            print(rows[-1], flush=True)
    return rows


def plan() -> list[list[str]]:
    """Predict passes of the whole models. Returns a row for each model and device."""
    rows = []
    for name, model in MODELS.items():
        config = model.config(model.layers)
        with tempfile.TemporaryDirectory() as folder:
            top = config.get("text_config", config)
            top["vocab_size"] = model.vocab_size
            write_headers(Path(folder), config)
            command = [*DLM_EXPORT, "plan", folder, "--targets", DEVICES, "--json"]
            told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        for device in DEVICES.split(","):
            fitting = [
                each
                for each in json.loads(told)["predictions"]
                if each["target"] == device and each["fits"] is not False
            ]
            if not fitting:
                rows.append([name, device, "none fits", *[""] * 5])
                continue
            best = min(fitting, key=lambda each: each["block_pass"]["ms"])
            cells = [
                f"{best[kind]['ms']:.1f} ({best[kind]['bound']})"
                for kind in ("full_pass", "block_pass")
            ]
            computed = "all" if best["all_experts"] else "chosen"
            memory = f"{best['memory_bytes'] / 1e9:.1f}"
            tokens = str(best["block_pass"]["tokens"])
            rows.append([name, device, best["precision"], computed, tokens, *cells, memory])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS), help="models, with commas")
    parser.add_argument("--layers", type=int, default=1, help="layers of each bundle")
    parser.add_argument("--plan", action="store_true", help="predict times instead")
    options = parser.parse_args()
    if options.plan:
        head = ["model", "device", "precision", "experts", "block", "prompt, ms", "block, ms"]
        print(table([*head, "GB of memory"], plan()))
        return
    rows = [row for model in options.models.split(",") for row in measure(model, options.layers)]
    head = ["model", "precision", "device", "layers", "s", "GB of memory", "GB of engine"]
    whole = ["GB of engine, all layers", "GB of memory, all layers", "estimated"]
    print(machine()["processor"])
    print(table([*head, *whole], rows))


if __name__ == "__main__":
    main()
