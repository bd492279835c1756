"""Defines the commands ``build``, ``quantize`` and ``engine``, which create bundles and engines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dlm_calibration.precisions import block_left_out
from dlm_export.checkpoints.hub import HubName, Located
from dlm_export.checkpoints.local import local
from dlm_export.cli.judging import print_judgement, shown_parity
from dlm_export.cli.options import (
    CHECKPOINT,
    ENGINE_OPTIONS,
    PRECISION_HELP,
    QUANTISE_GROUPS,
    SOURCE,
    SOURCE_OPTIONS,
    TEXT_OPTIONS,
    calib_option,
    command,
    flag,
    force_option,
    group,
    json_option,
    machine_group,
    options,
    output_option,
    resume_option,
    target_option,
    tensorrt_group,
    text,
    verify_option,
)
from dlm_export.cli.printing import (
    Bars,
    format_bytes,
    print_effort,
    print_json,
    print_kernels,
    print_table,
    shown,
    warn,
)
from dlm_export.cli.values import (
    build_options,
    check_build_options,
    engine_options,
    overrides,
    refuse,
    split,
)

if TYPE_CHECKING:
    from dlm_export.build import BuildReport
    from dlm_export.judging.precision_search.layer_times import Tuning
    from dlm_export.judging.precision_search.search import CurvePoint
    from dlm_export.judging.tuning.threshold import Refit
    from dlm_export.tensorrt.engine import Built

LISTED = 8  # maximum number of layers that a message lists by name


def _common(precision: str, **settings: Any) -> Any:
    """Declare the options that ``build`` and ``quantize`` share."""
    return group(
        "Common options",
        output_option("Folder of the bundle to write.", "DIR"),
        target_option,
        text("--precision", precision, **settings),
        calib_option,
        force_option,
        verify_option,
        resume_option,
        json_option,
    )


@command()
@click.argument("checkpoint", type=SOURCE)
@options(
    _common(f"{PRECISION_HELP}.  [default: fp32; on GPUs: fp16]"),
    group("Checkpoint", *SOURCE_OPTIONS, *TEXT_OPTIONS),
    *QUANTISE_GROUPS,
    machine_group,
    tensorrt_group,
)
def build(checkpoint: Path | HubName, output: Path, **values: Any) -> None:
    """Build a bundle from CHECKPOINT, and compare the bundle with PyTorch.

    CHECKPOINT is a folder, or hf:ORG/NAME[@REVISION] on the Hugging Face hub. If the bundle's
    results differ from PyTorch's or exceed a budget, the command writes no bundle and exits with
    code 3.

    Example: dlm-export build examples/demo-denoiser --target cpu --precision int8 -o
    build/demo-int8
    """
    with local(checkpoint) as found:
        _build(found, output, values)


@command()
@click.argument("source", type=CHECKPOINT)
@options(
    _common(f"{PRECISION_HELP}.", default="int8"), *QUANTISE_GROUPS, machine_group, tensorrt_group
)
def quantize(source: Path, output: Path, **values: Any) -> None:
    """Quantise SOURCE into a new bundle.

    SOURCE is a bundle in full precision, or a checkpoint.

    Example: dlm-export quantize build/demo --precision int4 --calib data.jsonl -o build/demo-int4
    """
    _build(Located(source), output, values)


@command()
@click.argument("bundle", type=CHECKPOINT)
@options(
    group(
        "Common options",
        text("--target", "Devices, separated by commas (see `dlm-export targets`).", required=True),
        flag("--force", help="Replace the engine if BUNDLE contains one."),
        flag("--remove", help="Remove the engine from BUNDLE."),
        json_option,
    ),
    group("TensorRT", *ENGINE_OPTIONS),
)
def engine(
    bundle: Path, target: str, force: bool, remove: bool, as_json: bool, **values: Any
) -> None:
    """Build a TensorRT engine, and add the engine to BUNDLE.

    BUNDLE must have been built for GPUs. Engines for RTX GPUs can be built on any machine. Engines
    for all other GPUs must be built on the device itself. The command needs neither torch nor onnx.

    Example: dlm-export engine build/demo-nvfp4 --target thor
    """
    from dlm_export.bundle.manifest import read_manifest
    from dlm_export.targets import find_all
    from dlm_export.tensorrt.bundled import add_engine, remove_engine

    if remove:
        refuse(values, tuple(values), "has no effect with --remove")
    told = {}
    for device in find_all(split(target)):
        manifest = read_manifest(bundle)
        if remove:
            size = remove_engine(bundle, manifest, device)
            told[device.name] = {"removed_bytes": size}
            if not as_json:
                click.echo(f"Removed the engine for {device.name}, {format_bytes(size)}")
            continue
        with Bars() as bars:
            built = add_engine(
                bundle, manifest, device, engine_options(values), force=force, progress=bars
            )
        for warning in built.warnings:
            warn(f"TensorRT: {warning}")
        told[device.name] = built.as_dict()
        if not as_json:
            print_engine(built, (bundle / built.entry["file"]).stat().st_size)
    if as_json:
        print_json({"engines": told})


def _build(source: Located, output: Path, values: dict[str, Any]) -> None:
    """Build a bundle as ``build`` and ``quantize`` do, and print the report."""
    if values["target"] is None:
        values["target"] = ",".join(_targets_of(source.path))
    if values["precision"] is None:
        values["precision"] = "fp32" if split(values["target"]) == ["cpu"] else "fp16"
    check_build_options(values)
    from dlm_export.build import build as run_build

    with Bars() as bars:
        report = run_build(
            source.path,
            output,
            build_options(values),
            overrides=overrides(values),
            hub=source.hub,
            progress=bars,
        )
    if values["as_json"]:
        print_json(report.as_dict())
    else:
        print_build(report)


def _targets_of(source: Path) -> list[str]:
    """Return the names of a bundle's targets. If ``source`` is a checkpoint, return "cpu"."""
    from dlm_export.bundle.manifest import read_manifest

    if not (source / "manifest.json").is_file():
        return ["cpu"]
    targets: list[str] = read_manifest(source, check_hashes=False)["targets"]
    return targets


def print_build(report: BuildReport) -> None:
    """Print a build's report: stages, files, checks, and engines to build on other machines."""
    from dlm_export.targets import find

    print_table(
        "Stages",
        ["", "seconds"],
        [[name, f"{seconds:.2f}"] for name, seconds in report.stages_s.items()],
    )
    print_table(
        f"Wrote {report.output}",
        ["", "size"],
        [[name, format_bytes(size)] for name, size in report.files_bytes.items()],
    )
    if report.kernels is not None:
        print_kernels(report.kernels)
    for built in report.engines:
        print_engine(built, report.files_bytes[built.entry["file"]])
    for target, later in report.deferred.items():
        assert report.engine_host_bytes is not None
        tensorrt, needed = find(target).tensorrt, format_bytes(report.engine_host_bytes)
        click.echo(
            f"No engine for {target} yet; its build needs about {needed} of host memory. "
            f"Where it can be built (`dlm-export targets`), by TensorRT {tensorrt}: {later}"
        )
    for warning in report.warnings:
        warn(warning)
    if report.tuning is not None:
        print_tuning(report.tuning)
    if report.curve:
        print_curve(report.curve)
    if report.judgement is not None:
        print_judgement(report.judgement)
    if report.threshold is not None:
        print_threshold(report.threshold)
    if report.levels is not None:
        print_effort(asdict(report.levels))
    if report.cache is not None:
        print_cache(report.cache)
    if report.simulated:
        click.echo(
            f"Simulated: a CPU computes {report.precision} in full precision on quantised values. This is exact, and no faster."
        )
    if report.parity is None:
        click.echo("Parity was not checked (--no-verify): run `dlm-export verify`.", err=True)
    else:
        click.echo(
            f"Parity with {report.parity.reference} holds: {shown_parity(report.parity)}. "
            "With the released code: not compared (`dlm-export capture`, `verify --golden`)"
        )


def print_engine(built: Built, size: int) -> None:
    """Print an engine's size, TensorRT version and profiles, and the number formats of its layers."""
    from dlm_export.targets import sm_text

    entry, audit = built.entry, built.audit
    profiles = [
        [name, *(" ".join(map(str, ranges[axis])) for axis in ("tokens", "cached", "rows"))]
        for name, ranges in entry["profiles"].items()
    ]
    sms = ", ".join(sm_text(sm) for sm in entry["sm"])
    what = f"{entry['file']}: {format_bytes(size)}, {entry['builder']} {entry['version']}, SM {sms}, {built.seconds:.1f} s"
    click.echo(
        f"{what}, needs about {format_bytes(audit['device_bytes'])} on the device, and its build "
        f"{format_bytes(built.host_bytes)} of host memory"
    )
    print_table("Profiles: min, opt, max", ["", "tokens", "cached", "rows"], profiles)
    held = Counter((block_left_out(layer), name) for layer, name in audit["layers"].items())
    rows = [[layer, name, str(count)] for (layer, name), count in held.items()]
    print_table(f"Layers as the {audit['method']} has them", ["layer", "held in", "count"], rows)
    fallbacks = [
        f"{layer} is {each['held']}, {each['asked']} was asked for"
        for layer, each in audit["fallbacks"].items()
    ]
    for fallback in fallbacks[:LISTED]:
        warn(f"{fallback} (--allow-fallback)")
    if len(fallbacks) > LISTED:
        warn(f"and {len(fallbacks) - LISTED} more layers, in the manifest")


def print_tuning(tuning: Tuning) -> None:
    """Print the total time that all layers take per pass, for each number format."""
    told = ", ".join(
        f"{name} {seconds * 1e3:.3g} ms"
        for name, seconds in sorted(tuning.totals().items(), key=lambda i: i[1])
    )
    click.echo(
        f"Time of all layers in a pass of {tuning.rows} rows on this machine ({tuning.processor}): {told}"
    )


def print_cache(cache: Mapping[str, Any]) -> None:
    """Print how much accuracy the bundle loses because its cache stores rounded keys and values."""
    click.echo(f"Loss from the {cache['cache_dtype']} cache alone, on {cache['samples']} samples:")
    rows = [
        [
            name,
            shown(found["masked"]["ce_increase"], "+.3%"),
            shown(found["masked"]["top1"], ".2%"),
            f"{found['frontier']['flips']} of {found['frontier']['committed']}",
        ]
        for name, found in cache.items()
        if name not in ("cache_dtype", "samples")
    ]
    print_table("", ["cache", "cross-entropy", "top-1", "frontier flips"], rows)


def print_curve(curve: Sequence[CurvePoint]) -> None:
    """Print combinations of number formats that ``--precision auto`` considered."""
    step = max(1, len(curve) // 12)
    points = [
        point
        for i, point in enumerate(curve)
        if point.chosen or point.ce_increase is not None or i % step == 0
    ]
    rows = [
        [
            format_bytes(point.weight_bytes),
            *([] if point.seconds is None else [f"{point.seconds * 1e3:.3g}"]),
            f"{point.predicted_kl:.2e}",
            shown(point.ce_increase, "+.2%"),
            ", ".join(f"{count} {name}" for name, count in sorted(point.formats.items())),
            "chosen" if point.chosen else "",
        ]
        for point in points
    ]
    timed = [] if curve[0].seconds is None else ["ms of a block's pass in them"]
    print_table(
        "Trade-off",
        ["weights of layers", *timed, "predicted KL", "cross-entropy", "layers", ""],
        rows,
    )


def print_threshold(refit: Refit) -> None:
    """Print whether the build changed the preset's threshold, and why."""
    low, high = refit.interval
    lost = f"{refit.difference:+.1%} ({low:+.1%} .. {high:+.1%}, 95%, {refit.samples} samples)"
    original, there = refit.original.threshold, refit.refitted.threshold
    saved = f"{refit.original.nfe:.2f} passes become {refit.refitted.nfe:.2f}"
    is_open = "; more samples are needed to tell whether it reaches the reference's (--judged)"
    none = (
        f"the reference gets no sample of {refit.samples} right, so thresholds cannot be compared"
    )
    one = "one sample is too few to compare thresholds (--judged)"
    untold = one if refit.reference.quality else f"{none}; give data that it can answer"
    told = {
        "kept": f"stays at {original:g}; quality {lost}{'' if refit.reached else is_open}",
        "raised": f"raised from {original:g} to {there:g}; quality {lost}{'' if refit.reached else is_open}",
        "lowered": f"lowered from {original:g} to {there:g}, {saved}; quality {lost}",
        "lost": f"stays at {original:g}; quality {lost}, and no threshold restores it",
        "untold": f"stays at {original:g}: {untold}",
    }
    click.echo(
        f"Threshold of {refit.preset} ({refit.quality} against the reference): {told[refit.verdict]}"
    )
