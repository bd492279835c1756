"""Declares the options that several commands share, in the groups that the help shows.

The package cloup shows options in groups. Each option's help fits on one line. click checks that
values are within their ranges. The help states a range only if users cannot guess the range.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
import cloup
from click.types import OptionHelpExtra

from dlm_export.checkpoints.hub import PREFIX, HubName
from dlm_export.engines import ENGINE_BUILDERS
from dlm_runtime import tools
from dlm_runtime.cache_dtypes import CPU_CACHES
from dlm_runtime.constraints import layout

_Command = TypeVar("_Command", bound=Callable[..., Any])
LAYOUTS = click.Choice(list(layout.LAYOUTS))
CALL_FORMATS = click.Choice(list(tools.FORMATS))
NAMES_WIDTH = 32
"""Width of the help's column with option names, in characters.

If a name is longer, the option's help text starts on the next line.
"""


class Option(cloup.Option):
    """An option whose help shows the default value, but not the range of values."""

    def get_help_extra(self, ctx: click.Context) -> OptionHelpExtra:
        extra = super().get_help_extra(ctx)
        extra.pop("range", None)
        return extra


class _File(click.Path):
    """A file to read. Pipes and devices are rejected, because reading could take forever."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if str(value).lstrip().startswith(("{", "[")) and not os.path.lexists(value):
            self.fail("this is JSON; write it to a file, and pass the file.", param, ctx)
        path = super().convert(value, param, ctx)
        if os.path.lexists(path) and not os.path.isfile(path):
            self.fail(f"{click.format_filename(path)!r} is not a plain file.", param, ctx)
        return path


class _Source(click.Path):
    """The type of arguments that name a checkpoint: a folder, or ``hf:ORG/NAME[@REVISION]``."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str) and value.startswith(PREFIX):
            try:
                return HubName.parse(value)
            except ValueError as err:
                self.fail(str(err), param, ctx)
        return super().convert(value, param, ctx)


# CHECKPOINT, SOURCE and FILE let click check that a path exists, so that the user learns of a wrong
# path before the command starts.
CHECKPOINT = click.Path(exists=True, file_okay=False, path_type=Path)
SOURCE = _Source(exists=True, file_okay=False, path_type=Path)
FILE = _File(exists=True, dir_okay=False, path_type=Path)
OUTPUT = click.Path(path_type=Path)
FOLDER = click.Path(path_type=Path, file_okay=False)

command = functools.partial(
    cloup.command, formatter_settings=cloup.HelpFormatter.settings(col1_max_width=NAMES_WIDTH)
)
"""Like ``click.command``, but the help shows options in groups."""


def option(*names: str, **settings: Any) -> Any:
    """Like ``click.option``, but for options in a group."""
    return cloup.option(*names, cls=Option, **settings)


def flag(*names: str, help: str, **settings: Any) -> Any:
    """Declare an option that has no value."""
    return option(*names, is_flag=True, help=help, **settings)


def number(name: str, help: str, least: int = 1, most: int | None = None, **settings: Any) -> Any:
    """Declare an option whose value is a whole number."""
    return option(name, type=click.IntRange(least, most), metavar="N", help=help, **settings)


def real(name: str, help: str, most: float | None = None, **settings: Any) -> Any:
    """Declare an option whose value is a number that is not negative."""
    return option(name, type=click.FloatRange(0, most), metavar="X", help=help, **settings)


def text(name: str, help: str, metavar: str = "NAME", **settings: Any) -> Any:
    """Declare an option whose value is a text."""
    return option(name, metavar=metavar, help=help, **settings)


def choice(name: str, kind: click.Choice[str] | list[str], help: str, **settings: Any) -> Any:
    """Declare an option whose value is one of several names. ``help`` lists the names."""
    made = click.Choice(kind) if isinstance(kind, list) else kind
    return option(name, type=made, metavar="NAME", help=help, **settings)


def file(name: str, help: str, kind: click.Path = FILE, **settings: Any) -> Any:
    """Declare an option whose value is the path of a file."""
    return option(name, type=kind, metavar="FILE", help=help, **settings)


def folder(name: str, help: str, kind: click.Path = FOLDER, **settings: Any) -> Any:
    """Declare an option whose value is the path of a folder."""
    return option(name, type=kind, metavar="DIR", help=help, **settings)


def group(title: str, *options: Any) -> Callable[[_Command], _Command]:
    """Show the options under the heading ``title`` in a command's help."""
    made: Callable[[_Command], _Command] = cloup.option_group(title, *options)
    return made


def output_option(help: str, kind: str = "FILE") -> Any:
    """Declare the required option ``-o`` of a command that writes a file or a folder."""
    return option("-o", "--output", required=True, type=OUTPUT, metavar=kind, help=help)


json_option = flag("--json", "as_json", help="Print JSON to stdout.")
force_option = flag("--force", help="Replace the output if it exists.")
preset_option = text("--preset", "Name of the decoding loop.  [default: the bundle's loop]")
effort_option = text(
    "--effort", "Effort level: instant, low, medium, high (see `dlm-export effort`)."
)
set_option = option(
    "--set",
    "changes",
    multiple=True,
    metavar="FIELD=VALUE",
    help="Change a field of the policy; repeatable.",
)
candidate_set_option = option(
    "--candidate-set",
    "candidate_changes",
    multiple=True,
    metavar="F=V",
    help="Set field F of CANDIDATE's policy to V; repeatable.",
)
special_tokens_option = flag(
    "--special-tokens",
    help="Recognise special tokens in the given texts; use only with trusted text.",
)
prompts_option = file("--prompts", "Text file with a prompt per line, instead of random tokens.")

# ---- Checkpoints ----

adapter_option = option(
    "--adapter",
    metavar="FOLDER",
    help="LoRA adapter: a folder in CHECKPOINT or elsewhere, or `.` for CHECKPOINT itself.",
)
SOURCE_OPTIONS = (
    number("--mask-token-id", "ID of the mask token, if the checkpoint does not define it.", 0),
    number(
        "--max-canvas-length",
        "Longest canvas in tokens.  [default: the checkpoint's value]",
        most=1 << 20,
    ),
    number(
        "--attention-block",
        "Tokens per attention block, if the checkpoint has none.",
        most=1 << 20,
    ),
    adapter_option,
    flag("--no-adapter", help="Leave out the adapters beside the weights.", default=None),
    option(
        "--accept-unknown",
        multiple=True,
        metavar="KEY",
        help="Build although config.json has this unknown key; repeatable.",
    ),
    text("--family", "Family that config.json does not name: d2f, open-dcoder."),
)
TEXT_OPTIONS = (
    number(
        "--max-new-tokens",
        "Tokens of an answer in training.  [default: recorded, or 128]",
        most=1 << 20,
    ),
    choice(
        "--json-layout",
        LAYOUTS,
        "JSON layout in training: compact, spaced, indented, lines.",
    ),
    choice(
        "--call-format",
        CALL_FORMATS,
        "Tool calls in training: object, list, lines, tool_call, gemma.",
    ),
)
source_group = group("Checkpoint", *SOURCE_OPTIONS)

# ---- How a bundle is opened ----

_PROVIDERS = ("cpu", "cuda", "tensorrt", "nv_tensorrt_rtx")


def _check_provider(_: click.Context, __: click.Parameter, text: str) -> str:
    if text.partition(":")[0] not in _PROVIDERS:
        raise click.BadParameter(f"{text!r} is not one of {', '.join(_PROVIDERS)}.")
    return text


_RUN_OPTIONS = (
    text(
        "--provider",
        "cpu, cuda, tensorrt, nv_tensorrt_rtx; cuda:1 is GPU 1.",
        default="cpu",
        callback=_check_provider,
    ),
    flag("--allow-fallback", help="Let the CPU run operators that the provider lacks."),
    flag("--cuda-graphs", help="Run passes as CUDA graphs, with the provider cuda."),
    number("--threads", "Engine threads; 0 means all cores.", 0, 4096, default=0),
)


def _engine_group(engines: list[str], help: str) -> Any:
    """Declare the options for opening a bundle. The first of ``engines`` is the default."""
    engine = choice("--engine", engines, help, default=engines[0])
    return group("Engine", engine, *_RUN_OPTIONS)


opening_group = _engine_group(
    ["auto", "onnxruntime", "tensorrt"], "auto, onnxruntime, tensorrt; auto follows the bundle."
)
"""Options for opening a bundle. ``values.opening`` converts the values of these options."""
prompt_cache_option = option(
    "--prompt-cache",
    "prompt_caches",
    type=FILE,
    multiple=True,
    metavar="FILE",
    help="Prompt cache from `dlm-export cache-prompt`; repeatable.",
)
cpu_opening_group = _engine_group(["onnxruntime", "tensorrt"], "onnxruntime, or tensorrt on a GPU.")
"""Like ``opening_group``, but for commands that compare bundles.

The default engine is onnxruntime, which runs bundles on the CPU.
"""

# ---- Measuring accuracy ----

_SAMPLE_OPTIONS = (
    number("--judged", "Samples to judge on.  [default: 32]", most=100000),
    text("--calib-preset", "Preset for calibration and judging.  [default: adaptive]"),
    number("--seed", "Seed of masks, calibration states and intervals.", 0, default=0),
)
BUDGETS = ("max_ce_increase", "min_top1", "max_nfe_ratio", "min_right_answers")
_BUDGET_OPTIONS = (
    real("--max-ce-increase", "Largest increase of cross-entropy; 0.01 is 1%."),
    real("--min-top1", "Smallest share of predictions equal to the reference's, 0 to 1.", 1),
    real("--max-nfe-ratio", "Largest ratio of passes, quantised to full precision."),
    real(
        "--min-right-answers", "Smallest share of right answers, 0 to 1; the data needs answers.", 1
    ),
)
judge_group = group(
    "Judging",
    choice(
        "--judge",
        ["default", "full"],
        "default, or full, which compares more canvases.",
        default="default",
    ),
    file("--data", "JSONL or text file to judge on.  [default: the source's data]"),
    *_SAMPLE_OPTIONS,
)
budget_group = group("Budgets: exit with 3 if one is missed", *_BUDGET_OPTIONS)
QUANTISE_GROUPS = (
    group(
        "Judging",
        choice(
            "--judge",
            ["default", "full", "none"],
            "default, full (fits effort levels), none.",
            default="default",
        ),
        *_SAMPLE_OPTIONS[:1],
        *_BUDGET_OPTIONS,
    ),
    group(
        "Calibration",
        number("--calib-samples", "Prompts for calibration.", most=100000, default=128),
        number("--calib-states", "Canvases per prompt.", most=1000, default=8),
        choice(
            "--calib-source",
            ["denoising", "text"],
            "Canvases from denoising, or masked text.",
            default="denoising",
        ),
        *_SAMPLE_OPTIONS[1:],
        number(
            "--calib-min-tokens-per-expert", "Fewest tokens to solve an expert on.  [default: 32]"
        ),
        choice("--calibrator", ["own", "modelopt"], "own, or modelopt.", default="own"),
    ),
    group(
        "Quantisation",
        text("--observer", "Activation range: max, percentile, mse, entropy."),
        text("--solver", "Rounding of weights: nearest, awq, gptq."),
        real("--smoothing", "SmoothQuant's alpha, 0 to 1.", 1),
        flag(
            "--rotate-down/--no-rotate-down",
            default=None,
            help="Apply a Hadamard rotation before mlp.down.",
        ),
        text("--embedding", "Format of the embedding table on disk: int8, fp8."),
        text("--auto-formats", "Formats that --precision auto chooses from.", "LIST"),
        flag("--tune", default=None, help="With --precision auto: measure formats on this CPU."),
    ),
)

# ---- Building ----


def to_bytes(_: click.Context, __: click.Parameter, text: str | None) -> int | None:
    """Convert a size such as 8GB or 512MiB to a number of bytes."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,6})?)\s*([KMGT]?)(i?)B?", text, re.IGNORECASE)
    if match is None:
        raise click.BadParameter(
            f"{text!r} is not a size: write 8GB, 512MiB, or a number of bytes."
        )
    number, unit, is_binary = match.groups()
    return int(float(number) * (1024 if is_binary else 1000) ** " KMGT".index(unit.upper() or " "))


target_option = text("--target", "Device, or GPUs separated by commas.  [default: cpu]", "LIST")
PRECISION_HELP = "fp32, fp16, bf16, auto, int8, ..., or a .toml"
calib_option = file("--calib", "JSONL or text for calibration; a quarter is used for judging.")
resume_option = folder("--resume", "Folder that keeps finished stages for a later build.")
verify_option = flag("--no-verify", help="Do not compare the bundle with torch.")
machine_group = group(
    "Machine and memory",
    text("--device", "Where torch runs: auto, cpu, cuda, cuda:0.", default="auto"),
    text("--memory", "Memory limit of torch, such as 8GB.", "SIZE", callback=to_bytes),
    choice("--activations", ["fp16", "bf16"], "Activations on GPUs, if quantised: fp16, bf16."),
    choice("--cache-dtype", list(CPU_CACHES), f"Keys and values on CPUs: {', '.join(CPU_CACHES)}."),
)
ENGINE_OPTIONS = (
    number("--canvas", "Longest canvas of an engine in tokens.  [default: all]"),
    number("--block", "Longest pass with a cache, in tokens.  [default: the loop's]"),
    number("--workspace", "Scratch memory of a pass in MiB.  [default: as needed]"),
    file("--timing-cache", "File with TensorRT's timings; it is read and updated.", OUTPUT),
    choice("--builder", list(ENGINE_BUILDERS), f"{', '.join(ENGINE_BUILDERS)}."),
    flag(
        "--version-compatible",
        default=None,
        help="Build for TensorRT's lean runtime, too (not RTX).",
    ),
    flag("--allow-fallback", default=None, help="Accept layers that get an unrequested format."),
)
tensorrt_group = group(
    "TensorRT engines",
    flag("--no-engine", default=None, help="Build engines later, with `dlm-export engine`."),
    *ENGINE_OPTIONS,
    flag(
        "--plain-graph", default=None, help="Use elementary operators, for TensorRT 10.3 to 10.13."
    ),
)


def options(*groups: Any) -> Callable[[_Command], _Command]:
    """Combine decorators into one. The help shows their options in the order of ``groups``."""

    def decorate(command: _Command) -> _Command:
        for decorator in reversed(groups):
            command = decorator(command)
        return command

    return decorate
