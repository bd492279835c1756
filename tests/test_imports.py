"""Tests of an installation without extras: imports are fast, and bundles run."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

EXPORTER = Path(__file__).parent.parent / "exporter" / "dlm_export"
# The packages and modules directly in dlm_export, called rooms. A room may import only from rooms
# in its own set and in the sets above.
ROOMS = (
    {
        "devices",
        "engines",
        "machine",
        "memory",
        "opening",
        "outputs",
        "processors",
        "progress",
        "signals",
        "targets",
        "workplace",
    },
    {"charts"},
    {"network"},
    {"bundle"},
    {"text"},
    {"checkpoints"},
    {"graph"},
    {"tensorrt"},
    {"doctor"},
    {"families"},
    {"sources"},
    {"quantising"},
    {"judging"},
    {"lm_eval"},
    {"planning"},
    {"building"},
    {"build"},
    {"cli"},
)
JUDGING = ("report", "sides", "parity", "accuracy", "tuning", "precision_search")
"""The same for the folders of the package ``judging``."""
HEAVY = ("torch", "onnx", "onnx_ir", "onnxscript", "transformers", "safetensors", "ml_dtypes")
BLOCKED = f"""
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {HEAVY!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Block())
from dlm_export.cli import main
main()
"""


def _python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=120, check=False
    )


def test_importing_the_runtime_imports_no_heavy_package() -> None:
    done = _python("-X", "importtime", "-c", "import dlm_runtime")
    assert done.returncode == 0
    modules = {line.rpartition("|")[2].strip().split(".")[0] for line in done.stderr.splitlines()}
    assert "dlm_runtime" in modules
    assert not modules & {
        *HEAVY,
        "onnxruntime",
        "tokenizers",
        "jinja2",
        "dlm_export",
        "dlm_calibration",
    }


def test_a_base_install_needs_no_heavy_package() -> None:
    """The test checks all direct and indirect requirements of the project without extras."""
    from packaging.requirements import Requirement

    project = tomllib.loads((EXPORTER.parent.parent / "pyproject.toml").read_text())["project"]
    waiting, found = [(Requirement(text), "") for text in project["dependencies"]], set()
    while waiting:
        requirement, extra = waiting.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        if (requirement.name, *requirement.extras) in found:
            continue
        found.add((requirement.name, *requirement.extras))
        for wanted in requirement.extras or {""}:
            waiting += [
                (Requirement(text), wanted) for text in metadata.requires(requirement.name) or []
            ]
    names = {name.replace("-", "_") for name, *_ in found}
    assert {"onnxruntime", "numpy"} <= names
    assert not names & {*HEAVY}


def test_the_exporters_own_onnxruntime_leaves_nothing_in_the_home_folder(tmp_path: Path) -> None:
    # ONNX Runtime disables telemetry if the variable CI is set, as on a build server. Unset CI, so
    # that only this project can disable telemetry.
    clean = [
        "env",
        *(f"--unset={name}" for name in ("ORT_DISABLE_TELEMETRY", "CI", "XDG_CACHE_HOME")),
        f"HOME={tmp_path}",
    ]
    subprocess.run(
        [*clean, sys.executable, "-c", "import dlm_export, onnxruntime"], timeout=120, check=True
    )
    assert list(tmp_path.iterdir()) == []


def test_run_needs_only_the_base_install(llada_bundle: Path) -> None:
    done = _python(
        "-c",
        BLOCKED,
        "run",
        str(llada_bundle),
        "--tokens",
        "1,2",
        "--max-new-tokens",
        "4",
        "--threads",
        "1",
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) == 6


MISSING = {
    "inspect": ("NOWHERE",),
    "build": ("NOWHERE", "-o", "OUT"),
    "quantize": ("NOWHERE", "-o", "OUT"),
    "engine": ("NOWHERE", "--target", "thor"),
    "verify": ("BUNDLE", "--checkpoint", "NOWHERE"),
    "compare": ("BUNDLE", "NOWHERE"),
    "capture": ("NOWHERE", "-o", "OUT.npz"),
    "run": ("NOWHERE", "--tokens", "1"),
    "doctor": ("NOWHERE",),
    "bench": ("NOWHERE",),
    "plan": ("NOWHERE", "--targets", "cpu"),
    "build --calib": ("CHECKPOINT", "-o", "OUT", "--precision", "int8", "--calib", "NOWHERE"),
    "quantize --calib": ("CHECKPOINT", "-o", "OUT", "--calib", "NOWHERE"),
    "build --precision": ("CHECKPOINT", "-o", "OUT", "--precision", "NOWHERE.toml"),
    "verify --data": ("BUNDLE", "--checkpoint", "CHECKPOINT", "--data", "NOWHERE"),
    "verify --prompts": ("BUNDLE", "--checkpoint", "CHECKPOINT", "--prompts", "NOWHERE"),
    "verify --golden": ("BUNDLE", "--golden", "NOWHERE"),
    "compare --data": ("BUNDLE", "BUNDLE", "--data", "NOWHERE"),
    "capture --prompts": ("CHECKPOINT", "-o", "OUT.npz", "--prompts", "NOWHERE"),
    "plan --measured": ("--sizes", "8B", "--targets", "cpu", "--measured", "NOWHERE"),
}


def test_what_is_missing_is_said_before_anything_is_loaded(
    llada_bundle: Path, llada_checkpoint: Path, tmp_path: Path
) -> None:
    """Each command gets the path of a missing file, in an installation without extras.

    The command must report the missing file, although the extra that it needs is missing too. All
    commands run in one process.
    """
    paths = {
        "NOWHERE": tmp_path / "nowhere",
        "OUT": tmp_path / "out",
        "BUNDLE": llada_bundle,
        "CHECKPOINT": llada_checkpoint,
    }
    commands = []
    for name, arguments in MISSING.items():
        filled = list(arguments)
        for word, path in paths.items():
            filled = [re.sub(rf"^{word}\b", str(path), each) for each in filled]
        commands.append([name.split()[0], *filled])
    each = "from click.testing import CliRunner\nimport json\nfor arguments in json.loads(sys.argv[1]):\n"
    each += "    done = CliRunner().invoke(main, arguments)\n    print(json.dumps([done.exit_code, done.output]))"
    done = _python("-c", BLOCKED.replace("main()", each), json.dumps(commands))
    assert done.returncode == 0, done.stderr
    for command, line in zip(commands, done.stdout.splitlines(), strict=True):
        code, said = json.loads(line)
        assert code == 2, (command, said)
        assert "nowhere" in said.splitlines()[-1], (command, said)
        assert any(words in said for words in ("does not exist", "no such file")), (command, said)
        assert "export extra" not in said, command
    assert os.listdir(tmp_path) == []


def test_two_bundles_are_compared_in_a_base_install(llada_bundle: Path, dream_bundle: Path) -> None:
    options = ("--judged", "2", "--threads", "1", "--json")
    done = _python("-c", BLOCKED, "compare", str(llada_bundle), str(llada_bundle), *options)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["overall"]["ce_increase"] == 0
    assert sum(row["committed"] for row in found["frontier"]["buckets"]) > 0
    assert all(row["flips"] == 0 for row in found["frontier"]["buckets"])
    other = _python("-c", BLOCKED, "compare", str(llada_bundle), str(dream_bundle), *options)
    assert other.returncode == 2, other.stderr


def _rooms_imported(path: Path, package: str = "dlm_export") -> Iterator[tuple[int, str]]:
    """Yield the line number and the imported room of each import of ``package`` in a file.

    A room is a package or module directly in ``package``. Imports inside functions are included.
    Imports under ``if TYPE_CHECKING`` are not.
    """
    tree = ast.parse(path.read_text())
    for_types = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If)
        and isinstance(node.test, ast.Name)
        and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.ImportFrom) and node not in for_types:
            assert node.level == 0, (
                f"{path}:{node.lineno}: imports are written with the room's name"
            )
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import) and node not in for_types:
            names = [alias.name for alias in node.names]
        for name in names:
            if name.startswith(f"{package}."):
                yield node.lineno, name.removeprefix(f"{package}.").partition(".")[0]


def test_rooms_of_the_exporter_import_one_way() -> None:
    rank = {name: place for place, names in enumerate(ROOMS) for name in names}
    files = [path for path in EXPORTER.rglob("*.py") if path != EXPORTER / "__init__.py"]
    room_of = {path: path.relative_to(EXPORTER).parts[0].removesuffix(".py") for path in files}
    assert {*room_of.values()} == rank.keys(), "every room has its place in ROOMS"
    backwards = [
        f"{path.relative_to(EXPORTER)}:{line}: {room_of[path]} imports {room}"
        for path in files
        for line, room in _rooms_imported(path)
        if rank[room] > rank[room_of[path]]
    ]
    assert not backwards


def test_folders_of_judging_import_one_way() -> None:
    judging = EXPORTER / "judging"
    assert {path.parent.name for path in judging.glob("*/__init__.py")} == {*JUDGING}
    backwards = [
        f"{path.relative_to(judging)}:{line}: imports {folder}"
        for path in judging.glob("*/*.py")
        for line, folder in _rooms_imported(path, "dlm_export.judging")
        if JUDGING.index(folder) > JUDGING.index(path.parent.name)
    ]
    assert not backwards


def test_without_the_server_and_triton_only_their_commands_are_missing() -> None:
    runtime = EXPORTER.parent.parent / "runtime" / "dlm_runtime"
    for path in (*EXPORTER.rglob("*.py"), *runtime.rglob("*.py")):
        for package in ("dlm_serve", "dlm_triton"):
            assert not [*_rooms_imported(path, package)], path
    listed = "import sys\nsys.modules.update(dict.fromkeys(sys.argv[1:]))\n"
    listed += "from dlm_export.cli import main\nprint(*main.commands)"
    whole, rest = _python("-c", listed), _python("-c", listed, "dlm_serve", "dlm_triton")
    assert rest.returncode == 0, rest.stderr
    assert {*whole.stdout.split()} - {*rest.stdout.split()} == {"serve", "triton"}


LIGHT = [
    "dlm_export.graph",
    "dlm_export.judging.accuracy.run",
    "dlm_export.quantising.samples",
    "dlm_export.planning.plan",
    "dlm_export.planning.bench",
    "dlm_export.cli.app",
]
LIGHT += [
    f"dlm_export.{room}.{path.stem}"
    for room in ("tensorrt", "doctor")
    for path in sorted((EXPORTER / room).glob("[!_]*.py"))
]


def test_what_a_board_needs_imports_neither_torch_nor_onnx() -> None:
    done = _python(
        "-c",
        "import importlib, sys\n"
        f"for module in {LIGHT!r}:\n"
        "    importlib.import_module(module)\n"
        f"    assert not {{*{HEAVY!r}}} & {{*sys.modules}}, module",
    )
    assert done.returncode == 0, done.stderr
