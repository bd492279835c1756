"""The command line. Commands parse and print; the work is in functions that a test or a notebook can call.

Results go to stdout, progress and warnings to stderr. Exit 0 done, 1 could not, 2 wrong usage, 3 parity, a budget or an
engine's audit failed.
torch, onnx and the rest of the export extra are imported inside the commands that need them.
"""

from __future__ import annotations

import json
import math
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from dlm_export.cli.printing import (
    Bars,
    format_bytes,
    print_bench,
    print_build,
    print_bundle,
    print_engine,
    print_json,
    print_judgement,
    print_parity,
    print_plan,
    print_table,
    print_targets,
)
from dlm_runtime.errors import DlmError, RequestError

if TYPE_CHECKING:
    from dlm_export.build import QuantiseOptions
    from dlm_export.families.base import Overrides
    from dlm_export.judging.judge import Budgets
    from dlm_export.network.spec import NetworkSpec
    from dlm_export.sources import Source
    from dlm_export.tensorrt.estimate import EngineOptions

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 120}
CHECKPOINT = click.Path(path_type=Path)


def _failure(error: DlmError) -> click.ClickException:
    failure = click.ClickException(" ".join(str(error).split()))
    failure.exit_code = error.exit_code  # type: ignore[misc]
    return failure


class _Group(click.Group):
    """Turns our errors into one line and an exit code; everything else is a defect and keeps its traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        if threading.current_thread() is threading.main_thread():
            # A terminated build clears up as an interrupted one does.
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        try:
            return super().invoke(ctx)
        except DlmError as err:
            raise _failure(err) from err
        except ModuleNotFoundError as err:
            if err.name is None or err.name.split(".")[0].startswith("dlm_"):
                raise
            raise click.ClickException(
                f"{err.name} is not installed; this command needs the export extra: pip install 'dlm-export[export]'"
            ) from err


@click.group(cls=_Group, context_settings=CONTEXT)
@click.version_option(package_name="dlm-export")
def main() -> None:
    """Diffusion language models: from PyTorch checkpoints to bundles that run natively, with proof of parity."""


def _overrides(mask_token_id: int | None, max_canvas_length: int | None) -> Overrides:
    from dlm_export.families.base import Overrides

    return Overrides(mask_token_id, max_canvas_length)


_mask_option = click.option(
    "--mask-token-id", type=click.IntRange(0), help="Id of the mask token, where the checkpoint does not say it."
)
_canvas_option = click.option(
    "--max-canvas-length",
    type=click.IntRange(1, 1 << 20),
    help="Longest canvas in tokens, prompt included.  [default: the checkpoint's]",
)
_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON to stdout.")
_engine_option = click.option(
    "--engine",
    type=click.Choice(["auto", "onnxruntime", "tensorrt"]),
    default="auto",
    show_default=True,
    help="What makes the passes; auto: TensorRT for bundles built for GPUs.",
)
_cpu_engine_option = click.option(
    "--engine",
    type=click.Choice(["onnxruntime", "tensorrt"]),
    default="onnxruntime",
    show_default=True,
    help="What makes the passes: the graph on the CPU, or an engine on this machine's GPU.",
)
_threads_option = click.option("--threads", type=click.IntRange(0, 4096), default=0, help="Engine threads; 0: all cores.")


@main.command(context_settings=CONTEXT)
@click.argument("checkpoint", type=CHECKPOINT)
@_mask_option
@_canvas_option
@_json_option
def inspect(checkpoint: Path, mask_token_id: int | None, max_canvas_length: int | None, as_json: bool) -> None:
    """Show what a checkpoint is: family, parameters, network, memory a precision; or a bundle: files, engines, presets.

    Example: dlm-export inspect examples/demo-denoiser
    """
    if (checkpoint / "manifest.json").is_file():
        from dlm_export.bundle import read_manifest

        manifest = read_manifest(checkpoint)
        print_json(manifest) if as_json else print_bundle(str(checkpoint), manifest)
        return
    from dlm_export import families
    from dlm_export.checkpoints import tokenizer
    from dlm_export.checkpoints.folder import Checkpoint
    from dlm_export.graph import PRECISIONS

    opened = Checkpoint(checkpoint)
    network = families.read_network(opened, _overrides(mask_token_id, max_canvas_length))
    weights = families.open_weights(opened, network)  # names what is missing, extra or wrongly shaped
    text = tokenizer.read(opened, network)
    kinds = {"tokenizer": text.tokenizer is not None, "chat_template": text.chat_template is not None}
    memory = {name: _memory(network, element_bytes) for name, element_bytes in PRECISIONS.items()}
    if as_json:
        print_json(
            {
                "checkpoint": str(checkpoint),
                "parameters": network.parameter_count(),
                "stored_bytes": opened.weight_bytes,
                "quantisation": None if opened.quantisation is None else opened.quantisation.as_dict(),
                "notes": weights.notes,
                "network": network.as_dict(),
                "memory": memory,
                **kinds,
            }
        )
        return
    dtypes = ", ".join(sorted({info.dtype for info in opened.tensors.values()}))
    click.echo(f"{checkpoint}: {network.family} ({families.FAMILIES[network.family].description})")
    click.echo(f"{network.parameter_count():,} parameters in {len(opened.tensors)} tensors of {dtypes}")
    if opened.quantisation is not None:
        click.echo(f"quantised: {opened.quantisation}; --precision stored keeps its codes and scales")
    for note in weights.notes:
        click.echo(f"Note: {note}", err=True)
    click.echo(", ".join(f"{name.replace('_', ' ')}: {'yes' if there else 'no'}" for name, there in kinds.items()))
    print_table("NetworkSpec", ["", ""], [[name, str(value)] for name, value in network.as_dict().items()])
    rows = [
        [n, format_bytes(m["weights_bytes"]), format_bytes(m["cache_bytes_per_token"]), format_bytes(m["cache_bytes"])]
        for n, m in memory.items()
    ]
    print_table("Memory", ["precision", "weights", "keys and values a token", "for the longest canvas"], rows)


def _memory(c: NetworkSpec, element_bytes: int) -> dict[str, int]:
    per_token = c.cache_bytes(element_bytes)
    return {
        "weights_bytes": c.parameter_count() * element_bytes,
        "cache_bytes_per_token": per_token,
        "cache_bytes": per_token * c.max_canvas_length,
    }


_CALIB_OPTIONS = (
    click.option("--calib", type=CHECKPOINT, help="JSONL or text to calibrate on; every fourth sample is kept to judge by."),
)
_HELD_OUT_OPTIONS = (click.option("--data", type=CHECKPOINT, help="JSONL or text to judge by.  [default: the source's]"),)
_DATA_OPTIONS = (
    click.option("--judged", type=click.IntRange(1, 100000), default=32, show_default=True, help="Samples to judge by."),
    click.option("--calib-preset", help="Loop that trajectories and judging follow.  [default: fast-dllm or dream-block]"),
    click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of masks, states and intervals."),
)
_BUDGETS = ("max_ce_increase", "min_top1", "max_nfe_ratio", "min_task")
_BUDGET_OPTIONS = (
    click.option(
        "--max-ce-increase", type=click.FloatRange(0), help="Budget: increase of masked cross-entropy; auto's default is 0.01."
    ),
    click.option("--min-top1", type=click.FloatRange(0, 1), help="Budget: share of masked positions with the same best token."),
    click.option("--max-nfe-ratio", type=click.FloatRange(0), help="Budget: passes over the full-precision denoiser's."),
    click.option("--min-task", type=click.FloatRange(0, 1), help="Budget: share of answers right, where the data has answers."),
)
_RECIPE_OPTIONS = (
    click.option("--calib-samples", type=click.IntRange(1, 100000), default=128, show_default=True, help="Prompts to run."),
    click.option("--calib-states", type=click.IntRange(1, 1000), default=8, show_default=True, help="Canvases a prompt."),
    click.option(
        "--calib-source", type=click.Choice(["denoising", "text"]), default="denoising", show_default=True, help="Of states."
    ),
    click.option(
        "--calibrator", type=click.Choice(["own", "modelopt"]), default="own", show_default=True, help="Finds ranges."
    ),
    click.option("--observer", help="max, percentile, mse or entropy: range of static activations.  [default: the recipe's]"),
    click.option("--solver", help="nearest, awq or gptq: rounding of weights.  [default: the recipe's]"),
    click.option("--smoothing", type=click.FloatRange(0, 1), help="SmoothQuant's alpha, folded into norms."),
    click.option("--rotate-down/--no-rotate-down", default=None, help="Hadamard rotation of the input of mlp.down."),
    click.option("--embedding", help="int8 or fp8: the embedding table on disk."),
    click.option(
        "--auto-formats", help="With --precision auto: formats to choose among, with commas.  [default: the target's]"
    ),
)


_Command = TypeVar("_Command", bound=Callable[..., Any])


def _options(*groups: tuple[Any, ...]) -> Callable[[_Command], _Command]:
    def decorate(command: _Command) -> _Command:
        for option in reversed([option for group in groups for option in group]):
            command = option(command)
        return command

    return decorate


def _quantise_options(values: dict[str, Any]) -> QuantiseOptions:
    """The options of ``_DATA_OPTIONS``, ``_BUDGET_OPTIONS`` and ``_RECIPE_OPTIONS`` as ``build`` takes them."""
    from dlm_export.build import QuantiseOptions
    from dlm_export.judging.auto import AutoOptions
    from dlm_export.quantising.samples import CalibrationOptions

    changes = {name: values[name] for name in ("observer", "solver", "smoothing", "rotate_down", "embedding")}
    formats = tuple(part.strip() for part in (values["auto_formats"] or "").split(",") if part.strip())
    return QuantiseOptions(
        calibration=CalibrationOptions(
            data=values["calib"],
            samples=values["calib_samples"],
            states_per_sample=values["calib_states"],
            source=values["calib_source"],
            seed=values["seed"],
            preset=values["calib_preset"],
        ),
        budgets=_budgets(values),
        judged=values["judged"],
        recipe_changes={name: value for name, value in changes.items() if value is not None},
        calibrator=values["calibrator"],
        auto=AutoOptions(formats=formats or None),
    )


def _warn(text: str) -> None:
    click.echo(f"Warning: {text}", err=True)


def _budgets(values: dict[str, Any]) -> Budgets:
    from dlm_export.judging.judge import Budgets

    for name in _BUDGETS:
        if values[name] is not None and not math.isfinite(values[name]):
            raise click.UsageError(f"--{name.replace('_', '-')} {values[name]} is no limit: give a finite number")
    return Budgets(**{name: values[name] for name in _BUDGETS})


def _build(source: Path, output: Path, values: dict[str, Any]) -> None:
    """What ``build`` and ``quantize`` do."""
    from dlm_export import targets

    _check_effect(values)
    names = _names(values["target"])
    found = targets.find_all(names)
    targets.recipe_for(found, values["precision"])  # before torch is imported
    on_gpu = found[0].sm is not None
    if not on_gpu:
        _refuse(values, _ENGINE_ONLY, f"is for GPUs; --target is {values['target']}")
    from dlm_export import build as builder

    with Bars() as bars:
        report = builder.build(
            source,
            output,
            target=names,
            precision=values["precision"],
            activations=values["activations"],
            plain_graph=bool(values["plain_graph"]),
            engine=None if values["no_engine"] or not on_gpu else _engine_options(values),
            force=values["force"],
            overrides=_overrides(values["mask_token_id"], values["max_canvas_length"]),
            check_parity=not values["no_verify"],
            options=_quantise_options(values),
            progress=bars,
        )
    if values["as_json"]:
        print_json(report.as_dict())
        return
    print_build(report)


def _names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


_QUANTISED_ONLY = (
    "activations",
    "calib",
    "calib_preset",
    "observer",
    "solver",
    "smoothing",
    "rotate_down",
    "embedding",
    *_BUDGETS,
)


def _refuse(values: dict[str, Any], names: tuple[str, ...], why: str) -> None:
    """UsageError if an option was given that would have no effect."""
    for name in names:
        if values.get(name) is not None:
            raise click.UsageError(f"--{name.replace('_', '-')} {why}")


def _check_effect(values: dict[str, Any]) -> None:
    precision = values["precision"]
    if precision in ("fp32", "fp16", "bf16"):
        _refuse(values, _QUANTISED_ONLY, f"is for quantised bundles; --precision is {precision}")
    if precision != "auto":
        _refuse(values, ("auto_formats",), "is for --precision auto")
    if precision == "stored":
        _refuse(values, ("observer", "solver", "smoothing", "rotate_down"), "has no effect on stored codes and scales")
    if values["no_verify"]:
        _refuse(values, _BUDGETS, "needs judging, which --no-verify skips")
    if values["no_engine"]:
        _refuse(values, ("workspace", "timing_cache", "builder"), "is for building engines, which --no-engine leaves out")


_ENGINE_OPTIONS = (
    click.option("--canvas", type=click.IntRange(1), help="Tokens of the longest canvas an engine takes.  [default: all]"),
    click.option(
        "--block",
        type=click.IntRange(1),
        help="Tokens of the longest cached pass, and most rows scored.  [default: the loop's]",
    ),
    click.option("--workspace", type=click.IntRange(1), help="MiB that a layer may take as scratch.  [default: 1024]"),
    click.option(
        "--timing-cache", type=CHECKPOINT, help="File of TensorRT's timings, read and written: later builds are quicker."
    ),
    click.option(
        "--builder", type=click.Choice(["tensorrt_rtx", "tensorrt"]), help="Insist on one.  [default: what builds here]"
    ),
    click.option(
        "--allow-fallback", is_flag=True, default=None, help="Take layers held otherwise than asked; the manifest says so."
    ),
)
_ENGINE_ONLY = (
    *("activations", "canvas", "block", "workspace", "timing_cache"),
    *("builder", "allow_fallback", "no_engine", "plain_graph"),
)


def _engine_options(values: dict[str, Any]) -> EngineOptions:
    from dlm_export.tensorrt.estimate import WORKSPACE_BYTES, EngineOptions

    return EngineOptions(
        canvas=values["canvas"],
        block=values["block"],
        workspace_bytes=WORKSPACE_BYTES if values["workspace"] is None else values["workspace"] << 20,
        timing_cache=values["timing_cache"],
        allow_fallback=bool(values["allow_fallback"]),
        builder=values["builder"],
    )


_OUTPUT_OPTIONS = (
    click.option("-o", "--output", required=True, type=CHECKPOINT, help="Folder of the bundle to write."),
    click.option(
        "--target", default="cpu", show_default=True, help="Device, or GPUs with commas; `dlm-export targets` lists them."
    ),
    click.option("--force", is_flag=True, help="Replace the bundle that is there."),
    click.option("--no-verify", is_flag=True, help="Skip parity and judging, which hold the denoiser in fp32."),
    click.option(
        "--plain-graph",
        is_flag=True,
        default=None,
        help="Elementary operators only, for TensorRT 10.3 to 10.13; Orin's always.",
    ),
    click.option(
        "--no-engine", is_flag=True, default=None, help="Leave engines to `dlm-export engine`, here or on the device."
    ),
    click.option(
        "--activations", type=click.Choice(["fp16", "bf16"]), help="Of quantised bundles for GPUs.  [default: as stored]"
    ),
    *_ENGINE_OPTIONS,
)
_PRECISION_HELP = "fp32, fp16, bf16, auto, a recipe (int8, int4, fp8, nvfp4, mixed ...) or a recipe's .toml file."


@main.command(context_settings=CONTEXT)
@click.argument("checkpoint", type=CHECKPOINT)
@_options(_OUTPUT_OPTIONS)
@click.option("--precision", help=f"{_PRECISION_HELP}  [default: fp32, fp16 on GPUs]")
@_options((_mask_option, _canvas_option), _CALIB_OPTIONS, _DATA_OPTIONS, _RECIPE_OPTIONS, _BUDGET_OPTIONS, (_json_option,))
def build(checkpoint: Path, output: Path, **values: Any) -> None:
    """Build a bundle from a checkpoint folder, check it against PyTorch, and judge what quantisation costs.

    Exit 3 when parity or a budget is missed; no bundle is written then.

    Example: dlm-export build examples/demo-denoiser --target cpu --precision int8 -o build/demo-int8
    """
    if values["precision"] is None:
        values["precision"] = "fp32" if _names(values["target"]) == ["cpu"] else "fp16"
    _build(checkpoint, output, values)


@main.command(context_settings=CONTEXT)
@click.argument("source", type=CHECKPOINT)
@_options(_OUTPUT_OPTIONS)
@click.option("--precision", default="int8", show_default=True, help=_PRECISION_HELP)
@_options(_CALIB_OPTIONS, _DATA_OPTIONS, _RECIPE_OPTIONS, _BUDGET_OPTIONS, (_json_option,))
def quantize(source: Path, output: Path, **values: Any) -> None:
    """Quantise a full-precision bundle, or a checkpoint, into a new bundle.

    Example: dlm-export quantize build/demo --precision int4 -o build/demo-int4
    """
    _build(source, output, values | {"mask_token_id": None, "max_canvas_length": None})


@main.command(context_settings=CONTEXT)
@click.argument("bundle", type=CHECKPOINT)
@click.option("--target", required=True, help="Device, or several with commas; `dlm-export targets` lists them.")
@click.option("--force", is_flag=True, help="Replace the engine that is there.")
@click.option("--remove", is_flag=True, help="Take the engine out of the bundle instead.")
@_options(_ENGINE_OPTIONS)
@_json_option
def engine(bundle: Path, target: str, force: bool, remove: bool, as_json: bool, **values: Any) -> None:
    """Build a TensorRT engine into a bundle that was built for GPUs. Needs no torch and no onnx.

    TensorRT-RTX does it anywhere for RTX GPUs; for the others it is done on the device.

    Example: dlm-export engine build/demo-nvfp4 --target thor
    """
    from dlm_export.bundle import read_manifest
    from dlm_export.targets import find_all
    from dlm_export.tensorrt.bundled import add_engine, remove_engine

    if remove:
        _refuse(values, tuple(values), "is for building engines; --remove takes one out")
    told = {}
    for device in find_all(_names(target)):
        manifest = read_manifest(bundle)
        if remove:
            size = remove_engine(bundle, manifest, device)
            told[device.name] = {"removed_bytes": size}
            if not as_json:
                click.echo(f"Removed the engine for {device.name}, {format_bytes(size)}")
            continue
        with Bars() as bars:
            built = add_engine(bundle, manifest, device, _engine_options(values), force=force, progress=bars)
        for warning in built.warnings:
            _warn(f"TensorRT: {warning}")
        told[device.name] = built.as_dict()
        if not as_json:
            print_engine(built, (bundle / built.entry["file"]).stat().st_size)
    if as_json:
        print_json({"engines": told})


@main.command(context_settings=CONTEXT)
@click.argument("bundle", type=CHECKPOINT)
@click.option(
    "--checkpoint", required=True, type=CHECKPOINT, help="Checkpoint or full-precision bundle that it was built from."
)
@click.option("--prompts", type=CHECKPOINT, help="Text file, a prompt a line, instead of random token ids.")
@click.option("--count", type=click.IntRange(1, 1000), default=4, show_default=True, help="Prompts to compare.")
@click.option("--max-new-tokens", type=click.IntRange(1), default=32, show_default=True, help="Mask tokens a canvas.")
@_options(_HELD_OUT_OPTIONS, _DATA_OPTIONS, _BUDGET_OPTIONS)
@click.option(
    "--report",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for accuracy.json and report.html of a quantised bundle.",
)
@_cpu_engine_option
@_threads_option
@_json_option
def verify(bundle: Path, checkpoint: Path, **values: Any) -> None:
    """Compare a bundle with what it was built from, in PyTorch.

    A bundle in fp32 or fp16: logits a mask-ratio bucket, whole canvases token by token. A quantised one: what it costs, on
    samples of --data. Exit 3 when a tolerance or a budget is missed.

    Example: dlm-export verify build/demo-int8 --checkpoint examples/demo-denoiser --max-ce-increase 0.01
    """
    import dlm_runtime
    from dlm_export import build as builder
    from dlm_export import families, graph
    from dlm_export.judging.verify import random_prompts
    from dlm_export.sources import open_source
    from dlm_runtime.manifest import check_manifest

    with dlm_runtime.open(bundle, engine="none") as opened:
        manifest = opened.manifest
        check_manifest(manifest, bundle)
        overrides = _overrides(opened.mask_token_id, opened.max_canvas_length)
        source = open_source(checkpoint, overrides if not (checkpoint / "manifest.json").is_file() else None)
        builder.check_same_denoiser(bundle, manifest, source.network)
        if manifest["precision"]["name"] not in graph.PRECISIONS:
            _refuse(values, ("prompts",), "is for bundles in fp32 or fp16; samples to judge by go into --data")
            _verify_quantised(bundle, source, values)
            return
        why = "is for quantised bundles; parity has tolerances of its own"
        _refuse(values, (*_BUDGETS, "data", "calib_preset", "report"), why)
        presets = {name: opened.policy(name) for name in manifest["loop"]["presets"]}
        count, prompts = values["count"], values["prompts"]
        chosen = (
            random_prompts(source.network, count, values["seed"]) if prompts is None else _read_prompts(prompts, opened, count)
        )
    with Bars() as bars:
        bars.start("check parity", 2 * builder.check_units(presets, len(chosen)))
        parity = builder.check(
            bundle,
            source.network,
            lambda: families.load(source.parameters, source.network),
            presets,
            manifest["precision"]["name"],
            prompts=chosen,
            max_new_tokens=values["max_new_tokens"],
            seed=values["seed"],
            engine=values["engine"],
            threads=values["threads"],
            progress=bars,
        )
    if values["as_json"]:
        print_json(parity.as_dict())
    else:
        print_parity(parity)
    if parity.misses:
        raise builder.ParityError(f"{bundle}: {parity.summary}")


def _judging(values: dict[str, Any]) -> dict[str, Any]:
    """What ``verify`` and ``compare`` judge by, as arguments of ``accuracy``."""
    from dlm_export.quantising.samples import CalibrationOptions

    return {
        "options": CalibrationOptions(data=values["data"], seed=values["seed"], preset=values["calib_preset"]),
        "judged": values["judged"],
        "budgets": _budgets(values),
        "engine": values["engine"],
        "threads": values["threads"],
        "warn": _warn,
    }


def _verify_quantised(bundle: Path, source: Source, values: dict[str, Any]) -> None:
    from dlm_export.judging import accuracy

    with Bars() as bars:
        judgement = accuracy.judge_bundle(bundle, source, **_judging(values), progress=bars)
    if values["report"] is not None:
        for path in accuracy.write_files(values["report"], bundle, judgement):
            click.echo(f"{path} {format_bytes(path.stat().st_size)}", err=True)
    if values["as_json"]:
        print_json(judgement.as_dict())
    else:
        print_judgement(judgement)
    accuracy.check_budgets(judgement, str(bundle))


@main.command(context_settings=CONTEXT)
@click.argument("reference", type=CHECKPOINT)
@click.argument("candidate", type=CHECKPOINT)
@_options(_HELD_OUT_OPTIONS, _DATA_OPTIONS, _BUDGET_OPTIONS)
@_cpu_engine_option
@_threads_option
@_json_option
def compare(reference: Path, candidate: Path, **values: Any) -> None:
    """Judge one bundle by another: what is lost from REFERENCE to CANDIDATE, both through the native runtime.

    Example: dlm-export compare build/demo build/demo-int4 --data examples/demo/heldout.jsonl
    """
    from dlm_export.judging import accuracy

    with Bars() as bars:
        judgement = accuracy.compare_bundles(reference, candidate, **_judging(values), progress=bars)
    if values["as_json"]:
        print_json(judgement.as_dict())
    else:
        print_judgement(judgement)
    accuracy.check_budgets(judgement, str(candidate))


def _read_prompts(path: Path, bundle: Any, count: int) -> list[list[int]]:
    if bundle.tokenizer is None:
        raise RequestError(f"{path}: the bundle has no tokenizer for text; leave --prompts out")
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as err:
        raise RequestError(f"{path}: not readable as UTF-8 text ({err})") from err
    if not lines:
        raise RequestError(f"{path}: holds no prompt")
    return [bundle.tokenizer.encode(line) for line in lines[:count]]


@main.command(context_settings=CONTEXT)
@click.argument("bundle", type=CHECKPOINT)
@click.option("--prompt", help="Text in front of the canvas; - reads stdin.")
@click.option("--chat", help="A user's message, put through the bundle's chat template.")
@click.option("--tokens", help="Token ids, with commas; mask tokens among them are filled as well.")
@click.option("--max-new-tokens", type=click.IntRange(0), default=128, show_default=True, help="Mask tokens to fill.")
@click.option("--preset", help="Loop of the bundle's manifest.  [default: the bundle's]")
@click.option("--steps", type=click.IntRange(0), default=0, help="Passes planned for the whole generation; 0: the preset's.")
@click.option("--block-length", type=click.IntRange(0), help="Tokens decided before the next block; 0: all in one.")
@click.option("--threshold", type=click.FloatRange(0, 1), help="Score from which a token commits.")
@click.option("--score", help="confidence, margin, entropy or random.")
@click.option("--commit", help="static, threshold, dynamic, factor, entropy_bound, timestep or sequential.")
@click.option("--cache", help="none, prefix or dual.")
@click.option("--set", "changes", multiple=True, metavar="FIELD=VALUE", help="Any other field of the policy; repeatable.")
@click.option("--watch", is_flag=True, help="Show the canvas denoising in the terminal.")
@click.option("--delay", type=click.FloatRange(0, 10), default=0.15, show_default=True, help="Seconds a step with --watch.")
@_engine_option
@_threads_option
@_json_option
def run(
    bundle: Path,
    prompt: str | None,
    chat: str | None,
    tokens: str | None,
    max_new_tokens: int,
    preset: str | None,
    steps: int,
    changes: tuple[str, ...],
    watch: bool,
    delay: float,
    engine: str,
    threads: int,
    as_json: bool,
    **fields: Any,
) -> None:
    """Generate from a bundle.

    Example: dlm-export run build/demo --prompt "remind me to call the garage at seven" --max-new-tokens 64 --preset fast-dllm
    """
    import dlm_runtime

    if sum(value is not None for value in (prompt, chat, tokens)) != 1:
        raise click.UsageError("give one of --prompt, --chat and --tokens")
    request: dict[str, Any] = {"max_new_tokens": max_new_tokens, "preset": preset, "steps": steps}
    policy = {name: value for name, value in fields.items() if value is not None}
    policy |= dict(_assignment(change) for change in changes)
    dlm_runtime.Policy().with_fields(policy)  # --set must not reach the other arguments of generate
    request |= policy
    if prompt is not None:
        request["prompt"] = sys.stdin.read() if prompt == "-" else prompt
    elif chat is not None:
        request["chat"] = [{"role": "user", "content": chat}]
    else:
        request["tokens"] = _token_list(tokens or "")
    with dlm_runtime.open(bundle, engine=engine, threads=threads) as opened:
        if watch:
            from dlm_export.cli.watch import watch as show

            result = show(opened, request, delay)
        else:
            result = opened.generate(**request)
    if as_json:
        print_json(
            {
                "text": result.text,
                "tokens": result.tokens,
                "nfe": result.nfe,
                "timings_s": result.timings,
                "cache_bytes": result.cache_bytes,
            }
        )
        return
    click.echo(" ".join(map(str, result.tokens)) if result.text is None else result.text)
    passes = f"{result.nfe} pass{'es' if result.nfe != 1 else ''}"
    click.echo(f"[{passes}, {result.timings['total'] * 1e3:.1f} ms, {opened.engine}]", err=True)


@main.command(context_settings=CONTEXT)
@click.argument("bundle", type=CHECKPOINT)
@click.option(
    "--passes", help="tokens,cached,rows of passes, with semicolons.  [default: 32,224,32;256,0,256, as far as it fits]"
)
@click.option("--prompt-tokens", type=click.IntRange(0), help="Made-up tokens given to the generation.  [default: 128]")
@click.option("--new-tokens", type=click.IntRange(1), help="Mask tokens that it fills.  [default: 128]")
@click.option("--preset", help="Loop of the bundle's manifest.  [default: the bundle's]")
@click.option(
    "--rounds", type=click.IntRange(3, 1000), default=15, show_default=True, help="Of each pass; a fifth as many generations."
)
@click.option("--batch", help="Requests that share passes, with commas, such as 1,4,8.  [default: 1]")
@_engine_option
@_threads_option
@_json_option
def bench(bundle: Path, passes: str | None, batch: str | None, as_json: bool, **values: Any) -> None:
    """Measure a bundle on this machine: passes, a generation and its parts, memory, and the distance from the machine's limit.

    Example: dlm-export bench build/demo-int8 --preset fast-dllm --passes "32,224,32;256,0,256"
    """
    from dlm_export.planning import bench as bencher

    sizes = None if passes is None else bencher.parse_passes(passes)
    batches = (1,) if batch is None else bencher.parse_batches(batch)
    with Bars() as bars:
        result = bencher.bench(bundle, bencher.BenchOptions(passes=sizes, batches=batches, **values), bars)
    if as_json:
        print_json(result)
    else:
        print_bench(result)


def _assignment(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise click.UsageError(f"--set {text}: write FIELD=VALUE, such as seed=7")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _token_list(text: str) -> list[int]:
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError as err:
        raise click.UsageError(f"--tokens: {text!r} is not a list of integers") from err


@main.command(context_settings=CONTEXT)
@click.argument("source", type=CHECKPOINT, required=False)
@click.option("--targets", "names", required=True, help="Devices, with commas, or all; `dlm-export targets` lists them.")
@click.option("--sizes", help="Instead of SOURCE: LLaDA's shape at these sizes, with commas, such as 1B,8B,100B.")
@click.option("--precisions", help="With commas.  [default: all that a target runs]")
@click.option("--block-length", default="32", show_default=True, help="Tokens decided before the next block; with commas.")
@click.option("--tokens-per-pass", default="1,2,4,8", show_default=True, help="Tokens committed in a pass; with commas; x>=1.")
@click.option("--prompt-tokens", type=click.IntRange(0), default=128, show_default=True, help="Tokens given.")
@click.option("--new-tokens", type=click.IntRange(1), default=128, show_default=True, help="Tokens to generate.")
@click.option("--batch", type=click.IntRange(1, 65536), default=1, show_default=True, help="Canvases in a pass.")
@click.option("--price-per-hour", help="A number, or TARGET=NUMBER with commas, for cost; in whatever currency.")
@click.option("--measured", type=CHECKPOINT, help="What `dlm-export bench --json` printed here: calibrates the cpu.")
@click.option("--plot", type=CHECKPOINT, help="File (.png, .svg) for the growth with canvas, batch and size.")
@click.option("--force", is_flag=True, help="Replace the plot that is there.")
@_options((_mask_option, _canvas_option, _json_option))
def plan(source: Path | None, names: str, plot: Path | None, force: bool, as_json: bool, **values: Any) -> None:
    """Predict time, memory and cost on devices, by the roofline: limits, before anything is built.

    SOURCE is a checkpoint or a bundle. Needs no torch for a bundle.

    Example: dlm-export plan build/demo --targets h100,thor --price-per-hour h100=2.5
    """
    from dlm_export.planning import plan as planner
    from dlm_export.planning.measured import read_measured
    from dlm_export.planning.shapes import read_shape, scaled_shape

    if (source is None) == (values["sizes"] is None):
        raise click.UsageError("give a checkpoint or bundle, or --sizes")
    if source is None or (source / "manifest.json").is_file():
        _refuse(values, ("mask_token_id", "max_canvas_length"), "is for checkpoints")
    targets = planner.find_targets(names)
    request = planner.Request(
        prompt_tokens=values["prompt_tokens"],
        new_tokens=values["new_tokens"],
        batch=values["batch"],
        block_lengths=_numbers("--block-length", values["block_length"], int),
        tokens_per_pass=_numbers("--tokens-per-pass", values["tokens_per_pass"], float),
        prices=_prices(values["price_per_hour"], [target.name for target in targets]),
    )
    if plot is not None:
        planner.check_plot(plot, force=force)
    measured = None if values["measured"] is None else read_measured(values["measured"])
    if source is None:
        shapes = [scaled_shape(size) for size in _names(values["sizes"]) or [""]]
    else:
        overrides = (values["mask_token_id"], values["max_canvas_length"])
        shapes = [read_shape(source, lambda path: _checkpoint_sizes(path, *overrides))]
    precisions = None if values["precisions"] is None else _names(values["precisions"]) or [""]
    made = planner.make_plan(shapes, targets, request, precisions, measured)
    if plot is not None:
        planner.save_plot(plot, made)
        click.echo(f"{plot} {format_bytes(plot.stat().st_size)}", err=True)
    if as_json:
        print_json(made.as_dict())
    else:
        print_plan(made)


def _checkpoint_sizes(path: Path, mask_token_id: int | None, max_canvas_length: int | None) -> NetworkSpec:
    from dlm_export import families
    from dlm_export.checkpoints.folder import Checkpoint

    return families.read_network(Checkpoint(path), _overrides(mask_token_id, max_canvas_length))


_Number = TypeVar("_Number", int, float)


def _numbers(option: str, text: str, kind: type[_Number]) -> tuple[_Number, ...]:
    """The numbers of at least 1 in a list with commas."""
    try:
        found = tuple(kind(part) for part in _names(text))
    except ValueError:
        found = ()
    if not found or not all(1 <= number < math.inf for number in found):
        raise click.UsageError(f"{option} {text!r}: write numbers from 1 on, with commas between")
    return found


def _prices(text: str | None, targets: list[str]) -> dict[str, float]:
    """Target -> price an hour, of one number for all or TARGET=NUMBER with commas."""
    prices: dict[str, float] = {}
    for part in _names(text or ""):
        name, equals, number = part.rpartition("=")
        try:
            price = float(number)
        except ValueError:
            price = math.nan
        if not 0 < price < math.inf or (equals and name not in targets):
            raise click.UsageError(f"--price-per-hour {part!r}: write a number, or TARGET=NUMBER of {', '.join(targets)}")
        prices |= {name: price} if equals else dict.fromkeys(targets, price)
    return prices


@main.command(context_settings=CONTEXT)
@_json_option
def targets(as_json: bool) -> None:
    """List the devices that bundles can be built for.

    Example: dlm-export targets --json
    """
    from dlm_export.targets import GENERIC, TARGETS, engine_here, this_machine

    here = {name: engine_here(target) for name, target in TARGETS.items()}
    machine = this_machine()
    if as_json:
        listed = [
            target.as_dict() | {"engine_here": here[name][0], "engine_how": here[name][1]} for name, target in TARGETS.items()
        ]
        print_json({"targets": listed, "generic": list(GENERIC), "this_machine": machine})
        return
    print_targets(list(TARGETS.values()), list(GENERIC), here, machine)
