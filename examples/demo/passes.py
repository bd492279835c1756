"""Measure how many sudoku grids the third demo completes correctly, with few and with many passes.

    python examples/demo/passes.py build/sudoku

The script prints one line per decoding loop: the share of right grids, its 95% interval, and the
mean number of passes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from sudoku import is_right

import dlm_runtime
from dlm_export.judging.tuning.effort_levels import LEVELS
from dlm_runtime import Bundle

HELD_OUT = Path(__file__).with_name("heldout-sudoku.jsonl")
STEPS = (1, 2, 3, 4, 6, 8, 12, 20)
THRESHOLDS = (0.3, 0.5, 0.7, 0.9, 0.99)
NORMAL = 1.96
"""Half the width of a 95% interval of the normal distribution, in standard deviations."""


def measure(bundle: Bundle, prompts: Sequence[str], **loop: Any) -> tuple[int, float]:
    """Return the number of right grids, and the mean number of passes."""
    results = [(prompt, bundle.generate(prompt=prompt, **loop)) for prompt in prompts]
    right = sum(is_right(prompt, out.text) for prompt, out in results)
    return right, sum(out.nfe for _, out in results) / len(prompts)


def interval(right: int, count: int) -> tuple[float, float]:
    """Return the 95% interval of a share (Wilson, 1927)."""
    share, spread = right / count, NORMAL**2 / count
    middle = share + spread / 2
    half = NORMAL * math.sqrt(share * (1 - share) / count + spread / (4 * count))
    return (middle - half) / (1 + spread), (middle + half) / (1 + spread)


def loops(bundle: Bundle) -> dict[str, dict[str, Any]]:
    """Return the decoding loops to measure. The keys are the names that are printed."""
    named = {
        f"--preset llada --steps {steps}": {"preset": "llada", "steps": steps} for steps in STEPS
    }
    named |= {
        f"--preset fast-dllm --threshold {each}": {"preset": "fast-dllm", "threshold": each}
        for each in THRESHOLDS
    }
    if "effort" in bundle.manifest["loop"]:
        named |= {f"--effort {level}": {"effort": level} for level in LEVELS}
    return named | {"the default loop": {}}


@click.command()
@click.argument("folder", metavar="BUNDLE", type=click.Path(exists=True, path_type=Path))
@click.option(
    "--data",
    type=click.Path(exists=True, path_type=Path),
    default=HELD_OUT,
    help="Held-out puzzles.",
)
def main(folder: Path, data: Path) -> None:
    """Measure right grids and passes with each decoding loop of BUNDLE."""
    prompts = [json.loads(line)["prompt"] for line in data.read_text().splitlines()]
    with dlm_runtime.open(folder) as bundle:
        for name, loop in loops(bundle).items():
            right, passes = measure(bundle, prompts, **loop)
            low, high = interval(right, len(prompts))
            click.echo(
                f"{name:36} {right:4d} of {len(prompts)}  {right / len(prompts):6.1%}"
                f"  ({low:.1%} to {high:.1%})  {passes:5.2f} passes"
            )


if __name__ == "__main__":
    main()
