"""Prints the output of commands: tables and JSON to stdout, progress and warnings to stderr."""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from dlm_calibration.precisions import block_left_out
from dlm_export.bundle.default_loop import FEWEST_SAMPLES

if TYPE_CHECKING:
    from dlm_runtime import Generation

# The maximum numbers of characters in a word (such as a path), and in a line (such as an error
# message of TensorRT). Longer words and lines are shortened.
WORD_LIMIT, LINE_LIMIT = 400, 5000

LINE_EVERY_S = 10.0  # number of seconds between two progress lines, if stderr is not a terminal


def one_line(text: object) -> str:
    """Convert text to one line without control characters.

    The text may come from an untrusted file.
    """
    words = " ".join(_cut(word, WORD_LIMIT) for word in str(text).split())
    return _cut(
        "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in words),
        LINE_LIMIT,
    )


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit // 2]}...{text[-limit // 2 :]}"


def print_text(text: str) -> None:
    """Print a generated text.

    A terminal would execute control characters, so they are escaped if stdout is a terminal, except
    newlines and tabs. A file or a pipe gets the text unchanged.
    """
    if sys.stdout.isatty():
        text = "".join(
            c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode()
            for c in text
        )
    click.echo(text)


def json_text(value: Any, **options: Any) -> str:
    """Convert a value to JSON, with all control characters escaped."""
    return re.sub(
        "[\x7f-\x9f]",
        lambda found: f"\\u{ord(found[0]):04x}",
        json.dumps(value, ensure_ascii=False, **options),
    )


def how_it_went(done: Generation, *beside: str) -> str:
    """Summarise a generation in one line.

    The line shows the number of passes, the total time, and the texts in ``beside``. If the
    generation ended early, the line also shows the reason.
    """
    passes = f"{done.nfe} pass{'es' if done.nfe != 1 else ''}"
    left = sum(done.undecided)
    ended = f", ended by {done.finish}, {left} tokens undecided" if left else ""
    return one_line(", ".join([passes, f"{done.timings['total'] * 1e3:.1f} ms", *beside]) + ended)


def print_json(value: Any) -> None:
    """Print JSON with one key or element per line, and each list of simple values on one line."""
    click.echo(_as_json(value))


def _as_json(value: Any, depth: int = 0) -> str:
    is_flat = not isinstance(value, (dict, list, tuple)) or not any(
        isinstance(each, (dict, list, tuple)) for each in value
    )
    if not value or (is_flat and not isinstance(value, dict)):
        return json_text(value)
    if isinstance(value, dict):
        lines = [
            f"{json_text(str(name))}: {_as_json(each, depth + 1)}" for name, each in value.items()
        ]
    else:
        lines = [_as_json(each, depth + 1) for each in value]
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    separator = "\n" + " " * (depth + 1)
    return opening + separator + f",{separator}".join(lines) + "\n" + " " * depth + closing


def format_bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


def print_table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(one_line(title)), title_justify="left", box=None, pad_edge=False)
    for i, column in enumerate(columns):
        is_number = i > 0 and all(row[i][:1].isdigit() or row[i] == "-" for row in rows)
        table.add_column(column, justify="right" if is_number else "left", overflow="fold")
    for row in rows:
        # Wrap each cell in ``Text``, so that rich does not interpret its content as markup.
        table.add_row(*(Text(one_line(cell)) for cell in row))
    # If the output is piped, use a large width instead of the default width of a terminal.
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def shown(value: float | None, form: str) -> str:
    """Format a number. ``None`` becomes a dash."""
    return "-" if value is None else format(value, form)


def print_caches(what: str, sizes: Mapping[str, int]) -> None:
    """Print how many bytes the keys and values of one token need, for each data type of the cache."""
    told = ", ".join(f"{name} {format_bytes(size)}" for name, size in sizes.items())
    click.echo(f"{what} a token on a CPU, by --cache-dtype: {told}")


def print_kernels(kernels: Mapping[str, Any]) -> None:
    """Print which native kernels a CPU graph calls, and why other layers use slower operators."""
    calls = ", ".join(f"{count} {name}" for name, count in kernels["calls"].items())
    click.echo(one_line(f"Native kernels: {calls or 'none'}"))
    plain = Counter((block_left_out(layer), reason) for layer, reason in kernels["plain"].items())
    for (layer, reason), count in plain.items():
        click.echo(one_line(f"Plain operators: {count} {layer} ({reason})"))


def warn(text: str) -> None:
    click.echo(f"Warning: {one_line(text)}", err=True)


def told_progress(stage: str, done: int, total: int, seconds: float) -> str:
    """Describe the progress of a stage in one line.

    The line shows the finished share, the rate, the estimated remaining time, and how much memory
    the process uses. If ``total`` is 2**20 or more, ``done`` and ``total`` are shown as bytes.
    """
    from dlm_export.memory import resident_bytes

    is_bytes = total >= 1 << 20
    told = [stage]  # for a stage with only one unit of work, show neither the share nor the rate
    if total > 1:
        told[0] += f" {done / total:.0%}"
        told.append(
            f"{format_bytes(done)} of {format_bytes(total)}" if is_bytes else f"{done} of {total}"
        )
    if total > 1 and 0 < done < total and seconds > 0:
        rate = done / seconds
        told += [
            f"{format_bytes(rate)}/s" if is_bytes else f"{rate:.3g}/s",
            f"{(total - done) / rate:.0f} s left",
        ]
    return ", ".join(
        [*told, f"{seconds:.0f} s so far", f"{format_bytes(resident_bytes())} in memory"]
    )


class Bars:
    """Shows the progress of a command on stderr.

    If stderr is a terminal, a bar shows the progress of each stage. Otherwise, a line is printed
    every ``LINE_EVERY_S`` seconds.
    """

    def __init__(self) -> None:
        # The name, the number of units and the start time of the current stage.
        self._now: tuple[str, int, float] | None = None
        self._done = 0
        self._ended = threading.Event()
        self._lines = threading.Thread(target=self._print_lines, daemon=True)
        self._bars: Any = None
        self._task: Any = None

    def __enter__(self) -> Bars:
        if sys.stderr.isatty():
            self._bars = _rich_bars()
            self._bars.start()
        else:
            self._lines.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._bars is not None:
            self._bars.stop()

    def start(self, stage: str, total: int) -> None:
        self._now, self._done = (stage, total, time.monotonic()), 0
        if self._bars is not None:
            if self._task is not None:
                self._bars.update(self._task, completed=self._bars.tasks[self._task].total)
            self._task = self._bars.add_task(stage, total=total)

    def advance(self, units: int = 1) -> None:
        self._done += units
        if self._bars is not None:
            self._bars.advance(self._task, units)

    def _print_lines(self) -> None:
        while not self._ended.wait(LINE_EVERY_S):
            if self._now is not None:
                stage, total, began = self._now
                click.echo(
                    told_progress(stage, self._done, total, time.monotonic() - began), err=True
                )


def _rich_bars() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, ProgressColumn, Task
    from rich.text import Text

    class Told(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text(
                told_progress(
                    task.description, int(task.completed), int(task.total or 0), task.elapsed or 0.0
                )
            )

    return Progress(BarColumn(), Told(), console=Console(stderr=True))


def default_words(manifest: Mapping[str, Any]) -> str:
    """Describe the default loop, and why the loop was chosen."""
    name = manifest["loop"]["default_preset"]
    record = manifest.get("default_loop")
    if record is None:
        return f"default preset: {name}"
    changes = ", ".join(f"{field} {value}" for field, value in record["changes"].items())
    loop = f"{name} ({record['preset']} with {changes})" if changes else name
    return f"default preset: {loop}: {record['reason']}"


def print_effort(effort: Mapping[str, Any]) -> None:
    """Print a bundle's effort levels.

    For each effort level, print the measured quality, number of passes and time per prompt.
    """
    title = f"Effort, loops of {effort['preset']}, by generations of {effort['samples']} samples"
    kind = "right answers" if effort["quality"] == "task" else "agreement with one token a pass"
    rows = [
        [
            name,
            f"{point['quality']:.1%}",
            f"{point['nfe']:.2f}",
            f"{point['ms']:.2f}" if point.get("ms") else "",
            ", ".join(f"{field} {value}" for field, value in point["changes"].items())
            or "as the preset",
        ]
        for name, point in effort["levels"].items()
    ]
    print_table(title, ["", kind, "NFE", "ms", "loop"], rows)
    if effort["samples"] < FEWEST_SAMPLES:
        click.echo(f"{effort['samples']} samples are few: `dlm-export effort` fits levels on more.")
