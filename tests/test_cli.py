"""Tests of the command line as a user sees it: its output, the format of the output, and exit
codes.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from dlm_export.cli import main
from dlm_export.cli.printing import print_json


def invoke(*arguments: object, text: str | None = None) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments], input=text)


def test_inspect_counts_parameters_and_memory(dream_checkpoint: Path) -> None:
    told = json.loads(invoke("inspect", dream_checkpoint, "--json").stdout)
    # The denoiser has two matrices of 160 x 64, a final norm, and two layers. A layer has q, k and
    # v with biases, out, gate, up, down, and two norms.
    layer = 64 * 64 + 64 + 2 * (64 * 32 + 32) + 64 * 64 + 3 * 64 * 96 + 2 * 64
    assert told["parameters"] == 2 * 160 * 64 + 64 + 2 * layer
    assert told["stored_bytes"] == 2 * told["parameters"]
    assert told["memory"]["fp16"]["weights_bytes"] == 2 * told["parameters"]
    assert told["memory"]["fp32"]["cache_bytes_per_token"] == 2 * 2 * 2 * 16 * 4
    assert told["network"]["shift"] == 1
    human = invoke("inspect", dream_checkpoint).stdout
    assert f"{told['parameters']:,} parameters" in human
    assert "DiffuCoder" in human


def test_build_prints_stages_sizes_and_parity(llada_checkpoint: Path, tmp_path: Path) -> None:
    result = invoke("build", llada_checkpoint, "-o", tmp_path / "bundle", "--max-canvas-length", 64)
    assert result.exit_code == 0, result.output
    for word in (
        "trace graph",
        "write weights",
        "denoiser.onnx.data",
        "manifest.json",
        "20 of 20 canvases of random",
    ):
        assert word in result.stdout
    manifest = json.loads((tmp_path / "bundle" / "manifest.json").read_text())
    assert manifest["loop"]["max_canvas_length"] == 64
    assert (
        json.loads((tmp_path / "bundle" / "accuracy.json").read_text())["parity"]["passed"] is True
    )
    # The second verification uses the canvas length that the first verification stored in the
    # bundle.
    verified = invoke(
        "verify",
        tmp_path / "bundle",
        "--checkpoint",
        llada_checkpoint,
        "--count",
        2,
        "--new-tokens",
        8,
    )
    assert verified.exit_code == 0, verified.output
    assert "Holds at fp32" in verified.stdout


def test_verify_exits_3_and_names_the_miss(
    llada_checkpoint: Path, llada_bundle: Path, tmp_path: Path
) -> None:
    """The test imitates a wrong conversion. It changes one weight, and writes the new hash of the
    weight's file to the manifest.
    """
    import hashlib

    broken = tmp_path / "bundle"
    shutil.copytree(llada_bundle, broken)
    data = broken / "denoiser.onnx.data"
    content = bytearray(data.read_bytes())
    content[4096 * 10 : 4096 * 10 + 64] = bytes(64)
    data.write_bytes(content)
    manifest = json.loads((broken / "manifest.json").read_text())
    manifest["files"][data.name]["sha256"] = hashlib.sha256(content).hexdigest()
    (broken / "manifest.json").write_text(json.dumps(manifest))
    result = invoke(
        "verify", broken, "--checkpoint", llada_checkpoint, "--count", 1, "--new-tokens", 4
    )
    assert result.exit_code == 3
    assert "FAILS at fp32" in result.stdout
    assert "mask ratio 0.05: logits differ by" in result.stderr


def test_run_prints_json_for_machines(llada_bundle: Path) -> None:
    told = json.loads(
        invoke(
            "run",
            llada_bundle,
            "--tokens",
            "1 2 3",
            "--max-new-tokens",
            8,
            "--set",
            "seed=3",
            "--score",
            "random",
            "--json",
        ).stdout
    )
    assert told["tokens"][:3] == [1, 2, 3]
    assert len(told["tokens"]) == 11
    assert 1 <= told["nfe"] <= 8
    assert told["timings"]["total"] > 0


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_printed_json_is_what_it_was_made_of(value: Any) -> None:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        print_json(value)
    assert json.loads(printed.getvalue()) == value


def test_the_newline_that_ends_a_prompt_on_stdin_is_none_of_it(demo_bundle: Path) -> None:
    arguments = (
        "run",
        demo_bundle,
        "--preset",
        "fast-dllm",
        "--max-new-tokens",
        32,
        "--threads",
        1,
        "--json",
        "--prompt",
    )
    by_name = json.loads(invoke(*arguments, "play jazz").stdout)
    assert (
        json.loads(invoke(*arguments, "-", text="play jazz\n").stdout)["tokens"]
        == by_name["tokens"]
    )
    assert (
        json.loads(invoke(*arguments, "-", text="play jazz\n\n").stdout)["prompt_tokens"]
        > by_name["prompt_tokens"]
    )


def test_watch_draws_on_stderr_and_prints_the_result_on_stdout(llada_bundle: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "dlm_export.cli",
        "run",
        str(llada_bundle),
        "--tokens",
        "1,2",
        "--max-new-tokens",
        "4",
    ]
    done = subprocess.run(
        [*command, "--watch", "--delay", "0"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert len(done.stdout.split()) == 6
    assert "0 masked" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [(), ("--prompt", "a", "--tokens", "1"), ("--tokens", "one"), ("--tokens", "1", "--set", "x")],
)
def test_run_asks_for_one_kind_of_input(llada_bundle: Path, arguments: tuple[str, ...]) -> None:
    assert invoke("run", llada_bundle, *arguments).exit_code == 2


def test_the_text_of_a_file_in_its_names_place_is_told_from_a_missing_file(
    llada_bundle: Path,
) -> None:
    refused = invoke("run", llada_bundle, "--tokens", "1", "--schema", '{"type": "object"}')
    assert refused.exit_code == 2
    assert "this is JSON; write it to a file, and pass the file" in refused.stderr
