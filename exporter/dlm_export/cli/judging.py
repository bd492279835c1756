"""Defines the commands ``verify``, ``compare`` and ``report``, which check bundles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dlm_export.cli.options import (
    BUDGETS,
    CHECKPOINT,
    adapter_option,
    budget_group,
    candidate_set_option,
    command,
    cpu_opening_group,
    file,
    flag,
    folder,
    force_option,
    group,
    json_option,
    judge_group,
    number,
    opening_group,
    options,
    output_option,
    preset_option,
    prompts_option,
)
from dlm_export.cli.printing import (
    Bars,
    format_bytes,
    one_line,
    print_json,
    print_table,
    shown,
    warn,
)
from dlm_export.cli.values import budgets, effort, opening, policy_changes, refuse

if TYPE_CHECKING:
    from dlm_export.judging.accuracy.run import JudgingOptions
    from dlm_export.judging.accuracy.verdict import Judgement
    from dlm_export.judging.parity.verdict import Parity
    from dlm_export.sources import Source


@command()
@click.argument("bundle", type=CHECKPOINT)
@options(
    group(
        "Common options",
        folder(
            "--checkpoint",
            "Checkpoint or full-precision bundle that BUNDLE was built from.",
            CHECKPOINT,
        ),
        adapter_option,
        file("--golden", "Golden file to compare with instead (see `dlm-export capture`)."),
        folder("--report", "Write accuracy.json and report.html here, if quantised."),
        flag("--force", default=None, help="Replace the report if it already exists."),
        json_option,
    ),
    group(
        "Parity of a full-precision bundle",
        prompts_option,
        number("--count", "Prompts to compare.", most=1000, default=4),
        number("--new-tokens", "Mask tokens per canvas.", default=32),
    ),
    judge_group,
    budget_group,
    cpu_opening_group,
)
def verify(bundle: Path, checkpoint: Path | None, golden: Path | None, **values: Any) -> None:
    """Compare BUNDLE with its checkpoint, or with a golden file.

    The checkpoint runs in PyTorch. If BUNDLE is in full precision, the command compares logits and
    generated texts. If BUNDLE is quantised, the command uses the samples of --data to measure
    BUNDLE's accuracy.

    With --golden, the command compares BUNDLE's logits with a golden file, which contains logits of
    the released code. The comparison with a golden file needs neither torch nor the checkpoint. If
    a tolerance or a budget is exceeded, the exit code is 3.

    Example: dlm-export verify build/demo-int8 --checkpoint examples/demo-denoiser --max-ce-increase
    0.01
    """
    if (checkpoint is None) == (golden is None):
        raise click.UsageError("give one of --checkpoint and --golden")
    if checkpoint is None:
        assert golden is not None
        without_effect = ("adapter", "prompts", "data", "calib_preset", "report", "force", *BUDGETS)
        refuse(values, without_effect, "has no effect with --golden")
        _verify_golden(bundle, golden, values)
        return
    import dlm_runtime
    from dlm_export import graph
    from dlm_export.judging.parity import by_layer
    from dlm_export.judging.parity.against_torch import by_layers, check_parity, parity_units
    from dlm_export.judging.parity.canvases import random_prompts, read_prompts
    from dlm_export.judging.parity.verdict import require_parity
    from dlm_export.opening import ON_CPU
    from dlm_export.sources import open_source_of
    from dlm_runtime.manifest import check_manifest

    with dlm_runtime.open(bundle, engine="none") as opened:
        manifest = opened.manifest
        check_manifest(manifest, bundle)
        source = open_source_of(bundle, manifest, checkpoint, values["adapter"])
        if manifest["precision"]["name"] not in graph.PRECISIONS:
            why = "is for bundles in fp32 or fp16; samples to judge by go into --data"
            refuse(values, ("prompts",), why)
            _verify_quantised(bundle, source, values)
            return
        why = "is for quantised bundles; parity has tolerances of its own"
        refuse(values, (*BUDGETS, "data", "calib_preset", "report", "force"), why)
        presets = {name: opened.policy(name) for name in manifest["loop"]["presets"]}
        count, prompts = values["count"], values["prompts"]
        if prompts is None:
            chosen = random_prompts(source.network, count, values["seed"])
        else:
            chosen = read_prompts(prompts, opened.tokenizer, count)
    where = opening(values)
    with Bars() as bars:
        bars.start("check parity", parity_units(presets, source.network, len(chosen)))
        parity = check_parity(
            bundle,
            source,
            presets,
            manifest["precision"]["name"],
            cache_dtype=manifest["loop"]["graph"]["cache_dtype"],
            prompts=chosen,
            max_new_tokens=values["new_tokens"],
            seed=values["seed"],
            opening=where,
            progress=bars,
        )
        if parity.misses and source.network.mixtures() and where == ON_CPU:
            bars.start("check layers", by_layer.units(source.network))
            parity = by_layers(parity, bundle, manifest, source, bars.advance)
    if values["as_json"]:
        print_json(parity.as_dict())
    else:
        print_parity(parity)
    require_parity(parity, str(bundle))


def _verify_golden(bundle: Path, path: Path, values: dict[str, Any]) -> None:
    from dlm_export.judging.parity import against_golden, golden
    from dlm_export.judging.parity.verdict import require_parity

    found = golden.load(path)
    with Bars() as bars:
        parity = against_golden.check(bundle, path, found, opening=opening(values), progress=bars)
    if values["as_json"]:
        print_json(parity.as_dict() | {"golden": asdict(found.provenance)})
    else:
        print_parity(parity)
    require_parity(parity, f"{bundle}, compared with {parity.reference}")


def _judging(values: dict[str, Any]) -> JudgingOptions:
    """Turn the values of a command's options into ``JudgingOptions``."""
    from dlm_export.judging.accuracy.run import JudgingOptions
    from dlm_export.quantising.samples import CalibrationOptions

    data = CalibrationOptions(
        data=values["data"], seed=values["seed"], preset=values["calib_preset"]
    )
    return JudgingOptions(data, effort(values), budgets(values), opening(values))


def _verify_quantised(bundle: Path, source: Source, values: dict[str, Any]) -> None:
    from dlm_export.judging.accuracy.files import claimed_files, write_files
    from dlm_export.judging.accuracy.run import judge_bundle
    from dlm_export.judging.accuracy.verdict import check_budgets
    from dlm_export.judging.report.page import ACCURACY_FILE, REPORT_FILE

    folder: Path | None = values["report"]
    if folder is None:
        refuse(values, ("force",), "is for --report")
    with (
        nullcontext()
        if folder is None
        else claimed_files(folder, force=bool(values["force"])) as files
    ):
        with Bars() as bars:
            judgement = judge_bundle(bundle, source, _judging(values), bars, warn)
        if files is not None:
            write_files(files, bundle, judgement)
    if folder is not None:
        for path in (folder / ACCURACY_FILE, folder / REPORT_FILE):
            click.echo(f"{path} {format_bytes(path.stat().st_size)}", err=True)
    if values["as_json"]:
        print_json(judgement.as_dict())
    else:
        print_judgement(judgement)
    check_budgets(judgement, str(bundle))


@command()
@click.argument("reference", type=CHECKPOINT)
@click.argument("candidate", type=CHECKPOINT)
@options(
    judge_group,
    group("The candidate's loop", candidate_set_option),
    budget_group,
    cpu_opening_group,
    group("Output", json_option),
)
def compare(
    reference: Path,
    candidate: Path,
    candidate_changes: tuple[str, ...],
    **values: Any,
) -> None:
    """Measure how much accuracy CANDIDATE loses against REFERENCE.

    CANDIDATE and REFERENCE are bundles. The native runtime runs both bundles. With --candidate-set,
    both may be the same bundle, to measure how much accuracy a different policy loses.

    Example: dlm-export compare build/demo build/demo-int4 --data examples/demo/heldout.jsonl
    """
    from dlm_export.judging.accuracy.run import compare_bundles
    from dlm_export.judging.accuracy.verdict import check_budgets

    with Bars() as bars:
        judgement = compare_bundles(
            reference,
            candidate,
            _judging(values),
            bars,
            warn,
            policy_changes(candidate_changes, "--candidate-set"),
        )
    if values["as_json"]:
        print_json(judgement.as_dict())
    else:
        print_judgement(judgement)
    check_budgets(judgement, str(candidate))


@command()
@click.argument("bundles", nargs=-1, required=True, type=CHECKPOINT)
@options(
    group(
        "Common options",
        output_option("Page to write, such as compare.html."),
        force_option,
        flag("--speed", help="Also time the bundles here; all bundles are open at once."),
        number("--rounds", "Timed generations of each bundle.  [default: 5]", 3, 1000),
        preset_option,
        json_option,
    ),
    opening_group,
)
def report(
    bundles: tuple[Path, ...], output: Path, force: bool, speed: bool, as_json: bool, **values: Any
) -> None:
    """Write a page that compares bundles of one checkpoint.

    The page shows the size, accuracy and speed of BUNDLES. The command does not measure accuracy,
    because each bundle's build has recorded the accuracy in the bundle. All builds must have
    measured accuracy on the same data.

    Example: dlm-export report build/demo build/demo-int8 build/demo-int4 --speed -o
    build/compare.html
    """
    from dlm_export.judging.report import comparison
    from dlm_export.judging.report.page import require_matplotlib
    from dlm_export.machine import this_machine
    from dlm_export.outputs import check_outside, claimed_file
    from dlm_export.planning import bench

    if not speed:
        refuse(values, ("rounds", "preset"), "is for timing, which --speed asks for")
    check_outside(output, *bundles)
    require_matplotlib()
    with claimed_file(output, force=force) as page:
        entries, speeds, machine = comparison.read_entries(bundles), None, None
        if speed:
            options = bench.BenchOptions(
                opening(values), preset=values["preset"], rounds=values["rounds"] or 5
            )
            with Bars() as bars:
                speeds, machine = bench.side_by_side(bundles, options, bars), this_machine()
        comparison.write_comparison(page, entries, speeds, machine)
    if as_json:
        print_json({"bundles": comparison.rows_of(entries, speeds), "machine": machine})
    click.echo(f"{output} {format_bytes(output.stat().st_size)}", err=as_json)


def print_parity(parity: Parity) -> None:
    """Print how much logits and generated texts differ, and whether the tolerances are met."""
    rows = [
        [
            f"{row.mask_ratio:.2f}",
            f"{row.worst_difference:.2e}",
            f"{row.relative:.1e}",
            f"{row.argmax_equal}/{row.rows}",
        ]
        for row in parity.graph
    ]
    columns = ["mask ratio", "worst logit difference", "of range", "argmax equal"]
    print_table("Logits against the reference", columns, rows)
    rows = [
        [
            row.name,
            f"{row.canvases_equal}/{row.canvases}",
            str(row.nfe),
            "yes" if row.nfe_equal else "no",
        ]
        for row in parity.loop
    ]
    share = ""
    if rows:
        print_table(
            "Loop against the reference", ["preset", "canvases equal", "NFE", "NFE equal"], rows
        )
        share = f", {parity.tolerance.agreement:.0%} of canvases equal"
    verdict = "FAILS" if parity.misses else "Holds"
    limit = f"allowed: logits within {parity.tolerance.passed_on:.1e} of their range{share}"
    how = f", layer by layer: {shown_parity(parity)}" if parity.layers else f" ({limit})"
    click.echo(f"{verdict} at {parity.precision}{how}")
    click.echo(one_line(f"Compared with {parity.reference}"))


def shown_parity(parity: Parity) -> str:
    """Describe what a parity check compared, and the largest difference that the check found."""
    from dlm_calibration.precisions import FORMATS
    from dlm_export.judging.parity.verdict import LOGITS, ROUTER

    pass_apart = max(row.relative for row in parity.graph)
    limit = parity.tolerance
    equal, total = (
        sum(getattr(row, name) for row in parity.loop) for name in ("canvases_equal", "canvases")
    )
    if parity.layers:
        rows = [row for row in parity.layers if row.format != ROUTER]
        count = sum(row.layer != LOGITS for row in rows)
        worst = max(row.worst for row in rows)
        is_quantised = "quantised" in parity.precision
        several = "s" * (count != 1)
        kind = f"quantised layer{several}" if is_quantised else f"mixture{several} of experts"
        flips = (
            ", in which rounding differences add up,"
            if any(FORMATS[row.format].activations for row in rows)
            else ""
        )
        # Layers of a bundle in full precision are compared only after whole passes missed their
        # limits (see ``against_torch.by_layers``).
        whole = (
            f"A whole pass{flips} has no limit here: logits of random prompts within {pass_apart:.1e}"
            if is_quantised
            else "Whole passes missed their limits, as they may if two experts suit a token almost equally: logits of "
            f"random prompts within {pass_apart:.1e}, {equal} of {total} canvases equal"
        )
        return (
            f"{count} {kind} and the operators between them, each from equal inputs, within {worst:.1e} of their range "
            f"({limit.passed_on:.1e} allowed). {whole}"
        )
    return (
        f"logits within {pass_apart:.1e} of their range ({limit.passed_on:.1e} allowed), {equal} of {total} canvases of random "
        f"prompts equal ({limit.agreement:.0%} required)"
    )


def print_judgement(judgement: Judgement) -> None:
    """Print how much accuracy quantisation costs.

    The first line says whether the samples show a loss. A table shows the results for each mask
    ratio. Every other result is on its own line after the table.
    """
    from dlm_export.judging.report import cost

    click.echo(f"What quantisation cost: {cost.sentence(judgement.as_dict())}")
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
    print_table(
        f"{judgement.candidate} against {judgement.reference}",
        columns,
        [*rows, _loss_row("all", judgement.overall)],
    )
    if (passes := judgement.speculation) is not None:
        print_table(
            "Passes of self-speculation",
            ["passes", *columns[1:]],
            [_loss_row(kind, row) for kind, row in passes.items()],
        )
    frontier = judgement.frontier
    if frontier is None:
        reason = (
            "this denoiser has no mask token"
            if passes is None
            else "the passes of self-speculation depend on drafts"
        )
        click.echo(f"Frontier: not compared, because {reason}")
    else:
        click.echo(
            f"Frontier: {frontier['flips']} of {frontier['committed']} tokens that both commit differ "
            f"({_interval(frontier['flip_rate_interval'], '.1%')}), Jaccard of the committed sets {frontier['jaccard']:.3f}"
        )
    if judgement.free_running is None:
        click.echo("Runs: no text was generated (--judge full)")
    else:
        _print_runs(judgement.free_running)
    if (own := judgement.candidate_loop) is not None:
        changed = ", ".join(
            f"{name} {value}"
            for name, value in own["policy"].items()
            if value != judgement.policy[name]
        )
        click.echo(
            f"Only the candidate's loop has {changed or 'no changes'}; it reused {own['cached_tokens']} of "
            f"{own['prompt_tokens']} prompt tokens"
        )
    if (floor := judgement.noise_floor) is not None:
        click.echo(
            f"For comparison, bf16: cross-entropy {shown(floor['ce_increase'], '+.2%')}, top-1 agreement {floor['top1']:.1%}"
        )
    click.echo(
        f"Judged on {judgement.data['samples']} samples (--judge {judgement.effort}); intervals are 95% intervals"
    )
    for budget in judgement.budgets:
        verdict = "holds" if budget["passed"] else "MISSED"
        if not budget["is_clear"]:
            verdict += f", but the interval includes the limit ({_interval(budget['interval'], '.4g')}) (--judged)"
        click.echo(
            f"Budget {budget['name']} {budget['limit']:g}: {shown(budget['value'], '.4g')}, {verdict}"
        )


def _print_runs(free: Mapping[str, Any]) -> None:
    """Print how much the generated texts differ."""
    click.echo(
        f"Texts of {free['prompts']} prompts: {free['exact_match']:.1%} equal "
        f"({_interval(free['exact_match_interval'], '.1%')}), tokens {free['token_agreement']:.1%}, NFE ratio "
        f"{shown(free['nfe_ratio'], '.3f')} ({_interval(free['nfe_ratio_interval'], '.3f')})"
    )
    if (right := free["right_answers"]) is not None:
        told = ", the reference ".join(
            f"{right[f'{side}']:.1%} of {right['prompts']} ({_interval(right[f'{side}_interval'], '.1%')})"
            for side in ("candidate", "reference")
        )
        click.echo(f"Right answers: {told}")


def _interval(pair: Sequence[float] | None, form: str) -> str:
    if pair is None:
        return "no interval"
    return (
        f"{pair[0]:{form}} to {pair[1]:{form}}" if pair[0] < pair[1] else "the same in every sample"
    )


def _loss_row(name: str, row: Mapping[str, Any]) -> list[str]:
    interval = row["ce_increase_interval"]
    return [
        name,
        str(row["positions"]),
        shown(row["candidate_ce"], ".4f"),
        shown(row["reference_ce"], ".4f"),
        shown(row["ce_increase"], "+.2%"),
        "" if interval is None else f"{interval[0]:+.2%} {interval[1]:+.2%}",
        shown(row["top1"], ".4f"),
        shown(row["top5"], ".4f"),
        shown(row["kl_mean"], ".1e"),
        shown(row["kl_p95"], ".1e"),
    ]
