"""Files that take long to make, and that all processes of one test run share.

pytest-xdist starts several processes. The first process that asks for a file makes it, and the others
wait for a lock. The files are in the folder of the test run, which pytest deletes.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return the path ``name`` in a folder of its own. If it does not exist, ``make`` writes it.

    Tests must not change the result.
    """
    run = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        run = run.parent
    folder = run / "shared" / name
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    with (folder.with_suffix(".lock")).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            make(path)
    return path
