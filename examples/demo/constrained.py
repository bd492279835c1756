"""Compare a demo's answers to held-out commands with and without a constraint.

The constraint allows only calls that are valid by the schemas of the functions.

    python examples/demo/constrained.py build/demo
    python examples/demo/constrained.py build/several --data examples/demo/heldout-several.jsonl
        --new-tokens 192
    python examples/demo/constrained.py build/several --data examples/demo/heldout-several.jsonl
        --count 100 --defaults

The script prints the number of valid answers, the number of right answers, and the number of
passes. The second demo writes one call per line. Its bundle records this layout in json_layout, and
the constraint allows only this layout.
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
from dlm_runtime import Bundle, Generation

HELD_OUT = Path(__file__).with_name("heldout.jsonl")
LOOPS: dict[str, dict[str, Any]] = {
    "fast-dllm": {"preset": "fast-dllm"},
    "llada, 8 passes planned": {"preset": "llada", "steps": 8},
    "sdar": {"preset": "sdar"},
    "sdar, threshold 0.99": {"preset": "sdar", "threshold": 0.99},
}


def commands(data: Path) -> list[tuple[str, str]]:
    """Return the held-out commands and their right answers.

    An answer is a call or a list of calls.
    """
    rows = map(json.loads, data.read_text(encoding="utf-8").splitlines())
    return [(row["prompt"], row["completion"]) for row in rows]


def answer_schema(answers: Sequence[Any]) -> dict[str, Any]:
    """Make a JSON Schema that allows ``answers`` and other answers of the same form."""
    if not isinstance(answers[0], list):
        return call_schema(answers)
    calls = call_schema([call for answer in answers for call in answer])
    return {"type": "array", "items": calls, "minItems": 1}


def call_schema(calls: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Make a JSON Schema of calls.

    A call of a function may have the arguments that occur in the example calls of this function, in
    the same order.
    """
    by_name = defaultdict[str, list[dict[str, Any]]](list)
    for call in calls:
        by_name[call["name"]].append(call["arguments"])
    return {"oneOf": [_branch(name, by_name[name]) for name in sorted(by_name)]}


def _branch(name: str, examples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    # The schema makes every argument optional.
    sorter = TopologicalSorter[str]()
    for arguments in examples:
        for argument in arguments:
            sorter.add(argument)
        for before, behind in itertools.pairwise(arguments):
            sorter.add(behind, before)
    order = list(sorter.static_order())
    values = {
        argument: [each[argument] for each in examples if argument in each] for argument in order
    }
    arguments = {
        "type": "object",
        "properties": {argument: _type(found) for argument, found in values.items()},
        "required": [argument for argument in order if len(values[argument]) == len(examples)],
        "additionalProperties": False,
    }
    properties = {"name": {"const": name}, "arguments": arguments}
    return {
        "type": "object",
        "properties": properties,
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _type(values: Sequence[Any]) -> dict[str, Any]:
    if isinstance(values[0], list):
        return {"type": "array", "items": _type([item for value in values for item in value])}
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string"}
    found = {kinds[type(value)] for value in values}
    return {"type": "number" if found == {"integer", "number"} else sorted(found)[0]}


@click.command()
@click.argument("bundle", type=click.Path(exists=True, path_type=Path))
@click.option(
    "--data",
    type=click.Path(exists=True, path_type=Path),
    default=HELD_OUT,
    help="Held-out commands.",
)
@click.option(
    "--count", type=click.IntRange(1), help="Number of its commands to use.  [default: all]"
)
@click.option("--new-tokens", type=click.IntRange(1), default=64, show_default=True)
@click.option(
    "--defaults",
    is_flag=True,
    help="Use schema= or tools= and no other option, with the bundle's default preset.",
)
def main(bundle: Path, data: Path, count: int | None, new_tokens: int, defaults: bool) -> None:
    """Compare the answers to held-out commands with and without a constraint."""
    pairs = commands(data)
    schema = answer_schema([json.loads(answer) for _, answer in pairs])
    with dlm_runtime.open(bundle) as opened:
        lines = (
            by_default(opened, pairs[:count], schema)
            if defaults
            else compare(opened, pairs[:count], schema, new_tokens)
        )
        for line in lines:
            click.echo(line)


def compare(
    bundle: Bundle, pairs: Sequence[tuple[str, str]], schema: dict[str, Any], new_tokens: int
) -> Iterator[str]:
    """Run the commands with each preset of the bundle. Yields one line of results per preset."""
    from jsonschema import Draft202012Validator
    from referencing import Registry

    # An empty registry retrieves nothing. Without a registry, jsonschema would open the URLs to
    # which a schema refers.
    validator, constraint = (
        Draft202012Validator(schema, registry=Registry()),
        bundle.constraint(schema=schema),
    )
    for name, loop in LOOPS.items():
        if loop["preset"] not in bundle.manifest["loop"]["presets"]:
            continue
        for given in (None, constraint):
            valid = exact = passes = 0
            for prompt, answer in pairs:
                out = bundle.generate(
                    prompt=prompt, max_new_tokens=new_tokens, constraint=given, **loop
                )
                passes += out.nfe
                exact += same_call(out.text, answer)
                valid += _is_valid(validator, out.text or "")
            kind = "free" if given is None else "constrained"
            yield f"{name}, {kind}: {valid} valid, {exact} exact of {len(pairs)}, NFE {passes / len(pairs):.3f}"


def by_default(
    bundle: Bundle, pairs: Sequence[tuple[str, str]], schema: dict[str, Any]
) -> Iterator[str]:
    """Count the right answers with a constraint and default options.

    Yields one line of results per kind of constraint.
    """
    tools = tools_of(schema)
    kinds: dict[str, dict[str, Any]] = {
        "free": {},
        "schema": {"schema": schema},
        "tools": {"tools": tools},
        "tools, required": {"tools": tools, "tool_choice": "required"},
    }
    for name, options in kinds.items():
        right = passes = 0
        loss = 0.0
        for prompt, answer in pairs:
            out = bundle.generate(prompt=prompt, **options)
            right += is_answer(out, answer) if "tools" in options else same_call(out.text, answer)
            passes += out.nfe
            loss = max(loss, out.constraint_log_prob_loss / max(1, out.completion_tokens))
        yield f"{name}: {right} right of {len(pairs)}, NFE {passes / len(pairs):.3f}, at most {loss:.4f} nats lost per token"


def tools_of(schema: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the functions that a schema of answers allows, in the form of tools."""
    branches = [branch["properties"] for branch in schema.get("items", schema)["oneOf"]]
    described = [
        {"name": branch["name"]["const"], "parameters": branch["arguments"]} for branch in branches
    ]
    return [{"type": "function", "function": function} for function in described]


def is_answer(out: Generation, answer: str) -> bool:
    """True if the calls of a result equal the calls of an answer in the data."""
    wanted = json.loads(answer)
    calls = [{"name": call.name, "arguments": call.arguments} for call in out.tool_calls]
    return same_call(
        json.dumps(calls), json.dumps(wanted if isinstance(wanted, list) else [wanted])
    )


def _is_valid(validator: Any, text: str) -> bool:
    try:
        return bool(validator.is_valid(json.loads(text)))
    except json.JSONDecodeError:
        return False


if __name__ == "__main__":
    main()
