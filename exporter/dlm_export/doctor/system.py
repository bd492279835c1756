"""Gives the doctor its access to a machine: files, programs, libraries and Python packages.

Tests replace the class ``System`` by a mock.

The machine may be broken, so no answer can be trusted to arrive or to be small. Files are read up
to a size limit. Programs and libraries run in separate processes with limits on time and output. A
driver that hangs or crashes therefore becomes one line of the report, and does not stop it.
"""

from __future__ import annotations

import json
import os
import platform
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dlm_runtime.errors import DlmError
from dlm_runtime.files import read_bytes

FILE_LIMIT_BYTES = 1 << 20
OUTPUT_LIMIT_BYTES = 1 << 16
# Reading gigabytes of TensorRT from a disk without a warm cache takes a while.
PROGRAM_SECONDS, LIBRARY_SECONDS = 5.0, 30.0
_WORKER = Path(__file__).with_name("_ask_library.py")


class System:
    """Access to this machine.

    All file paths are looked up below ``root``. ``variables`` replaces the environment variables.
    """

    def __init__(self, root: Path = Path("/"), variables: Mapping[str, str] | None = None) -> None:
        self.root = root
        self.variables: Mapping[str, str] = os.environ if variables is None else variables
        self.architecture = platform.machine()
        self.python = platform.python_version_tuple()
        self.executable = sys.executable

    def text(self, path: str) -> str | None:
        """Read a small file as text; invalid UTF-8 is replaced.

        Returns ``None`` if the file cannot be read or is larger than ``FILE_LIMIT_BYTES``.
        """
        try:
            return read_bytes(self.root / path.lstrip("/"), FILE_LIMIT_BYTES, DlmError).decode(
                "utf-8", "replace"
            )
        except DlmError:
            return None

    def paths(self, pattern: str) -> list[Path]:
        """Return the existing paths below ``root`` that match a glob pattern, sorted."""
        return sorted(self.root.glob(pattern.lstrip("/")))

    def program(self, *command: str, seconds: float = PROGRAM_SECONDS) -> str | None:
        """Run a program and return its output.

        Returns ``None`` if the program is missing, fails, prints too much or takes longer than
        ``seconds``.
        """
        found = shutil.which(command[0], path=self.variables.get("PATH"))
        return (
            None if found is None else run_bounded([found, *command[1:]], self.variables, seconds)
        )

    def library(self, kind: str, *names: str) -> dict[str, Any]:
        """Load libraries in a separate process (``_ask_library``) and return its answer.

        If that process fails, the answer has the key ``failure`` with a sentence that says why.
        """
        variables = {"ORT_DISABLE_TELEMETRY": "1", **self.variables}
        said = run_bounded(
            [self.executable, str(_WORKER), kind, *names], variables, LIBRARY_SECONDS
        )
        try:
            answer = json.loads(said or "")
        except (ValueError, RecursionError):
            answer = None
        loaded = ", ".join(names) or kind
        broke = f"loading {loaded} crashed, or took more than {LIBRARY_SECONDS:g} s"
        return answer if isinstance(answer, dict) else {"failure": broke}

    def version(self, distribution: str) -> str | None:
        """Return the version of an installed Python distribution, or ``None`` if it is not
        installed.
        """
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            return None

    def requirements(self) -> list[str]:
        """Return the requirements in dlm-export's metadata; empty if it is not installed."""
        try:
            return metadata.requires("dlm-export") or []
        except metadata.PackageNotFoundError:
            return []

    def has_module(self, name: str) -> bool:
        """True if Python can find the module. The module is not imported."""
        return find_spec(name) is not None

    def free_disk_bytes(self, folder: Path) -> int | None:
        try:
            return shutil.disk_usage(folder).free
        except OSError:
            return None


def run_bounded(command: list[str], variables: Mapping[str, str], seconds: float) -> str | None:
    """Run a command and return its output.

    Returns ``None`` if the command does not exit with code 0 within ``seconds``, or if it prints
    more than ``OUTPUT_LIMIT_BYTES``.
    """
    try:
        process = subprocess.Popen(
            command,
            env=dict(variables),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except (OSError, ValueError):
        return None
    assert process.stdout is not None
    told, until = b"", time.monotonic() + seconds
    with process, process.stdout as pipe:
        try:
            while len(told) <= OUTPUT_LIMIT_BYTES:
                if not select.select([pipe], [], [], max(0.0, until - time.monotonic()))[0]:
                    return None
                piece = os.read(pipe.fileno(), OUTPUT_LIMIT_BYTES)
                if not piece:
                    ended = process.wait(max(0.0, until - time.monotonic()))
                    return told.decode("utf-8", "replace") if ended == 0 else None
                told += piece
        except subprocess.TimeoutExpired:
            pass
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # also kills the child processes
    return None
