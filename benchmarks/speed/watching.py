"""Run a command and measure its seconds, its memory, and the bytes that it reads and writes."""

from __future__ import annotations

import subprocess
import threading
import time
from pathlib import Path
from typing import Any

SAMPLE_S = 0.05


def watched(command: list[str]) -> tuple[str, dict[str, Any]]:
    """Run a command. Returns its output and a row.

    The row contains the ``seconds``, the ``exit`` code and the bytes of ``Watched.row``.
    """
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        watching = Watched(process)
        try:
            text, _ = process.communicate()
        except BaseException:  # if Ctrl-C or a signal ends this process, end the command too
            process.terminate()
            raise
    seconds = time.perf_counter() - began
    return text, {"seconds": round(seconds, 2), **watching.row(), "exit": process.returncode}


def figures(path: Path) -> dict[str, int]:
    """Read the lines ``name: number`` of a file under /proc/PID.

    Values in kB are converted to bytes.
    """
    found = {}
    for line in path.read_text().splitlines():
        name, _, value = line.partition(":")
        number, *unit = value.split() or [""]
        if number.isdigit():
            found[name] = int(number) * (1024 if unit == ["kB"] else 1)
    return found


class Watched:
    """Records the highest memory of a process and the bytes that it read and wrote.

    The numbers are read every ``SAMPLE_S`` seconds.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.folder = Path(f"/proc/{process.pid}")
        self.process = process
        self.peak = dict.fromkeys(("RssAnon", "RssFile", "VmHWM"), 0)
        self.moved: dict[str, int] = {}
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()

    def _watch(self) -> None:
        while self.process.poll() is None:
            try:
                status = figures(self.folder / "status")
                self.moved = figures(self.folder / "io") or self.moved
            except (
                FileNotFoundError,
                ProcessLookupError,
                PermissionError,
            ):  # the process has just ended
                break
            for name in self.peak:
                self.peak[name] = max(self.peak[name], status.get(name, 0))
            time.sleep(SAMPLE_S)

    def row(self) -> dict[str, int]:
        """Return the bytes by name.

        ``disk`` counts bytes that were read from and written to storage. ``calls`` counts the bytes
        of all read and write calls, including cached reads.
        """
        self.thread.join()
        names = {
            "disk_read": "read_bytes",
            "disk_written": "write_bytes",
            "calls_read": "rchar",
            "calls_written": "wchar",
        }
        return {
            "peak_anonymous_bytes": self.peak["RssAnon"],
            "peak_mapped_bytes": self.peak["RssFile"],
            "peak_rss_bytes": self.peak["VmHWM"],
            **{f"{ours}_bytes": self.moved.get(theirs, 0) for ours, theirs in names.items()},
        }
