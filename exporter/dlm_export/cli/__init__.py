"""The command line: arguments in, printed results and exit codes out. Everything it does is a
function of another room.

``app`` is the command itself, with its errors and exit codes. A file for each group of commands
parses and prints: ``inspecting``, ``building``, ``judging``, ``fitting``, ``capturing``,
``running`` (with ``watch``), ``conversing``, ``constraining``, ``planning``, ``embedding``.
``options`` declares the options they share and makes the rooms' option dataclasses, ``printing``
prints tables and progress; ``optimum`` offers ``build`` to optimum-cli.
"""

from dlm_export.cli.app import command, main

__all__ = ["command", "main"]
