"""Where a bundle's tokenizer and chat template run: a process of their own, which the kernel
bounds.

Both are programs in all but name. A normaliser can double a text sixty times, a template can loop
for ever without writing a letter, and the libraries that run them panic, abort or ask for
gigabytes, at any text and not only as they are read. No check of what they say is complete, and
Python cannot stop a thread: so they get ``MEMORY_BYTES`` of address space and, for each request, a
second of processor time and another for every MiB of it. What ends there ends alone.

The process starts in 30 ms, takes 15 MiB beside the vocabulary, and answers in some 50 us. It leads
its own session, so that Ctrl-C does not reach it, and ends when its input is closed: with this
object, or with the process that it belongs to.
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
from pathlib import Path
from typing import IO, Any

from dlm_runtime.errors import DlmError

MEMORY_BYTES = 512 << 20  # a vocabulary of 262,144 ids takes 250 MiB while it is read
REPLY_LIMIT_BYTES = 64 << 20
_WORKER = Path(__file__).with_name("_worker.py")


class Refused(Exception):
    """A request that the library refuses, or that meets a limit: why."""


class TextProcess:
    """One tokenizer, loaded in its own process. Threads take turns; a process that ended is started
    again when needed.
    """

    def __init__(
        self, tokenizer: bytes, template: str | None, special_tokens: dict[str, str]
    ) -> None:
        """Raises Refused for a tokenizer that cannot be loaded."""
        self._load = _pack(
            {"do": "load", "template": template, "special_tokens": special_tokens}, tokenizer
        )
        self._owner = 0  # the process that this object belongs to
        self.ask("names", tokens=[])

    def ask(self, do: str, **arguments: Any) -> Any:
        """What a method of the worker's ``Text`` returns. Raises Refused; TypeError and ValueError
        for what is no JSON.
        """
        if (
            self._owner != os.getpid()
        ):  # first used, or first used behind a fork: the process is the other side's
            self._owner, self._lock, self._process = os.getpid(), threading.Lock(), None
        request = _pack({"do": do, **arguments})
        with self._lock:
            if self._process is not None and self._process.poll() is not None:
                self._stop()  # someone ended it between two requests
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
        """End the process; a later request starts another."""
        if self._owner == os.getpid():
            with self._lock:
                self._stop()

    def _stop(self) -> None:
        self._process = None
        self._end()

    def _exchange(self, process: subprocess.Popen[bytes], request: bytes) -> Any:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with contextlib.suppress(BrokenPipeError):  # why is read from its end
                _write(process.stdin, request)
            head = _read(process.stdout, 8)
            size = struct.unpack("<Q", head)[0] if len(head) == 8 else None
            if size is not None and size > REPLY_LIMIT_BYTES:
                raise Refused(f"it makes more than {REPLY_LIMIT_BYTES >> 20} MiB of it")
            reply = None if size is None else json.loads(_read(process.stdout, size))
            if reply is None:
                raise Refused(_why(process.wait()))
        except BaseException:  # Ctrl-C too: what is still on its way answers no later request
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
        # Isolated, without site: it starts sooner, and finds packages where this process finds
        # them.
        return subprocess.Popen(
            [sys.executable or "", "-IS", str(_WORKER), limits],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            # Unbuffered: a buffer has a lock. If a thread holds it during a fork, the forked process
            # waits for it forever as it closes the pipe.
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
    """Read ``size`` bytes from an unbuffered pipe; fewer if it ends."""
    found = bytearray()
    while len(found) < size and (more := pipe.read(size - len(found))):
        found += more
    return bytes(found)


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    """End a process and collect it; behind a fork only its pipes are ours to close."""
    if os.getpid() == owner:
        process.kill()
        process.wait()
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):
            pipe.close()  # type: ignore[union-attr]


def _why(code: int) -> str:
    if code == -signal.SIGPROF:
        return "it takes more than a second of processor time, and another for every MiB of it"
    ended = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return f"{_NEEDS_MEMORY}, or breaks the library ({ended})"
