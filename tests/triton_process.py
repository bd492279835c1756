"""A ``tritonserver`` process for tests and benchmarks.

The package nvidia-pytriton contains tritonserver. Install it into a separate folder::

    pip install --no-deps --target build/pytriton nvidia-pytriton==0.7.0

To use another folder, set $DLM_PYTRITON to its path.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

ROOT = Path(__file__).parent.parent
PYTRITON = Path(os.environ.get("DLM_PYTRITON", ROOT / "build" / "pytriton"))
START_S = 60
STOP_S = 40


def missing() -> str | None:
    """The reason why tritonserver cannot run here, or None."""
    if not (PYTRITON / "pytriton").is_dir():
        return f"nvidia-pytriton is not in {PYTRITON}: see tests/triton_process.py"
    return None


@dataclass
class Triton:
    """A running tritonserver. ``http``, ``grpc`` and ``metrics`` are addresses (HOST:PORT)."""

    process: subprocess.Popen[bytes]
    http: str
    grpc: str
    metrics: str
    log: Path
    client: httpx.Client

    def load(self, model: str) -> None:
        """Load the versions of a model that its configuration selects."""
        found = self.client.post(f"/v2/repository/models/{model}/load", timeout=START_S)
        assert found.status_code == 200, (found.text, self.said())

    def unload(self, model: str) -> None:
        """Start to unload a model. Running requests are finished."""
        found = self.client.post(f"/v2/repository/models/{model}/unload", timeout=START_S)
        assert found.status_code == 200, (found.text, self.said())

    def said(self) -> str:
        """The log of the server."""
        return self.log.read_text(errors="replace")


def _free_ports(count: int) -> list[int]:
    taken = [socket.socket() for _ in range(count)]
    for each in taken:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in taken]
    for each in taken:
        each.close()
    return ports


@contextmanager
def triton(repository: Path, folder: Path, *models: str) -> Iterator[Triton]:
    """Run tritonserver until the ``with`` block ends. ``folder`` is for the log."""
    ports = _free_ports(3)
    log = folder / "triton.log"
    libraries = [PYTRITON / "nvidia_pytriton.libs", Path(sysconfig.get_config_var("LIBDIR"))]
    paths = {"LD_LIBRARY_PATH": ":".join(map(str, libraries))}
    arguments = [
        f"--model-repository={repository}",
        "--model-control-mode=explicit",
        *(f"--load-model={model}" for model in models),
        *("--http-address=127.0.0.1", "--grpc-address=127.0.0.1", "--metrics-address=127.0.0.1"),
        f"--http-port={ports[0]}",
        f"--grpc-port={ports[1]}",
        f"--metrics-port={ports[2]}",
        "--allow-gpu-metrics=false",
    ]
    program = PYTRITON / "pytriton" / "tritonserver" / "bin" / "tritonserver"
    http, grpc, metrics = (f"127.0.0.1:{port}" for port in ports)
    with (
        log.open("wb") as file,
        httpx.Client(base_url=f"http://{http}", timeout=60) as client,
        subprocess.Popen(
            [program, *arguments],
            stdout=file,
            stderr=file,
            env=os.environ | paths,
        ) as process,
    ):
        made = Triton(process, http, grpc, metrics, log, client)
        try:
            _wait(made)
            yield made
        finally:
            made.client.close()  # because tritonserver does not stop while connections are open
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _wait(server: Triton) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        assert server.process.poll() is None, server.said()
        try:
            if server.client.get("/v2/health/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise AssertionError(f"tritonserver did not start: {server.said()}")
