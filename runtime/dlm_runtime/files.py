"""Reads small files that are not trusted.

Only regular files up to a size limit are read. Pipes and devices are rejected, because reading a
pipe or device may never end. Text must be valid UTF-8. Every function raises the exception
``error`` if it fails. The message names the file and ends with ``hint``.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from pathlib import Path
from typing import Any

from dlm_runtime.errors import DlmError

_PIECE_BYTES = 1 << 16


def read_bytes(
    path: Path, limit_bytes: int, error: type[DlmError], hint: str = "", sha256: str | None = None
) -> bytes:
    """Read a regular file.

    Symbolic links are followed. ``sha256`` is the expected hash, or None to accept any content.
    """
    try:
        # Opening a pipe would wait for a writer, so the file is opened without blocking. The type
        # of the open file is checked, because the file at the path could be replaced after a check
        # of the path.
        with open(
            os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC), "rb"
        ) as file:
            info = os.fstat(file.fileno())
            if not stat.S_ISREG(info.st_mode):
                raise error(f"{path}: not a plain file.{hint}")
            if info.st_size > limit_bytes:
                raise error(
                    f"{path}: {info.st_size} bytes is too large: the limit is {limit_bytes}.{hint}"
                )
            # ``read`` allocates as many bytes as its argument says. The argument is therefore the
            # size that the file system reports, and not the size limit. For files in /proc, the
            # reported size is 0.
            data = file.read(info.st_size + 1)
            while len(data) <= limit_bytes and (more := file.read(_PIECE_BYTES)):
                data += more
            if len(data) > limit_bytes:
                raise error(f"{path}: too large: the limit is {limit_bytes} bytes.{hint}")
            if sha256 is not None and hashlib.sha256(data).hexdigest() != sha256:
                raise error(f"{path}: its SHA-256 differs from the bundle's manifest.{hint}")
            return data
    except MemoryError as err:
        raise error(
            f"{path}: not enough memory to read it: end other programs, or raise its limit.{hint}"
        ) from err
    except FileNotFoundError as err:
        raise error(f"{path}: no such file.{hint}") from err
    except OSError as err:
        raise error(f"{path}: not readable ({err.strerror}).{hint}") from err
    except ValueError as err:  # the path contains a NUL
        raise error(f"{path!r}: not a valid file name ({err}).{hint}") from err


def read_text(
    path: Path, limit_bytes: int, error: type[DlmError], hint: str = "", sha256: str | None = None
) -> str:
    """Read a regular file as UTF-8 text. ``sha256`` works as in ``read_bytes``."""
    try:
        return read_bytes(path, limit_bytes, error, hint, sha256).decode("utf-8")
    except UnicodeDecodeError as err:
        raise error(
            f"{path}: not readable as UTF-8 text ({err.reason} at byte {err.start}).{hint}"
        ) from err


def read_object(
    path: Path, limit_bytes: int, error: type[DlmError], hint: str = ""
) -> dict[str, Any]:
    """Read a regular file that contains a JSON object."""
    data = read_bytes(path, limit_bytes, error, hint)
    try:
        value = parse_json(data.decode("utf-8"))
    except ValueError as err:  # includes UnicodeDecodeError
        raise error(f"{path}: not readable as JSON ({err}).{hint}") from err
    if not isinstance(value, dict):
        raise error(f"{path}: expected a JSON object, found {type(value).__name__}.{hint}")
    return value


def parse_json(text: str) -> Any:
    """Parse JSON. Raises ValueError if a string is not valid UTF-8.

    Integers that do not fit into 64 bits are converted to doubles. Integers of more than 308 digits
    become infinity. Callers can then compare such a number with a limit, and reject the number if
    it is too large.
    """
    try:
        value = json.loads(
            text, parse_int=lambda digits: int(digits) if len(digits) < 20 else float(digits)
        )
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except RecursionError as err:
        raise ValueError("nested too deeply") from err
    except UnicodeEncodeError as err:
        raise ValueError("an escape for half of a surrogate pair") from err
    return value
