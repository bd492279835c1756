"""Stores the results of finished pieces in a folder, so that a stopped build can continue.

Each file contains a pickle and the SHA-256 of the pickle. A pickle can name any function, and
unpickling would then call the function. The reader therefore accepts only numpy arrays, Python's
own types and the classes in ``_CLASSES``.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

from dlm_calibration.errors import CalibrationError

_CLASSES = frozenset(
    {
        ("numpy", "dtype"),
        ("numpy", "ndarray"),
        ("numpy._core.multiarray", "_reconstruct"),
        ("numpy._core.multiarray", "scalar"),
        ("numpy._core.numeric", "_frombuffer"),
        ("dlm_calibration.observers", "Observer"),
        ("dlm_calibration.observers", "Observers"),
        ("dlm_calibration.metrics", "Frontier"),
        ("dlm_calibration.metrics", "Rows"),
        ("dlm_calibration.metrics", "Run"),
        ("dlm_calibration.states", "Draft"),
        ("dlm_calibration.states", "State"),
        ("dlm_export.judging.accuracy.evidence", "Compared"),
        ("dlm_export.judging.accuracy.evidence", "Part"),
        ("dlm_export.judging.accuracy.frontier", "FrontierState"),
        ("dlm_export.judging.accuracy.frontier", "Met"),
        ("dlm_export.judging.accuracy.masked", "Masked"),
        ("dlm_export.judging.precision_search.sensitivity", "Sums"),
        ("dlm_export.judging.sides.bundle", "Spent"),
        ("dlm_export.network.turns", "Canvas"),
        ("dlm_export.network.turns", "Turn"),
        ("dlm_export.network.passes", "Span"),
        ("dlm_export.quantising.in_pieces", "Observation"),
    }
)


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _CLASSES:
            raise pickle.UnpicklingError(f"it contains {module}.{name}")
        return super().find_class(module, name)


class Record:
    """The results of finished pieces, in files below ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __contains__(self, name: str) -> bool:
        return self._path(name).is_file()

    def __setitem__(self, name: str, value: Any) -> None:
        path = self._path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        data = pickle.dumps(value, protocol=5)
        partial.write_bytes(hashlib.sha256(data).digest() + data)
        os.replace(partial, path)

    def __getitem__(self, name: str) -> Any:
        """Return a stored result. Raises CalibrationError if the file is damaged."""
        path = self._path(name)
        try:
            content = path.read_bytes()
            if hashlib.sha256(content[32:]).digest() != content[:32]:
                raise ValueError("its SHA-256 is wrong")
            return _Reader(io.BytesIO(content[32:])).load()
        except (OSError, ValueError, EOFError, TypeError, AttributeError, IndexError) as err:
            raise self._damaged(path, err) from err
        except (pickle.UnpicklingError, ImportError, KeyError) as err:
            raise self._damaged(path, err) from err

    def remove(self, name: str) -> None:
        """Remove the results whose names are ``name``, or start with ``name`` and a slash."""
        self._path(name).unlink(missing_ok=True)
        shutil.rmtree(self._folder / name, ignore_errors=True)

    @staticmethod
    def _damaged(path: Path, err: Exception) -> CalibrationError:
        return CalibrationError(
            f"{path}: not a result of a build with --ray ({err}). Remove it, and build again."
        )

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.piece"
