"""Registers ``optimum-cli export dlm``.

optimum imports every file of this namespace package, which has no ``__init__.py``.
"""

from optimum.commands.export.base import ExportCommand

from dlm_export.cli.optimum import DlmExportCommand

REGISTER_COMMANDS = [(DlmExportCommand, ExportCommand)]
