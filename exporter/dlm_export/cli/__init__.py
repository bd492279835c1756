"""The command line ``dlm-export``: reads arguments, prints results and sets exit codes.

The work itself is done by functions of the other packages.

``app`` is the command with its errors and exit codes. Each group of commands has one module:
``inspecting``, ``building``, ``judging``, ``fitting``, ``capturing``, ``running`` (with ``watch``),
``conversing``, ``constraining``, ``planning``, ``embedding`` and ``examining``. ``options``
declares the options that commands share, ``values`` turns their values into option dataclasses, and
``printing`` prints tables and progress. ``optimum`` makes ``build`` available in optimum-cli.
"""

from dlm_export.cli.app import command, main

__all__ = ["command", "main"]
