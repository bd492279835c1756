"""A demo's held-out commands, free and constrained to the union of its calls' schemas: valid, exact, and passes.

python examples/demo/constrained.py build/demo
python examples/demo/constrained.py build/several --data examples/demo/heldout-several.jsonl --new-tokens 192

The second demo writes a call a line. JSON of a schema is compact, so a list of calls is constrained by an expression: that of
the calls' schema, repeated, with the line breaks between.
"""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import click
from evaluate import same_call

import dlm_runtime
from dlm_runtime import Bundle
from dlm_runtime.constraints import expressions
from dlm_runtime.constraints import schema as schemas
from dlm_runtime.constraints.compiled import Constraint

HELD_OUT = Path(__file__).with_name("heldout.jsonl")
LOOPS: dict[str, dict[str, Any]] = {
    "fast-dllm": {"preset": "fast-dllm"},
    "llada, 8 passes planned": {"preset": "llada", "steps": 8},
    "sdar": {"preset": "sdar"},
    "sdar, threshold 0.99": {"preset": "sdar", "threshold": 0.99},
}


def commands(data: Path) -> list[tuple[str, str]]:
    """The held-out prompts and their answers: a call, or a list of calls."""
    rows = map(json.loads, data.read_text(encoding="utf-8").splitlines())
    return [(row["prompt"], row["completion"]) for row in rows]


def answer_schema(answers: Sequence[Any]) -> dict[str, Any]:
    """A JSON Schema of answers such as these."""
    if not isinstance(answers[0], list):
        return call_schema(answers)
    calls = call_schema([call for answer in answers for call in answer])
    return {"type": "array", "items": calls, "minItems": 1}


def answer_constraint(bundle: Bundle, schema: dict[str, Any]) -> Constraint:
    """The answers of a schema, as the demo writes them: lists with a call a line."""
    if "items" not in schema:
        return bundle.constraint(schema=schema)
    call = expressions.spelled_out(schemas.expression(schema["items"]))
    return bundle.constraint(regex=rf"\[\n(?:{call})(?:,\n(?:{call}))*\n\]")


def call_schema(calls: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A JSON Schema of calls: those of each name have the arguments that its examples have, in their order."""
    by_name = defaultdict[str, list[dict[str, Any]]](list)
    for call in calls:
        by_name[call["name"]].append(call["arguments"])
    return {"oneOf": [_branch(name, by_name[name]) for name in sorted(by_name)]}


def _branch(name: str, examples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    # No call need have all of its arguments.
    sorter = TopologicalSorter[str]()
    for arguments in examples:
        for argument in arguments:
            sorter.add(argument)
        for before, behind in itertools.pairwise(arguments):
            sorter.add(behind, before)
    order = list(sorter.static_order())
    values = {argument: [each[argument] for each in examples if argument in each] for argument in order}
    arguments = {
        "type": "object",
        "properties": {argument: _type(found) for argument, found in values.items()},
        "required": [argument for argument in order if len(values[argument]) == len(examples)],
        "additionalProperties": False,
    }
    properties = {"name": {"const": name}, "arguments": arguments}
    return {"type": "object", "properties": properties, "required": ["name", "arguments"], "additionalProperties": False}


def _type(values: Sequence[Any]) -> dict[str, Any]:
    if isinstance(values[0], list):
        return {"type": "array", "items": _type([item for value in values for item in value])}
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string"}
    found = {kinds[type(value)] for value in values}
    return {"type": "number" if found == {"integer", "number"} else sorted(found)[0]}


@click.command()
@click.argument("bundle", type=click.Path(exists=True, path_type=Path))
@click.option("--data", type=click.Path(exists=True, path_type=Path), default=HELD_OUT, help="Held-out commands.")
@click.option("--count", type=click.IntRange(1), help="So many of them.  [default: all]")
@click.option("--new-tokens", type=click.IntRange(1), default=64, show_default=True)
def main(bundle: Path, data: Path, count: int | None, new_tokens: int) -> None:
    """Compare free and constrained runs of held-out commands."""
    pairs = commands(data)
    schema = answer_schema([json.loads(answer) for _, answer in pairs])
    with dlm_runtime.open(bundle) as opened:
        for line in compare(opened, pairs[:count], schema, new_tokens):
            click.echo(line)


def compare(bundle: Bundle, pairs: Sequence[tuple[str, str]], schema: dict[str, Any], new_tokens: int) -> Iterator[str]:
    """What each loop of the bundle makes of the commands, a line each."""
    from jsonschema import Draft202012Validator
    from referencing import Registry

    # A registry that retrieves nothing: by default, jsonschema opens the URLs that a schema refers to.
    validator, constraint = Draft202012Validator(schema, registry=Registry()), answer_constraint(bundle, schema)
    for name, loop in LOOPS.items():
        if loop["preset"] not in bundle.manifest["loop"]["presets"]:
            continue
        for given in (None, constraint):
            valid = exact = passes = 0
            for prompt, answer in pairs:
                out = bundle.generate(prompt=prompt, max_new_tokens=new_tokens, constraint=given, **loop)
                passes += out.nfe
                exact += same_call(out.text, answer)
                valid += _is_valid(validator, out.text or "")
            kind = "free" if given is None else "constrained"
            yield f"{name}, {kind}: {valid} valid, {exact} exact of {len(pairs)}, NFE {passes / len(pairs):.3f}"


def _is_valid(validator: Any, text: str) -> bool:
    try:
        return bool(validator.is_valid(json.loads(text)))
    except json.JSONDecodeError:
        return False


if __name__ == "__main__":
    main()
