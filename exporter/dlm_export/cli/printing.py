"""What commands print: tables and JSON on stdout, progress on stderr."""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from dlm_export.build import BuildReport
    from dlm_export.judging.auto import CurvePoint
    from dlm_export.judging.judge import Judgement
    from dlm_export.judging.threshold import Refit
    from dlm_export.judging.verify import Parity
    from dlm_export.planning.plan import Growth, PassTime, Plan, Prediction
    from dlm_export.targets import Target
    from dlm_export.tensorrt.engine import Built


LISTED = 8  # layers named before the rest is counted


def print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=1, ensure_ascii=False))


def format_bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


def print_table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for i, column in enumerate(columns):
        is_number = i > 0 and all(row[i][:1].isdigit() or row[i] == "-" for row in rows)
        table.add_column(column, justify="right" if is_number else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    # Piped output keeps whole lines: a log is wider than a terminal.
    Console(width=None if sys.stdout.isatty() else 160).print(table)


class Bars:
    """Progress as one rich bar a stage, on stderr; nothing where stderr is no terminal."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (
            TextColumn("{task.description:16}"),
            BarColumn(),
            TextColumn("{task.percentage:>4.0f}%"),
            TimeElapsedColumn(),
        )
        self._progress = Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty())
        self._task: Any = None

    def __enter__(self) -> Bars:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def start(self, stage: str, total: int) -> None:
        if self._task is not None:
            self._progress.update(self._task, completed=self._progress.tasks[self._task].total)
        self._task = self._progress.add_task(stage, total=total)

    def advance(self, units: int = 1) -> None:
        self._progress.advance(self._task, units)


def print_build(report: BuildReport) -> None:
    print_table("Stages", ["", "seconds"], [[name, f"{seconds:.2f}"] for name, seconds in report.stages_s.items()])
    print_table(
        f"Wrote {report.output}", ["", "size"], [[name, format_bytes(size)] for name, size in report.files_bytes.items()]
    )
    for built in report.engines:
        print_engine(built, report.files_bytes[built.entry["file"]])
    for target, command in report.deferred.items():
        click.echo(f"No engine for {target} yet. Where it can be built (`dlm-export targets`): {command}")
    for warning in report.warnings:
        click.echo(f"Warning: {warning}", err=True)
    if report.curve:
        print_curve(report.curve)
    if report.judgement is not None:
        print_judgement(report.judgement)
    if report.threshold is not None:
        print_threshold(report.threshold)
    if report.simulated:
        click.echo(f"Simulated: a CPU computes {report.precision} in full precision on quantised values, exact but no faster.")
    if report.parity is None:
        click.echo("Parity was not checked (--no-verify): run `dlm-export verify`.", err=True)
    else:
        worst = max(row.relative for row in report.parity.graph)
        equal = sum(row.canvases_equal for row in report.parity.loop)
        total = sum(row.canvases for row in report.parity.loop)
        limit = report.parity.tolerance
        click.echo(
            f"Parity with PyTorch holds: logits within {worst:.1e} of their range ({limit.relative:.1e} allowed), "
            f"{equal} of {total} canvases of random prompts equal ({limit.agreement:.0%} asked)"
        )


def print_bundle(folder: str, manifest: Mapping[str, Any]) -> None:
    """What a bundle is: denoiser, precision, files, engines."""
    from dlm_export.targets import sm_text

    loop, audits = manifest["loop"], manifest.get("audits", {})
    click.echo(f"{folder}: a bundle of {manifest['network']['architecture']}, {manifest['network']['parameters']:,} parameters")
    cache = loop["graph"]["cache_dtype"]
    click.echo(f"precision {manifest['precision']['name']}, for {', '.join(manifest['targets'])}; {cache} cache")
    click.echo(f"presets: {', '.join(loop['presets'])}; default {loop['default_preset']}")
    print_table("Files", ["", "size"], [[name, format_bytes(entry["bytes"])] for name, entry in manifest["files"].items()])
    rows = [
        [
            name,
            ", ".join(sm_text(sm) for sm in entry["sm"]),
            f"{entry['builder']} {entry['version']}",
            *_audited(audits.get(name)),
        ]
        for name, entry in loop.get("engines", {}).items()
    ]
    if rows:
        print_table("Engines", ["target", "SM", "builder", "layers held in", "fallbacks", "on the device"], rows)


def _audited(audit: Mapping[str, Any] | None) -> list[str]:
    """What an engine's layers are held in, how many are not as asked, and its memory on the device."""
    if audit is None:
        return ["-"] * 3
    held = ", ".join(f"{count} {held}" for held, count in Counter(audit["layers"].values()).items())
    return [held, str(len(audit["fallbacks"])), format_bytes(audit["device_bytes"])]


def print_engine(built: Built, size: int) -> None:
    """An engine's size, builder, profiles, and what its layers are held in."""
    from dlm_export.targets import sm_text

    entry, audit = built.entry, built.audit
    profiles = [
        [name, *(" ".join(map(str, ranges[axis])) for axis in ("tokens", "cached", "rows"))]
        for name, ranges in entry["profiles"].items()
    ]
    sms = ", ".join(sm_text(sm) for sm in entry["sm"])
    what = f"{entry['file']}: {format_bytes(size)}, {entry['builder']} {entry['version']}, SM {sms}, {built.seconds:.1f} s"
    click.echo(f"{what}, needs about {format_bytes(audit['device_bytes'])} on the device")
    print_table("Profiles: min, opt, max", ["", "tokens", "cached", "rows"], profiles)
    held = Counter(_block_left_out(layer, name) for layer, name in audit["layers"].items())
    rows = [[layer, name, str(count)] for (layer, name), count in held.items()]
    print_table(f"Layers as the {audit['method']} has them", ["layer", "held in", "count"], rows)
    fallbacks = [f"{layer} is {each['held']}, {each['asked']} was asked for" for layer, each in audit["fallbacks"].items()]
    for fallback in fallbacks[:LISTED]:
        click.echo(f"Warning: {fallback} (--allow-fallback)", err=True)
    if len(fallbacks) > LISTED:
        click.echo(f"Warning: and {len(fallbacks) - LISTED} more layers, in the manifest", err=True)


def _block_left_out(layer: str, name: str) -> tuple[str, str]:
    return re.sub(r"^blocks\.\d+\.", "blocks.N.", layer), name


def print_parity(parity: Parity) -> None:
    rows = [
        [
            f"{row.mask_ratio:.2f}",
            f"{row.worst_difference:.2e}",
            f"{row.relative:.1e}",
            f"{row.argmax_equal}/{row.rows}",
            str(row.argmax_ties),
        ]
        for row in parity.graph
    ]
    print_table("Graph against PyTorch", ["mask ratio", "worst logit difference", "of range", "argmax equal", "ties"], rows)
    rows = [
        [row.name, f"{row.canvases_equal}/{row.canvases}", str(row.nfe), "yes" if row.nfe_equal else "no"]
        for row in parity.loop
    ]
    print_table("Loop against the reference", ["preset", "canvases equal", "NFE", "NFE equal"], rows)
    limit = parity.tolerance.relative
    share = f"{parity.tolerance.agreement:.0%} of canvases equal"
    verdict = "FAILS" if parity.misses else "Holds"
    click.echo(f"{verdict} at {parity.precision} (allowed: logits within {limit:.1e} of their range, {share})")


def print_judgement(judgement: Judgement) -> None:
    """What quantisation costs: a table a mask-ratio bucket, then one line for each kind of figure."""
    columns = [
        "mask ratio",
        "positions",
        "cross-entropy",
        "reference",
        "change",
        "95% interval",
        "top-1",
        "top-5",
        "KL",
        "KL p95",
    ]
    rows = [_loss_row(f"{bucket['mask_ratio']:.2f}", bucket) for bucket in judgement.buckets]
    print_table(f"{judgement.candidate} against {judgement.reference}", columns, [*rows, _loss_row("all", judgement.overall)])
    frontier, free = judgement.frontier, judgement.free_running
    click.echo(
        f"Frontier: {frontier['flips']} of {frontier['committed']} tokens that both commit differ, "
        f"Jaccard of the committed sets {frontier['jaccard']:.3f}"
    )
    click.echo(
        f"Free running, {free['prompts']} prompts: {free['exact_match']:.1%} equal, tokens {free['token_agreement']:.1%}, "
        f"NFE ratio {_shown(free['nfe_ratio'], '.3f')}"
    )
    if (task := free["task"]) is not None:
        click.echo(f"Answers right: {task['candidate']:.1%}, the reference {task['reference']:.1%}")
    if (floor := judgement.noise_floor) is not None:
        click.echo(
            f"For comparison, bf16: cross-entropy {_shown(floor['ce_increase'], '+.2%')}, top-1 agreement {floor['top1']:.1%}"
        )
    for budget in judgement.budgets:
        verdict = "holds" if budget["passed"] else "MISSED"
        click.echo(f"Budget {budget['name']} {budget['limit']:g}: {_shown(budget['value'], '.4g')}, {verdict}")


def _loss_row(name: str, row: Mapping[str, Any]) -> list[str]:
    interval = row["ce_increase_interval"]
    return [
        name,
        str(row["positions"]),
        _shown(row["candidate_ce"], ".4f"),
        _shown(row["reference_ce"], ".4f"),
        _shown(row["ce_increase"], "+.2%"),
        "" if interval is None else f"{interval[0]:+.2%} {interval[1]:+.2%}",
        _shown(row["top1"], ".4f"),
        _shown(row["top5"], ".4f"),
        _shown(row["kl_mean"], ".1e"),
        _shown(row["kl_p95"], ".1e"),
    ]


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def print_curve(curve: Sequence[CurvePoint]) -> None:
    """The trade-off that ``--precision auto`` chose from: measured points, and some between."""
    step = max(1, len(curve) // 12)
    shown = [point for i, point in enumerate(curve) if point.chosen or point.ce_increase is not None or i % step == 0]
    rows = [
        [
            format_bytes(point.weight_bytes),
            f"{point.predicted_kl:.2e}",
            _shown(point.ce_increase, "+.2%"),
            ", ".join(f"{count} {name}" for name, count in sorted(point.formats.items())),
            "chosen" if point.chosen else "",
        ]
        for point in shown
    ]
    print_table("Trade-off", ["weights of layers", "predicted KL", "cross-entropy", "layers", ""], rows)


def print_threshold(refit: Refit) -> None:
    """The re-fitted threshold, with what it gives and costs."""
    found = refit.as_dict()
    reference, original, refitted = found["reference"], found["original"], found["refitted"]
    kept = (
        "gives the reference's quality back"
        if found["reached"]
        else "comes nearest to the reference's quality; none reaches it"
    )
    figures = "; ".join(
        f"{name} {point['quality']:.3f} in {point['nfe']:.2f} passes"
        for name, point in (
            (f"{found['quality']} there", refitted),
            (f"at {original['threshold']:g}", original),
            ("the reference", reference),
        )
    )
    click.echo(f"Threshold of {found['preset']}: {refitted['threshold']:g} {kept} ({figures})")


def print_bench(result: Mapping[str, Any]) -> None:
    """What ``bench`` measured: the machine, passes, a generation by part, memory."""
    bundle, machine, rates = result["bundle"], result["machine"], result["roofline"]
    threads = f"{result['threads']} threads" if result["threads"] else "all cores"
    click.echo(f"{bundle['path']}: {bundle['precision']}, {bundle['parameters']:,} parameters, {bundle['engine']}, {threads}")
    click.echo(f"Machine: {machine['processor']}, {machine['cores']} cores, {format_bytes(machine['memory_bytes'])}")
    if rates is not None:
        click.echo(
            f"Its rates: {rates['read_bytes_per_s'] / 1e9:.1f} GB/s of reads; 10^9 multiply-adds/s: "
            f"int8 {rates['int8_macs_per_s'] / 1e9:.0f} ({rates['int8_macs_per_s_32_rows'] / 1e9:.0f} at 32 rows), "
            f"fp32 {rates['fp32_macs_per_s'] / 1e9:.0f}"
        )
    rows = [
        [
            *(str(row[key]) for key in ("batch", "tokens", "cached", "rows")),
            f"{row['ms']:.2f}",
            " .. ".join(f"{value:.2f}" for value in row["quartiles_ms"]),
            _shown(row["limit_ms"], ".2f"),
            _shown(row["ratio"], ".2f"),
        ]
        for row in result["passes"]
    ]
    print_table("Passes", ["batch", "tokens", "cached", "rows", "ms", "quartiles", "limit, ms", "of the limit"], rows)
    made, memory = result["generation"], result["memory"]
    click.echo(
        f"Generation: {made['prompt_tokens']} given, {made['new_tokens']} new tokens, preset {made['preset']}: "
        f"{made['nfe']} passes, {made['seconds']:.3f} s, {made['tokens_per_s']:.1f} tokens/s"
    )
    rows = [[part, f"{seconds * 1e3:.2f}", f"{seconds / made['seconds']:.2%}"] for part, seconds in made["parts"].items()]
    print_table("Where its time went", ["part", "ms", "share"], rows)
    if len(result["batches"]) > 1:
        rows = [
            [str(row["batch"]), f"{row['seconds']:.3f}", f"{row['tokens_per_s']:.1f}", f"{row['speedup']:.2f}"]
            for row in result["batches"]
        ]
        print_table("Requests at once, of that length each", ["batch", "s", "tokens/s", "times one's"], rows)
    click.echo(
        f"Memory: {format_bytes(memory['peak_rss_bytes'])} at the generation's peak, weights "
        f"{format_bytes(memory['weights_bytes'])}, keys and values {format_bytes(memory['cache_bytes'])}"
        + ("" if memory["ratio"] is None else f": {memory['ratio']:.2f} times both")
    )
    for note in result["notes"]:
        click.echo(f"Note: {note}", err=True)


def print_targets(
    targets: Sequence[Target], generic: Sequence[str], here: Mapping[str, tuple[bool, str]], machine: Mapping[str, Any]
) -> None:
    """The devices in 80 columns, how each gets its engine (``here``: by name, ``targets.engine_here``), and this machine."""
    from dlm_export.targets import GPU_ALIASES, sm_text

    shown = ("fp32", "fp16", "bf16", "int8", "int4", "fp8", "nvfp4")
    rows = [
        [
            target.name,
            "-" if target.sm is None else sm_text(target.sm),
            "-" if target.memory_bytes is None else f"{target.memory_bytes / 1e9:g}",
            "-" if target.bandwidth_bytes_per_s is None else f"{target.bandwidth_bytes_per_s / 1e9:g}",
            " ".join(name for name in shown if name in target.precisions),
            (*target.engine_kinds, target.engine)[0],
            "yes" if here[target.name][0] else "no",
        ]
        for target in targets
    ]
    print_table("Targets", ["target", "SM", "GB", "GB/s", "precisions", "engine", "here"], rows)
    click.echo(f"Any other GPU, by its SM: {' '.join(generic)}")
    click.echo(f"On GPUs {', '.join(f'{name} is the recipe {recipe}' for name, recipe in GPU_ALIASES.items())}")
    click.echo("All recipes, peak rates, versions and sources: --json")
    click.echo("Engines:")
    ways: dict[str, list[str]] = {}
    for target in targets:
        ways.setdefault(here[target.name][1].replace(f"--target {target.name}", "--target TARGET"), []).append(target.name)
    for way, names in ways.items():
        click.echo(f"  {', '.join(names)}: {way}")
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
    click.echo(f"This machine: {machine['processor']}, {machine['cores']} cores, {memory}, {gpu}, {engine}")


def print_plan(plan: Plan) -> None:
    """Tables in 100 columns: one a denoiser and target, growth, what was left out, and the calibration."""
    request = plan.request
    click.echo(
        f"{request.prompt_tokens} prompt and {request.new_tokens} new tokens, batch {request.batch}, dual cache. "
        "Milliseconds of a full pass and\nof a block pass that scores its whole block; tokens a second by tokens "
        "committed a pass. Times are\nlimits by the target's figures, not estimates; *: times the ratio to its limit that "
        "bench measured.\nb: bytes are the limit, a: arithmetic is; >=: by bytes alone, as a rate is unknown."
    )
    groups: dict[tuple[str, str], list[Prediction]] = {}
    for each in plan.predictions:
        groups.setdefault((each.denoiser, each.target), []).append(each)
    for (denoiser, target), predictions in groups.items():
        _print_predictions(denoiser, target, predictions, plan)
    for growth in plan.growth:
        if growth.values:
            _print_growth(growth, plan)
    same: dict[str, dict[str, str]] = {}
    for each in plan.predictions:
        if each.same_as:
            same.setdefault(each.target, {})[each.precision] = ", ".join(each.same_as)
    texts = {target: "; ".join(f"{others} as {name}" for name, others in found.items()) for target, found in same.items()}
    for text, names in _by_value(texts).items():
        click.echo(f"Same figures on {', '.join(names)}: {text}")
    for target, reasons in plan.left_out.items():
        for reason, names in _by_value(reasons).items():
            click.echo(f"Left out on {target}: {', '.join(names)} ({reason})")
    if plan.calibration is not None:
        _print_calibration(plan.calibration)


def _print_predictions(denoiser: str, target: str, predictions: Sequence[Prediction], plan: Plan) -> None:
    from dlm_export.targets import find

    steps = [f"{count:g}" for count in plan.request.tokens_per_pass]
    rows, costs = [], []
    for each in predictions:
        name = [each.precision + (" *" if each.is_calibrated else ""), str(each.block_length)]
        verdict = {True: "", None: " ?", False: " !"}[each.fits]
        speeds = [_three(speed.tokens_per_s) for speed in each.speeds] or ["-"] * len(steps)
        passes = [_pass_shown(each.full_pass), _pass_shown(each.block_pass)]
        rows.append([*name, f"{each.memory_bytes / 1e9:.2f}{verdict}", *passes, *speeds])
        if target in plan.request.prices:
            costs.append([*name, *([_three(speed.cost_per_million_tokens) for speed in each.speeds] or ["-"] * len(steps))])
    device = find(target)
    memory = "" if device.memory_bytes is None else f", {device.memory_bytes / 1e9:g} GB"
    shared = ", which the host's programs share" if device.memory_is_shared else ""
    click.echo(f"\n{denoiser} on {target}{memory}{shared}")
    print_table("", ["precision", "block", "GB", "full ms", "block ms", *(f"tok/s at {step}" for step in steps)], rows)
    if any(each.fits is False for each in predictions):
        click.echo(f"!: more than the memory of {target}")
    if any(each.fits is None for each in predictions):
        click.echo(f"?: the memory of {target} is not known")
    unknown = {each.precision: ", ".join(each.missing) for each in predictions if each.missing}
    for missing, names in _by_value(unknown).items():
        click.echo(f"Unknown: {', '.join(names)}; missing: {missing}")
    if costs:
        click.echo(f"Cost of a million tokens, at {plan.request.prices[target]:g} an hour:")
        print_table("", ["precision", "block", *(f"at {step}" for step in steps)], costs)


def _print_growth(growth: Growth, plan: Plan) -> None:
    """A row a target: cost where it has a price, else milliseconds."""
    rows = [
        [
            target,
            "cost of a million" if target in plan.request.prices else "ms a token",
            *(
                "-"
                if point is None
                else _three(point.ms_per_token if point.cost_per_million_tokens is None else point.cost_per_million_tokens)
                for point in points
            ),
        ]
        for target, points in growth.lines.items()
    ]
    block, step = plan.request.block_lengths[0], plan.request.tokens_per_pass[0]
    what = f"{growth.denoiser}, the fastest precision that fits, block {block}, tokens a pass {step:g}"
    click.echo(f"\nGrowth with {growth.axis}: {what}")
    print_table("", ["target", "", *map(str, growth.values)], rows)


def _print_calibration(calibration: Mapping[str, Any]) -> None:
    """How far from its limits what was measured is, and how well that predicts."""
    low, high = calibration["ratios"]
    what = f"{calibration['file']}: {calibration['passes']} passes in {calibration['precision']}"
    click.echo(f"Calibration by {what}, {low:.2f} to {high:.2f} times their limits")
    if not calibration["is_used"]:
        click.echo(f"Nothing here is in {calibration['precision']} on the cpu: these ratios are used nowhere")
    errors = [abs(error) for error in calibration["leave_one_out_errors"]]
    if errors:
        click.echo(
            f"Each pass predicted from the others: median error {statistics.median(errors):.1%}, at most {max(errors):.1%}"
        )
    else:
        click.echo("One pass was measured: the error of passes cannot be told")
    if (found := calibration["generation"]) is not None:
        click.echo(
            f"Its generation of {found['nfe']} passes: {_three(found['predicted_tokens_per_s'])} tokens/s predicted, "
            f"{_three(found['tokens_per_s'])} measured, error {found['error']:+.1%}"
        )


def _pass_shown(time: PassTime) -> str:
    if time.ms is not None:
        return f"{_three(time.ms)} {time.bound[:1] if time.bound else ''}"
    return "-" if time.bytes_ms is None else f">={_three(time.bytes_ms)} b"


def _three(value: float | None) -> str:
    """Three significant digits, whole numbers from 100 on."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _by_value(named: Mapping[str, str]) -> dict[str, list[str]]:
    """Value -> the names that have it."""
    out: dict[str, list[str]] = {}
    for name, value in named.items():
        out.setdefault(value, []).append(name)
    return out
