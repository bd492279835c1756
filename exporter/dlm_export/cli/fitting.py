"""Fitting a bundle that stands to data: ``effort``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from dlm_export.cli.options import CHECKPOINT, CPU_OPENING_OPTIONS, FILE, json_option, options
from dlm_export.cli.printing import Bars, print_effort, print_json, warn
from dlm_export.cli.values import opening


@click.command()
@click.argument("bundle", type=CHECKPOINT)
@click.option(
    "--data", type=FILE, help="JSONL or text to fit on, best with answers.  [default: built in]"
)
@click.option(
    "--samples", type=click.IntRange(1, 100000), default=64, help="Prompts that every loop writes."
)
@click.option("--preset", help="Loop that is varied.  [default: fast-dllm, dream-block or sdar]")
@options(CPU_OPENING_OPTIONS)
@json_option
def effort(
    bundle: Path, data: Path | None, samples: int, preset: str | None, as_json: bool, **values: Any
) -> None:
    """Fit effort levels (instant, low, medium, high) of BUNDLE on data, and write them into it.

    Loops of the preset that commit sooner or later all run on the data: each is a quality for a
    number of passes.

    Example: dlm-export effort build/demo --data examples/demo-denoiser/calibration.jsonl
    """
    from dlm_export.judging.tuning.fit_bundle import EffortOptions, fit_bundle
    from dlm_export.quantising.samples import CalibrationOptions

    options = EffortOptions(CalibrationOptions(data=data, preset=preset), samples, opening(values))
    with Bars() as bars:
        levels = fit_bundle(bundle, options, bars, warn)
    if as_json:
        print_json(levels.as_dict())
    else:
        print_effort(levels.as_dict())
