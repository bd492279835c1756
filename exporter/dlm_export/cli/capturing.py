"""Defines the command ``capture``, which saves the logits of a checkpoint's released code."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from dlm_export.checkpoints.hub import HubName
from dlm_export.checkpoints.local import local
from dlm_export.cli.options import (
    SOURCE,
    command,
    flag,
    force_option,
    group,
    json_option,
    number,
    options,
    output_option,
    prompts_option,
    source_group,
)
from dlm_export.cli.printing import Bars, format_bytes, one_line, print_json
from dlm_export.cli.values import overrides, taken


@command()
@click.argument("checkpoint", type=SOURCE)
@options(
    group(
        "Common options",
        output_option("File to write; its name ends in .npz."),
        flag("--trust-remote-code", help="Run the Python files in the checkpoint's folder."),
        flag("--trunk", help="Run a transformers class with the same layers instead."),
        force_option,
        json_option,
    ),
    group(
        "Prompts",
        prompts_option,
        number("--count", "Prompts at each mask ratio.", most=100, default=4),
        number("--seed", "Seed of prompts, masks and rows.", 0, default=0),
    ),
    source_group,
)
def capture(
    checkpoint: Path | HubName, output: Path, force: bool, as_json: bool, **values: Any
) -> None:
    """Save the logits of CHECKPOINT's released code to a file.

    `dlm-export verify --golden` compares bundles with the saved file. CHECKPOINT is a folder, or
    hf:ORG/NAME[@REVISION]. The command does not download code from the hub. For a checkpoint from
    the hub, pass --trunk: the command then runs a class of transformers with the same layers. The
    code runs in fp32 on the CPU. Install the version of transformers that the code was written for.
    The command does not need onnx.

    Example: dlm-export capture Dream-v0-Instruct-7B -o dream.npz --trust-remote-code
    """
    with local(checkpoint) as found:
        _capture(found.path, output, force, as_json, values)


def _capture(
    checkpoint: Path, output: Path, force: bool, as_json: bool, values: dict[str, Any]
) -> None:
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
        print_json(told | {"rows": found.rows, "golden": asdict(found.provenance)})
        return
    click.echo(
        f"{output} {format_bytes(size)}: {found.rows} rows on {len(found.canvases)} canvases"
    )
    click.echo(
        one_line(f"Captured {found.provenance.reference}; attention: {found.provenance.attention}")
    )
