"""Tests of ``dlm-export chat`` through pipes and in a terminal, where Ctrl-C must end only the
answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner, Result

from dlm_export.cli import main, printing
from dlm_runtime import Bundle

LIGHTS = "turn on the kitchen lights"
# Options for a slow answer: one token per pass, and more tokens than in the demo's training texts.
SLOW = (
    "--preset",
    "llada",
    "--max-new-tokens",
    "400",
)
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")


def _command(bundle: Path, *arguments: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "dlm_export.cli",
        "chat",
        str(bundle),
        "--threads",
        "1",
        *arguments,
    ]


class Terminal:
    """A process in a pseudo-terminal, and its output so far."""

    def __init__(self, command: list[str]) -> None:
        self.process, self.master = pty.fork()
        if self.process == 0:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.environ |= {"TERM": "xterm", "COLUMNS": "100", "LINES": "24"}
            os.execv(command[0], command)
        self.told, self.taken = "", 0

    def until(self, wanted: str) -> str:
        """Wait until the process has printed this text."""
        deadline = time.monotonic() + 60
        while (at := self.told.find(wanted, self.taken)) < 0:
            assert time.monotonic() < deadline, f"{wanted!r} is not in {self.told[self.taken :]!r}"
            if select.select([self.master], [], [], 0.1)[0]:
                with contextlib.suppress(OSError):  # the process has ended
                    self.told += ESCAPES.sub(
                        "", os.read(self.master, 4096).decode(errors="replace")
                    )
        before, self.taken = self.told[self.taken : at], at + len(wanted)
        return before

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def ended(self) -> int:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                if select.select([self.master], [], [], 0.05)[0]:
                    os.read(self.master, 4096)
            done, status = os.waitpid(self.process, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
        os.kill(self.process, signal.SIGKILL)
        raise AssertionError("it goes on")


@pytest.fixture
def slow(demo_bundle: Path) -> Iterator[Terminal]:
    terminal = Terminal(_command(demo_bundle, *SLOW))
    yield terminal
    os.close(terminal.master)


def test_a_conversation_in_a_terminal(slow: Terminal) -> None:
    slow.until("> ")
    slow.type(f"{LIGHTS}\n")
    slow.until("░ masked")  # the canvas is shown while the answer is generated
    slow.type("\x03")
    slow.until("ended by cancelled")
    slow.until("> ")
    slow.type("half a line")
    slow.until("half a line")
    # Wait until the command waits for input. If a signal arrived just before the command waits,
    # CPython would handle the signal only after the next key.
    time.sleep(0.5)
    slow.type("\x03")  # while the command waits for input, Ctrl-C starts a new line
    slow.until("> ")
    slow.type("/effort low\n")
    assert "this bundle has no levels" in slow.until("\n> ")
    slow.type("/system speak up\n")
    slow.until("trained on single commands")
    slow.type("/system\n")
    slow.until("No system message.")
    slow.type("/reset\n")
    slow.until("Forgotten.")
    slow.type("/what\n")
    slow.until("/quit ends.")
    slow.until("> ")
    slow.type(f"{LIGHTS}\n")
    slow.until('"name":')
    slow.until("pass")
    slow.until("> ")
    slow.type("\x04")
    assert slow.ended() == 0


def _said(bundle: Path, lines: str, *arguments: str) -> Result:
    """Send lines through a pipe and return the output."""
    return CliRunner().invoke(
        main, ["chat", str(bundle), "--threads", "1", *arguments], input=lines
    )


def test_lines_through_pipes_are_answered_line_by_line(demo_bundle: Path) -> None:
    lines = f"{LIGHTS}\n\n/reset\n{LIGHTS}\n/quit\nnever read\n"
    done = _said(demo_bundle, lines, "--preset", "fast-dllm", "--max-new-tokens", "64")
    assert done.exit_code == 0, done.output
    first, second = done.stdout.splitlines()
    assert first == second, "nothing was left of what was said before"
    assert first.startswith('{"name":')
    assert done.stderr == "Forgotten.\n"


def test_the_demo_answers_a_second_message_by_itself_and_says_so(demo_bundle: Path) -> None:
    """The denoiser was trained on single commands.

    The demo answers wrongly if the chat contains an earlier command, so each message is sent alone.
    """
    done = _said(
        demo_bundle,
        f"{LIGHTS}\nremind me to call the garage at seven\n{LIGHTS}\n",
        "--preset",
        "fast-dllm",
    )
    assert done.exit_code == 0, done.output
    calls = [json.loads(line) for line in done.stdout.splitlines()]
    assert [call["name"] for call in calls] == ["set_light", "add_reminder", "set_light"]
    assert done.stderr.count("single commands: give one message") == 1
    assert done.stderr.count("From now on, each message is answered without the earlier ones") == 1


def test_a_limit_above_the_trained_length_changes_no_answer(demo_bundle: Path) -> None:
    """The limit is also above the canvas, and the conversation leaves room for few tokens."""
    for command in ("run", "chat"):
        prompt = ["--prompt", LIGHTS] if command == "run" else []
        said = f"{LIGHTS}\n{'lights ' * 460}\n"
        usual, high = (
            CliRunner().invoke(main, [command, str(demo_bundle), *prompt, *limit], input=said)
            for limit in ([], ["--max-new-tokens", "4096"])
        )
        assert usual.exit_code == 0, usual.output
        assert json.loads(usual.stdout.splitlines()[0])["name"] == "set_light"
        assert high.stdout == usual.stdout


def test_a_conversation_through_pipes_goes_on_after_ctrl_c(demo_bundle: Path) -> None:
    process = subprocess.Popen(
        _command(demo_bundle, *SLOW), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{LIGHTS}\n")
    process.stdin.flush()
    answer: list[str] = []
    deadline = time.monotonic() + 60
    # wait for the start of the answer, because Ctrl-C must arrive while the answer is generated
    while not answer and time.monotonic() < deadline:
        if _seconds(process.pid) > 2.0:
            process.send_signal(signal.SIGINT)
        if select.select([process.stdout], [], [], 0.2)[0]:
            answer.append(process.stdout.readline())
    assert answer
    process.stdin.write("/quit\n")
    process.stdin.close()
    assert process.wait(timeout=60) == 0
    process.stdout.close()


def _seconds(pid: int) -> float:
    """Return the seconds of processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_a_line_that_fails_does_not_end_a_piped_conversation(demo_bundle: Path) -> None:
    done = _said(demo_bundle, f"lights off\n{'lights ' * 600}\n/effort none\nlights off\n")
    first, second = done.stdout.splitlines()
    assert first == second
    assert "Error: line 2: the conversation of" in done.stderr
    assert "Error: line 3: " in done.stderr
    assert done.exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "lines", "sentence"),
    [
        (("--effort", "low"), "", "this bundle has no levels"),
        (("--preset", "none"), "", 'preset "none" is not one of'),
        (("--max-new-tokens", "0"), "", "0 is not in the range"),
        ((), f"{'lights ' * 600}\n", "tokens fills the canvas of 512: /reset clears it"),
    ],
)
def test_what_cannot_be_is_told(
    demo_bundle: Path, arguments: tuple[str, ...], lines: str, sentence: str
) -> None:
    done = _said(demo_bundle, lines, *arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert sentence in done.stderr


def test_a_bundle_without_a_template_cannot_be_talked_to(llada_bundle: Path) -> None:
    done = _said(llada_bundle, "hello\n")
    assert done.exit_code == 2
    assert "no chat template" in done.stderr


HOSTILE = "a\x1b[2J\x9b31m\x07\u202e\nb\tc"


@pytest.mark.parametrize("is_terminal", [True, False])
@pytest.mark.parametrize("command", ["run", "chat"])
def test_an_answer_cannot_control_the_terminal(
    demo_bundle: Path, command: str, is_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = Bundle.generate
    monkeypatch.setattr(
        Bundle, "generate", lambda *given, **named: replace(generate(*given, **named), text=HOSTILE)
    )
    stream = SimpleNamespace(isatty=lambda: is_terminal)
    monkeypatch.setattr(printing, "sys", SimpleNamespace(stdout=stream, stderr=stream))
    given = ["--prompt", LIGHTS] if command == "run" else []
    # With color=True, click passes escapes on to this stdout, as it does to a terminal.
    done = CliRunner().invoke(main, [command, str(demo_bundle), *given], input=LIGHTS, color=True)
    wanted = "a\\x1b[2J\\x9b31m\\x07\\u202e\nb\tc" if is_terminal else HOSTILE
    assert done.stdout == wanted + "\n"


def test_json_contains_no_control_characters() -> None:
    text = printing.json_text({HOSTILE: [HOSTILE]})
    assert not re.search("[\x00-\x1f\x7f-\x9f]", text)
    assert json.loads(text) == {HOSTILE: [HOSTILE]}
