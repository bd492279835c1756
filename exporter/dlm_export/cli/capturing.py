"""Keeping what the released code computes: ``capture``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from dlm_export.cli.options import (
    CHECKPOINT,
    OUTPUT,
    SOURCE_OPTIONS,
    json_option,
    options,
    prompts_option,
)
from dlm_export.cli.printing import Bars, format_bytes, print_json
from dlm_export.cli.values import overrides, taken


@click.command()
@click.argument("checkpoint", type=CHECKPOINT)
@click.option(
    "-o", "--output", required=True, type=OUTPUT, help="File to write; its name ends in .npz."
)
@click.option(
    "--trust-remote-code", is_flag=True, help="Run the Python files that came with the checkpoint."
)
@click.option(
    "--trunk",
    is_flag=True,
    help="Run transformers' class of the same layers instead, under a mask.",
)
@prompts_option
@click.option("--count", type=click.IntRange(1, 100), default=4, help="Prompts at each mask ratio.")
@click.option("--seed", type=click.IntRange(0), default=0, help="Of prompts, masks and rows.")
@click.option("--force", is_flag=True, help="Replace the file that is there.")
@options(SOURCE_OPTIONS)
@json_option
def capture(checkpoint: Path, output: Path, force: bool, as_json: bool, **values: Any) -> None:
    """Keep the logits of a checkpoint's released code, for `dlm-export verify BUNDLE --golden
    FILE`.

    Runs the class that the checkpoint brings along, or transformers' class of its architecture, in
    fp32 on the CPU. Needs transformers in the version that the released code asks for, and no onnx.

    Example: dlm-export capture Dream-v0-Instruct-7B -o dream.npz --trust-remote-code
    """
    from dlm_export.judging.parity import golden
    from dlm_export.outputs import check_outside

    check_outside(output, checkpoint)
    with golden.claimed(output, force=force) as new, Bars() as bars:
        from dlm_export.judging.parity.capture import CaptureOptions
        from dlm_export.judging.parity.capture import capture as run

        found = run(checkpoint, taken(CaptureOptions, values), overrides(values), bars)
        golden.save(new, found)
    size = output.stat().st_size
    if as_json:
        told = {"file": str(output), "bytes": size, "canvases": len(found.canvases)}
        print_json(told | {"rows": found.rows, "golden": found.provenance.as_dict()})
        return
    click.echo(
        f"{output} {format_bytes(size)}: {found.rows} rows on {len(found.canvases)} canvases"
    )
    click.echo(f"Captured {found.provenance.reference}; attention: {found.provenance.attention}")
