"""Exit codes of the command line. Each error class has its code (``exit_code``)."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of the command line, besides 0 (done) and 128 + n (ended by signal n).

    The code says what must change before the same command works. docs/guides/troubleshooting.md has
    the table for users.
    """

    COULD_NOT = 1
    """The machine lacks a package, engine, device, memory, disk space or permission, another
    process blocks it, or it was interrupted. The input is not wrong.
    """
    WRONG_INPUT = 2
    """An option, a path or the data there is missing, damaged, unsuitable or must not be replaced."""
    MISSED = 3
    """The command ran, but parity, an accuracy budget or an engine's audit failed."""
