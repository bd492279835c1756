"""Tests that ``optimum-cli export dlm`` has the options, results and exit codes of ``dlm-export
build``.

Tests that run ``optimum-cli`` are skipped if optimum is not installed. Other tests check how the
arguments of ``optimum-cli`` are converted.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import click
import pytest

from dlm_export.cli.building import build

ROOT = Path(__file__).parent.parent


def _has_optimum() -> bool:
    try:
        return importlib.util.find_spec("optimum.commands.optimum_cli") is not None
    except ModuleNotFoundError:
        return False


needs_optimum = pytest.mark.skipif(
    not _has_optimum(), reason="the package optimum is not installed"
)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module ``dlm_export.cli.optimum``, imported with a fake package ``optimum``."""
    base = ModuleType("optimum.commands.base")
    base.BaseOptimumCLICommand = object  # type: ignore[attr-defined]
    base.CommandInfo = SimpleNamespace  # type: ignore[attr-defined]
    for name, module in (
        ("optimum", ModuleType("optimum")),
        ("optimum.commands", ModuleType("optimum.commands")),
        ("optimum.commands.base", base),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "dlm_export.cli.optimum", raising=False)
    yield importlib.import_module("dlm_export.cli.optimum")
    del sys.modules["dlm_export.cli.optimum"]


def _through_optimum(command: ModuleType, arguments: list[str]) -> list[str]:
    parser = ArgumentParser(prog="optimum-cli")
    command.DlmExportCommand.parse_args(parser)
    translated: list[str] = command.build_arguments(parser.parse_args(arguments))
    return translated


def _parsed(arguments: list[str]) -> dict[str, Any]:
    return build.make_context("build", arguments).params


def _example(option: click.Option) -> list[str]:
    """Return command-line words that set an option to an allowed value other than the default."""
    if option.is_flag:
        return [(option.secondary_opts or option.opts)[-1]]
    kind = option.type
    if isinstance(kind, click.Choice):
        return [option.opts[-1], str(list(kind.choices)[-1])]
    if isinstance(kind, (click.types.IntParamType, click.types.FloatParamType)):
        return [option.opts[-1], "1"]
    if option.name == "memory":
        return [option.opts[-1], "1.5GiB"]
    if option.name == "resume":
        return [option.opts[-1], "-odd new=%s"]
    return [option.opts[-1], "-odd value=%s"]


@pytest.fixture
def _there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Create the input files that the arguments name."""
    monkeypatch.chdir(tmp_path)
    for folder in ("c", "-c", "the checkpoint"):
        (tmp_path / folder).mkdir()
    (tmp_path / "-odd value=%s").touch()


OPTIONS = [
    parameter
    for parameter in build.params
    if isinstance(parameter, click.Option) and parameter.name != "output"
]


@pytest.mark.usefixtures("_there")
@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_every_option_of_build_comes_through_with_its_value(
    command: ModuleType, option: click.Option
) -> None:
    example = _example(option)
    flag, *value = example
    if value and value[0].startswith("-"):
        # argparse would treat a value that starts with "-" as an option
        example = [f"{flag}={value[0]}"]
    translated = _through_optimum(command, [*example, "the checkpoint", "out"])
    assert translated[0] == "build"
    expected = _parsed([*example, "-o", "out", "the checkpoint"])
    assert _parsed(translated[1:]) == expected
    assert expected[str(option.name)] != option.get_default(click.Context(build))


@pytest.mark.usefixtures("_there")
def test_options_that_are_not_given_keep_builds_defaults(command: ModuleType) -> None:
    assert _through_optimum(command, ["c", "out"]) == ["build", "--output=out", "--", "c"]
    assert _parsed(_through_optimum(command, ["c", "out"])[1:]) == _parsed(["c", "-o", "out"])


@pytest.mark.usefixtures("_there")
def test_folders_that_look_like_options_are_folders(command: ModuleType) -> None:
    parsed = _parsed(_through_optimum(command, ["--", "-c", "--force"])[1:])
    assert (parsed["checkpoint"], parsed["output"], parsed["force"]) == (
        Path("-c"),
        Path("--force"),
        False,
    )


# ---- With optimum ----


def _optimum_cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    paths = [str(ROOT / "exporter"), *(path for path in sys.path if path)]
    return subprocess.run(
        [sys.executable, "-m", "optimum.commands.optimum_cli", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
    )


@needs_optimum
def test_optimum_lists_the_export() -> None:
    assert "Export a diffusion language model" in _optimum_cli("export", "--help").stdout


@needs_optimum
@pytest.mark.slow
def test_optimum_builds_a_bundle(llada_checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "bundle"
    done = _optimum_cli(
        "export", "dlm", str(llada_checkpoint), str(out), "--precision", "fp16", "--no-verify"
    )
    assert done.returncode == 0, done.stderr
    assert (out / "manifest.json").is_file()
    assert "denoiser.onnx" in done.stdout


@needs_optimum
@pytest.mark.parametrize(
    ("options", "says"),
    [(["--precision", "fp3"], "no-such-folder"), (["--judged", "many"], "'--judged'")],
    ids=["precision", "usage"],
)
def test_failures_keep_their_exit_codes(tmp_path: Path, options: list[str], says: str) -> None:
    done = _optimum_cli(
        "export", "dlm", str(tmp_path / "no-such-folder"), str(tmp_path / "out"), *options
    )
    assert (done.returncode, says in done.stderr.splitlines()[-1]) == (2, True), done.stderr
    assert not (tmp_path / "out").exists()
