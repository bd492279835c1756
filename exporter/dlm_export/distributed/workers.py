"""Defines how a stage runs independent pieces of its work.

How a stage is divided into pieces depends only on the input of the stage. The results are merged in
the order of the pieces. The merged result therefore does not depend on the number of workers.
"""

from __future__ import annotations

import functools
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from dlm_export.distributed.record import Record
from dlm_export.families.base import Parameters
from dlm_export.network.spec import NetworkSpec
from dlm_export.sources import Source, open_parameters
from dlm_runtime.errors import DlmError, ExitCode

Kept = Any
"""A handle of a value that stays where it was computed until another piece needs it."""
Work = Callable[[Any, Any, Any], tuple[Any, Any]]
"""The type of a function that computes a piece: ``work(shared, piece, kept) -> (result, to_keep)``.

``shared`` is the same for all pieces of a stage. ``kept`` is the value that an earlier piece kept,
or ``None``. The function must be at the top level of a module, because workers import it.
"""


class WorkerError(DlmError):
    """Raised if a worker cannot compute a piece."""


class WorkerInputError(WorkerError):
    """Raised if a worker cannot read a file, or if there are no workers at the given address."""

    exit_code = ExitCode.WRONG_INPUT


class Workers(Protocol):
    """Computes pieces of work."""

    record: Record | None
    """Stores the results of finished pieces. ``None`` stores no results."""

    def each(
        self,
        stage: str,
        work: Work,
        shared: Any,
        pieces: Sequence[Any],
        kept: Sequence[Kept] | None = None,
        *,
        keep: bool = False,
    ) -> Iterator[tuple[Any, Kept]]:
        """Compute all pieces, and yield the results in the order of the pieces.

        Args:
            stage: Name of the stage. It identifies the results in ``record``, so it must contain a
                hash of everything on which the results depend.
            work: The function that computes a piece.
            shared: The first argument of ``work``, which each worker receives once.
            pieces: The second argument of ``work``, for each piece.
            kept: For each piece, a handle that an earlier call has yielded. The third argument of
                ``work`` is the value of this handle. If ``kept`` is ``None``, the third argument is
                ``None``.
            keep: True if later pieces need the second value that ``work`` returns (``to_keep``).

        Yields:
            The result of each piece, and a handle of ``to_keep``.

        Raises:
            WorkerError: A worker died repeatedly, or cannot read the checkpoint.
            DlmError: ``work`` has raised this error.
        """

    def held(self, stage: str, count: int) -> list[Kept] | None:
        """Return the handles of a stage of ``count`` pieces whose results are in ``record``.

        Returns ``None`` if ``record`` no longer contains the values of the handles.
        """


@dataclass(frozen=True)
class Shared:
    """A checkpoint or bundle that all workers open, and the device on which they compute."""

    path: Path
    network: NetworkSpec
    config_sha256: str | None
    device: str

    @classmethod
    def of(cls, source: Source, device: torch.device) -> Shared:
        return cls(source.path.resolve(), source.network, source.config_sha256, device.type)

    def parameters(self) -> Parameters:
        """Open the source's parameters in this process. Raises WorkerInputError."""
        return _opened(self.path, self.config_sha256, self.network)

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.device)


_last: list[tuple[Any, Parameters]] = []  # the source that this process has opened last


def _opened(path: Path, config_sha256: str | None, network: NetworkSpec) -> Parameters:
    key = (path, config_sha256, network)
    if not _last or _last[0][0] != key:
        with reading(path):
            _last[:] = [(key, open_parameters(path, network, config_sha256))]
    return _last[0][1]


class reading:
    """Converts an error of a worker that reads files at ``path`` to a WorkerInputError."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None: ...

    def __exit__(self, _: object, err: BaseException | None, __: object) -> None:
        if isinstance(err, (DlmError, OSError)):
            raise WorkerInputError(
                f"a Ray worker on {socket.gethostname()} cannot read {self._path} ({err}). Use paths that all machines share."
            ) from err


@functools.cache
def single_thread() -> None:
    """Let torch use one thread in this process, because Ray reserves one core for each task."""
    torch.set_num_threads(1)
