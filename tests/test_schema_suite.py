"""The official test suite of JSON Schema: what it calls invalid is never accepted.

$DLM_JSON_SCHEMA_SUITE is a checkout of github.com/json-schema-org/JSON-Schema-Test-Suite. Without
it, the copy in the source distribution of PyPI's jsonschema is used.
"""

from __future__ import annotations

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
    """A name, a schema that names its draft, and instances."""
    for file in sorted((suite / "tests" / draft).glob("*.json")):
        for case in json.loads(file.read_text(encoding="utf-8")):
            found = case["schema"]
            if isinstance(found, dict):
                found = {"$schema": DRAFTS[draft], **found}
            yield f"{file.stem}: {case['description']}", found, case["tests"]


@pytest.mark.parametrize("draft", DRAFTS)
def test_no_text_is_accepted_or_drawn_that_is_invalid(suite: Path, draft: str) -> None:
    wrong, counts, source = list[str](), Counter[str](), random.Random(1)
    for name, found, instances in cases(suite, draft):
        counts["schemas"] += 1
        try:
            texts = byte_automaton(schema_content(found, max_depth=DEPTH))
        except RequestError:
            counts["rejected"] += 1
            continue
        for instance in instances:
            counts["instances"] += 1
            text = json.dumps(instance["data"], ensure_ascii=False, separators=(",", ":"))
            is_accepted = "\ud800" not in text and texts.matches(text.encode())
            counts["valid"] += instance["valid"]
            counts["valid and accepted"] += is_accepted and instance["valid"]
            if is_accepted and not instance["valid"]:
                wrong.append(f"{name}: {instance['description']}")
        validator = validator_for(found, Draft202012Validator)(found, registry=Registry())
        for _ in range(20):
            text = drawn_text(texts, source, source.randrange(60))
            counts["drawn"] += 1
            try:
                is_valid = validator.is_valid(json.loads(text))
            except re.error:
                break  # Python's re does not read this pattern of ECMA-262
            if not is_valid:
                wrong.append(f"{name}: {text}")
    print(draft, dict(counts))
    assert wrong == []
    assert counts["rejected"] < 0.2 * counts["schemas"]
    assert counts["valid and accepted"] > 0
