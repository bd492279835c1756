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

# The arguments of each command. SOURCE stands for the file or folder that the command reads.
ARGUMENTS = {
    "inspect": "SOURCE",
    "build": "SOURCE -o OUT",
    "quantize": "SOURCE -o OUT",
    "engine": "SOURCE --target thor",
    "verify": "BUNDLE --checkpoint SOURCE",
    "compare": "BUNDLE SOURCE",
    "report": "BUNDLE SOURCE -o OUT.html",
    "capture": "SOURCE -o OUT.npz",
    "run": "SOURCE --tokens 1",
    "effort": "SOURCE",
    "cache-prompt": "SOURCE --tokens 1 -o OUT.cache",
    "chat": "SOURCE",
    "decide": "SOURCE --prompt a --yes-no b",
    "serve": "SOURCE",
    "triton": "SOURCE -o OUT",
    "doctor": "SOURCE",
    "bench": "SOURCE",
    "plan": "SOURCE --targets cpu",
    "compile": "SOURCE --regex a -o OUT",
    "demo": "--bundle SOURCE",
}
OPEN_CHECKPOINTS = ("build", "quantize", "capture")
RUN_BUNDLES = ("run", "effort", "cache-prompt", "chat", "decide", "serve", "bench")


def every(*commands: str, source: str = "", more: str = "") -> dict[str, str]:
    """The arguments of commands that read ``source``, with ``more`` options.

    Without ``source``, a command reads a valid checkpoint or bundle.
    """
    usual = {name: "CHECKPOINT" if name in OPEN_CHECKPOINTS else "BUNDLE" for name in commands}
    usual["verify"] = "CHECKPOINT"
    return {
        name: f"{ARGUMENTS[name].replace('SOURCE', source or usual[name])} {more}"
        for name in commands
    }


# Maps each mistake to its exit code, a part of its message, and the arguments of each command.
# Words in capitals are replaced by the paths in ``places``.
MISTAKES: dict[str, tuple[ExitCode, str, dict[str, str]]] = {
    "a path that is not there": (
        WRONG,
        "/nowhere' does not exist",
        every(*ARGUMENTS, source="NOWHERE"),
    ),
    "a folder that is neither checkpoint nor bundle": (
        WRONG,
        "/empty(/config.json: no such file|: not a bundle: it has no manifest.json)",
        every(*[*ARGUMENTS][:6], "capture", "run", source="EMPTY"),
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
            "demo": "--copy TAKEN",
        },
    ),
    "a device that is not known": (
        WRONG,
        r"unknown target 'toaster'|'toaster' is not one of|--engine toaster is not one",
        every("build", "quantize", "engine", more="--target toaster")
        | every("report", more="--speed --engine toaster")
        | every(*RUN_BUNDLES, "verify", "compare", "triton", more="--engine toaster")
        | {"plan": "BUNDLE --targets toaster"},
    ),
    "an option that it does not have, or a value that it does not take": (
        WRONG,
        "-1 is not in the range|No such option",
        every("inspect", more="--mask-token-id -1")
        | every("build", "quantize", "verify", "compare", "capture", more="--seed -1")
        | every("engine", more="--canvas -1")
        | every(*RUN_BUNDLES, "report", more="--threads -1")
        | every("serve", more="--port -1")
        | every("triton", more="--model-version -1")
        | every("plan", more="--batch -1")
        | dict.fromkeys(("targets", "embed", "doctor"), "--batch -1")
        | {"compile": "BUNDLE --json-object --max-depth -1 -o OUT"},
    ),
    "an option for GPUs on a CPU": (
        WRONG,
        "--cuda-graphs is for --provider cuda, not for --provider cpu",
        every("run", "bench", "serve", "compare", more="--cuda-graphs"),
    ),
    "an option for other precisions": (
        WRONG,
        "--calib-samples needs a quantised precision; --precision is fp16",
        every("build", "quantize", more="--precision fp16 --calib-samples 128"),
    ),
    "a preset that is not there": (
        WRONG,
        "preset ['\"]warp['\"]",
        every("build", more="--precision int8 --no-verify --calib-preset warp")
        | every("quantize", more="--no-verify --calib-preset warp")
        | {"verify": "INT8 --checkpoint CHECKPOINT --calib-preset warp"}
        | every("compare", more="--calib-preset warp")
        | every("report", more="--speed --preset warp")
        | every("run", "effort", "bench", "plan", more="--preset warp"),
    ),
    "a file to read that is a pipe": (
        WRONG,
        "/pipe' is not a plain file",
        every("build", "quantize", more="--precision int8 --calib PIPE")
        | every("verify", "capture", more="--prompts PIPE")
        | every("compare", "effort", more="--data PIPE")
        | every("serve", more="--api-key-file PIPE")
        | {
            "cache-prompt": "BUNDLE --messages PIPE -o OUT.cache",
            "run": "BUNDLE --messages PIPE",
            "decide": "BUNDLE --messages PIPE --yes-no b",
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
        every(*(name for name in ARGUMENTS if name not in ("capture", "doctor")), source="DAMAGED")
        | {"verify": "DAMAGED --checkpoint CHECKPOINT"},
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
        every(*RUN_BUNDLES, "build", "compare")
        | every("verify", more="--count 1 --new-tokens 1")
        | every("report", more="--speed"),
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
