"""Lets the doctor read files, run programs and load libraries on a machine that may be broken.

Files are read only up to a size limit. Programs and libraries run in separate processes, with
limits on their time and output. If a driver hangs or crashes, the doctor can therefore report the
failure and continue.

Tests replace the class ``System`` with a mock.
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
from dlm_runtime.providers import installed_version

FILE_LIMIT_BYTES = 1 << 20
OUTPUT_LIMIT_BYTES = 1 << 16
# Loading a library may take longer than running a program, because TensorRT's files are several
# gigabytes large.
PROGRAM_SECONDS, LIBRARY_SECONDS = 5.0, 30.0
_WORKER = Path(__file__).with_name("_ask_library.py")


class System:
    """Access to the files, programs and libraries of this machine.

    File paths are relative to ``root``. ``variables`` replaces the environment variables.
    """

    def __init__(self, root: Path = Path("/"), variables: Mapping[str, str] | None = None) -> None:
        self.root = root
        self.variables: Mapping[str, str] = os.environ if variables is None else variables
        self.architecture = platform.machine()
        self.python = platform.python_version_tuple()
        self.executable = sys.executable

    def text(self, path: str) -> str | None:
        """Read a small file as text. Invalid UTF-8 is replaced.

        Returns ``None`` if the file cannot be read or is larger than ``FILE_LIMIT_BYTES``.
        """
        try:
            return read_bytes(self.root / path.lstrip("/"), FILE_LIMIT_BYTES, DlmError).decode(
                "utf-8", "replace"
            )
        except DlmError:
            return None

    def paths(self, pattern: str) -> list[Path]:
        """Return all paths below ``root`` that match a glob pattern, sorted."""
        return sorted(self.root.glob(pattern.lstrip("/")))

    def program(self, *command: str, seconds: float = PROGRAM_SECONDS) -> str | None:
        """Run a program and return its output.

        Returns ``None`` if the program is missing or fails. The result is also ``None`` if the
        program prints more than ``OUTPUT_LIMIT_BYTES`` or runs longer than ``seconds``.
        """
        found = shutil.which(command[0], path=self.variables.get("PATH"))
        return (
            None if found is None else run_bounded([found, *command[1:]], self.variables, seconds)
        )

    def library(self, kind: str, *names: str) -> dict[str, Any]:
        """Load libraries in a separate process, and return the facts that the process prints.

        The script ``_ask_library`` documents ``kind`` and the facts. If the process fails, the only
        key of the result is ``failure``, and the value of this key is the reason.
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
        """Return the version of a Python distribution, or ``None`` if it is not installed."""
        return installed_version(distribution)

    def requirements(self) -> list[str]:
        """Return the requirements of the installed dlm-export, or ``[]`` if it is not installed."""
        try:
            return metadata.requires("dlm-export") or []
        except metadata.PackageNotFoundError:
            return []

    def has_module(self, name: str) -> bool:
        """Return True if Python can find the module. The module is not imported."""
        return find_spec(name) is not None

    def free_disk_bytes(self, folder: Path) -> int | None:
        try:
            return shutil.disk_usage(folder).free
        except OSError:
            return None


def run_bounded(command: list[str], variables: Mapping[str, str], seconds: float) -> str | None:
    """Run a command and return its output.

    Returns ``None`` if the command does not exit with code 0 within ``seconds``, or if the command
    prints more than ``OUTPUT_LIMIT_BYTES``.
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
                os.killpg(process.pid, signal.SIGKILL)  # kill the process and its children
    return None
