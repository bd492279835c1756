"""Starts ``dlm-export serve`` as a process for tests and benchmarks."""

from __future__ import annotations

import hashlib
import json
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

START_S = 120
_ADDRESS = re.compile(r" at (https?)://([^:]+):(\d+)/v1")


@dataclass
class Served:
    """A running server.

    Args:
        process: The process that runs ``dlm-export serve``.
        host, port: The address of the server.
        model: The name of the server's first model.
        client: An httpx client that is connected to the server.
        lines: The lines that the process wrote to stderr.
        reader: The thread that reads stderr and appends to ``lines``.
    """

    process: subprocess.Popen[str]
    host: str
    port: int
    model: str
    client: Any
    lines: list[str]
    reader: threading.Thread

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def stop(self) -> int:
        """Send SIGTERM. Returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)

    def memory_kib(self, name: str = "VmRSS") -> int:
        """Return the server's resident memory ("VmRSS") or peak memory ("VmHWM") in KiB.

        Linux only.
        """
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.findall(rf"{name}:\s*(\d+)", status)[0])

    def reset_peak(self) -> None:
        """Set the server's peak memory ("VmHWM") to its current memory. Linux only."""
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")

    def said(self) -> str:
        """Return all lines of stderr. The process must have ended."""
        self.reader.join(10)
        return "".join(self.lines)


def read_all(client: socket.socket) -> bytes:
    """Return everything that the server sends until it closes the connection."""
    found = b""
    try:
        while piece := client.recv(1 << 16):
            found += piece
    except ConnectionResetError:
        pass
    return found


def change_template(bundle: Path, template: str) -> None:
    """Change the chat template of a bundle, but not the one of its compiled text file."""
    manifest = json.loads((bundle / "manifest.json").read_text())
    (bundle / "chat_template.jinja").write_text(template)
    manifest["files"]["chat_template.jinja"] = {
        "bytes": len(template),
        "sha256": hashlib.sha256(template.encode()).hexdigest(),
    }
    (bundle / "manifest.json").write_text(json.dumps(manifest))


@contextmanager
def serving(bundle: Path, *arguments: str) -> Iterator[Served]:
    """Serve a bundle until the ``with`` block ends. ``arguments`` go to ``dlm-export serve``."""
    import httpx

    command = [sys.executable, "-m", "dlm_export.cli", "serve", str(bundle), "--port", "0"]
    process = subprocess.Popen([*command, *arguments], stderr=subprocess.PIPE, text=True)
    found: queue.Queue[str] = queue.Queue()
    lines: list[str] = []

    def read() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line)
            found.put(line)
        found.put("")

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        while True:
            line = found.get(timeout=START_S)
            assert line, "".join(lines)
            match = _ADDRESS.search(line)
            if match:
                break
        host, port = match[2], int(match[3])
        with httpx.Client(base_url=f"{match[1]}://{host}:{port}", timeout=120) as client:
            yield Served(process, host, port, bundle.name, client, lines, reader)
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
