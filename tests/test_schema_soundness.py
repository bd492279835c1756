"""Tests of constraints for random schemas that combine and nest all keywords.

The package jsonschema must accept every text that the constraint accepts, with and without its
checks of the keyword ``format``.
"""

from __future__ import annotations

import json
import os
import random
from typing import Any

import pytest
from constraints import byte_automaton, drawn_texts, schema_content
from hypothesis import given, note, settings
from hypothesis import strategies as st
from jsonschema.validators import validator_for
from referencing import Registry
from referencing.exceptions import Unresolvable
from schema_strategies import URIS, VALUES, documents

from dlm_runtime import RequestError
from dlm_runtime.constraints.compiled import CompileLimits

LIMITS = CompileLimits(seconds=1, memory_bytes=256 << 20, states=4000)
WANTED = os.environ.get("DLM_SCHEMA_EXAMPLES")
EXAMPLES = int(WANTED or 60)
# About one in a thousand random examples fails because of a defect of jsonschema. For instance, in
# draft 2019-09, jsonschema ignores additionalProperties in an anyOf when it evaluates
# unevaluatedProperties. Every test run therefore uses the same examples, unless a number of
# examples is passed.


def judged_invalid(found: Any, text: str) -> str:
    """Return how a validator that rejects the text treats ``format``.

    Returns "" if both validators (with and without checks of ``format``) accept the text.
    """
    value = json.loads(text)
    kind = validator_for(found)
    for name, checker in (("annotations", None), ("assertions", kind.FORMAT_CHECKER)):
        validator = kind(found, registry=Registry(), format_checker=checker)
        try:
            if not validator.is_valid(value):
                return f"formats are {name}"
        except (RecursionError, TypeError, Unresolvable):
            # jsonschema itself fails in three cases. It recurses endlessly for some recursive
            # schemas. It cannot handle additionalItems if items is a boolean. It resolves missing
            # references in an `if` without `then` and `else`, although such an `if` has no effect.
            return ""
    return ""


@pytest.mark.filterwarnings("ignore::dlm_runtime.errors.SchemaWarning")
@pytest.mark.parametrize("draft", URIS)
def test_no_text_is_accepted_that_jsonschema_rejects(draft: int) -> None:
    @settings(max_examples=EXAMPLES, derandomize=WANTED is None)
    @given(found=documents(draft), seed=st.integers(0, 99), depth=st.sampled_from((0, 1, 2, None)))
    def check(found: Any, seed: int, depth: int | None) -> None:
        try:
            texts = byte_automaton(schema_content(found, max_depth=depth), LIMITS)
        except RequestError as err:
            note(str(err))
            return
        listed = [json.dumps(value, ensure_ascii=False, separators=(",", ":")) for value in VALUES]
        some = [text for text in listed if texts.matches(text)]
        some += sorted(drawn_texts(texts, random.Random(seed), 12))
        wrong = {text: said for text in some if (said := judged_invalid(found, text))}
        assert wrong == {}

    check()
