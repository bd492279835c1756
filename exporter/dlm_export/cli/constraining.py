"""Constraints: the options of commands that generate, and ``compile``, which writes a constraint to
a file.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from dlm_export.cli.conversing import take_tools, tool_options
from dlm_export.cli.options import CHECKPOINT, FILE, OUTPUT, json_option, options
from dlm_export.cli.printing import format_bytes, print_json
from dlm_export.cli.values import read_json_file, read_text_file

_KINDS = {
    "schema": "--schema",
    "regex": "--regex",
    "grammar": "--grammar",
    "enum": "--enum",
    "json_object": "--json-object",
    "json_lines": "--json-lines",
    "csv": "--csv",
    "xml": "--xml",
}
_OF_JSON = {"schema", "json_object", "json_lines"}
_KIND_OPTIONS = (
    click.option(
        "--schema", type=FILE, metavar="FILE", help="Write JSON that is valid by this JSON Schema."
    ),
    click.option(
        "--regex", help="Write text that matches as a whole, in the syntax of Rust's regex crate."
    ),
    click.option(
        "--grammar",
        type=FILE,
        metavar="FILE",
        help="Write text of this grammar, in GBNF, the notation of llama.cpp.",
    ),
    click.option("--enum", multiple=True, metavar="TEXT", help="Write one of these; repeatable."),
    click.option("--json-object", is_flag=True, help="Write a JSON object."),
    click.option(
        "--json-lines",
        type=FILE,
        metavar="FILE",
        help="Write JSON Lines; each line is valid by this JSON Schema.",
    ),
    click.option(
        "--csv",
        type=FILE,
        metavar="FILE",
        help="Write CSV with a header; each row is valid by this JSON Schema.",
    ),
    click.option(
        "--xml", type=FILE, metavar="FILE", help="Write the XML element of this JSON Schema."
    ),
    click.option(
        "--max-depth",
        type=click.IntRange(0, 64),
        help="How many levels a recursive schema or grammar, or a JSON object of --json-object, may nest.",
    ),
    click.option(
        "--any-order",
        is_flag=True,
        help="Write the properties of JSON objects with up to 6 of them in any order.",
    ),
    click.option(
        "--more-properties",
        is_flag=True,
        help="Write properties that the schema allows but does not name, too.",
    ),
    click.option(
        "--json-layout",
        type=click.Choice(["compact", "spaced", "indented", "lines"]),
        help="White space of the JSON of --schema, --json-object and --json-lines.  [default: the bundle's]",
    ),
)
_CONSTRAIN_FROM = click.option(
    "--constrain-from",
    type=click.IntRange(0),
    metavar="CHARACTERS",
    help="With --infill: constrain the whole text after this many characters, instead of the hole alone.",
)


def constraint_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of a constraint to a command that generates."""
    return options((*_KIND_OPTIONS, _CONSTRAIN_FROM))(command)


def take_constraint(values: dict[str, Any], is_infill: bool = False) -> dict[str, Any]:
    """Remove the options of a constraint from a command's values, and return the arguments for
    ``Bundle.constraint``.

    The result is empty if no constraint was given. It also holds ``constrain_from``, an argument of
    ``Bundle.infill``.
    """
    first = values.pop("constrain_from")
    given = _take_kind(values)
    if first is not None:
        if not (is_infill and given):
            raise click.UsageError(
                f"--constrain-from is of --infill, with one of {', '.join(_KINDS.values())}"
            )
        given["constrain_from"] = first
    return given


def _take_kind(values: dict[str, Any], has_tools: bool = False) -> dict[str, Any]:
    given = {name: value for name in _KINDS if (value := values.pop(name)) not in (None, (), False)}
    if len(given) > 1:
        raise click.UsageError(f"give one of {', '.join(_KINDS[name] for name in given)}")
    names = ("max_depth", "json_layout", "any_order", "more_properties")
    others = {name: value for name in names if (value := values.pop(name)) not in (None, False)}
    for name in others:
        kinds = _OF_JSON | ({"grammar", "xml"} if name == "max_depth" else set())
        if not (has_tools or given.keys() & kinds):
            options = [option for kind, option in _KINDS.items() if kind in kinds]
            raise click.UsageError(f"--{name.replace('_', '-')} is of {', '.join(options)}")
    for name in given.keys() & {"schema", "json_lines", "csv", "xml"}:
        given[name] = read_json_file(given[name])
    if "grammar" in given:
        given["grammar"] = read_text_file(given["grammar"])
    return given | others


@click.command("compile")
@click.argument("bundle", type=CHECKPOINT)
@click.option("-o", "--output", required=True, type=OUTPUT, help="File to write.")
@options(_KIND_OPTIONS)
@tool_options("required")
@click.option(
    "--before",
    default="",
    metavar="TEXT",
    help="Text that the prompt ends with, and that counts as the beginning.",
)
@click.option(
    "--behind", default="", metavar="TEXT", help="Text that follows, and that counts as the end."
)
@click.option("--force", is_flag=True, help="Replace the file that is there.")
@json_option
def compile_constraint(
    bundle: Path, output: Path, before: str, behind: str, force: bool, as_json: bool, **values: Any
) -> None:
    """Compile a constraint for a bundle's vocabulary to a file, which C programs read with
    dlm_automaton_compile.

    Give one of --schema, --regex, --grammar, --enum, --json-object, --json-lines, --csv, --xml and
    --tools. The bundle is not run.

    Example: dlm-export compile build/demo --schema call.schema.json -o call.automaton
    """
    import dlm_runtime
    from dlm_export.outputs import claimed_file

    tools = take_tools(values)
    wanted = _take_kind(values, has_tools="tools" in tools)
    if len(wanted.keys() & _KINDS.keys()) + ("tools" in tools) != 1:
        raise click.UsageError(f"give one of {', '.join((*_KINDS.values(), '--tools'))}")
    if tools and "tools" not in tools:
        raise click.UsageError(
            "--tool-choice, --parallel-tool-calls and --call-format are of --tools"
        )
    with (
        claimed_file(output, force=force) as new,
        dlm_runtime.open(bundle, engine="none", check_hashes=False) as opened,
    ):
        if tools:
            wanted["tools"] = opened.tools(**tools)
            if not wanted["tools"].is_forced:
                raise click.UsageError(
                    "--tool-choice is required or a function's name: with another one any text is allowed"
                )
        constraint = opened.constraint(before=before, behind=behind, **wanted)
        new.write_bytes(constraint.data)
    size = output.stat().st_size
    if as_json:
        print_json({"file": str(output), "bytes": size, "shortest_tokens": constraint.shortest})
    else:
        click.echo(
            f"{output} {format_bytes(size)}: the shortest text has {constraint.shortest} tokens"
        )
