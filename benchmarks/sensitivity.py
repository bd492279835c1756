"""Compare two methods that measure how much quantising a single layer increases the loss.

    python benchmarks/sensitivity.py [--recipes int8,int4,nvfp4,mixed,fp8] [--budgets 0.01,0.05]
        [--samples 32] [--json FILE]

The first method is an estimate. It needs one forward pass and one backward pass for all layers. The
second method is exact. It runs the whole denoiser once for each layer. The script compares both
methods on the demo denoiser and on randomly initialised LLaDA and Dream denoisers (hidden size 256,
4 layers). It prints Spearman's rank correlation of the losses, the estimated loss divided by the
exact loss (10th, 50th and 90th percentile), and the seconds of both methods.

The script then runs ``--precision auto`` on the demo with each of the two methods. It prints the
bytes of the weights, and the measured increase of the cross-entropy of masked tokens.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from shapes import ROOT, machine

from dlm_calibration import recipes
from dlm_calibration.states import State
from dlm_export import families
from dlm_export.building.writing import write_text
from dlm_export.judging.precision_search import sensitivity
from dlm_export.judging.precision_search.search import search as search_precision
from dlm_export.quantising import calibrate, samples
from dlm_export.sources import Source, open_source

sys.path.insert(0, str(ROOT / "tests"))
from checkpoints import dream_config, llada_config, write_checkpoint

FORMATS = ("int8-dynamic", "int4-g32-dynamic")
TOKENS = {"vocab_size": 1000, "mask_token_id": 990, "eos_token_id": 991, "pad_token_id": 991}
LLADA = {
    "d_model": 256,
    "n_layers": 4,
    "n_heads": 8,
    "n_kv_heads": 8,
    "mlp_hidden_size": 512,
    "embedding_size": 1000,
} | TOKENS
DREAM = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "intermediate_size": 512,
} | TOKENS


def sources(folder: Path) -> dict[str, Source]:
    """Return the denoisers on which the methods are compared."""
    return {
        "demo": open_source(ROOT / "examples" / "demo-denoiser"),
        "random LLaDA": open_source(
            write_checkpoint(folder / "llada", llada_config(**LLADA), seed=3)
        ),
        "random Dream": open_source(
            write_checkpoint(folder / "dream", dream_config(**DREAM), seed=4)
        ),
    }


def make_states(source: Source, folder: Path, count: int) -> tuple[samples.Data, list[State]]:
    """Return the calibration data, and the states of ``count`` samples."""
    options = samples.CalibrationOptions(samples=count, states_per_sample=8)
    data = samples.load_data(
        source.network, source.path, write_text(source.text, folder).tokenizer, options
    )
    layered = families.layered(source.parameters, source.network)
    _, policy = samples.threshold_preset(source.network, source.presets, options.preset)
    runs = samples.trajectories(layered, policy, None, lambda: None)
    return data, list(samples.calibration_states(source, data, options, runs))


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Return Spearman's rank correlation of two arrays ``[layers]`` of losses."""
    return float(np.corrcoef(a.argsort().argsort(), b.argsort().argsort())[0, 1])


def compare(source: Source, states: list[State], recipe: recipes.Recipe) -> dict[str, Any]:
    """Measure one recipe on one denoiser with both methods."""
    formats = recipe.formats(list(source.network.quantisable()))
    done = calibrate.calibrate(
        source.parameters, source.network, recipe, formats, states, lambda: None
    )
    found, seconds = {}, {}
    for exact in (False, True):
        began = time.perf_counter()
        (losses,) = sensitivity.losses(
            done.parameters, source.network, [done], states, lambda: None, exact=exact
        )
        seconds[sensitivity.method(exact=exact)] = time.perf_counter() - began
        found[exact] = np.array(
            [losses[layer] for layer, name in formats.items() if name != recipes.HIGH]
        )
    row: dict[str, Any] = {"recipe": recipe.name, "layers": len(found[True]), "seconds": seconds}
    for number, name in enumerate(("kl", "frontier_kl")):
        estimate, exactly = found[False][:, number], found[True][:, number]
        quantiles = np.quantile(estimate / exactly, (0.1, 0.5, 0.9)).tolist()
        row[name] = {
            "spearman": spearman(estimate, exactly),
            "ratio": quantiles,
            "sum_ratio": estimate.sum() / exactly.sum(),
        }
    return row


def search(
    source: Source,
    data: samples.Data,
    states: list[State],
    budget: float,
    judged: int,
    *,
    exact: bool,
) -> dict[str, Any]:
    """Run ``--precision auto`` with a budget."""
    preset, policy = samples.threshold_preset(source.network, source.presets, None)
    began = time.perf_counter()
    chosen = data.calibration[:judged]
    found = search_precision(
        source, states, chosen, FORMATS, policy, budget, 0, lambda: None, exact=exact
    )
    (point,) = [point for point in found.curve if point.chosen]
    seconds = time.perf_counter() - began
    return {
        "budget": budget,
        "method": sensitivity.method(exact=exact),
        "seconds": seconds,
        "preset": preset,
        **point.as_dict(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipes", default="int8,int4,nvfp4,mixed,fp8")
    parser.add_argument("--budgets", default="0.01,0.05")
    parser.add_argument("--samples", type=int, default=32, help="Samples, with 8 states each.")
    parser.add_argument(
        "--judged", type=int, default=8, help="Samples on which a budget is measured."
    )
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows, budgets = [], []
    with tempfile.TemporaryDirectory() as folder:
        for name, source in sources(Path(folder)).items():
            text = Path(folder) / f"text of {name}"
            text.mkdir()
            data, states = make_states(source, text, arguments.samples)
            for recipe in arguments.recipes.split(","):
                row = {"denoiser": name} | compare(source, states, recipes.find(recipe))
                rows.append(row)
                seconds = row["seconds"]
                told = "  ".join(
                    f"{key} {row[key]['spearman']:.3f} ({', '.join(f'{r:.2f}' for r in row[key]['ratio'])})"
                    for key in ("kl", "frontier_kl")
                )
                print(
                    f"{name:13} {recipe:6} {told}  {seconds['fisher']:.2f} s, exact {seconds['exact']:.2f} s",
                    flush=True,
                )
            if name == "demo":
                for budget in map(float, filter(None, arguments.budgets.split(","))):
                    for exact in (False, True):
                        one = search(source, data, states, budget, arguments.judged, exact=exact)
                        budgets.append(one)
                        print(
                            f"auto {budget:.1%} {one['method']:6} {one['weight_bytes']:,} bytes, ce {one['ce_increase']:+.2%}, "
                            f"{one['formats']}, {one['seconds']:.1f} s",
                            flush=True,
                        )
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"machine": machine(), "rows": rows, "auto": budgets}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
