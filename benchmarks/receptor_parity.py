"""Compare the logits of SCEPTR's bundles with the logits of the package's own class.

    pip install --no-deps sceptr==1.2.0 libtcrlm==1.1.3 blosum tidytcells==2.2.1
    pip install pandas scipy
    python benchmarks/receptor_parity.py [--variants SCEPTR_left_aligned,...] [--inputs 20]

The inputs are random receptors in which 30% of the residues are masked. The package's class
computes each input in fp32 and in fp64. The table shows the largest difference between two results,
as a share of the range of the logits in fp64.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
from pathlib import Path

import numpy as np
import torch
from residues import BETA_LOOPS, RECEPTOR_RESIDUES, loop_index, package_folder, sceptr_checkpoint
from sceptr._model_saves import load_variant
from tables import table

import dlm_runtime
from dlm_export.build import BuildOptions, build

MASK, START, FIRST_RESIDUE = 1, 2, 3  # token IDs of the package


def loops_of(embedder: str, variant: str) -> dict[str, int]:
    """Return the loops that a variant reads, with common lengths."""
    if embedder.startswith("Cdr3"):
        return {"CDR3A": 14, "CDR3B": 15}
    if variant.startswith("A_"):  # this variant reads the alpha chain
        return {name.replace("B", "A"): length for name, length in BETA_LOOPS.items()}
    return BETA_LOOPS


def compare(variant: str, inputs: int, folder: Path) -> list[float]:
    """Return the three largest differences of a row of the table."""
    theirs = next(
        value
        for value in vars(load_variant(variant)).values()
        if isinstance(value, torch.nn.Module)
    ).eval()
    exact = copy.deepcopy(theirs).double()
    embedder = type(theirs._token_embedder).__name__
    loops = loops_of(embedder, variant)
    checkpoint = sceptr_checkpoint(package_folder("sceptr"), folder / variant, variant, loops)
    build(checkpoint, folder / f"{variant}-bundle", BuildOptions(check_parity=False))
    places = [
        (at + 1, length, loop_index(embedder, name))
        for name, length in loops.items()
        for at in range(length)
    ]
    draw, worst = torch.Generator().manual_seed(0), [0.0, 0.0, 0.0]
    residues = len(RECEPTOR_RESIDUES)
    with dlm_runtime.open(folder / f"{variant}-bundle", threads=1) as bundle, torch.no_grad():
        for _ in range(inputs):
            ids = torch.randint(
                FIRST_RESIDUE, FIRST_RESIDUE + residues, (len(places),), generator=draw
            )
            ids[torch.rand(len(places), generator=draw) < 0.3] = MASK
            tokens = [START, *ids.tolist()]
            where = [(0, 0, 0), *places]
            rows = torch.tensor([[(token, *at) for token, at in zip(tokens, where, strict=True)]])
            in_fp32 = theirs.get_mlm_token_predictions_for(rows)[0].double()
            in_fp64 = exact.get_mlm_token_predictions_for(rows)[0]
            ours = torch.from_numpy(np.asarray(bundle.logits(tokens)))[:, -residues:].double()
            span = float(in_fp64.max() - in_fp64.min())
            pairs = ((in_fp32, in_fp64), (ours, in_fp64), (ours, in_fp32))
            found = [float((a - b).abs().max()) / span for a, b in pairs]
            worst = [max(pair) for pair in zip(worst, found, strict=True)]
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--variants")
    parser.add_argument("--inputs", type=int, default=20)
    arguments = parser.parse_args()
    stored = package_folder("sceptr") / "_model_saves"
    variants = sorted(path.parent.name for path in stored.glob("*/config.json"))
    if arguments.variants:
        variants = arguments.variants.split(",")
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for variant in variants:
            found = compare(variant, arguments.inputs, Path(folder))
            rows.append([variant, *(f"{value:.1e}" for value in found)])
    head = ["variant", "package, fp32 and fp64", "ours and fp64", "ours and the package's fp32"]
    print(table(head, rows))


if __name__ == "__main__":
    main()
