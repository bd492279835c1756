"""Tests of signals.

A signal must end the generation of a text within one pass. A signal must also end a command. The
exit status of the command must show the signal, and the command must not leave temporary files.

In some tests, a C function is the denoiser. It counts passes and raises a signal during one pass.
Between passes, the only Python code that runs is the code with which the runtime checks for
signals.
"""

from __future__ import annotations

import ctypes as C
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from checkpoints import llada_config, write_checkpoint
from test_native import HEADER, STRICT, succeed, tool

from dlm_export.build import build
from dlm_export.building.options import BuildOptions
from dlm_runtime import Bundle, CallbackPass, DenoiserInfo, Policy, from_callback
from dlm_runtime.abi import native as _native
from dlm_runtime.generation.handle import Handle

PASSES = """
#include <signal.h>
#include "dlm_runtime.h"
int32_t passes, at;
dlm_status run(void *user, const dlm_pass *pass) {
  (void)user;
  if (++passes == at) raise(SIGUSR1);
  for (int32_t i = 0; i < pass->batch * pass->rows; ++i) {
    pass->top_tokens[2 * i] = 1, pass->top_tokens[2 * i + 1] = 2;
    pass->top_probs[2 * i] = 0.5f, pass->top_probs[2 * i + 1] = 0.1f;
    if (pass->logits) pass->logits[i] = 0;
  }
  return DLM_OK;
}
"""
REQUEST: dict[str, Any] = {"max_new_tokens": 40, "block_length": 8}  # each pass commits one token
# Maps a name to (number of passes, function that runs the passes).
CALLS: dict[str, tuple[int, Callable[[Bundle], object]]] = {
    "generate": (40, lambda bundle: bundle.generate(tokens=[5], **REQUEST)),
    "generate over a cache": (
        40,
        lambda bundle: bundle.generate(tokens=[5], **REQUEST, cache="dual"),
    ),
    "generate_batch": (
        80,
        lambda bundle: bundle.generate_batch(tokens=[[5], [6], [7]], max_batch=2, **REQUEST),
    ),
    "stream": (40, lambda bundle: list(bundle.stream(tokens=[5], **REQUEST))),
    "logits": (1, lambda bundle: bundle.logits([5], [0])),
    "time_passes": (41, lambda bundle: bundle.time_passes(8, 8, 8, 40)),
}


class Native:
    """A bundle whose passes are computed by the C function ``PASSES``."""

    def __init__(self, library: Path) -> None:
        self.library = C.CDLL(str(library))
        denoiser = _native.initialised(_native.Denoiser)
        for name, value in {"vocab_size": 40, "mask_token_id": 39, "max_canvas_length": 64}.items():
            setattr(denoiser, name, value)
        denoiser.layers = denoiser.kv_heads = denoiser.head_size = denoiser.has_cache = 1
        handle, run = C.c_void_p(), C.cast(self.library.run, _native.PassFn)
        assert not _native.library().dlm_bundle_from_callback(
            C.byref(denoiser), run, None, None, 0, C.byref(handle)
        )
        self.bundle = Bundle(Handle(handle, Policy(), self.library))

    def passes_of(self, call: Callable[[Bundle], object], at: int = 0) -> int:
        """Run ``call``. The C function that computes passes raises a signal in pass number ``at``.

        Returns the number of passes. Exceptions of ``call`` are not caught.
        """
        self.start(at)
        call(self.bundle)
        return self.made

    def start(self, at: int) -> None:
        (
            C.c_int32.in_dll(self.library, "passes").value,
            C.c_int32.in_dll(self.library, "at").value,
        ) = 0, at

    @property
    def made(self) -> int:
        return C.c_int32.in_dll(self.library, "passes").value


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Native]:
    folder = tmp_path_factory.mktemp("passes")
    (folder / "passes.c").write_text(PASSES)
    library = folder / "passes.so"
    # SIGUSR1 is not part of C99
    strict = [flag for flag in STRICT if flag != "-std=c99"]
    succeed(
        tool("gcc"),
        *strict,
        "-shared",
        "-fPIC",
        "-I",
        HEADER.parent,
        folder / "passes.c",
        "-o",
        library,
    )
    made = Native(library)
    with made.bundle:
        yield made


@pytest.fixture
def on_signal() -> Iterator[Callable[[Callable[[], object]], None]]:
    """Set the function that runs when the signal arrives."""
    before = signal.getsignal(signal.SIGUSR1)
    yield lambda action: signal.signal(signal.SIGUSR1, lambda *_: action()) and None
    signal.signal(signal.SIGUSR1, before)


class Ended(BaseException):
    """Raised by a signal handler."""


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), SystemExit(3), TimeoutError("a user's"), Ended()], ids=repr
)
@pytest.mark.parametrize("name", CALLS)
def test_what_a_handler_raises_ends_a_call_within_a_pass(
    native: Native, on_signal: Callable[..., None], name: str, error: BaseException
) -> None:
    def fail() -> None:
        raise error

    passes, call = CALLS[name]
    on_signal(fail)
    for at in {1, min(passes, 11), passes}:
        native.start(at)
        with pytest.raises(type(error)) as caught:
            call(native.bundle)
        assert caught.value is error
        assert error.__cause__ is None
        assert native.made == at
        assert len(native.bundle._handle._idle) == 1, "the session was not given back"
        assert native.passes_of(call) == passes, "it does not go on as a new one"


@pytest.mark.parametrize("name", CALLS)
def test_a_handler_that_raises_nothing_runs_within_a_pass_and_ends_nothing(
    native: Native, on_signal: Callable[..., None], name: str
) -> None:
    passes, call = CALLS[name]
    at, seen = min(passes, 11), []
    on_signal(lambda: seen.append(native.made))
    assert native.passes_of(call, at) == passes
    assert seen == [at]


def test_a_session_that_a_signal_ended_serves_other_threads(
    native: Native, on_signal: Callable[..., None]
) -> None:
    def fail() -> None:
        raise Ended

    on_signal(fail)
    native.start(5)
    with pytest.raises(Ended):
        native.bundle.generate(tokens=[5], **REQUEST)
    native.start(0)
    made: list[int] = []
    worker = threading.Thread(
        target=lambda: made.append(native.bundle.generate(tokens=[5], **REQUEST).nfe)
    )
    worker.start()
    worker.join()
    assert made == [40]
    assert len(native.bundle._handle._idle) == 1


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Restore the normal handling of SIGINT.

    A shell starts jobs in the background with SIGINT ignored.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_in_a_pass_of_ones_own_is_no_failure_of_the_engine() -> None:
    calls: list[int] = []

    def run(p: CallbackPass) -> None:
        calls.append(len(calls))
        if len(calls) == 3:
            signal.raise_signal(signal.SIGINT)
        p.top_tokens[:] = [1, 2]
        p.top_probs[:] = [0.5, 0.1]

    with from_callback(DenoiserInfo(8, 7, 64), run) as bundle:
        with pytest.raises(KeyboardInterrupt) as caught:
            bundle.generate(tokens=[5], max_new_tokens=8)
        assert caught.value.__cause__ is None
        assert len(calls) == 3
        assert bundle.generate(tokens=[5], max_new_tokens=8).nfe == 8


# ---- Commands ----


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = llada_config(n_layers=1, max_sequence_length=4096)
    return write_checkpoint(tmp_path_factory.mktemp("endless") / "checkpoint", config, seed=1)


@pytest.fixture(scope="module")
def endless(checkpoint: Path) -> Path:
    """A bundle with a very long canvas. Filling it with one token per pass takes many minutes."""
    build(checkpoint, checkpoint.parent / "bundle", BuildOptions(check_parity=False))
    return checkpoint.parent / "bundle"


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _wait_until(holds: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    for _ in range(6000):
        assert process.poll() is None, process.communicate()
        if holds():
            return
        time.sleep(0.02)
    raise AssertionError("it never came so far")


def _is_computing(process: subprocess.Popen[str], mapped: str = "libonnxruntime") -> None:
    """Wait until a process has loaded a file and is computing.

    The process is computing if it has used 0.5 s of processor time after it loaded the file.
    """
    _wait_until(lambda: mapped in Path(f"/proc/{process.pid}/maps").read_text(), process)
    loaded = _cpu_seconds(process.pid)
    _wait_until(lambda: _cpu_seconds(process.pid) > loaded + 0.5, process)


def _ended_by(
    number: signal.Signals,
    arguments: tuple[object, ...],
    is_inside: Callable[[subprocess.Popen[str]], None],
) -> str:
    """Run a command, and send a signal to it when ``is_inside`` returns.

    The signal must end the command. Returns the standard output of the command.
    """
    command = [sys.executable, "-m", "dlm_export.cli", *map(str, arguments)]
    started = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Without this call, the command would ignore the signal if the test's process ignores it.
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL) and None,
    )
    with started as process:
        try:
            is_inside(process)
            process.send_signal(number)
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == -number, err
    assert "Traceback" not in err
    return out


LONG = ("--new-tokens", 4000, "--block-length", 0, "--threads", 1)


@pytest.mark.parametrize(
    ("number", "options"),
    [(signal.SIGINT, ()), (signal.SIGHUP, ("--watch", "--delay", 0))],
    ids=["run", "watched"],
)
def test_run_prints_what_there_is_and_dies_by_the_signal_that_ends_it(
    endless: Path, number: signal.Signals, options: tuple[object, ...]
) -> None:
    arguments = ("run", endless, "--tokens", "5", *LONG, *options)
    canvas = _ended_by(number, arguments, _is_computing).split()
    assert len(canvas) == 4001
    assert canvas[0] == "5"


@pytest.mark.parametrize("command", ["bench", pytest.param("verify", marks=pytest.mark.slow)])
def test_other_commands_do_as_well(endless: Path, checkpoint: Path, command: str) -> None:
    """The signal reaches ``verify`` while torch computes."""
    arguments: tuple[object, ...] = ("bench", endless, "--rounds", 1000, "--prompt-tokens", 1)
    arguments, is_inside = (*arguments, *LONG[:2], *LONG[-2:]), partial(_is_computing)
    if command == "verify":
        many = ("--count", 1000, "--new-tokens", 100)
        arguments = ("verify", endless, "--checkpoint", checkpoint, *many)
        is_inside = partial(_is_computing, mapped="model.safetensors")
    assert _ended_by(signal.SIGINT, arguments, is_inside) == ""


def test_a_build_that_a_signal_ends_leaves_nothing_behind(checkpoint: Path, tmp_path: Path) -> None:
    def is_staging(process: subprocess.Popen[str]) -> None:
        _wait_until(lambda: any(tmp_path.glob("*/*")) or any(tmp_path.glob(".*/*")), process)

    _ended_by(signal.SIGTERM, ("build", checkpoint, "-o", tmp_path / "bundle"), is_staging)
    assert list(tmp_path.iterdir()) == []


def test_a_command_goes_on_that_was_started_to_ignore_a_signal(endless: Path) -> None:
    """``nohup`` starts commands with SIGHUP ignored."""
    command = [
        sys.executable,
        "-m",
        "dlm_export.cli",
        "run",
        str(endless),
        "--tokens",
        "5",
        "--max-new-tokens",
        "100",
    ]
    started = subprocess.Popen(
        command, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN) and None
    )
    with started as process:
        _wait_until(
            lambda: "libonnxruntime" in Path(f"/proc/{process.pid}/maps").read_text(), process
        )
        process.send_signal(signal.SIGHUP)
    assert process.returncode == 0
