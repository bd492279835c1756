"""Tests of the documentation: its commands run, its programs compile, its links have a target, and
the names in its text exist.

The tests run the commands of README with the demo, and those of "Add a model family", in one
process. Slow tests run the commands of three tutorials with tiny denoisers. Commands that take
minutes or download something are listed in ``LEFT_OUT``. The tests only check that the files in
these commands exist. All Python samples are run, and all C samples are compiled.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import click
import pytest
from checkpoints import llada_config, write_checkpoint
from conftest import DEMO_CHECKPOINT

import dlm_runtime
from dlm_export import targets
from dlm_export.cli import main, options
from dlm_export.families import FAMILIES
from dlm_runtime.manifest import schema
from dlm_runtime.policy import Policy
from dlm_runtime.presets import PRESETS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
SITE = ROOT / "docs"
README, NEW_FAMILY = ROOT / "README.md", SITE / "guides" / "adding-a-family.md"
TUTORIALS = [
    SITE / "tutorials" / f"{name}.md"
    for name in ("deploy-on-a-cpu", "quantise-and-judge", "structured-output")
]
EMBED = SITE / "tutorials" / "embed-in-c.md"
DOCS = sorted(SITE.rglob("*.md"))
PAGES = [README, *DOCS, ROOT / "examples" / "embed" / "README.md"]
LINKED = [
    *PAGES,
    *(ROOT / name for name in ("BENCHMARKS.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")),
    ROOT / "examples" / "README.md",
]

# The pages whose Python samples run on the bundle that README builds. tests/test_serving.py runs
# the samples that need a server.
SAMPLES = [
    page
    for page in (README, *DOCS)
    if page not in (NEW_FAMILY, SITE / "guides" / "serving.md")
    and "\n```python\n" in page.read_text()
]

# Maps a placeholder on a page to the folder that replaces it in these tests. The programs in README
# open build/demo.
PLACEHOLDERS = {"CHECKPOINT": str(DEMO_CHECKPOINT), "BUNDLE": "build/demo"}

# Options that are added to a command, because its default compares many texts with PyTorch.
SHORTENED = {"verify": ["--count", "1", "--new-tokens", "12"]}

# Options of lm-eval that pages name.
LM_EVAL = {
    *("--apply_chat_template", "--batch_size", "--gen_kwargs", "--include_path", "--model"),
    *("--model_args", "--output_path"),
}

# Commands that are not run: the start of the command, and the reason. The test checks that the
# files that these commands name exist.
LEFT_OUT = {
    "make": "takes minutes, and is what runs this test; the targets are in the Makefile",
    "pip install": "fetches packages; the extras and files are in the tree",
    "python3 -m venv": "the environment is there",
    ". .venv/bin/activate": "the environment is active",
    "dlm-export bench": "takes the time that it measures",
    "dlm-export capture": "needs transformers and a release's own code; tests of capture have one of their own",
    "dlm-export verify BUNDLE --golden": "needs what capture writes",
}

# A program that runs commands one after another in a single process, so that torch is imported only
# once. Its input is JSON: for each command, a folder and the words of the command. For each
# command, it prints [exit code, output]. dlm_export is imported from the folder in the first
# argument, even if a different dlm_export is installed. Traced graphs are shared with other tests
# (tests/traces.py, in the folder of the third argument).
DRIVER = """
import json, os, runpy, subprocess, sys, time, traceback
from importlib.machinery import PathFinder

class Copied:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.split(".")[0] == "dlm_export":
            return PathFinder.find_spec(name, [sys.argv[1]] if path is None else path, target)

sys.meta_path.insert(0, Copied)
time.sleep = lambda seconds: None  # of --watch
told, sys.stdout = sys.stdout, sys.stderr
for folder, words in json.loads(sys.argv[2]):
    os.chdir(folder)
    code, output = 0, ""
    if words[0] == "dlm-export":
        from click.testing import CliRunner
        from dlm_export import __file__ as imported
        from dlm_export.cli import main, options
        from dlm_export.graph import trace
        sys.path.append(sys.argv[3])
        import traces
        assert imported.startswith(sys.argv[1]), imported
        trace.trace_pass = traces.trace_once
        done = CliRunner().invoke(main, words[1:])
        code, output = done.exit_code, done.output
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            output += "".join(traceback.format_exception(done.exception))
    elif words[0] == "python":
        runpy.run_path(words[1])
    else:
        done = subprocess.run(words, capture_output=True, text=True)
        code, output = done.returncode, done.stdout + done.stderr
    print(json.dumps([code, output]), file=told, flush=True)
"""


@dataclass(frozen=True)
class Block:
    """A fenced code block of a page, with its language and its text.

    If the line before the block names a file as ```PATH`:``, ``path`` is this name.
    """

    language: str
    text: str
    path: str | None


@lru_cache
def _blocks(page: Path) -> list[Block]:
    fence = re.compile(
        r"(?:^`(?P<path>[^`\n]+)`:\n\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$",
        re.MULTILINE | re.DOTALL,
    )
    return [
        Block(found["language"], found["text"], found["path"])
        for found in fence.finditer(page.read_text())
    ]


def _prose(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def _commands(page: Path) -> list[list[str]]:
    """Return the words of each command in the shell code blocks of a page, in order."""
    found = []
    for block in _blocks(page):
        if block.language != "sh":
            continue
        for line in block.text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            words = words[: words.index(">")] if ">" in words else words
            while "&&" in words:
                end = words.index("&&")
                found.append(words[:end])
                words = words[end + 1 :]
            found.append(words)
    return [words for words in found if words]


def _is_left_out(words: list[str]) -> bool:
    return any(words[: len(start.split())] == start.split() for start in LEFT_OUT)


def _table(page: Path, first: str) -> list[list[str]]:
    """Return the cells of the table whose header line begins with ``first``, without the header
    line and the line below it.
    """
    rows = page.read_text().split(f"\n| {first} |", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def _quoted(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


# ---- The pages whose commands run ----


@dataclass(frozen=True)
class Followed:
    """A command of a page and its result."""

    page: Path
    command: str
    code: int
    output: str


def _tiny_checkpoint(folder: Path) -> None:
    """Write a random LLaDA checkpoint with one layer and the demo's tokenizer and chat template."""
    said = json.loads((DEMO_CHECKPOINT / "config.json").read_text())
    kept = {
        name: said[name]
        for name in (
            "vocab_size",
            "embedding_size",
            "mask_token_id",
            "eos_token_id",
            "pad_token_id",
        )
    }
    write_checkpoint(
        folder,
        llada_config(d_model=32, n_layers=1, n_heads=2, n_kv_heads=2, mlp_hidden_size=32, **kept),
    )
    for file in DEMO_CHECKPOINT.glob("*token*"):
        shutil.copy(file, folder)


def _examples(folder: Path) -> None:
    """Write tiny denoisers in place of the demos' checkpoints, with a few of the demos' samples."""
    for name in ("demo-denoiser", "demo-several"):
        _tiny_checkpoint(folder / name)
    data = (DEMO_CHECKPOINT / "calibration.jsonl").read_text()
    few = "".join(f"{line}\n" for line in data.splitlines()[:8])
    (folder / "demo").mkdir()
    for name in (
        "demo-denoiser/calibration.jsonl",
        "demo-several/calibration.jsonl",
        "demo/heldout.jsonl",
    ):
        (folder / name).write_text(few)


def _follow(folders: dict[Path, Path], package: Path) -> list[Followed]:
    """Run the commands of pages, in order and each page in its folder, in one process.

    dlm_export is imported from the folder ``package``.
    """
    given, followed, built = [], list[tuple[Path, list[str]]](), dict[str, Path]()
    for page, folder in folders.items():
        for block in _blocks(page):
            if block.path is not None:
                (folder / block.path).write_text(block.text)
        for words in _commands(page):
            if _is_left_out(words):
                continue
            run = [PLACEHOLDERS.get(word, word) for word in words] + SHORTENED.get(words[1], [])
            # Tutorials compare no bundle with PyTorch. A bundle that an earlier tutorial built from
            # the same files is copied.
            if "build" in words and page in TUTORIALS:
                first = built.setdefault(shlex.join(words), folder)
                run = (
                    [*run, "--no-verify"]
                    if first == folder
                    else ["cp", "-r", f"{first}/build", "."]
                )
            given.append((str(folder), run))
            followed.append((page, words))
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, str(package), json.dumps(given), str(ROOT / "tests")],
        capture_output=True,
        text=True,
        env=environment,
        timeout=1200,
        check=False,
    )
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(results) == len(followed), done.stderr
    found = [
        Followed(page, shlex.join(words), *result)
        for (page, words), result in zip(followed, results, strict=True)
    ]
    failures = [f"$ {each.command}\nexit {each.code}\n{each.output}" for each in found if each.code]
    assert not failures, "\n".join(failures)
    return found


@pytest.fixture(scope="module")
def readme(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the commands of README run."""
    return tmp_path_factory.mktemp("readme")


@pytest.fixture(scope="module")
def tour(readme: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Followed]:
    """The commands of "Add a model family" and of README.

    The former must run first: they add a module to the package, which is imported only once.
    """
    family = tmp_path_factory.mktemp("family")
    package = family / "exporter" / "dlm_export"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "exporter" / "dlm_export", package, ignore=ignored)
    return _follow({NEW_FAMILY: family, README: readme}, package.parent)


def test_the_commands_of_readme_run(tour: list[Followed]) -> None:
    """The build compares the demo's bundle with PyTorch."""
    run = {each.command.split()[1]: each.output for each in tour if each.page == README}
    assert run.keys() == {"demo", "inspect", "build", "verify", "run"}
    assert "Parity with our torch denoiser holds" in run["build"]


@pytest.mark.slow
def test_the_commands_of_tutorials_run(tmp_path: Path) -> None:
    folders = {page: tmp_path / page.stem for page in TUTORIALS}
    for folder in folders.values():
        _examples(folder / "examples")
    assert {each.page for each in _follow(folders, ROOT / "exporter")} == {*TUTORIALS}


def test_a_family_is_added_as_its_page_says(tour: list[Followed]) -> None:
    output = {each.command: each.output for each in tour if each.page == NEW_FAMILY}
    inspected = output["dlm-export inspect tiny-example"]
    assert "tiny-example: example (" in inspected
    assert "does not know" not in inspected
    built = output["dlm-export build tiny-example -o tiny-bundle"]
    assert re.search(r"^Parity with .+ holds: ", built, re.MULTILINE)
    verified = output["dlm-export verify tiny-bundle --checkpoint tiny-example"]
    assert "Holds at fp32" in verified


@pytest.fixture(scope="module")
def readme_bundle(tour: list[Followed], readme: Path) -> Path:
    """The bundle that README builds."""
    return readme / PLACEHOLDERS["BUNDLE"]


@pytest.fixture(scope="module")
def place(
    readme_bundle: Path, several_bundle: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The folder in which the Python samples run. It has the bundles that the pages open."""
    folder = tmp_path_factory.mktemp("samples")
    (folder / "build").mkdir()
    for name in ("demo", "sapiens-heavy", "nemotron"):
        (folder / "build" / name).symlink_to(readme_bundle)
    (folder / "build" / "several").symlink_to(several_bundle)
    (folder / "examples").symlink_to(ROOT / "examples")
    return folder


@pytest.mark.parametrize("page", SAMPLES, ids=lambda page: page.stem)
def test_the_python_programs_of_a_page_run(
    page: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "import BaseModel" in page.read_text():
        pytest.importorskip("pydantic")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(place)
    monkeypatch.setenv("DLM_CACHE_DIR", str(place / "cache"))
    names: dict[str, Any] = {}
    for block in _blocks(page):
        if block.language == "python":
            exec(compile(block.text, page.name, "exec", dont_inherit=True), names)
    with names["bundle"]:
        assert names["bundle"].engine


def write_c_sample(folder: Path) -> str:
    """Write README's C program to ``app.c``.

    Returns the lines of README that compile the program, and one line that runs the program.
    """
    (folder / "app.c").write_text(
        next(block.text for block in _blocks(README) if block.language == "c")
    )
    spans = [
        span
        for span in _quoted(_prose(README))
        if span.startswith(("cc app.c ", "export DLM_ONNXRUNTIME="))
    ]
    assert len(spans) == 2
    return "\n".join([*spans, "./a.out"])


def test_the_tutorial_in_c_compiles_and_runs(readme_bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / "demo").symlink_to(readme_bundle)
    for block in _blocks(EMBED):
        if block.path is not None:
            (tmp_path / block.path).write_text(block.text)
    script = "".join(block.text for block in _blocks(EMBED) if block.language == "sh")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["sh", "-ec", script],
        cwd=tmp_path,
        env=os.environ | {"PATH": path, "DLM_CACHE_DIR": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    text, passes = done.stdout.splitlines()[-2:]
    assert json.loads(text)["name"] == "set_light"
    assert re.fullmatch(r"\d+ passes", passes)


def test_the_c_programs_compile_and_that_of_readme_runs(
    readme: Path, readme_bundle: Path, tmp_path: Path
) -> None:
    strict = [
        "gcc",
        "-std=c99",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-Wno-unused-function",
        f"-I{ROOT / 'runtime/native/include'}",
    ]
    for page in PAGES:
        for number, block in enumerate(block for block in _blocks(page) if block.language == "c"):
            source = tmp_path / f"{page.stem}{number}.c"
            source.write_text(f'#include <stdio.h>\n#include "dlm_runtime.h"\n{block.text}')
            subprocess.run([*strict, "-c", source, "-o", tmp_path / "any.o"], check=True)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    script = write_c_sample(readme)
    done = subprocess.run(
        ["sh", "-ec", script],
        cwd=readme,
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    with dlm_runtime.open(readme_bundle, threads=1) as bundle:
        wanted = bundle.generate(prompt="play jazz").text
    assert done.stdout == f"{wanted}\n"


# ---- Options and files in commands ----


def _cli(words: list[str]) -> click.Command:
    command = main.commands.get(words[1])
    assert command is not None, f"{shlex.join(words)}: one of {', '.join(main.commands)}"
    return command


def _options(command: click.Command) -> set[str]:
    return {"--help", "-h"} | {
        name
        for parameter in command.params
        for name in (*parameter.opts, *parameter.secondary_opts)
    }


def _check_pip(words: list[str]) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for word in words:
        found = re.search(r"^(?:\.|dlm-export)\[([\w,]+)\]$", word)
        for extra in found[1].split(",") if found else ():
            assert extra in extras, f"{shlex.join(words)}: no extra {extra}"
    if "-c" in words:
        assert words[words.index("-c") + 1] == "constraints.txt" or words[
            words.index("-c") + 1
        ].startswith("cmake.define.")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_line_is_one_that_its_program_takes(
    page: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test checks the options of ``dlm-export`` with their values, targets and precisions, the
    targets of ``make``, the extras of ``pip``, and files.
    """
    for kind in (options.CHECKPOINT, options.SOURCE, options.FILE):
        # The reader of the page provides the file, so the file need not exist in the repository.
        monkeypatch.setattr(kind, "exists", False)
    made = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for words in _commands(page):
        if words[0] == "dlm-export":
            context = _cli(words).make_context(words[1], words[2:])
            devices = (
                None
                if context.params.get("target") is None
                else targets.find_all(context.params["target"].split(","))
            )
            precision = context.params.get("precision")
            if devices is not None and precision is not None and not precision.endswith(".toml"):
                targets.recipe_for(devices, precision)
        elif words[0] == "make":
            assert set(words[1:]) <= set(made), shlex.join(words)
        elif words[:2] == ["pip", "install"]:
            _check_pip(words)
        elif words[0] == "cmake" and "-S" in words:
            assert (ROOT / words[words.index("-S") + 1] / "CMakeLists.txt").is_file(), shlex.join(
                words
            )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_and_option_in_the_text_exists(page: Path) -> None:
    known = {name for command in main.commands.values() for name in _options(command)}
    programs = [
        ROOT / "examples" / "embed" / "serve" / "main.c",
        *(ROOT / "benchmarks").rglob("*.py"),
    ]
    others = {name for path in programs for name in re.findall(r'"(--[\w-]+)"', path.read_text())}
    others |= LM_EVAL
    for span in _quoted(_prose(page)):
        words = span.split()
        if words[0] == "dlm-export" and len(words) > 1 and words[1] != "COMMAND":
            missing = {word for word in words if re.match(r"--\w", word)} - _options(_cli(words))
            assert not missing, span
        elif words[0] in main.commands and len(words) > 1 and words[1].startswith("--"):
            assert words[1] in _options(main.commands[words[0]]), span
        elif words[0].startswith("--"):
            assert words[0] in known | others, f"{span}: no command has it"
        elif words[0] == "pip":
            _check_pip([word.strip("'") for word in words])


# ---- The text of pages ----


def _slugs(page: Path) -> Iterator[str]:
    for heading in re.findall(r"^#+ (.+)$", _prose(page), re.MULTILINE):
        yield re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", _prose(page)):
        if link.startswith("https://"):
            continue
        name, _, anchor = link.partition("#")
        found = (page.parent / name).resolve() if name else page
        assert found.exists(), link
        assert found.is_relative_to(ROOT), link
        if found.suffix == ".webp":  # only shown in one colour scheme
            assert anchor in ("only-light", "only-dark"), link
            continue
        assert not anchor or anchor in _slugs(found), link


def _linked(page: Path) -> set[Path]:
    return {
        (page.parent / link.partition("#")[0]).resolve()
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text())
        if not link.startswith("https://")
    }


def test_readme_leads_to_the_index_and_that_to_every_page() -> None:
    index = SITE / "index.md"
    assert index in _linked(README)
    missing = {*DOCS} - _linked(index) - {index}
    assert not missing, missing


def test_readme_lists_the_families() -> None:
    listed = [name for row in _table(README, "family") for name in _quoted(row[1])]
    assert sorted(listed) == sorted(
        name for family in FAMILIES.values() for name in family.architectures
    )


def test_decoding_lists_the_policies() -> None:
    page = SITE / "reference" / "policies.md"
    assert [_quoted(row[0])[0] for row in _table(page, "preset")] == list(PRESETS)
    rows = {_quoted(row[0])[0]: row[1] for row in _table(page, "field")}
    assert rows.keys() == {field.name for field in fields(Policy)}
    for name, said in rows.items():
        default = getattr(Policy(), name)
        if isinstance(default, str):
            known = schema()["$defs"]["preset"]["properties"][name]
            assert sorted(_quoted(said)) == sorted(known["enum"]), name
            assert _quoted(said)[0] == default, name
        else:
            shown = re.search(r"\(([\d.]+)", said) or re.search(r"([\d.]+)", said)
            assert shown is not None
            assert float(shown[1]) == default, name


def test_the_bundle_page_names_the_keys_and_ports_of_the_schema() -> None:
    page = SITE / "reference" / "bundle.md"
    keys = schema()["properties"]
    assert {name for row in _table(page, "key") for name in _quoted(row[0])} == keys.keys()
    loop = keys["loop"]["properties"]
    assert all(
        re.search(rf"`{name}`", page.read_text()) for name in (*loop, *loop["graph"]["properties"])
    )
    ports = loop["graph"]["properties"]["ports"]["properties"]
    listed = {name.removesuffix(".i") for row in _table(page, "port") for name in _quoted(row[0])}
    held = {*ports["layers"]["items"]["properties"]} - {"kv_heads", "head_size", "window"}
    assert listed == {*ports} - {"layers"} | held


def test_the_messages_of_troubleshooting_are_in_the_source() -> None:
    sources = [
        *(ROOT / "exporter").rglob("*.py"),
        *(ROOT / "runtime").rglob("*.py"),
        *(ROOT / "runtime").rglob("*.cc"),
    ]
    text = "\n".join(path.read_text() for path in sources)
    symptoms = re.findall(
        r"^\| (`.+?) \| ", (SITE / "guides" / "troubleshooting.md").read_text(), re.MULTILINE
    )
    assert len(symptoms) > 15
    for message in (message for symptom in symptoms for message in _quoted(symptom)):
        for part in re.split(r" ?… ?", message.removeprefix("target ").removesuffix(" nvfp4")):
            assert part in text, message


def test_developing_lists_the_packages() -> None:
    packages = [_quoted(row[0])[0] for row in _table(SITE / "guides" / "developing.md", "package")]
    assert sorted(packages) == sorted(
        path.parent.name for path in (ROOT / "exporter" / "dlm_export").glob("*/__init__.py")
    )


def test_the_files_that_developing_names_exist() -> None:
    """The page for developers must not name a file that was deleted."""
    roots = [
        ROOT,
        ROOT / "exporter" / "dlm_export",
        ROOT / "runtime" / "dlm_runtime",
        ROOT / "runtime" / "native" / "src",
        ROOT / "calibration",
        ROOT / "tests",
    ]
    page = (SITE / "guides" / "developing.md").read_text()
    named = set(re.findall(r"`([\w./-]+\.(?:py|cc|h|md))`", page))
    assert len(named) > 40
    missing = sorted(
        name
        for name in named
        if not any((root / name).exists() for root in roots)
        and not list(ROOT.glob(f"runtime/**/{name}"))
        and not list(ROOT.glob(f"exporter/**/{name}"))
    )
    assert missing == []
