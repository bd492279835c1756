"""Runs a bundle's tokenizer and chat template in a separate process with limits.

A request to a tokenizer or a template can be arbitrarily expensive. A normaliser can double a text
sixty times, and a template can loop forever without output. For some texts, the libraries that run
tokenizers and templates can panic, abort or allocate gigabytes. A check of the files cannot exclude
such failures, and Python cannot stop a thread that runs too long. Tokenizers and templates
therefore run in a separate process with ``MEMORY_BYTES`` of address space. For each request, the
process gets one second of processor time, plus one second per MiB of the request. If the process
exceeds a limit, only this process ends.

Requests to encode more than ``LONG_BYTES`` go to a second process, which starts with the first such
request. So a short text waits for other short texts only, and a result can be decoded at once.

A process starts in 30 ms, uses 15 MiB in addition to the vocabulary, and answers in about 50 us.
The process runs in a separate session (``setsid``), so Ctrl-C does not end the process. The process
ends when its input is closed. The input is closed when the ``TextProcess`` object is deleted, or
when the process that owns this object ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from dlm_runtime.errors import DlmError

MEMORY_BYTES = 512 << 20  # reading a tokenizer with 262,144 ids needs 250 MiB
REPLY_LIMIT_BYTES = 64 << 20
LONG_BYTES = 16 << 10
_WORKER = Path(__file__).with_name("_chat_template_worker.py")


class Refused(Exception):
    """Raised if the library rejects a request, or if the request exceeds a limit.

    The message says why.
    """


class TextProcess:
    """A tokenizer in separate processes: one for short requests, and one for long texts."""

    def __init__(
        self,
        tokenizer: bytes,
        template: str | None,
        special_tokens: dict[str, str],
        added: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Start the process for short requests.

        Raises Refused if the library cannot load the tokenizer.
        """
        given = {"template": template, "special_tokens": special_tokens, "added": added}
        packed = _pack({"do": "load", **given}, tokenizer)
        self._short, self._long = _Process(packed), _Process(packed)
        self.ask("names", tokens=[])

    def ask(self, do: str, **arguments: Any) -> Any:
        """Call a method of the worker's ``Text``. Raises Refused, TypeError or ValueError."""
        request = _pack({"do": do, **arguments})
        is_long = do.startswith("encode") and len(request) > LONG_BYTES
        return (self._long if is_long else self._short).ask(request)

    def close(self) -> None:
        """End the processes. A later request starts a new process."""
        self._short.close()
        self._long.close()


class _Process:
    """A process that starts with its first request.

    If the process has ended, the next request starts a new process. Several threads may send
    requests, but the process handles only one request at a time.
    """

    def __init__(self, load: bytes) -> None:
        self._load = load  # the first request to each new process
        self._take()

    def _take(self) -> None:
        self._owner = os.getpid()  # the process that owns this object
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, request: bytes) -> Any:
        """Send a packed request and return the answer. Raises Refused."""
        # After a fork, the tokenizer's process belongs to the parent, so the child must start a new
        # one.
        if self._owner != os.getpid():
            self._take()
        with self._lock:
            if self._process is not None and self._process.poll() is not None:
                self._stop()  # the tokenizer's process ended between two requests
            if self._process is None:
                self._process = _start()
                self._end = weakref.finalize(self, _end, self._process, self._owner)
                try:
                    self._exchange(self._process, self._load)
                except Refused:
                    self._stop()
                    raise
            return self._exchange(self._process, request)

    def close(self) -> None:
        if self._owner == os.getpid():
            with self._lock:
                if self._process is not None:
                    self._stop()

    def _stop(self) -> None:
        self._process = None
        self._end()

    def _exchange(self, process: subprocess.Popen[bytes], request: bytes) -> Any:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            # If the process has ended, writing fails. The code below then reports why the process
            # ended.
            with contextlib.suppress(BrokenPipeError):
                _write(process.stdin, request)
            head = _read(process.stdout, 8)
            size = struct.unpack("<Q", head)[0] if len(head) == 8 else None
            if size is not None and size > REPLY_LIMIT_BYTES:
                raise Refused(f"its result is larger than {REPLY_LIMIT_BYTES >> 20} MiB")
            reply = None if size is None else json.loads(_read(process.stdout, size))
            if reply is None:
                raise Refused(_why(process.wait()))
        except BaseException:  # on Ctrl-C too: otherwise, a later request would read this answer
            self._stop()
            raise
        if "refused" in reply:
            raise Refused(reply["refused"] or _NEEDS_MEMORY)
        return reply["value"]


_NEEDS_MEMORY = f"it needs more than {MEMORY_BYTES >> 20} MiB of memory"


def _pack(request: dict[str, Any], data: bytes = b"") -> bytes:
    head = json.dumps(request).encode()
    return struct.pack("<QQ", len(head), len(data)) + head + data


def _start() -> subprocess.Popen[bytes]:
    limits = json.dumps(
        {"path": [os.path.abspath(path) for path in sys.path], "memory_bytes": MEMORY_BYTES}
    )
    try:
        # Python starts faster in isolated mode and without the site module. The search path is
        # passed, so that the new process finds the same packages as this process.
        return subprocess.Popen(
            [sys.executable or "", "-IS", str(_WORKER), limits],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            # The pipes are unbuffered. With a buffer, another thread could hold the lock of the
            # buffer during a fork. The child process would then wait forever when it closes the
            # pipe.
            bufsize=0,
        )
    except OSError as err:
        raise DlmError(
            f"cannot start {sys.executable or 'Python'} for the tokenizer ({err.strerror}): text needs it"
        ) from err


def _write(pipe: IO[bytes], data: bytes) -> None:
    """Write all of ``data`` to an unbuffered pipe."""
    left = memoryview(data)
    while left:
        left = left[pipe.write(left) :]


def _read(pipe: IO[bytes], size: int) -> bytes:
    """Read ``size`` bytes from an unbuffered pipe, or fewer if the pipe ends early."""
    found = bytearray()
    while len(found) < size and (more := pipe.read(size - len(found))):
        found += more
    return bytes(found)


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    """Kill the process and wait for its end. A fork of its ``owner`` only closes its pipes."""
    if os.getpid() == owner:
        process.kill()
        process.wait()
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):
            pipe.close()  # type: ignore[union-attr]


def _why(code: int) -> str:
    if code == -signal.SIGPROF:
        return "it takes more processor time than one second plus one per MiB"
    ended = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return f"{_NEEDS_MEMORY}, or crashes the library ({ended})"
