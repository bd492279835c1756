"""Runs the official test suite of JSON Schema.

A constraint must never accept a value that is invalid according to the suite.

The environment variable DLM_JSON_SCHEMA_SUITE names a folder with a checkout of
github.com/json-schema-org/JSON-Schema-Test-Suite. If it is not set, the tests use the copy in the
source distribution of jsonschema on PyPI.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import subprocess
import sys
import tarfile
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

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::dlm_runtime.errors.SchemaWarning"),
]
DRAFTS = {
    "draft4": "http://json-schema.org/draft-04/schema#",
    "draft6": "http://json-schema.org/draft-06/schema#",
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
}
DEPTH = 2


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    given = os.environ.get("DLM_JSON_SCHEMA_SUITE")
    if given is not None:
        return Path(given)
    folder = tmp_path_factory.mktemp("suite")
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "--no-binary",
        "jsonschema",
        "jsonschema==4.26.0",
    ]
    try:
        subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=120)
    except (OSError, subprocess.SubprocessError) as err:
        pytest.skip(
            f"$DLM_JSON_SCHEMA_SUITE is not set, and PyPI's jsonschema cannot be downloaded ({type(err).__name__})"
        )
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    return next(folder.glob("*/json"))


def cases(suite: Path, draft: str) -> Iterator[tuple[str, Any, list[dict[str, Any]]]]:
    """Yield the cases of the suite.

    A case consists of a name, a schema with the URI of its draft, and values. The suite says which
    of the values are valid.
    """
    for file in sorted((suite / "tests" / draft).glob("*.json")):
        for case in json.loads(file.read_text(encoding="utf-8")):
            found = case["schema"]
            if isinstance(found, dict):
                found = {"$schema": DRAFTS[draft], **found}
            yield f"{file.stem}: {case['description']}", found, case["tests"]


def compact(instance: Any) -> bytes:
    text = json.dumps(instance, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "surrogatepass")


# Maps a part of an error message to the reason that docs/guides/constraints.md gives.
REJECTIONS = {
    "other documents are never retrieved": "other document",
    "contains NUL": "NUL",
    "no value is valid by it": "type",  # the keywords allow no value of their types
    "leads to different schemas": "dynamic reference",
    "within a negation": "negation",
    "of more than 1 is not supported without properties": "minProperties",
}


def why_rejected(message: str) -> str:
    return next((reason for sign, reason in REJECTIONS.items() if sign in message), "unexplained")


def names_in(value: Any) -> set[str]:
    """Return the names of all properties in a JSON value and in its nested values."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return set(value if isinstance(value, dict) else ()).union(*map(names_in, inner))


def type_of(instance: Any) -> str:
    names = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer"}
    return names.get(type(instance), "null" if instance is None else "number")


def why_left_out(keyword: str, found: Any, instance: Any) -> str:
    """Return the reason why the constraint does not allow a valid value."""
    if isinstance(found, dict):
        if "uniqueItems" in found and isinstance(instance, list):
            return "uniqueItems"
        with contextlib.suppress(RequestError):
            typed = {**found, "type": type_of(instance)}
            if byte_automaton(schema_content(typed, max_depth=DEPTH)).matches(compact(instance)):
                return "type"
        if not names_in(instance) <= {*names_in(found), *re.findall(r'"(\w+)"', json.dumps(found))}:
            return "unnamed property"
    if keyword.startswith("unevaluated") or keyword in ("format", "vocabulary"):
        return keyword
    if names_in(instance):
        return "order or unnamed property"
    return "spelling of a number" if re.search(r"\d", json.dumps(instance)) else "unexplained"


@pytest.mark.parametrize("draft", DRAFTS)
def test_no_text_is_accepted_or_drawn_that_is_invalid(suite: Path, draft: str) -> None:
    wrong, counts, source = list[str](), Counter[str](), random.Random(1)
    left_out: dict[str, Counter[str]] = {}
    for name, found, instances in cases(suite, draft):
        counts["schemas"] += 1
        keyword = name.partition(":")[0]
        reasons = left_out.setdefault(keyword, Counter())
        try:
            texts = byte_automaton(schema_content(found, max_depth=DEPTH))
        except RequestError as err:
            counts["rejected"] += 1
            valid = sum(instance["valid"] for instance in instances)
            if valid:
                reasons[f"schema: {why_rejected(str(err))}"] += valid
            continue
        for instance in instances:
            counts["instances"] += 1
            is_accepted = texts.matches(compact(instance["data"]))
            counts["valid"] += instance["valid"]
            counts["valid and accepted"] += is_accepted and instance["valid"]
            if instance["valid"] and not is_accepted:
                reasons[why_left_out(keyword, found, instance["data"])] += 1
            if is_accepted and not instance["valid"]:
                wrong.append(f"{name}: {instance['description']}")
        validator = validator_for(found, Draft202012Validator)(found, registry=Registry())
        for _ in range(20):
            text = drawn_text(texts, source, source.randrange(60))
            counts["drawn"] += 1
            try:
                is_valid = validator.is_valid(json.loads(text))
            except re.error:
                break  # Python's re does not support this pattern
            if not is_valid:
                wrong.append(f"{name}: {text}")
    print(draft, dict(counts), "valid and not generated, by keyword:")
    for keyword, why in sorted(left_out.items()):
        if why:
            print(f"{keyword:24}", ", ".join(f"{reason} {n}" for reason, n in why.most_common()))
    assert wrong == []
    assert not any("unexplained" in " ".join(why) for why in left_out.values())
    assert counts["rejected"] < 0.2 * counts["schemas"]
    assert counts["valid and accepted"] > 0
