"""Runs the GPU benchmark on a CPU with a tiny network.

The benchmark's steps are the same as on a GPU.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "gpu" / "run.py"


def _run(*options: str | Path) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        str(SCRIPT),
        "--device",
        "cpu",
        "--tiny",
        "--new",
        "16",
        "--prompt",
        "9",
        "--block",
        "8",
    ]
    return subprocess.run(
        [*command, "--rounds", "1", *map(str, options)], capture_output=True, text=True, timeout=600
    )


def test_the_rehearsal_measures_both_loops_of_both_contestants_and_they_agree(
    tmp_path: Path,
) -> None:
    out = tmp_path / "gpu.json"
    done = _run("--precision", "fp16", "--tokens-per-pass", "2", "--work", tmp_path, "--json", out)
    assert done.returncode == 0, done.stderr
    told = json.loads(out.read_text())
    assert told["request"]["precision"] == "fp16"
    rows = {(row["contestant"], row["cache"]): row for row in told["rows"]}
    assert set(rows) == {
        (who, cache) for who in ("native", "torch-eager") for cache in ("none", "dual")
    }
    for (who, _), row in rows.items():
        assert row["nfe"] == 16 / 2
        assert row["ms_per_pass"] > 0
        assert row["memory_bytes"] > 1 << 20
        assert row["equal"] == 1.0 if who == "torch-eager" else row["equal"] >= 0.8, row
    assert rows["native", "dual"]["engine"].startswith("onnxruntime ")
    assert len(done.stdout.splitlines()) == 1 + len(rows)
    # A second run must reuse the files of the first run. For a contestant that cannot run, the
    # result contains the reason.
    before = (tmp_path / "bundle-fp16" / "manifest.json").stat().st_mtime_ns
    (tmp_path / "bundle-fp16" / "denoiser.onnx").write_bytes(b"")
    failed = _run("--precision", "fp16", "--work", tmp_path, "--contestants", "native")
    assert failed.returncode == 1
    assert "denoiser.onnx" in failed.stdout
    assert (tmp_path / "bundle-fp16" / "manifest.json").stat().st_mtime_ns == before
