"""Runs ``dlm-export`` for ``python -m dlm_export.cli``."""

from dlm_export.cli import command

command()
