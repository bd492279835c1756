"""``optimum-cli export dlm CHECKPOINT OUTPUT``, which runs ``dlm-export build``.

optimum (https://github.com/huggingface/optimum) imports every file of the namespace package
``optimum.commands.register`` and adds the commands that it lists. This distribution's file is
``optimum/commands/register/register_dlm_export.py``. The options are read from the definition of
``dlm-export build``. optimum loads this file at each start, so heavy imports wait until the command
runs.
"""

from __future__ import annotations

from argparse import SUPPRESS, ArgumentParser, BooleanOptionalAction, Namespace
from collections.abc import Iterator

import click
from optimum.commands.base import BaseOptimumCLICommand, CommandInfo

from dlm_export.cli.app import main
from dlm_export.cli.building import build

_PREFIX = "dlm_"  # keeps these values apart from others in optimum's namespace


class DlmExportCommand(BaseOptimumCLICommand):  # type: ignore[misc]
    """The subcommand ``dlm`` of ``optimum-cli export``."""

    COMMAND = CommandInfo(
        name="dlm", help="Export a diffusion language model to a bundle (dlm-export)."
    )

    @staticmethod
    def parse_args(parser: ArgumentParser) -> None:
        """Declare the arguments of ``dlm-export build`` on optimum's parser."""
        parser.add_argument(
            f"{_PREFIX}checkpoint",
            metavar="CHECKPOINT",
            help="Folder of the checkpoint, or hf:ORG/NAME.",
        )
        parser.add_argument(
            f"{_PREFIX}output", metavar="OUTPUT", help="Folder of the bundle to write."
        )
        context = click.Context(build, show_default=True)
        for option in _options():
            record = option.get_help_record(context)
            # argparse expands % in help texts.
            help_text = record[1].replace("%", "%%") if record else None
            name = f"{_PREFIX}{option.name}"
            if option.is_flag:
                # A flag with two spellings: --x and --no-x.
                action = BooleanOptionalAction if option.secondary_opts else "store_true"
                parser.add_argument(
                    *option.opts, dest=name, action=action, default=SUPPRESS, help=help_text
                )
            else:
                parser.add_argument(
                    *option.opts,
                    dest=name,
                    default=SUPPRESS,
                    help=help_text,
                    metavar=option.make_metavar(context),
                )

    def run(self) -> None:
        """Build the bundle; ends the process with the exit code of ``dlm-export build``."""
        main.main(args=build_arguments(self.args), prog_name="dlm-export")


def build_arguments(values: Namespace) -> list[str]:
    """Turn values of optimum's parser into arguments of ``dlm-export``, which checks them."""
    given = vars(values)
    arguments = ["build", f"--output={given[f'{_PREFIX}output']}"]
    for option in _options():
        name = f"{_PREFIX}{option.name}"
        if name not in given:
            continue
        if option.is_flag:
            arguments.append((option.opts if given[name] else option.secondary_opts)[-1])
        else:
            arguments.append(f"{option.opts[-1]}={given[name]}")
    return [*arguments, "--", given[f"{_PREFIX}checkpoint"]]


def _options() -> Iterator[click.Option]:
    """The options of ``dlm-export build`` without its output, which is an argument here."""
    for parameter in build.params:
        if isinstance(parameter, click.Option) and parameter.name != "output":
            yield parameter
