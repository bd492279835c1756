"""What a base install is: light to import, and enough to run a bundle."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=120, check=False)


def test_importing_the_runtime_imports_no_heavy_package() -> None:
    done = _python("-X", "importtime", "-c", "import dlm_runtime")
    assert done.returncode == 0
    modules = {line.rpartition("|")[2].strip().split(".")[0] for line in done.stderr.splitlines()}
    assert "dlm_runtime" in modules
    assert not modules & {*HEAVY, "onnxruntime", "tokenizers", "jinja2", "dlm_export", "dlm_calibration"}


def test_the_calibration_package_does_not_import_the_exporter() -> None:
    done = _python("-X", "importtime", "-c", "import dlm_calibration.states")
    modules = {line.rpartition("|")[2].strip().split(".")[0] for line in done.stderr.splitlines()}
    assert not modules & {*HEAVY, "dlm_export"}


def test_run_needs_only_the_base_install(llada_bundle: Path) -> None:
    done = _python("-c", BLOCKED, "run", str(llada_bundle), "--tokens", "1,2", "--max-new-tokens", "4", "--threads", "1")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) == 6


def test_a_command_that_needs_the_export_extra_says_so(llada_checkpoint: Path, tmp_path: Path) -> None:
    done = _python("-c", BLOCKED, "build", str(llada_checkpoint), "-o", str(tmp_path / "bundle"))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith("this command needs the export extra: pip install 'dlm-export[export]'")
    assert not (tmp_path / "bundle").exists()
