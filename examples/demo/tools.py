"""Write the demo's functions as tools for `dlm-export run --tools`.

    python examples/demo/tools.py --out build/tools.json

The parameters of a tool are the arguments that occur in generated calls.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import click
from constrained import call_schema
from data import training_examples

# Number of generated commands; so many commands contain every function with every argument.
DRAWN = 20_000


def tools() -> list[dict[str, Any]]:
    """Describe each function as a tool.

    The description of a tool is a command that asks for the function.
    """
    examples = list(itertools.islice(training_examples(0), DRAWN))
    said = {example.function: example.prompt for example in reversed(examples)}
    found = []
    for branch in call_schema([json.loads(example.completion) for example in examples])["oneOf"]:
        name, parameters = (branch["properties"][key] for key in ("name", "arguments"))
        function = {
            "name": name["const"],
            "description": f"Asked for by: {said[name['const']]}",
            "parameters": parameters,
        }
        found.append({"type": "function", "function": function})
    return found


@click.command()
@click.option(
    "--out", type=click.Path(path_type=Path), required=True, help="The JSON file to write."
)
def main(out: Path) -> None:
    """Write the tools."""
    out.write_text(json.dumps(tools(), indent=1) + "\n")
    click.echo(f"{out} {out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
