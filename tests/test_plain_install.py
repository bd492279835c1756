"""Runs the commands of README and of the page about examples after ``pip install .``.

The virtual environment and the home folder are new, so there is no cache. test_docs.py runs the
commands that build bundles, because they need the ``export`` extra.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from test_docs import PLACEHOLDERS, README, ROOT, _blocks, _commands, write_c_sample
from test_embed import found
from test_imports import HEAVY

pytestmark = pytest.mark.slow

EMBED = ROOT / "examples" / "embed" / "README.md"
NOT_COPIED = (
    ".git",
    ".venv",
    "build",
    "dist",
    "target",
    "__pycache__",
    "*.egg-info",
    ".*_cache",
    ".hypothesis",
)
PROGRAMS = ("cmake", "pkg-config", "cargo", "go")

# Maps a required program to commands of the page about examples that need this program. Each
# command is given by its first characters.
EXAMPLES = {
    "cc": ("cc -std=c99 examples/embed/generate.c $(dlm-export",),
    "pkg-config": ('export PKG_CONFIG_PATH="$HOME', "cc -std=c99 examples/embed/generate.c $(pkg-config"),
    "cmake": ("cmake -S examples/embed", "cmake --build build/embed", *(f"build/embed/{name} build/demo" for name in
              ("generate", "cancel", "threads", "converse"))),
    "cargo": ('export PKG_CONFIG_PATH="$(dlm', "cargo build", "dlm-export compile", "build/rust/"),
    "go": ('export PKG_CONFIG_PATH="$(dlm', "(cd runtime/bindings/go", "dlm-export compile", "build/go/"),
}  # fmt: skip


@pytest.fixture(scope="module")
def plain(demo_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """A function that runs a shell script in a copy of the repository and returns the output.

    The copy also contains the demo's bundle.
    """
    folder = tmp_path_factory.mktemp("plain")
    tree, venv, home, tools = (folder / name for name in ("tree", "venv", "home", "tools"))
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(*NOT_COPIED))
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    pip = [
        venv / "bin" / "python",
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        ".",
    ]
    subprocess.run(pip, cwd=tree, check=True, stdout=sys.stderr)
    shutil.rmtree(tree / "build", ignore_errors=True)  # the files that the installation compiled
    shutil.copytree(demo_bundle, tree / PLACEHOLDERS["BUNDLE"])
    home.mkdir()
    tools.mkdir()
    here = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    for name in PROGRAMS:
        if (program := shutil.which(name, path=here)) is not None:
            (tools / name).symlink_to(program)
    real = Path.home()
    environment = {
        "HOME": str(home),
        "PATH": os.pathsep.join(
            [str(venv / "bin"), str(tools), "/usr/local/bin", "/usr/bin", "/bin"]
        ),
        "CARGO_HOME": os.environ.get("CARGO_HOME", str(real / ".cargo")),
        "RUSTUP_HOME": os.environ.get("RUSTUP_HOME", str(real / ".rustup")),
        "GOPROXY": "off",
    }

    def run(script: str) -> str:
        done = subprocess.run(
            ["sh", "-ec", script],
            cwd=tree,
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, (
            f"{script}\nexit {done.returncode}\n{done.stdout}\n{done.stderr}"
        )
        return done.stdout

    # The page about examples assumes that the library is installed in $HOME/dlm.
    (home / "dlm").symlink_to(run("dlm-export embed --prefix").strip())
    return run


def test_a_plain_install_holds_no_heavy_package(plain: Callable[[str], str]) -> None:
    listed = {
        each["name"].lower().replace("-", "_")
        for each in json.loads(plain("python -m pip list --format json"))
    }
    assert "onnxruntime" in listed
    assert not listed & {*HEAVY}


def test_the_commands_of_readme_that_run_a_bundle_run(plain: Callable[[str], str]) -> None:
    commands = [
        words
        for words in _commands(README)
        if words[0] == "dlm-export" and "CHECKPOINT" not in words
    ]
    ours = [words for words in commands if "--golden" not in words]
    assert {words[1] for words in ours} == {"run"}
    for words in ours:
        given = [PLACEHOLDERS.get(word, word) for word in words]
        assert plain("\n".join([subprocess.list2cmdline(given)]))


def test_the_python_program_of_readme_runs(plain: Callable[[str], str]) -> None:
    program = next(block.text for block in _blocks(README) if block.language == "python")
    out = plain(f"python - <<'END'\n{program}\nEND")
    assert '{"name":"set_light","arguments":{"room":"kitchen","state":"on"}}' in out
    # The streamed text, which is the last line, is one object.
    assert isinstance(json.loads(out.splitlines()[-1]), dict)


def test_the_c_program_of_readme_runs(plain: Callable[[str], str]) -> None:
    tree = Path(plain("pwd").strip())
    assert plain(write_c_sample(tree)) == '{"name":"play_music","arguments":{"query":"jazz"}}\n'


@pytest.mark.parametrize("program", EXAMPLES)
def test_the_examples_build_and_run_as_their_page_says(
    plain: Callable[[str], str], program: str
) -> None:
    if program in PROGRAMS:
        found(program)
    lines = [
        line
        for block in _blocks(EMBED)
        if block.language == "sh"
        for line in block.text.replace("\\\n", " ").splitlines()
    ]

    def line_of(start: str) -> str:
        (line,) = [line for line in lines if line.startswith(start)]
        return line

    script = [line_of("export DLM_ONNXRUNTIME"), "mkdir -p build", "rm -f build/object.automaton"]
    script += [line_of(start) for start in EXAMPLES[program]]
    if program in ("cc", "pkg-config"):
        script.append("build/generate build/demo 64 'play jazz'")
    assert '{"name":"play_music","arguments":{"query":"jazz"}}' in plain("\n".join(script))
