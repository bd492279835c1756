"""The command line: arguments in, printed results and exit codes out. Everything it does is a function of another room."""

from dlm_export.cli.app import main

__all__ = ["main"]
