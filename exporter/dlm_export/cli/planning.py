"""Defines the commands ``plan`` and ``targets``.

``plan`` predicts speed and cost. ``targets`` lists the devices for which bundles can be built.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from dlm_export.checkpoints.hub import HubName
from dlm_export.checkpoints.local import local
from dlm_export.cli.options import (
    OUTPUT,
    SOURCE,
    command,
    file,
    force_option,
    group,
    json_option,
    number,
    options,
    real,
    set_option,
    source_group,
    text,
)
from dlm_export.cli.printing import format_bytes, one_line, print_caches, print_json, print_table
from dlm_export.cli.values import overrides, policy_changes, refuse, split

if TYPE_CHECKING:
    from dlm_export.network.spec import NetworkSpec
    from dlm_export.planning.fleet import Demand, Fleet
    from dlm_export.planning.growth import Growth
    from dlm_export.planning.plan import Cache, Plan
    from dlm_export.planning.predict import PassTime, Prediction
    from dlm_export.targets import Target


@command()
@click.argument("source", type=SOURCE, required=False)
@options(
    group(
        "Common options",
        text("--targets", "Devices separated by commas, or all.", "LIST", required=True),
        text(
            "--precisions",
            "Precisions separated by commas.  [default: all that a target runs]",
            "LIST",
        ),
        number("--prompt-tokens", "Tokens of the prompt.", 0, default=128),
        number("--new-tokens", "Tokens to generate.", default=128),
        number("--batch", "Canvases in a pass.", most=65536, default=1),
        text(
            "--price-per-hour",
            "NUMBER, or TARGET=NUMBER separated by commas; any currency.",
            "PRICE",
        ),
        json_option,
    ),
    group(
        "Assumptions",
        text("--sizes", "Sizes of LLaDA to plan instead of SOURCE, such as 1B,8B.", "LIST"),
        text("--preset", "Preset to plan.  [default: dual cache, or block cache]"),
        set_option,
        text("--block-length", "Tokens per block, comma-separated.  [default: the loop's]", "LIST"),
        text(
            "--tokens-per-pass",
            "Tokens that a pass commits, comma-separated.",
            "LIST",
            default="1,2,4,8",
        ),
        number(
            "--reused", "Leading tokens that an earlier request computed, on a CPU.", 0, default=0
        ),
        number("--max-tokens", "Most tokens in a pass over a part of the prompt, on a CPU."),
        file("--measured", "Output of `dlm-export bench --json`; corrects times of the cpu."),
    ),
    group(
        "Fleet",
        real("--fleet", "Plan replicas for X requests per second.", 1e6),
        real("--p95-ms", "Most milliseconds that 95% of the requests may take.", 1e9),
        number("--max-running", "Most requests that run on a replica.", 1, 4096, default=16),
        real("--overhead-ms", "Milliseconds that a server adds to a request.", 1e9, default=0.0),
        text("--pass-ms", "Milliseconds of a pass: NUMBER, or TARGET=NUMBER, ...", "TIMES"),
    ),
    group(
        "Plot",
        file("--plot", "Plot the time per token to this .png or .svg file.", OUTPUT),
        force_option,
    ),
    source_group,
)
def plan(
    source: Path | HubName | None, plot: Path | None, force: bool, as_json: bool, **values: Any
) -> None:
    """Predict the time, memory and cost of SOURCE on devices.

    The prediction needs neither the devices nor a bundle that was built for the devices. SOURCE is
    a bundle, a checkpoint folder, or hf:ORG/NAME[@REVISION]. If SOURCE is on the hub, the command
    downloads the headers of the weight files, but not the weights. If SOURCE is a bundle, the
    command does not need torch. The times are lower limits, which the roofline model computes. With
    --fleet, the command also computes how many replicas meet the target --p95-ms, and their cost.

    Example: dlm-export plan build/demo --targets h100,thor --price-per-hour h100=2.5
    """
    if (values["fleet"] is None) != (values["p95_ms"] is None):
        raise click.UsageError("--fleet and --p95-ms belong together: give both")
    if values["fleet"] is None and values["pass_ms"] is not None:
        raise click.UsageError("--pass-ms belongs to --fleet: give --fleet and --p95-ms too")
    for name in ("fleet", "p95_ms"):
        if values[name] is not None and not values[name] > 0:
            raise click.UsageError(f"--{name.replace('_', '-')} must be a number above 0")
    if math.isnan(values["overhead_ms"]):
        raise click.UsageError("--overhead-ms must be a number")
    if (source is None) == (values["sizes"] is None):
        raise click.UsageError("give a checkpoint or bundle, or --sizes")
    if source is None:
        _plan(None, plot, force, as_json, values)
        return
    with local(source, headers_only=True) as found:
        _plan(found.path, plot, force, as_json, values)


def _plan(
    source: Path | None, plot: Path | None, force: bool, as_json: bool, values: dict[str, Any]
) -> None:
    from dlm_export.planning.fleet import Demand, plan_fleets
    from dlm_export.planning.measured import read_measured
    from dlm_export.planning.plan import find_targets, make_plan
    from dlm_export.planning.plot import claimed_plot, save_plot
    from dlm_export.planning.predict import Request
    from dlm_export.planning.shapes import read_shape, scaled_shape

    if source is None or (source / "manifest.json").is_file():
        refuse(
            values,
            (
                *("mask_token_id", "max_canvas_length", "attention_block"),
                *("adapter", "no_adapter", "family"),
            ),
            "is for checkpoints",
        )
    targets = find_targets(values["targets"])
    request = Request(
        prompt_tokens=values["prompt_tokens"],
        new_tokens=values["new_tokens"],
        batch=values["batch"],
        block_lengths=()
        if values["block_length"] is None
        else _numbers("--block-length", values["block_length"], int),
        tokens_per_pass=_numbers("--tokens-per-pass", values["tokens_per_pass"], float),
        prices=_by_target("--price-per-hour", values["price_per_hour"], targets),
        preset=values["preset"],
        changes=policy_changes(values["changes"]),
        reused_tokens=values["reused"],
        max_tokens=values["max_tokens"],
    )
    with nullcontext() if plot is None else claimed_plot(plot, force=force) as drawing:
        measured = None if values["measured"] is None else read_measured(values["measured"])
        if source is None:
            shapes = [scaled_shape(size) for size in split(values["sizes"]) or [""]]
        else:
            shapes = [read_shape(source, lambda path: _checkpoint_sizes(path, values))]
        precisions = None if values["precisions"] is None else split(values["precisions"]) or [""]
        made = make_plan(shapes, targets, request, precisions, measured)
        fleets = None
        if values["fleet"] is not None:
            demand = Demand(
                values["fleet"],
                values["p95_ms"],
                values["max_running"],
                values["overhead_ms"],
                _by_target("--pass-ms", values["pass_ms"], targets),
            )
            fleets = plan_fleets(made, demand, measured)
        if drawing is not None:
            save_plot(drawing, made)
    if plot is not None:
        click.echo(f"{plot} {format_bytes(plot.stat().st_size)}", err=True)
    if as_json:
        told = None if fleets is None else [asdict(each) for each in fleets]
        print_json(made.as_dict() | {"fleets": told})
        return
    print_plan(made)
    if fleets is not None:
        print_fleets(fleets, demand)


def _checkpoint_sizes(path: Path, values: dict[str, Any]) -> tuple[NetworkSpec, int]:
    from dlm_export import families
    from dlm_export.checkpoints.folder import Checkpoint
    from dlm_export.families.base import table_type

    checkpoint = Checkpoint(path)
    network = families.read_network(checkpoint, overrides(values))
    table = table_type(network, families.check_tensors(checkpoint, network).stored_type)
    return network, table.itemsize


_Number = TypeVar("_Number", int, float)


def _numbers(option: str, text: str, kind: type[_Number]) -> tuple[_Number, ...]:
    """Parse a list of numbers separated by commas. Raises UsageError if a number is less than 1."""
    try:
        found = tuple(kind(part) for part in split(text))
    except ValueError:
        found = ()
    if not found or not all(1 <= number < math.inf for number in found):
        raise click.UsageError(f"{option} {text!r}: write numbers of 1 or more, with commas")
    return found


def _by_target(option: str, text: str | None, targets: Sequence[Target]) -> dict[str, float]:
    """Parse one number for all targets, or a list such as ``h100=2.5,thor=0.1``."""
    names = [target.name for target in targets]
    numbers: dict[str, float] = {}
    for part in split(text or ""):
        name, equals, number = part.rpartition("=")
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if not 0 < value < math.inf or (equals and name not in names):
            raise click.UsageError(
                f"{option} {part!r}: write a number, or TARGET=NUMBER of {', '.join(names)}"
            )
        numbers |= {name: value} if equals else dict.fromkeys(names, value)
    return numbers


@command()
@group("Options", json_option)
def targets(as_json: bool) -> None:
    """List the devices for which bundles can be built.

    The command also lists the kernels for CPUs, and shows which kernels run on this machine.

    Example: dlm-export targets --json
    """
    from dlm_export.machine import engine_here, this_machine
    from dlm_export.processors import list_kernels
    from dlm_export.targets import GENERIC, TARGETS

    here = {name: engine_here(target) for name, target in TARGETS.items()}
    machine, kernels = this_machine(), list_kernels()
    if as_json:
        listed = [
            target.as_dict() | {"engine_here": here[name][0], "engine_how": here[name][1]}
            for name, target in TARGETS.items()
        ]
        print_json(
            {
                "targets": listed,
                "generic": list(GENERIC),
                "kernels": kernels,
                "this_machine": machine,
            }
        )
        return
    print_targets(list(TARGETS.values()), list(GENERIC), here, machine)
    print_kernel_sets(kernels)


def print_targets(
    targets: Sequence[Target],
    generic: Sequence[str],
    here: Mapping[str, tuple[bool, str]],
    machine: Mapping[str, Any],
) -> None:
    """Print all targets, how to build their engines, and a description of this machine.

    The output has 80 columns. ``here`` maps each target's name to the result of
    ``machine.engine_here``.
    """
    from dlm_export.targets import CUDA_ALIASES, TENSORRT_ALIASES, sm_text
    from dlm_runtime.precision import NUMBER_FORMATS

    shown = ("fp32", "fp16", "bf16", *NUMBER_FORMATS)
    rows = [
        [
            target.name,
            "-" if target.sm is None else sm_text(target.sm),
            "-" if target.memory_bytes is None else f"{target.memory_bytes / 1e9:g}",
            "-"
            if target.bandwidth_bytes_per_s is None
            else f"{target.bandwidth_bytes_per_s / 1e9:g}",
            " ".join(name for name in shown if name in target.precisions),
            (*target.engine_kinds, target.engine)[0],
            "yes" if here[target.name][0] else "no",
        ]
        for target in targets
    ]
    print_table("Targets", ["target", "SM", "GB", "GB/s", "precisions", "engine", "here"], rows)
    click.echo(f"Any other GPU, by its SM: {' '.join(generic)}")
    for where, aliases in (("TensorRT", TENSORRT_ALIASES), ("cuda", CUDA_ALIASES)):
        meant = ", ".join(f"{name} is the recipe {recipe}" for name, recipe in aliases.items())
        click.echo(f"On {where} {meant}")
    click.echo("All recipes, peak rates, versions and sources: --json")
    click.echo("Engines:")
    ways: dict[str, list[str]] = {}
    for target in targets:
        ways.setdefault(
            here[target.name][1].replace(f"--target {target.name}", "--target TARGET"), []
        ).append(target.name)
    for way, names in ways.items():
        click.echo(f"  {', '.join(names)}: {way}")
    moe = ", ".join(target.name for target in targets if target.has_moe_layer)
    click.echo(f"Experts in fp16 and bf16 use TensorRT's MoE layer on {moe}")
    for target in targets:
        if target.note:
            click.echo(f"Note on {target.name}: {target.note}")
    engine = (
        f"onnxruntime {machine['onnxruntime']} ({machine['onnxruntime_library']})"
        if machine["onnxruntime"]
        else "onnxruntime is not installed"
    )
    gpu = "no GPU" if machine["gpu_sm"] is None else f"a GPU of SM {sm_text(machine['gpu_sm'])}"
    memory = format_bytes(machine["memory_bytes"])
    click.echo(
        f"This machine: {machine['processor']}, {machine['cores']} cores, {memory}, {gpu}, {engine}"
    )


def print_kernel_sets(kernels: Sequence[Mapping[str, Any]]) -> None:
    """Print the kernels for CPUs, and why some kernels cannot run here. Prints 80 columns."""
    rows = [
        [
            known["name"],
            known["instructions"]["int8"],
            known["instructions"]["nvfp4"],
            known["processors"],
            "yes" if known["refusal"] is None else "no",
        ]
        for known in kernels
    ]
    print_table(
        "Kernels of CPUs", ["kernels", "int8, int4", "the rest", "processors", "here"], rows
    )
    for known in kernels:
        if known["refusal"] is not None:
            click.echo(f"No {known['name']} here: {known['refusal']}")


def print_plan(plan: Plan) -> None:
    """Print a plan in 100 columns.

    The function prints one table per network and target. After the tables, it prints the passes of
    a generation, how the times grow, the precisions that the tables omit, and how measured times
    compare with predicted times.
    """
    request = plan.request
    caches = " or ".join(sorted({f"cache {policy.cache}" for policy in plan.policies.values()}))
    click.echo(
        f"{request.prompt_tokens} prompt and {request.new_tokens} new tokens, batch {request.batch}, {caches}.\n"
        "full ms: a pass over the canvas. block ms: a pass over a block. first ms: all passes up to the\n"
        "first committed tokens. at N: tokens a second if a pass commits N tokens.\n"
        "Times are lower limits from the rates of the target, not estimates.\n"
        "b: memory traffic is the limit. a: arithmetic is the limit. >=: memory traffic only, as a rate is\n"
        "unknown. *: scaled by the ratio that bench measured."
    )
    groups: dict[tuple[str, str], list[Prediction]] = {}
    for each in plan.predictions:
        groups.setdefault((each.denoiser, each.target), []).append(each)
    for (denoiser, target), predictions in groups.items():
        _print_predictions(denoiser, target, predictions, plan)
    if any(each.target == "cpu" for each in plan.predictions):
        for name, sizes in plan.cache_bytes_per_token.items():
            print_caches(f"{name}: keys and values", sizes)
        for name, cache in plan.caches.items():
            _print_cache(name, cache)
    _print_passes(plan)
    for growth in plan.growth:
        if growth.values:
            _print_growth(growth, plan)
    same: dict[str, dict[str, str]] = {}
    for each in plan.predictions:
        if each.same_as:
            same.setdefault(each.target, {})[each.precision] = ", ".join(each.same_as)
    texts = {
        target: "; ".join(f"{others} as {name}" for name, others in found.items())
        for target, found in same.items()
    }
    for told, names in _by_value(texts).items():
        click.echo(f"Same figures on {', '.join(names)}: {told}")
    for target, reasons in plan.left_out.items():
        for reason, names in _by_value(reasons).items():
            click.echo(f"Left out on {target}: {', '.join(names)} ({reason})")
    if plan.calibration is not None:
        _print_calibration(plan.calibration)


def print_fleets(fleets: Sequence[Fleet], demand: Demand) -> None:
    """Print in 100 columns how many replicas each target needs."""
    click.echo(
        f"\nFleet for {demand.per_s:g} requests/s with a p95 of at most {demand.p95_ms:g} ms, "
        f"{demand.max_running} running per replica"
    )
    rows = []
    for each in fleets:
        is_limit = each.basis == "lower limit" and each.replicas is not None
        rows.append(
            [
                each.target,
                each.precision,
                "-" if each.tokens_per_pass is None else f"{each.tokens_per_pass:g}",
                each.basis,
                ("-" if each.replicas is None else f"{'>=' if is_limit else ''}{each.replicas}"),
                "-" if each.load is None else f"{each.load:.0%}",
                _three(each.alone_ms),
                _three(each.p50_ms),
                _three(each.p95_ms),
                _three(each.cost_per_hour),
                _three(each.cost_per_million_requests),
            ]
        )
    heads = ["target", "precision", "tokens", "times", "replicas", "load", "alone", "p50", "p95"]
    print_table("", [*heads, "cost/h", "cost/M"], rows)
    click.echo(
        "tokens: tokens that a pass commits. times: source of the times of passes. alone, p50, p95: ms.\n"
        "cost/M: cost of a million requests. -: not known, or no number of replicas keeps the target.\n"
        "Requests arrive at random times and go to random replicas."
    )
    for each in fleets:
        if each.p95_low_ms is not None:
            slow = (
                "the replicas are too few"
                if each.p95_high_ms is None
                else f"{_three(each.p95_high_ms)} ms"
            )
            click.echo(
                f"{each.target} {each.precision}: p95 at the highest measured speed: "
                f"{_three(each.p95_low_ms)} ms, at the lowest: {slow}"
            )


def _print_predictions(
    denoiser: str, target: str, predictions: Sequence[Prediction], plan: Plan
) -> None:
    from dlm_export.targets import find

    steps = [f"{count:g}" for count in plan.request.tokens_per_pass]
    rows, costs = [], []
    for each in predictions:
        name = [each.precision + (" *" if each.is_calibrated else ""), str(each.block_length)]
        verdict = {True: "", None: " ?", False: " !"}[each.fits]
        speeds = [_three(speed.tokens_per_s) for speed in each.speeds] or ["-"] * len(steps)
        passes = [
            _passshown(each.full_pass),
            _passshown(each.block_pass),
            _three(each.first_tokens_ms),
        ]
        rows.append([*name, f"{each.memory_bytes / 1e9:.2f}{verdict}", *passes, *speeds])
        if target in plan.request.prices:
            costs.append(
                [
                    *name,
                    *(
                        [_three(speed.cost_per_million_tokens) for speed in each.speeds]
                        or ["-"] * len(steps)
                    ),
                ]
            )
    device = find(target)
    memory = "" if device.memory_bytes is None else f", {device.memory_bytes / 1e9:g} GB"
    shared = ", which the host's programs share" if device.memory_is_shared else ""
    click.echo(f"\n{denoiser} on {target}{memory}{shared}")
    print_table(
        "",
        [
            "precision",
            "block",
            "GB",
            "full ms",
            "block ms",
            "first ms",
            *(f"at {step}" for step in steps),
        ],
        rows,
    )
    joined = dict.fromkeys(each.precision for each in predictions if each.all_experts)
    if joined:
        click.echo(f"Computes all experts of a layer for every token: {', '.join(joined)}")
    if any(each.fits is False for each in predictions):
        click.echo(f"!: more than the memory of {target}")
    if any(each.fits is None for each in predictions):
        click.echo(f"?: the memory of {target} is not known")
    unknown = {each.precision: ", ".join(each.missing) for each in predictions if each.missing}
    for missing, names in _by_value(unknown).items():
        click.echo(f"Unknown: {', '.join(names)}; missing: {missing}")
    for rate, how in device.derived.items():
        click.echo(f"Not published, so derived: {rate} rate ({how})")
    if costs:
        click.echo(f"Cost of a million tokens, at {plan.request.prices[target]:g} an hour:")
        print_table("", ["precision", "block", *(f"at {step}" for step in steps)], costs)


def _print_cache(name: str, cache: Cache) -> None:
    """Print how much memory a scheduler reserves for the keys and values of a batch of requests."""
    told = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in cache.bytes_by_type.items())
    shared = f", {cache.reused_tokens} of them shared" if cache.reused_tokens else ""
    click.echo(f"{name}: {cache.tokens} tokens in pages of {cache.page_tokens}{shared}: {told}")


def _print_passes(plan: Plan) -> None:
    """Print a generation's passes by tokens per pass. Denoisers with equal passes share a table."""
    tables: dict[tuple[Any, ...], list[str]] = {}
    for (name, block), found in groupby(
        plan.passes, lambda each: (each.denoiser, each.block_length)
    ):
        columns = tuple(tuple(each.counts.items()) for each in found)
        tables.setdefault((block, columns), []).append(name)
    for (block, columns), names in tables.items():
        click.echo(f"\n{', '.join(names)}: passes with blocks of {block}")
        lengths = dict.fromkeys(size.tokens for column in columns for size, _ in column)
        rows = []
        for tokens in lengths:
            cached = [
                size.cached for column in columns for size, _ in column if size.tokens == tokens
            ]
            counts = [
                sum(count for size, count in column if size.tokens == tokens) for column in columns
            ]
            least, most = min(cached), max(cached)
            rows.append(
                [
                    str(tokens),
                    str(least) if least == most else f"{least} to {most}",
                    *map(str, counts),
                ]
            )
        totals = [str(sum(count for _, count in column)) for column in columns]
        rows.append(["all", "-", *totals])
        steps = [f"passes at {step:g}" for step in plan.request.tokens_per_pass]
        print_table("", ["tokens", "cached tokens", *steps], rows)


def _print_growth(growth: Growth, plan: Plan) -> None:
    """Print the times per token, or the costs if the price is known, with one row per target."""
    rows = [
        [
            target,
            "cost of a million" if target in plan.request.prices else "ms a token",
            *(
                "-"
                if point is None
                else _three(
                    point.ms_per_token
                    if point.cost_per_million_tokens is None
                    else point.cost_per_million_tokens
                )
                for point in points
            ),
        ]
        for target, points in growth.lines.items()
    ]
    block, step = growth.block_length, plan.request.tokens_per_pass[0]
    what = (
        f"{growth.denoiser}, the fastest precision that fits, block {block}, tokens a pass {step:g}"
    )
    click.echo(f"\nGrowth with {growth.axis}: {what}")
    print_table("", ["target", "", *map(str, growth.values)], rows)


def _print_calibration(calibration: Mapping[str, Any]) -> None:
    """Print the ratios of measured times to lower limits, and the errors of predicted times."""
    low, high = calibration["ratios"]
    what = f"{calibration['file']}: {calibration['passes']} passes in {calibration['precision']}"
    click.echo(f"Calibration by {what}, {low:.2f} to {high:.2f} times their limits")
    if not calibration["is_used"]:
        click.echo(
            one_line(
                f"These ratios are not used: no row is for the cpu in {calibration['precision']}"
            )
        )
    errors = [abs(error) for error in calibration["leave_one_out_errors"]]
    if errors:
        click.echo(
            f"Each pass predicted from the others: median error {statistics.median(errors):.1%}, at most {max(errors):.1%}"
        )
    else:
        click.echo("Only one pass was measured, so the error is unknown")
    if (found := calibration["generation"]) is not None:
        click.echo(
            f"Its generation of {found['nfe']} passes: {_three(found['predicted_tokens_per_s'])} tokens/s predicted, "
            f"{_three(found['tokens_per_s'])} measured, error {found['error']:+.1%}"
        )


def _passshown(time: PassTime) -> str:
    if time.ms is not None:
        return f"{_three(time.ms)} {time.bound[:1] if time.bound else ''}"
    return "-" if time.bytes_ms is None else f">={_three(time.bytes_ms)} b"


def _three(value: float | None) -> str:
    """Format a number with three significant digits. Numbers of at least 100 become integers."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _by_value(named: Mapping[str, str]) -> dict[str, list[str]]:
    """Map each value of ``named`` to the list of keys that have this value."""
    out: dict[str, list[str]] = {}
    for name, value in named.items():
        out.setdefault(value, []).append(name)
    return out
