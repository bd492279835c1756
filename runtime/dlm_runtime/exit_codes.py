"""The exit codes of the command line. Each error class names its exit code in ``exit_code``."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """The exit codes for failures. Success is 0, and a command that signal n ended exits with 128 +
    n.

    The exit code says what must change before the same command can succeed. The table for users is
    in docs/guides/troubleshooting.md.
    """

    COULD_NOT = 1
    """The input is correct, but the machine lacks a package, an engine, a device, memory, disk
    space or a permission. Also if another process blocks the command, or if it was interrupted.
    """
    WRONG_INPUT = 2
    """An option, a path or the data at a path is missing, damaged or unsuitable, or the command
    would overwrite a file.
    """
    MISSED = 3
    """The command ran to its end, but parity or an accuracy budget was missed, or the audit of an
    engine failed.
    """
