"""Implements the command line of ``dlm-export``. Other packages do the work of the commands.

- ``app`` defines the program, reports errors and sets exit codes.
- ``options`` declares the options that several commands share.
- ``values`` turns the values of shared options into option dataclasses.
- ``printing`` prints tables and progress.
- ``watch`` draws a canvas in the terminal.
- ``optimum`` makes the command ``build`` available in optimum-cli.
- Every other module defines commands.
"""

from dlm_export.cli.app import command, main

__all__ = ["command", "main"]
