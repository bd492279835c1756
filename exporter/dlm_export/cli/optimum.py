"""Makes ``dlm-export build`` available as ``optimum-cli export dlm CHECKPOINT OUTPUT``.

optimum (https://github.com/huggingface/optimum) imports all files of the namespace package
``optimum.commands.register``, and adds the commands that these files list. dlm-export adds the file
``register_dlm_export.py`` to the namespace package. The new command accepts the options of
``dlm-export build``.

optimum imports this module each time it starts. To keep the start fast, this module imports large
packages only when the new command runs.
"""

from __future__ import annotations

from argparse import SUPPRESS, ArgumentParser, BooleanOptionalAction, Namespace
from collections.abc import Iterator

import click
from optimum.commands.base import BaseOptimumCLICommand, CommandInfo

from dlm_export.cli.app import main
from dlm_export.cli.building import build

_PREFIX = "dlm_"  # prefix of the options' names, so that they differ from optimum's names


class DlmExportCommand(BaseOptimumCLICommand):  # type: ignore[misc]
    """The command ``optimum-cli export dlm``."""

    COMMAND = CommandInfo(
        name="dlm", help="Export a diffusion language model to a bundle (dlm-export)."
    )

    @staticmethod
    def parse_args(parser: ArgumentParser) -> None:
        """Add the arguments of ``dlm-export build`` to optimum's parser."""
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
            # escape each %, because argparse formats help texts
            help_text = record[1].replace("%", "%%") if record else None
            name = f"{_PREFIX}{option.name}"
            if option.is_flag:
                # Some flags have an opposite flag, as in --x and --no-x.
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
        """Build the bundle, and exit with the exit code of ``dlm-export build``."""
        main.main(args=build_arguments(self.args), prog_name="dlm-export")


def build_arguments(values: Namespace) -> list[str]:
    """Convert the values of optimum's parser back to command-line arguments of ``dlm-export``."""
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
    """Yield the options of ``build`` but ``--output``, which is positional in optimum-cli."""
    for parameter in build.params:
        if isinstance(parameter, click.Option) and parameter.name != "output":
            yield parameter
