"""Tests that commands reject hostile files.

Each command must print one line without a traceback, and exit with the right code. The tests start
this file as a separate program, which runs the commands one after another. Before the first
command on a hostile file, the program limits its memory to 512 MiB more than it already uses.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hostile_files as hostile
import pytest

MEMORY_BYTES = 512 << 20
HANG_SECONDS = 60  # limit for one command; long enough for a busy machine
SAMPLED_EVERY = 23
SHORT = ("--max-new-tokens", 4, "--threads", 1)


# ---- The program ----


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _run(harmless: list[list[str]], commands: list[list[str]]) -> Iterator[dict[str, Any]]:
    """Run commands one after another, and yield the result of each command in ``commands``.

    The ``harmless`` commands run first and must succeed. They load all modules, including torch.
    Then the memory of this process is limited, and ``commands`` run.
    """
    from click.testing import CliRunner

    import dlm_export.build  # noqa: F401  # this loads torch
    from dlm_export.cli import main

    for arguments in harmless:
        done = CliRunner().invoke(main, arguments)
        assert done.exit_code == 0, done.output
    limit = _address_space() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for arguments in commands:
        faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
        before = [
            resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        ]
        started = time.monotonic()
        done = CliRunner().invoke(main, arguments)
        seconds = time.monotonic() - started
        after = [
            resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        ]
        cpu = sum(
            b.ru_utime + b.ru_stime - a.ru_utime - a.ru_stime
            for a, b in zip(before, after, strict=True)
        )
        is_ours = done.exception is None or isinstance(done.exception, SystemExit)
        said = done.output if is_ours else repr(done.exception)[:500]
        yield {
            "code": done.exit_code if is_ours else None,
            "said": said,
            "seconds": seconds,
            "cpu_seconds": cpu,
        }


# ---- The commands ----


class Cases:
    """A collection of commands and their hostile inputs.

    ``commands`` maps names to the arguments of the commands. Each command has its own input, a file
    or folder in ``folder``.
    """

    def __init__(self, folder: Path, bundle: Path, checkpoint: Path) -> None:
        self.folder, self.bundle, self.checkpoint = folder, bundle, checkpoint
        self.commands: dict[str, list[str]] = {}
        self._made = 0

    def add(self, name: str, *arguments: object) -> None:
        assert name not in self.commands
        self.commands[name] = [str(argument) for argument in arguments]

    def path(self, suffix: str = "") -> Path:
        self._made += 1
        return self.folder / f"{self._made}{suffix}"

    def file(self, data: bytes, suffix: str) -> Path:
        path = self.path(suffix)
        path.write_bytes(data)
        return path

    def with_text(self, tokenizer: bytes, template: str = "{{ messages[0].content }}") -> Path:
        """A copy of the bundle with a tokenizer and a chat template."""
        copy = Path(shutil.copytree(self.bundle, self.path()))
        manifest = json.loads((copy / "manifest.json").read_text())
        for name, data in (("tokenizer.json", tokenizer), ("chat.jinja", template.encode())):
            (copy / name).write_bytes(data)
            manifest["files"][name] = {
                "bytes": len(data),
                "sha256": hashlib.sha256(data).hexdigest(),
            }
        manifest |= {
            "tokenizer": "tokenizer.json",
            "chat_template": {"file": "chat.jinja", "special_tokens": {}},
        }
        (copy / "manifest.json").unlink()  # the copied file is a link to the original
        (copy / "manifest.json").write_text(json.dumps(manifest))
        return copy

    def with_file(self, name: str, make: bytes | Callable[[Path], None]) -> Path:
        """Copy the checkpoint, and replace or add a file in the copy."""
        copy = Path(shutil.copytree(self.checkpoint, self.path()))
        (copy / name).unlink(missing_ok=True)
        if isinstance(make, bytes):
            (copy / name).write_bytes(make)
        else:
            make(copy / name)
        return copy


def _hostile_cases(cases: Cases) -> None:
    from test_plan import measurement

    harmless = json.dumps(hostile.harmless()).encode()
    config = json.loads((cases.checkpoint / "config.json").read_text())
    with_text = cases.with_file("tokenizer.json", harmless)

    def build(checkpoint: Path, *options: object) -> tuple[object, ...]:
        return ("build", checkpoint, "-o", cases.folder / "out", *options)

    def compare_with(path: Path) -> tuple[object, ...]:
        return ("verify", bundle, "--checkpoint", cases.checkpoint, "--prompts", path)

    bundle = cases.with_text(harmless)
    ways: dict[str, tuple[dict[str, bytes], str, Callable[[Path], tuple[object, ...]]]] = {
        "data": (
            hostile.data_files(),
            ".jsonl",
            lambda p: build(with_text, "--precision", "int8-static", "--calib", p),
        ),
        "recipe": (hostile.recipes(), ".toml", lambda p: build(cases.checkpoint, "--precision", p)),
        "measured": (
            hostile.measurements(measurement()),
            ".json",
            lambda p: ("plan", "--sizes", "1B", "--targets", "cpu", "--measured", p),
        ),
        "prompts": (
            {"nothing": b"", "not UTF-8": b"\xff", "a long line": b"w1 " * 10**5},
            ".txt",
            compare_with,
        ),
    }
    for kind, (files, suffix, command) in ways.items():
        for name, data in files.items():
            cases.add(f"{kind}: {name}", *command(cases.file(data, suffix)))
        pipe, zeros = cases.path(suffix), cases.path(suffix)
        os.mkfifo(pipe)  # no process writes to this pipe
        zeros.symlink_to("/dev/zero")
        cases.add(f"{kind}: a pipe", *command(pipe))
        cases.add(f"{kind}: a device", *command(zeros))
    read = [
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "hf_quant_config.json",
    ]
    for name in [
        *read,
        "chat_template.jinja",
        "chat_template.json",
        "model.safetensors.index.json",
        "model.safetensors",
    ]:
        copy = cases.with_file("tokenizer.json", harmless)
        (copy / name).unlink(missing_ok=True)
        os.mkfifo(copy / name)
        cases.add(f"pipe: {name}", "inspect", copy)
    for name, data in hostile.tokenizers().items():
        cases.add(
            f"tokenizer of a checkpoint: {name}", "inspect", cases.with_file("tokenizer.json", data)
        )
    for name, data in (hostile.tokenizers() | hostile.tokenizers_in_use()).items():
        cases.add(
            f"tokenizer of a bundle: {name}",
            "run",
            cases.with_text(data),
            "--prompt",
            hostile.PROMPT,
            *SHORT,
        )
    for name, text in hostile.templates().items():
        cases.add(
            f"template: {name}", "run", cases.with_text(harmless, text), "--chat", "w1", *SHORT
        )
    for name, changes in hostile.configs().items():
        cases.add(
            f"config: {name}",
            "inspect",
            cases.with_file("config.json", json.dumps(config | changes).encode()),
        )
    for name, data in hostile.indexes().items():
        cases.add(
            f"index: {name}", "inspect", cases.with_file("model.safetensors.index.json", data)
        )


@pytest.fixture(scope="module")
def cases(
    llada_bundle: Path, llada_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Cases:
    made = Cases(tmp_path_factory.mktemp("hostile"), llada_bundle, llada_checkpoint)
    _hostile_cases(made)
    return made


@dataclass(frozen=True)
class Ended:
    """The result of a command. ``code`` is None if the command printed a traceback."""

    code: int | None
    said: str
    seconds: float
    cpu_seconds: float

    @property
    def is_refusal(self) -> bool:
        """True if the command exited with code 1 or 2 and printed one sentence."""
        lines = self.said.splitlines()
        if self.said.startswith("Usage: "):
            lines = lines[3:]  # for a wrong value, click first prints the usage
        is_sentence = (
            len(lines) == 1
            and lines[0].startswith("Error: ")
            and lines[0].isprintable()
            and len(lines[0]) < 1500
        )
        return self.code in (1, 2) and is_sentence


def ended_commands(harmless: list[list[str]], commands: dict[str, list[str]]) -> dict[str, Ended]:
    """Run the commands in a separate program, and return a dict from names to results.

    The program first runs the ``harmless`` commands, which must succeed.
    """
    given = json.dumps([harmless, [*commands.values()]])
    done = subprocess.run(
        [sys.executable, __file__],
        input=given,
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    ended = [Ended(**json.loads(line)) for line in done.stdout.splitlines()]
    assert len(ended) == len(commands), f"{[*commands][len(ended)]}: {done.stderr[-3000:]}"
    assert done.stderr == ""
    return dict(zip(commands, ended, strict=True))


def _check(cases: Cases, names: list[str]) -> None:
    """Run the commands with these names. Each command must fail and print one sentence.

    A command must not print anything else, and must not leave any files.
    """
    text = cases.with_text(json.dumps(hostile.harmless()).encode())
    harmless = [
        ["run", str(text), given, "w1 w2", *map(str, SHORT)] for given in ("--prompt", "--chat")
    ]
    harmless.append(["inspect", str(cases.checkpoint)])
    ended = ended_commands(harmless, {name: cases.commands[name] for name in names})
    wrong = [f"{name}: {end}"[:600] for name, end in ended.items() if not end.is_refusal]
    assert not wrong, "\n".join(wrong)
    assert not (cases.folder / "out").exists()


def test_some_hostile_files_of_every_kind_end_in_one_line_and_an_exit_code(cases: Cases) -> None:
    _check(cases, [*cases.commands][::SAMPLED_EVERY])


@pytest.mark.slow
def test_all_hostile_files_end_in_one_line_and_an_exit_code(cases: Cases) -> None:
    assert len(cases.commands) >= 200
    _check(cases, [*cases.commands])


if __name__ == "__main__":
    for ended in _run(*json.load(sys.stdin)):
        print(json.dumps(ended), flush=True)
