"""Defines the command ``doctor``, which checks this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from dlm_export.cli.options import CHECKPOINT, command, group, json_option, text
from dlm_export.cli.printing import one_line, print_json, print_table
from dlm_export.cli.values import split

if TYPE_CHECKING:
    from dlm_export.doctor.findings import Report


@command()
@click.argument("bundle", type=CHECKPOINT, required=False)
@group(
    "Options",
    text("--target", "Also check for these devices, separated by commas.", "LIST"),
    json_option,
)
@click.pass_context
def doctor(context: click.Context, bundle: Path | None, target: str | None, as_json: bool) -> None:
    """Check this machine, and print what is missing. The command does not change the machine.

    If you give BUNDLE, check whether BUNDLE can run on this machine. If you give --target, check
    whether bundles for the target can run on this machine. If such a check fails, or if dlm-export
    itself cannot run, the exit code is 1.

    Example: dlm-export doctor build/demo --target cpu
    """
    from dlm_export.doctor import report
    from dlm_export.doctor.system import System
    from dlm_export.targets import find

    targets = [find(name) for name in split(target or "")]
    made = report.examine(System(), bundle, targets)
    if as_json:
        print_json(made.as_dict())
    else:
        print_report(made)
    if not made.works:
        context.exit(1)


def print_report(report: Report) -> None:
    """Print a table of all findings. Then print remedies, starting with required parts."""
    rows = [[each.state, each.part, each.name, each.said] for each in report.findings]
    print_table("", ["state", "of", "what", "found"], rows)
    for title, is_missing in (("What to do:", True), ("Optional:", False)):
        told = [
            each
            for each in report.findings
            if each.remedy and (each.state == "missing") == is_missing
        ]
        if told:
            click.echo(title)
        for each in told:
            click.echo(f"  {one_line(f'{each.part}, {each.name}: {each.remedy}')}")
