"""Defines the command ``demo``, which runs a small bundle that belongs to this package."""

from __future__ import annotations

import shutil
import statistics
from pathlib import Path

import click

from dlm_export.cli.options import CHECKPOINT, OUTPUT, command, folder, group, options
from dlm_export.outputs import claimed

BUNDLE = Path(__file__).parent.parent / "demo"
"""The first demo in INT4, which maps commands to function calls. These commands make it again:

    dlm-export build examples/demo-denoiser --target cpu --precision int4 --judge none --force \\
      --calib examples/demo-denoiser/calibration.jsonl -o exporter/dlm_export/demo
    dlm-export effort exporter/dlm_export/demo --samples 256 \\
      --data examples/demo-denoiser/calibration.jsonl
"""
PROMPTS = (
    "remind me to call the garage at seven tomorrow",
    "could you turn the bedroom lights to forty percent please",
    "add oat milk, batteries and stamps to the shopping list",
    "take me to the harbour with a stop at the pharmacy",
    "set the seat heating for the driver to level two",
    "move forward three metres slowly",
)


@command()
@click.argument("prompts", metavar="[PROMPT]...", nargs=-1)
@options(
    group(
        "Options",
        folder("--bundle", "Run this bundle.  [default: a small one of this package]", CHECKPOINT),
        folder("--copy", "Copy the bundle to this new folder, and run nothing.", OUTPUT),
    )
)
def demo(prompts: tuple[str, ...], bundle: Path | None, copy: Path | None) -> None:
    """Generate function calls with a small bundle, from PROMPTs or examples.

    The denoiser knows commands such as "play jazz in the kitchen". It answers with a function call.

    \b
    Examples:
      dlm-export demo
      dlm-export demo "play jazz in the kitchen" "turn on the kitchen lights"
      dlm-export demo --copy demo && dlm-export serve demo
    """
    import dlm_runtime

    path = bundle or BUNDLE
    if copy is not None:
        with claimed(copy, force=False, kept_because=lambda _: "exists") as new:
            shutil.copytree(path, new)
        click.echo(f"Copied the bundle to {copy}. Try:")
        click.echo(f'  dlm-export run {copy} --prompt "{PROMPTS[0]}" --watch')
        click.echo(f"  dlm-export serve {copy}")
        return
    with dlm_runtime.open(path) as opened:
        network = opened.manifest["network"]
        click.echo(f"{network['family']}, {network['parameters']:,} parameters, {opened.engine}\n")
        times = []
        for prompt in prompts or PROMPTS:
            made = opened.generate(prompt=prompt)
            times.append(made.timings["total"] * 1e3)
            passes = f"{made.nfe} pass" if made.nfe == 1 else f"{made.nfe} passes"
            click.echo(f"  {prompt}\n    {made.text}   [{passes}, {times[-1]:.0f} ms]")
    click.echo(f"\nMedian {statistics.median(times):.0f} ms per command.")
    if bundle is None:
        click.echo("To use this bundle with other commands: dlm-export demo --copy FOLDER")
