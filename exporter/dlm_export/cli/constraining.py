"""Options that say what a generated text may be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dlm_export.cli.options import FILE

if TYPE_CHECKING:
    from dlm_runtime import Bundle

SCHEMA_LIMIT_BYTES = 4 << 20
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
    )
    for option in reversed(options):
        command = option(command)
    return command


def take_constraint(values: dict[str, Any]) -> dict[str, Any]:
    """Takes the options out of a command's values: what ``Bundle.constraint`` is given, empty where none was."""
    from dlm_runtime.errors import RequestError
    from dlm_runtime.files import parse_json, read_text

    given = {name: value for name in _KINDS if (value := values.pop(name)) not in (None, (), False)}
    max_depth = values.pop("max_depth")
    if len(given) > 1:
        raise click.UsageError(f"give one of {', '.join(_KINDS[name] for name in given)}")
    if max_depth is not None and not given.keys() & {"schema", "json_object"}:
        raise click.UsageError("--max-depth is of --schema and --json-object")
    if "schema" in given:
        path: Path = given["schema"]
        try:
            given["schema"] = parse_json(read_text(path, SCHEMA_LIMIT_BYTES, RequestError))
        except ValueError as err:
            raise err if isinstance(err, RequestError) else RequestError(f"{path}: not readable as JSON ({err})") from err
    return given | ({} if max_depth is None else {"max_depth": max_depth})


def add_constraint(bundle: Bundle, request: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Compiles what ``take_constraint`` found into a request."""
    if wanted:
        request["constraint"] = bundle.constraint(**wanted)
