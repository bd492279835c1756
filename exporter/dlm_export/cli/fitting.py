"""Defines the command ``effort``, which fits a bundle's effort levels and default loop."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from dlm_export.cli.options import (
    CHECKPOINT,
    choice,
    command,
    cpu_opening_group,
    file,
    group,
    json_option,
    number,
    options,
    text,
)
from dlm_export.cli.printing import Bars, default_words, print_effort, print_json, print_table, warn
from dlm_export.cli.values import opening


@command()
@click.argument("bundle", type=CHECKPOINT)
@options(
    group(
        "Common options",
        file("--data", "JSONL or text file to fit on, best with answers.  [default: built in]"),
        number("--samples", "Most prompts to use.", most=100000, default=64),
        choice(
            "--by",
            ["passes", "time"],
            "Choose the default loop by passes or time.",
            default="passes",
        ),
        text("--preset", "Preset to vary.  [default: the adaptive preset]"),
        json_option,
    ),
    cpu_opening_group,
)
def effort(
    bundle: Path,
    data: Path | None,
    samples: int,
    by: str,
    preset: str | None,
    as_json: bool,
    **values: Any,
) -> None:
    """Fit BUNDLE's effort levels and default loop to data.

    The command stores the levels and the default decoding loop in BUNDLE. The levels are called
    instant, low, medium and high. Each level is a variant of one preset that commits tokens earlier
    or later. The default loop is a variant, too: the variant that needs the fewest passes, among
    the variants whose quality is as good as with one committed token per pass. With --by time, it is
    the one that is fastest on this machine.

    A preset that verifies drafts has no levels, because its text does not depend on its passes. The
    command then stores the block length that is fastest on this machine, measured on 8 samples.

    Example: dlm-export effort build/demo --data examples/demo-denoiser/calibration.jsonl
    """
    from dlm_export.bundle.manifest import read_manifest
    from dlm_export.judging.tuning.block_length import BlockTimes, threads_words
    from dlm_export.judging.tuning.fit_bundle import EffortOptions, fit_bundle
    from dlm_export.quantising.samples import CalibrationOptions

    options = EffortOptions(
        CalibrationOptions(data=data, preset=preset), samples, opening(values), by
    )
    with Bars() as bars:
        found = fit_bundle(bundle, options, bars, warn)
    if as_json:
        print_json(asdict(found))
    elif isinstance(found, BlockTimes):
        rows = [
            [str(each.block_length), f"{each.ms:.2f}", f"{each.tokens_per_pass:.2f}"]
            for each in found.times
        ]
        title = (
            f"Blocks of {found.preset}, on {found.samples} samples, {threads_words(found.threads)}"
        )
        print_table(title, ["block_length", "ms per token", "tokens per pass"], rows)
        click.echo(f"default block_length: {found.chosen.block_length}")
    else:
        print_effort(asdict(found))
        click.echo(default_words(read_manifest(bundle)))
