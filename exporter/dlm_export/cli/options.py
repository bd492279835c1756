"""Options that commands share: their names, types, defaults and help."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from dlm_export.engines import ENGINE_BUILDERS


class _File(click.Path):
    """A file to read. No pipe, which could keep a command waiting for ever, and no device."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if str(value).lstrip().startswith(("{", "[")) and not os.path.lexists(value):
            self.fail("this is JSON, and the option takes the file that it is in.", param, ctx)
        path = super().convert(value, param, ctx)
        if os.path.lexists(path) and not os.path.isfile(path):
            self.fail(f"{click.format_filename(path)!r} is not a plain file.", param, ctx)
        return path


# What is read has to be there, which is told before anything is loaded.
CHECKPOINT = click.Path(exists=True, file_okay=False, path_type=Path)
FILE = _File(exists=True, dir_okay=False, path_type=Path)
OUTPUT = click.Path(path_type=Path)

SOURCE_OPTIONS = (
    click.option(
        "--mask-token-id",
        type=click.IntRange(0),
        help="Id of the mask token, where the checkpoint does not say it.",
    ),
    click.option(
        "--max-canvas-length",
        type=click.IntRange(1, 1 << 20),
        help="Longest canvas in tokens, prompt included.  [default: the checkpoint's]",
    ),
    click.option(
        "--attention-block",
        type=click.IntRange(1, 1 << 20),
        help="Tokens of a block that sees itself and those before it, where the checkpoint does not say them.",
    ),
)
TEXT_OPTIONS = (
    click.option(
        "--json-layout",
        type=click.Choice(["compact", "spaced", "indented", "lines"]),
        help="White space of the JSON that the denoiser was trained on.  [default: generation_config.json's, or compact]",
    ),
    click.option(
        "--call-format",
        type=click.Choice(["object", "list", "lines", "tool_call"]),
        help="Format of the tool calls that it was trained on.  [default: generation_config.json's, or the chat template's]",
    ),
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON to stdout.")
_PROVIDERS = ("cpu", "cuda", "tensorrt", "nv_tensorrt_rtx")


def _check_provider(_: click.Context, __: click.Parameter, text: str) -> str:
    if text.partition(":")[0] not in _PROVIDERS:
        raise click.BadParameter(f"{text!r} is not one of {', '.join(_PROVIDERS)}.")
    return text


_RUN_OPTIONS = (
    click.option(
        "--provider",
        default="cpu",
        callback=_check_provider,
        metavar="NAME[:GPU]",
        help="Of ONNX Runtime: cpu, or on a GPU cuda, tensorrt, nv_tensorrt_rtx, with its number (cuda:1) unless it is 0.",
    ),
    click.option(
        "--allow-fallback",
        is_flag=True,
        help="Leave to the CPU what the provider does not run, and say so.",
    ),
    click.option(
        "--threads", type=click.IntRange(0, 4096), default=0, help="Engine threads; 0: all cores."
    ),
)
OPENING_OPTIONS = (
    click.option(
        "--engine",
        type=click.Choice(["auto", "onnxruntime", "tensorrt"]),
        default="auto",
        help="What makes the passes; auto: TensorRT for bundles built for GPUs.",
    ),
    *_RUN_OPTIONS,
)
"""How a command opens a bundle: see ``values.opening``."""
CPU_OPENING_OPTIONS = (
    click.option(
        "--engine",
        type=click.Choice(["onnxruntime", "tensorrt"]),
        default="onnxruntime",
        help="What makes the passes: the graph on the CPU, or an engine on this machine's GPU.",
    ),
    *_RUN_OPTIONS,
)
"""The same for commands that compare bundles, whose graph runs on the CPU unless told otherwise."""
effort_option = click.option(
    "--effort", help="Loop fitted to data: instant, low, medium or high; see `dlm-export effort`."
)
preset_option = click.option(
    "--preset", help="Loop of the bundle's manifest.  [default: the bundle's]"
)
set_option = click.option(
    "--set",
    "changes",
    multiple=True,
    metavar="FIELD=VALUE",
    help="Any field of the policy; repeatable.",
)
prompts_option = click.option(
    "--prompts", type=FILE, help="Text file, a prompt a line, instead of random token ids."
)

_SAMPLE_OPTIONS = (
    click.option(
        "--judged",
        type=click.IntRange(1, 100000),
        help="Samples to judge by.  [default: 32, or fewer by --judge default]",
    ),
    click.option(
        "--free-runs",
        type=click.IntRange(1),
        help="Prompts that the reference runs freely too; full: all judged.",
    ),
    click.option(
        "--calib-preset",
        help="Loop that trajectories and judging follow.  [default: fast-dllm or dream-block]",
    ),
    click.option(
        "--seed", type=click.IntRange(0), default=0, help="Of masks, states and intervals."
    ),
)
BUDGETS = ("max_ce_increase", "min_top1", "max_nfe_ratio", "min_task")
_BUDGET_OPTIONS = (
    click.option(
        "--max-ce-increase",
        type=click.FloatRange(0),
        help="Budget: increase of masked cross-entropy; auto's default is 0.01.",
    ),
    click.option(
        "--min-top1",
        type=click.FloatRange(0, 1),
        help="Budget: share of masked positions with the same best token.",
    ),
    click.option(
        "--max-nfe-ratio",
        type=click.FloatRange(0),
        help="Budget: passes over the full-precision denoiser's.",
    ),
    click.option(
        "--min-task",
        type=click.FloatRange(0, 1),
        help="Budget: share of answers right, where the data has answers.",
    ),
)
JUDGE_OPTIONS = (
    click.option(
        "--judge",
        type=click.Choice(["default", "full"]),
        default="default",
        help="Effort: canvases that the bundle meets, or both loops run freely.",
    ),
    click.option("--data", type=FILE, help="JSONL or text to judge by.  [default: the source's]"),
    *_SAMPLE_OPTIONS,
    *_BUDGET_OPTIONS,
)
QUANTISE_OPTIONS = (
    click.option(
        "--judge",
        type=click.Choice(["default", "full", "none"]),
        default="default",
        help="Half as long as the rest; all data, thresholds and effort levels, for releases; parity only.",
    ),
    click.option(
        "--calib",
        type=FILE,
        help="JSONL or text to calibrate on; every fourth sample is kept to judge by.",
    ),
    *_SAMPLE_OPTIONS,
    click.option(
        "--calib-samples", type=click.IntRange(1, 100000), default=128, help="Prompts to run."
    ),
    click.option(
        "--calib-states", type=click.IntRange(1, 1000), default=8, help="Canvases a prompt."
    ),
    click.option(
        "--calib-source",
        type=click.Choice(["denoising", "text"]),
        default="denoising",
        help="Of states.",
    ),
    click.option(
        "--calib-min-tokens-per-expert",
        type=click.IntRange(1),
        help="Calibration tokens from which an expert's weights are solved by them; below, rounded and told.  [default: 32]",
    ),
    click.option(
        "--calibrator", type=click.Choice(["own", "modelopt"]), default="own", help="Finds ranges."
    ),
    click.option(
        "--observer",
        help="max, percentile, mse or entropy: range of static activations.  [default: the recipe's]",
    ),
    click.option(
        "--solver", help="nearest, awq or gptq: rounding of weights.  [default: the recipe's]"
    ),
    click.option(
        "--smoothing", type=click.FloatRange(0, 1), help="SmoothQuant's alpha, folded into norms."
    ),
    click.option(
        "--rotate-down/--no-rotate-down",
        default=None,
        help="Hadamard rotation of the input of mlp.down.",
    ),
    click.option("--embedding", help="int8 or fp8: the embedding table on disk."),
    click.option(
        "--auto-formats",
        help="With --precision auto: formats to choose among, with commas.  [default: the target's]",
    ),
    click.option(
        "--tune",
        is_flag=True,
        default=None,
        help="With --precision auto on a CPU: the fastest by what formats take here, measured.",
    ),
    *_BUDGET_OPTIONS,
)


def _to_bytes(_: click.Context, __: click.Parameter, text: str | None) -> int | None:
    """A size such as 8GB, 512MiB, or in bytes."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,6})?)\s*([KMGT]?)(i?)B?", text, re.IGNORECASE)
    if match is None:
        raise click.BadParameter(f"{text!r} is no size: write 8GB, 512MiB, or a number of bytes.")
    number, unit, is_binary = match.groups()
    return int(float(number) * (1024 if is_binary else 1000) ** " KMGT".index(unit.upper() or " "))


_MEANS_OPTIONS = (
    click.option(
        "--device",
        default="auto",
        help="Where torch works: auto, cpu, cuda or cuda:0; auto: a GPU if any.",
    ),
    click.option(
        "--memory",
        metavar="SIZE",
        callback=_to_bytes,
        help="Most that torch may hold, such as 8GB.  [default: what is free]",
    ),
    click.option(
        "--resume",
        type=click.Path(path_type=Path, file_okay=False),
        help="Folder to keep finished stages in, and take up.",
    ),
)
ENGINE_OPTIONS = (
    click.option(
        "--canvas",
        type=click.IntRange(1),
        help="Tokens of the longest canvas an engine takes.  [default: all]",
    ),
    click.option(
        "--block",
        type=click.IntRange(1),
        help="Tokens of the longest cached pass, and most rows scored.  [default: the loop's]",
    ),
    click.option(
        "--workspace",
        type=click.IntRange(1),
        help="MiB that a layer may take as scratch.  [default: 1024]",
    ),
    click.option(
        "--timing-cache",
        type=OUTPUT,
        help="File of TensorRT's timings, read and written: later builds are quicker.",
    ),
    click.option(
        "--builder",
        type=click.Choice(list(ENGINE_BUILDERS)),
        help="Insist on one.  [default: what builds here]",
    ),
    click.option(
        "--allow-fallback",
        is_flag=True,
        default=None,
        help="Take layers held otherwise than asked; the manifest says so.",
    ),
)
OUTPUT_OPTIONS = (
    click.option(
        "-o", "--output", required=True, type=OUTPUT, help="Folder of the bundle to write."
    ),
    click.option(
        "--target",
        help="Device, or GPUs with commas; `dlm-export targets` lists them.  [default: those of a bundle; of a checkpoint cpu]",
    ),
    click.option("--force", is_flag=True, help="Replace the bundle that is there."),
    click.option("--no-verify", is_flag=True, help="Skip parity and judging."),
    click.option(
        "--plain-graph",
        is_flag=True,
        default=None,
        help="Elementary operators only, for TensorRT 10.3 to 10.13; Orin's always.",
    ),
    click.option(
        "--no-engine",
        is_flag=True,
        default=None,
        help="Leave engines to `dlm-export engine`, here or on the device.",
    ),
    click.option(
        "--activations",
        type=click.Choice(["fp16", "bf16"]),
        help="Of quantised bundles for GPUs.  [default: as stored]",
    ),
    click.option(
        "--cache-dtype",
        type=click.Choice(["fp32", "fp16", "int8"]),
        help="Of keys and values between passes, on CPUs.  [default: fp32; with --precision fp16, fp16]",
    ),
    *_MEANS_OPTIONS,
    *ENGINE_OPTIONS,
)
PRECISION_HELP = (
    "fp32, fp16, bf16, auto, a recipe (int8, int4, fp8, nvfp4, mixed ...) or a recipe's .toml file."
)
_Command = TypeVar("_Command", bound=Callable[..., Any])


def options(*groups: tuple[Any, ...]) -> Callable[[_Command], _Command]:
    """Declare groups of options on a command, in the order that its help shows them in."""

    def decorate(command: _Command) -> _Command:
        for option in reversed([option for group in groups for option in group]):
            command = option(command)
        return command

    return decorate
