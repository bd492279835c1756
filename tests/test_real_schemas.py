"""Tests of constraints for published JSON Schemas.

Two independent validators (jsonschema and jsonschema-rs) must accept random texts that the
constraints allow. To run the test, install jsonschema-rs, and set $DLM_JSON_SCHEMA_BENCH to the
folder ``data`` of github.com/guidance-ai/jsonschemabench.
"""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from constraints import byte_automaton, drawn_text, schema_content
from jsonschema import Draft202012Validator
from jsonschema.validators import validator_for
from referencing import Registry

from dlm_runtime import RequestError
from dlm_runtime.constraints.compiled import CompileLimits

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::dlm_runtime.errors.SchemaWarning"),
]
SCHEMAS, TEXTS = 1000, 20
LIMITS = CompileLimits(seconds=3, states=8000)


def real_schemas(seed: int) -> Iterator[tuple[str, Any]]:
    """Yield the path and content of each published schema, in random order."""
    given = os.environ.get("DLM_JSON_SCHEMA_BENCH")
    if given is None:
        pytest.skip("$DLM_JSON_SCHEMA_BENCH does not name the data of JSONSchemaBench")
    paths = sorted(Path(given).rglob("*.json"))
    random.Random(seed).shuffle(paths)
    for path in paths:
        content = json.loads(path.read_text(encoding="utf-8"))
        tests = isinstance(content, dict) and content.keys() >= {"schema", "tests"}
        yield str(path.relative_to(given)), content["schema"] if tests else content


def test_texts_of_real_schemas_are_valid_to_two_validators() -> None:
    second = pytest.importorskip("jsonschema_rs", reason="jsonschema-rs is not installed")
    counts, wrong, source = Counter[str](), list[str](), random.Random(7)
    for name, found in real_schemas(int(os.environ.get("DLM_JSON_SCHEMA_BENCH_SEED", "1"))):
        if counts["compiled"] == SCHEMAS:
            break
        counts["schemas"] += 1
        try:
            texts = byte_automaton(schema_content(found), LIMITS)
        except RequestError:
            continue
        counts["compiled"] += 1
        kind = validator_for(found, Draft202012Validator)
        checks = {"jsonschema": kind(found, registry=Registry()).is_valid}
        try:
            checks["jsonschema-rs"] = second.validator_for(found).is_valid
        except (ValueError, second.ReferencingError):
            counts["unreadable to jsonschema-rs"] += 1
        for number in range(TEXTS):
            text = drawn_text(texts, source, source.choice((0, 8, 40, 200)) if number else 0)
            value = json.loads(text)
            counts["texts"] += 1
            for who, is_valid in checks.items():
                try:
                    result = is_valid(value)
                except Exception as err:
                    counts[f"{who} fails: {type(err).__name__}"] += 1
                    continue
                counts[f"valid to {who}"] += result
                if not result:
                    wrong.append(f"{who}: {name}: {text[:300]}")
    print(dict(counts), *wrong[:50], sep="\n")
    assert wrong == []
    assert counts["compiled"] == SCHEMAS
