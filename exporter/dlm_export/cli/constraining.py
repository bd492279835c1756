"""Declares the options that constrain generated text, and defines the command ``compile``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from dlm_export.cli.conversing import take_tools, tools_group
from dlm_export.cli.options import (
    CHECKPOINT,
    LAYOUTS,
    choice,
    command,
    file,
    flag,
    force_option,
    group,
    json_option,
    number,
    option,
    options,
    output_option,
    text,
)
from dlm_export.cli.printing import format_bytes, print_json
from dlm_export.cli.values import read_json_file, read_text_file
from dlm_runtime.generation.request import JSON_KINDS, KINDS

_KINDS = {name: f"--{name.replace('_', '-')}" for name in KINDS}
_OF_JSON = {*JSON_KINDS} - {"tools"}
constrain_from_option = number(
    "--constrain-from", "With --infill: constrain the text from this character on.", 0
)


def kind_group(*more: Any) -> Any:
    """Declare the options that constrain generated text, followed by the options in ``more``."""
    return group(
        "Constrained text",
        file("--schema", "Write JSON that matches this JSON Schema."),
        text("--regex", "Write text that matches this regex, in Rust's syntax.", "TEXT"),
        file("--grammar", "Write text that matches this grammar, in llama.cpp's GBNF."),
        option(
            "--enum",
            multiple=True,
            metavar="TEXT",
            help="Write this text; if repeated, one of the given texts.",
        ),
        flag("--json-object", help="Write any JSON object."),
        file("--json-lines", "Write JSON Lines; each line matches this JSON Schema."),
        file("--csv", "Write CSV with a header; this JSON Schema describes a row."),
        file("--xml", "Write an XML element that this JSON Schema describes."),
        number("--max-depth", "Largest nesting depth of recursive schemas or free JSON.", 0, 64),
        flag("--any-order", help="Write properties of small JSON objects in any order."),
        flag("--more-properties", help="Also write properties that the schema does not name."),
        choice(
            "--json-layout",
            LAYOUTS,
            "compact, spaced, indented, lines.  [default: the bundle's]",
        ),
        *more,
    )


def take_constraint(
    values: dict[str, Any], is_infill: bool = False, has_tools: bool = False
) -> dict[str, Any]:
    """Remove the constraint options from a command's values, and return them as request options.

    The result is empty if the user gave no constraint. If ``is_infill`` is true, the result may
    contain ``constrain_from``, an argument of ``Bundle.infill``. If ``has_tools`` is true, the user
    may give options such as ``--max-depth`` without a constraint.
    """
    first = values.pop("constrain_from")
    given = _take_kind(values, has_tools)
    if first is not None:
        if not (is_infill and given):
            raise click.UsageError(
                f"--constrain-from needs --infill, and one of {', '.join(_KINDS.values())}"
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
            needed = [option for kind, option in _KINDS.items() if kind in kinds]
            raise click.UsageError(
                f"--{name.replace('_', '-')} needs {', '.join(needed)} or --tools"
            )
    for name in given.keys() & {"schema", "json_lines", "csv", "xml"}:
        given[name] = read_json_file(given[name])
    if "grammar" in given:
        given["grammar"] = read_text_file(given["grammar"])
    return given | others


@command("compile")
@click.argument("bundle", type=CHECKPOINT)
@options(
    group("Common options", output_option("File to write."), force_option, json_option),
    kind_group(),
    tools_group("required"),
    group(
        "Surrounding text",
        text("--before", "End of the prompt that the constraint includes.", "TEXT", default=""),
        text("--behind", "Following text that the constraint includes.", "TEXT", default=""),
    ),
)
def compile_constraint(
    bundle: Path, output: Path, before: str, behind: str, force: bool, as_json: bool, **values: Any
) -> None:
    """Compile a constraint for BUNDLE into a file for C programs.

    Give exactly one constraint, such as --schema, --regex, --grammar or --tools. The file is valid
    for BUNDLE's vocabulary only. C programs load the file with dlm_automaton_compile.

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
            "--tool-choice, --parallel-tool-calls and --call-format need --tools"
        )
    with (
        claimed_file(output, force=force) as new,
        dlm_runtime.open(bundle, engine="none", check_hashes=False) as opened,
    ):
        if tools:
            wanted["tools"] = opened.tools(**tools)
            if not wanted["tools"].is_forced:
                raise click.UsageError(
                    "--tool-choice must be required or a function's name: other choices allow any text"
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
