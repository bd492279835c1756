"""Everything that the doctor asks of a machine: files, programs, libraries, packages. Tests replace
it.

Any answer may be broken, because doctors examine broken machines. Files are read up to a size
limit. Programs and libraries run in separate processes with limits of time and output, so a driver
that hangs or crashes becomes one line of the report.
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
# Loading gigabytes of TensorRT from a cold disk takes a while.
PROGRAM_SECONDS, LIBRARY_SECONDS = 5.0, 30.0
_WORKER = Path(__file__).with_name("_ask_library.py")


class System:
    """This machine. ``root`` replaces / as the root of files."""

    def __init__(self, root: Path = Path("/"), variables: Mapping[str, str] | None = None) -> None:
        self.root = root
        self.variables: Mapping[str, str] = os.environ if variables is None else variables
        self.architecture = platform.machine()
        self.python = platform.python_version_tuple()
        self.executable = sys.executable

    def text(self, path: str) -> str | None:
        """Text of a small file, with invalid UTF-8 replaced, or ``None`` if it cannot be read."""
        try:
            return read_bytes(self.root / path.lstrip("/"), FILE_LIMIT_BYTES, DlmError).decode(
                "utf-8", "replace"
            )
        except DlmError:
            return None

    def paths(self, pattern: str) -> list[Path]:
        """Existing paths below ``root`` that match a glob, sorted."""
        return sorted(self.root.glob(pattern.lstrip("/")))

    def program(self, *command: str, seconds: float = PROGRAM_SECONDS) -> str | None:
        """Output of a program, or ``None`` if it is missing, fails, or takes longer."""
        found = shutil.which(command[0], path=self.variables.get("PATH"))
        return (
            None if found is None else run_bounded([found, *command[1:]], self.variables, seconds)
        )

    def library(self, kind: str, *names: str) -> dict[str, Any]:
        """Ask libraries through ``_ask_library``: its answer, or ``failure`` with a sentence."""
        variables = {"ORT_DISABLE_TELEMETRY": "1", **self.variables}
        said = run_bounded(
            [self.executable, str(_WORKER), kind, *names], variables, LIBRARY_SECONDS
        )
        try:
            answer = json.loads(said or "")
        except (ValueError, RecursionError):
            answer = None
        broke = f"{', '.join(names) or kind} ended the process that asked, or took more than {LIBRARY_SECONDS:g} s"
        return answer if isinstance(answer, dict) else {"failure": broke}

    def version(self, distribution: str) -> str | None:
        """Version of an installed Python distribution, or ``None``."""
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            return None

    def requirements(self) -> list[str]:
        """Requirements in dlm-export's metadata; empty if it is not installed."""
        try:
            return metadata.requires("dlm-export") or []
        except metadata.PackageNotFoundError:
            return []

    def has_module(self, name: str) -> bool:
        """True if Python finds the module; does not import it."""
        return find_spec(name) is not None

    def free_disk_bytes(self, folder: Path) -> int | None:
        try:
            return shutil.disk_usage(folder).free
        except OSError:
            return None


def run_bounded(command: list[str], variables: Mapping[str, str], seconds: float) -> str | None:
    """Output of a process that exits with 0 within ``seconds`` and prints little, else ``None``."""
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
                os.killpg(process.pid, signal.SIGKILL)  # also ends its child processes
    return None
