"""Defines the program ``dlm-export``: its commands, and how it reports errors.

Results go to stdout. Progress and warnings go to stderr. ``dlm_runtime.errors.ExitCode`` lists the
exit codes. On a signal such as Ctrl-C, the program cleans up, and then kills itself with the same
signal, so that a shell loop that runs the program stops too.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import Any, TextIO

import click
import cloup

from dlm_export.cli import (
    building,
    caching,
    capturing,
    constraining,
    conversing,
    deciding,
    demonstrating,
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


def _registered_commands() -> Iterator[click.Command]:
    """Yield the commands that other installed packages register, such as ``serve``."""
    for registered in sorted(entry_points(group="dlm_export.commands")):
        if find_spec(registered.module.partition(".")[0]) is not None:
            yield registered.load()


SECTIONS = (
    cloup.Section("Build", [building.build, building.quantize, building.engine, fitting.effort]),
    cloup.Section(
        "Run",
        [
            demonstrating.demo,
            running.run,
            conversing.chat,
            deciding.decide,
            caching.cache_prompt,
            running.bench,
            constraining.compile_constraint,
            *_registered_commands(),
        ],
    ),
    cloup.Section("Check", [judging.verify, judging.compare, judging.report, capturing.capture]),
    cloup.Section(
        "Look up",
        [inspecting.inspect, planning.plan, planning.targets, examining.doctor, embedding.embed],
    ),
)


_ARGUMENT = re.compile(r'\b(?:(engine|provider) "(\w+)"|(allow_fallback|cuda_graphs)\b)')


def _with_options(text: str) -> str:
    """Replace the names of arguments of ``dlm_runtime.open`` in an error message by the options."""

    def option(found: re.Match[str]) -> str:
        name, value, flag = found.groups()
        return f"--{name} {value}" if name else f"--{flag.replace('_', '-')}"

    return _ARGUMENT.sub(option, text)


def _failure(error: DlmError) -> click.ClickException:
    failure = click.ClickException(_with_options(one_line(error)))
    failure.exit_code = error.exit_code  # type: ignore[misc]
    return failure


class _Group(cloup.Group):
    """A group of commands that prints a DlmError as one line, and exits with its exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except DlmError as err:
            raise _failure(err) from err
        except MemoryError as err:
            said = f" ({one_line(err)})" if str(err) else ""
            advice = "End other programs, raise the memory limit (ulimit -v), or use a machine with more."
            raise click.ClickException(f"out of memory{said}. {advice}") from err
        except ModuleNotFoundError as err:
            if err.name is None or err.name.split(".")[0].startswith("dlm_"):
                raise
            raise click.ClickException(
                f"{err.name} is not installed; this command needs the export extra: pip install 'dlm-export[export]'. "
                "Without a GPU, install the CPU build of torch first, to avoid downloading gigabytes of CUDA"
            ) from err


@cloup.group(cls=_Group, sections=SECTIONS, context_settings=CONTEXT)
@click.version_option(package_name="dlm-export")
def main() -> None:
    """Build, check and run bundles, which are made from checkpoints of diffusion language
    models.
    """


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Print a warning of this package as one line, without the source code line that Python adds."""
    if issubclass(category, DlmWarning):
        warn(str(message))
    else:
        _show_any_warning(message, category, filename, lineno, file, line)


_show_any_warning = warnings.showwarning


def command() -> None:
    """Run the program ``dlm-export``."""
    warnings.showwarning = _show_warning
    with dying_by_signal():
        main()
