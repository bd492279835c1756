"""Defines the commands ``run`` and ``bench``, which run a bundle."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from dlm_export.cli.constraining import constrain_from_option, kind_group, take_constraint
from dlm_export.cli.conversing import (
    chat_option,
    conversation_options,
    take_conversation,
    take_tools,
    tools_group,
)
from dlm_export.cli.options import (
    CHECKPOINT,
    command,
    effort_option,
    file,
    flag,
    group,
    json_option,
    number,
    opening_group,
    option,
    options,
    preset_option,
    prompt_cache_option,
    real,
    set_option,
    special_tokens_option,
    text,
)
from dlm_export.cli.printing import (
    Bars,
    format_bytes,
    how_it_went,
    json_text,
    one_line,
    print_json,
    print_table,
    print_text,
    shown,
)
from dlm_export.cli.values import integers, opening, policy_changes, text_or_stdin
from dlm_export.planning.peer import verdict
from dlm_export.signals import cancelling


@command()
@click.argument("bundle", type=CHECKPOINT)
@options(
    group(
        "Common options",
        text("--prompt", "Text before the answer; - reads stdin.", "TEXT"),
        chat_option,
        number(
            "--max-new-tokens", "Most tokens of the answer.  [default: the bundle's, or 128]", 0
        ),
        preset_option,
        effort_option,
        flag("--watch", help="Show the canvas in the terminal as it is filled."),
        real("--delay", "Seconds per step with --watch.", 10, default=0.15),
        json_option,
    ),
    group(
        "Other input",
        *conversation_options,
        text("--tokens", "Token IDs, separated by commas; the mask tokens are filled.", "LIST"),
        text("--infill", "Text with holes, written <mask> or as the mask token.", "TEXT"),
        text(
            "--hole-tokens",
            "Tokens per hole; several numbers are all tried.  [default: 16, or 1]",
            "LIST",
        ),
        text(
            "--prefix",
            "Start of the answer; a constraint includes this text.",
            "TEXT",
            default="",
            show_default=False,
        ),
        prompt_cache_option,
        special_tokens_option,
    ),
    kind_group(constrain_from_option),
    tools_group("auto"),
    group(
        "Limits",
        option(
            "--stop",
            "stop_strings",
            multiple=True,
            metavar="TEXT",
            help="Stop generating before this text; repeatable.",
        ),
        number("--max-steps", "Stop after this many passes; 0 means no limit.", 0, default=0),
        real("--deadline-ms", "Stop after this many milliseconds; 0 means no limit.", default=0.0),
    ),
    group(
        "Decoding loop",
        number("--new-tokens", "Exact number of mask tokens to fill, without --max-new-tokens.", 0),
        number(
            "--steps", "Passes for the starting canvas; 0 uses the preset's plan.", 0, default=0
        ),
        number("--block-length", "Tokens per block; 0 means one block.", 0),
        real("--threshold", "Lowest score at which a token commits, 0 to 1.", 1),
        text("--score", "confidence, margin, entropy, random."),
        text("--commit", "static, threshold, dynamic, factor, timestep, ..."),
        text("--cache", "none, prefix, dual, block, block-dual."),
        real("--temperature", "Sampling temperature; 0 takes the most likely token."),
        real("--top-p", "Sample from the best tokens with this total probability, 0 to 1.", 1),
        number("--top-k", "Sample from this many of the best tokens; 0 means all.", 0),
        number("--seed", "Seed of sampling and of --score random.", 0),
        set_option,
    ),
    opening_group,
)
def run(
    bundle: Path,
    prompt: str | None,
    tokens: str | None,
    infill: str | None,
    prefix: str,
    hole_tokens: str | None,
    max_new_tokens: int | None,
    new_tokens: int | None,
    preset: str | None,
    effort: str | None,
    steps: int,
    changes: tuple[str, ...],
    max_steps: int,
    deadline_ms: float,
    stop_strings: tuple[str, ...],
    watch: bool,
    delay: float,
    as_json: bool,
    **fields: Any,
) -> None:
    """Generate text with BUNDLE. If you press Ctrl-C, the command stops after the current pass and
    prints the text so far.

    \b
    Example: dlm-export run build/demo --prompt "remind me to call the garage at seven"
    Holes:   dlm-export run build/demo --prompt "remind me to call the garage at seven" \\
               --hole-tokens 2,3,4,5 --infill '{"name":"add_reminder","arguments":{"text":"<mask>","time":"<mask>"}}'
    """
    conversation, tools = take_conversation(fields), take_tools(fields)
    given = sum(value is not None for value in (prompt, conversation, tokens))
    if given > 1 or (given == 0 and infill is None):
        raise click.UsageError("give one of --prompt, --chat, --messages and --tokens, or --infill")
    if infill is not None and tokens is not None:
        raise click.UsageError(
            "--infill takes text: remove --tokens, or put mask tokens among them and remove --infill"
        )
    if hole_tokens is not None and infill is None:
        raise click.UsageError("--hole-tokens needs --infill")
    if infill is not None and new_tokens is not None:
        raise click.UsageError(
            "--infill does not take --new-tokens: use --hole-tokens for the length of holes"
        )
    if prefix and (infill is not None or (prompt is None and conversation is None)):
        raise click.UsageError("--prefix needs --prompt, --chat or --messages, without --infill")
    if watch and infill is not None:
        raise click.UsageError(
            "--watch shows one canvas, and --infill may try several: remove one of them"
        )
    cancel = threading.Event()
    request: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "new_tokens": new_tokens,
        "preset": preset,
        "effort": effort,
        "steps": steps,
        "max_steps": max_steps,
        "deadline_ms": deadline_ms,
        "stop_strings": stop_strings,
        "cancel": cancel,
    }
    how = opening(fields)
    request |= take_constraint(fields, infill is not None, "tools" in tools)
    policy = {name: value for name, value in fields.items() if value is not None}
    request |= policy | policy_changes(changes) | tools
    if prompt is not None:
        request["prompt"] = text_or_stdin(prompt)
    elif conversation is not None:
        request["chat"] = conversation
    elif tokens is not None:
        request["tokens"] = integers("--tokens", tokens)
    if infill is not None:
        del request["new_tokens"]
        if max_new_tokens is None:
            del request["max_new_tokens"]
    elif prefix:
        request["prefix"] = prefix
    with how.open(bundle) as opened, cancelling(cancel):
        if watch:
            from dlm_export.cli.watch import watch as show

            result = show(opened, request, delay)
        elif infill is not None:
            if max_new_tokens is not None and not opened.resizes:
                raise click.UsageError(
                    "--infill does not take --max-new-tokens, unless the denoiser changes the length of holes: use "
                    "--hole-tokens for the length of holes"
                )
            lengths = None if hole_tokens is None else [integers("--hole-tokens", hole_tokens)]
            result = opened.infill(infill, lengths=lengths, **request).generation
        else:
            result = opened.generate(**request)
        if as_json:
            click.echo(json_text(asdict(result), separators=(",", ":")))
            return
        print_text(" ".join(map(str, result.tokens)) if result.text is None else result.text)
        click.echo(f"[{how_it_went(result, opened.engine)}]", err=True)


@command()
@click.argument("bundle", type=CHECKPOINT)
@options(
    group(
        "Common options",
        file("--data", "JSONL of prompts or messages, to report p50, p95 and p99."),
        number("--samples", "Most prompts to use from --data.", default=64),
        preset_option,
        set_option,
        text("--batch", "Requests that run together, such as 1,4,8.  [default: 1]", "LIST"),
        json_option,
    ),
    group(
        "What to measure",
        number("--prompt-tokens", "Random tokens before the answer.  [default: 128]", 0),
        number("--new-tokens", "Mask tokens to fill.  [default: 128]"),
        text("--passes", "tokens,cached,rows of each pass; separate passes by semicolons.", "LIST"),
        number(
            "--rounds", "Runs of each pass; generations run a fifth as often.", 3, 1000, default=15
        ),
        number("--prefix", "Also measure requests that share their first N tokens."),
        option(
            "--peer-token-ms",
            type=click.FloatRange(0, min_open=True),
            metavar="X",
            help="Milliseconds per token of the autoregressive model to compare with.",
        ),
        flag("--cost", help="Fit the cost of each pass, token and row, which schedulers use."),
    ),
    opening_group,
)
def bench(
    bundle: Path,
    passes: str | None,
    batch: str | None,
    changes: tuple[str, ...],
    as_json: bool,
    **values: Any,
) -> None:
    """Measure the speed and memory of BUNDLE on this machine.

    The command measures single passes and whole generations from random prompts. With --data, the
    command also measures generations from the prompts in a file, one at a time and in a scheduler.
    Each generation from a file's prompt stops at its end token.

    Example: dlm-export bench build/demo --data examples/demo-denoiser/calibration.jsonl
    """
    from dlm_export.planning import bench as bencher

    sizes = None if passes is None else bencher.parse_passes(passes)
    batches = (1,) if batch is None else bencher.parse_batches(batch)
    policy = policy_changes(changes)
    with Bars() as bars:
        options = bencher.BenchOptions(
            opening(values), passes=sizes, batches=batches, policy=policy, **values
        )
        result = bencher.bench(bundle, options, bars)
    if as_json:
        print_json(result)
    else:
        print_bench(result)


def _loop_of(made: Mapping[str, Any]) -> str:
    """Describe the decoding loop of a measured generation: a preset, and its changed fields."""
    return ", ".join(
        [
            f"preset {made['preset']}",
            *(f"{name} {value}" for name, value in made["changes"].items()),
        ]
    )


def print_bench(result: Mapping[str, Any]) -> None:
    bundle, machine, rates = result["bundle"], result["machine"], result["roofline"]
    peer = result["peer"]
    threads = f"{result['threads']} threads" if result["threads"] else "all cores"
    click.echo(
        one_line(
            f"{bundle['path']}: {bundle['precision']}, {bundle['parameters']:,} parameters, {bundle['engine']}, {threads}"
        )
    )
    click.echo(
        f"Machine: {machine['processor']}, {machine['cores']} cores, {format_bytes(machine['memory_bytes'])}"
    )
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
            shown(row["limit_ms"], ".2f"),
            shown(row["ratio"], ".2f"),
            *([] if peer is None else [f"{row['break_even_tokens']:.2f}"]),
        ]
        for row in result["passes"]
    ]
    titles = ["batch", "tokens", "cached", "rows", "ms", "quartiles", "limit, ms", "of the limit"]
    print_table("Passes", titles + ([] if peer is None else ["peer's tokens"]), rows)
    if result["cost"] is not None:
        each = "{pass_ms:.3g} ms a pass, {token_ms:.3g} a token, {row_ms:.3g} a row, {pair_ms:.3g} a token and a position"
        error = "off by {median_error:.0%} in the median, {worst_error:.0%} at worst"
        click.echo(f"Cost: {each}; {error}".format(**result["cost"]))
    made, memory = result["generation"], result["memory"]
    click.echo(
        f"Generation: {made['prompt_tokens']} given, {made['new_tokens']} new tokens, {_loop_of(made)}: "
        f"{made['nfe']} passes, {made['seconds']:.3f} s, {made['tokens_per_s']:.1f} tokens/s"
    )
    if result["energy_source"] is not None:
        told = ", ".join(
            f"{row['joules_per_token']:.3g} J per token with batch {row['batch']}"
            for row in result["batches"]
        )
        click.echo(f"Energy ({result['energy_source']}): {told}")
    rows = [
        [part, f"{seconds * 1e3:.2f}", f"{seconds / made['seconds']:.2%}"]
        for part, seconds in made["parts"].items()
    ]
    print_table("Time by part", ["part", "ms", "share"], rows)
    if len(result["batches"]) > 1:
        rows = [
            [
                str(row["batch"]),
                f"{row['seconds']:.3f}",
                f"{row['tokens_per_s']:.1f}",
                f"{row['speedup']:.2f}",
            ]
            for row in result["batches"]
        ]
        print_table(
            "Requests at once, of that length each", ["batch", "s", "tokens/s", "times one's"], rows
        )
    if (sent := result["requests"]) is not None:
        click.echo(
            f"Requests: {sent['count']} prompts of {sent['data']}, at most {sent['max_new_tokens']} new tokens: "
            f"p50 {sent['p50_ms']:.1f} ms, p95 {sent['p95_ms']:.1f} ms, p99 {sent['p99_ms']:.1f} ms, "
            f"{sent['mean_nfe']:.2f} passes on average, "
            f"{sent['ms_per_pass']:.2f} ms and {sent['tokens_per_pass']:.2f} tokens a pass, {sent['tokens_per_s']:.1f} tokens/s"
        )
        rows = [
            [
                str(row["running"]),
                f"{row['shares']:.2f}",
                f"{row['ms_per_pass']:.2f}",
                f"{1e3 * row['shares'] / row['ms_per_pass'] / sent['mean_nfe']:.1f}",
            ]
            for row in sent["loads"]
        ]
        print_table(
            "These prompts in a scheduler",
            ["running", "requests a pass", "ms a pass", "requests/s"],
            rows,
        )
    if (shared := result["prefix"]) is not None:
        _print_prefix(shared)
    if peer is not None:
        click.echo(verdict(peer))
    click.echo(
        f"Memory: {format_bytes(memory['peak_rss_bytes'])} at the generation's peak, weights "
        f"{format_bytes(memory['weights_bytes'])}, keys and values {format_bytes(memory['cache_bytes'])}"
        + ("" if memory["ratio"] is None else f": {memory['ratio']:.2f} times both")
    )
    for note in result["notes"]:
        click.echo(f"Note: {note}", err=True)


def _print_prefix(shared: Mapping[str, Any]) -> None:
    """Print the measurements of requests that start with the same tokens."""
    click.echo(
        f"Prompts of {shared['shared_tokens']} shared and {shared['own_tokens']} own tokens, "
        f"{shared['new_tokens']} new tokens, {_loop_of(shared)}"
    )
    rows = [
        [
            name,
            f"{side['first_tokens_ms']:.1f}",
            " .. ".join(f"{value:.1f}" for value in side["first_tokens_range_ms"]),
            f"{side['tokens_per_s']:.1f}",
            " .. ".join(f"{value:.1f}" for value in side["tokens_per_s_range"]),
            str(side["cached_tokens"]),
            format_bytes(side["cache_bytes"]),
        ]
        for name, side in ((name, shared[name]) for name in ("reused", "computed"))
    ]
    titles = ["prompts are", "first tokens, ms", "range", "tokens/s", "range", "reused", "cache"]
    title = f"One request alone, and {shared['requests']} requests at once"
    print_table(title, titles, rows)
    click.echo(f"{shared['differing']} of {shared['compared']} canvases differ")
