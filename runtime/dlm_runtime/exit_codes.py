"""Exit codes of the command line. Each error class has its code (``exit_code``)."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of the command line, besides 0 (done) and 128 + n (ended by signal n).

    The code says what must change before the same command works. docs/guides/troubleshooting.md has
    the table for users.
    """

    COULD_NOT = 1
    """The machine: a package, engine, device, memory, room on disk or a right is missing, another
    process is at it, or it was interrupted. Nothing is wrong with what was given.
    """
    WRONG_INPUT = 2
    """What was given: an option, a path, or what lies there, missing, damaged, not fitting, not to
    be replaced.
    """
    MISSED = 3
    """It ran, and parity, an accuracy budget or an engine's audit failed."""
