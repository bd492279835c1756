"""Detects the use of an object of the native library in a forked process.

A fork copies the memory of the process, but only one of its threads: the thread that calls fork. If
another thread held a lock, this lock stays locked in the child process. The threads of an engine or
a scheduler do not exist in the child. A native call in the child could therefore wait forever. For
this reason, each object belongs to the process that created it. In other processes, the object's
methods raise ForkError.
"""

from __future__ import annotations

import os

from dlm_runtime.errors import ForkError


class Origin:
    """Remembers the process that created an object."""

    def __init__(self, what: str) -> None:
        """``what`` names the object in error messages, such as "bundle"."""
        self._what, self._process = what, os.getpid()

    @property
    def is_here(self) -> bool:
        """True if this process created the object."""
        return os.getpid() == self._process

    def check(self) -> None:
        """Raise ForkError if a different process created the object."""
        if not self.is_here:
            raise ForkError(
                f"the {self._what} belongs to process {self._process}, but this is process {os.getpid()}, forked from it. "
                "Open the bundle in this process, after the fork."
            )
