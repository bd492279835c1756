"""Compare how many real schemas compile with different tokenizers, and check drawn texts.

    python -m benchmarks.constraints.tokenizers --tokenizers NAME=TOKENIZER.JSON... \
        --schemas FOLDER... [--sample 150] [--texts 20000] [--json FILE]

For each tokenizer and each schema that compiles, random texts are drawn from the compiled automaton,
decoded with the library ``tokenizers`` and checked with the validators jsonschema and
jsonschema-rs. A text that is invalid is printed. The sources of schemas are those of
``benchmarks.constraints.schemas``.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema
import jsonschema_rs
from referencing import Registry

from benchmarks.constraints.schemas import schemas_of
from dlm_runtime import RequestError
from dlm_runtime.constraints.compiled import CompileLimits, Content, compile_content
from dlm_runtime.constraints.vocabulary import read_vocabulary
from dlm_runtime.text.tokenizer import Tokenizer

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from constraints import Automaton


class Walks:
    """Draws random texts from an automaton over tokens."""

    def __init__(self, automaton: Automaton, end: int) -> None:
        self.automaton, self.end = automaton, end
        order = automaton.token_class.argsort(kind="stable")
        classes = automaton.token_class[order]
        self.tokens = [
            order[classes.searchsorted(each) : classes.searchsorted(each, "right")]
            for each in range(automaton.classes)
        ]

    def draw(self, source: random.Random, room: int) -> list[int]:
        made, state, found = self.automaton, 0, list[int]()
        for left in range(made.shortest + room - 1, -1, -1):
            edges = [
                edge
                for edge in range(made.edge_starts[state], made.edge_starts[state + 1])
                if made.distances[made.edge_states[edge]] <= left
            ]
            edge = source.choice(edges)
            group, state = made.edge_groups[edge], int(made.edge_states[edge])
            first, last = made.group_starts[group], made.group_starts[group + 1]
            tokens = self.tokens[made.group_classes[source.randrange(first, last)]]
            token = int(tokens[source.randrange(len(tokens))])
            if token == self.end:
                break
            found.append(token)
        return found


def validators(schema: Any) -> tuple[Any, Any]:
    kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    return (
        kind(schema, registry=Registry(), format_checker=kind.FORMAT_CHECKER),
        jsonschema_rs.validator_for(schema, validate_formats=True),
    )


def measure(path: str, schemas: list[str], texts: int) -> dict[str, Any]:
    tokenizer = Tokenizer(Path(path).read_bytes(), None, {})
    began = time.process_time()
    vocabulary = read_vocabulary(tokenizer)
    read_s, end = time.process_time() - began, len(vocabulary.tokens)
    compiled, seconds, counts = list[tuple[str, Automaton]](), 0.0, Counter[str]()
    for schema in schemas:
        began = time.process_time()
        try:
            made = compile_content(
                Content("schema", schema),
                CompileLimits(),
                vocabulary=vocabulary,
                vocab_size=end + 1,
                ends=(end,),
            )
            compiled.append((schema, Automaton.from_bytes(made.data)))
        except RequestError as err:
            counts[str(err).split(":")[0]] += 1
        seconds += time.process_time() - began
    checked = invalid = 0
    source = random.Random(5)
    for schema, automaton in compiled:
        parsed = json.loads(schema)
        try:
            both = validators(parsed)
        except Exception:  # a validator that does not read the schema cannot judge texts
            counts["no validator"] += 1
            continue
        walks = Walks(automaton, end)
        rows = [
            walks.draw(source, source.choice((0, 5, 30))) for _ in range(texts // len(compiled) + 1)
        ]
        for text in tokenizer.decode_each(rows):
            checked += 1
            try:
                value = json.loads(text)
                is_valid = all(each.is_valid(value) for each in both)
            except ValueError:
                is_valid = False
            if not is_valid:
                invalid += 1
                print(f"{path}: {text!r} for {schema[:300]}", file=sys.stderr)
    tokenizer.close()
    return {
        "tokens": end,
        "accepted": len(compiled),
        "schemas": len(schemas),
        "texts": checked,
        "invalid": invalid,
        "read_s": round(read_s, 2),
        "compile_s": round(seconds / len(schemas), 3),
        "refused": dict(counts),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--tokenizers", nargs="+", required=True, metavar="NAME=FILE")
    parser.add_argument("--schemas", nargs="+", required=True)
    parser.add_argument("--sample", type=int, default=150)
    parser.add_argument("--texts", type=int, default=20_000)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    every = sorted(
        {text for folder in arguments.schemas for text in schemas_of(Path(folder)).values()}
    )
    schemas = random.Random(0).sample(every, arguments.sample)
    found = {}
    for each in arguments.tokenizers:
        name, _, path = each.partition("=")
        found[name] = measure(path, schemas, arguments.texts)
        print(name, json.dumps(found[name]), flush=True)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
