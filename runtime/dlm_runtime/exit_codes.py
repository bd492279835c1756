"""The exit codes of the command line. Each error class names its exit code in ``exit_code``."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """The exit codes for failures.

    Success is 0. If signal n ended a command, the command's exit code is 128 + n.

    The exit code of a failed command says what must change before the same command can succeed.
    docs/guides/troubleshooting.md explains the exit codes to users.
    """

    COULD_NOT = 1
    """The input is correct, but the machine lacks a package, an engine, a device, memory, disk
    space or a permission. This exit code is also used if another process blocks the command, or if
    the command was interrupted.
    """
    WRONG_INPUT = 2
    """An option, a path or the data at a path is missing, damaged or unsuitable, or the command
    would overwrite a file.
    """
    MISSED = 3
    """The command finished, but a check failed: the bundle differs from PyTorch, an accuracy budget
    is exceeded, or the audit of an engine failed.
    """
