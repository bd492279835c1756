"""The command line: arguments in, printed results and exit codes out.

``app`` is the command itself, with its errors and exit codes. Each group of commands has a file:
``inspecting``, ``building``, ``judging``, ``fitting``, ``capturing``, ``running`` (with ``watch``),
``conversing``, ``constraining``, ``planning``, ``embedding``, ``examining``. ``options`` declares
shared options, ``values`` turns them into option dataclasses, and ``printing`` prints tables and
progress. ``optimum`` offers ``build`` to optimum-cli.
"""

from dlm_export.cli.app import command, main

__all__ = ["command", "main"]
