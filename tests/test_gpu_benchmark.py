"""Runs the GPU benchmark on a CPU with a tiny network.

The benchmark's steps are the same as on a GPU.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.slow
def test_the_rehearsal_measures_both_loops_of_both_contestants_and_they_agree(
    tmp_path: Path,
) -> None:
    out = tmp_path / "gpu.json"
    contestants = ("--contestants", "native-fp16,torch-eager")
    done = _run(
        "--tokens-per-pass",
        "2",
        "--batches",
        "1,3",
        "--work",
        tmp_path,
        "--json",
        out,
        *contestants,
    )
    assert done.returncode == 0, done.stderr
    rows = {
        (row["contestant"], row["cache"], row["batch"]): row
        for row in json.loads(out.read_text())["rows"]
    }
    assert set(rows) == {
        *(("native-fp16", cache, batch) for cache in ("none", "dual") for batch in (1, 3)),
        *(("torch-eager", cache, 1) for cache in ("none", "dual")),
    }
    for (who, _, batch), row in rows.items():
        assert row["nfe"] == 16 / 2
        assert row["ms_per_pass"] > 0
        assert row["single_pass_ms"] > 0
        assert row["tokens_per_s"] == pytest.approx(batch * 16 / row["seconds"])
        assert row["memory_bytes"] > 1 << 20
        assert row["equal"] == 1.0 if who == "torch-eager" else row["equal"] >= 0.8, row
    assert rows["native-fp16", "dual", 1]["engine"].startswith("onnxruntime ")
    assert len(done.stdout.splitlines()) == 1 + len(rows)
    # A second run must reuse the files of the first run. For a contestant that cannot run, the
    # result contains the reason.
    before = (tmp_path / "bundle-fp16" / "manifest.json").stat().st_mtime_ns
    (tmp_path / "bundle-fp16" / "denoiser.onnx").write_bytes(b"")
    failed = _run("--work", tmp_path, "--contestants", "native-fp16")
    assert failed.returncode == 1
    assert "denoiser.onnx" in failed.stdout
    assert (tmp_path / "bundle-fp16" / "manifest.json").stat().st_mtime_ns == before


@pytest.mark.slow
def test_the_check_compares_all_kinds_of_requests(tmp_path: Path) -> None:
    script = SCRIPT.with_name("check.py")
    out = tmp_path / "check.json"
    options = ("--families", "llada,sdar", "--precisions", "fp16", "--json", str(out))
    command = [sys.executable, str(script), "--provider", "cpu", *options]
    subprocess.run(command, check=True, capture_output=True, timeout=600)
    for row in json.loads(out.read_text()):
        assert row["range"] == 0
        assert set(row["tokens"].values()) <= {1.0, "same error"}
