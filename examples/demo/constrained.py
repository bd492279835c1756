"""The demo's held-out commands, free and constrained to the union of its calls' schemas: valid, exact, and passes.

python examples/demo/constrained.py build/demo
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from evaluate import same_call

import dlm_runtime

HELD_OUT = Path(__file__).with_name("heldout.jsonl")
LOOPS: dict[str, dict[str, Any]] = {
    "fast-dllm": {"preset": "fast-dllm"},
    "llada, 8 passes planned": {"preset": "llada", "steps": 8},
}


def commands() -> list[tuple[str, str]]:
    """The held-out prompts and their calls."""
    rows = map(json.loads, HELD_OUT.read_text(encoding="utf-8").splitlines())
    return [(row["prompt"], row["completion"]) for row in rows]


def call_schema(calls: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A JSON Schema of calls: those of each name have the arguments that its examples have, in their order."""
    by_name = defaultdict[str, list[dict[str, Any]]](list)
    for call in calls:
        by_name[call["name"]].append(call["arguments"])
    return {"oneOf": [_branch(name, by_name[name]) for name in sorted(by_name)]}


def _branch(name: str, examples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    places = defaultdict[str, list[int]](list)
    for arguments in examples:
        for place, argument in enumerate(arguments):
            places[argument].append(place)
    order = sorted(places, key=lambda argument: sum(places[argument]) / len(places[argument]))
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
@click.option("--new-tokens", type=click.IntRange(1), default=64, show_default=True)
def main(bundle: Path, new_tokens: int) -> None:
    """Compare free and constrained runs of every held-out command."""
    from jsonschema import Draft202012Validator

    pairs = commands()
    schema = call_schema([json.loads(call) for _, call in pairs])
    validator = Draft202012Validator(schema)
    with dlm_runtime.open(bundle) as opened:
        constraint = opened.constraint(schema=schema)
        for name, loop in LOOPS.items():
            for given in (None, constraint):
                valid = exact = passes = 0
                for prompt, call in pairs:
                    out = opened.generate(prompt=prompt, max_new_tokens=new_tokens, constraint=given, **loop)
                    passes += out.nfe
                    exact += same_call(out.text, call)
                    valid += _is_valid(validator, out.text or "")
                kind = "free" if given is None else "constrained"
                click.echo(f"{name}, {kind}: {valid} valid, {exact} exact of {len(pairs)}, NFE {passes / len(pairs):.3f}")


def _is_valid(validator: Any, text: str) -> bool:
    try:
        return bool(validator.is_valid(json.loads(text)))
    except json.JSONDecodeError:
        return False


if __name__ == "__main__":
    main()
