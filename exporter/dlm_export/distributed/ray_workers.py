"""Runs pieces of work as tasks of Ray (https://docs.ray.io/), on one machine or on a cluster."""

from __future__ import annotations

import functools
import importlib.util
import os
import pickle
import signal
import socket
import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from dlm_export.distributed.record import Record
from dlm_export.distributed.workers import Kept, Work, WorkerError, WorkerInputError, single_thread
from dlm_runtime.errors import DlmError

LOCAL = "local"
RETRIES = 3  # number of times that Ray runs a task again if the task's worker dies
_CONNECT_SECONDS = 5.0
_STARTS = 4  # number of attempts to start Ray before the command fails


class RayWorkers:
    """Implements ``Workers`` with Ray."""

    def __init__(self, record: Record | None = None, device: torch.device | None = None) -> None:
        """Ray reserves one core for each task, and also one GPU if ``device`` is a GPU."""
        self.record = record
        self._gpus = 1 if device is not None and device.type == "cuda" else 0

    def recording(self, record: Record | None, device: torch.device) -> RayWorkers:
        """Return workers that store results in ``record``, and compute on ``device``."""
        return RayWorkers(record, device)

    def each(
        self,
        stage: str,
        work: Work,
        shared: Any,
        pieces: Sequence[Any],
        kept: Sequence[Kept] | None = None,
        *,
        keep: bool = False,
    ) -> Generator[tuple[Any, Kept], None, None]:
        """See ``Workers``."""
        import ray

        task = _task().options(
            num_cpus=1, num_gpus=self._gpus, num_returns=2, max_retries=RETRIES, name=stage
        )
        common = ray.put(shared)
        started: list[Any] = []  # the two results of each task, or None
        for number, piece in enumerate(pieces):
            if self._is_recorded(stage, number, keep=keep):
                started.append(None)
            else:
                handle = None if kept is None else kept[number]
                started.append(task.remote(work, common, piece, handle))
        try:
            for number, refs in enumerate(started):
                if refs is None:
                    yield self._recorded(stage, number, keep=keep)
                    continue
                result = _writable(_fetched(refs[0], stage))
                if self.record is not None:
                    if keep:
                        self.record[f"{stage}/{number}-kept"] = _fetched(refs[1], stage)
                    self.record[f"{stage}/{number}"] = result
                started[number] = None  # lets Ray free the result
                yield result, refs[1] if keep else None
        finally:
            for refs in started:
                if refs is not None:
                    ray.cancel(refs[0])

    def held(self, stage: str, count: int) -> list[Kept] | None:
        """See ``Workers``."""
        names = [f"{stage}/{number}-kept" for number in range(count)]
        if self.record is None or not all(name in self.record for name in names):
            return None
        import ray

        return [ray.put(self.record[name]) for name in names]

    def _is_recorded(self, stage: str, number: int, *, keep: bool) -> bool:
        name = f"{stage}/{number}"
        return (
            self.record is not None
            and name in self.record
            and (not keep or f"{name}-kept" in self.record)
        )

    def _recorded(self, stage: str, number: int, *, keep: bool) -> tuple[Any, Kept]:
        import ray

        assert self.record is not None
        name = f"{stage}/{number}"
        return self.record[name], ray.put(self.record[f"{name}-kept"]) if keep else None


@functools.cache
def _task() -> Any:
    """Return the Ray function that runs all pieces. It is created once, so Ray exports it once."""
    import ray

    return ray.remote(_run)


def _run(work: Work, shared: Any, piece: Any, kept: Any) -> tuple[Any, Any]:
    single_thread()
    return work(shared, _writable(piece), kept)


def _writable(value: Any) -> Any:
    """Copy a value, because numpy arrays that come from Ray's object store are read-only."""
    return pickle.loads(pickle.dumps(value))


def _fetched(ref: Any, stage: str) -> Any:
    """Wait for the result of a task. Raises the task's DlmError, or WorkerError."""
    import ray

    shown = stage.partition("-")[0]
    try:
        return ray.get(ref)
    except ray.exceptions.RayTaskError as err:
        if isinstance(err.cause, DlmError):
            raise err.cause from err
        said = f"{type(err.cause).__name__}: {err.cause}"
        raise WorkerError(f"--ray: a worker failed in the stage {shown} ({said})") from err
    except ray.exceptions.RayError as err:
        raise WorkerError(
            f"--ray: the workers of the stage {shown} died {1 + RETRIES} times ({type(err).__name__}). See Ray's logs; if "
            "memory is short, use machines with more memory per core."
        ) from err


@contextmanager
def connected(address: str | None, cores: int | None = None) -> Iterator[RayWorkers | None]:
    """Connect to Ray while the ``with`` block runs. Yields ``None`` if ``address`` is ``None``.

    The address ``local`` starts Ray on this machine, with ``cores`` cores or with all cores. If this
    process is already connected to Ray, ``local`` uses this connection. Other addresses are
    HOST:PORT of a cluster to which this machine belongs. Raises WorkerInputError, or WorkerError if
    Ray does not start on this machine.
    """
    if address is None:
        yield None
        return
    if importlib.util.find_spec("ray") is None:
        raise WorkerInputError(
            "--ray: Ray is not installed. Run: pip install -c constraints.txt '.[ray]'"
        )
    host, _, port = address.rpartition(":")
    if address != LOCAL and not (host and port.isdecimal() and 0 < int(port) < 1 << 16):
        raise WorkerInputError(f"--ray {address}: write local, or HOST:PORT, such as 10.0.0.5:6379")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    if address == LOCAL and ray.is_initialized():
        yield RayWorkers()
        return
    settings: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    if address == LOCAL:
        settings |= {
            "num_cpus": cores or len(os.sched_getaffinity(0)),
            "include_dashboard": False,
            "_node_ip_address": "127.0.0.1",
        }
    else:
        settings["address"] = address
        _check_reachable(address, host, int(port))
    ours = signal.getsignal(signal.SIGTERM)
    try:
        _start(settings)
    except Exception as err:  # Ray raises many kinds of errors, and Exception itself
        said = (str(err).splitlines() or [type(err).__name__])[0]
        if address == LOCAL:
            raise WorkerError(f"--ray local: Ray did not start ({said})") from err
        raise WorkerInputError(f"--ray {address}: cannot connect to Ray ({said})") from err
    finally:
        # Restore our signal handler. Ray's handler would end the process before the build can
        # remove its unfinished files.
        if ours is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, ours)
    try:
        yield RayWorkers()
    finally:
        ray.shutdown()


def _start(settings: Mapping[str, Any]) -> None:
    """Call ``ray.init``.

    Ray gives up if one of its processes does not start within 30 s, which happens while other
    programs use all cores. The function then tries again.
    """
    import ray

    for attempt in range(_STARTS):
        try:
            ray.init(**settings)
            return
        except Exception as err:  # Ray has no class for this error
            ray.shutdown()
            if "timed out during startup" not in str(err) or attempt == _STARTS - 1:
                raise


def _check_reachable(address: str, host: str, port: int) -> None:
    """Raise WorkerInputError if nothing listens at the address. Ray itself would wait for minutes."""
    try:
        socket.create_connection((host.strip("[]"), port), _CONNECT_SECONDS).close()
    except OSError as err:
        raise WorkerInputError(
            f"--ray {address}: no answer ({err.strerror or err}). Start Ray there with `ray start --head`, or use --ray local."
        ) from err
