"""Options that say what a generated text may be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from dlm_export.cli.options import FILE, read_json_file

_KINDS = {"schema": "--schema", "regex": "--regex", "enum": "--enum", "json_object": "--json-object"}


def constraint_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """A constraint, of one kind, for commands that generate."""
    options = (
        click.option("--schema", type=FILE, metavar="FILE", help="Write JSON that is valid by this JSON Schema."),
        click.option("--regex", help="Write text that matches as a whole, in the syntax of Rust's regex crate."),
        click.option("--enum", multiple=True, metavar="TEXT", help="Write one of these; repeatable."),
        click.option("--json-object", is_flag=True, help="Write a JSON object."),
        click.option(
            "--max-depth",
            type=click.IntRange(0, 64),
            help="How often a schema may lie within itself; of --json-object, its depth.",
        ),
        click.option(
            "--json-layout",
            type=click.Choice(["compact", "spaced", "indented", "lines"]),
            help="White space of the JSON of --schema and --json-object.  [default: the bundle's]",
        ),
        click.option(
            "--constrain-from",
            type=click.IntRange(0),
            metavar="CHARACTERS",
            help="With --infill: the constraint is of the text behind so many characters of it, not of its hole alone.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def take_constraint(values: dict[str, Any], is_infill: bool = False) -> dict[str, Any]:
    """Takes the options out of a command's values: what ``Bundle.constraint`` is given, empty where none was.

    Beside it ``constrain_from``, which ``Bundle.infill`` takes, where it was given.
    """
    given = {name: value for name in _KINDS if (value := values.pop(name)) not in (None, (), False)}
    max_depth, first, layout = (values.pop(name) for name in ("max_depth", "constrain_from", "json_layout"))
    if first is not None and not (is_infill and given):
        raise click.UsageError(f"--constrain-from is of --infill, with one of {', '.join(_KINDS.values())}")
    if len(given) > 1:
        raise click.UsageError(f"give one of {', '.join(_KINDS[name] for name in given)}")
    if max_depth is not None and not given.keys() & {"schema", "json_object"}:
        raise click.UsageError("--max-depth is of --schema and --json-object")
    if layout is not None and not given.keys() & {"schema", "json_object"}:
        raise click.UsageError("--json-layout is of --schema and --json-object")
    if "schema" in given:
        given["schema"] = read_json_file(given["schema"])
    beside = {"max_depth": max_depth, "constrain_from": first, "json_layout": layout}
    return given | {name: value for name, value in beside.items() if value is not None}
