"""Tests of ``release/wheels.py``.

``release/wheels.py`` first prints the names of wheels that it cannot build on this machine. Then it
builds the other wheels.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parent.parent / "release" / "wheels.py"


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module, which behaves as on an x86-64 machine.

    Instead of building wheels, the script writes small files and prints their names.
    """
    spec = importlib.util.spec_from_file_location("wheels", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def run(*command: str | Path) -> str:
        print("built: sdist", file=sys.stderr)
        (Path(command[command.index("--outdir") + 1]) / "dlm.tar.gz").write_text("sdist")
        return ""

    def build_wheel(sdist: Path, architecture: str, folder: Path) -> Path:
        print(f"built: {architecture}", file=sys.stderr)
        wheel = folder / f"dlm-{architecture}.whl"
        wheel.write_text(sdist.read_text())
        return wheel

    for name, value in {"DIST": tmp_path / "dist", "run": run, "build_wheel": build_wheel}.items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(module.platform, "machine", lambda: "x86_64")
    return module


def _without_compiler(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, is_missing: bool
) -> None:
    monkeypatch.setattr(
        module.shutil, "which", lambda name: None if is_missing else f"/usr/bin/{name}"
    )


def test_without_the_cross_compiler_the_rest_is_built_and_the_exit_says_what_is_missing(
    wheels: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    _without_compiler(wheels, monkeypatch, True)
    monkeypatch.setattr(sys, "argv", ["wheels.py"])
    with pytest.raises(SystemExit) as ended:
        wheels.main()
    why = "aarch64-linux-gnu-g++ is missing: apt-get install g++-aarch64-linux-gnu"
    assert (
        ended.value.code == f"Not built: the wheel for aarch64 ({why})"
    )  # sys.exit with a text exits with status 1
    assert capsys.readouterr().err.splitlines() == [
        f"No wheel for aarch64: {why}",
        "built: sdist",
        "built: x86_64",
    ]
    assert sorted(path.name for path in (tmp_path / "dist").iterdir()) == [
        "dlm-x86_64.whl",
        "dlm.tar.gz",
    ]


def test_both_wheels_are_built_with_the_cross_compiler(
    wheels: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _without_compiler(wheels, monkeypatch, False)
    monkeypatch.setattr(sys, "argv", ["wheels.py"])
    wheels.main()
    assert sorted(path.name for path in (tmp_path / "dist").iterdir()) == [
        "dlm-aarch64.whl",
        "dlm-x86_64.whl",
        "dlm.tar.gz",
    ]
