"""A file from ``dlm-export compile`` constrains texts in C programs in the same way as in Python."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from test_cli import invoke
from test_native import compile_c, succeed

import dlm_runtime
from dlm_runtime import embedding
from dlm_runtime.constraints.compiled import Constraint

PROMPT = "turn on the kitchen lights"
SCHEMA = {
    "type": "object",
    "xml": {"name": "light"},
    "properties": {"room": {"enum": ["attic", "cellar"]}},
    "required": ["room"],
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": {}}},
    }
    for name in ("ring", "stop")
]
PROGRAM = """
#include <stdio.h>
#include <string.h>
#include "dlm_runtime.h"

int main(int count, char **arguments) {
  char why[512];
  dlm_bundle *bundle = NULL;
  dlm_session *session = NULL;
  dlm_automaton *automaton = NULL;
  dlm_request request;
  const dlm_result *result;
  if (count != 3 || dlm_bundle_open(arguments[1], NULL, why, sizeof why, &bundle)) return puts(why), 1;
  if (dlm_session_create(bundle, why, sizeof why, &session)) return puts(why), 1;
  dlm_constraint constraint;
  dlm_constraint_init(&constraint, sizeof constraint);
  constraint.kind = arguments[2][0] == '{' ? DLM_CONSTRAINT_SCHEMA : DLM_CONSTRAINT_FILE;
  constraint.content = arguments[2];
  constraint.content_size = strlen(arguments[2]);
  if (dlm_automaton_compile(bundle, &constraint, why, sizeof why, &automaton)) return puts(why), 1;
  dlm_request_init(&request, sizeof request);
  request.prompt = "PROMPT";
  request.prompt_size = sizeof "PROMPT" - 1;
  request.constraint = automaton;
  request.text = DLM_TEXT_RESULT;
  if (dlm_session_generate(session, &request, &result)) return puts(dlm_session_last_error(session)), 1;
  puts(result->text);
  dlm_automaton_destroy(automaton);
  dlm_session_destroy(session);
  dlm_bundle_destroy(bundle);
  return 0;
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The path of a compiled C program that generates text with a bundle and a constraint file."""
    folder = tmp_path_factory.mktemp("compile")
    (folder / "constrained.c").write_text(PROGRAM.replace("PROMPT", PROMPT))
    return compile_c(folder / "constrained", folder / "constrained.c", embedding.prefix() / "lib")


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the input files of the command. The user's cache folder is empty."""
    monkeypatch.setenv("DLM_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    (tmp_path / "lights.gbnf").write_text('root ::= ("on" | "off") (" " root)?')
    (tmp_path / "tools.json").write_text(json.dumps(TOOLS))
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        (["--schema", "{}/schema.json"], r'\{"room":"(attic|cellar)"\}'),
        (["--regex", "[0-9]{3}-[a-f]{2}"], r"[0-9]{3}-[a-f]{2}"),
        (["--enum", "yes, it is", "--enum", "no"], r"yes, it is|no"),
        (["--json-object", "--max-depth", "1"], r"\{.*\}"),
        (
            ["--tools", "{}/tools.json", "--tool-choice", "stop", "--call-format", "object"],
            r'\{"name":"stop","arguments":\{\}\}',
        ),
        (["--regex", "abc[0-9]", "--before", "ab"], r"c[0-9]"),
        (["--grammar", "{}/lights.gbnf"], r"(on|off)( (on|off))*"),
        (["--json-lines", "{}/schema.json"], r'\{"room":"(attic|cellar)"\}(\n\{"room":.*\})*'),
        (["--csv", "{}/schema.json"], r"room(\n(attic|cellar))+"),
        (["--xml", "{}/schema.json"], r"<light><room>(attic|cellar)</room></light>"),
    ],
    ids=[
        "schema",
        "regex",
        "enum",
        "json object",
        "tools",
        "before",
        "grammar",
        "json lines",
        "csv",
        "xml",
    ],
)
def test_a_c_program_writes_what_the_compiled_file_allows(
    program: Path, demo_bundle: Path, files: Path, arguments: list[str], pattern: str
) -> None:
    output = files / "made.automaton"
    given = [argument.replace("{}", str(files)) for argument in arguments]
    told = invoke("compile", demo_bundle, *given, "-o", output)
    assert told.exit_code == 0, told.output
    assert re.match(
        rf"{re.escape(str(output))} [\d.]+ (B|KiB): the shortest text has \d+ tokens\n", told.stdout
    )
    text = succeed(program, demo_bundle, output).removesuffix("\n")
    assert re.fullmatch(pattern, text), text
    with dlm_runtime.open(demo_bundle) as bundle:
        assert (
            text == bundle.generate(prompt=PROMPT, constraint=Constraint(output.read_bytes())).text
        )


def test_a_c_program_compiles_a_schema_that_it_meets_at_run_time(
    program: Path, demo_bundle: Path
) -> None:
    text = succeed(program, demo_bundle, json.dumps(SCHEMA)).removesuffix("\n")
    assert json.loads(text) in ({"room": "attic"}, {"room": "cellar"})
    with dlm_runtime.open(demo_bundle) as bundle:
        made = bundle.constraint(schema=SCHEMA, json_layout="compact", cache_dir=None)
        assert text == bundle.generate(prompt=PROMPT, constraint=made).text


def test_compile_leaves_the_old_file_where_it_fails(demo_bundle: Path, files: Path) -> None:
    output = files / "made.automaton"
    first = json.loads(
        invoke("compile", demo_bundle, "--regex", "a", "-o", output, "--json").stdout
    )
    before = output.read_bytes()
    assert first == {"file": str(output), "bytes": len(before), "shortest_tokens": 1}
    kept = invoke("compile", demo_bundle, "--regex", "b", "-o", output)
    wrong = invoke("compile", demo_bundle, "--regex", "b(", "-o", output, "--force")
    assert (kept.exit_code, wrong.exit_code) == (2, 2)
    assert output.read_bytes() == before
    assert invoke("compile", demo_bundle, "--regex", "bb", "-o", output, "--force").exit_code == 0
    assert output.read_bytes() != before
    assert [path.name for path in files.iterdir() if path.name.startswith((".", "made"))] == [
        "made.automaton"
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            [],
            "give one of --schema, --regex, --grammar, --enum, --json-object, --json-lines, --csv, --xml, --tools",
        ),
        (["--regex", "a", "--tools", "{}/tools.json"], "give one of --schema"),
        (["--regex", "a", "--json-object"], "give one of --regex, --json-object"),
        (["--regex", "a", "--tool-choice", "stop"], "need --tools"),
        (
            ["--regex", "a", "--max-depth", "1"],
            "--max-depth needs --schema, --grammar, --json-object, --json-lines, --xml or --tools",
        ),
        (
            ["--regex", "a", "--any-order"],
            "--any-order needs --schema, --json-object, --json-lines or --tools",
        ),
        (
            ["--tools", "{}/tools.json", "--tool-choice", "auto"],
            "other choices allow any text",
        ),
        (["--schema", "{}/nowhere.json"], "does not exist"),
    ],
    ids=["nothing", "two", "two more", "no tools", "depth", "order", "not forced", "no file"],
)
def test_compile_rejects_arguments_that_do_not_fit(
    demo_bundle: Path, files: Path, arguments: list[str], message: str
) -> None:
    output = files / "made.automaton"
    told = invoke(
        "compile",
        demo_bundle,
        *[argument.replace("{}", str(files)) for argument in arguments],
        "-o",
        output,
    )
    assert told.exit_code == 2
    assert message in told.output
    assert not output.exists()
