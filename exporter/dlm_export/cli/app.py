"""The command ``dlm-export``: its groups of commands, errors turned into one line, exit codes.

Results go to stdout, progress and warnings to stderr. ``dlm_runtime.errors.ExitCode`` has the exit
codes. A signal that ends it kills it in the end, so that a shell's loop around it stops as well.
"""

from __future__ import annotations

import warnings
from typing import Any, TextIO

import click

from dlm_export.cli import (
    building,
    capturing,
    constraining,
    conversing,
    embedding,
    examining,
    fitting,
    inspecting,
    judging,
    planning,
    running,
)
from dlm_export.cli.printing import one_line, warn
from dlm_export.signals import dying_by_signal
from dlm_runtime.errors import DlmError, DlmWarning

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 120, "show_default": True}
COMMANDS = (
    inspecting.inspect,
    *(building.build, building.quantize, building.engine),
    *(judging.verify, judging.compare, judging.report, capturing.capture),
    *(fitting.effort, running.run, conversing.chat, running.bench, constraining.compile_constraint),
    *(planning.plan, planning.targets, embedding.embed, examining.doctor),
)


def _failure(error: DlmError) -> click.ClickException:
    failure = click.ClickException(one_line(error))
    failure.exit_code = error.exit_code  # type: ignore[misc]
    return failure


class _Group(click.Group):
    """Turns our errors into one line and an exit code; other errors keep their traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except DlmError as err:
            raise _failure(err) from err
        except MemoryError as err:
            said = f" ({one_line(err)})" if str(err) else ""
            advice = "End other programs, raise the limit of memory (ulimit -v), or use a machine that has more."
            raise click.ClickException(f"out of memory{said}. {advice}") from err
        except ModuleNotFoundError as err:
            if err.name is None or err.name.split(".")[0].startswith("dlm_"):
                raise
            raise click.ClickException(
                f"{err.name} is not installed; this command needs the export extra: pip install 'dlm-export[export]'. "
                "Without a GPU install torch's CPU build first: what pip takes by itself brings gigabytes of CUDA"
            ) from err


@click.group(cls=_Group, commands=COMMANDS, context_settings=CONTEXT)
@click.version_option(package_name="dlm-export")
def main() -> None:
    """Diffusion language models: from PyTorch checkpoints to bundles that run natively, with proof
    of parity.
    """


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Print our own warnings as one line, without the place in the code."""
    if issubclass(category, DlmWarning):
        warn(str(message))
    else:
        _show_any_warning(message, category, filename, lineno, file, line)


_show_any_warning = warnings.showwarning


def command() -> None:
    """The process ``dlm-export``."""
    warnings.showwarning = _show_warning
    with dying_by_signal():
        main()
