"""Objects of the native library belong to the process that made them.

A fork copies the memory of all threads, but only the calling thread itself. Locks that other
threads held stay locked, and the threads of an engine or a scheduler are missing. A call in the
child process would wait for them forever.
"""

from __future__ import annotations

import os

from dlm_runtime.errors import ForkError


class Origin:
    """Remembers the process that made an object."""

    def __init__(self, what: str) -> None:
        """``what``: the object, for error messages, such as "bundle"."""
        self._what, self._process = what, os.getpid()

    @property
    def is_here(self) -> bool:
        """True in the process that made the object."""
        return os.getpid() == self._process

    def check(self) -> None:
        """Raise ForkError in any other process."""
        if not self.is_here:
            raise ForkError(
                f"the {self._what} belongs to process {self._process}, but this is process {os.getpid()}, forked from it. "
                "Open the bundle in this process, after the fork."
            )
