"""Options that commands share, and what becomes of them: the option dataclasses of the rooms, or a
refusal.

torch and the rest of the export extra are imported inside the functions that need them.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from dlm_export.building.options import BuildOptions, QuantiseOptions
    from dlm_export.families.base import Overrides
    from dlm_export.judging.accuracy.rounds import Effort
    from dlm_export.judging.accuracy.verdict import Budgets
    from dlm_export.opening import Opening
    from dlm_export.tensorrt.estimate import EngineOptions


class _File(click.Path):
    """A file to read. No pipe, which could keep a command waiting for ever, and no device."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if str(value).lstrip().startswith(("{", "[")) and not os.path.lexists(value):
            self.fail("this is JSON, and the option takes the file that it is in.", param, ctx)
        path = super().convert(value, param, ctx)
        if os.path.lexists(path) and not os.path.isfile(path):
            self.fail(f"{click.format_filename(path)!r} is not a plain file.", param, ctx)
        return path


JSON_LIMIT_BYTES = 4 << 20

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
engine_option = click.option(
    "--engine",
    type=click.Choice(["auto", "onnxruntime", "tensorrt"]),
    default="auto",
    show_default=True,
    help="What makes the passes; auto: TensorRT for bundles built for GPUs.",
)
cpu_engine_option = click.option(
    "--engine",
    type=click.Choice(["onnxruntime", "tensorrt"]),
    default="onnxruntime",
    show_default=True,
    help="What makes the passes: the graph on the CPU, or an engine on this machine's GPU.",
)
_PROVIDERS = ("cpu", "cuda", "tensorrt", "nv_tensorrt_rtx")


def _check_provider(_: click.Context, __: click.Parameter, text: str) -> str:
    if text.partition(":")[0] not in _PROVIDERS:
        raise click.BadParameter(f"{text!r} is not one of {', '.join(_PROVIDERS)}.")
    return text


def provider_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Who runs the graph in ONNX Runtime, for commands that take an engine."""
    fallback = click.option(
        "--allow-fallback",
        is_flag=True,
        help="Leave to the CPU what the provider does not run, and say so.",
    )
    provider = click.option(
        "--provider",
        default="cpu",
        show_default=True,
        callback=_check_provider,
        metavar="NAME[:GPU]",
        help="Of ONNX Runtime: cpu, or on a GPU cuda, tensorrt, nv_tensorrt_rtx, with its number (cuda:1) unless it is 0.",
    )
    return provider(fallback(command))


def opening(values: dict[str, Any]) -> Opening:
    """Takes what ``Opening`` holds out of a command's values."""
    from dlm_export.opening import Opening

    return Opening(
        **{name: values.pop(name) for name in ("engine", "provider", "allow_fallback", "threads")}
    )


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
threads_option = click.option(
    "--threads", type=click.IntRange(0, 4096), default=0, help="Engine threads; 0: all cores."
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
        "--seed",
        type=click.IntRange(0),
        default=0,
        show_default=True,
        help="Of masks, states and intervals.",
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
        show_default=True,
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
        show_default=True,
        help="Effort: about half as long as the rest of the build; all there is, for releases; parity only.",
    ),
    click.option(
        "--calib",
        type=FILE,
        help="JSONL or text to calibrate on; every fourth sample is kept to judge by.",
    ),
    *_SAMPLE_OPTIONS,
    click.option(
        "--calib-samples",
        type=click.IntRange(1, 100000),
        default=128,
        show_default=True,
        help="Prompts to run.",
    ),
    click.option(
        "--calib-states",
        type=click.IntRange(1, 1000),
        default=8,
        show_default=True,
        help="Canvases a prompt.",
    ),
    click.option(
        "--calib-source",
        type=click.Choice(["denoising", "text"]),
        default="denoising",
        show_default=True,
        help="Of states.",
    ),
    click.option(
        "--calib-min-tokens-per-expert",
        type=click.IntRange(1),
        help="Calibration tokens from which an expert's weights are solved by them; below, rounded and told.  [default: 32]",
    ),
    click.option(
        "--calibrator",
        type=click.Choice(["own", "modelopt"]),
        default="own",
        show_default=True,
        help="Finds ranges.",
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
        show_default=True,
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
        type=click.Choice(["tensorrt_rtx", "tensorrt"]),
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

_QUANTISED_ONLY = (
    *("activations", "resume", "calib", "calib_preset", "calib_min_tokens_per_expert"),
    *("observer", "solver", "smoothing", "rotate_down", "embedding"),
    *BUDGETS,
)
_ENGINE_ONLY = (
    *("activations", "canvas", "block", "workspace", "timing_cache"),
    *("builder", "allow_fallback", "no_engine", "plain_graph"),
)
_Command = TypeVar("_Command", bound=Callable[..., Any])


def options(*groups: tuple[Any, ...]) -> Callable[[_Command], _Command]:
    """Declare groups of options on a command, in the order that its help shows them in."""

    def decorate(command: _Command) -> _Command:
        for option in reversed([option for group in groups for option in group]):
            command = option(command)
        return command

    return decorate


def split(text: str) -> list[str]:
    """The names in a list with commas."""
    return [part.strip() for part in text.split(",") if part.strip()]


def refuse(values: dict[str, Any], names: tuple[str, ...], why: str) -> None:
    """UsageError if an option was given that would have no effect."""
    for name in names:
        if values.get(name) is not None:
            raise click.UsageError(f"--{name.replace('_', '-')} {why}")


def read_json_file(path: Path) -> Any:
    """What a file of an option says. Raises RequestError that names it."""
    from dlm_runtime.errors import RequestError
    from dlm_runtime.files import parse_json, read_text

    try:
        return parse_json(read_text(path, JSON_LIMIT_BYTES, RequestError))
    except ValueError as err:
        raise (
            err
            if isinstance(err, RequestError)
            else RequestError(f"{path}: not readable as JSON ({err})")
        ) from err


def policy_changes(changes: Sequence[str]) -> dict[str, Any]:
    """The fields of a policy that ``set_option`` was given. Raises UsageError, RequestError for
    what is none.
    """
    from dlm_runtime import Policy

    fields: dict[str, Any] = {}
    for text in changes:
        name, equals, value = text.partition("=")
        if not equals:
            raise click.UsageError(f"--set {text}: write FIELD=VALUE, such as seed=7")
        try:
            fields[name] = json.loads(value)
        except ValueError:
            fields[name] = value
    Policy().with_fields(fields)  # --set must not reach other arguments of what takes a policy
    return fields


def check_build_options(values: dict[str, Any]) -> None:
    """Refuse a build's options as far as that can be done before torch is imported.

    Raises UsageError, TargetError, RecipeError.
    """
    from dlm_export import targets

    precision = values["precision"]
    if precision in ("fp32", "fp16", "bf16"):
        refuse(values, _QUANTISED_ONLY, f"is for quantised bundles; --precision is {precision}")
    if precision != "auto":
        refuse(values, ("auto_formats", "tune"), "is for --precision auto")
    if precision == "stored":
        refuse(
            values,
            ("observer", "solver", "smoothing", "rotate_down"),
            "has no effect on stored codes and scales",
        )
    if values["no_verify"]:
        asked = values | {"judge": "full" if values["judge"] == "full" else None}
        refuse(
            asked,
            ("judge", "judged", "free_runs", *BUDGETS),
            "needs judging, which --no-verify skips",
        )
    if values["no_engine"]:
        refuse(
            values,
            ("workspace", "timing_cache", "builder"),
            "is for building engines, which --no-engine leaves out",
        )
    devices = targets.find_all(split(values["target"]))
    recipe = targets.recipe_for(devices, precision)
    if recipe is not None and values["no_verify"]:
        recipe = replace(recipe, **_recipe_changes(values))
        if not recipe.needs_states(dict(recipe.layers)):
            refuse(
                values,
                ("calib",),
                f"has no effect: {precision} needs no data, and --no-verify skips judging",
            )
    if devices[0].sm is None:
        what = "engines" if devices[0].is_gpu else "GPUs"
        refuse(values, _ENGINE_ONLY, f"is for {what}; --target is {values['target']}")
    if devices[0].is_gpu:
        refuse(values, ("tune",), f"times this processor; --target is {values['target']}")
        refuse(
            values,
            ("cache_dtype",),
            "is for CPUs; on a GPU keys and values are in the type of its activations",
        )


def build_options(values: dict[str, Any]) -> BuildOptions:
    """``OUTPUT_OPTIONS``, ``QUANTISE_OPTIONS`` and ``--precision``, checked, as a build takes them."""
    from dlm_export.building.options import BuildOptions

    return BuildOptions(
        targets=tuple(split(values["target"])),
        precision=values["precision"],
        activations=values["activations"],
        cache_dtype=values["cache_dtype"],
        engine=None if values["no_engine"] else engine_options(values),
        plain_graph=bool(values["plain_graph"]),
        force=values["force"],
        check_parity=not values["no_verify"],
        quantise=_quantise_options(values),
        device=values["device"],
        memory_bytes=values["memory"],
        resume=values["resume"],
    )


def overrides(values: dict[str, Any]) -> Overrides:
    """``SOURCE_OPTIONS`` and ``TEXT_OPTIONS`` as a source takes them; a command without them
    overrides nothing.
    """
    from dlm_export.families.base import Overrides

    names = ("mask_token_id", "max_canvas_length", "attention_block", "json_layout", "call_format")
    return Overrides(**{name: values.get(name) for name in names})


def budgets(values: dict[str, Any]) -> Budgets:
    """The options of ``BUDGETS`` as the judge takes them. UsageError for one that is no limit."""
    from dlm_export.judging.accuracy.verdict import Budgets

    for name in BUDGETS:
        if values[name] is not None and not math.isfinite(values[name]):
            raise click.UsageError(
                f"--{name.replace('_', '-')} {values[name]} is no limit: give a finite number"
            )
    return Budgets(**{name: values[name] for name in BUDGETS})


def effort(values: dict[str, Any], seconds: float = 0.0) -> Effort:
    """``--judge``, ``--judged`` and ``--free-runs`` as the judge takes them. UsageError for those
    that have no effect.

    ``seconds``: that the default effort is worth, where no build says it.
    """
    from dlm_export.judging.accuracy.rounds import Effort

    if values["judge"] == "none":
        refuse(
            values,
            (*BUDGETS, "judged", "free_runs"),
            "needs judging, which --judge none leaves out",
        )
    if values["judge"] == "full":
        refuse(
            values,
            ("free_runs",),
            "has no effect with --judge full, which runs every prompt freely",
        )
    return Effort(values["judge"], values["judged"], values["free_runs"] or 0).lasting(seconds)


def _recipe_changes(values: dict[str, Any]) -> dict[str, Any]:
    """The fields of a recipe that options change."""
    fields = ("observer", "solver", "smoothing", "rotate_down", "embedding")
    return {name: values[name] for name in fields if values[name] is not None}


def _quantise_options(values: dict[str, Any]) -> QuantiseOptions:
    from dlm_export.building.options import QuantiseOptions
    from dlm_export.judging.precision_search.search import AutoOptions
    from dlm_export.quantising.samples import FEWEST_TOKENS, CalibrationOptions

    formats = tuple(split(values["auto_formats"] or ""))
    return QuantiseOptions(
        calibration=CalibrationOptions(
            data=values["calib"],
            samples=values["calib_samples"],
            states_per_sample=values["calib_states"],
            source=values["calib_source"],
            seed=values["seed"],
            preset=values["calib_preset"],
        ),
        budgets=budgets(values),
        effort=effort(values),
        recipe_changes=_recipe_changes(values),
        calibrator=values["calibrator"],
        min_tokens_per_expert=values["calib_min_tokens_per_expert"] or FEWEST_TOKENS,
        auto=AutoOptions(formats=formats or None, tune=bool(values["tune"])),
    )


def engine_options(values: dict[str, Any]) -> EngineOptions:
    """``ENGINE_OPTIONS`` as the builder of engines takes them."""
    from dlm_export.tensorrt.estimate import WORKSPACE_BYTES, EngineOptions

    return EngineOptions(
        canvas=values["canvas"],
        block=values["block"],
        workspace_bytes=WORKSPACE_BYTES
        if values["workspace"] is None
        else values["workspace"] << 20,
        timing_cache=values["timing_cache"],
        allow_fallback=bool(values["allow_fallback"]),
        builder=values["builder"],
    )
