"""Tests of ten common mistakes of users.

The tests make each mistake in every command where it is possible. All commands must exit with the
same code, and print one line that describes the mistake. docs/guides/troubleshooting.md lists the
exit codes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest
from checkpoints import llada_config, write_checkpoint
from click.testing import CliRunner

from dlm_export.cli import main
from dlm_runtime.errors import ExitCode

WRONG, COULD_NOT = ExitCode.WRONG_INPUT, ExitCode.COULD_NOT
COMMANDS = {*main.commands}

# Maps each mistake to its exit code, a part of its message, and the arguments of each command.
# Words in capitals are replaced by the paths in ``places``.
MISTAKES: dict[str, tuple[ExitCode, str, dict[str, str]]] = {
    "a path that is not there": (
        WRONG,
        "/nowhere' does not exist",
        {
            "inspect": "NOWHERE",
            "build": "NOWHERE -o OUT",
            "quantize": "NOWHERE -o OUT",
            "engine": "NOWHERE --target thor",
            "verify": "BUNDLE --checkpoint NOWHERE",
            "compare": "BUNDLE NOWHERE",
            "report": "BUNDLE NOWHERE -o OUT.html",
            "capture": "NOWHERE -o OUT.npz",
            "run": "NOWHERE --tokens 1",
            "effort": "NOWHERE",
            "cache-prompt": "NOWHERE --tokens 1 -o OUT.cache",
            "chat": "NOWHERE",
            "decide": "NOWHERE --prompt a --yes-no b",
            "serve": "NOWHERE",
            "triton": "NOWHERE -o OUT",
            "doctor": "NOWHERE",
            "bench": "NOWHERE",
            "plan": "NOWHERE --targets cpu",
            "compile": "NOWHERE --regex a -o OUT",
        },
    ),
    "a folder that is neither checkpoint nor bundle": (
        WRONG,
        "/empty(/config.json: no such file|: not a bundle: it has no manifest.json)",
        {
            "inspect": "EMPTY",
            "build": "EMPTY -o OUT",
            "quantize": "EMPTY -o OUT",
            "engine": "EMPTY --target thor",
            "verify": "BUNDLE --checkpoint EMPTY",
            "compare": "BUNDLE EMPTY",
            "capture": "EMPTY -o OUT.npz",
            "run": "EMPTY --tokens 1",
        },
    ),
    "an output that exists": (
        WRONG,
        r"exists\. Pass --force to replace it",
        {
            "build": "CHECKPOINT -o BUNDLE",
            "quantize": "CHECKPOINT -o BUNDLE --no-verify",
            "verify": "INT8 --checkpoint CHECKPOINT --report TAKEN",
            "capture": "CHECKPOINT -o TAKEN/golden.npz",
            "plan": "--sizes 8B --targets h100 --plot TAKEN/plot.png",
            "report": "BUNDLE BUNDLE -o TAKEN/plot.png",
            "cache-prompt": "BUNDLE --tokens 1 -o TAKEN/plot.png",
            "compile": "BUNDLE --regex a -o TAKEN/plot.png",
        },
    ),
    "an output that is never replaced": (
        WRONG,
        "never replaced|must not change",
        {
            "build": "CHECKPOINT -o TAKEN --force",
            "quantize": "CHECKPOINT -o TAKEN --force --no-verify",
            "verify": "INT8 --checkpoint CHECKPOINT --report BUNDLE --force",
            "capture": "CHECKPOINT -o TAKEN/folder.npz --force",
            "plan": "--sizes 8B --targets h100 --plot TAKEN/folder.png --force",
            "report": "BUNDLE BUNDLE -o TAKEN/folder.png --force",
            "cache-prompt": "BUNDLE --tokens 1 -o TAKEN/folder.png --force",
            "compile": "BUNDLE --regex a -o TAKEN/folder.png --force",
        },
    ),
    "a device that is not known": (
        WRONG,
        r"unknown target 'toaster'|'toaster' is not one of|engine \"toaster\" is not one",
        {
            "build": "CHECKPOINT -o OUT --target toaster",
            "quantize": "CHECKPOINT -o OUT --target toaster",
            "engine": "BUNDLE --target toaster",
            "verify": "BUNDLE --checkpoint CHECKPOINT --engine toaster",
            "compare": "BUNDLE BUNDLE --engine toaster",
            "report": "BUNDLE BUNDLE -o OUT.html --speed --engine toaster",
            "run": "BUNDLE --tokens 1 --engine toaster",
            "effort": "BUNDLE --engine toaster",
            "cache-prompt": "BUNDLE --tokens 1 -o OUT --engine toaster",
            "chat": "BUNDLE --engine toaster",
            "decide": "BUNDLE --prompt a --yes-no b --engine toaster",
            "serve": "BUNDLE --engine toaster",
            "triton": "BUNDLE -o OUT --engine toaster",
            "bench": "BUNDLE --engine toaster",
            "plan": "BUNDLE --targets toaster",
        },
    ),
    "an option that it does not have, or a value that it does not take": (
        WRONG,
        "-1 is not in the range|No such option",
        {
            "inspect": "BUNDLE --mask-token-id -1",
            "build": "CHECKPOINT -o OUT --seed -1",
            "quantize": "CHECKPOINT -o OUT --seed -1",
            "engine": "BUNDLE --target thor --canvas -1",
            "verify": "BUNDLE --checkpoint CHECKPOINT --seed -1",
            "compare": "BUNDLE BUNDLE --seed -1",
            "report": "BUNDLE BUNDLE -o OUT.html --threads -1",
            "capture": "CHECKPOINT -o OUT.npz --seed -1",
            "run": "BUNDLE --tokens 1 --threads -1",
            "effort": "BUNDLE --threads -1",
            "cache-prompt": "BUNDLE --tokens 1 -o OUT --threads -1",
            "chat": "BUNDLE --threads -1",
            "decide": "BUNDLE --prompt a --yes-no b --threads -1",
            "serve": "BUNDLE --port -1",
            "triton": "BUNDLE -o OUT --model-version -1",
            "bench": "BUNDLE --threads -1",
            "plan": "BUNDLE --targets cpu --batch -1",
            "targets": "--batch -1",
            "embed": "--batch -1",
            "doctor": "--batch -1",
            "compile": "BUNDLE --json-object --max-depth -1 -o OUT",
        },
    ),
    "a preset that is not there": (
        WRONG,
        "preset ['\"]warp['\"]",
        {
            "build": "CHECKPOINT -o OUT --precision int8 --no-verify --calib-preset warp",
            "quantize": "CHECKPOINT -o OUT --no-verify --calib-preset warp",
            "verify": "INT8 --checkpoint CHECKPOINT --calib-preset warp",
            "compare": "BUNDLE BUNDLE --calib-preset warp",
            "report": "BUNDLE BUNDLE -o OUT.html --speed --preset warp",
            "run": "BUNDLE --tokens 1 --preset warp",
            "effort": "BUNDLE --preset warp",
            "bench": "BUNDLE --preset warp",
            "plan": "BUNDLE --targets cpu --preset warp",
        },
    ),
    "a file to read that is a pipe": (
        WRONG,
        "/pipe' is not a plain file",
        {
            "build": "CHECKPOINT -o OUT --precision int8 --calib PIPE",
            "quantize": "CHECKPOINT -o OUT --calib PIPE",
            "verify": "BUNDLE --checkpoint CHECKPOINT --prompts PIPE",
            "compare": "BUNDLE BUNDLE --data PIPE",
            "effort": "BUNDLE --data PIPE",
            "cache-prompt": "BUNDLE --messages PIPE -o OUT.cache",
            "run": "BUNDLE --messages PIPE",
            "decide": "BUNDLE --messages PIPE --yes-no b",
            "serve": "BUNDLE --api-key-file PIPE",
            "capture": "CHECKPOINT -o OUT.npz --prompts PIPE",
            "plan": "--sizes 8B --targets cpu --measured PIPE",
            "compile": "BUNDLE --schema PIPE -o OUT",
        },
    ),
    "a file to read that holds something else": (
        WRONG,
        "/noise(.toml|.jsonl|.npz)?('|:|,).*(not TOML|not JSON|not UTF-8|not a golden file|not readable)",
        {
            "build": "DEMO -o OUT --precision fp8 --no-verify --calib NOISE.jsonl",
            "quantize": "CHECKPOINT -o OUT --no-verify --precision NOISE.toml",
            "verify": "BUNDLE --golden NOISE.npz",
            "plan": "--sizes 8B --targets cpu --measured NOISE.jsonl",
            "compile": "BUNDLE --schema NOISE.jsonl -o OUT",
        },
    ),
    "a bundle that is damaged": (
        WRONG,
        r"denoiser\.onnx\.data: \d+ bytes, but the manifest says \d+: the file is truncated",
        {
            "inspect": "DAMAGED",
            "build": "DAMAGED -o OUT",
            "quantize": "DAMAGED -o OUT",
            "engine": "DAMAGED --target thor",
            "verify": "DAMAGED --checkpoint CHECKPOINT",
            "compare": "BUNDLE DAMAGED",
            "report": "BUNDLE DAMAGED -o OUT.html",
            "run": "DAMAGED --tokens 1",
            "effort": "DAMAGED",
            "cache-prompt": "DAMAGED --tokens 1 -o OUT.cache",
            "chat": "DAMAGED",
            "decide": "DAMAGED --prompt a --yes-no b",
            "serve": "DAMAGED",
            "triton": "DAMAGED -o OUT",
            "bench": "DAMAGED",
            "plan": "DAMAGED --targets cpu",
            "compile": "DAMAGED --regex a -o OUT",
        },
    ),
    "another checkpoint's bundle": (
        WRONG,
        "(built from another checkpoint than|is a different denoiser from|has no device graph)",
        {
            "engine": "BUNDLE --target rtx5090",
            "verify": "BUNDLE --checkpoint SMALLER",
            "compare": "BUNDLE DREAM",
            "report": "BUNDLE DREAM -o OUT.html",
        },
    ),
    "no engine on this machine": (
        COULD_NOT,
        "cannot load ONNX Runtime from",
        {
            "build": "CHECKPOINT -o OUT",
            "verify": "BUNDLE --checkpoint CHECKPOINT --count 1 --new-tokens 1",
            "compare": "BUNDLE BUNDLE",
            "report": "BUNDLE BUNDLE -o OUT.html --speed",
            "run": "BUNDLE --tokens 1",
            "effort": "BUNDLE",
            "cache-prompt": "BUNDLE --tokens 1 -o OUT.cache",
            "chat": "BUNDLE",
            "decide": "BUNDLE --prompt a --yes-no b",
            "serve": "BUNDLE",
            "bench": "BUNDLE",
        },
    ),
}
CASES = [
    (mistake, command) for mistake, (_, _, commands) in MISTAKES.items() for command in commands
]


@pytest.fixture(scope="session")
def places(
    tmp_path_factory: pytest.TempPathFactory,
    llada_checkpoint: Path,
    llada_bundle: Path,
    dream_bundle: Path,
) -> dict[str, Path]:
    """Return the paths that replace the words in capitals."""
    folder = tmp_path_factory.mktemp("mistakes")
    (folder / "empty").mkdir()
    taken = folder / "taken"
    (taken / "folder.npz").mkdir(parents=True)
    (taken / "folder.png").mkdir()
    for name in ("golden.npz", "plot.png", "accuracy.json"):
        (taken / name).write_text("mine")
    os.mkfifo(folder / "pipe")
    for suffix in (".toml", ".jsonl", ".npz"):
        (folder / f"noise{suffix}").write_bytes(b"\xff\x00{[")
    damaged = Path(shutil.copytree(llada_bundle, folder / "damaged"))
    os.truncate(damaged / "denoiser.onnx.data", 4096)
    int8 = Path(shutil.copytree(llada_bundle, folder / "int8"))
    manifest = json.loads((int8 / "manifest.json").read_text())
    # Only the manifest says that the bundle is INT8. No test runs this bundle.
    manifest["precision"]["name"] = "int8"
    (int8 / "manifest.json").write_text(json.dumps(manifest))
    config = llada_config(
        vocab_size=100, embedding_size=100, mask_token_id=90, eos_token_id=91, pad_token_id=91
    )
    return {
        "NOWHERE": folder / "nowhere",
        "EMPTY": folder / "empty",
        "OUT": folder / "out",
        "TAKEN": taken,
        "PIPE": folder / "pipe",
        "NOISE": folder / "noise",
        "DAMAGED": damaged,
        "INT8": int8,
        "SMALLER": write_checkpoint(folder / "smaller", config),
        "CHECKPOINT": llada_checkpoint,
        "BUNDLE": llada_bundle,
        "DREAM": dream_bundle,
        "DEMO": Path(__file__).parent.parent / "examples" / "demo-denoiser",
    }


@pytest.mark.parametrize(
    ("mistake", "command"), CASES, ids=[f"{command}: {mistake}" for mistake, command in CASES]
)
def test_a_mistake_ends_every_command_the_same_way(
    places: dict[str, Path], mistake: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, says, commands = MISTAKES[mistake]
    if mistake == "no engine on this machine":
        monkeypatch.setenv("DLM_ONNXRUNTIME", "/nonexistent/libonnxruntime.so")
    words = [
        re.sub(r"^[A-Z0-9]+(?=$|[./])", lambda word: str(places.get(word[0], word[0])), each)
        for each in commands[command].split()
    ]
    before = {path: path.lstat().st_mtime_ns for path in places["OUT"].parent.rglob("*")}
    done = CliRunner().invoke(main, [command, *words])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    # On a slow machine, commands also print their progress.
    lines = [line for line in done.output.splitlines() if line and not line.endswith("in memory")]
    assert done.exit_code == code, done.output
    assert lines[-1].startswith("Error: "), done.output
    assert re.search(says, lines[-1]), lines[-1]
    assert len(lines[-1]) < 600
    assert len(lines) == 1 or lines[0].startswith(("Usage: ", "Warning: ")), done.output
    assert {path: path.lstat().st_mtime_ns for path in places["OUT"].parent.rglob("*")} == before, (
        "something was written"
    )


def test_every_command_is_in_the_table() -> None:
    assert len(MISTAKES) >= 10
    assert {command for _, command in CASES} == COMMANDS
    for _, _, commands in MISTAKES.values():
        assert commands.keys() <= COMMANDS


def test_every_error_has_one_of_the_exit_codes() -> None:
    """Every error class must set ``exit_code`` to a member of ``ExitCode``, not to a number."""
    root = Path(__file__).parent.parent
    folders = ("exporter/dlm_export", "calibration/dlm_calibration", "runtime")
    for path in (path for folder in folders for path in (root / folder).rglob("*.py")):
        for value in re.findall(r"^    exit_code = (.*)$", path.read_text(), re.MULTILINE):
            assert value in {f"ExitCode.{code.name}" for code in ExitCode}, path
    page = (root / "docs" / "guides" / "troubleshooting.md").read_text()
    for code in ExitCode:
        assert re.search(rf"^\| {code.value} \|", page, re.MULTILINE), code
